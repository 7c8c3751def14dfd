"""FlashInfer's callables with stand-ins that compute, and what counts as built of its modules."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from dense_calls import compare, facts_of, tensors

from layerzero.backends.flashinfer import attention as flashinfer
from layerzero.backends.flashinfer import modules as flashinfer_modules
from layerzero.backends.flashinfer import plan as flashinfer_plan
from layerzero.backends.flashinfer.plan import FlashInferPlan
from layerzero.engine.jit import BUILT
from layerzero.engine.registry import REGISTRY
from layerzero.ops.attention.reference import attention_reference

SINGLE = (
    "q k v tmp o maybe_lse mask_mode layout window_left maybe_packed_custom_mask maybe_alibi_slopes logits_soft_cap "
    "sm_scale scale_q scale_k scale_v rope_scale rope_theta"
)


RAGGED = (
    "float_workspace_buffer int_workspace_buffer plan_info_vec q k v qo_indptr kv_indptr o maybe_lse mask_mode layout "
    "window_left enable_pdl maybe_custom_mask maybe_mask_indptr maybe_alibi_slopes maybe_prefix_len_ptr "
    "maybe_token_pos_in_items_ptr maybe_max_item_len_ptr logits_soft_cap sm_scale rope_scale rope_theta "
    "token_pos_in_items_len"
)


DECODE = "q k v tmp o maybe_lse alibi_slopes kv_layout_code window_left logits_soft_cap sm_scale rope_scale rope_theta"


"""Parameters of the functions that flashinfer 0.7.2.post1 puts around its modules."""


def stand_in(names, batch):
    """A module's function: it computes by definition, writes (tokens, H, D), and log-sum-exps in base 2."""

    def run(*arguments):
        given = dict(zip(names.split(), arguments, strict=True))
        query, key, value = (given[name].view(batch, -1, *given[name].shape[-2:]) for name in "qkv")
        packed = given.get("maybe_packed_custom_mask", given.get("maybe_custom_mask"))
        mask = None
        if packed is not None:
            assert given["mask_mode"] == 2
            count = query.shape[1] * key.shape[1]
            bits = (packed.view(-1, 1) >> torch.arange(8)).bitwise_and(1).view(batch, -1)[:, :count].bool()
            mask = bits.view(batch, 1, query.shape[1], key.shape[1])
        left = given["window_left"]
        output, lse = attention_reference(
            query,
            key,
            value,
            causal=given.get("mask_mode") == 1,
            scale=given["sm_scale"],
            window=None if left < 0 else (left, -1),
            softcap=given["logits_soft_cap"] or None,
            attn_mask=mask,
            return_lse=True,
        )
        given["o"].copy_(output.reshape(given["o"].shape))
        if given["maybe_lse"] is not None:
            given["maybe_lse"].copy_((lse / math.log(2.0)).transpose(1, 2).reshape(given["maybe_lse"].shape))
        assert given["rope_scale"] == 1.0
        assert given.get("layout", given.get("kv_layout_code")) == 0

    return run


@pytest.fixture
def flashinfer_modules_of(monkeypatch):
    """FlashInfer's modules, each made by definition."""

    def packbits(bits, bitorder):
        assert bitorder == "little"
        return (bits.view(-1, 8).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)

    prefill = types.SimpleNamespace(get_single_prefill_module=lambda *_: types.SimpleNamespace(run=stand_in(SINGLE, 1)))
    decode = types.SimpleNamespace(get_single_decode_module=lambda *_: types.SimpleNamespace(run=stand_in(DECODE, 1)))
    plan = FlashInferPlan(types.SimpleNamespace(ragged_run=stand_in(RAGGED, 2)), *(None,) * 5, 1)
    monkeypatch.setattr(flashinfer, "PLANS", types.SimpleNamespace(get=lambda *_, **__: plan))
    for name, module in (
        ("prefill", prefill),
        ("decode", decode),
        ("quantization", types.SimpleNamespace(packbits=packbits)),
    ):
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", module)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))


INFER_CALLS = [
    {"causal": True, "return_lse": True},
    {"causal": False, "window": (3, 0), "scale": 0.4, "softcap": 4.0},
    {"causal": True, "window": (2, -1), "return_lse": True},
    {"attn_mask": torch.rand(2, 1, 6, 9) > 0.4, "return_lse": True},
]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("call", INFER_CALLS)
def test_flashinfer_gives_its_modules_each_argument_in_its_place(flashinfer_modules_of, batch, call):
    query, key, value = (tensor[:batch] for tensor in tensors())
    call = {**call, **({"attn_mask": call["attn_mask"][:batch]} if "attn_mask" in call else {})}
    got = flashinfer._loader("fa2")(facts_of(query, key, value, **call))(query, key, value, **call)
    compare(got, attention_reference(query, key, value, **call))


