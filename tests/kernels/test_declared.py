"""What attention libraries declare, asked about devices and libraries that need not be here."""

from __future__ import annotations

import types

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends import builtin_kernels
from layerzero.backends.vllm import paged as vllm_paged
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.kernel import Trust
from layerzero.core.reasons import ReasonCode as Code
from layerzero.engine.legality import limit_findings
from layerzero.engine.registry import REGISTRY

LIBRARIES = {
    "torch": "2.11.0+cu130",
    "amd-aiter": "0.1.5",
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0",
    "flash-attn-4": "4.0.0b36",
    "flashinfer-python": "0.7.2.post1",
    "habana-torch-plugin": "1.23.0",
    "nvidia-cudnn-frontend": "1.32.0",
    "vllm": "0.20.0",
    "xformers": "0.0.35",
}


def codes(kernel_id, device, *, q=(2, 64, 8, 128), k=(2, 64, 2, 128), v=None, dtype=torch.bfloat16, **arguments):
    """Why a kernel is refused on a device, beside that it is not built or vetted yet."""
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in (q, k, v or k)]
    libraries = arguments.pop("libraries", LIBRARIES)
    report = lz.explain("attention", *tensors, layout="BSHD", device=device, libraries=libraries, **arguments)
    return {reason.code for reason in report.reasons(kernel_id)} - {Code.JIT_DISABLED, Code.NOT_VETTED}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


DECODE = {"q": (2, 1, 8, 128)}
ONE = {"q": (1, 64, 8, 128), "k": (1, 64, 2, 128)}
NARROW = {"q": (2, 64, 8, 128), "k": (2, 64, 2, 128), "v": (2, 64, 2, 64)}
DEEPSEEK = {"q": (2, 64, 8, 192), "k": (2, 64, 8, 192), "v": (2, 64, 8, 128)}


def wide(head_dim):
    return {"q": (2, 64, 8, head_dim), "k": (2, 64, 2, head_dim)}


OPEN_WINDOW = {"window": (1, -1), "causal": False}
MORE_QUERIES = {"q": (1, 64, 8, 128), "k": (1, 32, 2, 128)}
MASKED = {"attn_mask": meta(64, 64, dtype=torch.bool), "causal": False}

