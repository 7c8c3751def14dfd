"""What a step says of values on the device: the bound that launches are sized by, and numbers on the host."""

from __future__ import annotations

import types

import pytest
import torch

import layerzero as lz
from layerzero.backends.shape_cache import launch_lock
from layerzero.backends.vllm import paged
from layerzero.ops.paged import step as steps

AGAIN = "make a new StepMetadata with a larger max_context_len and capture again"
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 64, "value_dim": 64, "page_size": 16, "max_blocks": 4, "batch": 2}


def made(lens=(17, 20), bound=32, **more):
    table = torch.tensor([[3, 1, 0, 2], [0, 5, 4, 6]], dtype=torch.int32)
    return lz.StepMetadata(table, torch.tensor(lens, dtype=torch.int32), max_context_len=bound, capturable=True, **more)


class Facts(dict):
    device = types.SimpleNamespace(index=0)
    tensors = types.MappingProxyType({"query": torch.zeros(1)})

    def size(self, name):
        return SIZES[name]


@pytest.fixture
def launches(monkeypatch):
    """What a stand-in of FlashAttention 3 was launched with, and what its schedules were made for: bounds."""
    launched, scheduled, bound = [], [], []

    def fwd(*given):
        assert launch_lock("vllm.flash_attn.v3", 0).locked() is (given[29] is not None), (
            "what counts tiles is put back at the end"
        )
        assert [each is given[0]._base for each in bound] == [True] * (given[29] is not None), (
            "a descriptor comes first"
        )
        bound.clear()
        launched.append(given[13])
        return given[0], None

    def schedule(*given):
        scheduled.append(given[2])
        return torch.zeros(3, dtype=torch.int32)

    library = {"fwd": fwd, "get_scheduler_metadata": schedule}
    operators = types.SimpleNamespace(**{name: types.SimpleNamespace(default=each) for name, each in library.items()})
    monkeypatch.setattr(paged, "operators", lambda *_: operators)
    monkeypatch.setattr(paged, "give_context", bound.append)
    monkeypatch.setattr(paged, "STARTS", types.SimpleNamespace(get=lambda *_, **__: torch.arange(3).int()))

    def run(step, *, capturing, chosen_in_capture=None, alone=False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        of_capture = capturing if chosen_in_capture is None else chosen_in_capture
        kernel = paged._load_v3(Facts(capturing=of_capture, window=None, softcap=None))
        cache = torch.zeros(8, 16, 2, 64)
        of_step = {} if alone else {"step": step}
        kernel(torch.zeros(2, 1, 4, 64), cache, cache, step.block_tables, step.context_lens, **of_step)

    return types.SimpleNamespace(run=run, launched=launched, scheduled=scheduled)


def test_a_step_that_was_never_captured_takes_any_bound(launches):
    step = made()
    launches.run(step, capturing=False)
    step.context_lens.add_(20)
    step.advance(max_context_len=50)
    launches.run(step, capturing=False)
    step.advance(max_context_len=40)
    launches.run(step, capturing=False)
    assert launches.launched == launches.scheduled == [32, 50, 40]


def test_calls_with_a_steps_schedule_are_launched_one_after_the_other(launches):
    step = made()
    launches.run(step, capturing=False)
    launches.run(step, capturing=False, alone=True)
    assert launches.launched == [32, 64]
    assert not launch_lock("vllm.flash_attn.v3", 0).locked()


def test_an_eager_call_on_the_plan_of_a_capture_captures_nothing(launches):
    step = made()
    launches.run(step, capturing=False, chosen_in_capture=True)
    step.advance(max_context_len=50)
    assert step.max_context_len == 50


def test_a_captured_launch_keeps_its_bound_and_so_do_its_schedules(launches):
    step = made()
    launches.run(step, capturing=False)
    launches.run(step, capturing=True)
    with pytest.raises(lz.InvalidCallError, match=f"max_context_len: wanted at most 32, .*, got 33; {AGAIN}"):
        step.advance(max_context_len=33)
    step.advance(max_context_len=24)
    step.advance(max_context_len=32)
    assert step.max_context_len == 32
    assert launches.scheduled == [32] * 3, "as large as the launch that reads it"
    other = made(bound=None)
    launches.run(other, capturing=True)
    other.advance(max_context_len=24)
    assert other.max_context_len is None, "it was captured for all that the tables hold"


@pytest.mark.parametrize("given", [True, False])
def test_lengths_that_outgrow_what_was_captured_are_told_of_before_anything_changes(launches, given):
    step = made()
    launches.run(step, capturing=True)
    slots = step.slot_mapping(16).tolist()
    step.context_lens.add_(13)
    host = (step.context_lens.clone(),) if given else None
    with pytest.raises(lz.InvalidCallError, match=f"context_lens: .* 32, got 33; {AGAIN}"):
        step.advance(host=host)
    assert step._slots[("slot_mapping", 16, None)].slots.tolist() == slots
    step.context_lens.sub_(1)
    step.advance()


def test_lengths_on_a_device_are_counted_there_and_told_of_later(launches, monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda, is_cpu = True, False

    arrived = []
    event = types.SimpleNamespace(record=lambda _: None, query=lambda: bool(arrived))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **more: zeros(*sizes, **more))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step = made()
    launches.run(step, capturing=True)
    step._tensors = (step.block_tables, (step.context_lens + 13).as_subclass(OnDevice))
    step.advance()
    step._tensors = (step.block_tables, (step.context_lens - 13).as_subclass(OnDevice))
    arrived.append(True)
    with pytest.raises(lz.InvalidCallError, match=f"got 1 beyond it, now or in an earlier step; {AGAIN}"):
        step.advance()
    step.advance()


def test_a_bound_that_lengths_are_beyond_is_none():
    beyond = "context_lens: wanted at most max_context_len 19, got 20; pass a larger max_context_len"
    with pytest.raises(lz.InvalidCallError, match=beyond):
        made(bound=19)
    on_host = torch.tensor([17, 20], dtype=torch.int32)
    with pytest.raises(lz.InvalidCallError, match=beyond):
        made(bound=19, host=(on_host,))
    step = made(bound=20)
    step.context_lens.add_(1)
    with pytest.raises(lz.InvalidCallError, match="max_context_len 20, got 21"):
        step.advance()
    step.advance(max_context_len=21)
    assert made(bound=1, lens=(0, 0)).max_context_len == 1
    assert steps.StepMetadata(torch.zeros(0, 4).int(), torch.zeros(0).int(), max_context_len=3).max_context_len == 3


@pytest.mark.parametrize("changed", [0, 1, 2])
@pytest.mark.parametrize("untold", [False, True])
def test_debug_mode_finds_a_step_whose_numbers_are_others_on_the_device(changed, untold):
    """Torch counts no writes into tensors of inference mode, and nobody compares what lies on a device."""
    with torch.inference_mode(untold), lz.scope(debug=True):
        tables = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
        lens, starts = torch.tensor([17, 20], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
        step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts)
        cache = torch.randn(8, 16, 2, 32)
        call = (torch.randn(4, 8, 32), cache, cache.clone(), tables, lens)
        lz.paged_attention(*call, cu_seqlens_q=starts, step=step)
        place = ((0, 0), (0,), (1,))[changed]
        name = ("block_tables", "context_lens", "cu_seqlens_q")[changed]
        if untold:
            step._tensors[changed][place] += 1
        else:  # as if the host had been told something else than the device
            host = [tables.clone(), lens.clone(), starts.clone()]
            host[changed][place] -= 1
            step._host_tables, step._given = host[0], (host[1], host[2])
        with pytest.raises(lz.InvalidCallError, match=rf"{name}\[.*\]: wanted \d+, which the host knows, got"):
            lz.paged_attention(*call, cu_seqlens_q=starts, step=step)
