"""Limits that speak of attention alone, and what a plan may do to its arguments where one is not met.

Limits: its heads, its causal mask, its log-sum-exp, the caller's ``sdpa_kernel``, the tokens of a cache. Repairs: fold
what hides keys into one mask, repeat kv heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from layerzero.core.arguments import Adapter, moving
from layerzero.core.facts import Facts, TensorFacts
from layerzero.core.limit_kinds import (
    NOTHING,
    Finding,
    Findings,
    Limit,
    OfTensors,
    Repair,
    dense_rows_start_at,
    violated,
)
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import WITHIN, Condition, SizedCall, conditions, same_sizes
from layerzero.ops.attention.layout import CANONICAL
from layerzero.ops.attention.reference import FOLDABLE, attention_bias


def grouped(facts: Facts) -> Reason:
    """Why a kernel that takes equal head counts does not take a call with fewer kv heads."""
    return Reason(ReasonCode.GQA_UNSUPPORTED, "kv_heads", facts["heads"], facts["kv_heads"])


@dataclass(frozen=True, slots=True)
class SameHeads(Limit):
    """As many kv heads as query heads; repairable by repeating kv heads."""

    def check(self, facts: Facts) -> Findings:
        heads, kv_heads = facts.size("heads"), facts.size("kv_heads")
        return NOTHING if heads == kv_heads else (Finding(grouped(facts), Repair("expand", "key")),)

    def facts_named(self) -> tuple[str, ...]:
        return ("heads", "kv_heads")

    def describe(self) -> str:
        return "kv heads are repeated"


@dataclass(frozen=True, slots=True)
class AlignedOnCuda(OfTensors):
    """On NVIDIA dense rows that start at a multiple of 16 bytes, where a copy can make them: elsewhere none are copied.

    For kernels that run on every device and are one of torch's fused ones there. Rows whose width is no multiple of 16
    bytes stay as they are: a copy of them starts no better.
    """

    def problem(self, name: str, tensor: TensorFacts, facts: Facts, /) -> Reason | None:
        copied = facts.device.platform == "cuda" and dense_rows_start_at(tensor, _ROW_BYTES)
        if not copied or (tensor.row_alignment_bytes >= _ROW_BYTES and tensor.last_stride == 1):
            return None
        got = f"{tensor.row_alignment_bytes} bytes, the last stride {tensor.last_stride}"
        return Reason(ReasonCode.MISALIGNED, name, f"dense rows at {_ROW_BYTES} bytes", got)

    def describe(self) -> str:
        return f"on NVIDIA: dense rows aligned to {_ROW_BYTES} bytes: {', '.join(self.tensors)}"


_ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
class SquareCausal(Limit):
    """A causal mask only where seq_q == seq_k: the kernel aligns it top-left, LayerZero bottom-right."""

    def check(self, facts: Facts) -> Findings:
        if facts.get("causal") is not True or facts["seq_q"] == facts["seq_k"]:
            return NOTHING
        wanted = f"{facts['seq_q']} like seq_q (its causal mask is aligned top-left)"
        return violated(ReasonCode.CONSTRAINT_FAILED, "seq_k", wanted, facts["seq_k"], Repair("fold", "causal"))

    def facts_named(self) -> tuple[str, ...]:
        return ("seq_q", "seq_k")

    def describe(self) -> str:
        return "causal: seq_q == seq_k"


@dataclass(frozen=True, slots=True)
class NotDecoding(Limit):
    """More than one query, for libraries that make a plan for each number of keys: decoding meets each number once.

    On an H200 a plan of cuDNN took 47 to 63 ms, and attention with it 66 us (24 lengths from 2048 on, 32 heads of 128,
    torch 2.11, cuDNN 9.19, 2026-11-22); torch's flash kernel took 61 us the first time.
    """

    def check(self, facts: Facts) -> Findings:
        if facts.size("seq_q") > 1:
            return NOTHING
        why = "more than one (a plan for each number of keys takes it some 50 ms)"
        return violated(ReasonCode.CONSTRAINT_FAILED, "seq_q", why, 1)

    def facts_named(self) -> tuple[str, ...]:
        return ("seq_q",)

    def describe(self) -> str:
        return "seq_q > 1 (plans each number of keys)"


@dataclass(frozen=True, slots=True)
class LseWithoutGradient(Limit):
    """Its log-sum-exp has no gradient, although its output has: not both where gradients are recorded."""

    def check(self, facts: Facts) -> Findings:
        if not (facts["return_lse"] and facts["requires_grad"]):
            return NOTHING
        return violated(ReasonCode.GRAD_UNSUPPORTED, "return_lse", "False with gradients", True)

    def describe(self) -> str:
        return "no gradient through the log-sum-exp"


@dataclass(frozen=True, slots=True)
class SdpaEnabled(Limit):
    """The caller's ``torch.nn.attention.sdpa_kernel`` context allows this backend.

    The aten operator behind it ignores that context, so the limit has to ask.
    """

    name: str

    def check(self, facts: Facts) -> Findings:
        if self.name not in facts["sdpa_disabled"]:  # type: ignore[operator]  # a frozenset of names
            return NOTHING
        return violated(
            ReasonCode.POLICY_DENIED, "the caller's sdpa_kernel context", f"{self.name} enabled", "disabled"
        )

    def describe(self) -> str:
        return f"sdpa_kernel allows {self.name}"


@dataclass(frozen=True, slots=True)
class DenseTokens(OfTensors):
    """What one token brings is dense in these tensors, however far tokens lie apart; repairable by a copy.

    Keys and values that are parts of one product of queries, keys and values are read where they lie.
    """

    def problem(self, name: str, tensor: TensorFacts, _: Facts, /) -> Reason | None:
        wanted = 1
        for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.strides[1:]), strict=True):
            if size > 1 and stride != wanted:
                return Reason(ReasonCode.NOT_CONTIGUOUS, name, "dense tokens", f"strides {tensor.strides}")
            wanted *= size
        return None

    def describe(self) -> str:
        return f"dense tokens: {', '.join(self.tensors)}"


def torch_alone(facts: Facts) -> tuple[str, tuple[str, ...]] | None:
    """A user of torch's plain formulas alone switches off all fused kernels, and so those of other libraries, too."""
    disabled: frozenset[str] = facts["sdpa_disabled"]  # type: ignore[assignment]
    return ("the caller's sdpa_kernel context, which allows math alone", ("torch",)) if disabled >= _FUSED else None


