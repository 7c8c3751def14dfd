"""Freeze the choices of this process, write them down, and prove that another process would choose the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.nn import Module

from layerzero.core.device import Device, devices_here
from layerzero.core.dtypes import dtype_named
from layerzero.core.eager_state import STATE_FACTS
from layerzero.core.errors import FrozenChoiceError, LayerZeroWarning, PolicyError
from layerzero.core.facts import CallState, Facts, FactsBuilder, TensorFacts
from layerzero.core.handle import OfKind
from layerzero.core.operation import Routed
from layerzero.core.plan import Candidate, Report
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import warn
from layerzero.core.system.disk import write_whole
from layerzero.engine import frozen_choices, probe
from layerzero.engine.bucket_table import BucketTable
from layerzero.engine.config import CONFIGURATION, told_of, unlike
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import STATE, Agreed, Frozen, FrozenChoice, choice_of, class_name
from layerzero.engine.fusion import FUSING
from layerzero.engine.judgements import Later
from layerzero.engine.plain import plain_facts
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import explain_facts
from layerzero.inspection.plan_document import ERROR, Solved, digest, lacking

FORMAT = 2


class Frost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is frozen, as a document.

    Attributes:
        format: version of this document.
        layerzero, torch: versions.
        device: name of the device that the choices were made on.
        settings: hash of the effective settings, locks and rules, and as JSON those that are not at their defaults.
        choices: kernel, library, version and an example call of each class, by its name.
        solved: of a plan that ``lz.solve`` wrote: the model, the machine and the buckets that it was solved for.
        hash: SHA-256 of all the rest; equal hashes mean equal choices, made by any process at any time.
    """

    format: int
    layerzero: str
    torch: str
    device: str
    settings: str
    choices: dict[str, FrozenChoice]
    solved: Solved | None = None
    hash: str = ""

    def __repr__(self) -> str:
        """One line; ``choices`` and ``write`` have all of it."""
        count = len(self.choices)
        return f"<Frost of {count} choice{'s' * (count != 1)} on {self.device}, hash {self.hash[:12]}>"

    def __str__(self) -> str:
        """A plan as its decision table; else one line."""
        from layerzero.inspection.plan_document import table

        return repr(self) if self.solved is None else "\n".join(table(self))

    def sealed(self) -> Frost:
        """The same with its hash."""
        rest = msgspec.structs.replace(self, hash="", choices=dict(sorted(self.choices.items())))
        return msgspec.structs.replace(rest, hash=digest(rest))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all. Raises: OSError."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Frost:
        """Read one. Raises: FrozenChoiceError for a file that is none, or was changed since it was written."""
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=Frost)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: no UTF-8
            got = error.strerror if isinstance(error, OSError) else error
            raise FrozenChoiceError(str(path), [f"wanted frozen choices as JSON, got {got}"]) from error
        if found.format != FORMAT:
            raise FrozenChoiceError(str(path), [f"format: wanted {FORMAT}, got {found.format}"])
        if found.sealed().hash != found.hash:
            raise FrozenChoiceError(
                str(path), [f"hash: wanted {found.sealed().hash} of what it holds, got {found.hash}"]
            )
        return found


