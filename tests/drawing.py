"""How often a law is drawn."""

from __future__ import annotations

from hypothesis import settings


def examples(whole: int) -> int:
    """So many in ``make test-all``; a quarter of them where slow tests are left out."""
    return max(1, whole * settings().max_examples // 100)
