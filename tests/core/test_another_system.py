"""A system without POSIX gets all but children and what is kept between processes, and a reason for each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ALONE = os.pathsep.join([str(TESTS / "torch_alone"), *sys.path])


def run(system, *command):
    script = Path(__file__).with_name("another_system.py")
    return subprocess.run(
        [sys.executable, str(script), system, *command],
        env={**os.environ, "PYTHONPATH": ALONE},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_calls_models_documents_and_the_doctor_need_no_posix():
    done = run("win32", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "what is learnt ends with the process: this system has no locks of files" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_a_command_that_needs_children_says_that_there_are_none():
    done = run("win32", "conformance", "--kernel", "torch.rms_norm")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: no child process could be started" in done.stderr
    assert "wanted process groups" in done.stderr


@pytest.mark.slow
def test_kernels_are_measured_in_the_process_itself():
    done = run("win32", "tune", "norm.rms", "--shapes", "4x64", "--dtype", "float32", "--no-isolation")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls measured" in done.stdout + done.stderr


@pytest.mark.slow
def test_macos_has_posix_and_no_files_of_linux():
    assert run("darwin", "doctor").returncode == 0
