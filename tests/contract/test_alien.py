"""An operation of invented names goes through every tool; in a process of its own, since what is registered stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_an_operation_that_nothing_knows_goes_through_every_tool():
    checks = Path(__file__).with_name("alien_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
