"""SGLang's own batches, layers, pools and drafts through LayerZero beside float64; no engine runs."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch
from test_sglang_serves import STAND_INS, pytestmark

from sglang_batches import KINDS, Drawn, Kit

__all__ = ["pytestmark"]


@pytest.fixture(scope="module")
def real():
    """SGLang's classes, those of the integration, and where a token is written."""
    sys.path.insert(0, str(STAND_INS))
    spec = importlib.util.spec_from_file_location("stand_in_of_torchvision", STAND_INS / "sitecustomize.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    def pool(slots, page_size, heads, dim, dtype):
        sizes = {"head_num": heads, "head_dim": dim, "layer_num": 1}
        return MHATokenToKVPool(slots - page_size, page_size, dtype, **sizes, device="cpu", enable_memory_saver=False)

    def verified(kind, drafts, topk, mask):
        if kind == "NGRAM_VERIFY":
            return NgramVerifyInput(custom_mask=mask, draft_token_num=drafts)
        names = ("draft_token", "positions", "capture_hidden_mode", "seq_lens_sum", "seq_lens_cpu", "spec_steps")
        names += tuple(f"retrieve_{each}" for each in ("index", "next_token", "next_sibling", "cum_len"))
        return EagleVerifyInput(custom_mask=mask, topk=topk, draft_token_num=drafts, **dict.fromkeys(names))

    kit = Kit(pool, RadixAttention, lambda kind: ForwardMode[kind.upper()], ForwardBatch, verified)
    yield kit, importlib.import_module("layerzero.integrations.sglang").LayerZeroAttnBackend, KVWriteLoc
    sys.path.remove(str(STAND_INS))


@pytest.mark.filterwarnings("ignore")  # SGLang's own
@pytest.mark.parametrize("pool_dtype", [None, torch.float8_e4m3fn], ids=["floats", "float8"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_sglang_give_what_attention_in_float64_gives(real, kind, page_size, pool_dtype):
    kit, backend, place = real
    for seed in range(5):
        drawn = Drawn(seed, kind, page_size, kit, pool_dtype=pool_dtype, scales=(0.5, 2.0))
        made = backend(drawn.runner)
        made.init_forward_metadata(drawn.batch)
        query, *others = drawn.call(place)
        wanted = drawn.wanted(pool_dtype) if pool_dtype is not None else drawn.wanted()
        torch.testing.assert_close(made.forward(query, *others).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["decode", "chain"])
def test_batches_of_sglang_are_replayed_from_the_buffers_of_a_capture(real, kind):
    kit, backend, place = real
    made, steps = None, {}
    for seed in range(6):
        drawn = Drawn(seed, kind, 4, kit, dtype=torch.bfloat16, drafts=3, most=3)
        made = made or backend(drawn.runner)
        made.req_to_token_pool, made.token_to_kv_pool = drawn.runner.req_to_token_pool, drawn.pool
        if not steps:
            made.init_cuda_graph_state(4, 12)
        made.init_forward_metadata_out_graph(drawn.batch, in_capture=drawn.batch.batch_size not in steps)
        made.init_forward_metadata_in_graph(drawn.batch)
        assert steps.setdefault(drawn.batch.batch_size, made.step) is made.step
        torch.testing.assert_close(made.forward(*drawn.call(place)).double(), drawn.wanted(), rtol=2e-2, atol=2e-2)