CASES = [
    # torch's own four; tests/gpu asks torch itself whether it takes them
    ("torch.sdpa.flash", "A100", {}, set()),
    ("torch.sdpa.flash", "A100", MASKED, {Code.ATTN_MASK_UNSUPPORTED}),
    ("torch.sdpa.flash", "A100", wide(320), {Code.HEAD_DIM_TOO_LARGE}),
    ("torch.sdpa.flash", "A100", wide(84), {Code.HEAD_DIM_ALIGNMENT, Code.MISALIGNED}),
    ("torch.sdpa.flash", "A100", {"dtype": torch.float32}, {Code.DTYPE_UNSUPPORTED}),
    ("torch.sdpa.efficient", "A100", MASKED, set()),
    ("torch.sdpa.efficient", "A100", wide(320), set()),
    ("torch.sdpa.efficient", "A100", wide(84), {Code.HEAD_DIM_ALIGNMENT, Code.MISALIGNED}),
    ("torch.sdpa.cudnn", "H100", MASKED, {Code.ATTN_MASK_UNSUPPORTED}),
    ("torch.sdpa.cudnn", "H100", wide(320), {Code.HEAD_DIM_TOO_LARGE}),
    ("torch.sdpa.math", "A100", MASKED | wide(84), set()),
    # FlashAttention 2 and 3: Hopper alone has what 3 needs, and sm_120 says why not
    ("flash_attn.v3", "H100", {}, set()),
    ("flash_attn.v3", "RTX 5090", {}, {Code.SM_TOO_NEW, Code.INSTRUCTION_SET_MISMATCH}),
    ("flash_attn.v3", "B200", {}, {Code.SM_TOO_NEW, Code.INSTRUCTION_SET_MISMATCH}),
    ("flash_attn.v3", "A100", {}, {Code.SM_TOO_OLD, Code.INSTRUCTION_SET_MISMATCH}),
    ("flash_attn.v2", "RTX 5090", {}, set()),
    ("flash_attn.v2", "T4", {}, {Code.SM_TOO_OLD}),
    ("flash_attn.v2", "A100", wide(264), {Code.HEAD_DIM_TOO_LARGE}),
    ("flash_attn.v2", "A100", {"libraries": {**LIBRARIES, "flash-attn": "2.6.3"}}, {Code.VERSION_UNSUPPORTED}),
    ("flash_attn.v2", "H100", {"alibi_slopes": meta(8), "return_lse": True}, {Code.LSE_UNSUPPORTED}),
    ("flash_attn.v2", "H100", {"alibi_slopes": meta(8), "return_lse": True, "causal": False}, set()),
    ("flash_attn.v2", "H100", {"softcap": 30.0, "dropout_p": 0.1}, {Code.SOFTCAP_UNSUPPORTED}),
    ("flash_attn.v2", "H100", OPEN_WINDOW | ONE, set()),
    ("flash_attn.v2", "H100", OPEN_WINDOW | MORE_QUERIES, {Code.WINDOW_UNSUPPORTED}),
    ("flash_attn.v2", "MI300X", {}, set()),
    ("flash_attn.v2", "MI300X", {"softcap": 30.0}, {Code.SOFTCAP_UNSUPPORTED}),
    # FlashAttention 4
    ("flash_attn.v4", "B200", {"sinks": meta(8), "window": (16, 0), "softcap": 30.0, "return_lse": True}, set()),
    ("flash_attn.v4", "B200", DEEPSEEK, set()),
    ("flash_attn.v4", "B200", wide(256), set()),
    ("flash_attn.v4", "B200", wide(160), {Code.HEAD_DIM_INVALID}),
    ("flash_attn.v4", "H100", {}, {Code.SM_TOO_OLD, Code.INSTRUCTION_SET_MISMATCH}),
    ("flash_attn.v4", "RTX 5090", {}, {Code.SM_TOO_NEW, Code.INSTRUCTION_SET_MISMATCH}),
    ("flash_attn.v4.sm90", "H100", wide(160), set()),
    ("flash_attn.v4.sm90", "H100", wide(20), {Code.HEAD_DIM_ALIGNMENT, Code.MISALIGNED}),
    ("flash_attn.v4.sm90", "H100", {"sinks": meta(8, dtype=torch.float64)}, {Code.CONSTRAINT_FAILED}),
    ("flash_attn.v4.sm90", "H100", NARROW, set()),
    ("flash_attn.v4.sm90", "H100", {**NARROW, "v": (2, 64, 2, 136)}, {Code.HEAD_DIM_INVALID}),
    ("flash_attn.v4.sm90", "H100", {"kv_lens": meta(2, dtype=torch.int32)}, {Code.CONSTRAINT_FAILED}),
    # vLLM's builds of 2 and 3
    ("vllm.flash_attn.v3", "H100", {"sinks": meta(8), "window": (16, 0), "softcap": 30.0, "return_lse": True}, set()),
    ("vllm.flash_attn.v3", "H100", {"sinks": meta(8, dtype=torch.float32)}, {Code.CONSTRAINT_FAILED}),
    ("vllm.flash_attn.v3", "H100", DEEPSEEK, set()),
    ("vllm.flash_attn.v3", "H100", NARROW, {Code.HEAD_DIM_INVALID}),
    ("vllm.flash_attn.v3", "H100", {"dropout_p": 0.1}, {Code.DROPOUT_UNSUPPORTED}),
    ("vllm.flash_attn.v3", "H100", {"capturing": True}, {Code.CUDA_GRAPH_UNSAFE}),
    ("vllm.flash_attn.v3", "RTX 5090", {}, {Code.SM_TOO_NEW, Code.INSTRUCTION_SET_MISMATCH}),
    ("vllm.flash_attn.v2", "RTX 5090", {"kv_lens": meta(2, dtype=torch.int64), "capturing": True}, set()),
    ("vllm.flash_attn.v2", "H100", {"alibi_slopes": meta(8), "return_lse": True, **DECODE}, set()),
    ("vllm.flash_attn.v2", "H100", OPEN_WINDOW | MORE_QUERIES, {Code.WINDOW_UNSUPPORTED}),
    ("vllm.flash_attn.v2", "H100", {"libraries": {**LIBRARIES, "vllm": "0.21.0"}}, {Code.VERSION_UNSUPPORTED}),
    ("vllm.flash_attn.v2", "H100", {"libraries": {**LIBRARIES, "torch": "2.13.0"}}, {Code.VERSION_UNSUPPORTED}),
    # FlashInfer
    ("flashinfer.fa3.prefill", "H100", {"window": (16, -1), "softcap": 30.0, "return_lse": True}, set()),
    ("flashinfer.fa3.prefill", "H100", wide(96), {Code.HEAD_DIM_INVALID}),
    ("flashinfer.fa3.prefill", "H100", DEEPSEEK, set()),
    ("flashinfer.fa3.prefill", "H100", {"window": (16, 16), "causal": False}, {Code.WINDOW_UNSUPPORTED}),
    (
        "flashinfer.fa3.prefill",
        "H100",
        {"attn_mask": meta(64, 64, dtype=torch.bool), "causal": False},
        {Code.ATTN_MASK_UNSUPPORTED},
    ),
    ("flashinfer.fa3.prefill", "H100", {"capturing": True}, {Code.CUDA_GRAPH_UNSAFE}),
    ("flashinfer.fa3.prefill", "H100", {"capturing": True, **ONE}, set()),
    ("flashinfer.fa3.prefill", "A100", {}, {Code.SM_TOO_OLD, Code.INSTRUCTION_SET_MISMATCH}),
    ("flashinfer.fa2.prefill", "A100", {"attn_mask": meta(64, 64, dtype=torch.bool), "causal": False}, set()),
    (
        "flashinfer.fa2.prefill",
        "A100",
        {"attn_mask": meta(2, 8, 64, 64, dtype=torch.bool), "causal": False},
        {Code.ATTN_MASK_UNSUPPORTED},
    ),
    ("flashinfer.fa2.prefill", "A100", {"attn_mask": meta(64, 64), "causal": False}, {Code.ATTN_MASK_UNSUPPORTED}),
    ("flashinfer.fa2.prefill", "A100", {"k": (2, 63, 2, 128), "causal": False}, set()),
    ("flashinfer.fa2.prefill", "A100", {"k": (2, 63, 2, 128)}, {Code.CONSTRAINT_FAILED}),
    (
        "flashinfer.fa2.prefill",
        "A100",
        {"k": (2, 63, 2, 128), "causal": False, "window": (16, 0)},
        {Code.CONSTRAINT_FAILED},  # its module masks what is in the future
    ),
    ("flashinfer.fa2.decode", "A100", {**DECODE, "window": (16, 3)}, set()),
    ("flashinfer.decode", "A100", DECODE, {Code.CONSTRAINT_FAILED}),
    ("flashinfer.decode", "T4", {"q": (1, 1, 8, 128), "k": (1, 64, 2, 128), "dtype": torch.float16}, set()),
    ("flashinfer.decode", "A100", {"q": (1, 1, 10, 128), "k": (1, 64, 2, 128)}, {Code.CONSTRAINT_FAILED}),
    # cuDNN
    ("cudnn.sdpa", "H100", {"q": (2, 32, 8, 128), "window": (16, 0), "return_lse": True}, set()),
    ("cudnn.sdpa", "H100", {"q": (2, 65, 8, 128)}, {Code.CONSTRAINT_FAILED}),
    ("cudnn.sdpa", "H100", {"window": (16, 4), "causal": False}, {Code.WINDOW_UNSUPPORTED}),
    ("cudnn.sdpa", "A100", wide(256), {Code.HEAD_DIM_TOO_LARGE}),
    ("cudnn.sdpa", "H100", {"capturing": True}, {Code.CUDA_GRAPH_UNSAFE}),
    # xFormers
    ("xformers.memory_efficient", "T4", {"dtype": torch.float16}, set()),
    ("xformers.memory_efficient", "H100", {"dtype": torch.float32, "window": (16, 4), "causal": False}, set()),
    ("xformers.memory_efficient", "H100", {"softcap": 30.0}, {Code.SOFTCAP_UNSUPPORTED}),
    ("xformers.memory_efficient", "H100", {"return_lse": True}, {Code.LSE_UNSUPPORTED}),
    # other vendors
    ("aiter.flash_attn", "MI300X", {"window": (16, 0), "return_lse": True}, set()),
    ("aiter.flash_attn", "MI300X", {"window": (0, 0)}, {Code.WINDOW_UNSUPPORTED}),
    ("aiter.flash_attn", "MI210", {}, {Code.DEVICE_CAPABILITY_UNSUPPORTED}),
    ("aiter.flash_attn", "H100", {}, {Code.PLATFORM_MISMATCH}),
    ("habana.fused_sdpa", "Gaudi", {}, set()),
    ("habana.fused_sdpa", "Gaudi", {"dtype": torch.float16}, {Code.DTYPE_UNSUPPORTED}),
]


