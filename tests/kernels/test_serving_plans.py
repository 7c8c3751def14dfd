"""What FlashInfer is told of a step: pages, lengths and starts, of a whole batch and its parts, and again later."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

import layerzero as lz
from layerzero.backends.flashinfer import cascade
from layerzero.backends.flashinfer.cascade import _Cascade
from layerzero.backends.flashinfer.latent import _Planned as PlannedLatent
from layerzero.backends.flashinfer.paged import Planned
from layerzero.backends.flashinfer.varlen import PlannedPages, _Split, pages_of
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.registry import REGISTRY
from layerzero.ops.paged.slots import LateCount

PAGE = 4
ARGUMENTS = {"num_qo_heads": 4, "head_dim_qk": 64, "head_dim_vo": 64, "causal": True, "window_left": -1}


class Wrapper:
    """Stands for FlashInfer's wrappers: remembers its plans."""

    def __init__(self, *_, **buffers):
        self.buffers, self.plans = buffers, []

    def plan(self, *tensors, **arguments):
        self.plans.append(([each.tolist() for each in tensors], arguments))

    def run(self):
        return self


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch):
    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
    module = types.SimpleNamespace(**dict.fromkeys(names, Wrapper))
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    metadata = types.SimpleNamespace(csr=lambda *tensors: [each.tolist() for each in tensors])
    latent = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper, MLAPlanMetadata=metadata)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", latent)


def step_of(lens=(5, 1, 8, 4), starts=(0, 1, 2, 5, 7)):
    table = torch.tensor([[7, 2], [5, -1], [1, 3], [6, -1]], dtype=torch.int32)
    numbers = [torch.tensor(each, dtype=torch.int32) for each in (lens, starts)]
    return lz.StepMetadata(table, numbers[0], cu_seqlens_q=numbers[1], capturable=True)


@pytest.mark.parametrize("on_host", [True, False])
def test_tables_become_rows_of_pages(monkeypatch, on_host):
    if not on_host:  # as tables on a device that the caller gave alone
        monkeypatch.setattr(lz.StepMetadata, "host_tables", None)
    indptr, pages, last = pages_of(step_of(), PAGE)
    assert indptr.tolist() == [0, 2, 3, 5, 6]
    assert pages.tolist() == [7, 2, 5, 1, 3, 6]
    assert last.tolist() == [1, 1, 4, 4]
    indptr, pages, last = pages_of(step_of((0, 0, 0, 0)), PAGE)
    assert indptr.tolist() == [0] * 5
    assert pages.tolist() == []
    assert last.tolist() == [0] * 4


def test_a_whole_batch_is_planned_as_it_is_and_again_when_the_step_advances():
    step = step_of()
    planned = PlannedPages(step, ARGUMENTS, PAGE, "fa2")
    wrapper = planned.run()
    assert wrapper.plans[0][0] == [[0, 1, 2, 5, 7], [0, 2, 3, 5, 6], [7, 2, 5, 1, 3, 6], [1, 1, 4, 4]]
    assert wrapper.plans[0][1] == {**ARGUMENTS, "page_size": PAGE}
    step.slot("planned", lambda _: planned)
    step.context_lens[1] = 3
    step.advance()
    assert wrapper.plans[1][0][3] == [1, 3, 4, 4]


def test_a_split_batch_is_a_decode_of_the_first_and_a_prefill_of_the_rest():
    step = step_of()
    both = _Split(step, ARGUMENTS, PAGE, "fa2", 2)
    decode, prefill = both.decode.run(), both.prefill.run()
    assert decode.plans[0][0] == [[0, 2, 3], [7, 2, 5], [1, 1]]
    assert decode.plans[0][1]["head_dim"] == 64
    assert "causal" not in decode.plans[0][1]
    assert prefill.plans[0][0] == [[0, 3, 5], [0, 2, 3], [1, 3, 6], [4, 4]]
    step.slot("split", lambda _: both)
    step.context_lens[0], step.context_lens[3], step.cu_seqlens_q[3] = 4, 3, 6
    step.advance()
    assert decode.plans[1][0] == [[0, 1, 2], [7, 5], [4, 1]]
    assert prefill.plans[1][0] == [[0, 4, 5], [0, 2, 3], [1, 3, 6], [4, 3]]


@pytest.mark.parametrize("tensor_cores", [True, False])
def test_decoding_is_flashinfers_own_kernel_and_not_one_that_it_would_choose(tensor_cores):
    arguments = {"num_qo_heads": 4, "head_dim": 256, "page_size": PAGE}
    assert Planned(step_of(), arguments, tensor_cores=tensor_cores).run().buffers["backend"] == "fa2"


