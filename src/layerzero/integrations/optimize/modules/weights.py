"""Linear layers whose weights are quantised because a caller asks for it, within a bound for each."""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module

from layerzero.backends.torch.quantized_linear import WIDENING
from layerzero.core.arguments import told
from layerzero.core.device import Device
from layerzero.core.reasons import ReasonCode
from layerzero.engine.config import current_policy
from layerzero.engine.policy import Policy
from layerzero.integrations.optimize.attention.transformers import Search
from layerzero.integrations.optimize.modules import coded_experts
from layerzero.integrations.optimize.modules.coded_experts import losses
from layerzero.integrations.optimize.modules.int8 import KIND, product_of, untimed
from layerzero.integrations.optimize.swaps.candidate import Candidate, quiet, random_rows, refusal, watching
from layerzero.integrations.optimize.swaps.codes import LEAST_GROUP, CodedProduct, Made, bias_of, call, for_columns
from layerzero.integrations.optimize.swaps.swap import SIZES, size_of, stock_forward, weight_of
from layerzero.integrations.optimize.swaps.weights import is_plain, may_be_product, turns
from layerzero.integrations.optimize.times import timing
from layerzero.integrations.optimize.times.report import NO_TIME, Left, Optimized, Replaced
from layerzero.integrations.optimize.times.workload import RUN
from layerzero.ops.linear.packed import DENSE, PackedWeight
from layerzero.ops.quantize.conversion import PATHS, ranked
from layerzero.tuning.storage.rows import Work

FORMATS = ("int8", "int4", "int4:32", "fp8")
"""What weights may be quantised to: int8 and float8 with a scale for each output, four bits with one for each 128 or 32
columns of it."""

IN_FOUR_BITS = ("nvfp4", "mxfp4")
"""What else, on demand or where a device computes in it and time comes first."""

AUTO = "auto"
"""Of these that which takes the least time, of those within the bound; for each layer."""

ACTIVATIONS = (None, "int8")

ROWS_STAY = ("fp8", *IN_FOUR_BITS)
"""Formats whose rows no kernel rounds to int8."""

ACCURACY = {"int8": 0.03, "int4": 0.15, "int4:32": 0.15, "fp8": 0.05, "mxfp4": 0.15, "nvfp4": 0.15, AUTO: 0.03}
"""How far a layer's output may be from its own, relative to its size. Normal rows lose 0.011 in int8, rows that are
products of two such numbers, as in gated blocks, 0.026 (1024 inputs, 2816 of them). Normal weights lose 0.10 in four
bits in groups of 128, 0.09 in groups of 32, and 0.027 in float8."""

TURNS = 5
"""Rounds in which the formats of a layer are timed, behind the one that packs."""


