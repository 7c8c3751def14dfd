"""Ctrl-C ends a command with 130, without a traceback, and with every process that it started."""

from __future__ import annotations

import importlib
import os
import select
import signal
import subprocess
import sys

import pytest
import torch

import layerzero as lz
from layerzero.tuning.storage.files import FileLedger

KERNEL = """
import os, threading
import layerzero as lz

@lz.register_kernel("norm.rms", "held.rms", supported_dtypes=["float32"], priority=100)
def held(input, weight, *, eps=1e-6):
    os.write(os.open(os.environ["HELD"], os.O_WRONLY), f"{os.getpid()}\\n".encode())
    HOLD
"""
"""A kernel that says when it runs, and does so for ever; the pipe is closed when its process ends."""

WAITS = "threading.Event().wait()"
DEAF = "import ctypes; ctypes.CDLL(None).pause(); ctypes.CDLL(None).sleep(10**6)"
"""In C, where Python does not hear of a signal."""

CALL = ("--shapes", "4x64", "--dtype", "float32")
MINE = ("--module", "held_kernels")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a command in a folder with the kernel, which is a suspect; return it and its pipe once the kernel runs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "held_kernels", raising=False)
    os.mkfifo(tmp_path / "held")
    pipe = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    started = []

    def begin(*words, holds=WAITS):
        (tmp_path / "held_kernels.py").write_text(KERNEL.replace("HOLD", holds))
        importlib.import_module("held_kernels")
        (kernel,) = [each for each in lz.list_kernels() if each.id == "held.rms"]
        if "--confirm" in words:
            facts = lz.facts("rms_norm", torch.randn(4, 64), torch.randn(64))
            FileLedger(tmp_path / "cache").suspect(kernel, facts, "planted")
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        settings = {"LAYERZERO_CACHE_DIR": str(tmp_path / "cache"), "LAYERZERO_ALLOW": "torch,user"}
        process = subprocess.Popen(
            [sys.executable, "-m", "layerzero", *words],
            env=os.environ | settings | {"PYTHONPATH": path, "HELD": str(tmp_path / "held")},
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        ready, _, _ = select.select([pipe, os.pidfd_open(process.pid)], [], [])
        assert pipe in ready, process.communicate()
        return process, pipe

    yield begin
    os.close(pipe)
    monkeypatch.delitem(sys.modules, "held_kernels", raising=False)
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "apart"),
    [
        (("vet", "rms_norm", "--kernel", "held.rms", *MINE, *CALL), True),
        (("tune", "rms_norm", *MINE, *CALL), True),
        (("conformance", "--kernel", "held.rms", *MINE), True),
        (("doctor", "--confirm", *MINE), True),
        (("bench", "rms_norm", *MINE, *CALL), False),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_an_interrupted_command_leaves_nobody(start, words, apart):
    process, pipe = start(*words)
    runs = os.read(pipe, 100).split()
    assert (int(runs[0]) != process.pid) is apart
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in told
    assert told.endswith("interrupted\n")
    while True:  # until the pipe closes with the last process that has it
        select.select([pipe], [], [])
        if not (more := os.read(pipe, 100)):
            break
        assert {*more.split()} == {runs[0]}, "a check of several threads says it once for each"


def test_a_command_that_is_deaf_in_a_kernel_is_interrupted_all_the_same(start):
    process, _ = start("bench", "rms_norm", *MINE, *CALL, holds=DEAF)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in told
