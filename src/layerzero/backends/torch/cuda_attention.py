"""PyTorch's three fused attention kernels on NVIDIA GPUs: flash, cuDNN and memory-efficient, called as its operators.

The operators check less than ``F.scaled_dot_product_attention`` does: cuDNN's is wrong in silence for float32, and once
killed the process. Limits were found on an H200 with torch 2.11.0+cu130 and cuDNN 9.19 (2026-11-21): 360 combinations
of dtype, heads, lengths, causal and head dims for each operator, then 6,000 random calls against float64.

Grids are read from the sources. Flash launches (tiles of 64 or 128 queries, batch, heads), forward and backward
(flash_fwd_launch_template.h, flash_bwd_launch_template.h); its split-KV form, (tiles, splits, batch * heads), runs only
where batch * heads * tiles is below 1.6 times the number of multiprocessors. Memory-efficient launches (tiles, heads,
batch) (kernel_forward.h, kernel_backward.h, ``getBlocksGrid``), and since torch 2.8 (pull request 154029) its operator
runs batches above 65,535 in chunks, unless there is dropout. Beyond 65,535 either ends in "invalid configuration
argument" (issues 142228, 146704). cuDNN and cuBLAS, which the math kernel calls, do not publish theirs.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter, functional

from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.torch.attention import FOLDED, SDPA_ARGUMENTS, gives_no_lse, kernel, levelled, sdpa_operator
from layerzero.core import limits as limit
from layerzero.core.arguments import permutation
from layerzero.core.errors import in_short
from layerzero.core.facts import Facts, TensorFacts
from layerzero.core.plan import Candidate, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import WITHIN, Condition, SizedCall, conditions
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import LseWithoutGradient, NotDecoding, SameHeads, SdpaEnabled, SquareCausal
from layerzero.ops.attention.reference import lse_of_hidden_rows


def _load_cuda_flash(facts: Facts) -> Callable[..., Any]:
    operator = sdpa_operator("flash_attention")

    def flash(
        *qkv: Tensor, causal: bool = False, dropout_p: float = 0.0, return_lse: bool = False, **scale: Any
    ) -> Any:
        output, lse, *_ = operator(*qkv, dropout_p, causal, False, **scale)
        if not return_lse:
            return output
        return output, lse_of_hidden_rows(output, lse)

    return flash


def _load_cuda_efficient(facts: Facts) -> Callable[..., Any]:
    operator, recording = sdpa_operator("efficient_attention"), bool(facts["requires_grad"])

    def efficient(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Any:
        keep = query.requires_grad or key.requires_grad or value.requires_grad
        if attn_mask is not None:
            keep = keep or attn_mask.requires_grad
            if recording:
                query, attn_mask = levelled(query, attn_mask)
            attn_mask, key = padded_mask(attn_mask, query, key), own_heads(key, value)
        return operator(query, key, value, attn_mask, keep, dropout_p, causal, scale=scale)[0]

    return efficient


def padded_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Expand a mask to (B, H, S_q, S_k) on dense rows that start at multiples of 16 bytes, as the kernel demands."""
    size, step = key.shape[2], 16 // mask.element_size()
    dense = mask.shape[-1] == size and mask.stride(-1) == 1
    if not dense or mask.data_ptr() % 16 or any(stride % step for stride in mask.stride()[:-1]):
        rows = mask.new_empty((*mask.shape[:-1], size + -size % step))[..., :size]
        mask = rows.copy_(mask)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], size)


def own_heads(key: Tensor, value: Tensor) -> Tensor:
    """Copy keys (B, H, S, D) whose heads are one memory, like those of the values: each head has its own then.

    Of such heads the memory-efficient kernel takes the last query of a tile, where it is alone there, for all heads at
    once, and reads the mask's rows as if they were heads': wrong in silence where S_q leaves 1 of its tile (64 or 32);
    by its source (advance_to_block in kernel_forward.h) for one query, too. Of 65 and of 129 queries of 2 heads on one
    the last were up to 1.3 off in float32 and bfloat16, of 64, 72 and 127 none (torch 2.11, H200, 2026-11-23). See
    pytorch issue 191937.
    """
    return key.contiguous() if key.stride(1) == 0 and value.stride(1) == 0 else key


