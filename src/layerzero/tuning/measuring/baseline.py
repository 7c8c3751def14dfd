"""What somebody without LayerZero would call: torch's own way to each operation's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerzero.engine.functions import CALLS
from layerzero.tuning.measuring.clocks import Run


def torch_default(function: str, arguments: Mapping[str, Any]) -> Run | None:
    """A call of torch's own function with a call's arguments; None where torch has none for it."""
    operation = CALLS[function].function.operations[0]  # those of one function have the same way around them
    return None if operation.stock is None else operation.stock(**arguments)
