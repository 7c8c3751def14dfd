"""Fixtures of tests of this folder."""

from __future__ import annotations

import pytest

import layerzero as lz


@pytest.fixture
def _static_order():
    """What is installed in these questions has no times and no verdicts, so priorities tell what is chosen."""
    with lz.scope(unmeasured="priority", require_vetting=False):
        yield