@at_once("kernel_id, device, call, expected", CASES)
def test_a_call_is_legal_or_refused_with_its_reasons(kernel_id, device, call, expected):
    assert codes(kernel_id, device, **call) == expected


def test_what_never_ran_anywhere_is_vetted_or_locked_before_it_runs():
    assert {each.id for each in REGISTRY.kernels() if not each.backend.tested and not each.untried} <= {
        each.id for each in REGISTRY.kernels() if each.is_reference or each.backend.origin != "builtin"
    }
    query = meta(2, 64, 8, 128)
    call = {"layout": "BSHD", "device": "H100", "libraries": LIBRARIES}
    with lz.scope(unmeasured="priority", prefer=["flash_attn.v3"]):
        report = lz.explain("attention", query, query, query, **call)
    (reason,) = report.reasons("flash_attn.v3")
    assert reason.code is Code.NOT_VETTED
    assert "never run, without a verdict" in reason.message
    assert "layerzero vet --kernel flash_attn.v3" in reason.message
    with lz.scope(locks={"attention": "flash_attn.v3"}):
        assert lz.explain("attention", query, query, query, **call).kernel_id == "flash_attn.v3"


@pytest.mark.parametrize("kernel_id", ["flash_attn.v2", "vllm.flash_attn.v3", "flashinfer.fa2.prefill", "cudnn.sdpa"])
def test_what_is_not_installed_says_how_to_install_it(kernel_id):
    assert Code.NOT_INSTALLED in codes(kernel_id, "H100", libraries={"torch": "2.11.0+cu130"})


