"""SGLang's batches through LayerZero beside float64: decodes, prefills, drafts, pools of codes, and graphs' buffers."""

from __future__ import annotations

import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_batches import KINDS, Drawn, mode_of, verified

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # trees on a CPU


def at(slots):
    return "at", slots


def close(output, wanted, tolerance=1e-5):
    torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_random_batches_give_what_attention_in_float64_gives(sglang, kind, page_size, seed):
    drawn = Drawn(seed, kind, page_size)
    backend = sglang.LayerZeroAttnBackend(drawn.runner)
    backend.init_forward_metadata(drawn.batch)
    close(backend.forward_extend(*drawn.call(at)), drawn.wanted())


@pytest.mark.parametrize("scales", [(0.5, 2.0), (None, None)], ids=["scales", "none"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("kind", ["decode", "extend", "chain", "tree"])
def test_a_pool_of_float8_is_written_and_read_with_the_scales_of_its_layer(sglang, kind, dtype, scales):
    drawn = Drawn(7, kind, 4, pool_dtype=dtype, scales=scales)
    backend = sglang.LayerZeroAttnBackend(drawn.runner)
    backend.init_forward_metadata(drawn.batch)
    close(backend.forward_extend(*drawn.call(at)), drawn.wanted(dtype))


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_pool_that_has_heads_before_tokens_is_read_as_it_lies(sglang, kind):
    drawn = Drawn(3, kind, 4, layout="hnd")
    backend = sglang.LayerZeroAttnBackend(drawn.runner)
    backend.init_forward_metadata(drawn.batch)
    close(backend.forward_extend(*drawn.call(at)), drawn.wanted())


class Allocations(TorchDispatchMode):
    """Memory that operators on known tensors make, beside what was there."""

    def __init__(self, *known):
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for each in known}
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        of = [
            each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        ]
        if self.known & {*of}:
            made = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
            made = [] if func is torch.ops.aten.max.default else made  # lengths on a CPU are looked at
            self.made += [func for each in made if each.untyped_storage().data_ptr() not in self.known]
        return found


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["decode", "chain"])
def test_replays_read_the_buffers_of_their_capture_and_allocate_none(sglang, kind, page_size):
    first = Drawn(0, kind, page_size, dtype=torch.bfloat16, drafts=3, most=4)
    backend = sglang.LayerZeroAttnBackend(first.runner)
    backend.init_cuda_graph_state(8, 24)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    steps = {}
    for seed in range(12):
        drawn = Drawn(seed, kind, page_size, dtype=torch.bfloat16, drafts=3, most=4, fill=seed % 3)
        backend.req_to_token_pool.req_to_token = drawn.table  # one engine has one table
        backend.token_to_kv_pool, size = drawn.pool, drawn.batch.batch_size
        known = (*backend._buffers, drawn.table, drawn.batch.seq_lens, drawn.batch.req_pool_indices)
        with Allocations(*known) as allocations:
            backend.init_forward_metadata_out_graph(drawn.batch, in_capture=size not in steps)
        if size in steps:
            assert not allocations.made
        step = backend.step
        where = [each.data_ptr() for each in (step.tables, step.lens, step.starts)]
        assert steps.setdefault(size, (step, where)) == (step, where), "the graph's own"
        assert step.metadata.kind_for(step.tables, step.lens) == "capturable", "up to date"
        replayed = backend.forward_extend(*drawn.call(at))
        close(replayed, drawn.wanted(), 2e-2)
        backend.init_forward_metadata(drawn.batch)
        assert not backend.is_captured
        close(replayed, backend.forward_extend(*drawn.call(at)).double(), 2e-2)
    assert 1 < len(steps) < 12, "some batches came again"


