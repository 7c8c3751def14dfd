# ruff: noqa: PYI021, A001  # editors show these docstrings; one name is a built-in's
# Written by `python -m tools docs` from the declarations; edit those.
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

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
from layerzero.ops.alibi import alibi_slopes
from layerzero.ops.comm import Ranks, tree_sum
from layerzero.ops.kv import CacheStep, KVCache, KVCacheError, KVCacheStrategy, StrategyChoice, kv_cache_strategy
from layerzero.ops.linear import PackedWeight
from layerzero.ops.moe import moe_experts_of_ranks
from layerzero.ops.paged import PagedCache, StepMetadata
from layerzero.ops.quantize import QuantizedWeight, WeightFormat, quantize_weight, read_gguf, repack
from layerzero.ops.ragged import RaggedMetadata
from layerzero.ops.rope import rope_frequencies, rope_table
from layerzero.ops.sampling import TokenCounts
from layerzero.ops.sparse import BlockPattern
from layerzero.ops.tokenize import StreamingDetokenizer, TokenizerCacheConfig, forget_tokenizer, tokenizer_cache
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

def add_bias(input: Tensor, bias: Tensor) -> Tensor:
    """Add a number for each feature to every row.

    Shapes: input (*, D), bias (D,) → (*, D)
    Dtype: floating, the same for both; computes in float32 or wider; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    """

def add_logit_bias(logits: Tensor, bias_ids: Tensor, bias: Tensor) -> Tensor:
    """Add numbers to a few places of each row; ``-inf`` forbids one.

    Shapes: logits (*, V), bias_ids (*, N), bias (*, N) → (*, V)
    Dtype: logits floating, bias_ids int32 or int64, bias float32; computes in float32 or wider; returns logits.dtype.
    Args:
        bias_ids: the places, from 0 to V - 1; -1 is none; numbers of a place that is named twice are added up.
    Raises: InvalidCallError for what does not fit, and on a CPU for places beyond the vocabulary.
    Source: the OpenAI interface.
    """

def add_residual_(residual: Tensor, input: Tensor, scale: float | Tensor | None = None) -> None:
    """Add the input to the residual in place, scaled where a scale is given: ``residual += scale * input``.

    Shapes: residual and input (*, D), the same; scale (*) where it is a tensor
    Dtype: floating, the same for both, scale float32; computes in float32 or wider, rounds once.
    Args:
        scale: a number from -1e6 to 1e6, or a tensor with one for each row, as a mixture of experts has them.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a residual that needs gradients, that
        overlaps itself in memory, or that shares memory with what is added.
    """

def add_residual_rms_norm_(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-06) -> Tensor:
    """Add the input to the residual in place and return the sum, normalised by its root mean square.

    Shapes: input and residual (*, D), the same; weight (D,) → (*, D)
    Dtype: floating, the same for all; the sum is rounded to it, then normalised in float32.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a residual that needs gradients, that
        overlaps itself in memory, or that shares memory with the input.
    Source: arXiv:1910.07467; fused as in vLLM's fused_add_rms_norm.
    """

def add_rms_norm_(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-06) -> None:
    """Add the input to the residual in place, and write the sum, normalised by its root mean square, over the input.

    Shapes: input and residual (*, D), the same; weight (D,)
    Dtype: floating, the same for all; the sum is rounded to it, then normalised in float32.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for an input or residual that needs
        gradients as a leaf, that overlaps itself in memory, or that shares memory with the other or with the weight.
    Source: arXiv:1910.07467; vLLM's fused_add_rms_norm.
    """

