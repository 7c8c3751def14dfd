"""The optional C extension; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/layerzero/_native")
WARNINGS = [] if sys.platform == "win32" else ["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]

setup(
    ext_modules=[
        Extension(
            "layerzero._native.hot",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=WARNINGS,
            optional=True,  # without a compiler the same semantics run in Python
        )
    ]
)