def aligned_rows(tensor: Tensor) -> Tensor:
    """Copy what does not start every row at a multiple of 16 bytes on dense rows; on a CPU nothing has to.

    The memory-efficient kernel ended in "no kernel found to launch" for strided float32 rows, and in a misaligned
    address for a first row off the boundary (torch 2.11, H200, 2026-11-22). cuDNN's gives the output the strides of
    queries: where they are expanded, it refused, and at a later call ended the process (the same, 2026-12-01).
    """
    step, strides = 16 // tensor.element_size(), tensor.stride()
    dense = strides[-1] == 1 and not any(stride == 0 or stride % step for stride in strides[:-1])
    if not tensor.is_cuda or (dense and not tensor.data_ptr() % 16):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _load_cuda_cudnn(facts: Facts) -> Callable[..., Any]:
    if _cudnn_is_first(facts):  # torch's function takes this kernel then, and 4 to 7 us less than the operator
        return _through_torch
    operator = sdpa_operator("cudnn_attention")

    def cudnn(*qkv: Tensor, causal: bool = False, dropout_p: float = 0.0, **scale: Any) -> Any:
        keep = any(each.requires_grad for each in qkv)
        return operator(*qkv, None, keep, dropout_p, causal, False, **scale)[0]

    return cudnn


def _through_torch(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, **named: Any) -> Tensor:
    """``F.scaled_dot_product_attention``, which gives one result and not nine.

    Calls that wait for their host took 22.3 and 25.0 us where the operator took 35.5 and 26.5 (decoding B3 KV384 and
    prefill B5 S319 of 8 heads of 256, two H200s, torch 2.11, 2026-11-22).
    """
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped, **named)


def _cudnn_wide_heads(facts: Facts) -> Reason | None:
    """Heads wider than 128 were seen right on Hopper's forward pass; elsewhere cuDNN documents 128 as the bound."""
    widest = max(facts.size("head_dim"), facts.size("value_dim"))
    if widest <= 128 or (facts.device.sm is not None and facts.device.sm >= (9, 0) and not facts["requires_grad"]):
        return None
    return Reason(ReasonCode.HEAD_DIM_TOO_LARGE, "head_dim", "at most 128 on this device or with gradients", widest)


def _efficient_dropout(facts: Facts) -> Reason | None:
    """Its operator refuses to split a batch where there is dropout: one seed serves one launch."""
    most = facts.device.max_grid[2] if facts.device.max_grid else None
    if most is None or not facts["dropout_p"] or (batch := facts.size("batch")) <= most:
        return None
    return Reason(ReasonCode.CUDA_GRID_DIM_EXCEEDED, "grid.z", f"at most {most} with dropout", f"{batch} (batch)")


def _cudnn_is_first(facts: Facts) -> bool:
    """Whether torch asks cuDNN before its other kernels: on sm 9.0, 10.0 and 10.3 with cuDNN beyond 9.15.0.

    Elsewhere it never asks it (``check_prefer_cudnn_attention`` in torch 2.11's sdp_utils.cpp).
    """
    try:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:  # another cuDNN than torch was built for is found here, which torch asks nothing either
        return False
    new = version is None or version > 91500  # none here: the question is about another machine
    unwanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return gives_no_lse(facts) and new and not unwanted and facts.device.sm in ((9, 0), (10, 0), (10, 3))


# Flash and cuDNN take the maximum before they scale: a factor of 0 or below ends in NaN.
_SCALE = limit.positive("scale")
_DENSE = limit.last_stride_one("query", "key", "value")
# A row that starts off a 16 byte boundary ended in "misaligned address", which costs the process its context.
_ALIGNED = limit.aligned(16, "query", "key", "value")
_IN_32_BITS = (
    "torch computes where rows of a sequence start in 32 bits: beyond, an illegal access (2.11, H200, 2026-11-30)"
)


_HEADS_AND_ROWS = 1, 2
"""Axes of BHSD along which torch's kernel steps in 32 bits."""