def alibi_bias(
    slopes: Tensor,
    q_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Make the bias of attention with linear biases, for ``lz.attention(..., attn_mask=bias, causal=False)``.

    ``-slope * |i + kv_len - q_len - j|`` for query i and key j: the last query stands at the last key, as causal masks
    of ``lz.attention`` are aligned.

    Shapes: slopes (H,) → (H, q_len, kv_len), which broadcasts over a batch.
    Dtype: slopes floating; computes in float32 or wider; returns out_dtype, or that of slopes. The device is theirs.
    Units: q_len and kv_len in tokens.
    Args:
        slopes: one for each head; ``lz.alibi_slopes(heads)`` makes those of the paper, for any number of heads.
        causal: -inf at keys beyond the query, since a mask comes in place of ``causal=True`` there.
        out_dtype: a floating dtype of at least 16 bits.
    Raises: InvalidCallError for other shapes or dtypes, and for lengths below 1 or above 2**24.
    Source: arXiv:2108.12409.
    """

def all_gather(input: Tensor, gather_dim: int = 0, group: ProcessGroup | Ranks | None = None) -> Tensor:
    """Put what all ranks have one behind the other, in the order of the ranks, on each of them.

    Shapes: input (*), the same on all ranks → (*) with the axis ``gather_dim`` so many times longer, contiguous
    Dtype: floating, int32, int64 or uint8, returned.
    Args:
        gather_dim: along which axis.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for an axis that is not there, and as :func:`all_reduce` does.
    """

def all_reduce(input: Tensor, reduce_op: str = "sum", group: ProcessGroup | Ranks | None = None) -> Tensor:
    """Add up a tensor over all ranks of a group; each gets the sum.

    Every rank of the group calls it, with the same shape, dtype and ``reduce_op``: no rank sees the others' shapes, and
    ranks that differ hang or get wrong numbers. Calls of one group come one after the other, on one stream at a time.

    Shapes: input (*), the same on all ranks → (*)
    Dtype: floating, int32 or int64, returned; torch's kernels round each sum to it.
    Args:
        reduce_op: ``sum``, ``max`` or ``min``.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for a group that is not there, was destroyed, or moves no tensors of this device, for
        tensors that need gradients, and in a capture whose group cannot.
    """

def all_reduce_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-06,
    group: ProcessGroup | Ranks | None = None,
) -> tuple[Tensor, Tensor]:
    """Add up a tensor over all ranks, add the sum to a residual, and normalise that by its root mean square.

    Shapes: input and residual (*, D), the same on all ranks; weight (D,) → output (*, D), the new residual (*, D)
    Dtype: floating, the same for all; the sum over ranks and the new residual are rounded to it, the norm is computed
        in float32.
    Units: eps in x^2.
    Args:
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for shapes that do not fit, and as :func:`all_reduce` does.
    Source: arXiv:1910.07467; fused as in TensorRT-LLM's and FlashInfer's all-reduce.
    """

def all_to_all(
    input: Tensor,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
    group: ProcessGroup | Ranks | None = None,
) -> Tensor:
    """Send rows to each rank of a group, and get the rows that each sends here: tokens to experts, and back.

    Shapes: input (N, *): first the rows for rank 0, then those for rank 1, and so on → (M, *), in the order of the
        ranks that sent them
    Dtype: floating, int32, int64 or uint8, returned.
    Args:
        send_sizes: rows for each rank, which add up to N; equal numbers if None.
        receive_sizes: rows from each rank, which add up to M: what each of them has in its ``send_sizes`` for this one.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for sizes that do not add up or divide, or come alone, and as :func:`all_reduce` does.
    """

def append_kv_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into the rows of a contiguous cache, in place.

    Shapes: key (B, S, K, D), value (B, S, K, D_v); caches (B, L, K, D) and (B, L, K, D_v) in NHD, axes 1 and 2 swapped
        in HND; positions (B, S), (1, S) or (S,).
    Dtype: keys, values and caches the same floating dtype; positions int32 or int64, on the same device.
    Args:
        positions: where each token belongs in its sequence's row; each place of a row at most once. On a GPU either of
            two tokens with one place may be what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share memory with the new
        tokens or with each other; on a CPU and in debug mode for places beyond the cache or named twice, too.
    Source: static caches of Transformers 5.
    """

def append_paged_kv_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    Shapes: key (T, K, D), value (T, K, D_v); caches as in ``lz.paged_attention``; slot_mapping (T,).
    Dtype: keys, values and caches the same floating dtype; slot_mapping int64, on the same device.
    Args:
        slot_mapping: ``page * page_size + offset`` of each token, -1 for padding; each slot at most once.
            ``StepMetadata.slot_mapping`` makes it from tables and lengths. On a GPU either of two tokens with one slot
            may be what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share memory with the new
        tokens or with each other; on a CPU and in debug mode for slots beyond the cache or named twice, too.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """

def append_quantized_kv_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens, divided by scales, into a paged cache of float8 or int8, in place.

    Shapes: key (T, K, D), value (T, K, D_v); caches as in ``lz.paged_attention``; slot_mapping (T,); scales (), (K,) or
        (P, N, K), whatever the layout.
    Dtype: keys and values the same floating dtype; caches both float8_e4m3fn, float8_e5m2 or int8; scales float32;
        slot_mapping int64, on the same device.
    Args:
        slot_mapping: as of ``lz.append_paged_kv_``.
        key_scale, value_scale: what the cache's numbers are multiples of, above 0. Quotients beyond the dtype's range
            become its largest number, infinities NaN in float8, or its largest number, too, where vLLM's kernel runs;
            those of int8 are rounded to even, from -127 to 127.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share elements; on a CPU and
        in debug mode for slots beyond the cache or named twice, and for scales of new tokens that are not above 0, too.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """

def apply_penalties(
    logits: Tensor,
    output_ids: Tensor | None = None,
    prompt_ids: Tensor | None = None,
    *,
    output_counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    repetition: float | Tensor | None = None,
    presence: float | Tensor | None = None,
    frequency: float | Tensor | None = None,
) -> Tensor:
    """Make what was said already less likely: by repetition first, then by frequency, then by presence.

    Repetition divides logits above 0 and multiplies those below, of places in the output or the prompt. Frequency is
    taken off for each time that a place is in the output, presence once if it is there.

    Shapes: logits (*, V), output_ids (*, L), prompt_ids (*, P) → (*, V)
    Dtype: logits floating, ids and counts int32 or int64, masks bool; computes in float32 or wider; returns
        logits.dtype.
    Args:
        output_ids: the tokens that were said, from 0 to V - 1; -1 is none.
        prompt_ids: those of the prompt, which count for repetition alone.
        output_counts: in place of output_ids, how often each place was said, (*, V).
        prompt_mask: in place of prompt_ids, whether each place is in the prompt, (*, V).
        repetition: 1e-4 to 1e4; None does nothing, as 1.
        presence, frequency: -1e4 to 1e4; None does nothing, as 0.
        Each is a number for all rows, or a float32 tensor (*) with one for each row. A tensor's numbers are not read,
            but in debug mode, since that waits for a GPU: a repetition of 0 gives inf, NaN gives NaN, a negative one
            turns signs around. Check them where a request comes.
    Raises: InvalidCallError for what does not fit, ids and counts together, on a CPU for ids beyond the vocabulary, and
        in debug mode for numbers of rows that are none.
    Source: arXiv:1909.05858 for repetition, the OpenAI interface for presence and frequency.
    """

def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Forbid the places whose bit is 0: their logits become minus infinity. NaN stays NaN.

    Place ``i`` is bit ``i % 32`` of the word ``i // 32``, the lowest bit first, as in xgrammar's
    ``allocate_token_bitmask`` and in llguidance. A row of -1 allows everything; bits behind the vocabulary are not
    read.

    Shapes: logits (*, V), bitmask (*, W), W at least V / 32 → (*, V)
    Dtype: logits floating, bitmask int32; returns logits.dtype.
    Raises: InvalidCallError for what does not fit.
    Source: xgrammar, arXiv:2411.15100.
    """

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
    Dtype: all three the same floating dtype; the output has it too.
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

def batched_linear(input: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply each input of a stack with its own weight: ``input[g] @ weight[g]^T + bias[g]``.

    Shapes: input (G, M, K), weight (G, N, K), bias (G, N) → (G, M, N)
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
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

    The result is that of ``lz.paged_attention``; kernels that read the shared pages once for all sequences are
    candidates, and so are those that do not, where they are faster.

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

def cast(input: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Write the same numbers in another floating dtype, rounded to the nearest, into memory of its own.

    Shapes: input (*, D) → (*, D), contiguous
    Dtype: floating; returns out_dtype.
    Raises: InvalidCallError for dtypes that are not floating.
    """

def chosen_logprobs(logits: Tensor, ids: Tensor, *, temperature: float | Tensor | None = None) -> Tensor:
    """Tell the logarithm of the probability that one place of each row has.

    Shapes: logits (*, V), ids (*) → (*)
    Dtype: logits floating, ids int32 or int64; computes in float32 or wider; returns float32.
    Args:
        ids: from 0 to V - 1.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6.
    Raises: InvalidCallError for what does not fit, and on a CPU for ids beyond the vocabulary.
    """

def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    packed: PackedWeight | None = None,
) -> Tensor:
    """Convolve sequences with a weight, as ``torch.nn.functional.conv1d``.

    Shapes: input (N, C, L) or (C, L), weight (O, C / groups, K), bias (O,) → (N, O, L') or (O, L')
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Units: stride, padding and dilation in positions.
    Args:
        padding: zeros at both ends, ``"valid"`` for none, or ``"same"`` for as many results as positions.
        groups: parts of the channels that are convolved apart; ``groups == C`` is depthwise.
        packed: the :class:`layerzero.PackedWeight` of this weight, as of :func:`layerzero.linear`.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for groups that do not divide the channels,
        for a stride or dilation below 1, a negative padding, and a kernel longer than the padded input.
    """

def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    packed: PackedWeight | None = None,
) -> Tensor:
    """Convolve pictures with a weight, as ``torch.nn.functional.conv2d``.

    Shapes: input (N, C, H, W) or (C, H, W), weight (O, C / groups, K_h, K_w), bias (O,) → (N, O, H', W') or (O, H', W')
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Units: stride, padding and dilation in positions, one number or (of height, of width).
    Args:
        padding: zeros at both ends of each axis, ``"valid"`` for none, or ``"same"`` for as many results as positions.
        groups: parts of the channels that are convolved apart; ``groups == C`` is depthwise.
        packed: the :class:`layerzero.PackedWeight` of this weight, as of :func:`layerzero.linear`.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for groups that do not divide the channels,
        for a stride or dilation below 1, a negative padding, and a kernel larger than the padded input.
    """