def test_a_shared_prefix_is_planned_as_one_sequence_of_all_queries():
    table = torch.tensor([[7, 2, 4], [7, 5, -1]], dtype=torch.int32)
    lens = torch.tensor([9, 6], dtype=torch.int32)
    step = lz.StepMetadata(table, lens, capturable=True)
    both = _Cascade(step, ARGUMENTS, PAGE, 1)
    prefix, rest = both.prefix.run(), both.rest.run()
    assert prefix.plans[0][0] == [[0, 2], [0, 1], [7], [4]]
    assert rest.plans[0][0] == [[0, 1, 2], [0, 2, 3], [2, 4, 5], [1, 2]]
    step.slot("cascade", lambda _: both)
    lens += 1
    step.advance()
    assert prefix.plans[1] == prefix.plans[0]
    assert rest.plans[1][0][3] == [2, 3]
    lens[1] = 3
    with pytest.raises(lz.InvalidCallError, match="at least the 4 tokens of the shared pages, got 3"):
        step.advance()


def test_a_latent_decode_is_planned_for_as_many_queries_of_each_sequence():
    table = torch.tensor([[7, 2], [5, -1]], dtype=torch.int32)
    lens = torch.tensor([5, 3], dtype=torch.int32)
    step = lz.StepMetadata(table, lens, capturable=True)
    planned = PlannedLatent(step, {"page_size": PAGE, "causal": True}, 3, "fa2")
    wrapper = planned.run()
    assert wrapper.plans[0] == (
        [],
        {"metadata": [[0, 3, 6], [0, 2, 3], [7, 2, 5], [5, 3]], "page_size": 4, "causal": True},
    )
    assert {name: len(each) for name, each in wrapper.buffers.items() if name.startswith("kv")} == {
        "kv_indptr": 3,
        "kv_indices": 4,
        "kv_len_arr": 2,
    }
    step.slot("planned", lambda _: planned)
    lens -= 2
    step.advance()
    assert wrapper.plans[1][1]["metadata"] == [[0, 3, 6], [0, 1, 2], [7, 5], [3, 1]]


@pytest.mark.parametrize("kind", ["eager", "capturable"])
def test_flash_mla_splits_the_work_once_a_step_unless_a_graph_replays_it(monkeypatch, kind):
    from layerzero.backends.vllm import latent

    given, bound = [], []

    def dense_decode_fwd(query, cache, latent_dim, lens, table, scale, causal, metadata, splits, out):
        given.append((tuple(query.shape), tuple(cache.shape), latent_dim, causal, metadata))
        lse = torch.full((2, 3, 2), torch.inf)
        return query[..., :latent_dim], lse, torch.tensor(len(given)), torch.tensor(0)

    operator = types.SimpleNamespace(dense_decode_fwd=types.SimpleNamespace(default=dense_decode_fwd))
    monkeypatch.setattr(latent, "operators", lambda *_: operator)
    monkeypatch.setattr(latent, "give_context", bound.append)
    sizes = {"latent_dim": 8, "seq_q": 2, "heads": 3}

    class Facts(dict):
        def size(self, name):
            return sizes[name]

    run = latent._load_flash_mla(Facts(step=kind, capturing=False))
    query, cache = torch.randn(2, 2, 3, 12), torch.randn(4, PAGE, 12)
    table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    step = lz.StepMetadata(table, lens, capturable=kind == "capturable")
    call = (*query.split((8, 4), -1), *cache.split((8, 4), -1), table, lens)
    _, lse = run(*call, scale=0.1, return_lse=True, step=step)
    assert (lse == -torch.inf).all()
    run(*call, scale=0.1, step=step)
    lens += 1
    step.advance()
    run(*call, scale=0.1, step=step)
    assert given[0] == ((2, 2, 3, 12), (4, PAGE, 1, 12), 8, True, None)
    known = [None if metadata is None else int(metadata) for *_, metadata in given]
    assert known == ([None, 1, None] if kind == "eager" else [None] * 3)
    assert len(bound) == 3, "with a split its first call is the driver's"


