"""Whether a function that spares launches does so here: on a GPU, by a kernel of a library.

torch's own expressions of such a function launch as much as what it replaces, or more; on a CPU nothing is launched.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import layerzero as lz


def runs_a_library(function: str, first: Tensor, *others: Any) -> bool:
    """Whether the kernel that LayerZero chooses for a call is another's than torch's."""
    if not first.is_cuda:
        return False
    chosen = lz.explain(function, first, *others).kernel_id
    return chosen is not None and not chosen.startswith(("torch.", "reference."))
