"""What libraries that are installed here do when they are called without the limits that their backends declare."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

import layerzero as lz
from layerzero.backends.vllm_cpu import norm as vllm_cpu
from layerzero.core.device import Device

CPU = Device.detect("cpu")


def _zentorch():
    spec = importlib.util.find_spec("zentorch")
    torch.ops.load_library(str(Path(spec.origin).parent / "libzentorch.so"))
    return torch.ops.zentorch


@lz.register_kernel("norm.rms", "danger.zentorch", supported_dtypes=["float32", "float16"])
def zentorch_norm(input, weight, *, eps):
    return _zentorch().zentorch_rms_norm(input, weight, eps)


@lz.register_kernel("norm.rms", "danger.vllm", supported_dtypes=["float32"])
def vllm_norm(input, weight, *, eps):
    output = torch.empty_like(input)
    vllm_cpu.operators(next(b for f, b in vllm_cpu._BUILDS.items() if f in CPU.instruction_sets)).rms_norm(
        output, input, weight, eps
    )
    return output


@lz.register_kernel("attention.standard.decode", "danger.reorders", supported_dtypes=["float32"], layout="BHSD")
def reorders(query, key, value, *, scale=None):
    """Scores by zentorch's linear operator, for which a key is a weight."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for q, k, v in zip(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), strict=True):
        scores = _zentorch().zentorch_linear_unary(q.contiguous(), k, None)
        outputs.append((scores * scale).softmax(-1) @ v)
    return torch.stack(outputs).view(*query.shape[:3], value.shape[-1])


@lz.register_kernel(
    "norm.rms", "danger.half", supported_dtypes=["float16", "float32"], limits=[lz.limits.contiguous("input", "weight")]
)
def half(input, weight, *, eps):
    return _zentorch().zentorch_rms_norm(input.view(-1, input.shape[-1]), weight, eps).view(input.shape)
