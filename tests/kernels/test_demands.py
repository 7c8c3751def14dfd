"""What kernels demand of a call at its edges: no tokens, a single row."""

from __future__ import annotations

import torch

from layerzero.backends.torch.cuda_attention import aligned_rows
from layerzero.ops.paged.declare import make_step


def test_a_step_over_no_blocks_has_no_bound() -> None:
    call = {
        "block_tables": torch.zeros(2, 0, dtype=torch.int32),
        "context_lens": torch.zeros(2, dtype=torch.int32),
        "max_context_len": 0,
    }
    assert make_step(call, capturable=False).max_context_len is None


def test_rows_on_a_cpu_are_not_copied() -> None:
    strided = torch.zeros(3, 5)[:, 1:4]
    assert aligned_rows(strided) is strided
