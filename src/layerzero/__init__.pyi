# ruff: noqa: A002  # torch's argument names
from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from layerzero import testing
from layerzero.asking.answers import doctor, explain, facts, list_kernels, list_operations, validate, which
from layerzero.asking.bind import bind
from layerzero.asking.control import (
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
)
from layerzero.asking.descriptors import descriptor, kernels_from_descriptor, load_descriptor, unload_descriptor
from layerzero.asking.freeze import freeze, frozen, thaw
from layerzero.core import limits
from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.device import Device
from layerzero.core.errors import (
    CudaGraphUnsafeError,
    DescriptorError,
    FrozenChoiceError,
    InvalidCallError,
    KernelExecutionError,
    LayerZeroError,
    LayerZeroFallbackWarning,
    LayerZeroLayoutWarning,
    LayerZeroPerformanceWarning,
    LayerZeroWarning,
    NoKernelFoundError,
    PolicyError,
    RegistrationError,
)
from layerzero.core.facts import Facts, FactsBuilder
from layerzero.core.handle import Handle
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.operation import Case, Function, Operation, OpKind, Tolerance
from layerzero.core.plan import Plan, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.schema import OperationSchema
from layerzero.engine.functions import register_function
from layerzero.engine.probe import Machine
from layerzero.integrations.transformers import register_with_transformers
from layerzero.ops.paged.step import StepMetadata
from layerzero.serving.warmup import warmup
from layerzero.tuning.measuring.online import sampled
from layerzero.tuning.measuring.record import record
from layerzero.tuning.measuring.tune import tune
from layerzero.tuning.proving.confirm import confirm_suspects
from layerzero.tuning.proving.vetting import vet

__all__ = [
    "Axis",
    "Backend",
    "Case",
    "CudaGraphUnsafeError",
    "DescriptorError",
    "Device",
    "DeviceSpec",
    "ExecutionPlan",
    "Facts",
    "FactsBuilder",
    "FrozenChoiceError",
    "Function",
    "Handle",
    "InvalidCallError",
    "Kernel",
    "KernelExecutionError",
    "KernelSpec",
    "LayerZeroError",
    "LayerZeroFallbackWarning",
    "LayerZeroLayoutWarning",
    "LayerZeroPerformanceWarning",
    "LayerZeroWarning",
    "Machine",
    "NoKernelFoundError",
    "OpKind",
    "Operation",
    "OperationSchema",
    "Param",
    "Plan",
    "PolicyError",
    "Reason",
    "ReasonCode",
    "RegistrationError",
    "Report",
    "Role",
    "SelectionContext",
    "SelectionContextBuilder",
    "SelectionReport",
    "StepMetadata",
    "TensorSchema",
    "Tolerance",
    "__version__",
    "add_rms_norm",
    "append_paged_kv",
    "attention",
    "avoid",
    "bind",
    "configure",
    "confirm_suspects",
    "descriptor",
    "deterministic",
    "disabled",
    "doctor",
    "explain",
    "facts",
    "freeze",
    "frozen",
    "kernels_from_descriptor",
    "layer_norm",
    "limits",
    "list_kernels",
    "list_operations",
    "load_config",
    "load_descriptor",
    "lock",
    "paged_attention",
    "prefer",
    "record",
    "register_backend",
    "register_function",
    "register_kernel",
    "register_operation",
    "register_with_transformers",
    "rms_norm",
    "sampled",
    "scope",
    "testing",
    "thaw",
    "tune",
    "unload_descriptor",
    "unlock",
    "unregister_kernel",
    "validate",
    "vet",
    "warmup",
    "which",
]

__version__: str

DeviceSpec = Device
SelectionContext = Facts
SelectionContextBuilder = FactsBuilder
KernelSpec = Kernel
ExecutionPlan = Plan
SelectionReport = Report

@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = True,
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
    causal: bool = True,
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
    causal: bool = True,
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
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    return_lse: bool,
    max_context_len: int | None = None,
    step: StepMetadata | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def append_paged_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
) -> None: ...
def rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-06) -> Tensor: ...
def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor: ...
def add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-06) -> Tensor: ...
