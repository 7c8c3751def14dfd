"""What compiles: an artefact is built before a kernel is checked, and its key says what it was compiled for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case
from layerzero.engine.config import SCOPES
from layerzero.testing.single_run import Finding, Trial, attempt, build, duplicate, raised
from layerzero.testing.sizes import CheckSetting, base_case, with_axis

BUILDING_SECONDS = 10.0
"""After so many seconds of compiling for a kernel, no other build is begun; what is not built is not tried."""

STALL_SECONDS = 0.25
"""A first call that takes so much longer than the second, and five times as long, compiled something."""

SIZES = 6
"""Calls of other sizes that an artefact is tried on."""

_building: dict[str, float] = defaultdict(float)


def built(kernel: Kernel, setting: CheckSetting, note: Callable[[str], None]) -> Finding:
    """Build a kernel for its first case. Raises: ImportError or OSError if its library does not load."""
    spent = _building[kernel.id]
    if spent > BUILDING_SECONDS:
        return Finding("not tried", f"not built: building others took {spent:.0f} s already")
    with SCOPES.scope({"allow_jit_compile": True}):
        case, trial = base_case(kernel, setting)
    call = setting.call(case) if trial is None else trial.call  # with handles, where it takes none without
    note(f"building for {call.text}")
    started = time.perf_counter()
    build(kernel, setting.operation, call)
    _building[kernel.id] += time.perf_counter() - started
    trial = attempt(kernel, setting.operation, call)
    if trial is None or trial.reasons:
        return Finding("refused", trial.codes if trial else "no call")
    return Finding("passed", "built")


def build_key(kernel: Kernel, setting: CheckSetting, base: Case) -> Finding:
    """Calls of other sizes whose key says that they are built compile nothing: else a request would wait for it."""
    tried = 0
    for text, trial in _others(kernel, setting, base):
        plan = trial.plan()  # a constant for the shape may be made here; what compiles does so when it runs
        seconds = []
        for _ in range(2):
            call = duplicate(trial.call)
            bound = trial.function.bind((), call.arguments)
            started = time.perf_counter()
            try:
                plan.run(**bound)
            except Exception as error:  # noqa: BLE001  # whatever a kernel raises is a finding
                return Finding("wrong", f"build_key says that {text} is built, but it {raised(error)}")
            seconds.append(time.perf_counter() - started)
        first, second = seconds
        if first - second > STALL_SECONDS and first > 5 * second:
            return Finding(
                "wrong",
                f"build_key says that {text} is built, but its first call took {first:.2f} s and its second "
                f"{second:.4f} s: it compiles for what the key does not hold",
            )
        tried += 1
        if tried == SIZES:
            break
    return Finding("passed", f"{tried} other sizes") if tried else Finding("not tried", "it is built for no other size")


def _others(kernel: Kernel, setting: CheckSetting, base: Case) -> Iterator[tuple[str, Trial]]:
    """Calls that the kernel takes as built, one axis changed each."""
    for axis, size in base.sizes.items():
        for other in (size * 2, size + 1, max(size // 2, 1)):
            for changed in with_axis(setting.operation, base, axis, other):
                trial = setting.attempt(kernel, changed)
                if other != size and trial is not None and not trial.reasons:
                    yield f"{axis} = {other}", trial
                    break
