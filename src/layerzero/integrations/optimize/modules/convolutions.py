"""Convolutions of torch's classes: packed where their weight is large, widened where the CPU emulates their dtype.

They are compared on one small input and not timed without a caller's: how large pictures are decides, which no module
tells. Kernels other than torch's own get calls by rules that hold for every size (:mod:`layerzero.backends`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Module

import layerzero as lz
from layerzero.backends.torch.conv import LEAST_SHARE
from layerzero.core import emulation
from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.swaps.candidate import Candidate, candidate
from layerzero.integrations.optimize.swaps.swap import MARK, as_forward, is_dense, serves
from layerzero.integrations.optimize.swaps.weights import Packs, wants_packed
from layerzero.ops.conv.declare import each

_KINDS: dict[type[Module], str] = {Conv1d: "conv1d", Conv2d: "conv2d"}

_RESULTS = 8
"""Of a picture along each axis, and of a sequence the root of its length: small, as deep in a UNet or an encoder."""

_FEW_RESULTS, _MANY = 2, 2**22
"""The same where the module's own code is emulated and has more to multiply: 1280 channels at 8 x 8 take it 2 s."""


@as_forward
def _conv(self: Any, input: Tensor) -> Any:
    state: Any = self.__dict__.get(MARK)
    weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
    if weight is None or not serves(state, input, weight, bias):
        return type(self).forward(self, input)
    packed = None
    if not input.is_contiguous() or weight.numel() >= LEAST_SHARE * input.numel():  # else no kernel wants it
        packed = state.forms_for(input)[0]
    try:
        return state.call(input, weight, bias, self.stride, self.padding, self.dilation, self.groups, packed=packed)
    except InvalidCallError:
        if state.renew(weight):
            return _conv(self, input)
    return type(self).forward(self, input)


class Convolution(Packs):
    """One packed weight, and the function that convolves with it."""

    def __init__(self, weight: Tensor, name: str) -> None:
        super().__init__((weight,), pack=wants_packed(weight))
        self.call = getattr(lz, name)


def convolution(module: Module) -> Candidate | str | None:
    """A candidate for a convolution, None for what is none, or why it is left."""
    kind = next((each for each in _KINDS if isinstance(module, each)), None)
    if kind is None:
        return None
    made: Any = module
    weight, bias = made._parameters.get("weight"), made._parameters.get("bias")
    own = type(module).forward is not kind.forward or type(made)._conv_forward is not kind._conv_forward  # type: ignore[attr-defined]
    if own or not is_dense(weight) or not (bias is None or is_dense(bias)) or weight.numel() == 0:
        return "it is a convolution with a forward of its own, or a weight of its own, which may compute anything"
    if made.padding_mode != "zeros":
        return f"it pads by padding_mode={made.padding_mode!r}, and kernels pad with zeros"
    name, example = _KINDS[kind], _example(made, weight)
    state = Convolution(weight, name)
    steps = made.stride, made.padding, made.dilation, made.groups
    asked = name, (example, weight, bias, *steps), {"packed": state.packed[0]}
    told: dict[str, Any] = {"kind": "convolution", "calls": f"lz.{name}", "stock": True, "timed": False}
    return candidate(module, _conv, state, example=example, asked=asked, **told)


def _example(module: Any, weight: Tensor) -> Tensor:
    """A picture with few results, made without a draw from the caller's random numbers."""
    axes = weight.ndim - 2
    long = weight.numel() * _RESULTS**2 > _MANY and emulation.emulates(Device.detect(weight.device), weight.dtype)
    results = _FEW_RESULTS if long else _RESULTS
    results = results**2 if axes == 1 else results
    padding = [0] * axes if isinstance(module.padding, str) else each(module.padding, axes)
    sizes = [
        max((results - 1) * stride + step * (kernel - 1) + 1 - 2 * zeros, 1)
        for stride, step, kernel, zeros in zip(
            each(module.stride, axes), each(module.dilation, axes), weight.shape[2:], padding, strict=True
        )
    ]
    generator = torch.Generator().manual_seed(weight.numel())
    shape = (1, module.in_channels, *sizes)
    return torch.randn(shape, generator=generator, device="cpu").to(weight.device, weight.dtype)
