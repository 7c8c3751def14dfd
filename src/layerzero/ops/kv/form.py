"""The form of a cache, checked before memory is taken: its sizes, and the tensors of a layer by layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.core.arguments import out_of_range, told
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.ops.kv.strategy import KVCacheStrategy, StrategyChoice, kv_cache_strategy
from layerzero.ops.paged.quantized import QUANTIZED

LAYOUTS = ("NHD", "HND", "VLLM", "VLLM_CPU")
"""Of a page: tokens first, heads first, as vLLM's first kernels read it (keys split into 16 bytes, tokens last), or as
its kernels for CPUs do: heads first for calls, keys transposed in memory."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer.

    Attributes:
        name: ``keys``, ``values``, ``ckv``, ``kpe``, ``key_scale``, ``value_scale``.
        inner: its shape behind the pages.
        token_axis: which of its axes is that of a page's tokens.
        dtype: of its elements.
        empty: what it holds where nothing was written.
        transposed: whether its last two axes lie the other way round in memory.
    """

    name: str
    inner: tuple[int, ...]
    token_axis: int
    dtype: torch.dtype
    empty: float = 0.0
    transposed: bool = False

    def made(self, make: Callable[..., Tensor], pages: int, device: torch.device) -> Tensor:
        """Its tensor, (pages, *inner)."""
        *first, last, least = (pages, *self.inner)
        if self.transposed:
            return make((*first, least, last), dtype=self.dtype, device=device).transpose(-1, -2)
        return make((pages, *self.inner), dtype=self.dtype, device=device)

    @property
    def bytes_of_token(self) -> int:
        """What one token takes."""
        elements = 1
        for axis, size in enumerate(self.inner, 1):
            elements *= 1 if axis == self.token_axis else size
        return elements * self.dtype.itemsize


def heads_planes(
    layout: str, page_size: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Plane, ...]:
    """Keys and values with heads, in a layout."""
    head_dim, value_dim = dims
    if layout == "VLLM":
        x = 16 // dtype.itemsize
        return (
            Plane("keys", (kv_heads, head_dim // x, page_size, x), 3, dtype),
            Plane("values", (kv_heads, value_dim, page_size), 3, dtype),
        )
    inner, axis = ((page_size, kv_heads), 1) if layout == "NHD" else ((kv_heads, page_size), 2)
    keys = Plane("keys", (*inner, head_dim), axis, dtype, transposed=layout == "VLLM_CPU")
    return keys, Plane("values", (*inner, value_dim), axis, dtype)


def latent_planes(page_size: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple[Plane, ...]:
    """What multi-head latent attention keeps of a token: the compressed keys and values, and the rotated part."""
    return tuple(Plane(name, (page_size, dim), 1, dtype) for name, dim in zip(("ckv", "kpe"), dims, strict=True))


def scale_planes(page_size: int, kv_heads: int) -> tuple[Plane, ...]:
    """A scale for each token and head, tokens first whatever the layout; below 0 until it is set.

    Codes that were written by it are read as NaN. With 0 in its place those of int8 were read as 0, silently.
    """
    sizes = (page_size, kv_heads), 1, torch.float32
    return tuple(Plane(name, *sizes, empty=-math.inf) for name in ("key_scale", "value_scale"))


def are_columns(planes: Sequence[Plane]) -> bool:
    """Whether the planes of a layer lie side by side in one tensor: those of latent attention, as most kernels read."""
    return [each.name for each in planes] == ["ckv", "kpe"]


MOST = {
    "layers": 2**16,
    "pages": 2**31 - 1,
    "max_sequences": 2**31 - 1,
    "page_size": 2**31 - 1,
    "max_length": 2**31 - 1,
}
"""Layers of any model, and what tables and lengths of int32 can name."""

SCALES = ("tensor", "head", "token")
"""What a scale of a cache of float8 or int8 is for."""


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The sizes of a cache, and how it was decided where its tokens lie."""

    planes: tuple[Plane, ...]
    layers: int
    pages: int
    page_size: int
    layout: str
    device: torch.device
    choice: StrategyChoice


