"""A range of addresses whose memory is mapped on demand: the interface, and which one a device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class AddressRange(Protocol):
    """Addresses that are reserved as a whole; memory is behind those that were committed.

    Attributes:
        granularity: bytes that memory comes in.
        committed_bytes: memory behind the addresses now.
        keeper: what lives as long as any tensor of the addresses does.
    """

    granularity: int
    committed_bytes: int

    @property
    def keeper(self) -> object: ...

    def commit(self, offset: int, size: int) -> None:
        """Put memory behind addresses. Raises: MemoryError where there is none; nothing is mapped then."""

    def release(self, offset: int, size: int) -> None:
        """Take the memory away that one or several commits put there."""

    def settle(self) -> None:
        """Wait until the device has done what was launched."""

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All addresses as one flat tensor."""

    def close(self) -> None:
        """Give back memory and addresses."""


def reserve(device: torch.device, size: Callable[[int], int]) -> AddressRange:
    """Reserve addresses of a device; ``size`` tells how many bytes, given the granularity.

    Raises: KVCacheError with DRIVER_VERSION_UNSUPPORTED or KV_STRATEGY_UNSUPPORTED where the device has no such thing.
    """
    if device.type == "cuda":
        from layerzero.ops.kv.ranges_cuda import CudaRange

        return CudaRange(device, size)
    from layerzero.ops.kv.ranges_cpu import CpuRange

    return CpuRange(size)


def managed_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros in memory that CPU and GPU share. Raises: KVCacheError without a driver that has such."""
    from layerzero.ops.kv.ranges_cuda import managed

    return managed(shape, dtype, device)
