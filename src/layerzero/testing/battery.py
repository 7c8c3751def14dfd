"""Every check of one kernel in one operation, in an order that never changes, so that a later process can go on.

First the checks of what the kernel declares; last, what the library does beyond its limits, because that may do harm.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from layerzero.core.dtypes import dtype_name
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Dtype
from layerzero.core.operation import Case, Operation
from layerzero.engine.probe import mark_broken
from layerzero.engine.proofs import declared
from layerzero.testing import artefacts, boundaries, execution, invariance, quick_checks, randomness
from layerzero.testing.artefacts import Note, Play, fairly, just, one, refusal, with_sizes, with_value
from layerzero.testing.boundaries import LimitBreak
from layerzero.testing.compare import draws
from layerzero.testing.generate import RandomCall, draw, drawn_numbers, function_of
from layerzero.testing.report import EVERY_CHECK
from layerzero.testing.single_run import FORMS, Finding, Trial, all_threads, attempt, raised, reshaped, taken
from layerzero.testing.sizes import LARGE, CheckSetting, base_case, cheap_case, small_cases, tied, with_axis

_THREADS_SECONDS = 240.0
"""Experts of float8 by three threads of two cores' teams each took 50 s (Intel Xeon with AMX, 2026-12-01)."""

BUILD_SECONDS = 600.0
"""How long a check may take that compiles."""

DRAWS_A_CALL = 16
"""How many random calls are drawn, at most, to find one that the kernel takes."""

GRADIENT_CALLS = 5
"""Random calls whose gradients are compared, of each dtype."""

POOL = 100
"""Random calls among which those are looked for that one limit alone refuses."""

ALL_THREADS_EVERY = 8
"""One random call in so many runs on all of torch's threads; small tensors gain nothing from them."""


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """One check: its name, unique for a kernel and operation, what it does, and how long it may be silent.

    ``play`` gets a function that it tells what it is about to run, and returns None where there is nothing to check.
    """

    name: str
    play: Play
    seconds: float | None = None


