# ruff: noqa: PYI021, A001  # editors show these docstrings; one name is a built-in's
# Written by `python -m tools docs` from the declarations; edit those.
from typing import Literal, overload

from torch import Tensor

from layerzero import testing
from layerzero.core import judges, limits
from layerzero.core.arguments import Axis, Param, Role, SizeCodes, TensorSchema
from layerzero.core.device import Device
from layerzero.core.errors import (
    CudaGraphUnsafeError,
    DescriptorError,
    FrozenChoiceError,
    InvalidCallError,
    KernelExecutionError,
    LayerZeroError,
    LayerZeroFallbackWarning,
    LayerZeroPerformanceWarning,
    LayerZeroWarning,
    NoCompatibleKernelPairError,
    NoKernelFoundError,
    PolicyError,
    RegistrationError,
    UnknownOperationError,
    VersionMismatchError,
)
from layerzero.core.facts import Facts, FactsBuilder
from layerzero.core.graph_capture import capturing
from layerzero.core.handle import Handle
from layerzero.core.kernel import Backend, Kernel, Release
from layerzero.core.operation import Case, Function, Operation, OpKind, Routed, Tolerance
from layerzero.core.plan import Plan, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.schema import OperationSchema
from layerzero.engine.events import Event, Listener, on_event
from layerzero.engine.functions import register_function
from layerzero.engine.headroom import Defragmented, defragment
from layerzero.engine.probe import Machine
from layerzero.inspection.agreement import agree
from layerzero.inspection.answers import explain, facts, list_kernels, list_operations, validate, which
from layerzero.inspection.bind import bind
from layerzero.inspection.control import (
    avoid,
    configure,
    deterministic,
    disabled,
    load_config,
    lock,
    prefer,
    register_backend,
    register_kernel,
    register_operation,
    scope,
    unlock,
    unregister_kernel,
    unregister_operation,
)
from layerzero.inspection.descriptors import descriptor, kernels_from_descriptor, load_descriptor, unload_descriptor
from layerzero.inspection.diagnosis import doctor
from layerzero.inspection.freeze import freeze, frozen, thaw
from layerzero.inspection.trace import trace
from layerzero.integrations.diffusers import register_with_diffusers
from layerzero.integrations.optimize import Optimized, generate_step, optimize
from layerzero.integrations.tokenizers import tune_tokenizer
from layerzero.integrations.torch import scaled_dot_product_attention
from layerzero.integrations.transformers import register_with_transformers
from layerzero.ops.activation.declare import gelu, gelu_mul, relu2, silu, silu_mul, swiglu_oai
from layerzero.ops.alibi import alibi_bias, alibi_slopes
from layerzero.ops.cascade import merge_attention_states
from layerzero.ops.comm import Ranks, tree_sum
from layerzero.ops.comm.declare import all_gather, all_reduce, all_reduce_add_rms_norm, all_to_all, reduce_scatter
from layerzero.ops.conv import conv1d, conv2d
from layerzero.ops.elementwise import add_bias, add_residual_, cast, softmax
from layerzero.ops.embedding import embedding
from layerzero.ops.experts import batched_linear, grouped_linear
from layerzero.ops.kv import CacheStep, KVCache, KVCacheError, KVCacheStrategy, StrategyChoice, kv_cache_strategy
from layerzero.ops.kv.declare import append_kv_, append_quantized_kv_, copy_kv_blocks_, gather_paged_kv
from layerzero.ops.linear import PackedWeight
from layerzero.ops.linear.declare import linear
from layerzero.ops.linear.fused import mlp
from layerzero.ops.linear.qkv import qkv_linear
from layerzero.ops.linear.quantized import quantized_linear
from layerzero.ops.loss import cross_entropy, linear_cross_entropy
from layerzero.ops.moe import moe_experts_of_ranks
from layerzero.ops.moe.experts import moe_experts
from layerzero.ops.moe.routing import moe_route
from layerzero.ops.norm.declare import add_residual_rms_norm_, add_rms_norm_, layer_norm, rms_norm
from layerzero.ops.paged import CacheList, PagedCache, StepMetadata
from layerzero.ops.paged.append import append_paged_kv_
from layerzero.ops.quantize import QuantizedWeight, WeightFormat, quantize_weight, read_gguf, repack
from layerzero.ops.quantize.route import dequantize, quantize
from layerzero.ops.ragged import RaggedMetadata
from layerzero.ops.rope import rope_frequencies, rope_table
from layerzero.ops.rope.declare import rope, rope_
from layerzero.ops.rope.normed import qk_norm_rope, rope_one
from layerzero.ops.rope.split import split_qkv_norm_rope
from layerzero.ops.rope_append.route import rope_append_
from layerzero.ops.rope_append.split import split_qkv_norm_rope_append_
from layerzero.ops.sampling import TokenCounts
from layerzero.ops.sampling.declare import greedy
from layerzero.ops.sampling.logits import add_logit_bias, apply_penalties, chosen_logprobs
from layerzero.ops.sampling.request_state import apply_token_bitmask
from layerzero.ops.sampling.signatures import (
    sample,
    sample_minp,
    sample_minp_probs,
    sample_probs,
    sample_topk,
    sample_topk_probs,
    sample_topk_topp,
    sample_topk_topp_probs,
    sample_topp,
    sample_topp_probs,
)
from layerzero.ops.sampling.verify import verify_speculative
from layerzero.ops.sparse import BlockPattern
from layerzero.ops.tensor import copy_slice_, split_qkv, transpose_head_token, transpose_token_head
from layerzero.ops.tokenize import StreamingDetokenizer, TokenizerCacheConfig, forget_tokenizer, tokenizer_cache
from layerzero.ops.tokenize.route import detokenize, tokenize
from layerzero.serving.dry_run import dry_run
from layerzero.serving.exporters import (
    JsonFormatter,
    register_with_logging,
    register_with_opentelemetry,
    register_with_prometheus,
)
from layerzero.serving.metrics import Metrics, metrics
from layerzero.serving.probes import HealthServer, Probes, serve_health
from layerzero.serving.readiness import JitStatus, Readiness, jit_status, readiness_check
from layerzero.serving.solve import solve
from layerzero.serving.speculation import (
    AdaptiveSpeculation,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    NGramConfig,
    SpeculativeConfig,
)
from layerzero.serving.speculative_pairs import SpeculativePair, SpeculativePairs, speculative_pair
from layerzero.serving.warmup import warmup
from layerzero.tuning.measurement.online import sampled
from layerzero.tuning.measurement.tune import tune
from layerzero.tuning.measurement.workload import record
from layerzero.tuning.verification.rehearsal import confirm_suspects
from layerzero.tuning.verification.vetting import vet