def test_kv_heads_are_repeated_for_xformers_and_not_in_strict_mode():
    call = {"device": "H100", "libraries": LIBRARIES, "layout": "BSHD"}
    tensors = meta(2, 64, 8, 128), meta(2, 64, 2, 128), meta(2, 64, 2, 128)
    candidates = lz.explain("attention", *tensors, **call).candidates
    xformers = next(each for each in candidates if each.kernel.id == "xformers.memory_efficient")
    assert [adaptation.kind for adaptation in xformers.adaptations] == ["expand"]
    with lz.scope(strict_mode=True):
        report = lz.explain("attention", *tensors, **call)
    assert Code.GQA_UNSUPPORTED in {reason.code for reason in report.reasons("xformers.memory_efficient")}


@pytest.mark.parametrize("kernel_id", ["torch.sdpa.cudnn", "cudnn.sdpa"])
def test_cudnn_plans_every_number_of_keys_and_does_not_decode(kernel_id):
    for queries, expected in ((1, {Code.CONSTRAINT_FAILED}), (2, set())):
        query, key = (torch.empty(2, n, 8, 64, dtype=torch.float16, device="meta") for n in (queries, 4))
        report = lz.explain("attention", query, key, key, False, layout="BSHD", device="H100", libraries=LIBRARIES)
        assert {reason.code for reason in report.reasons(kernel_id)} == expected


