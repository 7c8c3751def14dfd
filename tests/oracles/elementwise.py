"""Operations on every element."""

from __future__ import annotations

ORACLES = {}
