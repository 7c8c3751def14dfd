"""Experts of a mixture whose weights are quantised because a caller asks for it, within a bound on what they lose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import layerzero as lz
from layerzero.core.plan import Report
from layerzero.core.reasons import ReasonCode
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules.experts import Experts, call_of, compute, experts, mixed
from layerzero.integrations.optimize.swaps.candidate import Candidate, candidate, quiet, refusal, watching
from layerzero.integrations.optimize.swaps.codes import Requested, narrowed
from layerzero.integrations.optimize.swaps.swap import stock_forward
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Replaced
from layerzero.integrations.optimize.times.workload import RUN
from layerzero.ops.linear.packed import PACKED, PackedWeight
from layerzero.ops.moe.quantized import ROUNDED


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
        if [each.kind_for(weight) for each, weight in zip(self._sources, own, strict=False)] != [PACKED, PACKED]:
            later, self._sources = bool(self._sources), tuple(map(PackedWeight, own))
            with torch.no_grad():
                rows = [(each.detach().mT if self.form.transposed else each.detach()).contiguous() for each in own]
                self._codes = narrowed(rows[0], self.of), narrowed(rows[1], self.of)
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
    losses = _losses(list(made.values()), search)
    for path, each in made.items():
        module = each.swap.module
        each.error = loss = losses[id(module)]
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
    if of.startswith("int4"):
        sizes = [each.shape[1 if plain.swap.state.form.transposed else 2] for each in plain.swap.state.own(module)]
        group = math.gcd(*sizes, int(of.partition(":")[2] or 128))
        if group < LEAST_GROUP:
            return f"no group of {LEAST_GROUP} divides their {sizes[0]} and {sizes[1]} columns"
        of = f"int4:{group}"
    state = CodedExperts(module, plain.swap.state, of, activations)
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
    )


def _unrounded(report: Report) -> str:
    """Why no kernel rounds rows; empty where the chosen one does, which then takes no calls whose rows stay."""
    alone = (ROUNDED.name,)
    if report.chosen is not None and report.chosen.kernel.operations == alone:
        return ""
    of = [each for each in report.candidates if each.kernel.operations == alone and each.reasons]
    refused = "; ".join(f"{each.kernel.id}: {', '.join(map(str, each.reasons))}" for each in of)
    return f"no kernel rounds the rows of such experts here ({refused})"


LEAST_GROUP = 32
"""Columns that share a scale, where no more divide a row."""


def _losses(made: list[Candidate], search: Search) -> dict[int, float]:
    """How far results are from the modules' own, relative to their size: on the inputs' rows, else on random ones."""
    states: dict[Module, Any] = {each.swap.module: each.swap.state for each in made}
    sums = {module: [0.0, 0.0] for module in states}

    def note(module: Module, given: tuple[Any, ...], output: Any) -> None:
        if len(given) == 3 and isinstance(output, Tensor) and given[0].numel():
            apart = -(-given[0].shape[0] // ROWS)
            rows, ids, shares = (each[::apart] for each in given)
            wanted = output[::apart].float()
            with torch.no_grad():
                off = compute(states[module], module, rows, ids, shares).float() - wanted
            sums[module][0] += off.square().sum().item()
            sums[module][1] += wanted.square().sum().item()

    if search.workload is not None and made and search.time.allows("what quantised experts lose on inputs", RUN, 2):
        with watching(states, after=note):
            search.workload.run()
    for each in made:
        module, given = each.swap.module, (each.example, *each.others)
        if not any(sums[module]):  # no input came there
            with torch.no_grad(), quiet(module):
                note(module, given, stock_forward(module)(*given))
    return {id(module): math.sqrt(off / whole if whole else off) for module, (off, whole) in sums.items()}


ROWS = 256
"""Rows of one call at most whose loss is computed."""
