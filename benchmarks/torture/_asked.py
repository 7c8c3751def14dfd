"""How large the parts are: what the command line says of them, for whoever imports this in the process of a part."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass
class Asked:
    """What was asked for.

    Attributes:
        seed: of the run.
        first: the number of this process's first try; other processes have the numbers before it and behind.
        writers, busy, kills: processes that write at once, those that only compute beside them, and how many are
            killed.
        longest_s: a write that takes longer is counted as wrong.
        threads: threads that call at once, beside those that change what calls depend on.
    """

    seed: int = 1
    first: int = 0
    writers: int = 32
    busy: int = 4
    kills: int = 200
    longest_s: float = math.inf
    threads: int = 12


ASKED = Asked()
