"""Hub kernels are imported in a child process first: what they change there keeps them out of this one.

This module is the child's worker, too. A child whose process a kernel changed ends, and another one goes on.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from layerzero.backends.hub import effects
from layerzero.backends.hub.build import Build
from layerzero.testing.child_main import Tell
from layerzero.testing.children import End, Task, run_apart

TIMEOUT_S = 120.0
"""How long an import may take; libraries that a kernel names are imported in this time, too."""


def tried(builds: Sequence[Build]) -> dict[str, str]:
    """What is wrong with the import of each build, by its hash; empty where nothing is. A child believes its parent."""
    if getattr(sys.modules["__main__"].__spec__, "name", "") == "layerzero.testing.child_main":
        return {each.sha256: "" for each in builds}
    found: dict[str, str] = {}

    def answered(task: Task, value: str) -> None:
        found[task.about] = value

    def ended(task: Task, end: End) -> None:
        found[task.about] = f"its import in a child process: {end.reason}"

    tasks = deque(Task(each, each.repo, TIMEOUT_S, about=each.sha256, harmful=True) for each in builds)
    run_apart(__name__, tasks, found=answered, ended=ended)
    return found


def work(build: Build, tell: Tell) -> None:
    """Import a build, and tell what that changed."""
    import kernels.resolver
    import kernels.validate  # noqa: F401  # their effects are not the kernel's

    folder = Path(build.path)
    tell.begins()
    effects.import_libraries_of(folder)
    before = effects.taken()
    try:
        build.module()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # it may fail in any way
        tell.found(f"its import in a child process raised {type(error).__name__}: {error}")
        os._exit(0)
    found = effects.changes(before, effects.taken(), build.id, folder)
    tell.found(f"its import changed the process: {effects.told(found)}" if found else "")
    if found:
        os._exit(0)
