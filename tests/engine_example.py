"""The example's serving engine as a module, and what it prints for a command line: on a CPU and on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "examples" / "engine.py"


def loaded() -> Iterator[ModuleType]:
    """The example, for a fixture that lasts as long as a file's tests."""
    spec = importlib.util.spec_from_file_location("engine_example_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(FILE.parent))  # what it imports beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FILE.parent))
    yield module
    del sys.modules[spec.name]


def printed(example: ModuleType, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the program prints."""
    monkeypatch.setattr(sys, "argv", ["engine.py", *line.split()])
    example.main()
    return capsys.readouterr().out
