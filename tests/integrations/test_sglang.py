"""SGLang's attention backend: its interface as the framework has it, forward passes over its pool, and refusals."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from engine_steps import PAGE, STEPS, Sequences

import layerzero_engines
from sglang_batches import Pool, RadixAttention, mode_of

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # a softcap on a CPU

SGLANG = {
    "init_forward_metadata": ("self", "forward_batch"),
    "init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    "init_cuda_graph_state": ("self", "max_bs", "max_num_tokens"),
    "get_cuda_graph_seq_len_fill_value": ("self",),
    "support_triton": ("self",),
    "forward_extend": ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "**kwargs"),
    "forward_decode": ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "**kwargs"),
}
"""Of sglang 0.5.23, srt/layers/attention/base_attn_backend.py: what its runner calls."""


def test_sglang_calls_what_is_there(sglang):
    backend = sglang.LayerZeroAttnBackend
    for name, wanted in SGLANG.items():
        parameters = inspect.signature(getattr(backend, name)).parameters.values()
        got = ["**kwargs" if each.kind is each.VAR_KEYWORD else each.name for each in parameters]
        assert tuple(got) == wanted, name
    sglang.register()
    registered, choices = sglang.tested
    sglang.register()
    assert list(registered) == choices == ["layerzero"]
    made = registered["layerzero"](types.SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None, page_size=1))
    assert type(made) is backend


def test_sglangs_entry_point_registers_without_importing_the_backend(sglang, monkeypatch, caplog):
    registered, choices = sglang.tested
    monkeypatch.delitem(sys.modules, "layerzero.integrations.sglang")
    layerzero_engines.sglang_plugin()
    assert list(registered) == choices == ["layerzero"]
    assert "layerzero.integrations.sglang" not in sys.modules
    registered["layerzero"] = "another"
    layerzero_engines.sglang_plugin()
    assert "is not LayerZero here: RuntimeError: layerzero: wanted a name that is free" in caplog.text
    assert registered == {"layerzero": "another"}
    with pytest.raises(RuntimeError, match="wanted a name that is free, got 'another'"):
        layerzero_engines.register_sglang()


def test_what_sglang_computes_otherwise_is_refused_before_a_forward_pass(sglang):
    runner = types.SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None, page_size=1)
    backend = sglang.LayerZeroAttnBackend(runner)
    for kind, spec_info, told in (("decode", object(), "wanted none in a decode"), ("dllm_extend", None, "got blocks")):
        batch = types.SimpleNamespace(forward_mode=mode_of(kind), spec_info=spec_info)
        with pytest.raises(NotImplementedError, match=told):
            backend.init_forward_metadata(batch)
    backend.init_forward_metadata(types.SimpleNamespace(forward_mode=mode_of("idle"), spec_info=None))
    assert backend.step is None


def layer(**changes):
    return RadixAttention(**{"logit_cap": 30.0, "sliding_window_size": 7} | changes)


def sglang_step(sglang, step, page_size=1, pool_dtype=torch.float32, **runs):
    """Sequences, the backend, and its forward and batch, in a pool that holds what was there before."""
    made = Sequences(*step)
    pool = Pool(made.pages * PAGE, page_size, 2, 16, torch.float32)
    made.fill(pool.keys, pool.values)
    pool.keys, pool.values = pool.keys.to(pool_dtype), pool.values.to(pool_dtype)
    rows = torch.full((len(made.counts) + 1, 64), 10**6)
    for row, slots in enumerate(made.slots()):
        rows[row + 1, : len(slots)] = slots
    runner = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(req_to_token=rows), token_to_kv_pool=pool, page_size=page_size, **runs
    )
    decode = all(count == 1 for count in made.counts)
    batch = types.SimpleNamespace(
        seq_lens=made.lens.long(),
        seq_lens_cpu=made.lens.long(),
        req_pool_indices=torch.arange(len(made.counts)) + 1,
        forward_mode=mode_of("decode" if decode else "extend"),
        spec_info=None,
        extend_seq_lens_cpu=list(made.counts),
        out_cache_loc=torch.cat(
            [each[len(each) - count :] for each, count in zip(made.slots(), made.counts, strict=True)]
        ),
    )
    backend = sglang.LayerZeroAttnBackend(runner)
    return made, backend, backend.forward_decode if decode else backend.forward_extend, batch


@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "mixed", "prefills"])
def test_a_step_of_sglang_writes_its_tokens_and_attends_over_the_pool(sglang, step, page_size):
    made, backend, forward, batch = sglang_step(sglang, step, page_size)
    call = (made.query.flatten(1), made.new(made.keys), made.new(made.values), layer(), batch)
    with pytest.raises(NotImplementedError, match="wanted init_forward_metadata before a forward pass"):
        forward(*call)
    backend.init_forward_metadata(batch)
    output = forward(*call)
    wanted = made.wanted(scale=0.2, window=(7, 0), softcap=30.0)
    torch.testing.assert_close(output, wanted.flatten(1), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="sinks: wanted None"):
        forward(*call, sinks=torch.zeros(4))


SGLANG_REFUSES = {
    "decoder_bidirectional": ({"attn_type": "decoder_bidirectional"}, r"layer\.attn_type: wanted decoder or enc"),
    "Grok's temperature": ({"xai_temperature_len": 1024}, r"layer\.xai_temperature_len: wanted -1, got 1024"),
    "a scale in a tensor": ({"q_scale_float": torch.ones(2)}, r"layer\.q_scale_float: wanted None, got a tensor"),
    "positions": ({"pos_encoding_mode": "ALIBI"}, r"layer\.pos_encoding_mode: wanted 'NONE', got 'ALIBI'"),
    "another cap": ({"logit_capping_method": "sigmoid"}, r"layer\.logit_capping_method: wanted 'tanh', got 'sigmoid'"),
    "chunks": ({"use_irope": True}, r"layer\.use_irope: wanted False, got chunks of 8192 tokens"),
    "an attribute": ({"new_bias": 1}, r"layer\.new_bias: wanted an attribute that sglang 0\.5\.23 has, got one that"),
    "a parameter": ({"new_gate": torch.nn.Parameter(torch.ones(4))}, r"layer\.new_gate: wanted an attribute"),
    "both": ({"is_cross_attention": True, "new_bias": 1}, r"layer\.new_bias: .*; layer: wanted self-attention, got"),
}
"""Attributes of a layer that change its result, and what is said of them."""


@pytest.mark.parametrize("wrong", SGLANG_REFUSES)
@pytest.mark.parametrize("step", [STEPS[0], STEPS[2]], ids=["decodes", "prefills"])
def test_what_a_layer_of_sglang_asks_for_is_applied_or_refused_by_its_name(sglang, wrong, step):
    made, backend, forward, batch = sglang_step(sglang, step, attention_chunk_size=8192)
    backend.init_forward_metadata(batch)
    changes, told = SGLANG_REFUSES[wrong]
    before = backend.token_to_kv_pool.keys.clone()
    call = (made.query.flatten(1), made.new(made.keys), made.new(made.values), layer(**changes), batch)
    with pytest.raises(NotImplementedError, match=f"{told}.*; use another attention backend of SGLang"):
        forward(*call)
    assert torch.equal(backend.token_to_kv_pool.keys, before), "refused before anything is written"


def test_scales_of_a_layer_are_neutral_beside_a_pool_as_wide_as_its_keys(sglang):
    made, backend, forward, batch = sglang_step(sglang, STEPS[0])
    backend.init_forward_metadata(batch)
    scaled = layer(k_scale=torch.nn.Parameter(torch.tensor(2.0)), k_scale_float=2.0, quant_method=object())
    output = forward(made.query.flatten(1), made.new(made.keys), made.new(made.values), scaled, batch)
    torch.testing.assert_close(output, made.wanted(scale=0.2, window=(7, 0), softcap=30.0).flatten(1))


def test_a_pool_that_is_narrower_or_another_is_refused(sglang):
    made, backend, forward, batch = sglang_step(sglang, STEPS[0], pool_dtype=torch.bfloat16)
    backend.init_forward_metadata(batch)
    call = (made.query.flatten(1), None, None)
    with pytest.raises(
        NotImplementedError, match=r"key buffer: wanted torch\.float32 as the query, or float8 with scales, got"
    ):
        forward(*call, layer(), batch)
    _, backend, forward, batch = sglang_step(sglang, STEPS[0])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=r"value buffer: wanted heads and width \(2, 8\), got \(2, 16\)"):
        forward(*call, layer(v_head_dim=8), batch)


@pytest.mark.parametrize(
    ("name", "given"), [("encoder_lens", torch.ones(3)), ("mha_return_lse", True), ("attn_cp_metadata", object())]
)
def test_batches_of_sglang_with_more_than_their_own_keys_are_refused(sglang, name, given):
    _, backend, _, batch = sglang_step(sglang, STEPS[0])
    setattr(batch, name, given)
    with pytest.raises(NotImplementedError, match=f"forward_batch\\.{name}: wanted none, got"):
        backend.init_forward_metadata(batch)


def test_servers_that_want_the_same_bits_whatever_the_batch_are_refused(sglang):
    wanted = types.SimpleNamespace(enable_deterministic_inference=True, dcp_size=2)
    told = "enable_deterministic_inference: wanted False, got True; dcp_size: wanted 1, got 2; use another"
    with pytest.raises(NotImplementedError, match=told):
        sglang_step(sglang, STEPS[0], server_args=wanted)