__all__ = [
    "AdaptiveSpeculation",
    "Axis",
    "Backend",
    "BlockPattern",
    "CacheList",
    "CacheStep",
    "Case",
    "CudaGraphUnsafeError",
    "Defragmented",
    "DescriptorError",
    "Device",
    "DeviceSpec",
    "Eagle3Config",
    "EagleConfig",
    "Event",
    "ExecutionPlan",
    "Facts",
    "FactsBuilder",
    "FrozenChoiceError",
    "Function",
    "Handle",
    "HealthServer",
    "InvalidCallError",
    "JitStatus",
    "JsonFormatter",
    "KVCache",
    "KVCacheError",
    "KVCacheStrategy",
    "Kernel",
    "KernelExecutionError",
    "KernelSpec",
    "LayerZeroError",
    "LayerZeroFallbackWarning",
    "LayerZeroPerformanceWarning",
    "LayerZeroWarning",
    "Listener",
    "Machine",
    "MedusaConfig",
    "Metrics",
    "NGramConfig",
    "NoCompatibleKernelPairError",
    "NoKernelFoundError",
    "OpKind",
    "Operation",
    "OperationSchema",
    "Optimized",
    "PackedWeight",
    "PagedCache",
    "Param",
    "Plan",
    "PolicyError",
    "Probes",
    "QuantizedWeight",
    "RaggedMetadata",
    "Ranks",
    "Readiness",
    "Reason",
    "ReasonCode",
    "RegistrationError",
    "Release",
    "Report",
    "Role",
    "Routed",
    "SelectionContext",
    "SelectionContextBuilder",
    "SelectionReport",
    "SizeCodes",
    "SpeculativeConfig",
    "SpeculativePair",
    "SpeculativePairs",
    "StepMetadata",
    "StrategyChoice",
    "StreamingDetokenizer",
    "TensorSchema",
    "TokenCounts",
    "TokenizerCacheConfig",
    "Tolerance",
    "UnknownOperationError",
    "VersionMismatchError",
    "WeightFormat",
    "__version__",
    "add_bias",
    "add_logit_bias",
    "add_residual_",
    "add_residual_rms_norm_",
    "add_rms_norm_",
    "agree",
    "alibi_bias",
    "alibi_slopes",
    "all_gather",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_to_all",
    "append_kv_",
    "append_paged_kv_",
    "append_quantized_kv_",
    "apply_penalties",
    "apply_token_bitmask",
    "attention",
    "avoid",
    "batched_attention",
    "batched_linear",
    "bind",
    "capturing",
    "cascade_attention",
    "cast",
    "chosen_logprobs",
    "compile",
    "configure",
    "confirm_suspects",
    "conv1d",
    "conv2d",
    "copy_kv_blocks_",
    "copy_slice_",
    "cross_entropy",
    "defragment",
    "dequantize",
    "descriptor",
    "deterministic",
    "detokenize",
    "disabled",
    "doctor",
    "dry_run",
    "embedding",
    "explain",
    "facts",
    "forget_tokenizer",
    "freeze",
    "frozen",
    "gather_paged_kv",
    "gelu",
    "gelu_mul",
    "generate_step",
    "greedy",
    "grouped_linear",
    "jit_status",
    "judges",
    "kernels_from_descriptor",
    "kv_cache_strategy",
    "layer_norm",
    "limits",
    "linear",
    "linear_cross_entropy",
    "list_kernels",
    "list_operations",
    "load_config",
    "load_descriptor",
    "lock",
    "merge_attention_states",
    "metrics",
    "mla_attention",
    "mlp",
    "moe_experts",
    "moe_experts_of_ranks",
    "moe_route",
    "on_event",
    "optimize",
    "paged_attention",
    "prefer",
    "qk_norm_rope",
    "qkv_linear",
    "quantize",
    "quantize_weight",
    "quantized_linear",
    "ragged_attention",
    "read_gguf",
    "readiness_check",
    "record",
    "reduce_scatter",
    "register_backend",
    "register_function",
    "register_kernel",
    "register_operation",
    "register_with_diffusers",
    "register_with_logging",
    "register_with_opentelemetry",
    "register_with_prometheus",
    "register_with_transformers",
    "relu2",
    "repack",
    "rms_norm",
    "rope",
    "rope_",
    "rope_append_",
    "rope_frequencies",
    "rope_one",
    "rope_table",
    "sample",
    "sample_minp",
    "sample_minp_probs",
    "sample_probs",
    "sample_topk",
    "sample_topk_probs",
    "sample_topk_topp",
    "sample_topk_topp_probs",
    "sample_topp",
    "sample_topp_probs",
    "sampled",
    "scaled_dot_product_attention",
    "scope",
    "serve_health",
    "silu",
    "silu_mul",
    "softmax",
    "solve",
    "sparse_attention",
    "speculative_pair",
    "split_qkv",
    "split_qkv_norm_rope",
    "split_qkv_norm_rope_append_",
    "swiglu_oai",
    "testing",
    "thaw",
    "tokenize",
    "tokenizer_cache",
    "trace",
    "transpose_head_token",
    "transpose_token_head",
    "tree_sum",
    "tune",
    "tune_tokenizer",
    "unload_descriptor",
    "unlock",
    "unregister_kernel",
    "unregister_operation",
    "validate",
    "variable_sparse_attention",
    "verify_speculative",
    "vet",
    "warmup",
    "which",
]

