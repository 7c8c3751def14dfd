"""What all layers of one forward pass share: block tables, lengths, and what kernels made of their values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError


class StepSlot(Protocol):
    """What one kernel keeps on a step: made of the values of block tables and lengths, once for all layers."""

    def update(self, step: StepMetadata) -> None:
        """Read the values again, after they changed. A capturable step's slots keep their buffers."""


Slot = TypeVar("Slot", bound=StepSlot)


class StepMetadata:
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
    Raises: InvalidCallError for tensors that are no tables and lengths.
    """

    def __init__(
        self,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        max_context_len: int | None = None,
        capturable: bool = False,
    ) -> None:
        problems = table_problems(block_tables, context_lens)
        if problems:
            raise InvalidCallError("StepMetadata", problems)
        self.block_tables = block_tables
        self.context_lens = context_lens
        self.max_context_len = max_context_len
        self.kind = "capturable" if capturable else "eager"
        self._slots: dict[Hashable, StepSlot] = {}
        self._lock = threading.RLock()

    @property
    def capturable(self) -> bool:
        """Whether its buffers stay where they are."""
        return self.kind == "capturable"

    def kind_for(self, block_tables: Tensor, context_lens: Tensor) -> str:
        """``eager`` or ``capturable``; ``foreign`` for a call with other tables or lengths."""
        mine = block_tables is self.block_tables and context_lens is self.context_lens
        return self.kind if mine else "foreign"

    def slot(self, owner: Hashable, make: Callable[[StepMetadata], Slot]) -> Slot:
        """The slot of a kernel, made on its first call of the step.

        Raises: RuntimeError inside a CUDA graph capture if it does not exist yet: making it reads device values.
        """
        slot = self._slots.get(owner)
        if slot is None:
            with self._lock:
                slot = self._slots.get(owner)
                if slot is None:
                    if self.block_tables.is_cuda and torch.cuda.is_current_stream_capturing():
                        raise RuntimeError(
                            f"{owner}: wanted a step that was used before the capture, got a new one; run one forward "
                            "pass with it (or advance it) outside the capture first"
                        )
                    slot = self._slots[owner] = make(self)
        return slot  # type: ignore[return-value]  # an owner makes slots of one type

    def advance(self, *, max_context_len: int | None = None) -> None:
        """Tell that the values of tables and lengths changed; every slot reads them again, outside any capture."""
        if max_context_len is not None:
            self.max_context_len = max_context_len
        with self._lock:
            for slot in self._slots.values():
                slot.update(self)

    def slot_mapping(self, page_size: int, tokens: int = 1) -> Tensor:
        """Where the newest tokens of each sequence belong, for :func:`layerzero.append_paged_kv`.

        Shapes: → (B * tokens,) int64, ``page * page_size + offset``, -1 for a token before the sequence's first.
        The same buffer after each :meth:`advance`.
        """
        return self.slot(("slot_mapping", page_size, tokens), lambda step: _SlotMapping(step, page_size, tokens)).slots


class _SlotMapping:
    def __init__(self, step: StepMetadata, page_size: int, tokens: int) -> None:
        self._page_size, self._tokens = page_size, tokens
        self.slots = self._compute(step)

    def update(self, step: StepMetadata) -> None:
        self.slots.copy_(self._compute(step))

    def _compute(self, step: StepMetadata) -> Tensor:
        offsets = torch.arange(-self._tokens, 0, device=step.context_lens.device)
        positions = step.context_lens.long().unsqueeze(1) + offsets
        blocks = (positions // self._page_size).clamp(0, max(step.block_tables.shape[1] - 1, 0))
        pages = step.block_tables.long().gather(1, blocks)
        slots = pages * self._page_size + positions % self._page_size
        return slots.masked_fill(positions < 0, -1).flatten()


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