@pytest.mark.parametrize("call", [{}, {"window": (4, 2), "scale": 0.4, "softcap": 4.0, "return_lse": True}])
def test_flashinfer_decodes_with_each_argument_in_its_place(flashinfer_modules_of, call):
    query, key, value = (tensor[:1] for tensor in tensors(seq_q=1))
    facts = facts_of(query, key, value, operation="attention.gqa.decode", **call)
    compare(flashinfer._load_decode(facts)(query, key, value, **call), attention_reference(query, key, value, **call))


@pytest.mark.parametrize(("version", "expected"), [
    ("0.7.2.post1", (-1, False, 0, 0)), ("0.7.4", (-1, False, 0, 0, False)), ("0.7.4+cu130", (-1, False, 0, 0, False)),
])  # fmt: skip
def test_flashinfers_planner_is_given_what_its_version_takes(monkeypatch, version, expected):
    monkeypatch.setattr(flashinfer_plan, "version", lambda: version)
    assert flashinfer_plan._splitting("fa2") == expected
    assert flashinfer_plan._splitting("fa3") == ()


def kernel(kernel_id):
    return REGISTRY.kernel(kernel_id)


def test_one_build_serves_other_lengths_and_no_other_variant():
    def asked(seq, **arguments):
        shape, kv = (1, seq, 8, 128), (1, seq, 2, 128)
        query, key = (torch.empty(each, dtype=torch.bfloat16, device="meta") for each in (shape, kv))
        return facts_of(query, key, key, **arguments)

    for kernel_id in ("flash_attn.v4.sm90", "flashinfer.fa2.prefill"):
        BUILT.add(kernel(kernel_id), asked(1024, causal=True))
        assert BUILT.ready(kernel(kernel_id), asked(8192, causal=True))
        assert not BUILT.ready(kernel(kernel_id), asked(1024, causal=True, softcap=30.0))
        assert not BUILT.ready(kernel(kernel_id), asked(1024, causal=True, window=(16, 0)))
    assert not BUILT.ready(kernel("flash_attn.v4.sm90"), asked(1024, causal=False))
    assert BUILT.ready(kernel("flashinfer.fa2.prefill"), asked(1024, causal=False)), "its mask is chosen at run time"


def test_flashinfer_takes_what_a_package_brought(monkeypatch):
    module = (
        "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_"
        "head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False_sm90"
    )
    monkeypatch.setattr(flashinfer_modules, "_shipped", lambda: frozenset({(module, "sm90a")}))
    shape = {"device": "meta", "dtype": torch.bfloat16}
    call = torch.empty(1, 64, 8, 128, **shape), torch.empty(1, 64, 2, 128, **shape), torch.empty(1, 64, 2, 128, **shape)
    assert BUILT.ready(kernel("flashinfer.fa3.prefill"), facts_of(*call, causal=True))
    assert not BUILT.ready(kernel("flashinfer.fa2.prefill"), facts_of(*call, causal=True))
    assert not BUILT.ready(kernel("flashinfer.fa3.prefill"), facts_of(*call, causal=True, softcap=30.0))
    assert flashinfer_modules.planned("fa3", facts_of(*call, causal=True)), "the module for batches serves one as well"


@pytest.mark.parametrize(("kernel_id", "batch", "module"), [
    ("flashinfer.fa3.prefill", 1, "single_prefill{}_head_dim_qk_128_head_dim_vo_128{}_f16qk_False_sm90"),
    ("flashinfer.fa2.prefill", 1, "single_prefill{}_head_dim_qk_128_head_dim_vo_128{}_f16qk_False"),
    ("flashinfer.fa3.prefill", 2, "batch_prefill{}_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128{}_f16qk_False_sm90"),
    ("flashinfer.decode", 1, "single_decode{}_head_dim_qk_128_head_dim_vo_128{}"),
])  # fmt: skip
def test_flashinfer_takes_what_an_earlier_process_compiled(monkeypatch, tmp_path, kernel_id, batch, module):
    monkeypatch.setattr(flashinfer_modules, "version", lambda: "0.7.2")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    seq = 1 if kernel_id.endswith("decode") else 64
    dtypes, variant = (
        "_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16",
        "_posenc_0_use_swa_False_use_logits_cap_False",
    )
    name = module.format(dtypes, variant)
    shape = {"device": "meta", "dtype": torch.bfloat16}
    query, key = torch.empty(batch, seq, 8, 128, **shape), torch.empty(batch, 64, 2, 128, **shape)
    facts = facts_of(query, key, key, causal=True)
    assert not BUILT.ready(kernel(kernel_id), facts)
    file = tmp_path / ".cache/flashinfer/0.7.2/90a/cached_ops" / name / f"{name}.so"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    file.with_name(".ninja_log").write_text(f"0\t9\t1\t{file}\tc0ffee")
    assert BUILT.ready(kernel(kernel_id), facts)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0")
    assert not BUILT.ready(kernel(kernel_id), facts), "compiled for another device"
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    assert BUILT.ready(kernel(kernel_id), facts)
    file.unlink()
    assert not BUILT.ready(kernel(kernel_id), facts), "the cache was wiped"
