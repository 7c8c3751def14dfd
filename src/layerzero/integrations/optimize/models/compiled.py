"""A whole model by a library that compiles it, for the shapes of the caller's inputs and where it is faster there.

Compilers win where Python between kernels costs most: a MiniLM in float32 on 1 x 16 tokens takes 0.46 of stock's time
by ONNX Runtime, and on 8 x 128 as long as stock's (one thread of an AMD EPYC Zen 4, 2026-11-26). So each shape is
decided by itself, and all others run what they ran before.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

from layerzero.core.errors import LayerZeroWarning, in_short
from layerzero.core.system import warn
from layerzero.engine.config import current_policy
from layerzero.integrations.optimize.attention.transformers import configs_of
from layerzero.integrations.optimize.models.compilers import Run
from layerzero.integrations.optimize.swaps.stamp import Stamp
from layerzero.integrations.optimize.swaps.swap import MARK, State, Swap, as_forward, is_dense, serves
from layerzero.ops.linear.glance import Glances

_FEW = 256
"""Numbers that Python compares sooner than torch does."""

PLAIN: tuple[type, ...] = (bool, int, float, str, type(None), torch.dtype)

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Bound:
    """What whole numbers of a tensor may be: a library reads an index beyond a table, where torch raises.

    Attributes:
        least, most: the numbers; None for a tensor of floating ones, of which any may come.
        full_rows: whether each row has a number other than 0: of a mask that hides all, OpenVINO makes NaN.
    """

    least: int | None = None
    most: int | None = None
    full_rows: bool = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor keeps to it."""
        if self.least is None or self.most is None or not tensor.numel():
            return True
        if tensor.numel() <= _FEW:
            values = tensor.flatten().tolist()
            if min(values) < self.least or max(values) > self.most:
                return False
            length = tensor.shape[-1] if tensor.ndim else 1
            return not self.full_rows or all(any(values[at : at + length]) for at in range(0, len(values), length))
        least, most = torch.aminmax(tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor)
        if int(least) < self.least or int(most) > self.most:
            return False
        return not self.full_rows or bool(tensor.any(-1).all())


def is_denied(name: str) -> bool:
    """Whether settings leave a compiler out, as they do libraries."""
    policy = current_policy()
    if not policy.enabled:
        return True
    lists = policy["deny"], policy["avoid_sources"], policy["allow"]
    if not any(lists):
        return False

    def named(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, each.removesuffix(".*")) for each in patterns)

    return named((*lists[0], *lists[1])) or (bool(lists[2]) and not named(lists[2]))


@dataclass(frozen=True)
class Engine:
    """A compiled call.

    Attributes:
        run: of its tensors.
        leaves, spec: of a result, whose tensors are in the places that hold none.
        name: the compiler's, with its version.
        error: how far it is from stock, in units of the largest value.
        compiler: what settings call it.
        bounds: of its tensors: the numbers that may stand in each.
    """

    run: Run
    leaves: tuple[Any, ...]
    spec: Any
    name: str
    error: float
    compiler: str
    bounds: tuple[Bound, ...]

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether settings allow it, and the numbers are such as it was compared on."""
        return not is_denied(self.compiler) and all(map(Bound.holds, self.bounds, tensors))

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The result as the module gives it."""
        found = iter(self.run(tensors))
        return pytree.tree_unflatten([next(found) if each is TENSOR else each for each in self.leaves], self.spec)


TENSOR = object()
"""The place of a tensor."""


