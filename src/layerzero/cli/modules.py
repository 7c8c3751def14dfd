"""``--module``: import what registers kernels, from the current folder as from the environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def import_modules(modules: Sequence[str]) -> None:
    """Import each, with the current folder on the path, as ``python -m`` has it.

    Raises: ValueError for a module that does not import or registers nothing.
    """
    if not modules:
        return
    from layerzero.testing.child import imported

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    problem = imported(modules)
    if problem:
        raise ValueError(problem)