def freeze(
    manifest: str | os.PathLike[str] | Frost | None = None,
    *,
    model: Module | None = None,
    strict: bool | None = None,
    otherwise: Literal["error", "select"] = "error",
) -> Frost:
    """Let choices stop changing: each class of calls keeps its kernel until :func:`thaw`.

    Without a manifest the choices are those of every call that this process has made or warmed up, in scopes as
    outside. A call with a plan keeps its kernel; any other gets what selection would take now. With a manifest they are
    its choices, after this process has shown that it would make each of them itself. Those of scopes are left out,
    since no other process has their settings.

    While frozen, new times start no epoch and decide nothing. Legality, health, denials and locks hold as ever. Where a
    frozen kernel cannot run, the next by priority does, with a warning and a line in ``frozen().departures``.
    NoKernelFoundError is raised instead where ``fallback_enabled`` is off. A class that was not seen before is chosen
    for by priority and id, without times, keeps that kernel, and is listed in ``frozen().added``. Calls with tensors
    that are not contiguous have their own classes. Without one, they get the kernel of dense tensors, if it may run.

    A plan that :func:`lz.solve` wrote is held as it is, whatever this process would choose itself. Model, device,
    driver, libraries and settings must be those that it was solved for, and each of its kernels must be able to run. A
    call outside of its buckets is chosen for at run time, with times, and listed with ``PLAN_BUCKET_MISS`` in
    ``frozen().plan.misses``. Calls of functions that the plan lacks are chosen for as ever.

    A warning names a document without choices, points of a plan's grid that were not recorded, and classes that are
    missing because there were too many.

    Args:
        manifest: a document or its file.
        model: what a plan must have been solved for; None does not look.
        strict: whether a call outside of a plan's buckets raises FrozenChoiceError; None: as the plan says.
        otherwise: ``"select"`` tells of a document that is refused in one warning and goes on without it.
    Returns: the document; ``write`` it for another process. Its hash says what is frozen.
    Raises: PolicyError if choices are frozen already; FrozenChoiceError for a manifest that was changed, and where this
        process would choose otherwise, with every difference.
    """
    if otherwise not in ("error", "select"):
        raise PolicyError(f"freeze: otherwise: wanted 'error' or 'select', got {otherwise!r}")
    if manifest is None and (model is not None or strict is not None):
        raise PolicyError("freeze: model and strict: wanted a plan with them, got none; lz.solve(model, ...) makes one")
    if ENGINE.frozen is not None:
        raise PolicyError("freeze: choices are frozen already; wanted lz.thaw() first")
    if manifest is None:
        epoch = ENGINE.epoch
        past = _choices_now()  # while times still decide
        tell_if_short("freeze", past)
        held = Frozen(past)
        ENGINE.frozen = held  # first: a choice that is being made meanwhile is kept, too
        FUSING.look(frozen=True, registered=ENGINE.registry.has_own)
        _keep_plans(held)
        if ENGINE.epoch != epoch:  # a kernel that was registered meanwhile, say: plans may hold others than these
            ENGINE.bump()
    else:
        try:
            found = _accepted(manifest, model, strict)
        except FrozenChoiceError as error:
            if otherwise == "error":
                raise
            warn(f"freeze: nothing is frozen, choices go on: {error}", LayerZeroWarning, stacklevel=2)
            return document({})
        tell_if_short("freeze", found.choices, found.solved)
        _take(found, strict)
    assert ENGINE.frozen is not None
    return document(ENGINE.frozen.choices, ENGINE.frozen.solved)


def alone(call: Facts) -> Report:
    """What this process would choose by itself; judged as a miss is, in a third of the time that every reason takes."""
    policy, machine = CONFIGURATION.policy, probe.this_machine()
    if call.operation.plain is not None:
        return explain_facts(call, machine, policy, alone=True)
    found, later = judged(call)
    return ENGINE.decide(found, Routed(call.operation, {}, call.layout), call, policy, machine, later, alone=True)[0]


def judged(call: Facts, only: str = "") -> tuple[list[Candidate], Later | None]:
    """The kernels for a call of tensors outside of scopes, or one of them, with one reason for each that is refused."""
    kernels, policy, machine = REGISTRY.candidates(call.operation.name), CONFIGURATION.policy, probe.this_machine()
    of_engine = ENGINE.health, ENGINE.ledger
    return ENGINE.standings.judge(kernels, call, policy, machine, *of_engine, by_priority=False, only=only)


def hold(held: Agreed) -> None:
    """Let choices be what ranks agreed on; plans are chosen anew only where some may be others."""
    before = ENGINE.frozen
    ENGINE.frozen = held
    if not isinstance(before, Agreed) or before.fallback or held.fallback or before.would_change(held):
        ENGINE.bump()


