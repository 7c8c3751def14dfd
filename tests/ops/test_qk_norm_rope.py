"""lz.qk_norm_rope: what it computes, what it refuses, which kernels are offered it."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once, examples
from layerzero.core.reasons import ReasonCode
from layerzero.ops import OPERATIONS
from layerzero.ops.rope.declare import cos_sin
from layerzero.ops.rope.normed import qk_norm_rope

CPU = torch.device("cpu")
LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1", "vllm": "0.20.0"}
BF16, F32 = torch.bfloat16, torch.float32


def tensors(*, batch=2, seq=5, heads=4, kv_heads=2, head_dim=64, half=None, dtype=F32):
    torch.manual_seed(seq)
    query, key = (torch.randn(batch, seq, each, head_dim).to(dtype) for each in (heads, kv_heads))
    weights = [(torch.randn(head_dim) * 0.2 + 1).to(dtype) for _ in range(2)]
    table = cos_sin(40, half or head_dim // 2, CPU)
    return query, key, *weights, *table, torch.randint(0, 40, (batch, seq))


def close(got, wanted, tolerance=1e-5):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [None, 8])
def test_it_is_the_norm_of_each_head_and_then_the_rotation(interleaved, half):
    query, key, q_weight, k_weight, cos, sin, positions = tensors(half=half)
    normed = lz.rms_norm(query, q_weight, 1e-5), lz.rms_norm(key, k_weight, 1e-5)
    wanted = lz.rope(*normed, cos, sin, positions, interleaved=interleaved, layout="BSHD")
    given = (query, key, q_weight, k_weight, cos, sin, positions)
    close(lz.qk_norm_rope(*given, eps=1e-5, interleaved=interleaved, layout="BSHD"), wanted)


def test_one_plus_the_weight_as_gemma_has_it():
    query, key, q_weight, k_weight, *rest = tensors()
    wanted = lz.qk_norm_rope(query, key, q_weight, k_weight, *rest, layout="BSHD")
    got = lz.qk_norm_rope(query, key, q_weight - 1, k_weight - 1, *rest, plus_one=True, layout="BSHD")
    close(got, wanted)


def test_flattened_tokens_and_heads_first_are_the_same_call():
    query, key, q_weight, k_weight, cos, sin, positions = tensors()
    wanted = qk_norm_rope(query, key, q_weight, k_weight, cos, sin, positions=positions)
    rest = (q_weight, k_weight, cos, sin)
    flat = lz.qk_norm_rope(query.flatten(0, 1), key.flatten(0, 1), *rest, positions.flatten())
    turned = lz.qk_norm_rope(query.transpose(1, 2), key.transpose(1, 2), *rest, positions, layout="BHSD")
    close([each.view(other.shape) for each, other in zip(flat, wanted, strict=True)], wanted)
    close([each.transpose(1, 2) for each in turned], wanted)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_by_finite_differences(interleaved, plus_one):
    query, key, *rest = tensors(seq=2, heads=2, kv_heads=1, head_dim=8, half=3, dtype=torch.float64)
    *given, positions = rest
    leaves = [each.double().clone().requires_grad_() for each in (query, key, *given)]

    def call(*tensors):
        return lz.qk_norm_rope(*tensors, positions, interleaved=interleaved, plus_one=plus_one, layout="BSHD")

    assert torch.autograd.gradcheck(call, leaves, fast_mode=examples(100) < 100)


@pytest.mark.filterwarnings("ignore")
def test_compiled_as_one_graph():
    given = tensors()

    def model(*tensors):
        return lz.qk_norm_rope(*tensors, layout="BSHD")

    close(torch.compile(model, fullgraph=True, backend="aot_eager")(*given), model(*given))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("plus_one", [False, True])
def test_stock_computes_the_same(layout, plus_one):
    query, key, *rest = tensors(head_dim=80, half=16)
    if layout == "BHSD":
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    wanted = lz.qk_norm_rope(query, key, *rest, plus_one=plus_one, layout=layout)
    close(OPERATIONS["posenc.qk_norm_rope"].stock(query, key, *rest, plus_one=plus_one, layout=layout)(), wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_weight": torch.ones(32)}, "q_weight: wanted head_dim 64 as in query, got 32"),
        ({"k_weight": torch.ones(64).half()}, "k_weight: wanted dtype float32"),
        ({"cos": torch.zeros(40, 33), "sin": torch.zeros(40, 33)}, "half of 2 to 64 rotated entries"),
        ({"eps": -1.0}, "eps: wanted a finite number of at least 0"),
        ({"eps": float("inf")}, "eps: wanted a finite number of at least 0"),
        ({"key": torch.zeros(2, 5, 64)}, "key: wanted 4 axes as query has"),
        ({"positions": None, "cos": torch.zeros(4, 32), "sin": torch.zeros(4, 32)}, "a row for each of 5 tokens"),
    ],
)
def test_what_means_nothing_is_refused_with_wanted_and_got(change, words):
    names = ("query", "key", "q_weight", "k_weight", "cos", "sin", "positions")
    arguments = {**dict(zip(names, tensors(), strict=True)), "layout": "BSHD", **change}
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.qk_norm_rope(**arguments)


def test_positions_beyond_the_table_are_an_error_on_a_cpu():
    *given, positions = tensors()
    positions[1, 2] = 40
    with pytest.raises(lz.InvalidCallError, match=r"positions\[1, 2\]: .*0 to 39, got 40"):
        lz.qk_norm_rope(*given, positions, layout="BSHD")


def codes(kernel, *, dtype=BF16, head_dim=128, half=64, table=F32, tokens=(64,), **arguments):
    meta = torch.device("meta")
    query, key = (torch.empty((*tokens, each, head_dim), dtype=dtype, device=meta) for each in (32, 8))
    weight = torch.empty(head_dim, dtype=dtype, device=meta)
    cos, sin = cos_sin(4096, half, meta, table)
    positions = torch.empty(tokens, device=meta).long()
    with lz.scope(allow_jit_compile=True):
        report = lz.explain(
            "qk_norm_rope",
            *(query, key, weight, weight, cos, sin, positions),
            **arguments,
            device="H200",
            libraries=LIBRARIES,
        )
    return {reason.code for reason in report.reasons(kernel)}


KERNELS = [f"{name}qk_norm_rope" for name in ("torch.", "flashinfer.", "vllm.", "vllm.fused_")]


@at_once("kernel", KERNELS)
@at_once("tokens", [(1,), (64,), (2, 512)])
def test_a_models_call_is_offered_to_every_library(kernel, tokens):
    assert codes(kernel, tokens=tokens) == set()


@pytest.mark.parametrize(
    ("kernel", "call", "code"),
    [
        ("flashinfer.qk_norm_rope", {"interleaved": True}, ReasonCode.CONSTRAINT_FAILED),
        ("flashinfer.qk_norm_rope", {"dtype": F32}, ReasonCode.DTYPE_UNSUPPORTED),
        ("vllm.qk_norm_rope", {"plus_one": True}, ReasonCode.CONSTRAINT_FAILED),
        ("vllm.qk_norm_rope", {"table": BF16}, ReasonCode.DTYPE_UNSUPPORTED),
        ("vllm.fused_qk_norm_rope", {"plus_one": True}, ReasonCode.CONSTRAINT_FAILED),
        ("vllm.fused_qk_norm_rope", {"head_dim": 96, "half": 48}, ReasonCode.HEAD_DIM_INVALID),
        ("vllm.fused_qk_norm_rope", {"half": 32}, ReasonCode.CONSTRAINT_FAILED),
    ],
)
def test_what_a_source_does_not_take_is_refused(kernel, call, code):
    assert codes(kernel, **call) == {code}


def test_flashinfers_norm_knows_one_plus_the_weight():
    assert codes("flashinfer.qk_norm_rope", plus_one=True) == set()
