"""Ask a child process first: a plugin that ends the process must not take ``layerzero doctor`` along.

Run as a module, this is the child: it imports the plugins that it is given by name, and says so before and after each.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence

from layerzero.engine.config import CONFIGURATION
from layerzero.engine.plugins import installed, refused, version_of
from layerzero.engine.registry import REGISTRY
from layerzero.testing.process import child_environment, how_it_ended
from layerzero.tuning.keeping.files import cache_folder
from layerzero.tuning.keeping.imports import forgive

TIMEOUT_S = 300.0
"""How long all plugins together may take; some compile on import."""


def ask_a_child() -> None:
    """Leave out, in this process, the plugins that end a child; forgive those that an earlier process accused."""
    admitted = [each for each in installed() if not refused(each, CONFIGURATION.policy)]
    if not admitted or REGISTRY.plugins is None:
        return
    harmful = _harmful([each.name for each in admitted])
    folder = cache_folder()
    for each in admitted:
        if each.name in harmful:
            REGISTRY.plugins.leave_out(each.name, harmful[each.name])
        elif folder is not None:
            forgive(folder, each.name, version_of(each))


def _harmful(names: Sequence[str]) -> dict[str, str]:
    """The plugins that end a process, and how; the others are asked about again in a child without them."""
    found: dict[str, str] = {}
    left = list(names)
    while left:
        said, how = _child(left)
        begun = [name for name in left if f"begin {name}" in said]
        if f"end {left[-1]}" in said or not begun:
            break
        found[begun[-1]] = how
        left = left[left.index(begun[-1]) + 1 :]
    return found


def _child(names: Sequence[str]) -> tuple[list[str], str]:
    """What a child said, line by line, and how it ended."""
    command = [sys.executable, "-P", "-m", __name__, *names]
    try:
        environment = child_environment((), {})
        child = subprocess.run(command, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)  # noqa: S603  # ourselves
    except subprocess.TimeoutExpired as error:
        said, how = error.stdout or b"", f"it did not come back within {TIMEOUT_S:.0f} s in a child process"
    else:
        said, how = child.stdout, f"it ended with {how_it_ended(child.returncode)} in a child process"
    return said.decode(errors="replace").splitlines(), how


def _import(names: Sequence[str]) -> None:
    for each in installed():
        if each.name in names:
            print(f"\nbegin {each.name}", flush=True)  # noqa: T201  # the parent reads it
            with contextlib.suppress(Exception, SystemExit):  # the parent imports it, too, and says what it raised
                each.load()
            print(f"\nend {each.name}", flush=True)  # noqa: T201


if __name__ == "__main__":
    _import(sys.argv[1:])
