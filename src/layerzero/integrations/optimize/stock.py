"""What a gain is measured against: the model as its libraries compute it on this machine.

It is not the same everywhere. Torch 2.13 sends norms on a GPU to a kernel in the CuTe DSL where that is installed
(``torch._native``), and a gain over torch without it is another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.nn import Module

from layerzero.core.device import Device

LIBRARIES = ("transformers", "diffusers", "sentence_transformers")


def stock_of(root: Module, device: torch.device) -> str:
    """Libraries with their versions, the attention that a model of Transformers asks for, and where it runs."""
    made = {type(each).__module__.partition(".")[0] for each in root.modules()}
    names = [f"torch {torch.__version__}"]
    names += [f"{each} {sys.modules[each].__version__}" for each in LIBRARIES if each in made and each in sys.modules]
    settings = sorted(set(_settings_of(root)))
    text = ", ".join(names) + (f" with {' and '.join(settings)}" if settings else "")
    where = Device.detect(device).name
    text += f", on {torch.get_num_threads()} threads of {where}" if device.type == "cpu" else f", on {where}"
    overrides = sorted(_overrides_of(device.type))
    if overrides:
        text += f"; torch's own {', '.join(overrides)}, which TORCH_DISABLE_NATIVE_JIT=1 turns off"
    return text


def _settings_of(root: Module) -> Iterator[str]:
    for each in root.modules():
        setting = getattr(getattr(each, "config", None), "_attn_implementation", None)
        if isinstance(setting, str):
            yield setting


def _overrides_of(kind: str) -> Iterator[str]:
    """Operators that torch sends to kernels in a language of its own on such a device; its registry is private."""
    registry = sys.modules.get("torch._native.registry")
    for (operator, key), nodes in getattr(registry, "_graphs", {}).items():
        if str(key).lower() == kind:
            for language in sorted({str(getattr(each, "dsl_name", "kernel")) for each in nodes}):
                yield f"{language} kernel for {operator}"
