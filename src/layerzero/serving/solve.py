"""``lz.solve``: record a model over a grid of sizes, build, measure, and write one plan for processes to hold."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import UNSET
from torch.nn import Module
from torch.utils import _pytree as pytree

from layerzero.core.arguments import signature_of
from layerzero.core.device import Device
from layerzero.core.errors import LayerZeroWarning, PolicyError
from layerzero.core.facts import Facts
from layerzero.core.operation import Function
from layerzero.core.plain import PlainFunction
from layerzero.core.plan import Plan, Report
from layerzero.core.system import warn
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import FrozenChoice, choice_of, class_name
from layerzero.engine.jit import name_of
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY
from layerzero.engine.scopes import holding
from layerzero.engine.transforms import ELSEWHERE, Elsewhere
from layerzero.inspection import plan_document
from layerzero.inspection.answers import explain
from layerzero.inspection.freeze import Frost, document
from layerzero.inspection.trace import calls_told
from layerzero.serving.background_builds import build_chosen, build_within
from layerzero.serving.dry_run import run_on_shapes, token_ids
from layerzero.serving.joint_times import chosen_together
from layerzero.tuning.measurement.clocks import current
from layerzero.tuning.measurement.timing import Deadline
from layerzero.tuning.measurement.tune import tune_calls
from layerzero.tuning.measurement.workload import called

BUDGET_S = 600.0
"""Seconds that it takes by default."""

LAST_S = 0.15
"""The share of the budget that is left for builds and for writing when measuring ends. With 0.05 of 240 s, the
largest prompts of an 8B Llama lacked a variant of a norm, and its plan departed there (H200, 2026-11-28)."""

TOGETHER_S = 0.5
"""The same where kernels are chosen together: as much for runs of the whole model as for its calls."""


class Seen:
    """The calls of a model, by the bucket that each is the end of."""

    def __init__(self) -> None:
        self.calls: dict[str, Facts] = {}
        self.scoped = 0
        self.real = False
        """Whether the model has to run for real."""
        self.judged: Elsewhere | None = None
        """What calls without memory got: layers that are alike are judged once."""
        self._names: dict[str, None] = {}
        self.sequence: list[str] = []
        """The calls that were made meanwhile, one after the other."""

    def saw(self, _: Function | PlainFunction, plan: Plan) -> None:
        """Remember a call; one of a scope's settings holds for no other process."""
        facts, policy = plan.report.facts, current_policy()
        if policy is not CONFIGURATION.policy:
            self.scoped += 1
        elif facts.tensors:
            name = class_name(facts, policy, sizes="<=")
            self.calls.setdefault(name, facts)
            self._names[name] = None
            self.sequence.append(name)

    @contextmanager
    def of_one(self, names: list[str]) -> Iterator[None]:
        """Collect the names of the calls that are made meanwhile."""
        self._names = {}
        with calls_told(self.saw):
            yield
        names += sorted({*names, *self._names} - {*names})


class Unseen(Seen):
    """Calls that are made and not recorded, so that kept plans serve them."""

    @contextmanager
    def of_one(self, names: list[str]) -> Iterator[None]:  # noqa: ARG002
        yield