@pytest.mark.parametrize(("device", "width", "step", "kinds"), [
    ("H100", 64, 65, ["copy"]),
    ("H100", 64, 64, []),
    ("H100", 20, 21, []),  # a copy of rows of 40 bytes starts no better
    ("cpu", 64, 65, []),
])  # fmt: skip
def test_copies_that_masked_sparse_kernels_need_on_a_gpu_are_told(device, width, step, kinds):
    starts, blocks = (torch.tensor(each, dtype=torch.int32, device="meta") for each in ([0, 1, 2], [0, 1]))
    query = torch.empty_strided((32, 2, width), (2 * step, step, 1), dtype=torch.bfloat16, device="meta")
    call = query, meta(32, 2, width), meta(32, 2, width), starts, blocks, 16, 16
    report = lz.explain("sparse_attention", *call, device=device, libraries=LIBRARIES)
    masked = next(each for each in report.candidates if each.kernel.id == "torch.block_sparse_masked")
    assert masked.legal
    assert [each.kind for each in masked.adaptations if each.argument == "query"] == kinds
    with lz.scope(strict_mode=True):
        strict = lz.explain("sparse_attention", *call, device=device, libraries=LIBRARIES)
    reasons = [reason.code for reason in strict.reasons("torch.block_sparse_masked")]
    assert reasons == [Code.MISALIGNED] * len(kinds)


