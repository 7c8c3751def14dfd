"""What a build lacked is named, whatever was raised on top of it."""

from __future__ import annotations

import pytest

from layerzero.tuning.proving.toolchain import lacking


@pytest.mark.parametrize(
    ("raised", "name"),
    [
        (FileNotFoundError(2, "No such file or directory", "g++"), "a C++ compiler"),
        (FileNotFoundError(2, "No such file or directory", "/opt/bin/clang++-18"), "a C++ compiler"),
        (
            RuntimeError("No working C++ compiler found in config.cpp.cxx: (None, 'g++')"),
            "a C++ compiler",
        ),
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
