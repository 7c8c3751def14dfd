"""The optional C extension; everything else about the package is in pyproject.toml.

``LAYERZERO_NATIVE=0`` leaves it out, as Windows does, whose compiler does not know what it is written with. The wheel
is of pure Python then, and serves everywhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/layerzero/_native")
PURE = sys.platform == "win32" or os.environ.get("LAYERZERO_NATIVE") == "0"
WARNINGS = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
ALIGNED = ["-falign-functions=64", "-falign-loops=32", "-falign-jumps=32"]
"""Where code lies by chance, a function more or less elsewhere moved a hit by 28 ns of 310."""

EXTENSION = Extension(
    "layerzero._native.hot",
    sources=sorted(str(path) for path in SOURCES.glob("*.c")),
    depends=sorted(str(path) for path in SOURCES.glob("*.h")),
    extra_compile_args=[*WARNINGS, *ALIGNED],
    optional=True,  # without a compiler the same semantics run in Python
)

setup(ext_modules=[] if PURE else [EXTENSION])
