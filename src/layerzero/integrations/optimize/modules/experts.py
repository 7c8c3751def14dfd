"""Experts of a mixture by what they compute: two stacks of weights with a gate between, called with rows, ids, shares.

Nothing is read of a class but the shapes of its parameters. The gate is learned from one expert in float32, on rows
that make its values small and large: a gate that cuts values off is another one only where there are such.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

import layerzero as lz
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.integrations.optimize.modules.products import activations_of
from layerzero.integrations.optimize.swaps.candidate import Candidate, agrees, candidate, distance, quiet
from layerzero.integrations.optimize.swaps.swap import ABSENT, MARK, as_forward, by_name, is_dense, serves
from layerzero.integrations.optimize.swaps.weights import Packs, wants_packed
from layerzero.integrations.transformers_experts import SIZES, numbers_of
from layerzero.ops.linear import PackedWeight
from layerzero.ops.moe.experts import ALPHA, GATES, LIMIT, PACKED_OF, moe_experts
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import arguments_of

_COUNT = "num_experts"
"""How many experts there are, as modules of Transformers call it."""


@dataclass(frozen=True)
class Form:
    """Where a module keeps its weights, and what it does with them.

    Attributes:
        gate_up, down, gate_up_bias, down_bias: names of parameters.
        transposed: whether weights are (E, D, 2 F) and (E, F, D).
        activation, alpha, limit: as of ``lz.moe_experts``.
    """

    gate_up: str
    down: str
    gate_up_bias: str | None = None
    down_bias: str | None = None
    transposed: bool = False
    activation: str = "silu"
    alpha: float = ALPHA
    limit: float = LIMIT

    def biases(self, parameters: Any) -> tuple[Tensor | None, Tensor | None]:
        """Of a module with such parameters."""
        names = self.gate_up_bias, self.down_bias
        first, second = (None if name is None else parameters[name] for name in names)
        return first, second

    def told(self, parameters: Any) -> dict[str, Any]:
        """What a call says besides its rows, weights, ids and shares."""
        biases = self.biases(parameters)
        named = {"gate_up_bias": biases[0], "down_bias": biases[1], "activation": self.activation}
        return named | {"alpha": self.alpha, "limit": self.limit}


class Experts(Packs):
    """The weights of all experts, as views where they lie the other way round.

    A packed weight belongs to one tensor object, so views are made once; they follow what is written into a parameter,
    and are made anew where it has other memory.
    """

    def __init__(self, module: Module, form: Form, covers: tuple[tuple[str, Module], ...], *, pack: bool) -> None:
        self.form = form
        self._views: tuple[tuple[Parameter, Tensor], ...] = ()
        super().__init__(self.weights(module), covers, pack=pack)

    def own(self, module: Module) -> tuple[Any, Any]:
        return module._parameters[self.form.gate_up], module._parameters[self.form.down]

    def weights(self, module: Module) -> tuple[Any, Any]:
        """Both as ``lz.moe_experts`` wants them. Shapes: (E, 2 F, D), (E, D, F)."""
        own = self.own(module)
        if not self.form.transposed:
            return own
        if not self._views or not all(map(_is_view, self._views, own)):
            self._views = tuple((each, each.detach().mT) for each in own)
        (_, gate_up), (_, down) = self._views
        return gate_up, down

    def told(self, module: Module) -> dict[str, Any]:
        return self.form.told(module._parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        for each, view in self._views:  # a copy of a view would have memory of its own
            memo[id(view)] = copy.deepcopy(each, memo).detach().mT
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, Experts)
        return twin

    def _bar(self, number: int) -> None:  # noqa: ARG002  # both are barred
        """Read both weights as they lie: the kernel that wants them packed wants both, for one row and for many."""
        self._barred = frozenset(itertools.product(range(len(self.packed)), (True, False)))

    def forms_for(self, rows: Tensor) -> list[PackedWeight | None]:
        """Both packed weights, or none; what one of them kept while the other had no room is let go."""
        if not self._barred:
            return super().forms_for(rows)
        for each in self.packed:
            if each is not None and each.forms:
                each.refresh()
        return [None] * len(self.packed)


def _is_view(known: tuple[Parameter, Tensor], own: Any) -> bool:
    """Whether a view is one of this very parameter where it lies: ``.to()`` and ``.data =`` give it other memory."""
    of, view = known
    return of is own and view.data_ptr() == own.data_ptr() and view.dtype == own.dtype and view.mT.shape == own.shape


@as_forward
def mixed(self: Module, hidden_states: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    """The forward of experts that are called with rows, ids and shares."""
    if hidden_states is ABSENT:
        return by_name(mixed, self, named)
    mine = not torch.compiler.is_compiling() and not named and [type(each) for each in others] == [Tensor, Tensor]
    if mine and (state := self.__dict__.get(MARK)) is not None:  # None once another thread has undone it
        try:
            learned = (*state.own(self), *state.form.biases(self._parameters), others[1])
        except KeyError:  # pruned or parametrised since (adapters on experts): the module computes them
            return type(self).forward(self, hidden_states, *others)
        if serves(state, hidden_states, *learned):
            with suppress(InvalidCallError):
                return compute(state, self, hidden_states, *others)
            with suppress(InvalidCallError):  # no codes are of weights that are not finite
                if state.renew(*state.weights(self)):
                    return mixed(self, hidden_states, *others)
    return type(self).forward(self, hidden_states, *others, **named)


def compute(state: Experts, module: Module, rows: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """What the experts of a module make of rows, with its weights as they are now."""
    weights = state.weights(module)  # first, for packed forms are of these
    given, named = call_of(rows, weights, ids, shares, state.forms_for(rows))
    named |= state.told(module)
    return lz.moe_experts(*given, **named)


def call_of(
    rows: Tensor, weights: Sequence[Any], ids: Tensor, shares: Tensor, packed: Sequence[PackedWeight | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by place and by name; a quantised weight's tensors, which bring no form of their own."""
    named: dict[str, Any] = dict(zip(PACKED_OF, packed, strict=True))
    data = []
    for of, weight in zip(PACKED_OF.values(), weights, strict=True):
        if isinstance(weight, QuantizedWeight):
            names, (first, *others) = arguments_of(of), weight.fields
            named |= {names[each]: part for each, part in zip(weight.fields._fields[1:], others, strict=True)}
            named[names["format"]] = str(weight.format)
            data.append(first)
        else:
            data.append(weight)
    return (rows, *data, ids, shares), named


