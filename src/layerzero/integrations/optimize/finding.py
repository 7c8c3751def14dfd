"""The modules of a model that kernels can compute: each kind is asked, and its answer compared with the original."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch.nn import Linear, Module

from layerzero.core.errors import InvalidCallError
from layerzero.integrations.optimize.blocks import block
from layerzero.integrations.optimize.candidate import Candidate, compared
from layerzero.integrations.optimize.experts import experts
from layerzero.integrations.optimize.norms import norm
from layerzero.integrations.optimize.products import linear, linear_then
from layerzero.integrations.optimize.refusing import refusal
from layerzero.integrations.optimize.report import NO_TIME, Left, Optimized
from layerzero.integrations.optimize.time_left import TimeLeft
from layerzero.serving.warmup import Progress

KINDS: tuple[Callable[[Module], Candidate | str | None], ...] = (block, experts, linear_then, norm, linear)
"""Asked in this order: what covers others comes first."""

MOST = 12
"""Submodules of what is looked at as a whole."""

NO_GAIN = "torch's own kernel runs it, and no time says that another is faster; pass inputs= to measure"


def find(
    root: Module, report: Optimized, taken: set[int], time: TimeLeft, *, measured: bool, tell: Progress
) -> list[tuple[str, Candidate]]:
    """Candidates that gave what the originals give, and in the report what is left and why."""
    taken = set(taken)
    found: list[tuple[str, Candidate]] = []
    parents = {id(child): parent for parent in root.modules() for child in parent.children()}
    modules = list(root.named_modules())
    for number, (path, module) in enumerate(modules):
        tell("checking modules", number, len(modules))
        if id(module) in taken or not _is_small(module):
            continue
        why = refusal(module, parents.get(id(module)))
        if why:
            if _has_weights(module):
                report.left.append(Left(path, type(module).__name__, why))
            continue
        step = f"checking modules of {type(module).__name__}"
        if not time.allows(step, step):
            report.left.append(Left(path, type(module).__name__, NO_TIME))
            taken |= {id(each) for each in module.modules()}
            continue
        with time.taking(step):
            _look(path, module, report, found, taken, measured=measured)
    return found


def _look(
    path: str,
    module: Module,
    report: Optimized,
    found: list[tuple[str, Candidate]],
    taken: set[int],
    *,
    measured: bool,
) -> None:
    """Ask each kind about a module, and add what came of it to what was found or left."""
    for kind in KINDS:
        candidate = _candidate(kind, module)
        if candidate is None:
            continue
        if isinstance(candidate, Candidate) and not measured and candidate.is_torchs:
            candidate = NO_GAIN
        if isinstance(candidate, str):
            report.left.append(Left(path, type(module).__name__, candidate))
            if module._modules:  # what it is made of may be something else that is known
                continue
            return
        found.append((path, candidate))
        taken |= {id(each) for each in candidate.covered}
        return
    if not module._modules and any(True for _ in module.parameters(recurse=False)):
        report.left.append(Left(path, type(module).__name__, "it computes nothing that LayerZero knows"))


def _has_weights(module: Module) -> bool:
    """Whether it would have been one of the kinds, and no list of others."""
    own = any(True for _ in module.parameters(recurse=False)) or "parametrizations" in module._modules
    return own or not module._modules or any(isinstance(each, Linear) for each in module.children())


def _is_small(module: Module) -> bool:
    """Whether it may be one of the kinds: it has parameters, and not many submodules."""
    few = len(list(itertools.islice(module.modules(), MOST + 1))) <= MOST
    return few and any(True for _ in module.parameters())


def _candidate(kind: Callable[[Module], Candidate | str | None], module: Module) -> Candidate | str | None:
    """A checked candidate, or why there is none."""
    candidate = kind(module)
    if isinstance(candidate, Candidate):
        try:
            why = compared(candidate)
        except InvalidCallError as error:
            why = f"{candidate.calls} does not compute it: {error}"
        if why:
            return why
    return candidate
