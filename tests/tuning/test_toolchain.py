"""What a build lacked is named, whatever was raised on top of it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from layerzero.tuning.verification.build_child import LINES, failed, interrupted, lacking, last_lines


@pytest.mark.parametrize(
    ("raised", "name"),
    [
        (FileNotFoundError(2, "No such file or directory", "g++"), "a C++ compiler that works"),
        (FileNotFoundError(2, "No such file or directory", "/opt/bin/clang++-18"), "a C++ compiler that works"),
        (RuntimeError("No working C++ compiler found in config.cpp.cxx: (None, 'g++')"), "a C++ compiler that works"),
        (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), "a C compiler"),
        (FileNotFoundError(2, "No such file or directory", "/usr/bin/gcc"), "a C compiler"),
        (RuntimeError("Ninja is required to load C++ extensions (pip install ninja to get it)"), "ninja"),
        (OSError("CUDA_HOME environment variable is not set. Please set it"), "nvcc"),
        (FileNotFoundError(2, "No such file or directory", "/usr/local/cuda/bin/nvcc"), "nvcc"),
        (FileNotFoundError(2, "No such file or directory", "weights.gcc.bin"), None),
        (RuntimeError("error: no matching function for call to g++"), None),
    ],
)
def test_the_program_is_named(raised, name):
    above = RuntimeError("backend='inductor' raised:")
    above.__cause__ = RuntimeError("Found from: line 99")
    above.__cause__.__context__ = raised
    for error in (raised, above):
        found = lacking(error)
        assert (found.name if found else None) == name


def test_causes_in_a_circle_end():
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert lacking(one) is None


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (subprocess.CalledProcessError(-9, ["g++"]), "ended by SIGKILL"),
        (subprocess.CalledProcessError(137, "g++ -c a.cpp"), "ended by SIGKILL"),
        (subprocess.CalledProcessError(-15, ["nvcc"]), "ended by SIGTERM"),
        (RuntimeError("g++: fatal error: Killed signal terminated program cc1plus"), "was killed"),
        (RuntimeError("nvcc error : 'cicc' died due to signal 9 (Kill signal)"), "was killed"),
        (RuntimeError("cc1plus: out of memory allocating 65536 bytes"), "too little memory"),
        (RuntimeError("virtual memory exhausted: Cannot allocate memory"), "too little memory"),
        (RuntimeError("cannot write PCH file: No space left on device"), "the disk is full"),
        (subprocess.CalledProcessError(1, ["g++"]), ""),
        (subprocess.CalledProcessError(-11, ["g++"]), ""),
        (RuntimeError("error: 'Killed_t' was not declared"), ""),
    ],
)
def test_a_compiler_that_something_else_ended_is_no_verdict_about_its_source(raised, words):
    above = RuntimeError("C++ compile error")
    above.__cause__ = raised
    found = interrupted(above)
    assert (words in found) if words else not found
    outcome = failed(above, lasting=True)
    assert outcome.lasting == (not words)
    assert words in outcome.log


def lowering_failed():
    error = type("InductorError", (RuntimeError,), {})("LoweringException: AssertionError:\n  target: flex_attention")
    error.__cause__ = AssertionError()
    return error


@pytest.mark.parametrize(
    ("does", "lasting", "said"),
    [
        ('exec g++ "$@"', True, "AssertionError"),
        ("echo 'cc1plus: error: broken' >&2; exit 1", True, "a C++ compiler that works was not found"),
        ("kill -9 $$", False, "ended by SIGKILL"),
        ("echo 'virtual memory exhausted' >&2; exit 1", False, "too little memory"),
    ],
)
def test_what_ails_the_compiler_is_told_in_place_of_what_inductor_asserts_then(
    tmp_path, monkeypatch, does, lasting, said
):
    if shutil.which("g++") is None:
        pytest.skip("wanted g++, got none")
    compiler = tmp_path / "compiler"
    about = 'case "$*" in *--version*) exec g++ "$@";; esac'
    compiler.write_text(f"#!/bin/sh\n{about}\n{does}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: str(compiler))
    outcome = failed(lowering_failed(), lasting=True)
    assert said in outcome.log
    assert outcome.lasting == lasting
    assert bool(outcome.lacks) == ("not found" in said)


def test_errors_before_the_last_lines_are_told_and_long_lines_say_that_they_are_cut():
    text = "\n".join(["a.cpp:3:5: error: 'x' was not declared", *["note"] * 40, "y" * 1000])
    told = last_lines(RuntimeError(text)).splitlines()
    assert told[0] == "RuntimeError: a.cpp:3:5: error: 'x' was not declared"
    assert len(told) == LINES
    assert told[-1].endswith("y…")
