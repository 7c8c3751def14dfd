"""The two hit paths, where a test of both takes seconds."""

from __future__ import annotations

import pytest

IN_C = pytest.mark.parametrize("path", ["native", pytest.param("python", marks=pytest.mark.slow)], indirect=True)
"""With the hit path in C; ``make test-all`` asks the one in Python as well. For tests that use the fixture ``path``."""
