"""lz.split_qkv_norm_rope: what it computes, what it refuses, which kernels are offered it and how they are called."""

from __future__ import annotations

import types

import pytest
import torch

import layerzero as lz
from drawing import at_once, examples
from layerzero.backends.vllm import rope
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.ops.rope.declare import cos_sin
from layerzero.ops.rope.normed import qk_norm_rope

CPU = torch.device("cpu")
LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1", "vllm": "0.20.0"}
BF16, F32 = torch.bfloat16, torch.float32
HEADS, KV_HEADS = 4, 2


def call(*, batch=2, seq=5, head_dim=64, half=None, dtype=F32, normed=True):
    torch.manual_seed(seq)
    lead = (batch, seq) if batch else (seq,)
    parts = [torch.randn(*lead, each, head_dim).to(dtype) for each in (HEADS, KV_HEADS, KV_HEADS)]
    cos, sin = cos_sin(40, half or head_dim // 2, CPU)
    arguments = {"qkv": torch.cat(parts, -2).flatten(-2), "heads": HEADS, "kv_heads": KV_HEADS}
    arguments |= {"cos": cos, "sin": sin, "positions": torch.randint(0, 40, lead)}
    if normed:
        arguments |= {name: (torch.randn(head_dim) * 0.2 + 1).to(dtype) for name in ("q_weight", "k_weight")}
    return arguments, parts


def close(got, wanted, tolerance=1e-5):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@at_once("normed", [False, True])
@at_once("interleaved", [False, True])
@at_once("batch", [None, 2])
@at_once("half", [None, 8])
def test_it_is_a_split_and_what_follows(normed, interleaved, batch, half):
    arguments, (query, key, value) = call(batch=batch, normed=normed, half=half)
    rest = [arguments[name] for name in ("cos", "sin", "positions")]
    named = {"interleaved": interleaved, "layout": "BSHD"}
    if normed:
        turned = lz.qk_norm_rope(query, key, arguments["q_weight"], arguments["k_weight"], *rest, **named)
    else:
        turned = lz.rope(query, key, *rest, **named)
    close(lz.split_qkv_norm_rope(**arguments, interleaved=interleaved), (*turned, value))


def test_no_result_shares_memory_with_the_product():
    arguments, (_, _, value) = call()
    results = lz.split_qkv_norm_rope(**arguments)
    arguments["qkv"].zero_()
    assert torch.equal(results[2], value)


def test_no_positions_are_those_from_the_start():
    arguments, _ = call()
    counted = arguments | {"positions": torch.arange(5)}
    close(lz.split_qkv_norm_rope(**(arguments | {"positions": None})), lz.split_qkv_norm_rope(**counted))


@pytest.mark.parametrize("normed", [False, True])
def test_gradients_by_finite_differences(normed):
    arguments, _ = call(seq=2, head_dim=8, half=3, dtype=torch.float64, normed=normed)
    arguments |= {name: arguments[name].double() for name in ("cos", "sin")}
    names = [name for name, each in arguments.items() if isinstance(each, torch.Tensor) and each.is_floating_point()]
    leaves = [arguments[name].clone().requires_grad_() for name in names]

    def function(*tensors):
        return lz.split_qkv_norm_rope(**(arguments | dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(function, leaves, fast_mode=examples(100) < 100)


@pytest.mark.filterwarnings("ignore")
def test_compiled_as_one_graph():
    arguments, _ = call()

    def model(qkv):
        return lz.split_qkv_norm_rope(**(arguments | {"qkv": qkv}))

    got = torch.compile(model, fullgraph=True, backend="aot_eager")(arguments["qkv"])
    close(got, model(arguments["qkv"]))


@pytest.mark.parametrize("normed", [False, True])
def test_stock_computes_the_same(normed):
    arguments, _ = call(head_dim=80, half=16, normed=normed)
    stock = OPERATIONS["posenc.split_qkv_norm_rope"].stock
    close(stock(**arguments)(), lz.split_qkv_norm_rope(**arguments))


@at_once(
    "change, words",
    [
        ({"heads": 0}, "heads: wanted a number above 0, got 0"),
        ({"kv_heads": 2.0}, "kv_heads: wanted a number above 0, got 2.0"),
        ({"heads": 5}, r"qkv: wanted 5 \+ 2 \* 2 heads of one width in the last axis, a multiple of 9, got 512"),
        ({"qkv": torch.zeros(512)}, "qkv: wanted .tokens, features. or three axes"),
        ({"k_weight": None}, "wanted both q_weight and k_weight or none of them, got q_weight alone"),
        ({"q_weight": torch.ones(32), "k_weight": torch.ones(32)}, "q_weight: wanted head_dim 64"),
        ({"q_weight": torch.ones(64).half()}, "q_weight: wanted dtype float32"),
        ({"cos": torch.zeros(40, 33), "sin": torch.zeros(40, 33)}, "half of 2 to 64 rotated entries"),
        ({"positions": torch.zeros(2, 4, dtype=torch.int64)}, "positions: wanted seq 5"),
        ({"positions": None, "cos": torch.zeros(4, 32), "sin": torch.zeros(4, 32)}, "a row for each of 5 tokens"),
        ({"eps": -1.0}, "eps: wanted a finite number"),
        ({"positions": torch.full((2, 5), 40)}, "0 to 39, got 40"),
    ],
)
def test_what_means_nothing_is_refused_with_wanted_and_got(change, words):
    arguments, _ = call()
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.split_qkv_norm_rope(**(arguments | change))


def codes(kernel, *, dtype=BF16, head_dim=128, half=64, table=F32, normed=True, **arguments):
    meta = torch.device("meta")
    given = {"qkv": torch.empty(64, 48 * head_dim, dtype=dtype, device=meta), "heads": 32, "kv_heads": 8}
    given |= dict(zip(("cos", "sin"), cos_sin(4096, half, meta, table), strict=True))
    given["positions"] = torch.empty(64, device=meta).long()
    if normed:
        given |= {name: torch.empty(head_dim, dtype=dtype, device=meta) for name in ("q_weight", "k_weight")}
    with lz.scope(allow_jit_compile=True):
        report = lz.explain("split_qkv_norm_rope", **given, **arguments, device="H200", libraries=LIBRARIES)
    return {reason.code for reason in report.reasons(kernel)}


@pytest.mark.parametrize("kernel", ["torch.", "flashinfer.", "vllm.", "vllm.fused_"])
def test_a_models_call_is_offered_to_every_library(kernel):
    assert codes(f"{kernel}split_qkv_norm_rope") == set()


@pytest.mark.parametrize(
    ("kernel", "given", "code"),
    [
        ("flashinfer.split_qkv_norm_rope", {"interleaved": True}, ReasonCode.CONSTRAINT_FAILED),
        ("flashinfer.split_qkv_norm_rope", {"normed": False}, None),
        ("vllm.split_qkv_norm_rope", {"normed": False}, None),
        ("vllm.split_qkv_norm_rope", {"plus_one": True}, ReasonCode.CONSTRAINT_FAILED),
        ("vllm.fused_split_qkv_norm_rope", {"normed": False}, ReasonCode.CONSTRAINT_FAILED),
        ("vllm.fused_split_qkv_norm_rope", {"dtype": F32}, ReasonCode.DTYPE_UNSUPPORTED),
        ("vllm.fused_split_qkv_norm_rope", {"half": 32}, ReasonCode.CONSTRAINT_FAILED),
    ],
)
def test_what_a_source_does_not_take_is_refused(kernel, given, code):
    assert codes(kernel, **given) == ({code} if code else set())


def _fused(qkv, heads, kv_heads, value_heads, head_dim, eps, q_weight, k_weight, table, half_split, places):
    """What vLLM's operator does, by its source."""
    assert qkv.ndim == 2
    assert qkv.is_contiguous()
    assert qkv.shape[1] == (heads + kv_heads + value_heads) * head_dim
    assert places.dtype is torch.int64
    assert places.shape == qkv.shape[:1]
    assert table.is_contiguous()
    query, key, _ = qkv.view(len(qkv), -1, head_dim).split((heads, kv_heads, value_heads), 1)
    pair = qk_norm_rope(
        *(query, key, q_weight, k_weight, *table.chunk(2, -1)), positions=places, interleaved=not half_split, eps=eps
    )
    for tensor, result in zip((query, key), pair, strict=True):
        tensor.copy_(result)


def _norm(output, rows, weight, eps):
    assert output.is_contiguous()
    assert rows.is_contiguous()
    output.copy_(torch.nn.functional.rms_norm(rows, weight.shape, weight, eps))


def _rotate(places, query, key, head_dim, table, half_split):
    pair = OPERATIONS["posenc.rope"].reference(
        query, key, *table.chunk(2, -1), positions=places, interleaved=not half_split
    )
    query.copy_(pair[0])
    key.copy_(pair[1])


@pytest.mark.parametrize("load", [rope._load_fused_split, REGISTRY.kernel("vllm.split_qkv_norm_rope").load])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [None, 2])
def test_vllms_operators_are_called_as_their_sources_want_it(monkeypatch, load, interleaved, batch):
    operators = {"fused_qk_norm_rope": _fused, "rms_norm": _norm, "rotary_embedding": _rotate}
    library = types.SimpleNamespace(**{name: types.SimpleNamespace(default=each) for name, each in operators.items()})
    monkeypatch.setattr(rope, "operators", lambda *_: library)
    arguments, _ = call(batch=batch)
    wanted = lz.split_qkv_norm_rope(**arguments, interleaved=interleaved, eps=1e-6)
    operation = OPERATIONS["posenc.split_qkv_norm_rope"]
    given = {**operation.schema.neutral, **arguments, "interleaved": interleaved}
    facts = FactsBuilder(operation).of_valid(given, device=Device.named("H200"))
    tensors = [arguments.pop(name) for name in ("qkv", "cos", "sin")]
    before = tensors[0].clone()
    close(load(facts)(*tensors, **arguments, interleaved=interleaved, eps=1e-6), wanted)
    assert torch.equal(tensors[0], before)


@pytest.mark.parametrize("load", [rope._load_fused, REGISTRY.kernel("vllm.qk_norm_rope").load])
@pytest.mark.parametrize("batch", [None, 2])
def test_the_same_without_a_joined_product(monkeypatch, load, batch):
    operators = {"fused_qk_norm_rope": _fused, "rms_norm": _norm, "rotary_embedding": _rotate}
    library = types.SimpleNamespace(**{name: types.SimpleNamespace(default=each) for name, each in operators.items()})
    monkeypatch.setattr(rope, "operators", lambda *_: library)
    arguments, (query, key, _) = call(batch=batch)
    tensors = [query, key, *(arguments[name] for name in ("q_weight", "k_weight", "cos", "sin"))]
    operation = OPERATIONS["posenc.qk_norm_rope"]
    names = ("query", "key", "q_weight", "k_weight", "cos", "sin")
    given = {**operation.schema.neutral, **dict(zip(names, tensors, strict=True)), "positions": arguments["positions"]}
    facts = FactsBuilder(operation).of_valid(given, device=Device.named("H200"), layout="BSHD")
    wanted = operation.reference(*tensors, positions=arguments["positions"])
    close(load(facts)(*tensors, positions=arguments["positions"], interleaved=False, eps=1e-6), wanted)