@dataclass(frozen=True)
class Request:
    """What a caller asks for besides what computes the same.

    Attributes:
        weights: what they are quantised to.
        activations: what rows are quantised to; None for as they are.
        accuracy: how far each layer's output may be from its own, relative to its size.
        known: of layers that were timed, the formats, those first that take least.
        policy: the settings, ``quant.*`` among them.
    """

    weights: str
    activations: str | None
    accuracy: float
    known: dict[Hashable, list[str]] = field(default_factory=dict)
    policy: Policy = field(default_factory=current_policy)

    def __str__(self) -> str:
        rows = "" if self.activations is None else f", activations={self.activations!r}"
        return f"weights={self.weights!r}{rows}"

    def formats(self, device: torch.device) -> list[str]:
        """What comes into question, in order; behind the requested format those that replace it without a kernel."""
        native = Device.detect(device).dtypes
        if self.weights != AUTO:
            others = () if self.policy["quant.fallback"] == "never" else PATHS.get(self.weights.partition(":")[0], ())
            return [self.weights, *ranked(others, self.policy, native)]
        quick, profile = self.policy["quant.priority"] == "performance", dict(self.policy["quant.profile"])
        more = [each for each in IN_FOUR_BITS if quick and each in native]
        within = [each for each in (*more, *FORMATS) if profile.get(each.partition(":")[0], 0.0) <= self.accuracy]
        return ranked(within, self.policy, native)

    def find(self, search: Search) -> Iterator[Replaced | Left]:
        """Linear layers whose output stays within the bound; what holds them stays as it is, save decoder layers."""
        of = KIND if self.weights == AUTO else self.weights
        activations = None if of in ROWS_STAY else self.activations
        yield from coded_experts.find(search, of, activations, self.accuracy, str(self))
        parents = {id(child): parent for parent in search.root.modules() for child in parent.children()}
        layers: dict[str, tuple[Module, bool]] = {}
        heads = _heads(search.root)
        any_linear = False
        for path, module in search.root.named_modules():
            why = refusal(module, parents.get(id(module)))  # first, for what is no torch's Linear is run
            turned = False if is_plain(module) else None if why else turns(module)
            if turned is None and not (why and may_be_product(module)):
                continue
            any_linear = True
            why = why or untimed(search, weight_of(module))
            why = why or ("" if weight_of(module).isfinite().all() else "its weight is not finite, as all codes are")
            if not why and id(module) in heads and search.workload is None:
                why = f"it gives the model's output; pass inputs= to see what {self.weights} loses there"
            if why:
                yield Left(path, type(module).__name__, f"{self}: {why}")
            else:
                layers[path] = module, bool(turned)
        if not any_linear:
            yield Left("", type(search.root).__name__, f"{self}: it has no Linear with a floating weight of its own")
        sizes = _sizes([module for module, _ in layers.values()], search) if self._is_timed else {}
        orders = {path: self._order(search, *layer, sizes) for path, layer in layers.items()}
        taken, last = set[int](), dict.fromkeys(layers, "")
        kept: dict[int, Work] = {}
        while layers:
            made: dict[str, Candidate] = {}
            for path, (module, turned) in list(layers.items()):
                found = self._next(search, module, orders[path], kept, turned=turned)
                if isinstance(found, Candidate):
                    made[path] = found
                    continue
                del layers[path]
                others = PATHS.get(self.weights, ()) if self.policy["quant.fallback"] == "never" else ()
                step = f"; set quant.fallback to requested for {' or '.join(others)}" if others and last[path] else ""
                yield Left(path, type(module).__name__, f"{self}: {last[path] or found}{step}")
            lost = losses(list(made.values()), _of_rows, search, "what quantised weights lose on the inputs")
            for path, each in made.items():
                module, loss = each.swap.module, lost[id(each.swap.module)]
                if widens := _widens(each):
                    last[path] = "; ".join(filter(None, [last[path], widens]))
                    continue
                if self.weights != AUTO:
                    each.swap.state.instead_of = self.weights if last[path] else ""  # type: ignore[attr-defined]
                    orders[path].clear()  # another format is for kernels, not for what is lost
                coded_experts.keep(each, kept[id(module)], loss)
                if not loss <= self.accuracy:
                    last[path] = "; ".join(filter(None, [last[path], self._exceeded(each.kind, loss)]))
                    continue
                del layers[path]
                each.error = each.swap.state.loss = loss  # type: ignore[attr-defined]
                taken.add(id(module))
                if last[path] and self.weights != AUTO:
                    yield Left(
                        path, type(module).__name__, f"{self}: {last[path]}; it is in {each.kind} where that gains"
                    )
                yield Replaced.of(path, each)
        for module in search.root.modules():
            if any(id(each) in taken for each in module.modules()):
                search.taken.add(id(module))
                if id(module) not in taken and search.workload is not None:  # else nothing times both together
                    search.holders.add(id(module))

    @property
    def _is_timed(self) -> bool:
        """Whether time decides among formats."""
        return self.weights == AUTO and self.policy["quant.priority"] != "high"

    def _exceeded(self, of: str, loss: float, when: str = "") -> str:
        """That a layer loses more in a format than is allowed."""
        code, of = ReasonCode.QUANT_ACCURACY_THRESHOLD_EXCEEDED, of.partition(":")[0]
        of = f" in {of}" if of != self.weights.partition(":")[0] else ""
        return f"[{code}] it loses {loss:.2g} of its output{of}{when}, accuracy={self.accuracy:g} allows less"

    def _next(
        self, search: Search, module: Module, order: list[str], kept: dict[int, Work], *, turned: bool
    ) -> Candidate | str:
        """A layer in the next format of an order that divides its columns, or why there is none.

        A format in which this very weight is known to lose too much is left out, where rows are random: with inputs
        they are others each time. ``kept`` gets the work of its loss.
        """
        weight, why = weight_of(module), f"quant.profile says that each format loses more than {self.accuracy:g}"
        step = f"quantising {type(module).__name__}"
        columns = weight.shape[0 if turned else 1]
        for _ in order[:] if self.weights == AUTO else order[:1]:  # those behind it are for where no kernel takes it
            wanted = order.pop(0)
            if (of := for_columns(wanted, columns)) is None:
                why = f"no group of {LEAST_GROUP[wanted.partition(':')[0]]} divides its {columns} columns"
                continue
            rows = None if of in ROWS_STAY else self.activations
            work = coded_experts.work_of(weight, of, rows, on_inputs=search.workload is not None)
            lost = coded_experts.known(work, weight.device) if search.workload is None else None
            if lost is not None and lost > coded_experts.SURELY * self.accuracy:
                why = self._exceeded(of, lost, " as measured before")
            elif not search.time.allows(step, step):
                return NO_TIME
            else:
                kept[id(module)] = work
                with search.time.taking(step):
                    return self._made(module, of, turned=turned)
        return why

    def _made(self, module: Module, of: str, *, turned: bool) -> Candidate:
        weight = weight_of(module)
        state = Made(weight, of, None if of in ROWS_STAY else self.activations, turned=turned)
        columns = weight.shape[0 if turned else 1]
        return product_of(module, state, random_rows(module, columns, dtype=weight.dtype, device=weight.device))

    def _order(self, search: Search, module: Module, turned: bool, sizes: Mapping[int, Mapping[int, int]]) -> list[str]:
        """The formats, those of products that take least first; of layers of one shape and sizes once."""
        weight = weight_of(module)
        if not self._is_timed:
            return self.formats(weight.device)
        called = sizes.get(id(module)) or dict.fromkeys(SIZES, 1)
        columns = weight.shape[0 if turned else 1]
        formats = list(dict.fromkeys(for_columns(each, columns) or each for each in self.formats(weight.device)))
        about = tuple(weight.shape), weight.dtype, weight.device, turned, tuple(called.items())
        step = f"timing formats of {type(module).__name__}"
        if about not in self.known and search.time.allows(step, step):
            with search.time.taking(step):
                self.known[about] = self._fastest(module, called, formats, turned=turned)
        return list(self.known.get(about, formats))

    def _fastest(self, module: Module, called: Mapping[int, int], formats: Sequence[str], *, turned: bool) -> list[str]:
        """By the time of all calls that are made, each size as often as it comes."""
        weight, took = weight_of(module), dict.fromkeys(formats, math.inf)
        columns = weight.shape[0 if turned else 1]
        fitting = [each for each in formats if for_columns(each, columns)]
        made = {each: self._made(module, each, turned=turned).swap.state for each in fitting}
        took |= dict.fromkeys(made, 0.0)
        for rows, count in called.items():
            given = random_rows(module, columns, dtype=weight.dtype, device=weight.device)
            given = given.reshape(-1, columns).repeat(-(-rows // 6), 1)[:rows]

            def sample(name: str, given: Tensor = given) -> float:
                return timing.taken(lambda: call(made[name], given, bias_of(module)), given.device)  # type: ignore[arg-type]

            with torch.no_grad(), quiet(module):
                seconds = timing.race(list(made), sample, lambda _, turn: list(made) if turn <= TURNS else ())
            for name, each in seconds.items():
                took[name] += count * statistics.median(each[1:])  # the first packs
        return sorted(took, key=took.__getitem__)


def _widens(found: Candidate) -> str:
    """Why a weight stays as it is: no kernel takes its codes. On a CPU the clock decides, where one may."""
    kernel, timed = found.kernel or "", found.example.device.type in timing.TIMED
    if (timed and found.kind not in IN_FOUR_BITS) or not kernel.startswith(WIDENING):
        return ""
    step, code = f"`layerzero vet {found.asked[0]}` may allow others", ReasonCode.QUANT_FORMAT_UNSUPPORTED
    why = f"writes a weight of {found.kind} out before each product, and no other kernel may run"
    return f"[{code}] {kernel} {why}; {step}"


def keep_sizes(search: Search, report: Optimized) -> None:
    """Give calls back to a module's own code whose sizes nothing has timed yet and that it computes faster.

    The caller's inputs, or random rows, decided for sizes that they have: a step of one token says nothing of a prompt.
    """
    found = [each for each in report.replaced if isinstance(getattr(each.exchange, "state", None), CodedProduct)]
    found = [
        each for each in found if each.candidate is not None and each.candidate.example.device.type in timing.TIMED
    ]
    timed = dict.fromkeys(SIZES, 1)
    sizes = _sizes([each.swap.module for each in found], search) if search.workload is not None else {}
    known: dict[Hashable, dict[int, float]] = {}
    told: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in found:
        state, module, example = each.swap.state, each.swap.module, each.candidate.example  # type: ignore[union-attr]
        assert isinstance(state, CodedProduct)
        called = timed if search.workload is None else sizes.get(id(module), {})
        about = (
            each.kind,
            state.activations,
            example.shape[-1],
            example.dtype,
            each.module,
            tuple(called),
            state.many,
            tuple(state.pair[0].shape),
        )
        step = f"timing {each.module} on other sizes"
        if about not in known:
            if not search.time.allows(step, step):
                continue
            with search.time.taking(step):
                classes = {size_of(torch.empty(rows, 1, device="meta"), state.many) for rows in called}
                others = [rows for number, rows in enumerate(SIZES) if number not in classes]
                others += [LONG] if max(called, default=0) < LONG // 2 else []
                known[about] = {rows: _ratio(each, rows) for rows in others}
        slower = {rows: ratio for rows, ratio in known[about].items() if ratio > 1 + timing.LEAST}
        if any(rows in SIZES for rows in slower):
            was = state.own_at or (False,) * len(SIZES)
            state.own_at = tuple([one or rows in slower for one, rows in zip(was, SIZES, strict=True)])
        if LONG in slower:
            state.most = max([*called, SIZES[-1]])
        if slower:
            text = ", ".join(f"{rows} rows took {ratio:.2f}" for rows, ratio in slower.items())
            told[each.kind, text].append(each.path.rpartition(".")[2] or "(model)")
    for (kind, text), names in told.items():
        said = ", ".join(dict.fromkeys(names))
        report.kept_sizes.append(f"{kind}: {said}: of the module's own time {text}; such calls run its own code")


LONG = 256
"""Rows of a long prompt. What is slower there than the module's own code serves no more rows than were timed."""


def _ratio(each: Replaced, rows: int) -> float:
    """The time of a product with so many rows, in units of the module's own."""
    swap, example = each.swap, each.candidate.example  # type: ignore[union-attr]
    assert isinstance(swap.state, CodedProduct)
    state = copy.copy(swap.state)  # with forms of its own, which go with it
    state.packed = [
        None if one is None else PackedWeight(one.quantized or one.weight, dense=one.kind == DENSE)
        for one in swap.state.packed
    ]
    given = example.reshape(-1, example.shape[-1]).repeat(-(-rows // 6), 1)[:rows]
    own, turns = stock_forward(swap.module), TURNS if rows < LONG else 2

    def sample(ours: bool) -> float:
        run = (lambda: call(state, given, bias_of(swap.module))) if ours else (lambda: own(given))
        return timing.taken(run, given.device)

    with quiet(swap.module):
        seconds = timing.race((True, False), sample, lambda _, turn: (True, False) if turn <= turns else ())
    pairs = list(zip(seconds[True][1:], seconds[False][1:], strict=True))
    return 1 + timing.gain([(ours, max(own_s, 1e-9)) for ours, own_s in pairs])


def _sizes(layers: Sequence[Module], search: Search) -> dict[int, dict[int, int]]:
    """How many rows the inputs' calls bring to each layer, and how often; those that come to most, with inputs."""
    found: dict[int, Counter[int]] = defaultdict(Counter)

    def note(module: Module, given: tuple[Any, ...], _: Any) -> None:
        if given and isinstance(given[0], Tensor) and given[0].numel():
            found[id(module)][given[0].numel() // given[0].shape[-1]] += 1

    if search.workload is not None and layers and search.time.allows("the sizes of the inputs' calls", RUN, 2):
        with watching(layers, before=note):
            search.workload.run()
    return {
        key: dict(sorted(counts.items(), key=lambda each: -each[0] * each[1])[: len(SIZES)])
        for key, counts in found.items()
    }


def request(weights: Any, activations: Any, accuracy: Any) -> tuple[Request | None, list[str]]:
    """What is wanted, and what is wrong with it."""
    problems = []
    if weights is not None and (not isinstance(weights, str) or weights not in ACCURACY):
        problems.append(f"weights: wanted None or {' or '.join(map(repr, ACCURACY))}, got {told(weights)}")
    if not (activations is None or isinstance(activations, str)) or activations not in ACTIVATIONS:
        problems.append(f"activations: wanted {' or '.join(map(repr, ACTIVATIONS))}, got {told(activations)}")
    if activations is not None and weights in ROWS_STAY:
        problems.append(
            f"activations: wanted None with weights={weights!r}, whose rows stay as they are, got {told(activations)}"
        )
    if accuracy is not None and (
        isinstance(accuracy, bool) or not isinstance(accuracy, (int, float)) or not accuracy >= 0
    ):
        problems.append(f"accuracy: wanted a number from 0 or None, got {told(accuracy)}")
    alone = weights is None and activations is None and current_policy()["quant.fallback"] != "held"
    if accuracy is not None and alone:
        problems.append(f"accuracy: wanted weights= or activations= with it, got {told(accuracy)} alone")
    if problems or weights is None:
        return None, problems
    quick = weights == AUTO and current_policy()["quant.priority"] == "performance"
    usually = ACCURACY["int4" if quick else weights]
    return Request(weights, activations, float(usually if accuracy is None else accuracy)), problems


def rounding(weights: str | None, activations: str | None, accuracy: float | None) -> float | None:
    """What rows may lose of products with weights that the model has quantised; None where they stay as they are."""
    if weights is not None or activations is None:
        return None
    return ACCURACY[activations] if accuracy is None else float(accuracy)


def hints(asked: Request) -> Iterator[str]:
    """What to try where nothing stayed."""
    if asked.activations is None and asked.weights == KIND:
        yield "weights alone gain where a kernel reads int8; pass activations='int8' for products of int8 by int8"


def _heads(root: Module) -> set[int]:
    """Modules that give a model's output, and those whose weight is an embedding's, too."""
    tables = {id(each.weight) for each in root.modules() if isinstance(each, Embedding)}
    found = {id(each) for each in root.modules() if id(each._parameters.get("weight")) in tables}
    for each in root.modules():
        output = getattr(each, "get_output_embeddings", None)
        found |= {id(output())} if callable(output) else set()
    return found


def _of_rows(found: Candidate, rows: Tensor) -> Tensor:
    assert isinstance(found.swap.state, CodedProduct)
    return call(found.swap.state, rows, bias_of(found.swap.module))
