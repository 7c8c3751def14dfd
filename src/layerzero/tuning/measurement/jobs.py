"""What to measure, as data, and in which order: an operation with sizes and a dtype, or a recorded call.

:func:`default_grid` is what ``lz.tune()`` measures without arguments: on a GPU of an H200's speed all of it takes under
five minutes, compiling apart. :func:`telling` orders the cases that a comparison takes: cases serve tests, too, so that
many are tiny. A model fixes some sizes (width, heads, vocabulary) and leaves others to each call (rows, lengths,
batch): the larger the fixed ones, the more a case is like a call of a model. Of cases with the same fixed sizes the
smallest comes first, which decodes, then the largest, then what lies between. :func:`command_for` names the command
that measures a call anew.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import torch

from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.errors import meant
from layerzero.core.evidence import call_work
from layerzero.core.facts import Facts, plain
from layerzero.core.operation import Case
from layerzero.core.recipe import CallRecipe
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import facts as facts_of
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, function_of
from layerzero.ops.calls import accepted, arguments_of, as_shapes, case_of_shapes, function_for, is_call_of
from layerzero.ops.recipes import arguments_of_recipe
from layerzero.testing.generate import RandomCall
from layerzero.tuning.verification.child import rebuilt

T = TypeVar("T")
Shape = Sequence[int] | Sequence[Sequence[int]]
"""Of the first tensor, or of the first several."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call to measure kernels on.

    Attributes:
        operation: its name.
        case: sizes and parameters, where no recipe stands for them.
        dtype: by name.
        layout: of tensors that have one; the operation's first if None.
        recipe: a recorded call, in place of case, dtype and layout.
        count: how often a workload made it.
        for_graph: its handles are such as a captured graph can go on reading.
    """

    operation: str
    case: Case
    dtype: str
    layout: str | None = None
    recipe: CallRecipe | None = None
    count: int = 1
    for_graph: bool = False

    @property
    def name(self) -> str:
        return f"{self.operation} {self.case.name} {self.dtype}"

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells two jobs apart, however they are called."""
        params = tuple(sorted(self.case.params.items(), key=str))
        sizes = tuple(sorted(self.case.sizes.items()))
        return self.operation, self.dtype, self.layout, sizes, str(params), self.recipe and str(self.recipe)

    def make(self, device: torch.device | str) -> RandomCall:
        """The call, with random data on a device."""
        if self.recipe is not None:
            call = rebuilt(self._recipe)
            return RandomCall(call.function, call.arguments, self.name)
        torch.manual_seed(0)
        return RandomCall(self._function, self._arguments(device), self.name)

    def facts(self, device: torch.device | str) -> Facts:
        """The facts of the call on a device, without making its data."""
        if self.recipe is not None:
            return _facts_of_recipe(self._recipe)
        return facts_of(self._function, device=str(device), **self._arguments("meta"))

    @property
    def _recipe(self) -> CallRecipe:
        assert self.recipe is not None
        if not self.for_graph:
            return self.recipe
        return self.recipe.for_graph(REGISTRY.operation(self.operation).schema.handles)

    @property
    def _function(self) -> str:
        return function_for(self.operation).name

    def _arguments(self, device: torch.device | str) -> dict[str, Any]:
        operation, dtype = REGISTRY.operation(self.operation), dtype_named(self.dtype)
        made = arguments_of(
            operation, self.case, dtype, device, layout=self.layout, promised=True, capturable=self.for_graph
        )
        return accepted(function_for(operation), made)


def _facts_of_recipe(recipe: CallRecipe) -> Facts:
    """The facts of a written call, whose tensors are not made: a cache that some machine had may not fit into this one.

    What has no address counts as aligned, so the alignment is what was written down.
    """
    function, arguments = arguments_of_recipe(recipe, REGISTRY.operation(recipe.operation), "meta")
    facts = facts_of(function.name, device=recipe.device, **arguments)
    return facts.with_tensors(
        {
            name: msgspec.structs.replace(each, alignment_bytes=recipe.tensors[name].alignment_bytes)
            for name, each in facts.tensors.items()
        }
    )


def jobs_of_cases(
    operations: Sequence[str], dtypes: Sequence[str], layout: str | None = None, params: Mapping[str, Any] | None = None
) -> Iterator[Job]:
    """The named cases of operations; with further parameters those that are calls with them."""
    for name in operations:
        operation = REGISTRY.operation(name)
        for named in operation.cases:
            case = named
            if params:
                case = replace(named, name=f"{named.name} {_text(params)}", params={**named.params, **params})
                if not is_call_of(operation, case, next(iter(operation.dtypes), torch.float32), layout):
                    continue
            names_dtype = any(isinstance(value, torch.dtype) for value in case.params.values())
            for dtype in dtypes:
                if names_dtype and not is_call_of(operation, case, dtype_named(dtype), layout):
                    continue  # float32 out of float64 is no product
                yield Job(name, case, dtype, layout)


