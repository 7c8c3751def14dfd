"""Ask a child process first: a plugin that ends the process must not take ``layerzero doctor`` along.

This module is the child's worker, too: it imports the plugin that it is given by name.
"""

from __future__ import annotations

import contextlib
from collections import deque

import msgspec

from layerzero.engine.config import CONFIGURATION
from layerzero.engine.plugins import installed, refused, version_of
from layerzero.engine.registry import REGISTRY
from layerzero.testing.apart import End, Task, run_apart
from layerzero.testing.apart_child import Tell
from layerzero.tuning.keeping.files import cache_folder
from layerzero.tuning.keeping.imports import forgive

TIMEOUT_S = 300.0
"""How long a plugin may take; some compile on import."""


class Job(msgspec.Struct, frozen=True):
    """A plugin to import."""

    plugin: str


def ask_a_child() -> None:
    """Leave out, in this process, the plugins that end a child; forgive those that an earlier process accused."""
    admitted = [each for each in installed() if not refused(each, CONFIGURATION.policy)]
    if not admitted or REGISTRY.plugins is None:
        return
    harmful: dict[str, str] = {}

    def ended(task: Task, end: End) -> None:
        if end.step is not None:
            harmful[task.owner] = f"{end.reason} in a child process"

    tasks = deque(Task(Job(each.name), each.name, TIMEOUT_S) for each in admitted)
    run_apart(__name__, tasks, found=lambda task, value: None, ended=ended)  # noqa: ARG005  # that it came back is all
    folder = cache_folder()
    for each in admitted:
        if each.name in harmful:
            REGISTRY.plugins.leave_out(each.name, harmful[each.name])
        elif folder is not None:
            forgive(folder, each.name, version_of(each))


def work(job: Job, tell: Tell) -> None:
    """Import a plugin."""
    for each in installed():
        if each.name == job.plugin:
            tell.begins()
            with contextlib.suppress(Exception, SystemExit):  # the parent imports it, too, and says what it raised
                each.load()
    tell.found(None)