def _accepted(manifest: str | os.PathLike[str] | Frost, model: Module | None, strict: bool | None) -> Frost:
    """The document, if it may be held here. Raises: FrozenChoiceError with every difference."""
    found = manifest if isinstance(manifest, Frost) else Frost.load(manifest)
    problems = _differences(found, model)
    if found.solved is None and (model is not None or strict is not None):
        problems.append("model and strict: wanted a plan that lz.solve wrote with them, got frozen choices alone")
    if problems:
        raise FrozenChoiceError("freeze" if isinstance(manifest, Frost) else str(manifest), problems)
    return found


def _take(found: Frost, strict: bool | None = None) -> None:
    """Hold a document; what was chosen for other classes before is chosen as in every process with it."""
    choices, plan = {name: each for name, each in found.choices.items() if not each.scoped}, None
    if found.solved is not None:
        strict = found.solved.fallback == ERROR if strict is None else strict
        policy = CONFIGURATION.policy
        entries = ((facts_of(each), policy, name, each) for name, each in choices.items())
        plan = BucketTable(entries, strict=strict, lacking=bool(found.solved.not_recorded))
    ENGINE.frozen = Frozen(choices, plan, found.solved)
    ENGINE.bump()


def tell_if_short(asked: str, choices: Mapping[str, FrozenChoice], solved: Solved | None = None) -> None:
    """Warn of choices that hold nothing, of points that a plan lacks, and of calls too many to be remembered."""
    problem = ""
    if not choices:
        problem = (
            "wanted calls that were made or warmed up, got none: every call is now chosen for by priority, without "
            "times. lz.thaw(), make one step or lz.warmup(...), then ask again"
        )
    elif solved is not None and solved.not_recorded:
        problem = (
            f"wanted all points of the plan's grid, got none for {lacking(solved)}: the budget was over; solve again "
            "with a larger budget_s"
        )
    elif ENGINE.history.dropped:
        problem = (
            f"wanted at most {frozen_choices.MAX_CLASSES} classes of calls, got {ENGINE.history.dropped} more, which "
            "are not held: they are chosen for by priority, without times. lz.thaw(), make one step, then ask again"
        )
    if problem:
        warn(f"{asked}: {problem}", LayerZeroWarning, stacklevel=3)


def _choices_now() -> dict[str, FrozenChoice]:
    """What selection takes now for each call that this process has made, by class; the first call of a class counts."""
    machine, held = probe.this_machine(), Frozen({})
    _keep_plans(held)
    found = held.choices
    for facts, policy in [(past.facts, past.policy) for past in ENGINE.history.calls()]:
        name = class_name(facts, policy)
        if name not in found:
            chosen = explain_facts(facts, machine, policy).chosen
            if chosen is not None:
                found[name] = choice_of(chosen.kernel, facts, policy)
    return found


def _keep_plans(held: Frozen) -> None:
    """Hold what has a plan, unless its class is held already."""
    for cache in ENGINE.caches:
        for policy, plan in cache.plans():
            name = class_name(plan.report.facts, policy)
            held.choices.setdefault(name, choice_of(plan.kernel, plan.report.facts, policy))


def thaw() -> Frost:
    """Let choices change again; returns what was frozen, the classes added since included.

    Raises: PolicyError if nothing is frozen.
    """
    held = ENGINE.frozen
    if held is None:
        raise PolicyError("thaw: wanted frozen choices, got none; lz.freeze() makes them")
    ENGINE.frozen = None
    ENGINE.bump()
    return document(held.choices, held.solved)


def frozen() -> Frozen | None:
    """What is frozen in this process: choices, classes added since, and departures; None if nothing is."""
    return ENGINE.frozen


def document(choices: Mapping[str, FrozenChoice], solved: Solved | None = None) -> Frost:
    """Choices of this process as a document, with the versions that are here and its hash."""
    choices = dict(choices)  # another thread may add to them
    versions = {kernel: version_of(kernel) for kernel in {each.kernel for each in choices.values()}}
    told = {name: msgspec.structs.replace(each, version=versions[each.kernel]) for name, each in choices.items()}
    return Frost(FORMAT, choices=told, solved=solved, **_here()).sealed()


def _here() -> dict[str, Any]:
    from layerzero import __version__

    return {
        "layerzero": __version__,
        "torch": str(torch.__version__),
        "device": "; ".join(dict.fromkeys(each.name for each in devices_here())),
        "settings": told_of(CONFIGURATION.policy),
    }