def solve(
    model: Module,
    inputs: Any = None,
    shape_buckets: Mapping[str, Sequence[int]] | None = None,
    *,
    compile_jit: bool = True,
    budget_s: float | None = BUDGET_S,
    strict: bool = False,
) -> Frost:
    """Choose every kernel that a model needs within buckets of sizes, once, and write that down as one document.

        plan = lz.solve(model, shape_buckets={"seq_len": [128, 512, 2048], "batch": [1, 4, 16]}, budget_s=600)
        print(plan)  # a decision table
        plan.write("plan.json")  # lz.freeze("plan.json", model=model) holds it in each serving process

    The model's code runs at each point of the grid, without gradients. It runs on tensors without memory where that
    shows the same calls as its weights do, and for real elsewhere. What these calls would choose is built, every legal
    kernel is measured on them as ``lz.tune`` does, and the fastest is written down. A call lies in a bucket if none of
    its live sizes is larger.

    Args:
        model: a module, on the meta device too; its calls are measured on the current CUDA device then, or the CPU.
        inputs: a tensor, a tuple or a dict that it is called with. With ``shape_buckets`` a function that gives one for
            each point, called with the axes by name. What it returns may itself be a function without arguments, which
            runs the model for real. None: token ids, for what has ``config.vocab_size``, then one token behind them
            where the model returns a cache.
        shape_buckets: the ends of the buckets, by axis: ``seq_len`` and ``batch``, or those that ``inputs`` takes.
        compile_jit: whether kernels may be built; else those that are built are chosen from.
        budget_s: seconds for all of it; a call that is being measured ends. The grid is recorded first: whole on
            tensors without memory, as far as the time goes where it runs for real. With 0 nothing is built or measured,
            and choices follow from what is known; None has no end.
        strict: whether a call outside of all buckets shall be an error where the plan is held.
    Returns: the document. A warning tells what time did not suffice for.
    Raises: TypeError or ValueError for buckets and inputs that mean nothing, and for a model that makes no call of
        LayerZero; PolicyError while choices are frozen; whatever the model raises.
    """
    if ENGINE.frozen is not None:
        raise PolicyError("solve: choices are frozen; wanted lz.thaw() first")
    if not isinstance(model, Module):
        raise TypeError(f"solve: wanted a torch.nn.Module, got {type(model).__name__}")
    deadline = Deadline(budget_s)
    points = grid_of(shape_buckets, inputs)
    seen = Seen()
    plans = list(_recorded(model, inputs, points, seen, deadline))
    left = points[len(plans) :]
    calls = seen.calls
    if not calls:
        hint = "lz.optimize(model), or attn_implementation='layerzero' with Transformers, lets its modules make some"
        raise ValueError(f"solve: wanted a model that calls LayerZero's functions, got none of them; {hint}")
    device = next(iter(calls.values())).device
    problems = [f"{len(left)} of {len(points)} points of the grid were not recorded"] if left else []
    if seen.scoped:
        problems.append(f"{seen.scoped} calls were made under a scope's settings, which no other process has")
    jointly = CONFIGURATION.policy["plan_mode"] and budget_s != 0
    if budget_s != 0:
        last = TOGETHER_S if jointly else LAST_S
        problems += _measured(list(calls.values()), device, deadline, last, compile_jit=compile_jit)
    choices, reports = {}, {}
    for name, facts in calls.items():
        report = explain(facts)
        if report.chosen is None:
            problems.append(f"no kernel may run {name}")
            continue
        reports[name] = report
        choices[name] = choice_of(report.chosen.kernel, facts, CONFIGURATION.policy)
    joint: list[plan_document.Joint] = []
    if jointly:
        joint, problem = _together(model, inputs, [point for point, _ in plans], reports, choices, deadline)
        problems += problem
    kernels = {name: REGISTRY.kernel(each.kernel) for name, each in choices.items()}
    if compile_jit and budget_s != 0 and any(each.build_key for each in kernels.values()):
        within = _within(model, inputs, [point for point, _ in plans], seen, deadline)
        problems += build_within(within, {name: (calls[name], each) for name, each in choices.items()}, deadline)
    artifacts = {
        name: plan_document.BuiltFor(each.id, name_of(each, calls[name])) for name, each in kernels.items() if each.jit
    }
    if problems:
        warn(f"solve: {'; '.join(problems)}", LayerZeroWarning, stacklevel=2)
    name, configuration, digest = plan_document.model_of(model)
    hardware = plan_document.hardware_of(device)
    libraries = plan_document.libraries_of(device, {each.operation.name for each in calls.values()})
    return document(
        choices,
        plan_document.Solved(
            model=name,
            configuration=configuration,
            configuration_hash=digest,
            hardware=hardware,
            libraries=libraries,
            capabilities=plan_document.digest([hardware, libraries]),
            shape_buckets={axis: sorted({*ends}) for axis, ends in (shape_buckets or {}).items()},
            plans=[plan_document.Bucket(point, [each for each in names if each in choices]) for point, names in plans],
            jit_artifacts=artifacts,
            joint=joint,
            fallback=plan_document.ERROR if strict else plan_document.RUNTIME_SELECT,
            not_recorded=left or UNSET,
        ),
    )