_FUSED = frozenset({"flash", "efficient", "cudnn"})


@conditions.register
def _same_heads(limit: SameHeads, call: SizedCall) -> Iterable[Condition] | None:
    return same_sizes("heads", "kv_heads", call)


@conditions.register
def _square_causal(limit: SquareCausal, call: SizedCall) -> Iterable[Condition] | None:
    return same_sizes("seq_q", "seq_k", call) if call.facts.get("causal") is True else ()


@conditions.register
def _not_decoding(limit: NotDecoding, call: SizedCall) -> Iterable[Condition] | None:
    return ((WITHIN, (call.size("seq_q"),), (2, 2**62)),) if call.varies("seq_q") else ()


KINDS: dict[str, type[Limit]] = {
    "lse_without_gradient": LseWithoutGradient,
    "not_decoding": NotDecoding,
    "same_heads": SameHeads,
    "sdpa_enabled": SdpaEnabled,
    "square_causal": SquareCausal,
}
"""Names that descriptors know them by."""


def _blank(tensor: torch.Tensor, lengths: torch.Tensor, axis: int) -> torch.Tensor:
    """Put zeros in place of what lies beyond each sequence's length."""
    columns = torch.arange(tensor.shape[axis], device=tensor.device)
    columns = columns.view([-1 if each == axis else 1 for each in range(4)])
    return tensor.masked_fill(columns >= lengths.view(-1, 1, 1, 1), 0.0)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(mode=False)
def _seen_and_hidden(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((), dtype=dtype), torch.full((), -torch.inf, dtype=dtype)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What :func:`attention_bias` makes of a bool mask alone, in 2 us where that takes 12 (AMD EPYC, 2026-11-25)."""
    whole = mask if mask.ndim == 4 else mask[(None,) * (4 - mask.ndim)]
    return torch.where(whole, *_seen_and_hidden(dtype))


def _fold(arguments: Sequence[str], facts: Facts, layout: str | None) -> list[str]:
    """One mask that says causal, mask, window, ALiBi and lengths together."""
    layout, schema = layout or CANONICAL, facts.operation.schema
    view = moving(layout, CANONICAL)
    told = []
    for name in FOLDABLE:
        if name in facts.tensors:
            told.append(f"{name}={name}")
        elif name in schema.chosen and facts[name] != schema.neutral.get(name):
            told.append(f"{name}={facts[name]!r}")
    if told == ["attn_mask=attn_mask"] and facts["attn_mask"] == "bool" and facts.device.platform == "cpu":
        return ["attn_mask = added(attn_mask, query.dtype)"]
    lines = [f"attn_mask = fold(query{view}, key{view}, {', '.join(told)})"]
    if "kv_lens" in arguments:  # what lies beyond may be NaN, which no mask hides
        lines += [f"{name} = blank({name}, kv_lens, {layout.index('S')})" for name in ("key", "value")]
    return lines


def _expand(_: Sequence[str], facts: Facts, layout: str | None) -> list[str]:
    axis = (layout or CANONICAL).index("H")
    return [f"{name} = {name}.repeat_interleave({facts['group']}, {axis})" for name in ("key", "value")]


ADAPTERS = {
    "fold": Adapter(
        text="fold {argument} into the mask",
        write=_fold,
        names={"fold": attention_bias, "added": _added, "blank": _blank},
        absorbs=True,
        absorbed=FOLDABLE,
        gives="attn_mask",
        gives_alone=frozenset(FOLDABLE) - {"kv_lens"},
    ),
    "expand": Adapter(
        text="repeat kv heads to match query heads",
        write=_expand,
        moved=True,
        names_sizes=True,
        writes_anew=("key", "value"),
    ),
}
