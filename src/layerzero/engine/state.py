"""The eager state that a call is made in, read from torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from layerzero.core.device import Device
from layerzero.core.eager_state import declared
from layerzero.core.facts import CallState
from layerzero.engine.policy import Policy


def capturing(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the call is made inside a CUDA graph capture."""
    return bool(tensors) and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()


def call_state(
    tensors: Sequence[torch.Tensor], policy: Policy, reads: frozenset[str], device: Device | None = None
) -> CallState:
    """Read what matters for a call with these tensors; ``reads`` names the function's further state.

    ``device`` is where the call is asked about, if that is not where its tensors lie.
    """
    cuda = bool(tensors) and tensors[0].is_cuda if device is None else device.torch_type == "cuda"
    requires_grad = False
    if torch.is_grad_enabled():
        for tensor in tensors:
            requires_grad = requires_grad or tensor.requires_grad
    return CallState(
        requires_grad=requires_grad,
        deterministic=policy.deterministic or torch._C._get_deterministic_algorithms(),
        capturing=capturing(tensors),
        autocast=torch._C._is_any_autocast_enabled(),
        read={each.fact: each.read(cuda=cuda) for each in declared(reads)},
    )


def in_transform() -> bool:
    """Whether functorch (vmap, grad, jvp), forward-mode AD or torch.jit.trace is at work.

    Tensors hide what they are made of there; in a trace sizes are tensors, and only torch's operators leave anything.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return True
    return bool(torch._C._is_tracing())


def in_dispatch_mode() -> bool:
    """Whether a mode (fake tensors, tracing, functionalisation) listens to every operator."""
    return torch._C._len_torch_dispatch_stack() > 0
