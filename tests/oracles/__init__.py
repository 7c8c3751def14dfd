"""What calls should give, computed a second time: plain numpy in float64, of the definitions alone, a file a family.

The truth that everything else compares with is the operations' own references. These share no line with them: what an
operation means is written twice, and random calls show whether both say the same (``python -m oracles``).
"""

from __future__ import annotations

from oracles.asked import ORACLES, truth

__all__ = ["ORACLES", "truth"]