@dataclass(frozen=True, slots=True)
class RowsInReach(limit.OfTensors):
    """The last row and the last head start within 2**31 numbers of the first; views of joined ones lie far apart."""

    def problem(self, name: str, tensor: TensorFacts, _: Facts, /) -> Reason | None:
        got = max((tensor.shape[axis] - 1) * tensor.strides[axis] for axis in _HEADS_AND_ROWS)
        if got < 2**31:
            return None
        return Reason(ReasonCode.NOT_CONTIGUOUS, name, f"heads and rows within {2**31} numbers", got, _IN_32_BITS)

    def describe(self) -> str:
        return f"heads and rows of a sequence within 2**31 numbers: {', '.join(self.tensors)}"


@conditions.register
def _rows_in_reach(limit: RowsInReach, call: SizedCall) -> Iterable[Condition] | None:
    found: list[Condition] = []
    for name, place in itertools.product(limit.tensors, _HEADS_AND_ROWS):
        axis, tensor = call.kernel_axes(name)[place], call.facts.tensors[name]
        farthest = (2**31 - 1) // (1 << tensor.shape[axis].bit_length())
        if tensor.strides[axis] > farthest:
            return None
        found.append((WITHIN, (call.operand(name, axis, stride=True),), (0, farthest)))
    return found


_GRADIENTS = "cuDNN's gradients of sequences beyond are up to 80 times too large (torch 2.11, H200, 2026-11-30)"
_SUMS = "its backward pass computes places of sums in 32 bits: an illegal access (torch 2.11, H200, 2026-11-30)"
_ROWS = [(seq, "heads", dim) for seq in ("seq_q", "seq_k") for dim in ("head_dim", "value_dim")]

_FUSED: dict[str, Any] = {"layout": "BHSD", "grad": True, "handles_negated": True, "deterministic": False}

KERNELS = (
    kernel(
        "torch.sdpa.cudnn",
        attention.ALL,
        _load_cuda_cudnn,
        limit.platform("cuda"),
        limit.arch(min=(8, 0)),
        limit.dtype("float16", "bfloat16"),
        *limit.dims("head_dim", "value_dim", max=256, multiple=8),
        limit.Custom("head_dim > 128 on sm 9.0 and newer, forward only", _cudnn_wide_heads),
        # it gives the output the query's strides, and refuses its own output where one of them is 0
        limit.rule(
            "query: no expanded axis",
            lambda facts: not facts.tensors["query"].expanded,
            "NOT_CONTIGUOUS",
            got=lambda facts: f"strides {facts.tensors['query'].strides}",
        ),
        *(ElementsBelow(2**31, ("batch", *each), _GRADIENTS, gradients=True) for each in _ROWS),
        SquareCausal(),
        NotDecoding(),
        SdpaEnabled("cudnn"),
        _DENSE,
        _SCALE,
        _ALIGNED,
        accepts=(*SDPA_ARGUMENTS, "dropout_p"),
        plans_sizes=True,
        priority=60,
        stock=_cudnn_is_first,
        **_FUSED,
    ),
    kernel(
        "torch.sdpa.flash",
        attention.ALL,
        _load_cuda_flash,
        limit.platform("cuda"),
        limit.arch(min=(8, 0)),
        limit.dtype("float16", "bfloat16"),
        limit.dim("head_dim", max=256, multiple=8),
        limit.equal("value_dim", "head_dim"),
        LseWithoutGradient(),
        SdpaEnabled("flash"),
        limit.grid(x=(("seq_q", 64),), y=("batch",), z=("heads",)),
        ElementsBelow(2**31, ("batch", "heads", "seq_q", "head_dim"), _SUMS, gradients=True, steps=(1, 1, 128, 64)),
        _DENSE,
        _SCALE,
        _ALIGNED,
        accepts=(*SDPA_ARGUMENTS, "dropout_p", "return_lse"),
        priority=50,
        stock=gives_no_lse,
        aliases=("torch.sdpa.causal", "torch.sdpa"),
        **_FUSED,
    ),
    kernel(
        "torch.sdpa.efficient",
        attention.ALL,
        _load_cuda_efficient,
        limit.platform("cuda"),
        limit.dtype("float32", "float16", "bfloat16"),
        # what torch itself asks before it takes this kernel (torch 2.11's sdp_utils.cpp)
        limit.rule(
            "sm: 8.0 and newer for bfloat16",
            lambda facts: facts["dtype"] is not torch.bfloat16 or facts.device.sm is None or facts.device.sm >= (8, 0),
            "SM_TOO_OLD",
            got=lambda facts: ".".join(map(str, facts.device.sm)),
        ),
        *limit.dims("head_dim", "value_dim", multiple=8),
        SquareCausal(),
        limit.one_of("attn_mask", "none", "float", foldable=True),
        limit.one_of("mask_dtype", "none", "bool", "query"),
        SdpaEnabled("efficient"),
        SameHeads(),
        limit.grid(x=(("seq_q", 64),), y=("heads",)),
        limit.Custom("dropout: batch <= 65535", _efficient_dropout),
        *(ElementsBelow(2**31, each, _IN_32_BITS) for each in _ROWS),
        RowsInReach(("query", "key", "value")),
        _DENSE,
        _ALIGNED,
        accepts=(*SDPA_ARGUMENTS, "attn_mask", "dropout_p"),
        folds=tuple(name for name in FOLDED if name != "alibi_slopes"),  # a mask in 16 bits is too coarse for it
        priority=40,
        stock=gives_no_lse,
        **_FUSED,
    ),
)

