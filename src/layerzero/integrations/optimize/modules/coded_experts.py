"""Experts of a mixture as codes: quantised because a caller asks for it, within a bound on what they lose, or kept so.

Those that gpt-oss keeps in mxfp4, by Transformers, call a Triton kernel of the hub, which no CPU runs: nothing can be
compared with it or timed against it there. So the tensors that a module keeps tell its format. Results are compared
with the class's formula, in float32, on the dequantised numbers of two experts. Transformers 5.24,
``integrations/mxfp4.py``.

What the weight of any layer loses in a format, kept in the database of times for later requests.

A row is of the kernel that computed the product, in its environment, as a time is. Its work has one fact more, the
weight itself, so that no call finds it; its one sample is too noisy for a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, in_short
from layerzero.core.evidence import Measurement
from layerzero.core.plan import Report
from layerzero.core.reasons import ReasonCode
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules.experts import Experts, call_of, compute, example_of, experts, mixed
from layerzero.integrations.optimize.modules.int8 import why_not
from layerzero.integrations.optimize.swaps.candidate import (
    Candidate,
    agrees,
    candidate,
    distance,
    quiet,
    refusal,
    watching,
)
from layerzero.integrations.optimize.swaps.codes import (
    LEAST_GROUP,
    CodedProduct,
    Requested,
    bias_of,
    call,
    for_columns,
    narrowed,
    version,
)
from layerzero.integrations.optimize.swaps.swap import (
    ABSENT,
    MARK,
    Swap,
    as_forward,
    by_name,
    has_own_forward,
    serves,
    stock_forward,
)
from layerzero.integrations.optimize.swaps.weights import Packs
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.workload import RUN
from layerzero.integrations.transformers_experts import numbers_of
from layerzero.ops.linear.glance import mark_of
from layerzero.ops.linear.packed import PACKED, PackedWeight
from layerzero.ops.moe.experts import moe_experts
from layerzero.ops.moe.quantized import ROUNDED
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.tuning.storage.rows import Work
from layerzero.tuning.storage.store import StoreLedger


class CodedExperts(Experts, Requested):
    """Codes of a module's experts, which are made anew after its weights were written into.

    Attributes:
        of: what they are quantised to, as of :func:`narrowed`.
        activations: what rows are rounded to.
    """

    def __init__(self, module: Module, plain: Experts, of: str, activations: str | None) -> None:
        self.of, self.activations = of, activations
        self._sources: tuple[PackedWeight, ...] = ()
        super().__init__(module, plain.form, plain.covers, pack=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        memo[id(self._sources)] = ()  # a copy has weights of its own, which its first call looks at
        return super().__deepcopy__(memo)

    @property
    def kind(self) -> str:
        return self.of.partition(":")[0]

    @property
    def code_bytes(self) -> int:
        return sum(each.bytes for each in self._codes)

    @property
    def bytes(self) -> int:
        return super().bytes + self.code_bytes

    def weights(self, module: Module) -> tuple[Any, Any]:
        own = self.own(module)
        if any(each.is_neg() for each in own):  # a view of what the codes are of
            raise InvalidCallError("optimize", ["weights: wanted tensors as they lie, got a negated view"])
        if [each.kind_for(weight) for each, weight in zip(self._sources, own, strict=False)] != [PACKED, PACKED]:
            with torch.no_grad():
                rows = [(each.detach().mT if self.form.transposed else each.detach()).contiguous() for each in own]
                self._codes = narrowed(rows[0], self.of), narrowed(rows[1], self.of)
            later, self._sources = bool(self._sources), tuple(map(PackedWeight, own))
            self.own_bytes = sum(each.nbytes for each in own)
            if later or hasattr(self, "packed"):
                self.renew(*self._codes)
        return self._codes

    def told(self, module: Module) -> dict[str, Any]:
        return super().told(module) | {"activations": self.activations}


def find(search: Search, of: str, activations: str | None, accuracy: float, asked: str) -> Iterator[Replaced | Left]:
    """Experts whose output stays within the bound."""
    parents = {id(child): parent for parent in search.root.modules() for child in parent.children()}
    made: dict[str, Candidate] = {}
    for path, module in search.root.named_modules():
        if sum(each is not None and each.ndim == 3 for each in module._parameters.values()) != 2:
            continue
        found: Candidate | str | None = refusal(module, parents.get(id(module)))
        step = f"quantising {type(module).__name__}"
        if not found:
            found = NO_TIME
            if search.time.allows(step, step):
                with search.time.taking(step):
                    plain = experts(module)
                    found = _made(plain, of, activations) if isinstance(plain, Candidate) else plain
        if isinstance(found, Candidate):
            made[path] = found
        elif found is not None:
            yield Left(path, type(module).__name__, f"{asked}: {found}")
    lost = losses(list(made.values()), _of_experts, search, "what quantised experts lose on inputs")
    for path, each in made.items():
        module = each.swap.module
        each.error = loss = lost[id(module)]
        if loss <= accuracy:
            each.swap.state.loss = loss  # type: ignore[attr-defined]
            search.taken.add(id(module))
            yield Replaced.of(path, each)
            continue
        code = ReasonCode.QUANT_ACCURACY_THRESHOLD_EXCEEDED
        why = f"[{code}] it loses {loss:.2g} of its output, accuracy={accuracy:g} allows less"
        yield Left(path, type(module).__name__, f"{asked}: {why}")


def _made(plain: Candidate, of: str, activations: str | None) -> Candidate | str:
    module = plain.swap.module
    assert isinstance(plain.swap.state, Experts)
    sizes = [each.shape[1 if plain.swap.state.form.transposed else 2] for each in plain.swap.state.own(module)]
    fitting = for_columns(of, math.gcd(*sizes))
    if fitting is None:
        return f"no group of {LEAST_GROUP[of.partition(':')[0]]} divides their {sizes[0]} and {sizes[1]} columns"
    state = CodedExperts(module, plain.swap.state, fitting, activations)
    rows, (ids, shares) = plain.example, plain.others
    given, named = call_of(rows, state.weights(module), ids, shares, state.packed)
    named |= state.told(module)
    if activations is not None and (why := _unrounded(lz.explain("moe_experts", *given, **named))):
        return f"activations={activations!r}: {why}"
    how = "rows as they are" if activations is None else f"rows {activations}"
    return candidate(
        module,
        mixed,
        state,
        kind=state.kind,
        calls=f"lz.moe_experts with {state.kind} weights and {how}",
        example=rows,
        others=plain.others,
        asked=("moe_experts", given, named),
        may_read=True,
    )


def _unrounded(report: Report) -> str:
    """Why no kernel rounds rows; empty where the chosen one does, which then takes no calls whose rows stay."""
    alone = (ROUNDED.name,)
    if report.chosen is not None and report.chosen.kernel.operations == alone:
        return ""
    of = [each for each in report.candidates if each.kernel.operations == alone and each.reasons]
    refused = "; ".join(f"{each.kernel.id}: {', '.join(map(str, each.reasons))}" for each in of)
    return f"no kernel rounds the rows of such experts here ({refused})"


def losses(made: Sequence[Candidate], compute: Callable[..., Tensor], search: Search, what: str) -> dict[int, float]:
    """How far results are from the modules' own, relative to their size: on the inputs' rows, else on random ones.

    ``compute`` takes a candidate and rows of what its module is called with.
    """
    of = {each.swap.module: each for each in made}
    sums: dict[Module, list[float]] = {}

    def note(module: Module, given: tuple[Any, ...], output: Any) -> None:
        if len(given) == 1 + len(of[module].others) and isinstance(output, Tensor) and given[0].numel():
            apart = -(-given[0].numel() // given[0].shape[-1] // ROWS)
            with torch.no_grad():
                few = [each.reshape(-1, each.shape[-1])[::apart] for each in (output, *given)]
                wanted = few[0].float()
                off = compute(of[module], *(each.contiguous() for each in few[1:])).float() - wanted
            known = sums.setdefault(module, [0.0, 0.0])
            known[0] += off.square().sum().item()
            known[1] += wanted.square().sum().item()

    if search.workload is not None and made and search.time.allows(what, RUN, 2):
        with watching(of, after=note):
            search.workload.run()
    for number, (module, each) in enumerate(of.items()):
        search.tell("quantising", number, len(of))
        if module not in sums:  # no input came there
            given = each.example, *each.others
            with quiet(module):
                note(module, given, stock_forward(module)(*given))
    return {id(module): math.sqrt(off / whole if whole else off) for module, (off, whole) in sums.items()}


ROWS = 256
"""Rows of one call at most whose loss is computed."""


def _of_experts(found: Candidate, rows: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    assert isinstance(found.swap.state, Experts)
    return compute(found.swap.state, found.swap.module, rows, ids, shares)


_CALLS = "lz.moe_experts in mxfp4, swiglu_oai"
_BIASES = "gate_up_proj_bias", "down_proj_bias"
_ROUTES = "_is_hooked"
"""With it the block around the experts asks its router, and calls their forward with ids and shares."""


class MxExperts(Packs):
    """Both stacks, read where the module keeps them.

    Attributes:
        weights: gate and up, and down.
    """

    sets = MappingProxyType({_ROUTES: True})

    def __init__(self, module: Module) -> None:
        self._note(_kept(module))
        super().__init__(self.weights, pack=True)

    def _note(self, kept: list[Tensor]) -> None:
        gate_up, gate_up_scale, down, down_scale = (each.mT.contiguous() for each in kept)
        self.weights = QuantizedWeight.from_mx(gate_up, gate_up_scale), QuantizedWeight.from_mx(down, down_scale)
        self._kept, self._versions = kept, list(map(version, kept))

    def follow(self, module: Module) -> bool:
        """Take what the module keeps now; whether that still is mxfp4."""
        now = _kept(module)
        if list(map(id, now)) == list(map(id, self._kept)) and list(map(version, now)) == self._versions:
            return True
        try:
            self._note(now)
        except (InvalidCallError, ValueError):  # another layout: its own code knows
            return False
        self.renew(*self.weights)
        return True

    def arguments(self, module: Module, rows: Tensor, ids: Tensor, shares: Tensor) -> tuple[tuple[Any, ...], Any]:
        """Of a call, by place and by name."""
        given, named = call_of(rows, self.weights, ids, shares, self.forms_for(rows))
        alpha, limit = numbers_of(module)
        first, second = (module._parameters[each].to(rows.dtype) for each in _BIASES)  # type: ignore[union-attr]
        named |= {"gate_up_bias": first, "down_bias": second, "activation": "swiglu_oai"}
        return given, named | {"alpha": alpha, "limit": limit}


@as_forward
def _mx_experts(self: Module, hidden_states: Tensor = ABSENT, /, *others: Any, **named: Any) -> Any:
    if hidden_states is ABSENT:
        return by_name(_mx_experts, self, named)
    state: Any = self.__dict__.get(MARK)
    mine = not torch.compiler.is_compiling() and not named and [type(each) for each in others] == [Tensor, Tensor]
    if mine and serves(state, hidden_states, *map(self._parameters.get, _BIASES), others[1]) and state.follow(self):
        given, told = state.arguments(self, hidden_states, *others)
        return lz.moe_experts(*given, **told)
    return type(self).forward(self, hidden_states, *others, **named)


def _kept(module: Module) -> list[Tensor]:
    """Numbers and scales of both stacks, (E, K / 2, N) and (E, K / 32, N); none where it keeps none of mxfp4."""
    found = []
    for name in ("gate_up_proj", "down_proj"):
        config = getattr(module, f"{name}_precision_config", None)
        for each in (getattr(module, name, None), getattr(config, "weight_scale", None)):
            storage = getattr(each, "storage", None)
            data = getattr(storage, "data", None)
            if not isinstance(data, Tensor) or data.ndim != 3 or data.dtype is not torch.uint8:
                return []
            found.append(data)
    return found if set(_BIASES) <= module._parameters.keys() else []


def find_kept(search: Search) -> Iterator[Replaced | Left]:
    """Stacks of mxfp4 on a CPU, as modules of Transformers keep them."""
    parents = {id(child): parent for parent in search.root.modules() for child in parent.children()}
    for path, module in search.root.named_modules():
        if not (kept := _kept(module)) or kept[0].device.type != "cpu":
            continue
        search.taken.add(id(module))
        found = _checked(module, parents.get(id(module)))
        name = type(module).__name__
        yield Left(path, name, found) if isinstance(found, str) else Replaced(path, name, "experts", *found, None)


def _checked(module: Module, parent: Module | None) -> tuple[str, str | None, float, Swap] | str:
    """What it calls, the kernel, how far it is from the formula and its swap; or why it is left."""
    if why := why_not(module):
        return why
    if _ROUTES in module.__dict__:
        return f"its {_ROUTES} is set: another hook has the block call it"
    if parent is not None and has_own_forward(parent):
        return "the forward of the block around it was exchanged on the instance, and reads the weights by itself"
    try:
        state = MxExperts(module)
    except (InvalidCallError, ValueError) as wrong:
        return in_short(wrong)
    near = (parent or module).parameters()
    dtype = next((each.dtype for each in near if each.is_floating_point()), torch.float32)
    shape = state.weights[0].shape
    example = example_of(shape, min(shape[0], 2), dtype, torch.device("cpu"))
    with torch.no_grad():
        given, named = state.arguments(module, *example)
        few: Any = {name: each[:2] if isinstance(each, Tensor) else each for name, each in named.items()}
        rows, gate_up, down, *others = given
        error = distance(
            lz.moe_experts(*given, **named), moe_experts(rows.float(), gate_up[:2], down[:2], *others, **few)
        )
        kernel = str(lz.which("moe_experts", *given, **named)["kernel_id"])
    if not agrees(error, dtype):
        return f"{_CALLS} by {kernel} was off by {error:.2g} of the largest value"
    return _CALLS, kernel, error, Swap(module, _mx_experts, state)


SURELY = 1.25
"""A format is left out unseen where it lost so many times what is allowed: other rows lose a little less or more."""


def work_of(weight: Tensor, of: str, activations: str | None, *, on_inputs: bool) -> Work:
    """The work under which the loss of a weight (N, K) in a format is kept."""
    facts = {
        "operation": f"optimize.weights.{of}",
        "dtype": dtype_name(weight.dtype),
        "shape": " x ".join(map(str, weight.shape)),
        "activations": str(activations),
        "rows": "of inputs" if on_inputs else "random",
        "weight": mark_of(weight.detach()),
        "device_name": Device.detect(weight.device).name,
    }
    return Work(tuple(sorted(facts.items())))


def known(work: Work, device: torch.device) -> float | None:
    """The loss that is kept for a work, by kernels as they are here; None where there is none."""
    ledger = ENGINE.ledger
    if not isinstance(ledger, StoreLedger):
        return None
    found = ledger.times.errors(work, Device.detect(device))
    return max(found.values()) if found else None


def keep(found: Candidate, work: Work, loss: float) -> None:
    """Keep what a layer lost, with the time of its product with the example's rows."""
    ledger, state, kernel = ENGINE.ledger, found.swap.state, found.kernel
    assert isinstance(state, CodedProduct)
    if not isinstance(ledger, StoreLedger) or kernel is None or not math.isfinite(loss):
        return
    module, rows = found.swap.module, found.example
    with quiet(module):
        took_us = max(1e6 * timing.taken(lambda: call(state, rows, bias_of(module)), rows.device), 0.1)
    told = Measurement(took_us, took_us, 0.0, 1, noise=1.0, origin="optimize", error=loss)
    ledger.times.record_work(REGISTRY.kernel(kernel), work, Device.detect(rows.device), told)
