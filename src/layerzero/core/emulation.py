"""Which half-precision products a CPU emulates: it has no instructions for them, and torch takes several times as long.

Two things tell. The features of the CPU come first. Small products in half precision and in float32, about 2 ms
together, confirm them, once a process and dtype, at its first call. A CPU that is not here has only its features.
AVX2 with ``avx_ne_convert`` converts bfloat16 and multiplies none, so it does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name
from layerzero.core.system import forking

NATIVE = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "arm_bf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16", "arm_fp16"}),
}
"""The features of a CPU with products of each dtype; one is enough."""

SLOWER = 1.2
"""How much longer the product takes where it counts as emulated. It took 2 to 8 times as long where it was: bfloat16
2.0 to 3.5 with AVX-512 and 4 with AVX2, float16 4 to 8 (AMD EPYC Zen 4 and an Intel Xeon, 16 rows and more)."""

ROWS, FEATURES, LEAST_RUNS, MOST_RUNS = 32, 256, 4, 20
"""Of the product: 30 us in float32 and 140 in float16 with one thread of that EPYC."""

MOST_S, DISTURBED_S = 0.02, 2e-3
"""After the first, no further run begins. Where even float32 takes the second, others use the cores, and threads wait
for each other: nothing is said."""


def lacks(device: Device, dtype: object) -> bool:
    """Whether a CPU, by what is known of its features, has no product of this dtype; False where none is known."""
    native = NATIVE.get(dtype)  # type: ignore[call-overload]  # whatever a call's first tensor has
    have = device.instruction_sets
    return native is not None and device.platform == "cpu" and bool(have) and have.isdisjoint(native)


def emulates(device: Device, dtype: object) -> bool:
    """Whether products of this dtype are emulated: the CPU lacks them and, where it is here, takes longer for them."""
    return lacks(device, dtype) and (device != Device.detect("cpu") or _confirmed(dtype))  # type: ignore[arg-type]


def told(device: Device, dtypes: Iterable[object]) -> str:
    """One line about those of the dtypes whose products are emulated, and what is done about it; empty for none."""
    found = [dtype_name(each) for each in dtypes if emulates(device, each)]  # type: ignore[arg-type]  # it is a dtype
    if not found:
        return ""
    names = " and ".join(found)
    return f"this CPU has no {names} products: torch emulates them, LayerZero takes float32 where that is faster"


def product_ratio(dtype: torch.dtype) -> float:
    """How many times as long as in float32 a small product takes, by the fastest runs; infinity on a busy machine."""
    kinds = dtype, torch.float32
    best = dict.fromkeys(kinds, float("inf"))
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _without_modes():
        given = {
            each: [torch.ones(rows, FEATURES, dtype=each, device="cpu") for rows in (ROWS, FEATURES)] for each in kinds
        }
        end = time.perf_counter() + MOST_S
        for turn in range(MOST_RUNS):
            for each in kinds:
                began = time.perf_counter()
                functional.linear(*given[each])
                best[each] = min(best[each], time.perf_counter() - began)
            decided = turn >= LEAST_RUNS and best[dtype] >= SLOWER * best[torch.float32]
            if decided or time.perf_counter() > end:
                break
    disturbed = best[torch.float32] > DISTURBED_S
    return float("inf") if disturbed else best[dtype] / max(best[torch.float32], 1e-9)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Compute as the caller's modes (fake tensors, recorders, a default device) do not."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


RATIO: Callable[[torch.dtype], float] = product_ratio
"""What confirms; tests set another one."""

_FOUND: dict[torch.dtype, bool] = {}
_lock = forking.lock()


def _confirmed(dtype: torch.dtype) -> bool:
    found = _FOUND.get(dtype)
    if found is None:
        with _lock:
            found = _FOUND.get(dtype)
            if found is None:
                found = _FOUND[dtype] = RATIO(dtype) >= SLOWER
    return found


def forget() -> None:
    """Confirm anew at the next call."""
    _FOUND.clear()
