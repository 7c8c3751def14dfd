"""What runs tests loads ``fresh_process``, and torch with it: 2.5 s, in which the workers of ``-n 2`` wait otherwise.

A process that hands tests to workers runs none itself.
"""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path

CHILDREN = Path(__file__).parent / "children"

gc.set_threshold(100_000, 10, 10)  # what is imported is no garbage, and little of what tests make is


def pytest_configure(config):
    """Have the children of quick tests look for garbage as rarely, and begin each test as a process that was born."""
    path = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if "not slow" in config.getoption("markexpr") and str(CHILDREN) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([*path, str(CHILDREN)])  # last: `torch_alone` has such a file, too
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(importlib.import_module("fresh_process"))
