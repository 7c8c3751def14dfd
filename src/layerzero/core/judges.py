"""What declarations say of results under one name: ``judge=lz.judges.Exact("it only moves numbers")``."""

from __future__ import annotations

from layerzero.core.distribution import Distribution
from layerzero.core.judge import Elementwise, Exact, Given, Indices, Judge, Property, reproducible

__all__ = ["Distribution", "Elementwise", "Exact", "Given", "Indices", "Judge", "Property", "reproducible"]