def grid_of(shape_buckets: Mapping[str, Sequence[int]] | None, inputs: Any) -> list[dict[str, int]]:
    """Every point of the grid, small ones first. Raises: ValueError or TypeError with wanted and got."""
    if shape_buckets is None:
        return [{}]
    for axis, ends in shape_buckets.items():
        good = isinstance(ends, (list, tuple)) and ends and all(type(end) is int and end > 0 for end in ends)
        if not good:
            raise ValueError(f"shape_buckets: {axis}: wanted sizes from 1 on, as [128, 512], got {ends!r}")
    if not shape_buckets:
        raise ValueError("shape_buckets: wanted at least one axis, as {'seq_len': [128, 512]}, got none")
    if inputs is None and (strange := sorted({*shape_buckets} - {"seq_len", "batch"})):
        got = f"{', '.join(strange)} without inputs="
        raise ValueError(f"shape_buckets: wanted seq_len and batch, got {got}; inputs= is a function of these axes")
    if inputs is not None and (isinstance(inputs, Module) or not callable(inputs)):
        wanted_ = "a function of the buckets' axes that returns the model's inputs"
        raise TypeError(f"inputs: wanted {wanted_}, got {type(inputs).__name__}")
    points = itertools.product(*(sorted({*ends}) for ends in shape_buckets.values()))
    made = [dict(zip(shape_buckets, point, strict=True)) for point in points]
    return sorted(made, key=lambda point: (math.prod(point.values()), *point.values()))


