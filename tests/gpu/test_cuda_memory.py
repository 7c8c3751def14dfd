"""What a GPU has free is read as it is, what a kernel takes is counted, and a call goes on where memory ran out."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.core.device import Device
from layerzero.core.system import memory
from layerzero.core.system.memory import FREE
from layerzero.tuning.measurement import clocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 2**20


def held(count):
    return torch.empty(int(count), dtype=torch.uint8, device="cuda")


@pytest.fixture
def little():
    """All but 2 GB of the device are held; and let go of at the end."""
    torch.cuda.empty_cache()
    rest = held(torch.cuda.mem_get_info()[0] - 2000 * MIB)
    FREE.forget()
    yield rest
    del rest
    torch.cuda.empty_cache()
    FREE.forget()


def read():
    return memory.read(Device.detect("cuda"))


@pytest.mark.parametrize("pieces", [0, 30])
def test_the_largest_block_can_be_had_and_no_larger_one(little, pieces):
    held(1200 * MIB)  # one segment, which the blocks divide
    blocks = [held(40 * MIB) for _ in range(pieces)]
    del blocks[::2]
    found = read()
    assert found.at_once <= found.largest <= found.free
    with pytest.raises(torch.OutOfMemoryError):
        held(found.largest + 64 * MIB)
    got = held(found.largest - 64 * MIB)
    assert read().free <= found.free - got.numel() + 128 * MIB


def test_a_share_that_a_process_may_have_bounds_what_is_free():
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        pytest.skip("this torch does not say which share a process may have")
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        assert read().free <= total / 2 - torch.cuda.memory_allocated() + MIB
        assert read().largest <= max(total / 2 - kept + MIB, 0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_is_given_back_where_the_device_is_idle_and_at_no_other_time(little):
    graph, data = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    with lz.capturing(graph):
        captured = lz.defragment()
        data + 1
    assert captured.left == "a CUDA graph is being captured"
    del graph
    blocks = [held(60 * MIB) for _ in range(25)]  # now: torch gives all back as a capture begins
    del blocks
    assert read().fragmentation > 0.5
    torch.cuda._sleep(10**9)
    assert lz.defragment().left == "a stream has work that is not done"
    torch.cuda.synchronize()
    done = lz.defragment()
    assert (done.left, done.given_back_bytes > 1000 * MIB) == ("", True)
    assert done.after < 0.5 < done.before
    assert "memory.fragmentation allows 0.5" in lz.defragment().left


def test_what_a_run_gives_back_is_counted():
    def run():
        held(300 * MIB)
        return held(50 * MIB)

    assert clocks.taken_bytes(run, torch.device("cuda")) == pytest.approx(250 * MIB, abs=4 * MIB)

    def both():
        large = held(300 * MIB)
        result = held(50 * MIB)
        del large
        return result

    assert clocks.taken_bytes(both, torch.device("cuda")) == pytest.approx(300 * MIB, abs=4 * MIB)


def test_tuning_measures_what_a_kernel_takes_and_explain_says_so():
    @lz.register_kernel("norm.rms", "mine.hungry", platform="cuda")
    def hungry(input, weight, *, eps=1e-6):
        wide = input.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)

    try:
        data = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
        with lz.scope(allow=["user"], require_vetting=False):
            lz.tune("norm.rms", [(4096, 4096)], "bfloat16", "cuda", samples=3, isolate=False)
            report = lz.explain("rms_norm", data, weight)
            (found,) = [each for each in report.candidates if each.kernel.id == "mine.hungry"]
            assert "(measured 20" in found.workspace
            assert 60 <= int(found.workspace.partition(" ")[0]) <= 300
            with lz.scope(memory_headroom_mb=16):
                assert "(measured 20" in str(lz.explain("rms_norm", data, weight).reasons("mine.hungry")[0])
    finally:
        lz.unregister_kernel("mine.hungry")


def test_where_memory_ran_out_another_kernel_answers_and_the_next_call_asks_it_first(little):
    @lz.register_kernel("norm.rms", "mine.greedy", platform="cuda", priority=90)
    def greedy(input, weight, *, eps=1e-6):
        held(4000 * MIB)
        return input.clone()

    try:
        data, weight = torch.randn(64, 1024, device="cuda"), torch.ones(1024, device="cuda")
        with lz.scope(prefer_sources=["user"], unmeasured="priority"):
            with pytest.warns(lz.LayerZeroFallbackWarning, match=r"mine.greedy failed"):
                got = lz.rms_norm(data, weight)
            torch.testing.assert_close(got, torch.nn.functional.rms_norm(data, (1024,), weight, 1e-6))
            report = lz.explain("rms_norm", data, weight)
            assert report.kernel_id != "mine.greedy"
            assert "at least, since memory ran out" in str(report.reasons("mine.greedy")[0])
    finally:
        lz.unregister_kernel("mine.greedy")


def test_a_refusal_has_the_numbers_of_the_device(little):
    query = torch.randn(1, 8192, 8, 64, device="cuda")
    report = lz.explain("attention", query, query, query, layout="BSHD", causal=True)
    (reason,) = report.reasons("torch.sdpa.math")
    assert "needs a workspace of" in str(reason)
    lz.attention(query, query, query, layout="BSHD", causal=True)
    allocated = torch.cuda.memory_allocated()
    with lz.scope(memory_headroom_mb=10**6):
        (reason,) = lz.explain("attention", query, query, query, layout="BSHD", causal=True).reasons("torch.sdpa.math")
    assert "free memory allows" in str(reason)
    assert torch.cuda.memory_allocated() == allocated
