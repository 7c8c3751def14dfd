"""The capture of a CUDA graph, beside what else this process does meanwhile: collect garbage, and build kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from layerzero.core.arguments import told
from layerzero.core.collecting import held_off
from layerzero.core.errors import InvalidCallError


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "thread_local",
) -> Iterator[None]:
    """Capture what the block launches: ``torch.cuda.graph``, with Python's garbage collector held off.

        graph = torch.cuda.CUDAGraph()
        with lz.capturing(graph):
            output = step()  # that ran before, so that what is chosen, built and planned on the way is there
        graph.replay()

    Without it the collector may free an old graph in the middle of the capture, which breaks it, or ends the process.
    Objects that lose their last reference meanwhile are freed as ever: drop no graph in the block.

    Args:
        graph: what is captured into.
        pool: memory that graphs share, as of ``torch.cuda.graph_pool_handle()`` or ``other.pool()``; its own if None.
        stream: where the capture takes place; one of torch's own if None.
        capture_error_mode: whose calls may break it. ``thread_local``, this thread's alone, unlike torch's ``global``:
            kernels are built in the background (``jit: background``), whose calls have nothing to do with the capture.
    Raises: InvalidCallError for what is no CUDAGraph; whatever torch raises for a capture that fails.
    """
    if not isinstance(graph, torch.cuda.CUDAGraph):
        raise InvalidCallError("capturing", [f"graph: wanted a torch.cuda.CUDAGraph, got {told(graph)}"])
    with held_off(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
        yield