__version__: str

DeviceSpec = Device
ExecutionPlan = Plan
compile = solve
KernelSpec = Kernel
SelectionContext = Facts
SelectionContextBuilder = FactsBuilder
SelectionReport = Report

@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | None = None,
    scale: float | None = None,
    *,
    layout: str | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | None = None,
    scale: float | None = None,
    *,
    layout: str | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool | None = None,
    scale: float | None = None,
    *,
    layout: str | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    kv_lens: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from query to key and value with the fastest kernel that is valid for this call.

    Shapes: query (B, S_q, H, D), key (B, S_k, K, D), value (B, S_k, K, D_v) in BSHD, axes 1 and 2 swapped in BHSD; H a
        multiple of K; the output has the query's layout, shape (B, S_q, H, D_v).
    Dtype: floating; key and value the same, as a cache has it. Where query has another one, the plan casts to one that
        holds both, float32 or wider, as explain says, and ``strict_mode`` refuses. The output has the query's.
    Args:
        causal: hide keys in the future; aligned bottom-right when S_q != S_k. None, the default, is True without
            ``attn_mask``, and False with one: a mask alone says everything.
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"BSHD"`` or ``"BHSD"``. Without it the configured default decides, then the shapes, where one reading
            alone has head counts that divide, or that are at most 256. Where both fit, it is an error.
        attn_mask: broadcastable to (B, H, S_q, S_k); bool, True attends; or float, added to scores. ``causal=True``
            with it is an error: put the causal part into the mask.
        dropout_p: probability of dropping an attention weight.
        window: (left, right) keys around the query's own position that it sees, itself excluded from the count; -1 is
            unbounded.
        softcap: ``c * tanh(score / c)`` on the scores.
        sinks: (H,), one extra logit a head.
        alibi_slopes: (H,) or (B, H).
        kv_lens: (B,) on the device, valid keys of each sequence in a longer cache; what lies beyond is not read.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, S_q), natural logarithm.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got;
        NoKernelFoundError if policy leaves no kernel.
    Source: arXiv:1706.03762.
    """

@overload
def batched_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    cache_list: CacheList | None = None,
) -> Tensor: ...
@overload
def batched_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    cache_list: CacheList | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def batched_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    cache_list: CacheList | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest token of each request to all its tokens in a contiguous cache of its own.

    Shapes: query (B, 1, H, D); key_cache a :class:`layerzero.CacheList` of B caches, which stands for both and brings
        ``cache_list`` and ``layout``, or (B, L, K, D) with value_cache (B, L, K, D_v) in NHD, axes 1 and 2 swapped in
        HND; H a multiple of K; kv_lens (B,) → (B, 1, H, D_v).
    Dtype: floating; the caches' may be another than the queries': then it computes in one that holds both, float32 or
        wider. kv_lens int32 or int64, on the same device. The output has the queries' dtype.
    Args:
        kv_lens: tokens of each request that are in its cache, the query's own included; what lies beyond may be
            anything. 0 gives 0 and -inf.
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"NHD"`` or ``"HND"``.
        window: (left, right) as in ``lz.attention``; of one query only left counts.
        softcap: ``c * tanh(score / c)`` on the scores.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1), natural logarithm.
        cache_list: what ``key_cache`` brings where it is a list.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing; on a CPU and in debug mode
        for lengths beyond a cache, too.
    Source: batched decodes of the Rust crate ferrum-kernels; arXiv:1706.03762.
    """