class Compiled(State):
    """The compiled calls of one module.

    Attributes:
        engines: by what a call looks like.
        copy_bytes: about what a library's own copy of the weights takes.
    """

    keeps = "copies of weights in compiled calls"

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.engines: dict[Key, Engine] = {}
        self._holders = [
            (each._parameters, name, weight, *_standing(weight))
            for each in module.modules()
            for name, weight in each._parameters.items()
        ]
        self._settings = [(vars(each), _told(each)) for each in configs_of(module, "__dict__")]
        self._host = os.getpid(), torch.get_num_threads()  # threads of a library do not outlive a fork
        self.copy_bytes = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        weights = [weight for _, _, weight, *_ in self._holders if weight is not None]
        self._others = [each for each in weights if not is_dense(each)]
        self._glances = Glances([*weights, *module.buffers()])

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """A copy has weights of its own, for which nothing was compiled."""
        twin = memo[id(self)] = State()
        return twin

    @property
    def bytes(self) -> int:
        """About what each library's copy of the weights takes."""
        return self.copy_bytes * len(self.engines)

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether weights, settings and modules are what they were, and nothing wants the module's own code."""
        for parameters, name, weight, version, address in self._holders:  # a loop: each call comes here
            if parameters.get(name, self) is not weight:
                return False
            if weight is not None and (
                weight.data_ptr() != address or (version is not None and weight._version != version)
            ):
                return False
        recording = torch.is_grad_enabled()
        weights = [each[2] for each in self._holders] if recording else self._others
        if not serves(self, tensors[0], *weights) or (os.getpid(), torch.get_num_threads()) != self._host:
            return False
        if recording and any(each.requires_grad for each in tensors):
            return False
        if self._glances.differ:
            return False
        return all(_same(now, before) for now, before in self._settings)


def _standing(weight: Tensor | None) -> tuple[int | None, int]:
    """How often torch wrote into it, None where that is not counted, and where it lies."""
    if weight is None:
        return None, 0
    return None if weight.is_inference() else weight._version, weight.data_ptr()


def _told(config: Any) -> dict[str, Any]:
    return {name: each for name, each in vars(config).items() if not name.startswith("_attn_implementation")}


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return all(now.get(name) is each or now.get(name) == each for name, each in before.items())


def described(others: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Key, list[Tensor]] | None:
    """What a call looks like, and its tensors; None for one with anything but tensors and plain values."""
    key: list[Any] = [len(others), torch.is_inference_mode_enabled()]
    tensors: list[Tensor] = []
    for name, value in (*enumerate(others), *named.items()):
        if type(value) is Tensor:
            tensors.append(value)
            key.append((name, value.shape, value.dtype, value.device.type, value.is_contiguous(), value.is_inference()))
        elif isinstance(value, PLAIN):
            key.append((name, type(value), value))
        else:
            return None
    return (tuple(key), tensors) if tensors else None


@as_forward
def forward(self: Module, *others: Any, **named: Any) -> Any:
    """The forward of a module of which some calls are compiled."""
    beneath = self.__dict__.get(MARK)  # None once another thread has undone it
    state, other = getattr(beneath, "over", None) or (beneath, type(self).forward)
    if isinstance(state, Compiled) and not torch.compiler.is_compiling():
        told = described(others, named)
        engine = None if told is None else state.engines.get(told[0])
        if engine is not None and told is not None and state.serves(told[1]) and engine.serves(told[1]):
            try:
                return engine(told[1])
            except Exception as error:  # noqa: BLE001  # whatever a library raises: the model computes it
                state.engines.pop(told[0], None)
                said = f"{engine.name} raised {in_short(error)}"
                warn(f"lz.optimize: {said}; the model's own code runs", LayerZeroWarning, stacklevel=2)
    return other(self, *others, **named)


@dataclass
class Over(Swap):
    """Compiled calls of one module, over another forward of ours if it has one, which runs all other calls.

    It comes off before that one does.
    """

    @property
    def is_on(self) -> bool:
        beneath = self._beneath
        return super().is_on if beneath is None else beneath.over is not None and beneath.over[0] is self.state

    @property
    def _beneath(self) -> State | None:
        state: State | None = self.module.__dict__.get(MARK)
        return None if state is self.state else state

    def on(self) -> None:
        attributes, beneath = self.module.__dict__, self._beneath
        if beneath is None:
            super().on()
        elif not self.is_on:
            self.state.stamp = self.state.stamp or Stamp(self.module)
            beneath.over = self.state, attributes["forward"].__func__
            attributes["forward"] = MethodType(self.forward, self.module)

    def off(self) -> None:
        """Take it off the module, which has the forward beneath again; so has one that was put around it since."""
        attributes, beneath = self.module.__dict__, self._beneath
        if beneath is None or beneath.over is None:
            super().off()
        elif self.is_on:
            beneath.over = State(), beneath.over[1]
            if getattr(attributes["forward"], "__func__", None) is self.forward:
                attributes["forward"] = MethodType(beneath.over[1], self.module)
