"""Collectives over ranks: near torch's own in float64, the same bits on all ranks, and one kernel for all of them."""

from __future__ import annotations

import gc
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

import layerzero as lz
from layerzero.backends.torch import collectives
from layerzero.core import limits as limit
from layerzero.core.evidence import Measurement
from layerzero.engine import proofs
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import class_name
from layerzero.engine.registry import REGISTRY
from layerzero.ops.comm import ranks as ranks_module
from layerzero.tuning.measurement.comparison import record_times
from layerzero.tuning.measurement.tune import asked_jobs
from ranks_of_gloo import two_ranks

ALONE = lz.Ranks.alone()

RANK = """
import hashlib, random, sys, torch, layerzero as lz
from datetime import timedelta
from torch import distributed as dist
rank, store, case, ranks = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
)
NEAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
drawn, data = random.Random(7), torch.Generator().manual_seed(7)
bits = hashlib.sha256()
def near(got, want, dtype, places="all"):
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous(), (got.shape, want.shape)
    torch.testing.assert_close(got.double(), want, rtol=NEAR[dtype], atol=NEAR[dtype])
    if places == "all":
        bits.update(bytes(got.flatten().view(torch.uint8).tolist()))
def loose(x):
    return x.repeat_interleave(2, -1)[..., ::2] if drawn.random() < 0.3 else x
def compare():
    dtype = drawn.choice(list(NEAR))
    shape = [drawn.choice([1, 3, 4, 8]) for _ in range(drawn.choice([1, 2, 3]))]
    axis = drawn.randrange(-len(shape), len(shape))
    shape[axis] *= ranks
    parts = [torch.randn(shape, generator=data).to(dtype) for _ in range(ranks)]
    residual, weight = torch.randn(shape, generator=data).to(dtype), torch.randn(shape[-1], generator=data).to(dtype)
    mine, wide = loose(parts[rank]), torch.stack(parts).double()
    total, op = wide.sum(0), drawn.choice(["sum", "max", "min"])
    reduced = total if op == "sum" else getattr(wide, "a" + op)(0)
    near(lz.all_reduce(mine, op), reduced, dtype)
    counts = [torch.tensor([each, 2**40 - each]) for each in range(ranks)]
    whole = torch.stack(counts)
    assert torch.equal(lz.all_reduce(counts[rank], op), getattr(whole, "sum" if op == "sum" else "a" + op)(0))
    near(lz.all_gather(mine, axis), torch.cat(list(wide), axis), dtype)
    near(lz.reduce_scatter(mine, axis, op), reduced.chunk(ranks, axis)[rank].contiguous(), dtype, "here")
    if axis in (0, -len(shape)):
        rows = torch.cat([each.chunk(ranks)[rank] for each in wide])
        near(lz.all_to_all(mine), rows, dtype, "here")
    output, added = lz.all_reduce_add_rms_norm(mine, residual, weight, group=dist.group.WORLD)
    want = total + residual.double()
    near(added, want, dtype)
    near(output, torch.nn.functional.rms_norm(added.double(), weight.shape, weight.double(), 1e-6), dtype)
def uneven():  # rows by place: rank r sends r + to + 1 rows to each rank, and none to itself
    sent = [[0 if to == here else here + to + 1 for to in range(ranks)] for here in range(ranks)]
    rows = torch.arange(sum(sent[rank])).repeat(3, 1).T + 100 * rank
    got = lz.all_to_all(rows.contiguous(), sent[rank], [each[rank] for each in sent])
    want = []
    for here, each in enumerate(sent):
        first = sum(each[:rank])
        want += [100 * here + first + place for place in range(each[rank])]
    assert got[:, 0].tolist() == want, (got[:, 0].tolist(), want)
    assert lz.all_to_all(rows[:0].contiguous(), [0] * ranks, [0] * ranks).shape == (0, 3)
def tree():  # eight parts, an equal number on each rank
    said = []
    lz.lock("comm.*", "layerzero.*", otherwise="select")
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.randn(3, 96, generator=data).mul(10 ** (place % 3)).to(dtype) for place in range(8)]
        each, whole = 8 // ranks, lz.tree_sum(parts)
        mine = lz.tree_sum(parts[rank * each : (rank + 1) * each])
        output, added = lz.all_reduce_add_rms_norm(mine, parts[0], parts[0][0])
        assert torch.equal(lz.all_reduce(mine), whole)
        assert torch.equal(lz.reduce_scatter(mine, 1), whole.chunk(ranks, 1)[rank])
        assert torch.equal(added, parts[0] + whole)
        assert torch.equal(output, torch.nn.functional.rms_norm(added, (96,), parts[0][0], 1e-6))
        said.append(hashlib.sha256(bytes(output.flatten().view(torch.uint8).tolist())).hexdigest())
    lz.unlock("comm.*")
    return said
def agreed():
    one = dist.new_group([0])  # all make it, rank 0 alone is in it
    try:
        lz.all_reduce(torch.ones(4), group=one)
    except lz.InvalidCallError as error:
        assert rank and "this rank is outside of it" in str(error), error
    before = lz.which("all_reduce", torch.ones(4))["kernel_id"]
    document = lz.agree()
    held = [name for name in document.choices if name.startswith("comm.all_reduce ") and f"rank_count={ranks}" in name]
    assert held and all("group_reach=host" in each and "transport=gloo" in each for each in held), held
    assert lz.which("all_reduce", torch.ones(4))["kernel_id"] == before == "torch.all_reduce"
    lz.thaw()
    return [document.hash]
for _ in range(int(case)):
    compare()
uneven()
said = [bits.hexdigest(), *tree(), *agreed()]
try:
    lz.reduce_scatter(torch.ones(ranks + 1))
except lz.InvalidCallError as error:
    said.append(str(error))
group = dist.group.WORLD
dist.destroy_process_group()
for given in (None, group):
    try:
        lz.all_reduce(torch.ones(4), group=given)  # a call that a plan is kept for
    except lz.InvalidCallError as error:
        said.append(str(error))
print("|".join(said))
"""