def test_prefills_on_decodes_are_two_plans_of_one_wrapper(monkeypatch):
    monkeypatch.setattr(sys.modules["flashinfer"], "BatchPODWithPagedKVCacheWrapper", Wrapper, raising=False)
    monkeypatch.setattr(cascade, "workspace", lambda *_, **__: None)
    step = step_of()
    both = cascade._Pod(step, {**ARGUMENTS, "logits_soft_cap": 0.0}, PAGE, 2)
    wrapper = both._wrapper
    prefill, decode = wrapper.plans[0][0][:4], wrapper.plans[0][0][4:]
    assert prefill == [[0, 3, 5], [0, 2, 3], [1, 3, 6], [4, 4]]
    assert decode == [[0, 1, 2], [0, 2, 3], [7, 2, 5], [1, 1]]
    assert wrapper.plans[0][1] == {"num_qo_heads": 4, "window_left": -1, "head_dim": 64, "page_size": PAGE}
    step.slot("pod", lambda _: both)
    step.context_lens[0], step.cu_seqlens_q[3] = 4, 6
    step.advance()
    assert wrapper.plans[1][0] == [[0, 4, 5], [0, 2, 3], [1, 3, 6], [4, 4], [0, 1, 2], [0, 1, 2], [7, 5], [4, 1]]


def test_prefills_on_decodes_give_outputs_in_one_pair_and_sums_in_another(monkeypatch):
    """As the wrapper's code returns them: ((prefill, decode), (prefill's sums, decode's sums)), in base 2."""

    class Attends(Wrapper):
        def run(self, prefills, _, decodes, __, *, causal_p, return_lse):
            outputs = prefills + 1, decodes + 1
            return (outputs, tuple(each.sum(-1) for each in (prefills, decodes))) if return_lse else outputs

    monkeypatch.setattr(sys.modules["flashinfer"], "BatchPODWithPagedKVCacheWrapper", Attends, raising=False)
    monkeypatch.setattr(cascade, "workspace", lambda *_, **__: None)
    table, lens, starts = (
        torch.tensor([[7, 2], [5, 0], [1, 3]]).int(),
        torch.tensor([5, 1, 8]),
        torch.tensor([0, 1, 2, 5]),
    )
    step = lz.StepMetadata(table, lens.int(), cu_seqlens_q=starts.int(), capturable=False)
    query, cache = torch.randn(5, 4, 64).bfloat16(), torch.zeros(8, PAGE, 4, 64).bfloat16()
    tensors = query, cache, cache, table, step.context_lens, step.cu_seqlens_q
    given = {"causal": True, "decodes": 2, "step": step}
    facts = FactsBuilder(REGISTRY.operation("attention.standard.mixed.paged")).build(
        *tensors, device=Device.named("H100"), layout="NHD", **given
    )
    run = cascade._load(facts)
    assert torch.equal(run(*tensors, **given), query + 1)
    output, lse = run(*tensors, **given, return_lse=True)
    assert torch.equal(output, query + 1)
    torch.testing.assert_close(lse, query.sum(-1).t() * math.log(2))


def test_lost_tokens_are_counted_behind_the_copy_of_their_device(monkeypatch):
    """The device of the tables, whatever is the current one."""

    class OnDevice(torch.Tensor):
        is_cuda = True

    recorded, arrived = [], [True]
    event = types.SimpleNamespace(record=recorded.append, query=lambda: arrived[0])
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **more: zeros(*sizes, **more))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    current = ["stream of {}"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0].format(device))
    count = LateCount()
    count.add(torch.tensor([False, True]).as_subclass(OnDevice))
    assert recorded == ["stream of cpu"]
    assert (count.untold(), count.untold()) == (1, 0)

    more = torch.tensor([True, True]).as_subclass(OnDevice)
    arrived[0] = False  # the device is steps behind: each step counts before it asks
    count.add(more)
    assert count.untold() == 0
    count.add(more)
    assert len(recorded) == 2, "a newer copy sends the first, which is told, away"
    arrived[0] = True
    assert (count.untold(), len(recorded), count.untold()) == (2, 3, 2)

    sums = torch.Tensor.__add__
    monkeypatch.setattr(OnDevice, "__add__", lambda *_: pytest.fail("counts of two streams were added"), raising=False)
    current[0] = "another stream of {}"
    count.add(more)
    assert (recorded[-1], count.untold()) == ("another stream of cpu", 2)
    monkeypatch.setattr(OnDevice, "__add__", sums)
    current[0] = "stream of {}"
    count.add(more)
    assert (recorded[-1], count.untold()) == ("stream of cpu", 2)
    arrived[0] = False
    count.add(more)
    count.add(more)
    arrived[0], current[0] = True, "another stream of {}"
    assert (count.untold(), count.untold()) == (2, 0), "the second is copied where its stream is the current one"
    current[0] = "stream of {}"
    assert (count.untold(), count.untold(), count.untold()) == (0, 2, 0)
