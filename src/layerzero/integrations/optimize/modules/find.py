"""The modules of a model that kernels can compute: each kind is tried, compared with the original, and timed.

Convolutions of torch's classes are packed where their weight is large, and widened where the CPU emulates their dtype.
They are compared on one small input and not timed without a caller's: how large pictures are decides, which no module
tells. Kernels other than torch's own get calls by rules that hold for every size (:mod:`layerzero.backends`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Conv1d, Conv2d, Linear, Module, ModuleDict, ModuleList

import layerzero as lz
from layerzero.backends.torch.conv import least_share
from layerzero.core import emulation
from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError
from layerzero.engine.config import current_policy
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules.experts import experts
from layerzero.integrations.optimize.modules.norms import norm
from layerzero.integrations.optimize.modules.products import block, linear, linear_then
from layerzero.integrations.optimize.swaps.candidate import Candidate, candidate, compared, quiet, refusal
from layerzero.integrations.optimize.swaps.swap import MARK, SIZES, Way, as_forward, is_dense, serves
from layerzero.integrations.optimize.swaps.trial import told_apart
from layerzero.integrations.optimize.swaps.weights import Packs, wants_packed
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.timing import Prepare, Sizes, timed
from layerzero.ops.conv import each as along_each

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
    if (
        not input.is_contiguous() or weight.numel() >= least_share(input.dtype, state.device) * input.numel()
    ):  # else no kernel wants it
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
        self.call, self.device = getattr(lz, name), Device.detect(weight.device)


def convolution(module: Module) -> Candidate | str | None:
    """A candidate for a convolution, None for what is none, or why it is left."""
    kind = next((each for each in _KINDS if isinstance(module, each)), None)
    if kind is None:
        return None
    made: Any = module
    weight, bias = made._parameters.get("weight"), made._parameters.get("bias")
    own = type(module).forward is not kind.forward or type(made)._conv_forward is not kind._conv_forward  # type: ignore[attr-defined]
    dense = is_dense(weight) and (bias is None or is_dense(bias))
    if own or not dense or weight.numel() == 0 or weight.ndim != len(made.kernel_size) + 2:
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
    padding = [0] * axes if isinstance(module.padding, str) else along_each(module.padding, axes)
    sizes = [
        max((results - 1) * stride + step * (kernel - 1) + 1 - 2 * zeros, 1)
        for stride, step, kernel, zeros in zip(
            along_each(module.stride, axes), along_each(module.dilation, axes), weight.shape[2:], padding, strict=True
        )
    ]
    generator = torch.Generator().manual_seed(weight.numel())
    shape = (1, module.in_channels, *sizes)
    return torch.randn(shape, generator=generator, device="cpu").to(weight.device, weight.dtype)


KINDS: tuple[Callable[[Module], Candidate | str | None], ...] = (block, experts, linear_then, norm, linear, convolution)
"""Asked in this order: what covers others comes first."""

MOST = 12
"""Submodules of what is looked at as a whole."""

NO_GAIN = "torch's own kernel runs it, and no time says that another is faster; pass inputs= to measure"

MENDS = ", as torch's own code is wrong with AMX"
"""Said of what stays whatever its time."""


def find(search: Search) -> Iterator[Replaced | Left]:
    """Modules that gave what the originals give, of those that no layer computes for."""
    taken, time = set(search.taken), search.time
    parents = {id(child): parent for parent in search.root.modules() for child in parent.children()}
    modules = list(search.root.named_modules())
    for number, (path, module) in enumerate(modules):
        search.tell("checking modules", number, len(modules))
        if id(module) in taken or not _is_small(module):
            continue
        name = type(module).__name__
        why = refusal(module, parents.get(id(module)))
        if why:
            if _has_weights(module):
                yield Left(path, name, why)
            continue
        step = f"checking modules of {name}"
        if not time.allows(step, step):
            yield Left(path, name, NO_TIME)
            taken |= {id(each) for each in module.modules()}
            continue
        with time.taking(step):
            seen = list(_looked_at(module, measured=search.workload is not None))
        for each in seen:
            if isinstance(each, str):
                yield Left(path, name, each)
                continue
            taken |= {id(covered) for covered in each.covered}
            yield Replaced.of(path, each)


def _looked_at(module: Module, *, measured: bool) -> Iterator[Candidate | str]:
    """Ask each kind about a module: a checked candidate, or why there is none; of several kinds where it has parts."""
    kept = measured or current_policy().invariant  # torch's own kernel is another one then
    for kind in KINDS:
        candidate = _candidate(kind, module)
        if candidate is None:
            continue
        if isinstance(candidate, Candidate) and candidate.mends:
            candidate.calls, candidate.timed = candidate.calls + MENDS, False
        elif isinstance(candidate, Candidate) and not kept and candidate.is_torchs:
            candidate = NO_GAIN
        yield candidate
        if isinstance(candidate, str) and module._modules:  # what it is made of may be something else that is known
            continue
        return
    if not module._modules and any(True for _ in module.parameters(recurse=False)):
        yield "no kernel for this module type"


def _has_weights(module: Module) -> bool:
    """Whether it would have been one of the kinds, and no list of others."""
    own = any(True for _ in module.parameters(recurse=False)) or "parametrizations" in module._modules
    listed = isinstance(module, (ModuleDict, ModuleList))
    return own or not module._modules or (not listed and any(isinstance(each, Linear) for each in module.children()))


def _is_small(module: Module) -> bool:
    """Whether it may be one of the kinds: it has parameters, and not many submodules."""
    few = len(list(itertools.islice(module.modules(), MOST + 1))) <= MOST
    return few and any(True for _ in module.parameters())


def _candidate(kind: Callable[[Module], Candidate | str | None], module: Module) -> Candidate | str | None:
    with told_apart(module):
        candidate = kind(module)
        if isinstance(candidate, Candidate):
            try:
                why = compared(candidate)
            except InvalidCallError as error:
                why = f"{candidate.calls} does not compute it: {error}"
            if why:
                return why
    return candidate


SHORT_S = 2e-4
"""What takes longer is timed without what runs before it: it fills the host's caches itself."""