@pytest.mark.parametrize(("ranks", "calls"), [(2, 12), pytest.param(4, 60, marks=pytest.mark.slow)])
def test_ranks_get_what_torch_computes_and_the_same_bits_and_a_tree_those_of_one_rank(tmp_path, ranks, calls):
    said = two_ranks(tmp_path, RANK, str(calls), ranks)
    assert all(each == said[0] for each in said)
    tree, errors = said[0][1:3], said[0][4:]
    assert tree[0] != tree[1]
    assert f"wanted a multiple of {ranks}, the number of ranks, along axis 0, got {ranks + 1}" in errors[0]
    assert "torch.distributed.init_process_group before, got none" in errors[1]
    assert "got one that was destroyed" in errors[2]


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda x: lz.all_reduce(x), "wanted torch.distributed.init_process_group before, got none"),
        (lambda x: lz.all_reduce(x, group=3), "wanted a ProcessGroup or Ranks or None, got int"),
        (lambda x: lz.all_reduce(x, "mean", ALONE), "reduce_op: wanted sum, max, min, got 'mean'"),
        (lambda x: lz.all_reduce(x.bool(), group=ALONE), "wanted dtype"),
        (lambda x: lz.all_reduce(x.requires_grad_(), group=ALONE), "wanted no gradients"),
        (lambda x: lz.all_gather(x, 2, ALONE), "gather_dim: wanted an axis of input, -2 to 1, got 2"),
        (lambda x: lz.all_to_all(x, [4], group=ALONE), "wanted both or none, got one"),
        (lambda x: lz.all_to_all(x, [3], [3], ALONE), "wanted sizes that add up to the 4 rows of input, got 3"),
        (lambda x: lz.all_to_all(x, [2, 2], [4], ALONE), "send_sizes: wanted 1 numbers of rows"),
        (lambda x: lz.all_reduce_add_rms_norm(x, x[:2], x[0], group=ALONE), "residual: wanted shape (4, 8) like input"),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(call, wanted):
    with pytest.raises(lz.InvalidCallError) as raised:
        call(torch.ones(4, 8))
    assert wanted in str(raised.value)


def test_sizes_are_looked_at_in_calls_that_a_plan_is_kept_for():
    x = torch.ones(4, 8)
    assert lz.all_to_all(x, [4], [4], ALONE).shape == (4, 8)
    with pytest.raises(lz.InvalidCallError, match="add up to the 4 rows"):
        lz.all_to_all(x, [5], [5], ALONE)


def test_one_rank_gets_copies():
    x = torch.randn(4, 8)
    for got in (lz.all_reduce(x, group=ALONE), lz.all_gather(x, -1, ALONE), lz.reduce_scatter(x, 1, group=ALONE)):
        assert torch.equal(got, x)
        assert got.data_ptr() != x.data_ptr()


def test_times_of_one_rank_decide_nothing():
    x = torch.randn(5, 96)
    facts = lz.facts("all_reduce", x, group=ALONE)
    times = {"layerzero.tree_all_reduce": 1.0, "torch.all_reduce": 99.0}
    record_times(facts, {REGISTRY.kernel(name): Measurement(each, each, 0.0, 30) for name, each in times.items()})
    report = lz.explain("all_reduce", x, group=ALONE)
    assert report.chosen.kernel.id == "torch.all_reduce"
    assert report.chosen.time_us is None