_ASKED = {f"torch.sdpa.{name}": f"can_use_{name}_attention" for name in ("flash", "efficient", "cudnn")}


def with_torchs_words(report: Report, arguments: Mapping[str, Any]) -> Report:
    """Add what torch itself says against its kernels for the very tensors of a call on an NVIDIA GPU.

    It is one more reason of a kernel that is refused. Of one that may run it is a note: torch's function asks for more
    than its operator (a causal mask of as many queries as keys, of flash), so that LayerZero runs what torch leaves.
    """
    given = {name: arguments.get(name) for name in ("query", "key", "value", "attn_mask")}
    asked = [each for each in report.candidates if each.kernel.id in _ASKED]
    if not asked or not _all_here(given.values()):
        return report
    told = {each.kernel.id: reason for each in asked if (reason := _torchs_reason(each.kernel.id, report.facts, given))}
    notes, ranked = list(report.notes), list[Candidate]()
    for each in report.candidates:
        reason = told.get(each.kernel.id)
        if reason is not None and each.legal:
            notes.append(f"{each.kernel.id} may run where torch's function leaves it: {reason.hint}")
        more = () if reason is None or each.legal else (reason,)
        ranked.append(msgspec.structs.replace(each, reasons=(*each.reasons, *more)) if more else each)
    return msgspec.structs.replace(report, ranked=tuple(ranked), notes=tuple(notes))


def _all_here(tensors: Iterable[Any]) -> bool:
    """Whether these are tensors with memory on a GPU of this machine, or none."""
    return all(each is None or (each.is_cuda and type(each) in (Tensor, Parameter)) for each in tensors)


def _torchs_reason(kernel_id: str, facts: Facts, given: Mapping[str, Tensor | None]) -> Reason | None:
    """Why torch would not take one of its kernels; it says so by warnings."""
    *qkv, mask = given.values()
    query, key, value = (each.permute(permutation(str(facts.layout), "BHSD")) for each in qkv if each is not None)
    dropout_p: Any = facts["dropout_p"]
    causal, grouped = facts.get("causal") is True, query.shape[1] != key.shape[1]
    params = torch.backends.cuda.SDPAParams(query, key, value, mask, dropout_p, causal, grouped)
    with warnings.catch_warnings(record=True) as words:
        warnings.simplefilter("always")
        try:
            if getattr(torch.backends.cuda, _ASKED[kernel_id])(params, debug=True):
                return None
        except (IndexError, RuntimeError) as error:  # of a mask of one axis, cuDNN's check (torch 2.11)
            warnings.warn(in_short(error), stacklevel=1)
    said = " ".join(str(each.message).partition(" (Triggered internally")[0] for each in words)
    hint = f"torch says: {said}" if said else "torch does not say why"
    return Reason(ReasonCode.CONSTRAINT_FAILED, f"torch.backends.cuda.{_ASKED[kernel_id]}", True, False, hint)