def version_of(kernel_id: str) -> str:
    """The version of a kernel's library here, as documents say it."""
    try:
        kernel = REGISTRY.kernel(kernel_id)
    except KeyError:
        return "not registered"
    return probe.this_machine().state(kernel.backend, Device.detect("cpu")).version or ""


def _differences(found: Frost, model: Module | None) -> list[str]:
    """What is not here as it is there, and what this process would choose otherwise, or, of a plan, could not run.

    On another machine than a plan's, what it could not run follows from that, and is left out.
    """
    problems = [
        f"{name}: wanted {getattr(found, name)}, got {here}"
        for name, here in _here().items()
        if name != "settings" and getattr(found, name) != here
    ]
    problems += unlike(found.settings, _here()["settings"])
    if found.solved is not None:
        problems += found.solved.differences({each.call.operation for each in found.choices.values()}, model)
        if problems:
            return problems
    for name, choice in found.choices.items():
        if choice.scoped:
            continue  # made under the settings of a block, which cannot be repeated
        if why := difference(choice, may_differ=found.solved is not None):
            problems.append(f"{name}: {why}")
    return problems


def difference(choice: FrozenChoice, *, may_differ: bool = False) -> str:
    """Why this process would choose another kernel, or, if it may, could not run this one; empty where it would."""
    version = version_of(choice.kernel)
    if version != choice.version:
        return f"wanted {choice.kernel} of {choice.library} {choice.version}, got {version}"
    try:
        call, machine, policy = facts_of(choice), probe.this_machine(), CONFIGURATION.policy
        if may_differ and _is_legal(choice.kernel, alone(call)):
            return ""
        report = explain_facts(call, machine, policy, alone=may_differ)
    except Exception as error:  # noqa: BLE001  # whatever torch and schemas say of a call that was never made
        return f"wanted a call that can be made here, got {type(error).__name__}: {error}"
    if report.kernel_id == choice.kernel or (may_differ and _is_legal(choice.kernel, report)):
        return ""
    reasons = report.failures.get(choice.kernel, ())
    why = f": {reasons[0]}" if reasons else ""
    return f"wanted {choice.kernel}, this process would choose {report.kernel_id}{why}"


def _is_legal(kernel_id: str, report: Report) -> bool:
    return any(each.legal and each.kernel.id == kernel_id for each in report.candidates)


def facts_of(choice: FrozenChoice) -> Facts:
    """The facts of a written call, without its tensors."""
    recipe: CallRecipe = choice.call
    operation = REGISTRY.operation(recipe.operation)
    if operation.plain is not None:
        arguments, sizes = operation.plain.described(recipe.params)
        return plain_facts(Routed(operation, dict(arguments))).of_sizes(sizes, {})
    params: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in recipe.params.items()
    }
    for name in operation.schema.handles:
        params[name] = None if params[name] == "none" else OfKind(str(params[name]))
    tensors = {
        name: torch.empty_strided(each.shape, each.strides, dtype=dtype_named(each.dtype), device="meta")
        for name, each in recipe.tensors.items()
    }
    general = {name: value for name, value in choice.state.items() if name not in STATE_FACTS}
    if set(general) != set(STATE) - STATE_FACTS.keys():
        raise TypeError(f"state: wanted {', '.join(STATE)}, got {', '.join(choice.state)}")
    read = {name: row.restored(choice.state[name]) for name, row in STATE_FACTS.items() if name in choice.state}
    facts = FactsBuilder(operation).of_valid(
        {**params, **tensors},
        device=Device.detect(recipe.device),
        layout=recipe.layout,
        state=CallState(requires_grad=recipe.requires_grad, read=read, **general),  # type: ignore[arg-type]
    )
    aligned = {name: recipe.tensors[name].alignment_bytes for name in facts.tensors}
    return facts.with_tensors({
        name: TensorFacts(each.shape, each.strides, each.dtype, aligned[name]) for name, each in facts.tensors.items()
    })  # fmt: skip
