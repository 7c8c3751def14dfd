"""The eager state that a call is made in, read from torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from layerzero.core.facts import CallState
from layerzero.engine.policy import Policy

_SDPA: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}


def sdpa_disabled() -> frozenset[str]:
    """Backends that ``torch.nn.attention.sdpa_kernel`` or its switches have turned off here."""
    return frozenset([name for name, enabled in _SDPA.items() if not enabled()])


def capturing(values: Iterable[Any]) -> bool:
    """Whether the call is made inside a CUDA graph capture."""
    on_gpu = any(value.is_cuda for value in values if isinstance(value, torch.Tensor))
    return on_gpu and torch.cuda.is_current_stream_capturing()


def call_state(values: Iterable[Any], policy: Policy, reads: frozenset[str]) -> CallState:
    """Read what matters for a call with these argument values; ``reads`` names the function's further state."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    first = tensors[0] if tensors else None
    on_gpu = first is not None and first.is_cuda
    return CallState(
        requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        deterministic=policy.deterministic or torch.are_deterministic_algorithms_enabled(),
        capturing=on_gpu and torch.cuda.is_current_stream_capturing(),
        autocast=torch._C._is_any_autocast_enabled(),
        sdpa_disabled=sdpa_disabled() if "sdpa" in reads else frozenset(),
    )


def in_transform() -> bool:
    """Whether functorch (vmap, grad, jvp) or forward-mode AD is at work: tensors hide what they are made of."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def in_dispatch_mode() -> bool:
    """Whether a mode (fake tensors, tracing, functionalisation) listens to every operator."""
    return torch._C._len_torch_dispatch_stack() > 0