@dataclass(slots=True)
class Battery:
    """The checks of a kernel in one of its operations."""

    kernel: Kernel
    operation: Operation
    device: str
    seed: int
    calls: int
    _found: list[LimitBreak] | None = None
    _broken: bool = False

    def checks(self) -> Iterator[KernelCheck]:
        """What the kernel declares, checked."""
        untried = self._untried()
        if untried:
            yield KernelCheck(EVERY_CHECK, just(Finding, "not tried", untried))
            return
        for setting in self._settings():
            if self.kernel.jit:
                yield KernelCheck(f"build, {dtype_name(setting.dtype)}", self._build(setting), BUILD_SECONDS)
            case, trial = base_case(self.kernel, setting)
            if trial is None or trial.reasons:
                yield KernelCheck(f"cases, {dtype_name(setting.dtype)}", just(refusal, trial))
                yield KernelCheck(f"random calls, {dtype_name(setting.dtype)}", self._random(setting.dtype))
                continue
            yield KernelCheck(f"load, {dtype_name(setting.dtype)}", just(self._load, trial), BUILD_SECONDS)
            if self._broken:
                return
            yield from self._of_dtype(setting, case, trial)
        yield from self._limits()

    def probes(self) -> Iterator[KernelCheck]:
        """What the library does beyond the kernel's limits."""
        setting, _, trial = self._first_taken()
        if setting is None or trial is None:
            return
        for bound in self._bounds():
            if bound.untried and not bound.illegal:
                yield KernelCheck(f"beyond {bound.text}", just(Finding, "not tried", bound.untried))
            for number, (shown, lifted) in enumerate(bound.illegal, 1):
                count = f" ({number})" if len(bound.illegal) > 1 else ""
                yield KernelCheck(f"beyond {bound.text}{count}", just(boundaries.probe_outcome, shown, lifted))

    def _untried(self) -> str:
        """Why nothing at all can be checked, if so."""
        name = self.operation.name
        if function_of(self.operation) is None:
            return f"{name} belongs to no public function"
        if not self.operation.dtypes:
            return (
                f"{name} names no dtype that a call may have and its judges know: wanted a tolerance by dtype, or a "
                f"dtype_constraint of {self.operation.schema.dtype_tensor.name}"
            )
        return "" if self.operation.cases else f"{name} has no case"

    def _settings(self) -> list[CheckSetting]:
        layout = self.operation.layouts[0] if self.operation.layouts else ""
        return [CheckSetting(self.operation, dtype, self.device, layout) for dtype in self.operation.dtypes]

    def _build(self, setting: CheckSetting) -> Play:
        def play(note: Note) -> Finding:
            try:
                return artefacts.built(self.kernel, setting, note)
            except (ImportError, OSError) as error:
                return self._unloadable(error)

        return play

    def _load(self, trial: Trial) -> Finding:
        """Load the library: one that does not is a reason against all its kernels and no mistake of this one."""
        try:
            trial.plan()
        except (ImportError, OSError) as error:
            return self._unloadable(error)
        except Exception as error:  # noqa: BLE001  # whatever loading raises is a finding
            return Finding("wrong", raised(error))
        return Finding("passed", "loaded")

    def _unloadable(self, error: ImportError | OSError) -> Finding:
        self._broken = True
        return Finding("refused", str(mark_broken(self.kernel.backend, error)))

    def _of_dtype(self, setting: CheckSetting, base: Case, trial: Trial) -> Iterator[KernelCheck]:
        dtype, kernel = dtype_name(setting.dtype), self.kernel
        if kernel.build_key is not None:
            yield KernelCheck(f"build key, {dtype}", just(artefacts.build_key, kernel, setting, base), BUILD_SECONDS)
        yield KernelCheck(f"threads, {dtype}", just(execution.threads, kernel, setting, base, trial), _THREADS_SECONDS)
        for case in [base, *(each for each in small_cases(self.operation, self.device) if each.name != base.name)]:
            yield KernelCheck(f"case {case.name}, {dtype}", self._calls(functools.partial(one, setting, case)))
        for layout in self.operation.layouts[1:]:
            other = replace(setting, layout=layout)
            yield KernelCheck(f"layout {layout}, {dtype}", self._calls(functools.partial(one, other, base)))
        for form in FORMS:
            yield KernelCheck(f"{form}, {dtype}", self._calls(functools.partial(reshaped, trial.call, form)))
        yield from self._axes(setting, base)
        if execution.by_value(self.operation):
            yield KernelCheck(f"NaN, {dtype}", self._calls(functools.partial(with_value, trial, math.nan, 5)))
            yield KernelCheck(f"infinity, {dtype}", self._infinity(trial))
        yield KernelCheck(f"random calls, {dtype}", self._random(setting.dtype))
        yield from self._arguments(setting, base, trial)
        yield KernelCheck(f"a class of sizes, {dtype}", just(artefacts.serves_its_class, kernel, setting, base))
        yield KernelCheck(f"results of their own, {dtype}", just(execution.results_of_their_own, trial))
        schema = self.operation.schema
        if schema.promises.intersection(schema.handles, kernel.accepts):
            yield KernelCheck(f"a step that advances, {dtype}", just(execution.advanced, trial))
        if declared(kernel.deterministic, trial.facts):
            yield KernelCheck(f"same bits, {dtype}", just(execution.repeats, trial))
        if kernel.batch_invariant:
            yield KernelCheck(f"rows in batches, {dtype}", just(invariance.batches, kernel, setting, base))
        if kernel.tp_invariant:
            yield KernelCheck(f"parts of ranks, {dtype}", just(invariance.ranks, kernel, setting, base))
        if kernel.grad and quick_checks.has_gradients(self.operation, setting.dtype):
            yield KernelCheck(f"gradients, {dtype}", just(quick_checks.gradients, trial))
            for form in FORMS:
                yield KernelCheck(f"gradients of {form}, {dtype}", just(quick_checks.gradients, trial, form))
            yield KernelCheck(f"gradients of random calls, {dtype}", self._random_gradients(setting.dtype, trial))
        if trial.facts.device.torch_type == "cuda":
            yield KernelCheck(f"other stream, {dtype}", just(execution.other_stream, trial))
            yield KernelCheck(f"other device, {dtype}", just(execution.other_device, trial))
            if kernel.graph_safe:
                yield KernelCheck(f"graph capture, {dtype}", just(execution.captured, trial))

    def _arguments(self, setting: CheckSetting, base: Case, trial: Trial) -> Iterator[KernelCheck]:
        """Each argument that the kernel accepts where it matters, and what chance decides."""
        dtype = dtype_name(setting.dtype)
        few = functools.cache(lambda: randomness.few_rows(self.kernel, setting, base))
        drawn = bool(draws(self.operation))
        if drawn:
            yield KernelCheck(f"distribution, {dtype}", lambda _: fairly(few()))
        for claim in self.operation.properties:
            if randomness.accepted(claim, self.kernel):
                yield KernelCheck(f"property {claim.name}, {dtype}", just(randomness.holds, trial, claim))

        def exercised(name: str) -> Finding:
            start = few() if drawn else trial
            return boundaries.exercised(trial if start is None else start, name, lambda: self._drawn(setting.dtype))

        for name in boundaries.checked(self.kernel, self.operation):
            yield KernelCheck(f"argument {name}, {dtype}", just(exercised, name))

    def _drawn(self, dtype: torch.dtype) -> Iterator[RandomCall]:
        for number in drawn_numbers(self.operation, dtype, self.seed, self.calls * DRAWS_A_CALL):
            yield draw(self.operation, dtype, self.seed, number, self.device)

    def _infinity(self, base: Trial) -> Play:
        def play(note: Note) -> Finding | None:
            for text, call in with_value(base, math.inf, -1):
                if trial := taken(self.kernel, self.operation, call):
                    note(f"{text}: {call.text}")
                    return execution.infinity(trial)
            return None

        return play

    def _axes(self, setting: CheckSetting, base: Case) -> Iterator[KernelCheck]:
        """Each axis empty, of one element, and beyond 2048 where the others are small."""
        dtype = dtype_name(setting.dtype)
        first = self._first_taken()[0] == setting  # a square of 2304 takes a second of float64
        cheap = functools.cache(lambda: cheap_case(self.kernel, setting, base))
        for axis in base.sizes:
            for size in (0, 1):
                yield KernelCheck(
                    f"{axis} = {size}, {dtype}",
                    self._first(functools.partial(with_axis, self.operation, base, axis, size), setting),
                )
            for size in LARGE:
                yield KernelCheck(
                    f"{axis} = {size}, {dtype}",
                    self._first(functools.partial(with_sizes, self.operation, cheap, {axis: size}), setting),
                )
            group = tied(self.operation, axis)
            if group[0] == axis and len(group) > 1 and first:
                sizes = dict.fromkeys(group, LARGE[0])
                yield KernelCheck(
                    f"{' = '.join(group)} = {LARGE[0]}, {dtype}",
                    self._first(functools.partial(with_sizes, self.operation, cheap, sizes), setting),
                )

    def _first(self, cases: Callable[[], Iterable[Case]], setting: CheckSetting) -> Play:
        """Run the first of these cases that the kernel takes; refused if it takes none, nothing if none is a call."""

        def play(note: Note) -> Finding | None:
            refused = None
            for case in cases():
                trial = setting.attempt(self.kernel, case)
                if trial is not None and not trial.reasons:
                    note(trial.call.text)
                    return trial.outcome()
                refused = refused or trial
            return None if refused is None else refusal(refused)

        return play

    def _calls(self, calls: Callable[[], Iterable[tuple[str, RandomCall]]]) -> Play:
        """Run each of these calls that the kernel takes."""

        def play(note: Note) -> Finding | None:
            wrong, refused, passed = [], [], 0
            for text, call in calls():
                trial = attempt(self.kernel, self.operation, call)
                if trial is None:
                    continue
                if trial.reasons:
                    refused.append(trial)
                    continue
                note(f"{text or call.name}: {call.text}")
                outcome = trial.outcome()
                passed += outcome.status == "passed"
                if outcome.status == "wrong":
                    wrong.append(f"{text}: {outcome.message}" if text else outcome.message)
            if wrong:
                more = [f"and in {len(wrong) - 1} more ways"] if len(wrong) > 1 else []
                return Finding("wrong", "; ".join([wrong[0], *more]))
            return Finding("passed") if passed else refusal(refused[0]) if refused else None

        return play

    def _random(self, dtype: torch.dtype) -> Play:
        def play(note: Note) -> Finding:
            passed, refused = 0, Counter[str]()
            for number in drawn_numbers(self.operation, dtype, self.seed, self.calls * DRAWS_A_CALL):
                if passed == self.calls:
                    break
                call = draw(self.operation, dtype, self.seed, number, self.device)
                trial = attempt(self.kernel, self.operation, call)
                assert trial is not None
                if trial.reasons:
                    refused[trial.codes] += 1
                    continue
                note(f"{call.name}: {call.text}")
                if number % ALL_THREADS_EVERY:
                    outcome = trial.outcome()
                else:
                    with all_threads():
                        outcome = trial.outcome()
                if outcome.status == "wrong":
                    return Finding("wrong", f"{call.name}: {call.text}: {outcome.message}")
                passed += 1
            if passed:
                return Finding("passed", f"{passed} calls")
            ((codes, _),) = refused.most_common(1) or [("no call of this operation was drawn", 0)]
            return Finding("refused" if refused else "not tried", codes)

        return play

    def _random_gradients(self, dtype: torch.dtype, base: Trial) -> Play:
        """Gradients at drawn shapes, with the arguments that the base call has, too."""

        def play(_: Note) -> Finding:
            schema = self.operation.schema
            extra = {*(each.name for each in schema.optional), *schema.passed} - base.call.arguments.keys()
            dropped = extra | {each.name for each in schema.params if each.random}
            calls = (
                replace(call, arguments={name: value for name, value in call.arguments.items() if name not in dropped})
                for call in self._drawn(dtype)
            )
            return quick_checks.gradients_of(self.kernel, self.operation, calls, GRADIENT_CALLS)

        return play

    def _limits(self) -> Iterator[KernelCheck]:
        setting, _, trial = self._first_taken()
        if setting is None or trial is None:
            return
        for text, device, limit in boundaries.device_bounds(self.kernel, trial):
            yield KernelCheck(f"limit {text}", just(boundaries.device_outcome, self.kernel, trial, device, limit))
        for bound in self._bounds():
            yield KernelCheck(f"limit {bound.text}", just(boundaries.bound_outcome, self.kernel, setting, bound))

    def _first_taken(self) -> tuple[CheckSetting | None, Case, Trial | None]:
        """The first dtype that the kernel takes a case in."""
        for setting in [] if self._untried() else self._settings():
            case, trial = base_case(self.kernel, setting)
            if trial is not None and not trial.reasons:
                return setting, case, trial
        return None, self.operation.cases[0], None

    def _bounds(self) -> list[LimitBreak]:
        if self._found is None:
            self._found = self._look_for_bounds()
        return self._found

    def _look_for_bounds(self) -> list[LimitBreak]:
        setting, case, trial = self._first_taken()
        if setting is None or trial is None:
            return []
        found = list(boundaries.sized_bounds(self.kernel, setting, case))
        dtypes = [limit for limit in self.kernel.limits if isinstance(limit, Dtype)]
        for limit in dtypes:
            found += boundaries.dtype_bounds(self.kernel, limit, self._settings(), case)
        pool = functools.partial(lambda dtype: list(itertools.islice(self._drawn(dtype), POOL)), setting.dtype)
        return [*found, *boundaries.other_bounds(self.kernel, setting, trial, pool)]
