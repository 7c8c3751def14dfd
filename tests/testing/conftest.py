"""Checks of kernels run on one thread here: small tensors gain nothing from more."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _alone(one_thread):
    """Every test."""