def shape_of(found: Candidate) -> Hashable:
    """What the time of modules hangs on."""
    module = found.swap.module
    learned = tuple((name, tuple(each.shape), each.dtype, each.device) for name, each in module.named_parameters())
    others = tuple(tuple(each.shape) for each in found.others)
    return type(module), found.kind, found.calls, learned, others, torch.get_num_threads(), current_policy()


def measured(around: Callable[[], object] | None, passed: Callable[[], bool], group: list[Replaced]) -> Sizes | None:
    """The time of a module each way, the first of several of one shape.

    What is short runs after ``around``. Over and over, the final norm of a Llama (512 x 4, float32) took 13 us where
    its own code took 18; after a layer as it was it took 37, and that 30 (AMD EPYC, one thread, 2026-11-26): its code
    had left the host's caches, where the layers' norms had kept theirs.
    """
    found = group[0].candidate
    assert found is not None
    state = found.swap.state
    packs = isinstance(state, Packs) and state.may_pack
    ways = (Way.STOCK, Way.OWN, Way.PLAIN, *([Way.PACKED] if packs else []))
    try:
        with quiet(found.swap.module):
            rows, others = _given(found, 1)
            found.swap.off()
            found.swap.module(rows, *others)
            if timing.taken(functools.partial(found.swap.module, rows, *others)) >= SHORT_S:
                around = None
            return timed([_prepared(found, ways, *_given(found, count)) for count in SIZES], around, passed)
    finally:
        state.take(())
        found.swap.on()


def _given(found: Candidate, count: int) -> tuple[Tensor, list[Tensor]]:
    """So many rows of an example, over and over, and what is called with each of them."""
    example = found.example
    rows = example.reshape(-1, example.shape[-1])
    places = torch.arange(count, device=rows.device) % rows.shape[0]
    others = [each[places] if each.ndim and each.shape[0] == rows.shape[0] else each for each in found.others]
    taken = rows[places]
    return taken.view(1, count, -1) if example.ndim == 3 else taken, others


def _prepared(found: Candidate, ways: Sequence[Way], rows: Tensor, others: Sequence[Tensor]) -> dict[Way, Prepare]:
    """What puts each way on, and then runs the module."""

    def prepare(way: Way) -> Callable[[], Any]:
        found.swap.compute(way)
        return functools.partial(found.swap.module, rows, *others)

    return {way: functools.partial(prepare, way) for way in ways}
