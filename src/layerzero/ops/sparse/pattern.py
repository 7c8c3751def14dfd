"""Which blocks of keys each block of queries sees, as compressed sparse rows (BSR), and what kernels made of them.

``block_indptr`` (R + 1,) says where each row's blocks begin in ``block_indices`` (Z,), which names columns of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from layerzero.core import values
from layerzero.core.errors import refuse
from layerzero.core.handle import Handle
from layerzero.core.values import Check
from layerzero.ops.checks import number_problems
from layerzero.ops.ragged.starts import checks as start_checks
from layerzero.ops.ragged.starts import shape_problems


def owners(block_indptr: Tensor, block_indices: Tensor) -> Tensor:
    """The row of each block, (Z,) int64; nothing is read on the host."""
    numbers = torch.arange(len(block_indices), device=block_indptr.device, dtype=torch.int32)
    return torch.searchsorted(block_indptr[1:].contiguous(), numbers, right=True)


def in_blocks(tensor: Tensor, size: int) -> Tensor:
    """Tokens in blocks of a size: (N, ...) as (N / size, size, ...), without a copy."""
    return torch.unflatten(tensor, 0, (len(tensor) // size, size))


def block_mask(block_indptr: Tensor, block_indices: Tensor, columns: int) -> Tensor:
    """Whether each row sees each column of blocks: (R, columns) of bool."""
    mask = torch.zeros((len(block_indptr) - 1, columns), dtype=torch.bool, device=block_indptr.device)
    mask[owners(block_indptr, block_indices), block_indices.long()] = True
    return mask


def block_table(block_indptr: Tensor, block_indices: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The same as a table of pages, (R, columns) int32, and how many of them each row has, (R,) int32."""
    rows, counts = len(block_indptr) - 1, block_indptr[1:] - block_indptr[:-1]
    table = torch.zeros((rows, max(columns, 1)), dtype=torch.int32, device=block_indptr.device)
    owner = owners(block_indptr, block_indices)
    place = torch.arange(len(block_indices), device=block_indptr.device) - block_indptr[owner]
    table[owner, place.long()] = block_indices
    return table, counts


def pattern_problems(block_indptr: object, block_indices: object) -> list[str]:
    """What is wrong with them as tensors; their values are not read."""
    return shape_problems("block_indptr", block_indptr) + number_problems("block_indices", block_indices, 1, "(Z,)")


def entry_problems(block_indptr: Tensor, block_indices: Tensor, columns: int | None) -> list[str]:
    """What is wrong with the values: rows that do not follow each other, blocks beyond the keys or named twice."""
    return values.problems_on_host(checks(block_indptr, block_indices, columns))


def checks(block_indptr: Tensor, block_indices: Tensor, columns: int | None) -> list[Check]:
    """The same where they lie; nothing is read on the host."""
    beyond = block_indices < 0 if columns is None else (block_indices < 0) | (block_indices >= columns)
    bounds = "" if columns is None else f" from 0 to {columns - 1}"

    def outside(place: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"block_indices[{place[0]}]: wanted a column of blocks{bounds}, got {got[0]}"

    def again(_: tuple[int, ...], got: tuple[int, ...]) -> str:
        return f"block_indices: wanted each column once in a row, got {got[0]} named again"

    named = (owners(block_indptr, block_indices) * 2**32 + block_indices).sort().values
    twice = (named[1:] == named[:-1]).sum().unsqueeze(0)
    return [
        *start_checks("block_indptr", block_indptr, len(block_indices), of="blocks"),
        Check(beyond, block_indices.unsqueeze(1), outside),
        Check(twice[0] > 0, twice, again, alone=True),
    ]


def guard(function: str, _: str | None) -> Callable[..., None]:
    """What every call is looked at for: rows and columns of blocks that exist, as far as a CPU can tell."""

    def look(block_indptr: Tensor, block_indices: Tensor, **__: Tensor) -> None:
        if block_indptr.is_cpu:
            refuse(function, entry_problems(block_indptr, block_indices, None))

    return look


class BlockPattern(Handle):
    """A pattern that many calls share, and one slot for each kernel that plans on it.

        pattern = lz.BlockPattern(block_indptr, block_indices)
        for layer in layers:
            output = lz.sparse_attention(q, k, v, block_indptr, block_indices, 64, 64, block_pattern=pattern)

    Args:
        block_indptr: (R + 1,) int32, where each row's blocks begin.
        block_indices: (Z,) int32, the columns of blocks that rows see.
    Raises: InvalidCallError for tensors that are no pattern.
    """

    def __init__(self, block_indptr: Tensor, block_indices: Tensor) -> None:
        refuse("BlockPattern", pattern_problems(block_indptr, block_indices))
        super().__init__((block_indptr, block_indices), "eager")

    def __repr__(self) -> str:
        rows, blocks = (len(each) for each in self._tensors)
        return f"BlockPattern({max(rows - 1, 0)} rows, {blocks} blocks)"

    @cached_property
    def host(self) -> tuple[Tensor, Tensor]:
        """Both on the CPU: one copy, which waits for the device."""
        block_indptr, block_indices = (each.cpu() for each in self._tensors)
        return block_indptr, block_indices

    def advance(self) -> None:
        """Tell that the values changed; every slot reads them again, outside of any capture."""
        self.refresh()