def test_collectives_are_not_measured():
    assert not [job for job in asked_jobs("*", "cases", ["float32"], "cpu") if job.operation.startswith("comm.")]
    with pytest.raises(ValueError, match="times choose no collective"):
        lz.tune("all_reduce", [(4, 8)])


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (RuntimeError("planted"), lz.KernelExecutionError, "the other ranks of the group run it, too"),
        (torch.OutOfMemoryError("Tried to allocate 84 bytes"), torch.OutOfMemoryError, "84 bytes"),
    ],
)
def test_a_kernel_that_fails_is_replaced_by_none_and_asked_again(error, raised, text):
    ran = []

    @lz.register_kernel("comm.all_reduce", "mine.failing", priority=90)
    def failing(input, *, group=None):
        ran.append(1)
        if len(ran) == 1:
            raise error
        return input.clone()

    try:
        with pytest.raises(raised, match=text):
            lz.all_reduce(torch.ones(3, 7), group=ALONE)
        assert torch.equal(lz.all_reduce(torch.ones(3, 7), group=ALONE), torch.ones(3, 7))
    finally:
        lz.unregister_kernel("mine.failing")
    assert len(ran) == 2


def test_a_tree_of_no_parts_is_refused_and_odd_ones_move_up():
    with pytest.raises(lz.InvalidCallError, match="at least one tensor"):
        lz.tree_sum([])
    parts = [torch.tensor([each], dtype=torch.float32) for each in (1e8, 1.0, -1e8, 1.0, 0.5)]
    a, b, c, d, e = parts
    assert torch.equal(lz.tree_sum(parts), ((a + b) + (c + d)) + e)


def chosen(kind, size, dtype=torch.bfloat16):
    ranks = lz.Ranks(None, int(kind.split()[0]), 0)
    ranks._kinds["meta"] = kind  # as all ranks would have said
    x = torch.empty(size, dtype=dtype, device="meta")
    return lz.explain("all_reduce", x, group=ranks, device="H100").chosen.kernel.id


def test_sizes_and_what_all_ranks_know_choose_on_gpus():
    one, two, nccl = "torch.symm_one_shot_all_reduce", "torch.symm_two_shot_all_reduce", "torch.all_reduce"
    sizes = (8, 2**17 - 8, 2**17, 2**19, 2**20 - 8, 2**20, 2**22 - 8, 2**22, 12)
    assert [chosen("2 nccl peers", each) for each in sizes] == [*[one] * 5, two, two, nccl, nccl]
    assert [chosen("2 nccl peers", each, torch.float32) for each in (2**19 - 8, 2**19)] == [one, two]
    assert [chosen("4 nccl peers", each) for each in sizes] == [one, one, nccl, *[two] * 4, nccl, nccl]
    assert chosen("2 nccl peers", 8, torch.float16) == nccl  # which the operators do not take
    for kind in ("3 nccl peers", "2 nccl host", "2 nccl unlike", "16 nccl apart"):
        assert chosen(kind, 8) == nccl, kind


def test_symmetric_memory_is_made_once_for_a_group_and_without_multicast(monkeypatch):
    """Stands in for the operators on a CPU: one rank, whose sum is its own tensor."""
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    made = []

    class Group:
        group_name = "some"

    def rendezvous(buffer, group):
        made.append((buffer.numel(), group.group_name, os.environ[collectives.NO_MULTICAST]))

    def one_shot(buffer, local, op, name):
        assert (buffer.shape, local.data_ptr() % 16, op, name) == (local.shape, 0, "sum", "some")
        return buffer.copy_(local).clone()

    def two_shot(buffer, op, name, output):
        assert (op, name) == ("sum", "some")
        output.copy_(buffer)

    monkeypatch.setattr(memory, "rendezvous", rendezvous)
    monkeypatch.setattr(memory, "empty", torch.empty)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy", one_shot, raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_out", two_shot, raising=False)
    monkeypatch.delenv(collectives.NO_MULTICAST, raising=False)
    group = Group()
    ranks = lz.Ranks(group, 2, 0)
    for x in (torch.randn(3, 8), torch.randn(4, 3).T, torch.randn(9, dtype=torch.bfloat16)[1:], torch.randn(2**17 + 8)):
        for run in (collectives.one_shot, collectives.two_shot):
            got = run(x, group=ranks)
            assert torch.equal(got, x)
            assert got.is_contiguous()
    assert made == [(collectives.BUFFER_BYTES, "some", "1")]
    assert len(collectives._BUFFERS) == 1
    del group
    gc.collect()
    assert not collectives._BUFFERS, "it goes with the group"
    with pytest.raises(lz.InvalidCallError, match="got one that was destroyed"):
        collectives.one_shot(x, group=ranks)
    assert collectives.NO_MULTICAST not in os.environ


