"""What a kernel may not make in a capture is there by then, though calls with the capture's step got another kernel."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.backends.prepared import Prepared
from layerzero.ops.paged.step import StepMetadata

OPERATION = "attention.gqa.decode.paged"


@pytest.fixture
def prepared():
    """What a kernel that never runs by itself needs in a capture, by batch."""
    made = Prepared(lambda batch: list(range(batch)), 4)
    rule = made.before_capture("its list", lambda facts: (facts.size("batch"),), ahead=True)

    @lz.register_kernel(OPERATION, "user.in_graphs", priority=0, graph_safe=True, limits=(rule,))
    def run(query, key_cache, value_cache, block_tables, context_lens):
        return torch.empty_like(query)

    return made


def call(batch=2, **step):
    cache = [torch.randn(batch * 2, 16, 2, 64) for _ in range(2)]
    tables, lens = torch.arange(batch * 2).int().view(batch, 2), torch.full((batch,), 20).int()
    made = StepMetadata(tables, lens, **step)
    return {"query": torch.randn(batch, 1, 4, 64), "key_cache": cache[0], "value_cache": cache[1],
            "block_tables": tables, "context_lens": lens, "step": made}  # fmt: skip


def refused(given):
    return lz.explain("paged_attention", capturing=True, **given).failures.get("user.in_graphs", ())


def test_a_step_for_captures_has_made_what_they_need(prepared):
    given = call(capturable=True)
    assert [each.code for each in refused(given)] == [lz.ReasonCode.CUDA_GRAPH_UNSAFE]
    lz.paged_attention(**given)
    assert lz.explain("paged_attention", **given).kernel_id != "user.in_graphs"
    assert prepared.has(2)
    assert refused(given) == ()
    assert not prepared.has(3)


def test_other_calls_make_nothing_for_kernels_that_they_do_not_run(prepared):
    lz.paged_attention(**call())
    lz.paged_attention(**call() | {"step": None})
    assert not prepared.has(2)


def test_what_cannot_be_made_costs_the_call_nothing(prepared, monkeypatch):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(prepared, "get", no_memory)
    given = call(capturable=True)
    assert lz.paged_attention(**given).isfinite().all()
    assert [each.code for each in refused(given)] == [lz.ReasonCode.CUDA_GRAPH_UNSAFE]