@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared_blocks: int,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor: ...
@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared_blocks: int,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    shared_blocks: int,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest token of each sequence, where all sequences begin with the same pages.

    The result is that of ``lz.paged_attention``. Kernels that read the shared pages once for all sequences are
    candidates; so are the others, where they are faster.

    Shapes: query (B, 1, H, D); caches, block_tables and context_lens as in ``lz.paged_attention`` → (B, 1, H, D_v).
    Dtype: query and caches the same floating dtype; tables and lengths int32, on the same device.
    Args:
        shared_blocks: a promise that the first so many pages of every table are the same, and full. Found broken on a
            CPU by kernels that rely on it, and in debug mode.
        scale, layout, window, softcap, max_context_len, step: as in ``lz.paged_attention``.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1), natural logarithm.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got.
    Source: cascade inference of FlashInfer, arXiv:2501.01005.
    """

@overload
def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    return_lse: Literal[False] = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor: ...
@overload
def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    return_lse: Literal[True],
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest tokens of each sequence to a paged latent cache, with absorbed projections.

    Shapes: q_nope (B, S, H, C), q_pe (B, S, H, R), ckv_cache (P, N, C), kpe_cache (P, N, R), block_tables
        (B, max_blocks), context_lens (B,) → (B, S, H, C). DeepSeek has C = 512 and R = 64.
    Dtype: queries and cache the same floating dtype; tables and lengths int32, on the same device.
    Args:
        q_nope: queries times the keys' up-projection of their head, so that they meet latent vectors.
        q_pe: the rotated part of the queries.
        ckv_cache: latent vectors, keys and values at once.
        kpe_cache: the rotated part of the keys, shared by all heads. Planes that are columns of one tensor
            (P, N, C + R) have more kernels.
        block_tables: the pages of each sequence in order; what lies beyond its last one is not read.
        context_lens: tokens of each sequence, these included: query i of S sees the keys below ``length - S + 1 + i``.
        scale: factor on the scores. It has no default: the width of a key before its projection was absorbed decides
            it (192 in DeepSeek-V3), which no tensor here has.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, S), natural logarithm.
        max_context_len: upper bound of ``context_lens`` that the caller knows.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels plan once for all layers.
    Returns: the output, still latent, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got.
    Source: DeepSeek-V2, arXiv:2405.04434. Prefill with projected keys and values is ``lz.ragged_attention``.
    """