def form_of(
    layers: int,
    kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    latent: tuple[int, ...] | None,
    pages: int | None,
    page_size: int,
    max_sequences: int | None,
    max_length: int | None,
    layout: str,
    dtype: torch.dtype,
    device: torch.device | str | None,
    strategy: KVCacheStrategy | str | None,
    captured: bool,
    scales: str | None,
) -> CacheForm:
    """Check the form of a cache, and choose its strategy.

    Raises: InvalidCallError for sizes that mean nothing; KVCacheError for a strategy that cannot be had.
    """
    problems = _size_problems({
        "layers": layers,
        "page_size": page_size,
        **{name: size for name, size in (("pages", pages), ("max_sequences", max_sequences)) if size is not None},
        **({} if max_length is None else {"max_length": max_length}),
    })  # fmt: skip
    if latent is None:
        value_dim = head_dim if value_dim is None else value_dim
        problems += _size_problems({"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim})
    else:
        if kv_heads is not None or head_dim is not None or value_dim is not None:
            problems.append("latent: wanted no kv_heads, head_dim and value_dim with it, got some")
        if not isinstance(latent, (tuple, list)) or len(latent) != 2:
            problems.append(f"latent: wanted two widths such as (512, 64) or None, got {told(latent)}")
        else:
            problems += _size_problems({"latent[0]": latent[0], "latent[1]": latent[1]})
    if not isinstance(layout, str) or layout not in LAYOUTS or (latent is not None and layout != LAYOUTS[0]):
        wanted = " or ".join(LAYOUTS if latent is None else LAYOUTS[:1])
        problems.append(f"layout: wanted {wanted}, got {told(layout)}")
    narrow = isinstance(dtype, torch.dtype) and dtype in QUANTIZED
    if not isinstance(dtype, torch.dtype) or not (narrow or (dtype.is_floating_point and dtype.itemsize > 1)):
        wanted = "float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8"
        problems.append(f"dtype: wanted {wanted}, got {told(dtype)}")
    elif narrow and (scales not in SCALES or latent is not None or layout not in ("NHD", "HND")):
        wanted = f"{', '.join(SCALES)} with heads in NHD or HND for a cache of {dtype}"
        problems.append(f"scales: wanted {wanted}, got {told(scales)}")
    elif not narrow and scales is not None:
        problems.append(f"scales: wanted None for a cache of {dtype}, got {told(scales)}")
    problems += _flag_problems("captured", captured)
    try:
        where = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError, ValueError):  # the last of an integer that no device has
        problems.append(f"device: wanted one that torch knows, such as 'cuda:0', or None, got {told(device)}")
    else:
        problems += _absence_problems(where)
    refuse("KVCache", problems)
    paged = pages is not None
    choice = kv_cache_strategy(
        where, strategy=strategy, max_sequences=max_sequences, captured=captured, paged=paged, layout=layout
    )
    if choice.strategy is KVCacheStrategy.PAGED:
        if pages is not None:
            if max_length is not None:
                wanted = "wanted None with pages, which say how many tokens fit"
                problems.append(f"max_length: {wanted}, got {max_length}")
        elif max_sequences is not None and max_length is not None:
            pages = max_sequences * -(-max_length // page_size)
        else:
            problems.append("pages: wanted a number for a paged cache, or max_sequences and max_length, got None")
    else:
        if max_sequences is None or max_length is None:
            got = f"{max_sequences} and {max_length}"
            problems.append(f"max_sequences and max_length: wanted both for a {choice.strategy} cache, got {got}")
        if paged:
            problems.append(
                f"pages: wanted None for a {choice.strategy} cache, whose sequences have a row, got {pages}"
            )
        pages, page_size = max_sequences, max_length or 1
    if layout == "VLLM" and not problems:
        assert head_dim is not None
        if head_dim % (16 // dtype.itemsize):
            problems.append(f"head_dim: wanted a multiple of {16 // dtype.itemsize} in VLLM, got {head_dim}")
    refuse("KVCache", problems)
    assert pages is not None
    if latent is not None:
        planes = latent_planes(page_size, (latent[0], latent[1]), dtype)
    else:
        assert kv_heads is not None
        assert head_dim is not None
        assert value_dim is not None
        planes = heads_planes(layout, page_size, kv_heads, (head_dim, value_dim), dtype)
        if scales == "token":
            if choice.strategy is KVCacheStrategy.VIRTUAL:
                problem = "scales: wanted 'tensor' or 'head' for a virtual cache, all of one dtype, got 'token'"
                raise InvalidCallError("KVCache", [problem])
            planes += scale_planes(page_size, kv_heads)
    return CacheForm(planes, layers, pages, page_size, "HND" if layout == "VLLM_CPU" else layout, where, choice)


def _absence_problems(device: torch.device) -> list[str]:
    """What torch says of a device that is not here; a build without it asserts, one with it raises."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        return [f"device: wanted one that is here, got {str(device)!r}: {str(error).splitlines()[0][:120]}"]
    return []


def _flag_problems(name: str, flag: object) -> list[str]:
    return [] if isinstance(flag, bool) else [f"{name}: wanted True or False, got {told(flag)}"]


def _size_problems(sizes: dict[str, int | None]) -> list[str]:
    problems = [
        f"{name}: wanted a number of at least 1, got {told(size)}"
        for name, size in sizes.items()
        if type(size) is not int or size < 1 or out_of_range(size)
    ]
    return problems or [
        f"{name}: wanted at most {MOST[name]}, got {size}"
        for name, size in sizes.items()
        if size is not None and size > MOST.get(name, size)
    ]
