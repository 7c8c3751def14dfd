"""Kernels that compute half precision in float32: results, their dtype, and the edges of blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from drawing import at_once
from layerzero.backends.torch import cpu_half

HALVES = [torch.bfloat16, torch.float16]


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("outputs", [1, 16, 63, 64, 65, 129])
def test_blocks_end_where_weights_do(monkeypatch, outputs, dtype):
    monkeypatch.setattr(cpu_half, "BLOCK_BYTES", 64 * 40 * 4)  # 64 rows, or fewer of equal blocks
    rows, weight, bias = torch.randn(3, 5, 40).to(dtype), torch.randn(outputs, 40).to(dtype), torch.randn(outputs)
    expected = functional.linear(rows.float(), weight.float(), bias.to(dtype).float())
    got = cpu_half.product(rows.float(), weight, bias.to(dtype))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cpu_half.product(rows[0, 0].float(), weight), expected[0, 0] - bias.to(dtype).float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("more", [{}, {"activation": "gelu"}, {"activation": "relu2"}, {"out_dtype": torch.float32}])
def test_a_product_has_the_dtype_that_was_asked_for_and_is_as_near_as_torchs(dtype, more):
    rows, weight, bias = (torch.randn(size).to(dtype) / 8 for size in ((4, 16, 64), (96, 64), (96,)))
    exact = lz.linear(rows.double(), weight.double(), bias.double(), activation=more.get("activation"))
    found = {}
    for kernel in ("torch.linear_then" if more else "torch.linear", "torch.linear_widened"):
        lz.lock("mlp.linear", kernel)
        found[kernel] = got = lz.linear(rows, weight, bias, **more)
        assert got.dtype == more.get("out_dtype", dtype)
        lz.unlock("mlp.linear")
    theirs, ours = (error(each, exact) for each in found.values())
    assert ours <= 1.01 * theirs + 1e-7


def attention_call(dtype, queries, keys, heads=4, kv_heads=2, batch=3, size=16):
    torch.manual_seed(0)
    query = torch.randn(batch, heads, queries, size).to(dtype)
    return query, *(torch.randn(batch, kv_heads, keys, size).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 6, 100])
@pytest.mark.parametrize("mask", [None, (5, 20), (3, 1, 5, 20), (1, 4, 5, 20), (3, 4, 1, 20)], ids=str)
def test_attention_takes_heads_in_blocks(monkeypatch, dtype, heads_at_once, mask):
    head_bytes = 8 * (20 + 2 * 5) * 16
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cpu_half, "BLOCK_BYTES", heads_at_once * head_bytes)
    query, key, value = attention_call(dtype, 5, 20)
    bias = None if mask is None else torch.randn(mask).to(dtype)
    sizes = []

    def operator(query, *given, **named):
        sizes.append(query.shape[0] * query.shape[1] // 2)
        assert query.dtype is torch.float32
        return torch._scaled_dot_product_flash_attention_for_cpu(query, *given, **named)

    output, lse = cpu_half.attended(operator)(query, key, value, 0.0, False, attn_mask=bias, scale=0.3)
    wide = [each.float() for each in (query, key, value)]
    expected = torch._scaled_dot_product_flash_attention_for_cpu(
        *wide, 0.0, False, attn_mask=None if bias is None else bias.float(), scale=0.3
    )
    assert output.dtype is dtype
    assert lse.dtype is torch.float32
    assert torch.equal(output, expected[0].to(dtype))
    torch.testing.assert_close(lse, expected[1])
    assert max(sizes) <= heads_at_once
    assert sum(sizes) == 6


@at_once("dtype", HALVES)
@at_once("more", [{}, {"causal": True}, {"return_lse": True}, {"scale": 0.5}])
@at_once("queries, keys", [(1, 40), (9, 9), (33, 33)])
def test_attention_is_as_near_as_torchs(dtype, more, queries, keys):
    more = more if queries == keys else {**more, "causal": False}
    call = attention_call(dtype, queries, keys)
    exact = lz.attention(*[each.double() for each in call], layout="BHSD", **more)
    found = {}
    for kernel in ("torch.sdpa.cpu_flash", "torch.sdpa.cpu_flash_widened"):
        with lz.scope(locks={lz.explain("attention", *call, layout="BHSD", **more).operation: kernel}):
            found[kernel] = lz.attention(*call, layout="BHSD", **more)
    if more.get("return_lse"):
        assert all(lse.dtype is torch.float32 for _, lse in found.values())
        found, exact = {name: each for name, (each, _) in found.items()}, exact[0]
    theirs, ours = (error(each, exact) for each in found.values())
    assert found["torch.sdpa.cpu_flash_widened"].dtype is dtype
    assert ours <= 1.01 * theirs + 1e-7


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lengths", [((3, 0, 5), (7, 2, 5)), ((1, 1), (40, 9))], ids=str)
def test_attention_of_unlike_lengths_is_as_near_as_torchs(dtype, lengths):
    torch.manual_seed(0)
    (rows, keys), starts = lengths, [torch.tensor(each).cumsum(0).int() for each in lengths]
    starts = [torch.nn.functional.pad(each, (1, 0)) for each in starts]
    tokens = [torch.randn(sum(count), 4, 16).to(dtype) for count in (rows, keys, keys)]
    exact = lz.ragged_attention(*[each.double() for each in tokens], *starts, causal=False)
    found = {}
    for kernel in ("torch.ragged_sdpa", "torch.ragged_sdpa_widened"):
        lz.lock("attention.standard.prefill.ragged", kernel)
        found[kernel] = lz.ragged_attention(*tokens, *starts, causal=False)
    theirs, ours = (error(each, exact) for each in found.values())
    assert found["torch.ragged_sdpa_widened"].dtype is dtype
    assert ours <= 1.01 * theirs + 1e-7


def kept_calls(dtype):
    torch.manual_seed(0)
    rows, up, gate, down, bias = (
        torch.randn(size).to(dtype) / 8 for size in ((2, 5, 64), (96, 64), (96, 64), (64, 96), (96,))
    )

    def packed(**weights):
        return {name: lz.PackedWeight(weight) for name, weight in weights.items()}

    return {
        "mlp.linear": (lz.linear, (rows, up, bias), {"activation": "gelu"}, packed(packed=up)),
        "mlp.fused.gated": (
            lz.mlp,
            (rows, up, down, gate),
            {"up_bias": bias, "activation": "silu"},
            packed(packed_up=up, packed_down=down, packed_gate=gate),
        ),
        "mlp.qkv": (lz.qkv_linear, (rows, up, gate, gate), {}, packed(packed_q=up, packed_k=gate, packed_v=gate)),
    }


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("operation", "kernel"), [
    ("mlp.linear", "torch.onednn_linear_packed_widened"),
    ("mlp.fused.gated", "torch.onednn_mlp_packed_widened.gated"),
    ("mlp.qkv", "torch.onednn_qkv_packed_widened"),
])  # fmt: skip
def test_weights_kept_in_float32_are_as_near_as_torchs(dtype, operation, kernel):
    function, call, more, packed = kept_calls(dtype)[operation]

    def of(given):
        return torch.cat([each.double() for each in (given if isinstance(given, tuple) else (given,))], -1)

    wide = (
        [each.double() for each in call],
        {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in more.items()},
    )
    exact, theirs = of(function(*wide[0], **wide[1])), of(function(*call, **more))
    lz.lock(operation, kernel)
    ours = function(*call, **more, **packed)
    assert {each.dtype for each in (ours if isinstance(ours, tuple) else (ours,))} == {dtype}
    assert error(of(ours), exact) <= 1.01 * error(theirs, exact) + 1e-7
    for each in packed.values():
        assert each.bytes >= 4 * each.weight.numel()
