"""One query of grouped heads: kernels of a CPU get the group as queries of one head."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.ops.attention.reference import attention_reference


def need(kernel: str) -> None:
    """Skip where this machine refuses the kernel for a call of one query and groups of heads."""
    query, key = torch.randn(2, 1, 8, 16), torch.randn(2, 21, 2, 16)
    why = lz.explain("attention", query, key, key, False, layout="BSHD").reasons(kernel)
    if why:
        pytest.skip("; ".join(map(str, why)))


@pytest.mark.parametrize("kernel", ["torch.sdpa.cpu_flash", "zentorch.sdpa"])
@pytest.mark.parametrize("mask", [None, "shared", "by head", "two axes", "bool", "three axes"])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_a_group_of_heads_is_a_block_of_queries(kernel: str, mask: str | None, layout: str) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 1, 8, 16), torch.randn(2, 21, 2, 16), torch.randn(2, 21, 2, 16)
    shapes = {"shared": (2, 1, 1, 21), "by head": (1, 8, 1, 21), "two axes": (1, 21), "three axes": (8, 1, 21)}
    masks = {name: torch.randn(shape) for name, shape in shapes.items()} | {"bool": torch.rand(2, 8, 1, 21) > 0.4}
    given = masks.get(mask or "")
    need(kernel)
    expected = attention_reference(query, key, value, causal=False, attn_mask=given)
    tensors = (query, key, value) if layout == "BSHD" else tuple(each.transpose(1, 2) for each in (query, key, value))
    with lz.scope(locks={"attention.gqa.decode": kernel}):
        output = lz.attention(*tensors, False, layout=layout, attn_mask=given)
    assert output.shape == tensors[0].shape
    torch.testing.assert_close(output if layout == "BSHD" else output.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)


def test_the_log_sum_exp_keeps_the_heads() -> None:
    query, key, value = torch.randn(2, 1, 8, 16), torch.randn(2, 21, 2, 16), torch.randn(2, 21, 2, 16)
    expected = attention_reference(query, key, value, causal=False, return_lse=True)
    with lz.scope(locks={"attention.gqa.decode": "torch.sdpa.cpu_flash"}):
        got = lz.attention(query, key, value, False, layout="BSHD", return_lse=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_gradients_pass_the_views() -> None:
    grads = []
    for kernel in ("torch.sdpa.cpu_flash", "reference.attention.gqa.decode"):
        torch.manual_seed(0)
        leaves = [torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((1, 8), (21, 2), (21, 2))]
        with lz.scope(locks={"attention.gqa.decode": kernel}):
            lz.attention(*leaves, False, layout="BSHD").square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["torch.sdpa.cpu_flash", "zentorch.sdpa"])
def test_heads_that_share_their_memory_become_rows_of_their_own(kernel: str) -> None:
    """As queries of one head they are rows at a stride of 0, which zentorch refuses: the call failed there."""
    need(kernel)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 1, 1, 64).expand(1, 1, 16, 64),
        torch.randn(1, 17, 4, 64),
        torch.randn(1, 17, 4, 64),
    )
    with lz.scope(locks={"attention.gqa.decode": kernel}):
        lz.attention(query.contiguous(), key, value, False, layout="BSHD")  # a plan that must not be taken for the next
        output = lz.attention(query, key, value, False, layout="BSHD")
    torch.testing.assert_close(output, attention_reference(query, key, value, causal=False), rtol=1e-4, atol=1e-4)