def copy_kv_blocks_(
    key_cache: Tensor,
    value_cache: Tensor,
    from_pages: Tensor,
    to_pages: Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Copy pages of a cache into other pages, in place, as if all were read before any is written.

    Shapes: caches as in ``lz.paged_attention``; from_pages and to_pages (M,).
    Dtype: both caches the same floating dtype; pages int64, on the same device.
    Args:
        from_pages: what is read.
        to_pages: where each of them goes, each page at most once. On a GPU either of two pages that go to one may be
            what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share elements; on a CPU and
        in debug mode for pages beyond the cache or written twice, too.
    Source: copy_blocks of vLLM, arXiv:2309.06180.
    """

def copy_slice_(destination: Tensor, input: Tensor) -> None:
    """Write one slice over another: ``lz.copy_slice_(cache[:, 3:7], new)``.

    Shapes: destination and input (*, D), the same; views say which part of a tensor is meant.
    Dtype: floating, the same for both.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a destination that needs gradients as a
        leaf, that overlaps itself in memory, or that shares memory with the input.
    """

def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Compare logits with classes, as ``torch.nn.functional.cross_entropy``.

    Shapes: logits (T, V) or (V,), target (T,) or () → (), or target's shape for ``"none"``; weight (V,)
    Dtype: logits and weight floating, the same; target int32 or int64; computes in float32; returns logits.dtype.
    Args:
        weight: factor on the loss of each class; it gets no gradient.
        ignore_index: rows of this class count nowhere; a mean of no row is NaN.
        label_smoothing: share of the loss that is the mean over all classes, 0 to 1.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first, as in Gemma 2.
        z_loss: factor on ``logsumexp(logits)^2``, added to the loss of each row, whatever its class weighs.
        reduction: ``"mean"``, weighted by class, ``"sum"`` or ``"none"``.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for more than two axes (torch has the
        classes second there), and for probabilities as target, which torch's function takes.
        Classes that no logit has are the caller's mistake: an error on a CPU, and in debug mode elsewhere.
    Source: label smoothing arXiv:1512.00567; z-loss arXiv:2204.02311.
    """

def dequantize(
    quantized: Tensor,
    scale: Tensor,
    *,
    dtype: str,
    out_dtype: torch.dtype | None = None,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """Multiply narrow numbers with their scales: what :func:`layerzero.quantize` made, as floating numbers.

    Shapes: quantized (*, W), or (*, W / 2) of four bits and (*, 3 W / 4) of six; scale as :func:`layerzero.quantize`
        takes or returns it → (*, W)
    Dtype: quantized and scale those of the format; computes in float32, rounds once, to out_dtype.
    Args:
        dtype: the format, as of :func:`layerzero.quantize`.
        out_dtype: a floating dtype; float32 if None.
        tensor_scale: of nvfp4, that which it was quantized with.
    Raises: InvalidCallError for an unknown format, and for tensors that are not of it.
    """

def detokenize(
    tokens: list[int] | list[list[int]],
    tokenizer_id: Any,
    *,
    skip_special_tokens: bool = False,
) -> str | list[str]:
    """Decode ids, or several lists of them: a string, or one for each list. Bytes that are no UTF-8 become U+FFFD.

    Args:
        tokens: ids; lists, tuples, arrays or tensors.
        tokenizer_id: as :func:`tokenize` takes it.
        skip_special_tokens: leave ids of special tokens out.
    Raises: InvalidCallError for ids outside of the vocabulary, and as :func:`tokenize`.
    """

def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    scale: float | None = None,
    padding_idx: int | None = None,
    vocab_start: int | None = None,
) -> Tensor:
    """Look up rows of a table by ids: ``weight[ids] * scale``.

    Shapes: ids (*), weight (V, D) → (*, D)
    Dtype: ids int32 or int64; weight floating, returned; a scale multiplies in float32 or wider and is rounded once.
    Args:
        scale: factor on every row, as Gemma's models have it.
        padding_idx: the row of this id gets no gradient, as in ``torch.nn.functional.embedding``; from the end where
            it is negative. The result is what the row holds.
        vocab_start: declares the table a shard, which holds rows ``vocab_start`` to ``vocab_start + V - 1`` of a
            vocabulary: ids of other rows give zeros, so that the results of all shards add up to the whole table's.
            padding_idx is an id of the vocabulary, of 0 and above, then. None for a whole table.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, and for a padding_idx that no row has.
        Without a shard ids that no row has are the caller's mistake: an error on a CPU, and in debug mode elsewhere.
    Source: shards as in Megatron-LM, arXiv:1909.08053.
    """

def gather_paged_kv(
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
) -> tuple[Tensor, Tensor]:
    """Read the keys and values of tokens out of a paged cache.

    Shapes: caches as in ``lz.paged_attention``; slot_mapping (T,) → (T, K, D), (T, K, D_v).
    Dtype: both caches the same floating dtype; slot_mapping int64, on the same device.
    Args:
        slot_mapping: ``page * page_size + offset`` of each token; -1 gives zeros.
        layout: ``"NHD"`` or ``"HND"``.
    Returns: keys and values, one token after the other.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit; on a CPU and in debug mode for slots beyond
        the cache, too.
    Source: gather_cache of vLLM, arXiv:2309.06180.
    """

def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Apply the Gaussian error linear unit: ``x / 2 * (1 + erf(x / sqrt(2)))``, or its approximation by tanh.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype. An infinity may give NaN.
    Args:
        approximate: ``"none"`` or ``"tanh"``.
    Raises: InvalidCallError for dtypes or a name that is none of these.
    Source: arXiv:1606.08415.
    """

def gelu_mul(input: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Multiply the GELU of a gate with what it lets through: ``gelu(gate) * up``.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D), the gate first.
    Dtype: floating, the same for both; computes in float32; returns input.dtype. An infinite gate may give NaN.
    Args:
        input: the gate, or gate and up.
        up: what the gate lets through; None if it is in the input.
        approximate: ``"none"`` or ``"tanh"``, as for :func:`layerzero.gelu`.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, or another approximation.
    Source: arXiv:2002.05202.
    """

def greedy(logits: Tensor) -> Tensor:
    """Pick the place of the largest logit of each row, the first of equals; that of the first NaN where there is one.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; returns int64.
    Raises: InvalidCallError for other dtypes, and where there is no place.
    """

def grouped_linear(input: Tensor, weight: Tensor, group_ends: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiply rows that are sorted by group with their group's weight: the experts of a mixture, each with its tokens.

    Shapes: input (T, K), weight (G, N, K), group_ends (G,), bias (G, N) → (T, N). Group g has the rows from the end of
        the group before it to group_ends[g]: ``torch.cumsum(counts, 0, dtype=torch.int32)``. A group may be empty.
    Dtype: floating, the same for all, group_ends int32; sums are in float32; returns input.dtype.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and, where values can be read (debug mode),
        for ends that fall or whose last is not T. Without, rows of no group hold anything.
    """

def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor:
    """Normalise the last axes to mean 0 and variance 1, then scale and shift.

    Shapes: input (*, *normalized_shape), weight and bias normalized_shape → input's shape
    Dtype: floating, the same for all; sums are in float32; returns input.dtype. On a CPU, float32 weight and bias may
        scale half precision: it is cast to float32, and the result back, as torch computes.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:1607.06450.
    """

def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    packed: PackedWeight | None = None,
) -> Tensor:
    """Multiply with a weight, as ``torch.nn.functional.linear``: ``activation(input @ weight^T + bias)``.

    Shapes: input (*, K), weight (N, K), bias (N,) → (*, N)
    Dtype: floating, the same for all; sums are in float32; returns out_dtype or input.dtype.
    Args:
        activation: what follows the product: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"silu"`` or
            ``"relu2"``; kernels that know it apply it before they round.
        out_dtype: dtype of the result: the input's, or float32 for float16 and bfloat16, whose sums are not rounded
            then (logits).
        packed: the :class:`layerzero.PackedWeight` of this weight, so that kernels that want it in another order make
            that once. It changes no result, and has no effect in compiled code.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for a packed weight of another tensor or
        of one that was written into since.
    """

def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compare ``hidden @ weight^T + bias`` with classes, without holding all of these logits.

    The mean and the sum compute gradients with the loss, as far as the inputs want them: a second backward pass through
    one result raises, and so do gradients of gradients.

    Shapes: hidden (*, D), weight (V, D), target (*), bias and class_weight (V,) → (), or (*) for ``"none"``
    Dtype: all but target floating, the same; target int32 or int64; computes in float32; returns out_dtype.
    Args:
        class_weight, ignore_index, label_smoothing, softcap, z_loss, reduction: as of :func:`layerzero.cross_entropy`.
        out_dtype: of the loss: hidden's, or float32 for float16 and bfloat16, as Transformers has it.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for probabilities as target.
        Classes that no row of weight has are the caller's mistake: an error on a CPU, and in debug mode elsewhere.
    Source: arXiv:2410.10989 (Liger), arXiv:2411.09009 (Cut Cross-Entropy).
    """

def merge_attention_states(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Make attention over two parts of the keys attention over both.

    Shapes: output_a, output_b (T, H, D_v), lse_a, lse_b (H, T) → (T, H, D_v), (H, T), as ``lz.ragged_attention`` and
        ``lz.paged_attention`` with ``cu_seqlens_q`` return them; each part has keys of its own.
    Dtype: both outputs the same floating dtype, which the result has; log-sum-exps float32, natural logarithm.
    Returns: the output and its log-sum-exp. A part that saw no key (0 and -inf, as attention gives it) has no share;
        neither saw one: 0 and -inf.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit.
    Source: online softmax, arXiv:1805.02867.
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

def mlp(
    input: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None = None,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str = "silu",
    packed_up: PackedWeight | None = None,
    packed_down: PackedWeight | None = None,
    packed_gate: PackedWeight | None = None,
) -> Tensor:
    """Multiply with a weight, activate, multiply with another: the feed-forward block of a model, gated or plain.

    ``down(activation(up x))``; with a gate ``down(activation(gate x) * up x)``. An ``up_weight`` with twice the rows
    that ``down_weight`` reads holds the gate in its first half, as ``torch.cat((gate, up))``.

    Shapes: input (*, K), up_weight and gate_weight (I, K), or up_weight (2 I, K) alone; down_weight (N, I); biases as
        many as their weight has rows → (*, N)
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Args:
        activation: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"silu"`` or ``"relu2"``.
        packed_up, packed_down, packed_gate: the :class:`layerzero.PackedWeight` of each weight; kernels that want
            weights in another order want all of them. They change no result, and have no effect in compiled code.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a gate's bias without a gate, and for a
        packed weight of another tensor or of one that was written into since.
    Source: arXiv:2002.05202.
    """

def moe_experts(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    activations: str | None = None,
    packed_gate_up: PackedWeight | None = None,
    packed_down: PackedWeight | None = None,
    gate_up_format: str | None = None,
    gate_up_scale: Tensor | None = None,
    gate_up_zero: Tensor | None = None,
    gate_up_group_index: Tensor | None = None,
    gate_up_second_scale: Tensor | None = None,
    down_format: str | None = None,
    down_scale: Tensor | None = None,
    down_zero: Tensor | None = None,
    down_group_index: Tensor | None = None,
    down_second_scale: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts, and add up what they make of it by their weights.

    ``sum over k of expert_weights[t, k] * down[e](activation(gate[e] x) * up[e] x)``, with x = input[t] and
    e = expert_ids[t, k].

    Shapes: input (T, D), gate_up_weight (E, 2 F, D), down_weight (E, D, F), expert_ids and expert_weights (T, k) as
        :func:`layerzero.moe_route` gives them, gate_up_bias (E, 2 F), down_bias (E, D) → (T, D). Rows of gate_up_weight
        are the gate's, then up's; for ``"swiglu_oai"`` by turns, as gpt-oss has them. Weights that lie the other way
        round are passed as ``weight.mT``.
    Dtype: floating, the same for all but expert_weights, which may have another; expert_ids int32 or int64. Sums are in
        float32, those over the experts, too; returns input.dtype.
    Args:
        expert_ids: from 0 to E - 1; -1 is an expert that is elsewhere (on another rank) and adds nothing.
        activation: ``"silu"``, ``"gelu"`` (by erf), ``"gelu_tanh"`` or ``"swiglu_oai"``.
        alpha, limit: of ``"swiglu_oai"``, as for :func:`layerzero.swiglu_oai`.
        activations: ``"int8"``, with weights of whole numbers by group, lets kernels round the rows of both products to
            eight bits; no gradient is promised.
        packed_gate_up, packed_down: the :class:`layerzero.PackedWeight` of each weight; kernels that want weights in
            another order want both. They change no result, and have no effect in compiled code.
        gate_up_format, down_format: of quantised weights, such as ``"mxfp4"``. A :class:`layerzero.QuantizedWeight` of
            all experts, (E, N, K), in place of a weight brings this and the tensors below.
        gate_up_scale, ..., down_second_scale: with a format, the tensors that it has besides. Nothing flows back to
            these, nor to the weights then.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a packed weight of another tensor or of
        one that was written into since, and on a CPU, and elsewhere in debug mode, for experts that there are not.
    Source: arXiv:1701.06538; gpt-oss, arXiv:2508.10925.
    """

def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    expert_groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by a router's logits, and weigh them.

    Shapes: logits (T, E), bias (E,) → weights (T, k), experts (T, k), the best first. Of experts whose scores are equal
        any may come first.
    Dtype: logits and bias floating; computes in float32; weights float32, experts int32.
    Args:
        top_k: experts of a token, 1 to E.
        scoring: ``"softmax"`` over all experts, or of each ``"sigmoid"`` or ``"sqrt_softplus"`` (DeepSeek-V4).
        renormalize: divide the weights of a token by their sum. A softmax over the chosen logits alone, as gpt-oss has
            it, is the softmax over all, renormalised.
        bias: added to the scores for the choice; weights are without it (DeepSeek-V3).
        expert_groups, top_groups: choose within so many of so many groups of neighbours alone, those whose two best
            experts have the largest sum. Both or neither.
        scale: what weights are multiplied by, last.
    Returns: (weights, experts). A row with NaN, with ``inf``, or with ``-inf`` alone may name any experts, each once.
    Raises: InvalidCallError for what does not fit, with wanted and got.
    Source: arXiv:1701.06538; DeepSeek-V3, arXiv:2412.19437; gpt-oss, arXiv:2508.10925.
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
        context_lens (B,) → (B, 1, H, D_v), or (T, H, D_v).
    Dtype: query and caches the same floating dtype, or caches of float8_e4m3fn, float8_e5m2 or int8 with scales;
        tables, lengths and starts int32, on the same device.
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
        sinks: (H,), one extra logit a head; with cu_seqlens_q alone, as the next two. All three have a CPU kernel; on
            GPUs kernels for sinks (sm 9.x, bfloat16) and slopes wait for ``layerzero vet``, and the reference computes
            the rest.
        alibi_slopes: (H,) or (B, H).
        tree_mask: (T, columns) bool, for drafts that branch: which of its sequence's new tokens each query sees, by
            their places there, so that row i of a chain of 3 is True up to column i. Each token sees itself, its parent
            and what that one sees. Sequences with more new tokens than columns are chains.
        max_context_len: an upper bound of context_lens that the caller knows; what the tables hold if None. Kernels
            size their work by it. A length above it is the caller's mistake: found on a CPU and in debug mode.
        step: the :class:`layerzero.StepMetadata` of these tables and lengths, so that kernels that plan on the host
            do so once for all layers.
        key_scale, value_scale: of a cache of float8 or int8, what its numbers are multiples of: float32 (), (K,) or
            (P, N, K), whatever the layout.
        narrow_query: over a cache of float8, whether kernels may round queries and probabilities to it as well, as
            FlashAttention 3 does, which multiplies at twice the rate then: by 6 % of each at most.
    Returns: the output, or (output, lse).
    Raises: InvalidCallError for shapes, devices, dtypes or combinations that mean nothing, with wanted and got; in
        debug mode and on a CPU for pages, lengths and starts out of range and a tree mask that is none, too.
        NoKernelFoundError if policy leaves no
        kernel.
    Source: PagedAttention, arXiv:2309.06180.
    """

def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    eps: float = 1e-06,
    plus_one: bool = False,
    interleaved: bool = False,
    layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys by its root mean square, scale it by a weight, then rotate it.

    ``lz.rope(lz.rms_norm(query, q_weight), lz.rms_norm(key, k_weight), cos, sin, positions)`` as one call.

    Shapes: query, key, cos, sin and positions as of ``lz.rope``; q_weight and k_weight (D,) → query's and key's. The
        norm takes all D entries of a head, the rotation the first R.
    Dtype: query, key and both weights the same floating dtype, returned; cos and sin as of ``lz.rope``. Computes in
        float32 or wider; kernels may round between norm and rotation.
    Units: eps in x^2.
    Args:
        plus_one: scale by ``1 + weight``, as Gemma's models do.
        positions, interleaved, layout: as of ``lz.rope``.
    Returns: the normalised and rotated query and key.
    Raises: InvalidCallError as ``lz.rope``, and for weights of another width, or an eps that is negative or not finite.
    Source: Qwen3, arXiv:2505.09388; RoFormer, arXiv:2104.09864.
    """

def qkv_linear(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    kv_features: int | None = None,
    packed_q: PackedWeight | None = None,
    packed_k: PackedWeight | None = None,
    packed_v: PackedWeight | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply one input with the weights of queries, keys and values: ``input @ weight^T + bias`` for each.

    Shapes: input (*, K), q_weight (N_q, K), k_weight (N_k, K), v_weight (N_v, K), biases as many as their weight has
        rows → (*, N_q), (*, N_k), (*, N_v). Or q_weight (N_q + 2 kv_features, K) alone, and q_bias as many, which hold
        queries, keys and values one after the other, as ``torch.cat((q_weight, k_weight, v_weight))``: one product.
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Args:
        kv_features: of a joined weight, the rows of keys, and of values; None for three weights.
        packed_q, packed_k, packed_v: the :class:`layerzero.PackedWeight` of each weight, as for
            :func:`layerzero.linear`; kernels that want them want all. They change no result.
    Returns: queries, keys and values; of a joined weight they may be views of one product, whose rows have gaps then.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for one of k_weight and v_weight without the
        other, for kv_features with three weights or none with one, and for a packed weight of another tensor or of one
        that was written into since.
    """

def quantize(
    input: Tensor,
    dtype: str,
    scale: Tensor | None = None,
    *,
    per: str = "tensor",
    block_size: int | None = None,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Divide numbers by scales and round them to a narrow format, to even where two are as near.

    Shapes: input (*, W) → (*, W), or (*, W / 2) of four bits and (*, 3 W / 4) of six; scales as below
    Dtype: input floating; int8, float8 or, of four and six bits, uint8 with the first number in the lowest bits; scales
        float32, float8_e8m0fnu of the MX formats, float8_e4m3fn of nvfp4.
    Args:
        dtype: ``"int8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``; ``"mxfp8_e4m3"``, ``"mxfp8_e5m2"``, ``"mxfp6_e2m3"``,
            ``"mxfp6_e3m2"`` and ``"mxfp4"`` with a power of two for each 32 numbers; ``"nvfp4"`` with an e4m3 scale for
            each 16.
        scale: what to divide by, for int8 and fp8; float32 above 0: () or (1,) for all numbers, (*, 1) for each row,
            (W,) for each column, (*, W / b) for each block of b. None computes it: the largest absolute value over the
            format's largest number; in int8 1 where all are 0, in float8 at least 1 / (512 * largest), as vLLM.
        per: what has a scale of its own that is computed: ``"tensor"``, ``"row"`` or ``"block"``.
        block_size: how many numbers of a row share a scale, with ``per="block"``.
        tensor_scale: of nvfp4, () or (1,) in float32: what the blocks' scales are multiples of, such as the largest
            absolute value / 2688; 1 if None.
    Returns: the numbers, and their scales: (), (*, 1) or (*, W / block_size); those given as a copy.
    What lies beyond the range of a given scale becomes the largest number (int8: -128 to 127). Infinity makes a
    computed scale infinite (NaN in the MX formats and nvfp4), so that what shares it reads as NaN. NaN stays NaN in
    float8; of a scale's numbers in int8 and fewer bits, where one is NaN, nothing is said. Debug mode refuses what is
    not finite in int8 and fewer bits. Nothing flows back: the results need no gradients.
    Raises: InvalidCallError for an unknown format, for scales whose shape, dtype or device does not fit, and for rows
        that blocks do not divide; in debug mode for scales that are not above 0.
    Source: OCP Microscaling Formats 1.0; arXiv:2209.05433 for float8.
    """

def quantized_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activations: str | None = None,
    out_dtype: torch.dtype | None = None,
    packed: PackedWeight | None = None,
    weight_format: str | None = None,
    weight_zero: Tensor | None = None,
    group_index: Tensor | None = None,
    second_scale: Tensor | None = None,
) -> Tensor:
    """Multiply with a quantised weight: ``input @ (weight * weight_scale)^T + bias``.

    ``weight, weight_scale = lz.quantize(linear.weight, "int8", per="row")`` makes both. A weight as a file holds it is
    a :class:`layerzero.QuantizedWeight`: ``lz.quantized_linear(x, weight)``, or its tensors with ``weight_format``.

    Shapes: input (*, K), weight (N, K), weight_scale (), (1,), (N,) or (N, 1), bias (N,) → (*, N); with a format, the
        tensors of the weight have the shapes of that
    Dtype: input and bias floating, the same; weight int8, float8_e4m3fn or float8_e5m2; weight_scale float32; sums are
        in float32, or of whole numbers; returns out_dtype or input.dtype.
    Args:
        activations: None multiplies the rows as they are. ``"int8"`` with a weight of int8, or ``"fp8_e4m3"`` with one
            of float8_e4m3fn, quantizes each row first, as ``lz.quantize(input, activations, per="row")``: faster, less
            exact, and nothing flows back to the input; of a row that is not finite nothing is said in int8. With a
            format of whole numbers by group ``"int8"`` lets kernels round rows to eight bits in their own way, by a
            scale for each row or for each group of it, with a zero point or without.
        out_dtype: dtype of the result: the input's, or float32 for float16 and bfloat16.
        packed: the :class:`layerzero.PackedWeight` of this weight, so that kernels that want it in another order make
            that once. It changes no result, and has no effect in compiled code.
        weight_format: of a weight as a file holds it, such as ``"gptq:bits=4,group=128,zeros=minus_one"``.
        weight_zero, group_index, second_scale: with a format, the tensors that it has besides. Nothing flows back to
            these, nor to weight and weight_scale then.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for a packed weight of another tensor or
        of one that was written into since.
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

def reduce_scatter(
    input: Tensor,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    group: ProcessGroup | Ranks | None = None,
) -> Tensor:
    """Add up a tensor over all ranks of a group; each gets its piece of the sum, in the order of the ranks.

    Shapes: input (*), the same on all ranks → (*) with the axis ``scatter_dim`` so many times shorter, contiguous
    Dtype: floating, int32 or int64, returned.
    Args:
        scatter_dim: along which axis.
        reduce_op: ``sum``, ``max`` or ``min``.
        group: whose ranks; the default group if None.
    Raises: InvalidCallError for an axis that is not there, or that the number of ranks does not divide, and as
        :func:`all_reduce` does.
    """

def relu2(input: Tensor) -> Tensor:
    """Apply the squared rectified linear unit: ``max(x, 0)^2``.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype.
    Raises: InvalidCallError for other dtypes.
    Source: arXiv:2109.08668.
    """

def rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-06) -> Tensor:
    """Normalise the last axis by its root mean square and scale by the weight.

    Shapes: input (*, D), weight (D,) → (*, D)
    Dtype: floating; sums are in float32; returns input.dtype. Where they differ, both are cast to the wider one, at
        least float32, and the result to input.dtype, as torch computes.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:1910.07467.
    """

def rope(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions; ``lz.rope_one`` rotates one tensor.

    Shapes: query (T, H, D), key (T, K, D), positions (T,); or query (B, S, H, D), key (B, S, K, D), positions (B, S),
        (1, S) or (S,), axes 1 and 2 of query and key swapped in BHSD; cos and sin (P, R/2), R at most D → query's and
        key's. Entries of a head from R on pass through.
    Dtype: query and key the same floating dtype, returned; cos and sin floating, the same for both, float32 at best;
        positions int32 or int64. Computes in float32 or wider.
    Args:
        cos, sin: a row for each position. ``lz.rope_table`` makes them side by side in one tensor, which kernels that
            want them joined read without a copy.
        positions: the row of each token; 0 to S-1 if None. Rows beyond the table are the caller's mistake: an error on
            a CPU, and in debug mode elsewhere.
        interleaved: pairs are entries 2i and 2i + 1 (GPT-J, GGUF files), not i and i + R/2 (GPT-NeoX, Transformers).
        layout: ``"BSHD"`` or ``"BHSD"``, for four axes; by default what shapes and positions say, an error where
            both fit. Of three axes the first are tokens.
    Returns: the rotated query and key.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for a sequence longer than the table without
        positions; on a CPU and in debug mode for positions beyond it, too.
    Source: RoFormer, arXiv:2104.09864.
    """

def rope_(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str | None = None,
) -> None:
    """Rotate queries and keys in place, as ``lz.rope`` does; views of one projection's output may be given.

    Shapes, dtypes, arguments and source as of ``lz.rope``. Writes over the first R entries of each head of query and
    key, and returns nothing.
    Raises: InvalidCallError as ``lz.rope``, and for a query or key that needs gradients as a leaf, that overlaps itself
        in memory, or that shares elements with the other or with the table.
    """

def rope_append_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    interleaved: bool = False,
    layout: str = "NHD",
) -> Tensor:
    """Rotate queries and keys, write keys and values into a cache in place, and return the queries.

    ``lz.rope`` and ``lz.append_paged_kv_`` as one call, or a write into a contiguous cache where there are no slots.

    Shapes: paged: query (T, H, D), key (T, K, D), value (T, K, D_v), positions and slot_mapping (T,), caches (P, N, K,
        D) and (P, N, K, D_v) in NHD; contiguous: query (B, S, H, D), key (B, S, K, D), value (B, S, K, D_v), positions
        (B, S), (1, S) or (S,), caches (B, L, K, D) and (B, L, K, D_v) in NHD. Axes 1 and 2 of caches are swapped in
        HND. cos and sin (P, R/2), R at most D; scales (), (K,) or (P, N, K) → query's.
    Dtype: queries, keys, values and caches the same floating dtype, or paged caches of float8_e4m3fn, float8_e5m2 or
        int8 with float32 scales; cos, sin and positions as of ``lz.rope``; slot_mapping int64.
    Args:
        positions: the row of the table for each token; of a contiguous cache also where it is written to, so that the
            table has a row for each of L places, and each place of a sequence comes once.
        slot_mapping: of a paged cache, ``page * page_size + offset`` of each token, -1 for padding, each slot at most
            once, as ``StepMetadata.slot_mapping`` makes it; None for a contiguous one.
        key_scale, value_scale: of a cache of float8 or int8, as of ``lz.append_quantized_kv_``; None for others.
        interleaved: as of ``lz.rope``.
        layout: of the caches, ``"NHD"`` or ``"HND"``.
    Returns: the rotated query. Rotated keys are in the cache alone.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share elements with what is
        read or with each other, before anything is written; on a CPU and in debug mode for positions and slots that
        lead nowhere or are named twice, too.
    Source: RoFormer, arXiv:2104.09864; reshape_and_cache of vLLM, arXiv:2309.06180.
    """

def rope_one(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str | None = None,
) -> Tensor:
    """Rotate one tensor by the angles of its positions, as ``lz.rope`` rotates queries and keys.

    For keys that are rotated apart from their queries, and for the part of latent attention's keys that heads share.

    Shapes: input (T, H, D), positions (T,); or input (B, S, H, D), positions (B, S), (1, S) or (S,), axes 1 and 2 of
        input swapped in BHSD; cos and sin (P, R/2), R at most D → input's. Entries of a head from R on pass through.
    Dtype: input floating, returned; the rest as of ``lz.rope``.
    Args:
        cos, sin, positions, interleaved: as of ``lz.rope``.
        layout: ``"BSHD"`` or ``"BHSD"``, for four axes; by default the configured one, else what strides and positions
            say, else BSHD with a warning. Of three axes the first are tokens.
    Raises: InvalidCallError as ``lz.rope``.
    Source: RoFormer, arXiv:2104.09864.
    """

def sample(
    logits: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row by its probability, among those that top_k, top_p and min_p keep.

    What is None keeps all. Top-k comes first, then top-p of what the top_k likeliest have, then min-p. A batch
    of requests is one call: each argument may be a tensor with a number for each row. With a seed for each
    row a draw depends on its own row alone, wherever that is in whatever batch.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. In an int32 or int64 tensor 0 and less is 1.
        top_p: the share that the likeliest have together, above 0 and up to 1. In a float32 tensor 0 and less keeps the
            likeliest.
        min_p: the share of the likeliest place's probability, above 0 and up to 1. Of a float32 tensor 0 keeps all.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0. Or an int64 tensor (*) with one
            for each row: each draw of a request wants another, such as ``request_seed * 2**32 + position``.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    """

def sample_minp(
    logits: Tensor,
    min_p: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among those at least min_p times as likely as the likeliest.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        min_p: the share of the likeliest place's probability, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps all, 1 and more the likeliest place.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:2407.01082.
    """

def sample_minp_probs(
    probs: Tensor,
    min_p: float | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among those at least min_p times as likely as the likeliest, from probabilities.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        min_p: the share of the likeliest place's probability, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps all, 1 and more the likeliest place.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:2407.01082.
    """

def sample_probs(
    probs: Tensor,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row by its probability, among those that top_k, top_p and min_p keep, from probabilities.

    What is None keeps all. Top-k comes first, then top-p of what the top_k likeliest have, then min-p. A batch
    of requests is one call: each argument may be a tensor with a number for each row. With a seed for each
    row a draw depends on its own row alone, wherever that is in whatever batch.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. In an int32 or int64 tensor 0 and less is 1.
        top_p: the share that the likeliest have together, above 0 and up to 1. In a float32 tensor 0 and less keeps the
            likeliest.
        min_p: the share of the likeliest place's probability, above 0 and up to 1. Of a float32 tensor 0 keeps all.
        seed: gives the same ids wherever the same kernel runs the same call; from 0. Or an int64 tensor (*) with one
            for each row: each draw of a request wants another, such as ``request_seed * 2**32 + position``.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    """

def sample_topk(
    logits: Tensor,
    top_k: int | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the top_k likeliest.

    A place is kept if fewer than top_k are likelier: places that tie with the last of them are kept, too.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. Or an int32 or int64 tensor (*) with a number for
            each row, where 0 and less is 1.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833.
    """

def sample_topk_probs(
    probs: Tensor,
    top_k: int | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the top_k likeliest, from probabilities.

    A place is kept if fewer than top_k are likelier: places that tie with the last of them are kept, too.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. Or an int32 or int64 tensor (*) with a number for
            each row, where 0 and less is 1.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833.
    """

def sample_topk_topp(
    logits: Tensor,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place among the top_k likeliest, and of these among those that have the share top_p.

    A place is kept if fewer than top_k are likelier, and if those that are likelier have less than the share
    top_p of what such places have together: top-k first, then top-p of the rest, as engines do.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. Or an int32 or int64 tensor (*) with a number for
            each row, where 0 and less is 1.
        top_p: the share of what the top_k likeliest have, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps the likeliest place, 1 and more all.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833, arXiv:1904.09751.
    """

def sample_topk_topp_probs(
    probs: Tensor,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place among the top_k likeliest, and of these among those that have the share top_p, from probabilities.

    A place is kept if fewer than top_k are likelier, and if those that are likelier have less than the share
    top_p of what such places have together: top-k first, then top-p of the rest, as engines do.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        top_k: how many places, from 1; more than there are keep all. Or an int32 or int64 tensor (*) with a number for
            each row, where 0 and less is 1.
        top_p: the share of what the top_k likeliest have, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps the likeliest place, 1 and more all.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1805.04833, arXiv:1904.09751.
    """

def sample_topp(
    logits: Tensor,
    top_p: float | Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the likeliest that have the share top_p together.

    A place is kept if those that are likelier have less than top_p together: at least one, and all equals of the last.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; computes in float32 or wider; returns int64.
    Args:
        top_p: the share, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps the likeliest place, 1 and more all.
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        +inf, -inf everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1904.09751.
    """

def sample_topp_probs(
    probs: Tensor,
    top_p: float | Tensor | None = None,
    *,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a place of each row among the likeliest that have the share top_p together, from probabilities.

    A place is kept if those that are likelier have less than top_p together: at least one, and all equals of the last.

    Shapes: probs (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; each row adds up to 1 but for rounding; returns int64.
    Args:
        top_p: the share, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps the likeliest place, 1 and more all.
        seed: gives the same ids wherever the same kernel runs the same call; from 0.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        infinity, a number below 0, 0 everywhere. On a GPU, where looking means waiting, such a row gives some place.
    Source: arXiv:1904.09751.
    """

def silu(input: Tensor) -> Tensor:
    """Apply the sigmoid linear unit: ``x / (1 + exp(-x))``.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype.
    Raises: InvalidCallError for other dtypes.
    Source: arXiv:1702.03118.
    """

def silu_mul(input: Tensor, up: Tensor | None = None) -> Tensor:
    """Multiply the SiLU of a gate with what it lets through: ``silu(gate) * up``.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D), the gate first, as one product with the two
        weights joined makes them.
    Dtype: floating, the same for both; computes in float32; returns input.dtype.
    Args:
        input: the gate, or gate and up.
        up: what the gate lets through; None if it is in the input.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:2002.05202.
    """

def softmax(input: Tensor, *, temperature: float | None = None) -> Tensor:
    """Bring the exponentials of a row to a sum of 1: ``exp(x / t) / sum(exp(x / t))`` over the last axis.

    Shapes: input (*, D) → (*, D)
    Dtype: floating; computes in float32 or wider; returns input.dtype.
    Args:
        temperature: what is divided by, 1e-6 to 1e6; 1 if None.
    Raises: InvalidCallError for other dtypes. A row of -inf alone, or with NaN or +inf in it, gives NaN.
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

def split_qkv(qkv: Tensor, kv_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take a joined product apart into queries, keys and values, each in memory of its own.

    ``lz.split_qkv_norm_rope`` does so and rotates, ``lz.qkv_linear`` makes the parts at once.

    Shapes: qkv (*, N + 2 M), queries first, then keys, then values → (*, N), (*, M), (*, M), contiguous
    Dtype: floating, returned.
    Args:
        kv_features: M, the numbers of a token's keys, and of its values.
    Raises: InvalidCallError for other dtypes, and for parts that leave no queries.
    """

def split_qkv_norm_rope(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-06,
    plus_one: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take a joined product apart into queries, keys and values; norm and rotate queries and keys.

    What lies between ``lz.linear`` with joined weights and the attention, as one call: ``lz.qk_norm_rope`` where there
    are weights, ``lz.rope`` where there are none.

    Shapes: qkv (T, (H + 2 K) * D) or (B, S, (H + 2 K) * D), a token's queries first, then its keys, then its values;
        cos and sin (P, R/2), R at most D; positions (T,), or (B, S), (1, S) or (S,); q_weight and k_weight (D,)
        → (T, H, D), (T, K, D), (T, K, D), or with B and S in place of T.
    Dtype: qkv and weights the same floating dtype, returned; cos, sin and positions as of ``lz.rope``.
    Units: eps in x^2.
    Args:
        heads, kv_heads: H and K; D is what is left.
        q_weight, k_weight: scale the root mean square norm of each head; both or none. eps and plus_one do nothing
            without them.
        eps, plus_one: as of ``lz.qk_norm_rope``.
        positions, interleaved: as of ``lz.rope``.
    Returns: queries, keys and values; none of them shares memory with qkv, all three may lie in one tensor.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for a width that is no multiple of
        H + 2 K, for one weight without the other; on a CPU and in debug mode for positions beyond the table, too.
    Source: Qwen3, arXiv:2505.09388; RoFormer, arXiv:2104.09864.
    """

def split_qkv_norm_rope_append_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-06,
    plus_one: bool = False,
    interleaved: bool = False,
    layout: str = "NHD",
) -> Tensor:
    """Take a joined product apart, norm and rotate queries and keys, write keys and values into a cache in place.

    ``lz.split_qkv_norm_rope`` and an append as one call: all that lies between ``lz.linear`` with joined weights and
    the attention over a cache.

    Shapes: paged: qkv (T, (H + 2 K) * D), a token's queries first, then its keys, then its values, positions and
        slot_mapping (T,), caches (P, N, K, D) in NHD → (T, H, D); contiguous: qkv (B, S, (H + 2 K) * D), positions
        (B, S), (1, S) or (S,), caches (B, L, K, D) in NHD → (B, S, H, D). Axes 1 and 2 of caches are swapped in HND.
        cos and sin (P, R/2), R at most D; q_weight and k_weight (D,). K and D are the cache's, H is what is left.
    Dtype: qkv, weights and caches the same floating dtype; cos, sin and positions as of ``lz.rope``; slot_mapping
        int64.
    Units: eps in x^2.
    Args:
        positions, slot_mapping, layout: as of ``lz.rope_append_``.
        q_weight, k_weight, eps, plus_one, interleaved: as of ``lz.split_qkv_norm_rope``.
    Returns: the queries. Keys and values are in the cache alone.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for a width that leaves no queries, for one
        weight without the other, for caches that share elements with what is read or with each other, before anything
        is written; on a CPU and in debug mode for positions and slots that lead nowhere or are
        named twice, too.
    Source: Qwen3, arXiv:2505.09388; RoFormer, arXiv:2104.09864; reshape_and_cache of vLLM, arXiv:2309.06180.
    """

def swiglu_oai(input: Tensor, up: Tensor | None = None, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Apply gpt-oss's gate: ``g * sigmoid(alpha * g) * (u + 1)``, with the gate clamped from above, up on both sides.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D) **by turns**: gate 0, up 0, gate 1, up 1, …
    Dtype: floating, the same for both; computes in float32; returns input.dtype.
    Args:
        input: the gate, or gate and up by turns.
        up: what the gate lets through; None if it is in the input.
        alpha: factor on the gate within the sigmoid.
        limit: what the gate is at most, and up on either side; above 0.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for numbers that mean nothing.
    Source: gpt-oss, arXiv:2508.10925.
    """

def tokenize(
    texts: str | list[str],
    tokenizer_id: Any,
    return_offsets: bool = False,
    *,
    add_special_tokens: bool | None = None,
    parse_special: bool | None = None,
    truncation: bool | str = False,
    max_length: int | None = None,
    padding: bool | str = False,
    pad_to_multiple_of: int | None = None,
    return_attention_mask: bool | None = None,
) -> dict[str, list[Any]]:
    """Encode a text, or several: ``{"input_ids": [...]}``, a list of ids, or one for each text.

    The ids are those of the library that defines the tokenizer, whichever library computes them.

    Args:
        texts: a string, or a list or tuple of strings.
        tokenizer_id: a folder or file (tokenizer.json, tiktoken ranks, SentencePiece .model, tekken.json), the name of
            a tiktoken encoding, or an object of tokenizers, tiktoken, sentencepiece or transformers. It is read once,
            and anew where the file or object changed; :mod:`layerzero.ops.tokenize.identity` says what is compared at
            each call, and what needs ``lz.forget_tokenizer``. Nothing is downloaded.
        return_offsets: also ``offset_mapping``: for each id, where its characters begin and end in the text; (0, 0) of
            what was added.
        add_special_tokens: whether what the tokenizer puts around a text is added; None does what its library does: a
            tokenizer.json adds it, ranks and SentencePiece models do not.
        parse_special: whether texts of special tokens become these tokens; None does what its library does: a
            tokenizer.json parses them, tiktoken's encodings take them as text. SentencePiece always does that.
        truncation: whether texts are cut to ``max_length`` ids, special tokens included.
        max_length: in ids; what the tokenizer says that its model takes if None.
        padding: ``True`` or ``"longest"`` fills rows up to the longest, ``"max_length"`` up to that.
        pad_to_multiple_of: round the length of rows up.
        return_attention_mask: also ``attention_mask``, 1 for ids and 0 for what was filled up; as ``padding`` if None.
    Raises: InvalidCallError for what is no text (a lone surrogate is none), an unknown or broken tokenizer, and
        arguments that mean nothing; NoKernelFoundError where no installed library is exact for it.
    """

def transpose_head_token(input: Tensor) -> Tensor:
    """Write heads before tokens as tokens before heads, into memory of its own.

    Where a view will do, ``input.transpose(-2, -3)`` costs nothing; kernels that want dense memory want this.

    Shapes: input (*, H, T, D) → (*, T, H, D), contiguous
    Dtype: floating, returned.
    Raises: InvalidCallError for other dtypes, and for fewer than three axes.
    """

def transpose_token_head(input: Tensor) -> Tensor:
    """Write tokens before heads as heads before tokens, into memory of its own.

    Shapes: input (*, T, H, D) → (*, H, T, D), contiguous
    Dtype: floating, returned.
    Raises: InvalidCallError for other dtypes, and for fewer than three axes.
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

def verify_speculative(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    parents: Tensor | None = None,
    *,
    draft_lens: Tensor | None = None,
    greedy: bool = False,
    seed: int | Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Tell which drafted tokens stand, and draw the one behind them, so that tokens come as the target draws them.

    A node is tried if the one that it follows was the last to stand, in the order of the nodes. It stands with the
    probability ``min(1, p / q)`` of what target and draft gave its token; where it falls, ``max(p - q, 0)`` is left for
    its siblings, and for the next token. A draft that was drawn without putting back has rows of what was left.

    One call serves chains, trees and rows without a draft: a chain's parents are -1, 0, 1, ..., and ``draft_lens`` says
    how many nodes each row has.

    Shapes: draft_ids (B, N), target_probs (B, N + 1, V), draft_probs (B, N, V), parents (B, N), draft_lens (B,)
        → ids (B, N + 1), the tokens that are said, and nodes (B, N), those that stood in their order; both -1 behind
        the last.
    Dtype: probabilities floating, the same for both, rows add up to 1 but for rounding; integers int32 or int64;
        computes in float32 or wider; returns int64.
    Args:
        draft_ids: the drafted tokens, from 0 to V - 1.
        target_probs: what the target gives at the root, and behind each node.
        draft_probs: what each token was drawn from; None where the draft was certain.
        parents: the node that each one follows, which comes before it, -1 for the root; None for a chain. A node whose
            parent comes later is never tried.
        draft_lens: how many nodes each row has, from 0 to N; N if None. What is behind them is not read: any token and
            any probabilities may be there, as rows of another request.
        greedy: a token stands if it is the target's likeliest, the first of equals; logits do as well then.
        seed: gives the same tokens wherever the same kernel runs the same call; from 0. Or an int64 tensor (B,) with
            one for each row, whose tokens then depend on that row alone; see ``lz.sample``, which draws by the same
            seed apart from this, so that a draft may have been drawn by it.
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None.
    Raises: InvalidCallError for what does not fit, and on a CPU for ids beyond the vocabulary, for rows of the target
        that nothing can be drawn of, and for draft_probs with NaN, infinity or numbers below 0 (rows of zeros may be).
        On a GPU, where looking means waiting, such a row gives some token.
    Source: arXiv:2211.17192, arXiv:2302.01318; of trees arXiv:2305.09781.
    """
