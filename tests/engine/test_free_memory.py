"""What is free decides about a call: read with an age, anew once memory ran out, never on a hit."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.core.device import Device
from layerzero.core.kernel import Backend
from layerzero.core.reasons import ReasonCode
from layerzero.core.system import memory as free_memory
from layerzero.core.system.memory import FREE, FreeMemory, Reading
from layerzero.engine import headroom
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement import clocks
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.storage.store import StoreLedger

MIB = 2**20
INPUT, WEIGHT = torch.randn(256, 1024), torch.ones(1024)  # its result takes 1 MiB
LIBRARY = Backend(name="hungry", summary="takes what it is told to", origin="entry_point")


class Memory:
    """A device whose free memory a test sets, with a clock."""

    def __init__(self, monkeypatch):
        self.mib, self.reads, self.now_s = (1000.0, 1000.0), 0, 0.0
        monkeypatch.setattr(FREE, "read", self.read)
        monkeypatch.setattr(FREE, "now_s", lambda: self.now_s)
        FREE.forget()

    def read(self, _):
        self.reads += 1
        free, largest = (each * MIB for each in self.mib)
        return Reading(free, largest, largest)

    def has(self, free, largest=None):
        """From the next reading on, which is due."""
        self.mib, self.now_s = (free, free if largest is None else largest), self.now_s + 61


@pytest.fixture
def memory(monkeypatch):
    return Memory(monkeypatch)


def kernel(name, mib, *, run=None, priority=90):
    declared = {} if mib is None else {"workspace_bytes": lambda _: int(mib * MIB)}
    return lz.Kernel(
        id=f"hungry.{name}", operations=("norm.rms",), backend=LIBRARY, priority=priority,
        load=lambda _: run or (lambda input, weight, *, eps=1e-6: input.clone()), accepts=("weight", "eps"), **declared,
    )  # fmt: skip


@contextmanager
def only(*kernels, **settings):
    REGISTRY.register_kernels(kernels)
    try:
        with lz.scope(allow=["hungry"], require_vetting=False, **settings):
            yield
    finally:
        for each in kernels:
            lz.unregister_kernel(each.id)


def asked():
    return lz.explain("rms_norm", INPUT, WEIGHT)


def test_a_refusal_says_what_is_needed_what_is_free_and_how_old_that_is(memory):
    with only(kernel("large", 900)):
        asked()
        memory.now_s = 12.0
        (reason,) = asked().reasons("hungry.large")
    assert reason.code is ReasonCode.MEMORY_HEADROOM_EXCEEDED
    assert reason.message == (
        "needs a workspace of 900 MiB (declared), free memory allows 800 MiB: 1000 MiB are free, 1 MiB of them for "
        "results, the largest block has 1000 MiB; safety factor 1.2, share of a block 0.8, read 12 s ago"
    )


@settings(max_examples=examples(200))
@given(
    needs=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    free=st.integers(0, 4000), share=st.floats(0, 1), more=st.integers(0, 4000),
    factor=st.sampled_from((1.0, 1.2, 2.0)), block=st.sampled_from((0.5, 0.8, 1.0)),
)  # fmt: skip
def test_the_law(needs, free, share, more, factor, block):
    with pytest.MonkeyPatch.context() as patched:
        memory = Memory(patched)
        kernels = [kernel(str(each), need, priority=90 - each) for each, need in enumerate(needs)]
        with only(*kernels, memory_headroom_mb=10_000, **{"memory.safety_factor": factor, "memory.block_share": block}):
            memory.has(free, int(share * free))
            report, legal = asked(), []
            for each, need in enumerate(needs):
                fits = need == 0 or ((need + 1) * factor <= free and need <= block * int(share * free))
                legal += [need] if not (refused := report.reasons(f"hungry.{each}")) else []
                assert bool(refused) != fits or math.isclose((need + 1) * factor, free)
            reference = report.kernel_id.startswith("reference")
            assert reference == (not legal), "what fits comes before what does not, and what needs nothing last"
            memory.has(free + more, int(share * free) + more)
            later = asked()
            assert {*later.failures} <= {*report.failures}, "more memory refuses nothing more"
            with lz.scope(locks={"norm.rms": "hungry.*"}):
                kept = asked()
            if not [each for each in kept.candidates if each.legal and headroom.BEYOND not in each.adaptations]:
                assert kept.chosen.workspace.startswith(f"{min(needs)} MiB"), "where none fits, the least"


def test_of_several_that_do_not_fit_the_one_that_needs_least_runs(memory):
    memory.mib = (10, 10)
    with only(kernel("more", 500), kernel("less", 300, priority=5), locks={"norm.rms": "hungry.*"}):
        with pytest.warns(lz.LayerZeroPerformanceWarning, match=r"takes 300 MiB .* free memory allows 7 MiB"):
            lz.rms_norm(INPUT, WEIGHT)
        assert asked().kernel_id == "hungry.less"


@pytest.mark.parametrize(("pool", "free", "largest"), [({"segment_pool_id": (0, 7)}, 60, 40), ({}, 1060, 940)])
def test_what_is_free_in_the_pool_of_a_graph_serves_no_call(monkeypatch, pool, free, largest):
    def segment(*blocks, **more):
        told = [{"size": size * MIB, "state": state} for size, state in blocks]
        return {"device": 0, "segment_type": "large", "blocks": told, **more}

    free_piece, used, whole = (20, "inactive"), (80, "active_allocated"), (30, "inactive")
    shared = {"segment_pool_id": (0, 0)}
    listed = [
        segment(free_piece, used, **(shared if pool else {})),
        segment(whole, **(shared if pool else {})),
        segment((100, "inactive"), used, **pool),
        segment((900, "inactive"), **pool),
        {**segment((5000, "inactive"), **shared), "device": 1},
    ]
    counted = {
        "reserved_bytes.all.current": 1210 * MIB, "active_bytes.all.current": 160 * MIB,
        "inactive_split_bytes.all.current": 120 * MIB,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: counted)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * MIB, 2000 * MIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: listed)
    found = free_memory._of_allocator(0)
    assert (found.free / MIB, found.largest / MIB) == (free, largest)


def test_a_reading_is_as_old_as_it_may_be_and_none_is_made_on_a_hit(memory):
    with only(kernel("large", 100)):
        for _ in range(5):
            lz.rms_norm(INPUT, WEIGHT)
        assert memory.reads == 1
        memory.now_s = 1000.0
        lz.rms_norm(INPUT, WEIGHT)
        assert memory.reads == 1, "a hit, however old the reading"
        lz.rms_norm(INPUT[:3], WEIGHT)
        assert memory.reads == 2
        memory.now_s += 59
        lz.rms_norm(INPUT[:99], WEIGHT)
        assert memory.reads == 2


def test_plans_are_chosen_anew_where_a_new_reading_ends_otherwise(memory):
    with only(kernel("large", 500), kernel("small", 1, priority=5)):
        lz.rms_norm(INPUT, WEIGHT)
        epoch = ENGINE.epoch
        memory.has(900)
        assert asked().kernel_id == "hungry.large"
        assert ENGINE.epoch == epoch
        memory.has(400)
        assert asked().kernel_id == "hungry.small"
        assert ENGINE.epoch == epoch + 1
        memory.has(900)
        assert asked().kernel_id == "hungry.large"
        assert ENGINE.epoch == epoch + 2


@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")
def test_a_plan_serves_no_larger_call_that_would_not_fit(memory):
    by_rows = lz.Kernel(
        id="hungry.rows", operations=("norm.rms",), backend=LIBRARY, priority=90, accepts=("weight", "eps"),
        load=lambda _: lambda input, weight, *, eps=1e-6: input.clone(),
        workspace_bytes=lambda facts: facts.size("rows") * 4 * MIB,
    )  # fmt: skip
    with only(by_rows, memory_headroom_mb=10_000):
        ran = []
        for rows in (60, 40, 150, 250):
            before = lz.metrics().misses.get("rms_norm", 0)
            lz.rms_norm(INPUT[:rows], WEIGHT)
            ran.append(lz.metrics().misses["rms_norm"] - before)
        assert ran == [1, 0, 1, 1], "the largest of its class would not fit, so 150 rows have a plan of their own"
        assert lz.explain("rms_norm", INPUT[:250], WEIGHT).reasons("hungry.rows")


def raising(text):
    def run(*_, **__):
        raise torch.OutOfMemoryError(text)

    return run


out_of_memory = raising("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")


def test_once_memory_ran_out_the_device_is_read_anew_and_a_kernel_that_fits_runs(memory):
    greedy, small = kernel("greedy", None, run=out_of_memory), kernel("small", 1, priority=5)
    with only(greedy, small):
        with pytest.warns(lz.LayerZeroFallbackWarning, match=r"hungry.greedy failed .* hungry.small ran in its place"):
            result = lz.rms_norm(INPUT, WEIGHT)
        assert torch.equal(result, INPUT)
        assert not ENGINE.health.breakers()
        assert "2048 MiB (at least, since memory ran out)" in str(asked().reasons("hungry.greedy")[0])
        assert lz.explain("rms_norm", INPUT[:3], WEIGHT).kernel_id == "hungry.greedy", "another class"
        memory.has(4000)
        with lz.scope(memory_headroom_mb=4000):
            assert asked().kernel_id == "hungry.greedy"


def test_a_kernel_that_took_too_much_is_tried_again_once_more_is_free(memory):
    some = kernel("some", None, run=raising("CUDA out of memory. Tried to allocate 20.00 KiB"))
    with only(some, kernel("small", 1, priority=5)), pytest.warns(lz.LayerZeroFallbackWarning):
        memory.mib = (500, 500)
        lz.rms_norm(INPUT, WEIGHT)
        assert "needs a workspace of 400 MiB (at least, since memory ran out)" in str(asked().reasons("hungry.some")[0])
        memory.has(600)
        assert asked().kernel_id == "hungry.some"


def test_what_says_nothing_of_its_need_runs_where_the_allocator_refused_a_request(memory):
    with only(kernel("greedy", None, run=out_of_memory), kernel("unknown", None, priority=5)):
        with pytest.warns(lz.LayerZeroFallbackWarning, match=r"hungry.unknown ran in its place"):
            lz.rms_norm(INPUT, WEIGHT)


def test_what_needs_least_is_tried_last_although_it_does_not_fit_with_the_margin(memory):
    tight = kernel("tight", 450, priority=5)
    worse = kernel("worse", 900, run=out_of_memory)
    with only(kernel("greedy", None, run=out_of_memory), tight, worse, deny=["reference"]):
        memory.mib = (500, 500)
        with pytest.warns(lz.LayerZeroWarning) as said:
            assert torch.equal(lz.rms_norm(INPUT, WEIGHT), INPUT)
    assert any("hungry.tight ran in its place" in str(each.message) for each in said)


@pytest.mark.parametrize(("text", "free", "settings"), [
    ("CUDA error: out of memory", 1000, {}),
    ("Tried to allocate 2.00 GiB", 0.5, {}),
    ("Tried to allocate 2.00 GiB", 1000, {"fallback_enabled": False}),
    ("Tried to allocate 2.00 GiB", 1000, {"locks": {"norm.rms": "hungry.greedy"}}),
])  # fmt: skip
def test_the_error_is_raised_where_nothing_else_may_run(memory, text, free, settings):
    greedy = kernel("greedy", None, run=raising(f"CUDA out of memory. {text}"))
    with only(greedy, kernel("unknown", None, priority=5), **settings):
        memory.mib, before = (free, free), memory.reads
        with pytest.raises(torch.OutOfMemoryError, match=text):
            lz.rms_norm(INPUT, WEIGHT)
        assert memory.reads == before + 1


def test_what_one_rank_lacked_decides_nothing_where_ranks_choose_together(memory):
    greedy, small = kernel("greedy", None, run=out_of_memory), kernel("small", 1, priority=5)
    with only(greedy, small), pytest.warns(lz.LayerZeroFallbackWarning):
        lz.rms_norm(INPUT, WEIGHT)
        assert asked().kernel_id == "hungry.small"
        lz.configure(distributed_selection="agree")
        assert asked().kernel_id == "hungry.greedy", "what was noted before"
        headroom.forget()
        assert torch.equal(lz.rms_norm(INPUT, WEIGHT), INPUT), "another one answers this call"
        assert not headroom.RAN_OUT
        assert asked().kernel_id == "hungry.greedy"


@pytest.mark.parametrize(("name", "wrong", "wanted"), [
    ("memory.safety_factor", 0.9, "of at least 1, got 0.9"),
    ("memory.safety_factor", math.nan, "of at least 1, got nan"),
    ("memory.block_share", 0.0, "above 0, got 0.0"),
    ("memory.block_share", 1.1, "of at most 1, got 1.1"),
])  # fmt: skip
def test_factors_that_mean_nothing_are_refused_when_they_are_set(name, wrong, wanted):
    for setting in (lambda: lz.configure(**{name: wrong}), lambda: lz.scope(**{name: wrong}).__enter__()):
        with pytest.raises(lz.PolicyError, match=f"{name}: wanted a number {wanted}"):
            setting()


def test_what_ranks_choose_together_and_what_is_asked_about_another_device_reads_nothing(memory):
    lz.configure(distributed_selection="agree")
    with only(kernel("large", 900)):
        assert asked().kernel_id == "hungry.large"
    assert memory.reads == 0
    assert free_memory.read(Device.named("H100")) == free_memory.UNKNOWN
    assert free_memory.read(Device.detect("cpu")).free > 0


def test_a_reading_of_any_age_serves_where_the_settings_say_so_and_the_first_is_made(memory):
    memory.has(100)
    with only(kernel("large", 900), kernel("small", 1, priority=5), **{"memory.max_age_s": math.inf}):
        assert asked().kernel_id == "hungry.small"
        memory.has(1000)
        assert asked().kernel_id == "hungry.small"
    assert memory.reads == 1


def test_in_a_capture_nothing_is_read():
    reads, here = [], Device.detect("cpu")
    free = FreeMemory(lambda device: reads.append(device) or Reading(1.0, 1.0, 1.0), lambda: 5.0)
    assert free.of(here, None) == free_memory.UNKNOWN
    assert not reads
    told = []
    free.changed = lambda device, reading: told.append((device, reading))
    assert free.renewed(here) == free.of(here, None) == Reading(1.0, 1.0, 1.0, 5.0)
    assert told == [(here, Reading(1.0, 1.0, 1.0, 5.0))]


class Counted:
    """What ``torch.cuda`` counts of a run that takes 700 bytes beside a result of 200."""

    def __init__(self):
        self.allocated = self.peak = 100

    def run(self):
        self.allocated, self.peak = 300, 1000

    def synchronize(self, device=None):
        pass

    def reset_peak_memory_stats(self, device=None):
        self.peak = self.allocated

    def max_memory_allocated(self, device=None):
        return self.peak

    def memory_allocated(self, device=None):
        return self.allocated


def test_a_workspace_is_what_a_run_gives_back():
    counted = Counted()
    assert clocks.taken_bytes(counted.run, torch.device("cuda"), counted) == 700


def test_what_was_measured_decides_where_nothing_is_declared_in_every_later_process(memory, tmp_path, monkeypatch):
    monkeypatch.setitem(headroom.RAN_OUT, ("another", ""), 1)  # as of a GPU; a CPU's kernels are not measured
    quiet = kernel("quiet", None)
    with only(quiet):
        facts = asked().facts
        ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
        assert asked().chosen.workspace == "unknown"
        ENGINE.ledger.record_workspace(quiet, facts, 900 * MIB)
        ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
        refused = asked()
        (reason,) = refused.reasons("hungry.quiet")
        assert "needs a workspace of 900 MiB (measured 20" in str(reason)
        assert lz.explain("rms_norm", INPUT[:100], WEIGHT).kernel_id == "hungry.quiet", "another class"
        larger = lz.explain("rms_norm", torch.ones(384, 1024), WEIGHT)
        assert larger.facts.size_classes() == facts.size_classes() or larger.kernel_id == "hungry.quiet"
        memory.has(2000)
        assert asked().chosen.workspace.startswith("900 MiB (measured 20")


def test_a_larger_call_of_a_class_takes_as_much_more_as_it_has_elements(memory, monkeypatch):
    monkeypatch.setitem(headroom.RAN_OUT, ("another", ""), 1)
    quiet = kernel("quiet", None)
    with only(quiet):
        small = lz.explain("rms_norm", torch.ones(64, 1024), WEIGHT).facts
        ENGINE.ledger.record_workspace(quiet, small, 100 * MIB)
        assert headroom.need_of(quiet, lz.explain("rms_norm", torch.ones(127, 1024), WEIGHT).facts).bytes > 190 * MIB
        assert headroom.need_of(quiet, small).bytes == 100 * MIB


def test_a_cpu_has_nothing_to_give_back():
    assert lz.defragment("cpu").left == "torch keeps no memory of it"
    with pytest.raises(ValueError, match="device: wanted a device such as cpu, cuda or cuda:1, got 'typo'"):
        lz.defragment("typo")
