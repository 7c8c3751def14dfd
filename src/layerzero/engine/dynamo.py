"""Tell Dynamo, once it is imported, which operator stands in for a public function: fullgraph at no eager cost.

Importing Dynamo takes seconds, so nothing here imports it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from layerzero.core.import_hook import is_imported, when_imported

log = logging.getLogger("layerzero")

_DYNAMO = "torch._dynamo"

_waiting: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []


def substitute(native: Any, builtin: Callable[..., Any], traced: Callable[..., Any]) -> None:
    """Let Dynamo trace ``traced``, the generated Python, where it meets a builtin, which it cannot see through."""
    _waiting.append((native, builtin, traced))
    if len(_waiting) == 1 or is_imported(_DYNAMO):  # the first that waits has the others told, too
        when_imported(_DYNAMO, _register)


def _register() -> None:
    import torch

    from layerzero.engine import accelerator

    while _waiting:
        native, builtin, traced = _waiting.pop()
        try:
            torch.compiler.substitute_in_graph(builtin, skip_signature_check=True)(traced)
            # after a graph break the builtin runs while Dynamo listens, and it would compile the kernels' own Python
            native.unwatched(torch.compiler.disable(builtin))  # type: ignore[no-untyped-call]
            accelerator.HOT.watch(torch._C._dynamo.eval_frame.get_eval_frame_callback)
        except Exception as error:  # noqa: BLE001  # Dynamo's import, and with it the user's program, must not fail here
            log.warning("torch.compile will break graphs at lz.%s: %s", builtin.__name__, error)