@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    narrow_query: bool = False,
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    narrow_query: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None = None,
    *,
    layout: str = "NHD",
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    decodes: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    narrow_query: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the newest tokens of each sequence to all its tokens in a paged cache.

    One token a sequence is a decode step. Several, by ``cu_seqlens_q``, are prefills, chunks of prefills behind a
    cached prefix, and decodes, all in one call.

    Shapes: query (B, 1, H, D), or (T, H, D) with cu_seqlens_q (B + 1,); key_cache (P, N, K, D) and value_cache
        (P, N, K, D_v) in NHD, axes 1 and 2 swapped in HND; H a multiple of K; block_tables (B, max_blocks);
        context_lens (B,) → (B, 1, H, D_v), or (T, H, D_v). With cu_seqlens_q also caches in tiles of AMX, as vLLM
        keeps them: keys (P, K, N / 16, D / 2, 16, 2), values (P, K, D / 16, N / 2, 16, 2).
    Dtype: floating; caches the queries' dtype, or another, which is converted as it is read: then it computes in one
        that holds both, float32 or wider. Or caches of float8_e4m3fn, float8_e5m2 or int8 with scales. Tables, lengths
        and starts int32, on the same device. The output has the queries' dtype.
    Args:
        block_tables: the pages of each sequence, in order; entries beyond its last page may hold anything.
        context_lens: tokens of each sequence that are in the cache, the queries' own included. 0 gives 0 and -inf (with
            sinks, the sink).
        scale: factor on the scores, 1/sqrt(D) by default.
        layout: ``"NHD"`` or ``"HND"``.
        window: (left, right) as in ``lz.attention``; of one causal query only left counts: nothing is to its right.
        softcap: ``c * tanh(score / c)`` on the scores.
        return_lse: also return the log-sum-exp of the scores, float32 (B, H, 1) or (H, T), natural logarithm.
        cu_seqlens_q: where each sequence's queries begin: 0, then the end of each; they are its newest tokens. A
            sequence may have none.
        max_seqlen_q: an upper bound of the queries of one sequence; all tokens together if None.
        decodes: a promise that the first so many sequences have one query each, so that kernels may treat them apart;
            None where there are none.
        causal: hide keys in the future, aligned at the end of each sequence; without it every query sees all keys.
        sinks: (H,), one extra logit a head; with cu_seqlens_q alone, as the next two. All three have a CPU kernel. On
            GPUs the reference computes slopes, and sinks that Triton's kernel does not take, until ``layerzero vet``
            proved vLLM's (sinks: sm 9.x, bfloat16). Over caches of float8 or int8 it computes all three there.
        alibi_slopes: (H,) or (B, H).
        tree_mask: (T, columns) bool, for drafts that branch: which of its sequence's new tokens each query sees, by
            their places there. Row i of a chain of 3 is True up to column i. Each token sees itself, its parent and
            what that one sees. Sequences with more new tokens than columns are chains. ``window`` and slopes count
            depths: a token is as far behind what was cached as it has ancestors in its row. Trees with either run
            slower kernels: on a GPU ``torch.paged_each`` with a window, and the reference with slopes or in a capture.
        max_context_len: an upper bound of context_lens that the caller knows; what the tables hold if None. Kernels
            size their work by it. A length above it is the caller's mistake: found on a CPU and in debug mode.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels that plan on the host
            do so once for all layers.
        key_scale, value_scale: of a cache of float8 or int8, what its numbers are multiples of, in float32. Shapes are
            (), (K,) or (P, N, K), whatever the layout. The last may be float16, too.
        narrow_query: over a cache of float8, whether kernels may round queries and probabilities to it as well, by 6 %
            of each at most. FlashAttention 3 does, and multiplies at twice the rate then.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; in
        debug mode and on a CPU for pages, lengths and starts out of range and a tree mask that is none, too.
        NoKernelFoundError if policy leaves no
        kernel.
    Source: PagedAttention, arXiv:2309.06180.
    """

@overload
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = True,
    scale: float | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[False] = False,
    step: RaggedMetadata | None = None,
) -> Tensor: ...
@overload
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = True,
    scale: float | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[True],
    step: RaggedMetadata | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = True,
    scale: float | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    step: RaggedMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within sequences of unlike lengths that lie one after the other, without padding between them.

    Shapes: query (T, H, D), key (T_k, K, D), value (T_k, K, D_v), H a multiple of K; cu_seqlens_q and cu_seqlens_k
        (B + 1,) → (T, H, D_v).
    Dtype: query, key and value the same floating dtype; starts int32, on the same device.
    Args:
        cu_seqlens_q: where each sequence's queries begin: 0, then the end of each. Sequences may be empty.
        cu_seqlens_k: the same of its keys; the same tensor where both are of one length.
        causal: hide keys in the future; the last query of a sequence is aligned with its last key.
        scale: factor on the scores, 1/sqrt(D) by default.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths that the caller knows; all tokens together if None.
            Kernels size their work by them. A longer sequence is the caller's mistake: found in debug mode.
        window: (left, right) keys around the query's own position that it sees, as in ``lz.attention``.
        softcap: ``c * tanh(score / c)`` on the scores.
        sinks: (H,), one extra logit a head.
        alibi_slopes: (H,) or (B, H).
        return_lse: also return the log-sum-exp of the scores, float32 (H, T), natural logarithm.
        step: the :class:`layerzero.RaggedMetadata` of these starts, so that kernels that plan on the host do so once
            for all layers.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf (with sinks, the sink).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for starts that do not begin at 0, decrease, or end elsewhere than the tokens.
        NoKernelFoundError if policy leaves no kernel.
    Source: flash_attn_varlen_func of FlashAttention, arXiv:2205.14135.
    """

