"""Calls of empty tensors mean something; layouts and dtypes that a call gets without naming them."""

from __future__ import annotations

import pytest
import torch
from planted_calls import INF, attention, rms, zeros

import layerzero as lz
from layerzero.engine.dispatch import ENGINE


def all_of_first(dtype):
    return attention(query=zeros(2, 4, 4, 8).to(dtype))


LAYOUTS = ["BSHD", "BHSD"]
EMPTY = {
    "batch": (0, 4, 6, 8, 8),
    "queries": (2, 0, 6, 8, 8),
    "keys": (2, 4, 0, 8, 8),
    "queries and keys": (2, 0, 0, 8, 8),
    "value dim": (2, 4, 6, 8, 0),
    "keys, decode": (2, 1, 0, 8, 8),
}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=["gqa", "standard"])
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")
def test_empty_tensors_have_results(empty, layout, heads):
    batch, seq_q, seq_k, head_dim, value_dim = EMPTY[empty]
    query = torch.randn(batch, seq_q, heads[0], head_dim)
    key, value = torch.randn(batch, seq_k, heads[1], head_dim), torch.randn(batch, seq_k, heads[1], value_dim)
    if layout == "BHSD":
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    for arguments in ({}, {"causal": False}, {"window": (1, 1)}, {"causal": False, "attn_mask": zeros(seq_q, seq_k)}):
        for _ in range(2):
            output, lse = lz.attention(query, key, value, layout=layout, return_lse=True, **arguments)
            assert output.shape == (*query.shape[:3], value_dim)
            assert lse.shape == (batch, heads[0], seq_q)
            if seq_k == 0:
                assert not output.any()
                assert (lse == -INF).all()
            assert lz.attention(query, key, value, layout=layout, **arguments).shape == output.shape
            operator = torch.ops.layerzero.attention_lse(query, key, value, layout=layout, **arguments)
            assert (operator[0].shape, operator[1].shape) == (output.shape, lse.shape)
    assert ENGINE.health.breakers() == {}


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")
def test_norms_of_no_rows(shape):
    x = zeros(shape)
    assert lz.rms_norm(x, zeros(8)).shape == shape
    assert lz.layer_norm(x, 8).shape == shape
    assert lz.add_residual_rms_norm_(x, x.clone(), zeros(8)).shape == shape
    assert ENGINE.health.breakers() == {}


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")
def test_a_lock_is_not_for_calls_of_which_nothing_is_computed():
    """A batch without rows raised where its kernel takes none; with rows the lock holds."""
    weight = zeros(8)
    with lz.scope(locks={"norm.rms": "torch.rms_norm"}):
        assert lz.which("rms_norm", zeros(2, 8), weight)["kernel_id"] == "torch.rms_norm"
        assert lz.rms_norm(zeros(0, 8), weight).shape == (0, 8)
        assert "takes no tensors without elements" in str(lz.explain("rms_norm", zeros(0, 8), weight))
    with lz.scope(locks={"norm.rms": "apex.rms_norm"}), pytest.raises(lz.NoKernelFoundError):
        lz.rms_norm(zeros(0, 8), weight)


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")
def test_a_configured_layout_holds_in_every_eager_state():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 4, 8) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def call(q, k, v):
        return lz.attention(q, k, v)

    lz.configure(layout="BHSD")
    torch.testing.assert_close(call(query, key, value), wanted)
    torch.testing.assert_close(torch.ops.layerzero.attention(query, key, value), wanted)
    mapped = torch.func.vmap(lambda q, k, v: call(q[None], k[None], v[None])[0])(query, key, value)
    torch.testing.assert_close(mapped, wanted)
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(query, key, value), wanted)
    lse = torch.ops.layerzero.attention_lse(
        *(tensor.to("meta") for tensor in (query[:, :2], key[:, :2], value[:, :2]))
    )[1]
    assert lse.shape == (2, 2, 4)


@pytest.mark.parametrize("leave", [False, True])
def test_an_operators_gradient_has_the_layout_of_its_call(leave):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 4, 8) for _ in range(3)]
    mine, theirs = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    with lz.scope(layout="BHSD"):
        output = torch.ops.layerzero.attention(*mine)
        if not leave:
            output.square().sum().backward()
    if leave:
        output.square().sum().backward()
    torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True).square().sum().backward()
    for ours, exact in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad, exact.grad)


@pytest.mark.parametrize("call", [rms(input=zeros(3, 8, dtype=torch.int64)), all_of_first(torch.int64)])
def test_the_first_tensors_dtype_is_no_fault_of_the_others(call):
    name, arguments = call
    with pytest.raises(lz.InvalidCallError) as raised:
        getattr(lz, name)(**arguments)
    assert [each.partition(":")[0] for each in raised.value.problems] == [next(iter(arguments))]
