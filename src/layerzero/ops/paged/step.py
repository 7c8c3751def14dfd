"""What all layers of one forward pass share: block tables, lengths, and what kernels made of their values."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.handle import Handle


class StepMetadata(Handle):
    """The block tables and lengths of one forward pass, and one slot for each kernel that plans on their values.

    Some kernels read lengths on the host before they launch (FlashInfer's ``plan``). With a step they do so once for
    all layers; without one, in every call. Between forward passes change the tensors in place, then call
    :meth:`advance`; making a new object each time is right as well, and pays for the slots' buffers again.

        step = lz.StepMetadata(block_tables, context_lens, capturable=True)
        for layer in layers:
            lz.append_paged_kv(k, v, layer.keys, layer.values, step.slot_mapping(page_size))
            output = lz.paged_attention(q, layer.keys, layer.values, block_tables, context_lens, step=step)
        context_lens += 1
        step.advance()

    Args:
        block_tables: (B, max_blocks) int32, the pages of each sequence in order.
        context_lens: (B,) int32, tokens of each sequence, the newest included.
        max_context_len: upper bound of ``context_lens``, for kernels that split long sequences; what the tables hold
            if None.
        capturable: keep every buffer where it is, so that a captured CUDA graph can be replayed after ``advance``.
    Raises: InvalidCallError for tensors that are no tables and lengths, or a bound below 1.
    """

    def __init__(
        self,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        max_context_len: int | None = None,
        capturable: bool = False,
    ) -> None:
        problems = table_problems(block_tables, context_lens) + _bound_problems(max_context_len)
        if problems:
            raise InvalidCallError("StepMetadata", problems)
        super().__init__((block_tables, context_lens), "capturable" if capturable else "eager")
        self._max_context_len = max_context_len

    def __repr__(self) -> str:
        return f"StepMetadata({self.kind}, max_context_len={self._max_context_len})"

    @property
    def block_tables(self) -> Tensor:
        """The pages of each sequence; change them in place, then advance."""
        return self._tensors[0]

    @property
    def context_lens(self) -> Tensor:
        """Tokens of each sequence; change them in place, then advance."""
        return self._tensors[1]

    @property
    def max_context_len(self) -> int | None:
        """Upper bound of the lengths; None for what the tables hold."""
        return self._max_context_len

    @property
    def capturable(self) -> bool:
        """Whether its buffers stay where they are."""
        return self.kind == "capturable"

    def advance(self, *, max_context_len: int | None = None) -> None:
        """Tell that the values of tables and lengths changed; every slot reads them again, outside any capture."""
        problems = _bound_problems(max_context_len)
        if problems:
            raise InvalidCallError("StepMetadata.advance", problems)
        with self._lock:
            self._max_context_len = max_context_len or self._max_context_len
            self.refresh()

    def slot_mapping(self, page_size: int, tokens: int = 1) -> Tensor:
        """Where the newest tokens of each sequence belong, for :func:`layerzero.append_paged_kv`.

        Shapes: → (B * tokens,) int64, ``page * page_size + offset``; -1, which writes nothing, for a token before the
        sequence's first or beyond what its table holds. The same buffer after each :meth:`advance`.
        Raises: InvalidCallError where tables or lengths changed since.
        """
        if self.is_stale:
            problem = "step: wanted advance() after tables or lengths changed, got a question about the old ones"
            raise InvalidCallError("StepMetadata.slot_mapping", [problem])
        return self.slot(("slot_mapping", page_size, tokens), lambda step: _SlotMapping(step, page_size, tokens)).slots


class _SlotMapping:
    def __init__(self, step: StepMetadata, page_size: int, tokens: int) -> None:
        self._page_size, self._tokens = page_size, tokens
        self.slots = self._compute(step)

    def update(self, handle: Handle) -> None:
        self.slots.copy_(self._compute(cast(StepMetadata, handle)))

    def _compute(self, step: StepMetadata) -> Tensor:
        offsets = torch.arange(-self._tokens, 0, device=step.context_lens.device)
        positions = step.context_lens.long().unsqueeze(1) + offsets
        capacity = step.block_tables.shape[1] * self._page_size
        outside = (positions < 0) | (positions >= capacity)
        if capacity == 0:
            return torch.full_like(positions, -1).flatten()
        pages = step.block_tables.long().gather(1, (positions // self._page_size).masked_fill(outside, 0))
        slots = pages * self._page_size + positions % self._page_size
        return slots.masked_fill(outside, -1).flatten()


def _bound_problems(bound: object) -> list[str]:
    if bound is None or (type(bound) is int and bound >= 1):
        return []
    return [f"max_context_len: wanted a number of at least 1 or None, got {bound!r}"]


def table_problems(block_tables: object, context_lens: object) -> list[str]:
    """List what is wrong with block tables and lengths as tensors; their values are not read."""
    problems = []
    for name, tensor, shape, ndim in (
        ("block_tables", block_tables, "(B, max_blocks)", 2),
        ("context_lens", context_lens, "(B,)", 1),
    ):
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted an int32 tensor {shape}, got {type(tensor).__name__}")
        elif tensor.dtype is not torch.int32 or tensor.ndim != ndim:
            got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            problems.append(f"{name}: wanted an int32 tensor {shape}, got {got}")
    if problems or not isinstance(block_tables, Tensor) or not isinstance(context_lens, Tensor):
        return problems
    if block_tables.device != context_lens.device:
        problems.append(f"context_lens: wanted device {block_tables.device}, got {context_lens.device}")
    if block_tables.shape[0] != context_lens.shape[0]:
        lengths = f"wanted {block_tables.shape[0]} lengths as in block_tables, got {context_lens.shape[0]}"
        problems.append(f"context_lens: {lengths}")
    return problems
