"""What kernels of rotary positions share: cosines and sines joined in one row, and tokens that lie evenly in memory.

vLLM and FlashInfer read one table (P, R) whose rows hold the cosines, then the sines. ``lz.rope_table`` makes its two
results as views of such a tensor. Whether a call's are is checked on every call, by addresses, since no key holds it;
where they are not, the rows that the tokens need are gathered, which costs two launches and no look at the table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts, TensorFacts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import DENSE, Condition, SizedCall, conditions


def joined(cos: Tensor, sin: Tensor) -> Tensor | None:
    """The table (P, R) that two views are the halves of; None where they are not, or do not begin at 16 bytes.

    Kernels copy a row of it 16 bytes at a time (cp_async_shared_global_16_cg in csrc/fused_qknorm_rope_kernel.cu of
    vllm 0.20.0, from 10,240 heads of all tokens on).
    """
    rows, half = cos.shape
    step = cos.stride(0)
    if step != 2 * half or sin.stride(0) != step or cos.stride(1) != 1 or sin.stride(1) != 1:
        return None
    if sin.data_ptr() - cos.data_ptr() != half * cos.element_size():
        return None
    if sin.untyped_storage().data_ptr() != cos.untyped_storage().data_ptr() or cos.data_ptr() % MAX_ALIGNMENT_BYTES:
        return None
    return cos.as_strided((rows, step), (step, 1))


def table_and_places(
    cos: Tensor, sin: Tensor, positions: Tensor | None, batch: int, seq: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """A joined table and a place in it for each of ``batch * seq`` tokens.

    ``dtype`` is what the places must be; where None, int32 stays. All happens on the device, without waiting for it.
    Layers of a step give the same tensors: the views of small ones are made once, not 32 times 4 us.
    """
    global _last
    if positions is not None and (found := _last.of(cos, sin, positions, batch * seq, dtype)):
        return found
    tokens = batch * seq
    table = joined(cos, sin)
    if table is None:
        if positions is None:
            table = torch.cat((cos[:seq], sin[:seq]), -1)
        else:
            flat = positions.reshape(-1)
            table = torch.cat((cos.index_select(0, flat), sin.index_select(0, flat)), -1)
            positions = torch.arange(flat.shape[0], device=cos.device).view(positions.shape)
    if positions is None:
        positions = torch.arange(seq, device=cos.device)
    if positions.numel() != tokens:
        positions = positions.expand(batch, seq)
    given, places = positions, positions.reshape(tokens).contiguous()  # of what is stepped, reshape makes a view
    if dtype is not None and places.dtype != dtype:
        return table, places.to(dtype)
    if places.data_ptr() == given.data_ptr() and table.data_ptr() == cos.data_ptr() and _small(table, places):
        _last = _Last(
            (weakref.ref(cos), weakref.ref(sin), weakref.ref(given)), _where(cos, sin, given), dtype, table, places
        )
    return table, places


_SMALL_BYTES = 2**18
"""Memory whose views are kept: more than this is freed at once."""


def _small(*tensors: Tensor) -> bool:
    return all(each.untyped_storage().nbytes() <= _SMALL_BYTES for each in tensors)


def _where(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[int, int, int]:
    """Where their memory begins: a tensor may get another."""
    return cos.data_ptr(), sin.data_ptr(), positions.data_ptr()


class _Last(NamedTuple):
    """The views that were made last, and of what."""

    made_of: tuple[Callable[[], Tensor | None], ...] = ()
    where: tuple[int, int, int] = (0, 0, 0)
    dtype: torch.dtype | None = None
    table: Tensor | None = None
    places: Tensor | None = None

    def of(
        self, cos: Tensor, sin: Tensor, positions: Tensor, tokens: int, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor] | None:
        """Those of a call, where they are the same."""
        table, places = self.table, self.places
        if table is None or places is None or places.shape[0] != tokens or self.dtype is not dtype:
            return None
        of_cos, of_sin, of_positions = self.made_of
        if of_cos() is not cos or of_sin() is not sin or of_positions() is not positions:
            return None
        return (table, places) if self.where == _where(cos, sin, positions) else None


_last = _Last()


@dataclass(frozen=True, slots=True)
class TokensInLine(limit.OfTensors):
    """Batch and sequence of these tensors are one axis of tokens, whatever lies between two of them."""

    def problem(self, name: str, tensor: TensorFacts, _: Facts, /) -> Reason | None:
        shape, strides = tensor.shape, tensor.strides
        if len(shape) != 4 or shape[0] <= 1 or shape[1] <= 1 or strides[0] == shape[1] * strides[1]:
            return None
        wanted = f"strides ({shape[1] * strides[1]}, {strides[1]}, ...)"
        return Reason(ReasonCode.NOT_CONTIGUOUS, name, wanted, f"strides {strides}")

    def describe(self) -> str:
        return f"one axis of tokens: {', '.join(self.tensors)}"


@conditions.register
def _in_line(wanted: TokensInLine, call: SizedCall) -> Iterable[Condition] | None:
    """Nothing to demand where there is no batch; with one, that the tensor stays as dense as it is."""
    found: list[Condition] = []
    for name in wanted.tensors:
        tensor = call.facts.tensors[name]
        if len(tensor.shape) == 3:
            continue
        if not tensor.contiguous or call.kernel_axes(name) != (0, 1, 2, 3):
            return None
        sizes = [call.operand(name, axis) for axis in range(4)]
        strides = [call.operand(name, axis, stride=True) for axis in range(4)]
        found.append((DENSE, (*sizes, *strides), ()))
    return found


@dataclass(frozen=True, slots=True)
class HeadsDense(limit.OfTensors):
    """The heads of a token lie one after the other, without gaps."""

    def problem(self, name: str, tensor: TensorFacts, _: Facts, /) -> Reason | None:
        heads, head_dim = tensor.shape[-2:]
        if heads <= 1 or tensor.strides[-2] == head_dim:
            return None
        return Reason(ReasonCode.NOT_CONTIGUOUS, name, f"head stride {head_dim}", tensor.strides[-2])

    def describe(self) -> str:
        return f"heads without gaps: {', '.join(self.tensors)}"


@conditions.register
def _dense_heads(wanted: HeadsDense, call: SizedCall) -> Iterable[Condition] | None:
    """Head counts and head dims do not vary, so their stride must stay as it is."""
    from layerzero.core.reuse_conditions import WITHIN

    found: list[Condition] = []
    for name in wanted.tensors:
        axes = call.kernel_axes(name)
        step = call.facts.tensors[name].strides[axes[-2]]
        if call.facts.tensors[name].shape[axes[-2]] > 1:
            found.append((WITHIN, (call.operand(name, axes[-2], stride=True),), (step, step)))
    return found


TABLE_IN_FLOAT32 = limit.rule(
    "table_dtype: float32", lambda facts: facts["table_dtype"] == "float32", "DTYPE_UNSUPPORTED"
)
HEADS_DIVIDE = limit.rule(
    "heads: a multiple of kv_heads", lambda facts: facts["heads"] % facts["kv_heads"] == 0, "GQA_HEADS_MISMATCH"
)