def _recorded(
    model: Module, inputs: Any, points: Sequence[dict[str, int]], seen: Seen, deadline: Deadline
) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Each point with the names of its calls.

    Runs on tensors without memory are all made, whatever the time: a whole plan is worth more than times. Runs for
    real, which may take minutes each, end with the budget; the first is always there.

    The first one is made for real, too, where the model has weights: what makes other calls then, as modules that
    ``lz.optimize`` exchanged do, is made for real at every point.
    """
    over = deadline.passed if deadline.left_s > 0 else lambda: False  # without a budget, all of it is recorded
    weights = not any(each.is_meta or type(each.data) is not torch.Tensor for each in model.parameters())
    shapes, real = True, False
    few: dict[str, int] | None = _few_tokens(points[-1])
    for number, point in enumerate(points):
        if real and over():
            return
        names: list[str] = []
        nears = _from_one(point, points[0])
        if few is not None and all(few[axis] <= size for axis, size in point.items()):
            nears, few = nears if few in nears else [*nears, few], None
        for near in nears:
            given = inputs if inputs is not None and not point else _inputs_at(model, inputs, near)
            if callable(given):
                real = True
                with seen.of_one(names), torch.no_grad():
                    given()
            elif not number and weights and near is point:
                shapes = _shapes_show(model, given, seen, names)
                real = not shapes
            else:
                _run(model, given, seen, names, shapes=shapes or not weights)
        seen.real = real
        yield point, names


def _within(
    model: Module, inputs: Any, points: Sequence[dict[str, int]], seen: Seen, deadline: Deadline
) -> list[Facts]:
    """Calls of sizes at which no bucket ends, one less on every axis: large ones first, as the time allows."""
    found = Seen()
    found.judged = seen.judged
    for point in reversed(points):
        less = {axis: size - 1 for axis, size in point.items() if size > 1}
        if not less:
            continue
        if deadline.passed():
            break
        given = _inputs_at(model, inputs, point | less)
        if callable(given) or seen.real:
            _for_real(model, given, found)
        else:
            _run(model, given, found, [], shapes=True)
    return list(found.calls.values())


def _from_one(point: dict[str, int], least: Mapping[str, int]) -> list[dict[str, int]]:
    """A point, and those with 1 for an axis at its smallest bucket: one token, or one row, is often another call."""
    first = [axis for axis, size in point.items() if size == least[axis] and size > 1]
    several = [axes for count in range(1, len(first) + 1) for axes in itertools.combinations(first, count)]
    return [point, *(point | dict.fromkeys(axes, 1) for axes in several)]


FEW_TOKENS = 15
"""The most that a layer of ``lz.optimize`` may compute otherwise than a prompt, as what speculation verifies."""


def _few_tokens(most: Mapping[str, int]) -> dict[str, int]:
    """Sizes within the grid that multiply to so many tokens, or as near below as any."""
    sizes = itertools.product(*(range(1, min(end, FEW_TOKENS) + 1) for end in most.values()))
    few = max(sizes, key=lambda each: (math.prod(each) <= FEW_TOKENS) * math.prod(each))
    return dict(zip(most, few, strict=True))


def _shapes_show(model: Module, given: Any, seen: Seen, names: list[str]) -> bool:
    """Run the first point for real and without memory; whether both made the same calls. The real ones count."""
    found: list[str] = []
    _run(model, given, seen, names, shapes=False)
    try:
        _run(model, given, Seen(), found, shapes=True)
    except Exception:  # noqa: BLE001  # code that reads values runs for real alone
        return False
    return sorted(found) == sorted(names)


def _together(
    model: Module,
    inputs: Any,
    points: Sequence[dict[str, int]],
    reports: Mapping[str, Report],
    choices: dict[str, FrozenChoice],
    deadline: Deadline,
) -> tuple[list[plan_document.Joint], list[str]]:
    """Choose the kernels of each point together, by running the model for real; what was left, and why."""
    if any(each.is_meta for each in model.parameters()):
        return [], ["plan_mode: kernels were chosen each for itself: weights without memory run nothing"]
    joint: list[plan_document.Joint] = []
    settled: set[str] = set()
    for point in points:
        if deadline.passed():
            left = f"{len(points) - len(joint)} of {len(points)} points"
            return joint, [f"plan_mode: kernels of {left} were chosen each for itself: there was no time"]
        given = inputs if inputs is not None and not point else _inputs_at(model, inputs, point)
        seen = Seen()
        _for_real(model, given, seen)
        run = functools.partial(_for_real, model, given, Unseen())
        joint.append(chosen_together(point, run, seen.sequence, reports, choices, settled, deadline.passed))
    return joint, []


def _for_real(model: Module, given: Any, seen: Seen) -> None:
    """Make all calls of a point."""
    if callable(given):
        with seen.of_one([]), torch.no_grad():
            given()
    else:
        _run(model, given, seen, [], shapes=False)


def _inputs_at(model: Module, inputs: Any, point: Mapping[str, int]) -> Any:
    return token_ids(model, **{"batch": 1, "seq_len": 1, **point}) if inputs is None else inputs(**point)


def _run(model: Module, given: Any, seen: Seen, names: list[str], *, shapes: bool) -> None:
    """Call a model at one point, then with one token behind a cache of this length where it returns one."""
    with _calling(model, seen, shapes=shapes) as call, seen.of_one(names):
        call(given)
    if not (isinstance(given, dict) and [*given] == ["input_ids"]) or given["input_ids"].shape[1] < 2:
        return
    ids = given["input_ids"]
    before, one = {"input_ids": ids[:, 1:]}, {"input_ids": ids[:, :1]}
    with _calling(model, seen, shapes=shapes) as call:
        takes = signature_of(model.forward).parameters
        name = "cache" if "cache" in takes else "past_key_values"  # from Transformers 5.24 on, and before
        cache = getattr(call(before), name, None)
        if cache is not None:
            with seen.of_one(names):
                call(one | {name: cache})


@contextmanager
def _calling(model: Module, seen: Seen, *, shapes: bool) -> Iterator[Callable[[Any], Any]]:
    """Give what calls a model, on tensors without memory or for real."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if shapes:
        if seen.judged is None:
            here = ("cuda" if torch.cuda.is_available() else "cpu") if device.type == "meta" else device
            seen.judged = Elsewhere(Machine(Device.detect(here)))
        with holding(ELSEWHERE, seen.judged), run_on_shapes(model) as run:
            yield run
        return

    def real(inputs: Any) -> Any:
        def filled(each: torch.Tensor) -> torch.Tensor:
            return torch.ones(each.shape, dtype=each.dtype, device=device) if each.is_meta else each

        with torch.no_grad():
            return called(model, pytree.tree_map_only(torch.Tensor, filled, inputs))

    yield real


def _measured(
    calls: Sequence[Facts], device: Device, deadline: Deadline, last: float, *, compile_jit: bool
) -> list[str]:
    """Measure the calls and build what they would choose; what was left, and why."""
    out = () if compile_jit else [each.id for each in REGISTRY.kernels() if each.jit]
    last_s = 0.0 if deadline.left_s == math.inf else last * max(deadline.left_s, 0.0)
    with current(torch.device(device.torch_type)):
        tuned = tune_calls(calls, deadline=deadline.sooner(last_s), leave_out=out)
    problems = [f"{tuned.left} of {len(calls)} calls were not measured: there was no time"] if tuned.left else []
    problems += [f"not measured: {name}: {why}" for name, why in tuned.skipped.items()]
    return problems + (build_chosen(calls, deadline) if compile_jit else [])