@pytest.mark.parametrize(("head_dim", "wanted"), [(24, []), (20, [Code.MISALIGNED] * 2)])
def test_rows_that_no_copy_aligns_are_refused_before_they_are_copied(head_dim, wanted):
    """A plan with the copy broke its kernel's own limits: each such call logged an error and counted as a failure."""
    query = torch.empty(2, 5, 2, 3 * head_dim + 1, dtype=torch.bfloat16, device="meta")[..., :head_dim]
    table = meta(5, head_dim // 2, dtype=torch.float32)
    call = query, query, meta(head_dim), meta(head_dim), table, table
    reasons = lz.explain("qk_norm_rope", *call, layout="BSHD", device="H200", libraries=LIBRARIES).reasons(
        "vllm.qk_norm_rope"
    )
    assert [each.code for each in reasons] == wanted


@pytest.mark.parametrize(("rows", "heads", "wrong"), [(1, 1, 0), (2, 1, 1), (3, 1, 1), (4, 1, 0), (2, 2, 0)], ids=str)
def test_blocks_of_few_queries_that_flashinfer_decodes_with_are_refused(rows, heads, wrong):
    """Of each block it computed one query, by its templates for decoding (0.7.2, H200)."""
    starts, blocks = (torch.empty(size, dtype=torch.int32, device="meta") for size in (12 // rows + 1, 5))
    call = meta(12, heads, 128), meta(4, 1, 128), meta(4, 1, 128), starts, blocks, rows, 1
    reasons = lz.explain("sparse_attention", *call, device="H200", libraries=LIBRARIES).reasons(
        "flashinfer.block_sparse"
    )
    assert [each.fact for each in reasons if each.code == Code.CONSTRAINT_FAILED] == ["block_rows"] * wrong


def test_what_is_built_in_is_no_plugin():
    """A refusal would say so; what nobody ran yet is UNTRIED."""
    assert not [kernel.id for kernel in builtin_kernels() if kernel.trust is Trust.PLUGIN]


def test_a_cudnn_that_torch_was_not_built_for_is_no_stock_and_no_error(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility")

    query = torch.empty(1, 512, 8, 128, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    report = lz.explain("attention", query, query, query, layout="BSHD", device="H100", libraries={"torch": "2.11.0"})
    assert report.kernel_id == "torch.sdpa.flash"


@pytest.mark.parametrize(("kernel", "name", "tensor", "code"), [
    ("flash_attn.v2", "alibi_slopes", torch.zeros(16)[::2], Code.STRIDE_LAST_DIM),
    ("flash_attn.v4.sm90", "sinks", torch.zeros(9, dtype=torch.bfloat16)[1:], Code.MISALIGNED),
])  # fmt: skip
def test_what_a_library_would_copy_or_refuse_is_copied_before(kernel, name, tensor, code):
    """Slopes that step, and sinks off 4 bytes, whose copy FlashAttention 4 would have been called with."""
    tensors = [torch.zeros(2, 64, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    operation = REGISTRY.operation("attention.gqa.prefill")
    facts = FactsBuilder(operation).build(*tensors, **{name: tensor}, device=Device.named("H100"), layout="BSHD")
    findings = limit_findings(REGISTRY.kernel(kernel), facts)
    assert [(each.reason.code, each.repair and each.repair.argument) for each in findings] == [(code, name)]


def test_flash_attention_4_takes_no_sinks_of_float64_of_sequences():
    tensors, starts = [meta(64, heads, 128) for heads in (8, 2, 2)], meta(3, dtype=torch.int32)
    sinks = meta(8, dtype=torch.float64)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "sinks": sinks}
    report = lz.explain("ragged_attention", *tensors, **given, device="H100", libraries=LIBRARIES)
    assert Code.CONSTRAINT_FAILED in {reason.code for reason in report.reasons("flash_attn.v4.ragged")}


@pytest.mark.parametrize("kernel", ["vllm.merge_states", "flashinfer.merge_states"])
def test_states_are_merged_as_far_as_32_bits_reach(kernel):
    def refused(tokens):
        output, lse = meta(tokens, 64, 128), meta(64, tokens, dtype=torch.float32)
        report = lz.explain("merge_attention_states", output, lse, output, lse, device="H100", libraries=LIBRARIES)
        return {reason.code for reason in report.reasons(kernel)} - {Code.JIT_DISABLED}

    assert refused(2**19 - 1) == set()
    assert refused(2**19) == {Code.CONSTRAINT_FAILED}


def test_states_of_one_head_are_merged_whatever_its_stride(monkeypatch):
    """vLLM steps over tokens by heads times the stride of a head (merge_attn_states.cu of 0.20.0)."""

    def merged(output, lse, output_a, *_):
        (tokens, heads, width), strides = output_a.shape, (output_a.stride(1), output.stride(1))
        reach = [(tokens - 1) * heads * stride + heads * width for stride in strides]
        assert reach == [output_a.numel()] * 2
        output.copy_(output_a)

    operators = types.SimpleNamespace(merge_attn_states=types.SimpleNamespace(default=merged))
    monkeypatch.setattr(vllm_paged, "operators", lambda *_: operators)
    output, lse = torch.randn(1, 5, 8).transpose(0, 1), torch.randn(1, 5)
    assert output.is_contiguous()
    assert output.stride() == (8, 40, 1)
    got, _ = vllm_paged._load_merge(None)(output, lse, output.clone(), lse)
    assert torch.equal(got, output)


PAGES = [(16, 128, None, True), (64, 128, (9, 0), True), (64, 256, None, True), (64, 256, (9, 0), False),
         (128, 128, None, False)]  # fmt: skip


@pytest.mark.parametrize(("page_size", "head_dim", "window", "taken"), PAGES)
def test_pages_that_flash_attention_may_read_as_whole_tiles(page_size, head_dim, window, taken):
    """Hopper's smallest tile has 64 keys, that of a window over heads of 256; what a page holds beyond may be NaN."""
    cache, starts = meta(40, page_size, 2, head_dim), meta(4, dtype=torch.int32)
    tables, lens = meta(3, 4, dtype=torch.int32), meta(3, dtype=torch.int32)

    def refused(kernel, query, **named):
        report = lz.explain("paged_attention", query, cache, cache, tables, lens, window=window, device="H100",
                            libraries=LIBRARIES, **named)  # fmt: skip
        codes = {reason.code for reason in report.reasons(kernel) if reason.fact == "page_size"}
        return codes != set()

    tokens = {"cu_seqlens_q": starts, "causal": True}
    for library in ("vllm.flash_attn.v3", "flash_attn.v3", "flash_attn.v4"):
        assert refused(f"{library}.paged_tokens", meta(18, 8, head_dim), **tokens) is not taken
    assert refused("flash_attn.v4.paged", meta(3, 1, 8, head_dim)) is not taken
    assert not refused("vllm.flash_attn.v3.paged", meta(3, 1, 8, head_dim)), "one query fills no tile"
