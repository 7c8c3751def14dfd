"""What runs tests loads ``fresh_process``, and torch with it: 2.5 s, in which the workers of ``-n 2`` wait otherwise.

A process that hands tests to workers runs none itself.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
from pathlib import Path

import pytest

CHILDREN = Path(__file__).parent / "children"

gc.set_threshold(100_000, 10, 10)  # what is imported is no garbage, and little of what tests make is


def sent(send, name, **told):
    """Let a worker send of a test what decides: that it began, was set up and torn down cost 1 ms.

    ``--durations`` tells of calls alone then.
    """
    if name != "logstart" and (name != "testreport" or (told["data"]["when"], told["data"]["outcome"]) not in UNSAID):
        send(name, **told)


UNSAID = ("setup", "passed"), ("teardown", "passed")


def pytest_configure(config):
    """Have the children of quick tests look for garbage as rarely, and begin each test as a process that was born."""
    path = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if "not slow" in config.getoption("markexpr") and str(CHILDREN) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([*path, str(CHILDREN)])  # last: `torch_alone` has such a file, too
    for plugin in config.pluginmanager.get_plugins() if hasattr(config, "workerinput") else ():
        if hasattr(plugin, "sendevent"):
            plugin.sendevent = functools.partial(sent, plugin.sendevent)
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(importlib.import_module("fresh_process"))


@pytest.fixture
def one_thread():
    """One thread of torch: two on a busy machine wait for each other by the millisecond."""
    import torch  # pytest reads this file in the process, too, that hands tests to workers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
