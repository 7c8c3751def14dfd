"""Checks of how a kernel runs: a handle that advances into another legal call, and threads that cannot all begin."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from layerzero.core import values
from layerzero.engine.registry import REGISTRY
from layerzero.ops.sparse.declare import BLOCK_SPARSE, sparse_attention
from layerzero.testing import compare, execution
from layerzero.testing.sizes import CheckSetting


class Copied:
    """What a kernel keeps of a pattern."""

    def __init__(self, pattern):
        self.tensors = [each.clone() for each in pattern.host]

    def update(self, pattern):
        self.tensors = [each.clone() for each in pattern.host]


class Forgotten(Copied):
    """The same by a kernel that heeds no change."""

    def update(self, pattern):
        pass


def trial(kept=Copied):
    """A planted kernel of attention to blocks that reads its pattern through the handle."""

    def load(facts):
        def run(query, key, value, *pattern, block_pattern=None, **blocks):
            if block_pattern is not None:
                pattern = block_pattern.slot("planted", kept).tensors
            return sparse_attention(query, key, value, *pattern, **blocks)

        return run

    kernel = replace(
        REGISTRY.kernel("torch.block_sparse_rows"),
        id="planted.pattern",
        load=load,
        accepts=("block_rows", "block_cols", "block_pattern"),
    )
    return CheckSetting(BLOCK_SPARSE, torch.float32, "cpu", "").attempt(kernel, BLOCK_SPARSE.cases[0])


def test_a_pattern_advances_to_another_pattern(monkeypatch):
    seen = []

    def expected(call):
        given = call.arguments
        pattern, columns = [given[each] for each in ("block_indptr", "block_indices")], len(given["key"]) // 16
        seen.append([each.tolist() for each in pattern])
        assert values.problems(BLOCK_SPARSE.check_values(given["key"], *pattern, 16)) == []
        assert max(seen[-1][1]) < columns
        return truth(call)

    truth = compare.expected
    monkeypatch.setattr(compare, "expected", expected)
    given = trial()
    before = [given.call.arguments[each].tolist() for each in ("block_indptr", "block_indices")]
    outcome = execution.advanced(given)
    assert (outcome.status, outcome.message) == ("passed", "")
    ((starts, columns),) = seen
    assert columns == before[1][::-1]
    assert starts == [before[0][-1] - each for each in reversed(before[0])]
    assert [starts, columns] != before


def test_a_kernel_that_keeps_the_pattern_of_before_is_found():
    outcome = execution.advanced(trial(Forgotten))
    assert outcome.status == "wrong"
    assert outcome.message.startswith("after advance(): result 0")


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("attention.gqa.decode.paged", "torch.paged_gather"), ("attention.gqa.mixed.paged", "torch.paged_sdpa")],
)
def test_lengths_of_contexts_shrink_and_their_tables_turn_round(monkeypatch, name, kernel):
    operation, seen = REGISTRY.operation(name), []
    truth = compare.expected
    monkeypatch.setattr(compare, "expected", lambda call: seen.append(call) or truth(call))
    given = CheckSetting(operation, torch.float32, "cpu", "NHD").attempt(REGISTRY.kernel(kernel), operation.cases[0])
    assert execution.advanced(given).status == "passed"
    before, after = given.call.arguments, seen[0].arguments
    assert torch.equal(after["context_lens"], (before["context_lens"] + 1) // 2)
    assert torch.equal(after["block_tables"], before["block_tables"].flip(0))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("attention.gqa.prefill.ragged", "torch.ragged_sdpa"), ("attention.gqa.mixed.paged", "torch.paged_sdpa")],
)
def test_starts_of_tokens_stay_where_they_are(monkeypatch, name, kernel):
    """Halved, they end before the tokens do; turned round, the first have more than the one query that is promised."""
    operation, seen = REGISTRY.operation(name), []
    truth = compare.expected
    monkeypatch.setattr(compare, "expected", lambda call: seen.append(call) or truth(call))
    given = CheckSetting(operation, torch.float32, "cpu", None).attempt(REGISTRY.kernel(kernel), operation.cases[0])
    assert execution.advanced(given).status == "passed"
    assert torch.equal(seen[0].arguments["cu_seqlens_q"], given.call.arguments["cu_seqlens_q"])


def test_threads_that_began_do_not_wait_for_one_that_cannot_begin(monkeypatch):
    """Where the system gives no more threads, the check says so: it hung."""
    start, begun = threading.Thread.start, []

    def limited(thread):
        begun.append(thread)
        if len(begun) == execution.THREADS:
            raise RuntimeError("can't start new thread")
        start(thread)

    class Short(threading.Barrier):
        def __init__(self, parties, timeout):
            super().__init__(parties, timeout=timeout / 1e3)

    monkeypatch.setattr(threading, "Barrier", Short)
    operation = REGISTRY.operation("norm.rms")
    setting, kernel = CheckSetting(operation, torch.float32, "cpu", ""), REGISTRY.kernel("torch.rms_norm")
    given = setting.attempt(kernel, operation.cases[0])
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        execution.threads(kernel, setting, operation.cases[0], given)