def experts(module: Module) -> Candidate | str | None:
    """A candidate for the experts of a mixture, None for what is none, or why they are left."""
    parameters = {name: each for name, each in module._parameters.items() if each is not None}
    forms = list(_forms(parameters))
    inner = [(name, each) for name, each in module._modules.items() if each is not None]
    if any(True for _, each in inner for _ in each.parameters()):
        return None
    if not forms:
        return "its experts have no gate, and lz.moe_experts has one" if _has_no_gate(parameters) else None
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are divided among ranks"
    learned = _learned(module, parameters, forms)
    if isinstance(learned, str):
        return learned
    weight = parameters[learned.down]
    state = Experts(module, learned, tuple(inner), pack=wants_packed(weight))
    rows, ids, shares = example_of(state.weights(module)[0].shape, weight.shape[0], weight.dtype, weight.device)
    given, named = call_of(rows, state.weights(module), ids, shares, state.packed)
    asked = "moe_experts", given, named | learned.told(parameters)
    calls = f"lz.moe_experts, {learned.activation}"
    told: dict[str, Any] = {"kind": "experts", "calls": calls, "stock": True, "may_read": True}
    return candidate(module, mixed, state, example=rows, others=(ids, shares), asked=asked, **told)


def _forms(parameters: dict[str, Parameter]) -> Iterator[Form]:
    """Which parameter may be which by their shapes."""
    stacks = [name for name, each in parameters.items() if each.ndim == 3]
    flat = [name for name, each in parameters.items() if each.ndim == 2]
    if len(stacks) != 2 or len(flat) not in {0, 2} or len(stacks) + len(flat) != len(parameters):
        return
    if any(0 in each.shape or not is_dense(each) for each in parameters.values()):
        return
    for (first, second), transposed in itertools.product(itertools.permutations(stacks), (False, True)):
        gate_up, down = (parameters[name].shape for name in (first, second))
        joined, hidden = (gate_up[2], gate_up[1]) if transposed else (gate_up[1], gate_up[2])
        wanted = (joined // 2, hidden) if transposed else (hidden, joined // 2)
        if joined % 2 or gate_up[0] != down[0] or tuple(down[1:]) != wanted:
            continue
        if not flat:
            yield Form(first, second, transposed=transposed)
        for one, other in itertools.permutations(flat, 2):
            if parameters[one].shape == (gate_up[0], joined) and parameters[other].shape == (gate_up[0], hidden):
                yield Form(first, second, one, other, transposed)


def _has_no_gate(parameters: dict[str, Parameter]) -> bool:
    """Whether these are the weights of experts with one product before the activation."""
    shapes = [tuple(each.shape) for each in parameters.values() if each.ndim == 3]
    return len(shapes) == 2 and len(parameters) == 2 and shapes[0] == (shapes[1][0], shapes[1][2], shapes[1][1])


def example_of(
    gate_up: Sequence[int], experts: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Six rows for weights of this shape, each with two experts or, where there is one, with that.

    They are made without the caller's random numbers.
    """
    generator = torch.Generator().manual_seed(gate_up[1] + experts)
    top_k = min(experts, 2)
    rows = torch.randn(6, gate_up[2], generator=generator, device="cpu", dtype=torch.float32) + 0.25
    ids = torch.rand(6, experts, generator=generator, device="cpu", dtype=torch.float32).argsort(-1)[:, :top_k]
    shares = torch.rand(6, top_k, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)
    return rows.to(device, dtype), ids.contiguous().to(device), shares


def _learned(module: Module, parameters: dict[str, Parameter], forms: list[Form]) -> Form | str:
    """The form whose formula gives what one expert gives, or why none does."""
    dtype = torch.promote_types(parameters[forms[0].down].dtype, torch.float32)
    alone = _alone(module, parameters, dtype)
    seen = {name: each for name, each in alone._parameters.items() if each is not None}
    off: dict[Form, float] = {}
    for base in forms:
        gate_up, down = ((seen[name].mT if base.transposed else seen[name]) for name in (base.gate_up, base.down))
        rows, ids, shares = example_of(gate_up.shape, 1, dtype, gate_up.device)
        size = (rows @ gate_up[0].mT).std().item()
        if not 0 < size < math.inf:
            return "its weights are zero or infinite, which tells nothing about what it computes"
        inputs = [rows * (each / size) for each in SIZES]
        try:
            with quiet(alone):
                expected = [alone(each.clone(), ids, shares) for each in inputs]
        except Exception as error:  # noqa: BLE001  # it takes something else: whatever it raises
            return f"it does not compute on rows, ids and shares: {in_short(error)}"
        for form in _gates(module, base):
            told = form.told(seen)
            with torch.no_grad():
                got = [moe_experts(each, gate_up, down, ids, shares, **told) for each in inputs]
            off[form] = max(map(distance, got, expected))
    form = min(off, key=lambda each: off[each])
    if not agrees(off[form], dtype):
        return f"its output is none of lz.moe_experts' formulas: the nearest is off by {off[form]:.2g} of the largest"
    return form


def _gates(module: Module, base: Form) -> Iterator[Form]:
    alpha, limit = numbers_of(module)
    known = {name for name, _, _ in activations_of(module)}
    for activation in GATES:
        if activation == "swiglu_oai":
            yield dataclasses.replace(base, activation=activation, alpha=alpha, limit=limit)
        elif not known or activation in known:
            yield dataclasses.replace(base, activation=activation)


def _alone(module: Module, parameters: dict[str, Parameter], dtype: torch.dtype) -> Module:
    """The module with its first expert alone, in float32 or wider."""
    twin: Module = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    first = {name: Parameter(each.detach()[:1].to(dtype), requires_grad=False) for name, each in parameters.items()}
    twin._parameters = {**module._parameters, **first}
    if type(getattr(module, _COUNT, None)) is int:
        twin.__dict__[_COUNT] = 1
    return twin
