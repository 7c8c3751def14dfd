"""Why a kernel is refused: one closed catalogue of codes, and reasons whose text is made on demand.

A code is added together with the limit or the engine step that produces it; a test fails for a code that nothing
produces through a public function.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ReasonCode(StrEnum):
    """Machine-readable codes. The value is the name, so it survives JSON and logs."""

    # the device
    PLATFORM_MISMATCH = "PLATFORM_MISMATCH"
    SM_TOO_OLD = "SM_TOO_OLD"
    SM_TOO_NEW = "SM_TOO_NEW"
    INSTRUCTION_SET_MISMATCH = "INSTRUCTION_SET_MISMATCH"
    DEVICE_CAPABILITY_UNSUPPORTED = "DEVICE_CAPABILITY_UNSUPPORTED"
    GPU_GENERATION_UNSUPPORTED = "GPU_GENERATION_UNSUPPORTED"
    TENSOR_CORE_GEN_UNSUPPORTED = "TENSOR_CORE_GEN_UNSUPPORTED"
    # the launch
    CUDA_GRID_DIM_EXCEEDED = "CUDA_GRID_DIM_EXCEEDED"
    CUDA_BLOCK_LIMIT_EXCEEDED = "CUDA_BLOCK_LIMIT_EXCEEDED"
    # sizes and dtypes
    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED"
    HEAD_DIM_INVALID = "HEAD_DIM_INVALID"
    HEAD_DIM_ALIGNMENT = "HEAD_DIM_ALIGNMENT"
    HEAD_DIM_TOO_LARGE = "HEAD_DIM_TOO_LARGE"
    SEQ_TOO_LONG = "SEQ_TOO_LONG"
    GQA_UNSUPPORTED = "GQA_UNSUPPORTED"
    GQA_HEADS_MISMATCH = "GQA_HEADS_MISMATCH"
    # numbers of a weight
    QUANT_FORMAT_UNSUPPORTED = "QUANT_FORMAT_UNSUPPORTED"
    REQUANTIZATION_REQUIRED = "REQUANTIZATION_REQUIRED"
    QUANT_ACCURACY_THRESHOLD_EXCEEDED = "QUANT_ACCURACY_THRESHOLD_EXCEEDED"
    PACKED_WEIGHTS_REQUIRED = "PACKED_WEIGHTS_REQUIRED"
    # memory layout
    STRIDE_LAST_DIM = "STRIDE_LAST_DIM"
    NOT_CONTIGUOUS = "NOT_CONTIGUOUS"
    MISALIGNED = "MISALIGNED"
    KV_CACHE_LAYOUT_MISMATCH = "KV_CACHE_LAYOUT_MISMATCH"
    KV_CACHE_DTYPE_MISMATCH = "KV_CACHE_DTYPE_MISMATCH"
    KV_CACHE_EXHAUSTED = "KV_CACHE_EXHAUSTED"
    KV_STRATEGY_UNSUPPORTED = "KV_STRATEGY_UNSUPPORTED"
    VIRTUAL_MEMORY_EXHAUSTED = "VIRTUAL_MEMORY_EXHAUSTED"
    DRIVER_VERSION_UNSUPPORTED = "DRIVER_VERSION_UNSUPPORTED"
    # drafts and the target that verifies them
    SPEC_DECODE_PP_INCOMPATIBLE = "SPEC_DECODE_PP_INCOMPATIBLE"
    SPEC_DECODE_DRAFT_TP_CONSTRAINT = "SPEC_DECODE_DRAFT_TP_CONSTRAINT"
    SPEC_DECODE_KV_INCOMPATIBLE = "SPEC_DECODE_KV_INCOMPATIBLE"
    SPEC_DECODE_ALGORITHM_UNSUPPORTED = "SPEC_DECODE_ALGORITHM_UNSUPPORTED"
    # arguments
    ATTN_MASK_UNSUPPORTED = "ATTN_MASK_UNSUPPORTED"
    ATTN_MASK_INVALID = "ATTN_MASK_INVALID"
    DROPOUT_UNSUPPORTED = "DROPOUT_UNSUPPORTED"
    WINDOW_UNSUPPORTED = "WINDOW_UNSUPPORTED"
    SOFTCAP_UNSUPPORTED = "SOFTCAP_UNSUPPORTED"
    LSE_UNSUPPORTED = "LSE_UNSUPPORTED"
    CONSTRAINT_FAILED = "CONSTRAINT_FAILED"
    # the tokenizer
    TOKENIZER_ID_MISMATCH = "TOKENIZER_ID_MISMATCH"
    VOCAB_HASH_MISMATCH = "VOCAB_HASH_MISMATCH"
    MERGES_HASH_MISMATCH = "MERGES_HASH_MISMATCH"
    NORMALIZER_MISMATCH = "NORMALIZER_MISMATCH"
    ADDED_TOKENS_MISMATCH = "ADDED_TOKENS_MISMATCH"
    SPECIAL_TOKENS_MISMATCH = "SPECIAL_TOKENS_MISMATCH"
    # how the call runs
    GRAD_UNSUPPORTED = "GRAD_UNSUPPORTED"
    NON_DETERMINISTIC = "NON_DETERMINISTIC"
    BATCH_INVARIANCE_REQUIRED = "BATCH_INVARIANCE_REQUIRED"
    TP_INVARIANCE_REQUIRED = "TP_INVARIANCE_REQUIRED"
    TP_SIZE_EXCEEDED = "TP_SIZE_EXCEEDED"
    REDUCTION_ORDER_MISMATCH = "REDUCTION_ORDER_MISMATCH"
    CUDA_GRAPH_UNSAFE = "CUDA_GRAPH_UNSAFE"
    JIT_DISABLED = "JIT_DISABLED"
    JIT_CACHE_INCOMPLETE = "JIT_CACHE_INCOMPLETE"
    MEMORY_HEADROOM_EXCEEDED = "MEMORY_HEADROOM_EXCEEDED"
    PLAN_BUCKET_MISS = "PLAN_BUCKET_MISS"
    # the library
    NOT_INSTALLED = "NOT_INSTALLED"
    BACKEND_IMPORT_FAILED = "BACKEND_IMPORT_FAILED"
    VERSION_UNSUPPORTED = "VERSION_UNSUPPORTED"
    CAPABILITIES_SCHEMA_MISMATCH = "CAPABILITIES_SCHEMA_MISMATCH"
    # trust and policy
    BACKEND_ERROR = "BACKEND_ERROR"
    UNHEALTHY = "UNHEALTHY"
    NOT_VETTED = "NOT_VETTED"
    HUB_REFUSED = "HUB_REFUSED"
    POLICY_DENIED = "POLICY_DENIED"
    # a process of its own
    ISOLATION_UNSUPPORTED = "ISOLATION_UNSUPPORTED"


_TEXT: dict[ReasonCode, str] = {
    ReasonCode.PLATFORM_MISMATCH: "made for {wanted}, this device is {got}",
    ReasonCode.SM_TOO_OLD: "needs compute capability {wanted}, the device has {got}",
    ReasonCode.SM_TOO_NEW: "works up to compute capability {wanted}, the device has {got}",
    ReasonCode.INSTRUCTION_SET_MISMATCH: "needs the {wanted} instructions, the device has {got}",
    ReasonCode.DEVICE_CAPABILITY_UNSUPPORTED: "needs the device feature {wanted}, the device has {got}",
    ReasonCode.GPU_GENERATION_UNSUPPORTED: "made for {wanted}, the device's generation is {got}",
    ReasonCode.TENSOR_CORE_GEN_UNSUPPORTED: "needs tensor cores of generation {wanted}, the device has {got}",
    ReasonCode.CUDA_GRID_DIM_EXCEEDED: "{fact} may be {wanted} here, it would launch {got}",
    ReasonCode.CUDA_BLOCK_LIMIT_EXCEEDED: "may launch {wanted} {fact}, it would launch {got}",
    ReasonCode.DTYPE_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.HEAD_DIM_INVALID: "{fact} must be {wanted}, is {got}",
    ReasonCode.HEAD_DIM_ALIGNMENT: "{fact} must be {wanted}, is {got}",
    ReasonCode.HEAD_DIM_TOO_LARGE: "{fact} must be {wanted}, is {got}",
    ReasonCode.SEQ_TOO_LONG: "{fact} must be {wanted}, is {got}",
    ReasonCode.GQA_UNSUPPORTED: "needs as many kv heads as query heads ({wanted}), got {got}",
    ReasonCode.GQA_HEADS_MISMATCH: "query heads must be a multiple of kv heads: wanted {wanted}, got {got}",
    ReasonCode.QUANT_FORMAT_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.REQUANTIZATION_REQUIRED: "{fact}: wanted {wanted}, got {got}",
    ReasonCode.QUANT_ACCURACY_THRESHOLD_EXCEEDED: "{fact}: wanted {wanted}, got {got}",
    ReasonCode.PACKED_WEIGHTS_REQUIRED: "{fact} must be {wanted}, is {got}",
    ReasonCode.STRIDE_LAST_DIM: "stride(-1) of {fact} must be {wanted}, is {got}",
    ReasonCode.NOT_CONTIGUOUS: "{fact} must be {wanted}, has {got}",
    ReasonCode.KV_CACHE_LAYOUT_MISMATCH: "{fact} is written in layout {wanted}, the call names {got}",
    ReasonCode.KV_CACHE_DTYPE_MISMATCH: "{fact} must be {wanted}, is {got}",
    ReasonCode.KV_CACHE_EXHAUSTED: "{fact}: wanted {wanted}, got {got}",
    ReasonCode.KV_STRATEGY_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.VIRTUAL_MEMORY_EXHAUSTED: "{fact}: wanted {wanted}, got {got}",
    ReasonCode.DRIVER_VERSION_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.SPEC_DECODE_PP_INCOMPATIBLE: "{fact} must be {wanted} for drafts to be checked, is {got}",
    ReasonCode.SPEC_DECODE_DRAFT_TP_CONSTRAINT: "{fact} must be {wanted}, is {got}",
    ReasonCode.SPEC_DECODE_KV_INCOMPATIBLE: "{fact}: wanted {wanted}, got {got}",
    ReasonCode.SPEC_DECODE_ALGORITHM_UNSUPPORTED: "{fact}: wanted {wanted}, got {got}",
    ReasonCode.MISALIGNED: "every row of {fact} must start at a multiple of {wanted}, they start at {got}",
    ReasonCode.ATTN_MASK_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.ATTN_MASK_INVALID: "{fact} must be {wanted}, is {got}",
    ReasonCode.DROPOUT_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.WINDOW_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.SOFTCAP_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.LSE_UNSUPPORTED: "cannot return the log-sum-exp ({fact} must be {wanted}, is {got})",
    ReasonCode.CONSTRAINT_FAILED: "{fact} must be {wanted}, is {got}",
    ReasonCode.TOKENIZER_ID_MISMATCH: "made for tokenizers whose {fact} is {wanted}, this one's is {got}",
    ReasonCode.VOCAB_HASH_MISMATCH: "has the vocabulary {wanted}, this tokenizer's {fact} is {got}",
    ReasonCode.MERGES_HASH_MISMATCH: "has the merges {wanted}, this tokenizer's {fact} is {got}",
    ReasonCode.NORMALIZER_MISMATCH: "takes tokenizers whose {fact} is {wanted}, this one's is {got}",
    ReasonCode.ADDED_TOKENS_MISMATCH: "takes tokenizers whose {fact} are {wanted}, this one's are {got}",
    ReasonCode.SPECIAL_TOKENS_MISMATCH: "has special pieces of its own: {fact} must be {wanted}, is {got}",
    ReasonCode.GRAD_UNSUPPORTED: "has no backward pass: {fact} must be {wanted}, is {got}",
    ReasonCode.NON_DETERMINISTIC: "wanted {wanted} results, this kernel is {got}",
    ReasonCode.BATCH_INVARIANCE_REQUIRED: "{fact}: wanted {wanted}, this kernel is {got}",
    ReasonCode.TP_INVARIANCE_REQUIRED: "{fact}: wanted {wanted}, this kernel is {got}",
    ReasonCode.TP_SIZE_EXCEEDED: "{fact} may be {wanted}, is {got}",
    ReasonCode.REDUCTION_ORDER_MISMATCH: "{fact}: wanted {wanted}, it adds up in {got}",
    ReasonCode.CUDA_GRAPH_UNSAFE: "a CUDA graph is being captured: the kernel must be {wanted}, is {got}",
    ReasonCode.JIT_DISABLED: "its compiled artefact is {got}, it must be {wanted} before it may be chosen",
    ReasonCode.JIT_CACHE_INCOMPLETE: "{fact}: {wanted} would run and is not built, {got} runs in its place",
    ReasonCode.MEMORY_HEADROOM_EXCEEDED: "needs a workspace of {got}, {fact} allows {wanted}",
    ReasonCode.PLAN_BUCKET_MISS: "outside of the plan's buckets: {fact} must be {wanted}, is {got}",
    ReasonCode.NOT_INSTALLED: "{fact} is {got}, {wanted} is needed",
    ReasonCode.BACKEND_IMPORT_FAILED: "{fact} is installed but does not load: {got}",
    ReasonCode.VERSION_UNSUPPORTED: "{fact} must be {wanted}, is {got}",
    ReasonCode.CAPABILITIES_SCHEMA_MISMATCH: "{fact}: wanted {wanted}, got {got}",
    ReasonCode.BACKEND_ERROR: "failed while running {fact}: {got}",
    ReasonCode.UNHEALTHY: "{fact}: {got}; wanted {wanted}",
    ReasonCode.NOT_VETTED: "has not proved itself on this machine: wanted {wanted}, got {got}",
    ReasonCode.HUB_REFUSED: "a hub kernel that is not imported: {fact}: wanted {wanted}, got {got}",
    ReasonCode.POLICY_DENIED: "excluded by {fact}: wanted {wanted}, got {got}",
    ReasonCode.ISOLATION_UNSUPPORTED: "cannot run in a process of its own: {fact} must be {wanted}, is {got}",
}


class Reason(msgspec.Struct, frozen=True, gc=False):
    """One refusal: which rule, about which fact, what it wanted and what it got.

    Attributes:
        code: the catalogue entry.
        fact: the fact, argument or setting that decided.
        wanted: what would have been accepted.
        got: what was there.
        hint: the next step that would change the answer, if there is one.
    """

    code: ReasonCode
    fact: str
    wanted: object
    got: object
    hint: str = ""

    @property
    def message(self) -> str:
        """Write the reason as a sentence; made on demand because most reasons are never read."""
        text = _TEXT[self.code].format(fact=self.fact, wanted=self.wanted, got=self.got)
        return f"{text}. {self.hint}" if self.hint else text

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"