def test_what_no_graph_holds_is_refused_before_its_capture(sglang):
    told = r"in a CUDA graph; pass disable_cuda_graph=True"
    decode = Drawn(0, "decode")
    backend = sglang.LayerZeroAttnBackend(decode.runner)
    with pytest.raises(NotImplementedError, match=f"init_cuda_graph_state: wanted its call before, got none, {told}"):
        backend.init_forward_metadata_out_graph(decode.batch)
    backend.init_cuda_graph_state(8, 8)
    for kind, name in (("extend", "forward_mode: wanted a decode or drafts"), ("tree", "spec_info: wanted a chain")):
        with pytest.raises(NotImplementedError, match=f"{name}.*{told}"):
            backend.init_forward_metadata_out_graph(Drawn(0, kind).batch)
    for dtype, pool in ((torch.float32, None), (torch.bfloat16, torch.float8_e4m3fn)):
        drawn = Drawn(0, "decode", dtype=dtype, pool_dtype=pool)
        backend = sglang.LayerZeroAttnBackend(drawn.runner)
        backend.init_cuda_graph_state(8, 8)
        backend.init_forward_metadata_out_graph(drawn.batch, in_capture=True)
        with pytest.raises(NotImplementedError, match=f"step: wanted a CUDA graph of 16 bits, got {pool or dtype}"):
            backend.forward_decode(*drawn.call(at))


@pytest.mark.parametrize(("name", "given"), [
    ("attn_dcp_metadata", object()), ("dcp_kv_mask", torch.ones(2)), ("cross_attention_custom_mask", torch.ones(2)),
    ("multi_item_delimiter_indices", [torch.ones(1)]), ("encoder_swa_replay", True),
    ("spec_info", verified("DFLASH_VERIFY", 3, 1, None)), ("extend_seq_lens_cpu", None),
])  # fmt: skip
def test_an_attribute_of_a_batch_that_changes_what_is_seen_is_refused_by_its_name(sglang, name, given):
    drawn = Drawn(0, "extend")
    setattr(drawn.batch, name, given)
    if name == "spec_info":
        drawn.batch.forward_mode = mode_of("target_verify")
    with pytest.raises(NotImplementedError, match=f"forward_batch.{name}: wanted .*got"):
        sglang.LayerZeroAttnBackend(drawn.runner).init_forward_metadata(drawn.batch)


@pytest.mark.parametrize(("changes", "told"), [
    ({"custom_mask": None}, "custom_mask: wanted a bool for each draft that another may see, got None"),
    ({"custom_mask": torch.ones(9, dtype=torch.uint8)}, "custom_mask: wanted a bool"),
    ({"ragged_verify_layout": object()}, "wanted as many drafts of each request, got others"),
    ({"num_tokens_per_req": -1}, "wanted as many drafts of each request, got others"),
])  # fmt: skip
def test_drafts_in_another_form_are_refused(sglang, changes, told):
    drawn = Drawn(0, "tree")
    vars(drawn.batch.spec_info).update(changes)
    with pytest.raises(NotImplementedError, match=told):
        sglang.LayerZeroAttnBackend(drawn.runner).init_forward_metadata(drawn.batch)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_drafts_in_a_window_see_what_their_branch_alone_would(sglang, kind, seed):
    drawn = Drawn(seed, kind)
    backend = sglang.LayerZeroAttnBackend(drawn.runner)
    backend.init_forward_metadata(drawn.batch)
    drawn.layer.sliding_window_size = 3
    close(backend.forward_extend(*drawn.call(at)), drawn.wanted(window=3))


def test_pools_in_another_form_are_refused(sglang):
    for name, given in (("kv_cache_layout", "vectorized_5d"), ("k_scale_buffer", [torch.ones(1)])):
        drawn = Drawn(0, "decode")
        backend = sglang.LayerZeroAttnBackend(drawn.runner)
        backend.init_forward_metadata(drawn.batch)
        call = drawn.call(at)
        setattr(drawn.pool, name, given)
        with pytest.raises(NotImplementedError, match=f"token_to_kv_pool.{name}: wanted .*got"):
            backend.forward_decode(*call)


def test_a_scale_for_each_head_is_refused(sglang):
    drawn = Drawn(0, "decode", pool_dtype=torch.float8_e4m3fn)
    backend = sglang.LayerZeroAttnBackend(drawn.runner)
    backend.init_forward_metadata(drawn.batch)
    call = drawn.call(at)
    drawn.layer.k_scale = torch.ones(2)
    with pytest.raises(NotImplementedError, match=r"layer.k_scale: wanted one number, got a tensor of shape \(2,\)"):
        backend.forward_decode(*call)


def test_a_rank_without_requests_attends_to_nothing(sglang):
    backend = sglang.LayerZeroAttnBackend(Drawn(0, "decode").runner)
    backend.init_forward_metadata(types.SimpleNamespace(forward_mode=mode_of("idle"), spec_info=None))
    assert backend.step is None