def _text(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={plain(value)}" for name, value in params.items())


def operations_named(name: str) -> tuple[dict[str, object], list[str]]:
    """What a name implies about parameters, and the operations that it covers: a function, operation, alias or glob.

    Raises: KeyError naming the nearest operation.
    """
    if name in FUNCTIONS:
        return {}, [each.name for each in FUNCTIONS[name].operations]
    if name in OPERATION_ALIASES:
        names, implied = OPERATION_ALIASES[name]
        return dict(implied), list(names)
    return {}, sorted(each for each in REGISTRY.operations_named(name) if function_of(each) is not None)


def check_params(names: Sequence[str], params: Iterable[str]) -> None:
    """Refuse what is an argument of none of these operations' calls. Raises: ValueError naming the nearest."""
    of = [REGISTRY.operation(name) for name in names]
    known = {each for one in of for each in (*one.schema.known, *(p.name for p in function_for(one).parameters))}
    for each in params:
        if each not in known:
            near = meant(each, sorted(known))
            raise ValueError(f"{each}: wanted an argument of {' or '.join(names) or 'an operation'}, got none{near}")


def jobs_of_shape(
    names: Sequence[str], shape: Shape, dtype: str, params: Mapping[str, Any], layout: str | None
) -> list[Job]:
    """Jobs from the shapes of the first tensors, for each of these operations that has such calls.

    Raises: ValueError if none has.
    """
    shapes = as_shapes(shape)
    text = ":".join("x".join(map(str, each)) for each in shapes)
    found = []
    for name in names:
        case = case_of_shapes(REGISTRY.operation(name), shapes, layout, params)
        if case is not None:
            found.append(Job(name, case, dtype, layout))
    if not found:
        raise ValueError(
            f"shapes: {text} is no call of {' or '.join(names) or 'any operation'}{f' in {layout}' if layout else ''}: "
            f"wanted the shapes of {_shapes_wanted(names)}; calls that shapes do not say have cases only"
        )
    return found


def _shapes_wanted(names: Sequence[str]) -> str:
    """The tensors whose shapes describe a call: the first ones, each with its axes."""
    said = []
    for name in names:
        tensors = REGISTRY.operation(name).schema.required[:2]
        said.append(" and ".join(f"{each.name} ({', '.join(each.shape_vars)})" for each in tensors))
    return ", or ".join(dict.fromkeys(said)) or "its first tensors"


def default_grid(
    device: str, dtypes: Sequence[str] = (), *, narrow: Mapping[str, Sequence[int]] | None = None
) -> list[Job]:
    """The grid of a kind of device, in an order in which every beginning covers the whole as evenly as it can.

    Args:
        device: ``cpu`` or ``cuda``.
        dtypes: by name; float32 and bfloat16 on a CPU, bfloat16 elsewhere.
        narrow: other sizes than the sweeps have, by the names that operations know.
    """
    dtypes = dtypes or (("bfloat16",) if device == "cuda" else ("float32", "bfloat16"))
    jobs = []
    for name, each in REGISTRY.operations().items():
        if function_of(name) is not None:
            cases = (
                each.cases
                if each.sweep is None and not narrow
                else each.sweep(device, narrow or {})
                if each.sweep
                else ()
            )
            jobs += [Job(name, case, dtype) for case in cases for dtype in dtypes]
    return spread(jobs)


def spread(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs so that an interruption leaves little unknown.

    Each kind of call has its turn, and of a kind it is always the call that is farthest from all before it, beginning
    with the smallest sizes.
    """
    kinds: dict[tuple[object, ...], list[Job]] = defaultdict(list)
    for job in jobs:
        schema = REGISTRY.operation(job.operation).schema
        fixed = tuple((name, size) for name, size in job.case.sizes.items() if not schema.axis(name).live)
        kinds[job.operation, job.dtype, job.layout, tuple(job.case.params.items()), fixed].append(job)
    return in_turn(map(_farthest_first, kinds.values()))


def in_turn(groups: Iterable[Iterable[T]]) -> list[T]:
    """The first of each group, then the second of each: what a cut leaves are further ones of all."""
    return [each for turn in itertools.zip_longest(*groups) for each in turn if each is not None]


def _farthest_first(jobs: list[Job]) -> list[Job]:
    names = sorted({name for job in jobs for name in job.case.sizes})
    points = [[math.log2(max(job.case.sizes.get(name, 1), 1)) for name in names] for job in jobs]
    left = list(range(len(jobs)))
    first = min(left, key=lambda index: sum(points[index]))
    chosen = [first]
    left.remove(first)
    near = {index: math.dist(points[index], points[first]) for index in left}
    while left:
        index = max(left, key=lambda each: near[each])
        chosen.append(index)
        left.remove(index)
        near = {each: min(near[each], math.dist(points[each], points[index])) for each in left}
    return [jobs[index] for index in chosen]


def telling(jobs: Sequence[Job]) -> list[Job]:
    """Order jobs: operations take turns, and so do dtypes; each case comes in one dtype before any comes in two."""
    of: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        of[job.operation].append(job)
    return in_turn(_of_one(each, shift) for shift, each in enumerate(of.values()))


def long_last(jobs: Sequence[Job], is_long: Callable[[Job], bool]) -> Iterator[Job]:
    """Jobs in their order, behind them those that would take much of the time by themselves.

    A job is looked at when its turn comes: to look at all cases of all operations took 4 s before the first was
    measured (AMD EPYC, two cores, 2026-11-23).
    """
    late = []
    for job in jobs:
        if is_long(job):
            late.append(job)
        else:
            yield job
    yield from late


def _of_one(jobs: Sequence[Job], shift: int) -> list[Job]:
    """The jobs of one operation; ``shift`` says which dtype begins."""
    cases = list({job.case.name: job for job in jobs}.values())
    groups: dict[float, list[Job]] = defaultdict(list)
    for job in cases:
        groups[_size(job, live=False)].append(job)
    names = [job.case.name for fixed in sorted(groups, reverse=True) for job in _ends_first(groups[fixed])]
    dtypes = list(dict.fromkeys(job.dtype for job in jobs))
    place = {name: number for number, name in enumerate(names)}

    def turn(job: Job) -> tuple[int, int]:
        number = place[job.case.name]
        return (dtypes.index(job.dtype) - number - shift) % len(dtypes), number

    return sorted(jobs, key=turn)


def _ends_first(jobs: Sequence[Job]) -> list[Job]:
    """The smallest, the largest, the second smallest, ..."""
    ordered = sorted(jobs, key=lambda job: _size(job, live=True))
    return [ordered[number // 2 if number % 2 == 0 else -1 - number // 2] for number in range(len(ordered))]


def _size(job: Job, *, live: bool) -> float:
    """The logarithm of the product of the sizes that change while a program runs, or of those that do not."""
    schema = REGISTRY.operation(job.operation).schema
    return round(
        sum(math.log2(max(size, 1)) for name, size in job.case.sizes.items() if schema.axis(name).live == live), 6
    )


RECORDED = '`with lz.record("calls.json"): …` around it, then `layerzero tune --manifest calls.json --again`'


def command_for(facts: Facts) -> str:
    """What to run so that this call, and nothing else's evidence in its place, is measured again."""
    wanted, device = call_work(facts), facts.device.torch_type
    for words, jobs in _ways(facts):
        if any(call_work(job.facts(device)) == wanted for job in jobs):
            line = f"layerzero tune {words} --dtype {dtype_name(facts['dtype'])}"  # type: ignore[arg-type]
            if facts.layout not in (None, *facts.operation.layouts[:1]):
                line += f" --layout {facts.layout}"
            if device == "cpu" and torch.cuda.is_available():
                line += " --device cpu"
            line += " --graph" if facts["capturing"] else ""
            return f"`{line} --again`"
    return RECORDED


def _ways(facts: Facts) -> Iterator[tuple[str, list[Job]]]:
    """Arguments of the command that may mean the call, with the jobs of its operation that they stand for."""
    operation, dtype = facts.operation, dtype_name(facts["dtype"])  # type: ignore[arg-type]
    shapes = [each.shape for each in facts.tensors.values()]
    aliases = [(name, implied) for name, (names, implied) in OPERATION_ALIASES.items() if operation.name in names]
    for name, implied in [(operation.name, {}), *aliases]:
        for count in (1, 2):
            text = ":".join("x".join(map(str, each)) for each in shapes[:count])
            try:
                jobs = jobs_of_shape([operation.name], shapes[:count], dtype, implied, facts.layout)
            except ValueError:  # calls that no shape says
                continue
            yield f"{name} --shapes {text}", jobs
    yield f"{operation.name} --cases", list(jobs_of_cases([operation.name], [dtype], facts.layout))
