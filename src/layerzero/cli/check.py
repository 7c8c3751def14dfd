"""Settings as tables, what is wrong with a file of them, and whether names of kernels name anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from layerzero.asking.descriptors import DESCRIPTORS
from layerzero.cli import describe
from layerzero.cli.tables import new_row, table_of
from layerzero.core.errors import DescriptorError, PolicyError
from layerzero.engine.config import plain_yaml
from layerzero.engine.policy import Policy, names_kernel, read_policy
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import SETTINGS, Setting, checked, nearest


def problems(file: Path) -> list[str]:
    """List what is wrong, with file, key, wanted and got; empty if the file is fine.

    A name that no kernel has is wrong although the engine takes it: the plugin that brings it may not be installed, but
    far more often it is misspelt, and a denied kernel would run.
    """
    values: dict[str, Any] = {}
    found: list[str] = []
    try:
        said = plain_yaml(file)
    except PolicyError as error:
        return list(error.problems)
    for key, value in said.items():  # each by itself: names are checked whatever is wrong elsewhere
        try:
            values |= checked({key: value}, str(file))
        except PolicyError as error:
            found += error.problems
    defaults = {name: setting.default for name, setting in SETTINGS.items()}
    policy, wrong = read_policy(defaults | values)
    wrong += _wrong_descriptors(policy)
    REGISTRY.ready()
    return [*found, *(f"{file}: {problem}" for problem in wrong), *REGISTRY.names.problems(policy, str(file))]


def _wrong_descriptors(policy: Policy) -> Iterator[str]:
    for path in policy["descriptors"]:
        try:
            DESCRIPTORS.check(path)
        except DescriptorError as error:
            yield from (f"descriptors: {path}: {problem}" for problem in error.problems)


def kernels_exist(patterns: Iterable[str]) -> None:
    """Refuse a pattern that names no kernel. Raises: ValueError with the nearest name."""
    for pattern in patterns:
        if not _names_something(pattern):
            raise ValueError(f"--kernel: {_unknown(pattern)}")


def _names_something(pattern: str) -> bool:
    return any(names_kernel(pattern, kernel) for kernel in REGISTRY.kernels())


def _unknown(pattern: str) -> str:
    known = {name for kernel in REGISTRY.kernels() for name in (kernel.id, kernel.source)}
    return f"wanted a library or kernel, got {pattern!r}, which names none here{nearest(pattern, sorted(known))}"


def effective(settings: Mapping[str, tuple[Any, str]]) -> Iterator[RenderableType]:
    """A row for each setting; those that were set stand out."""
    table = table_of("key", "value", "origin")
    for key, (value, origin) in settings.items():
        style = "" if origin == "default" else "bold green"
        new_row(table, Text(key, style=style), Text(repr(value), style=style), Text(origin, style=style or "dim"))
    yield table


def keys(settings: Mapping[str, Setting]) -> Iterator[RenderableType]:
    """A row for each key."""
    table = table_of("key", "type", "default", "meaning")
    for key, setting in settings.items():
        meaning = setting.meaning if setting.built else f"{setting.meaning} (not built yet: the default only)"
        new_row(table, key, describe.kind(setting.kind), repr(setting.default), meaning)
    yield table