@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indptr: Tensor,
    block_indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    block_pattern: BlockPattern | None = None,
) -> Tensor: ...
@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indptr: Tensor,
    block_indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    block_pattern: BlockPattern | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indptr: Tensor,
    block_indices: Tensor,
    block_rows: int,
    block_cols: int,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    block_pattern: BlockPattern | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from blocks of queries to some blocks of keys, all of a block or nothing of it.

    Shapes: query (M, H, D), key (N, K, D), value (N, K, D_v), H a multiple of K, M a multiple of ``block_rows`` and N
        of ``block_cols``; block_indptr (M / block_rows + 1,), block_indices (Z,) → (M, H, D_v).
    Dtype: query, key and value the same floating dtype; the pattern int32, on the same device.
    Args:
        block_indptr: where each row's blocks begin: 0, then the end of each row. Rows may be empty.
        block_indices: the columns of blocks that rows see, each once in a row, in any order.
        block_rows, block_cols: queries and keys of a block.
        scale: factor on the scores, 1/sqrt(D) by default.
        return_lse: also return the log-sum-exp of the scores, float32 (H, M), natural logarithm.
        block_pattern: the :class:`layerzero.BlockPattern` of these two, so that kernels which plan do so once.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for a pattern that leads beyond the keys, decreases, or names a block twice.
    Source: BlockSparseAttentionWrapper of FlashInfer, arXiv:2501.01005.
    """

@overload
def variable_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen_blocks: Tensor,
    row_sizes: Tensor,
    col_sizes: Tensor,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def variable_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen_blocks: Tensor,
    row_sizes: Tensor,
    col_sizes: Tensor,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def variable_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen_blocks: Tensor,
    row_sizes: Tensor,
    col_sizes: Tensor,
    scale: float | None = None,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from blocks of queries to some blocks of keys, where blocks differ in size and key heads in their blocks.

    Shapes: query (M, H, D), key (N, K, D), value (N, K, D_v), H a multiple of K; seen_blocks (K, R, C), row_sizes
        (K, R), col_sizes (K, C) → (M, H, D_v).
    Dtype: query, key and value the same floating dtype; seen_blocks bool, sizes int32, all on the same device.
    Args:
        seen_blocks: whether a row of blocks sees a column of them, for the query heads of each key head.
        row_sizes, col_sizes: queries and keys of each block, in tokens; they sum up to M and N.
        scale: factor on the scores, 1/sqrt(D) by default.
        return_lse: also return the log-sum-exp of the scores, float32 (H, M), natural logarithm.
    Returns: the output, or (output, lse). A query that sees no key gives 0 and -inf.
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; on a
        CPU and in debug mode for sizes that do not sum up to the tokens.
    Source: VariableBlockSparseAttentionWrapper of FlashInfer, arXiv:2501.01005.
    """
