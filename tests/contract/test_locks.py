"""Locks are made in one place, which makes them anew in a forked child."""

from __future__ import annotations

import ast
from pathlib import Path

import layerzero

ROOT = Path(layerzero.__file__).parent
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Event"}
KNOWN = {
    "cli/output.py": {"Event"},  # of a command that ends by an interrupt, which forks nothing
    "core/system/forking.py": {"Lock", "RLock"},
    "engine/cache.py": {"Lock"},  # of one choice that is under way; a child forgets them all
    "serving/background_builds.py": {"Event"},  # made anew with the thread that waits for it
    "testing/execution.py": {"Barrier"},  # of threads that run kernels, which fork nothing
    "tuning/storage/row_exchange.py": {"Event"},  # made anew with the thread that waits for it
    "tuning/measurement/online.py": {"Event"},  # made anew with the thread that waits for it
    "tuning/verification/vetting.py": {"Event"},  # the same
}
FORKS = {"core/system/forking.py", "core/import_hook.py"}  # the latter before the first call imports the former


def used(path, module):
    """What a file uses of a module, called or passed on; it is imported whole everywhere."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if module in text else ():
        assert not (isinstance(node, ast.ImportFrom) and node.module == module and module == "threading"), path
        parts = [node.func, *node.args, *(word.value for word in node.keywords)] if isinstance(node, ast.Call) else []
        for each in parts:
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == module:
                yield each.attr


def test_every_lock_is_made_where_a_fork_is_heard_of():
    found = {str(path.relative_to(ROOT)): set(used(path, "threading")) & LOCKS for path in ROOT.rglob("*.py")}
    found = {path: names for path, names in found.items() if names}
    assert found == KNOWN, "make locks by layerzero.core.system.forking: a forked child makes those anew"


def test_two_places_hear_of_forks():
    paths = [path for path in ROOT.rglob("*.py") if "register_at_fork" in path.read_text()]
    found = {str(path.relative_to(ROOT)) for path in paths if "register_at_fork" in used(path, "os")}
    assert found == FORKS