def test_calls_of_other_sizes_that_came_before_decide_nothing():
    """Two H200 stood still: a plan for 8001 numbers served 8000 on the one whose tables had not been emptied since."""
    even = limit.dim("payload", multiple=8)

    @lz.register_kernel("comm.all_reduce", "mine.even", priority=90, limits=(even,))
    def run(input, *, group=None):
        ran.append(input.numel())
        return input.clone()

    ran = []
    try:
        for sizes in ((8001, 8000), (8000, 8001, 8008)):
            lz.configure()  # empties the tables
            for size in sizes:
                lz.all_reduce(torch.ones(size), group=ALONE)
    finally:
        lz.unregister_kernel("mine.even")
    assert ran == [8000, 8000, 8008]


def test_a_new_default_group_has_plans_of_its_own(tmp_path):
    """No key tells the default group."""
    x, epochs = torch.ones(4), []
    for life in ("one", "two"):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / life}", rank=0, world_size=1)
        try:
            assert torch.equal(lz.all_reduce(x, group=torch.distributed.group.WORLD), x)
            assert torch.equal(lz.all_reduce(x), x)
            epochs.append(ENGINE.epoch)
            assert torch.equal(lz.all_reduce(x), x)
            assert ENGINE.epoch == epochs[-1]
        finally:
            torch.distributed.destroy_process_group()
        gc.collect()
        assert not ranks_module._KNOWN, "a destroyed group is freed"
    assert epochs[1] > epochs[0]


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_hear_nothing_of_a_group_that_had_the_store_before(monkeypatch, first):
    """The rank that comes first would find what the other one said before it came."""
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=60))

    class Group:
        def get_group_store(self):
            return store

    with ThreadPoolExecutor(1) as other:
        for life in ("one", "two"):
            groups, late = (Group(), Group()), []
            ranks = [lz.Ranks(each, 2, place) for place, each in enumerate(groups)]

            def come(_seconds):
                if not late:
                    late.append(other.submit(ranks[1 - first]._told, "cpu", [life, str(1 - first)]))

            monkeypatch.setattr(ranks_module.time, "sleep", come)
            said = [[life, "0"], [life, "1"]]
            assert ranks[first]._told("cpu", said[first]) == said
            assert late[0].result(timeout=60) == said


def test_the_number_of_ranks_is_a_fact_and_parts_classes_and_rules():
    x, two, four = torch.empty(64, device="meta"), lz.Ranks(None, 2, 0), lz.Ranks(None, 4, 0)
    for ranks in (two, four):
        ranks._kinds["meta"] = f"{ranks.size} nccl host"
    facts = [lz.facts("all_reduce", x, group=each) for each in (two, four)]
    assert [each["tp_size"] for each in facts] == [2, 4]
    assert len({class_name(each, current_policy()) for each in facts}) == 2
    rule = {"match": {"op": "comm.all_reduce", "tp_size": 4}, "deny": ["torch.all_reduce"]}
    with lz.scope(rules=[rule]):
        chosen = [lz.which("all_reduce", x, group=each)["kernel_id"] for each in (two, four)]
    assert chosen == ["torch.all_reduce", "layerzero.tree_all_reduce"]


def test_memory_of_one_rank_decides_nothing():
    x = torch.ones(3, 5)

    @lz.register_kernel("comm.all_reduce", "mine.hungry", priority=90, workspace_bytes=lambda _facts: 2**50)
    def hungry(input, *, group=None):
        return input.clone()

    try:
        assert lz.explain("all_reduce", x, group=ALONE).chosen.kernel.id == "mine.hungry"
    finally:
        lz.unregister_kernel("mine.hungry")


def test_a_verdict_of_one_machine_keeps_no_collective_out_of_a_capture():
    x = torch.ones(3, 5)
    kernel, facts = REGISTRY.kernel("torch.all_reduce"), lz.facts("all_reduce", x, group=ALONE)
    with lz.scope(graph_strict_mode=True):
        assert proofs.capture_reasons(kernel, facts, current_policy(), ENGINE.ledger) == []
        report = lz.explain("all_reduce", x, group=ALONE, capturing=True)
        assert report.chosen.kernel is kernel
        assert proofs.UNPROVED not in report.notes


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_what_is_exact_in_any_order_runs_where_bits_may_not_depend_on_ranks(name):
    whole, rounded = torch.arange(6), torch.ones(6)
    own, tree = f"torch.{name}", f"layerzero.tree_{name}"
    with lz.scope(require_tp_invariant=True):
        for given, op, kernel in (
            (rounded, "max", own),
            (rounded, "min", own),
            (whole, "sum", own),
            (rounded, "sum", tree),
        ):
            assert lz.which(name, given, reduce_op=op, group=ALONE)["kernel_id"] == kernel
            assert torch.equal(getattr(lz, name)(given, reduce_op=op, group=ALONE), given)
