"""The form of a cache, checked before memory is taken: its sizes, and the tensors of a layer by layout.

How a cache's memory is laid out, chosen by facts: the four strategies and why each is taken or refused.

Also what goes wrong with a cache that is no mistake in one argument: no room, a closed cache, two steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import out_of_range, told
from layerzero.core.errors import InvalidCallError, LayerZeroError, refuse
from layerzero.core.reasons import Reason, ReasonCode
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
        others = [size for axis, size in enumerate(self.inner, 1) if axis != self.token_axis]
        return math.prod(others) * self.dtype.itemsize


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


def are_columns(planes: Sequence[Plane]) -> bool:
    """Whether the planes of a layer lie side by side in one tensor: those of latent attention, as most kernels read."""
    return [each.name for each in planes] == ["ckv", "kpe"]


MOST = {"layers": 2**16, **dict.fromkeys(("pages", "max_sequences", "page_size", "max_length"), 2**31 - 1)}
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
    problems += _flag_problems({"captured": captured})
    where = _device_of("cpu" if device is None else device, problems)
    problems += [] if where is None else _absence_problems(where)
    refuse("KVCache", problems)
    assert where is not None
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
        widths = zip(("ckv", "kpe"), latent, strict=True)  # the compressed keys and values, and the rotated part
        planes = tuple(Plane(name, (page_size, width), 1, dtype) for name, width in widths)
    else:
        assert kv_heads is not None
        assert head_dim is not None
        assert value_dim is not None
        planes = heads_planes(layout, page_size, kv_heads, (head_dim, value_dim), dtype)
        if scales == "token":
            if choice.strategy is KVCacheStrategy.VIRTUAL:
                problem = "scales: wanted 'tensor' or 'head' for a virtual cache, all of one dtype, got 'token'"
                raise InvalidCallError("KVCache", [problem])
            # tokens first whatever the layout; below 0 until they are set, so that codes which were written by them are
            # read as NaN: with 0 in its place those of int8 were read as 0, silently
            sizes = (page_size, kv_heads), 1, torch.float32
            planes += tuple(Plane(name, *sizes, empty=-math.inf) for name in ("key_scale", "value_scale"))
    return CacheForm(planes, layers, pages, page_size, "HND" if layout == "VLLM_CPU" else layout, where, choice)


def _device_of(device: Any, problems: list[str]) -> torch.device | None:
    """The device of such a name; None, and a problem more, where there is none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # the last of an integer that no device has
        problems.append(f"device: wanted one that torch knows, such as 'cuda:0', got {told(device)}")
        return None


def _flag_problems(flags: dict[str, bool]) -> list[str]:
    return [f"{name}: wanted True or False, got {told(flag)}" for name, flag in flags.items() if type(flag) is not bool]


def _absence_problems(device: torch.device) -> list[str]:
    """What torch says of a device that is not here; a build without it asserts, one with it raises."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        return [f"device: wanted one that is here, got {str(device)!r}: {str(error).splitlines()[0][:120]}"]
    return []


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


GONE = "wanted a cache that is there, got one that was closed; make another"
"""What a closed cache says, and whatever stands for it."""


class KVCacheError(LayerZeroError):
    """A cache cannot do this; nothing was written and nothing was lost.

    Attributes:
        problem: what was wanted, what came, and the next step.
        code: the reason code where the catalogue has one (KV_CACHE_EXHAUSTED, VIRTUAL_MEMORY_EXHAUSTED).
    """

    def __init__(self, problem: str, code: ReasonCode | None = None) -> None:
        self.problem = problem
        self.code = code
        super().__init__(f"[{code}] KVCache: {problem}" if code is not None else f"KVCache: {problem}")


LEAST_CUDA = 12000
"""CUDA of the driver from which on virtual memory is used, as the driver counts: 12.0."""

MOST_ROWS = 1000
"""Sequences beyond which each having a row of its own address space is not worth it."""


class KVCacheStrategy(StrEnum):
    """Where the tokens of a sequence lie."""

    CONTIGUOUS = "contiguous"
    """One row a sequence, of memory that is there from the beginning."""
    PAGED = "paged"
    """Pages of a few tokens, found through block tables."""
    VIRTUAL = "virtual"
    """One row a sequence, whose memory is mapped as tokens come."""
    UNIFIED = "unified"
    """One row a sequence, of memory that CPU and GPU share."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy and why.

    Attributes:
        strategy: what was chosen.
        because: the fact that decided, in words.
        refused: by the other strategies that cannot be had here, why.
    """

    strategy: KVCacheStrategy
    because: str
    refused: dict[KVCacheStrategy, Reason] = field(default_factory=dict)


def kv_cache_strategy(
    device: torch.device | str = "cuda",
    *,
    strategy: KVCacheStrategy | str | None = None,
    max_sequences: int | None = None,
    captured: bool = False,
    paged: bool = False,
    layout: str = "NHD",
    cuda: int | None = None,
) -> StrategyChoice:
    """Choose how a cache's memory is laid out.

    Args:
        device: where the cache lies.
        strategy: the one to take, whatever the facts say; None to choose.
        max_sequences: how many sequences there are at once, where each would have a row.
        captured: whether steps are replayed as CUDA graphs, so that addresses must stay.
        paged: whether a number of pages was given.
        layout: of the cache: rows that grow have their tokens first.
        cuda: CUDA of the driver, 12040 for 12.4; the one that is here if None.
    Raises: KVCacheError for a strategy that cannot be had, with DRIVER_VERSION_UNSUPPORTED or KV_STRATEGY_UNSUPPORTED;
        InvalidCallError for what is no strategy, device, layout, flag or number.
    Source: vAttention, arXiv:2405.04437, for growing rows; PagedAttention, arXiv:2309.06180, for pages.
    """
    problems = [] if max_sequences is None else _size_problems({"max_sequences": max_sequences})
    problems += _flag_problems({"captured": captured, "paged": paged})
    if not isinstance(layout, str) or layout not in LAYOUTS:
        problems.append(f"layout: wanted {' or '.join(LAYOUTS)}, got {told(layout)}")
    if cuda is not None and (type(cuda) is not int or cuda < 0):
        problems.append(f"cuda: wanted a number such as 12040 for 12.4, or None for the driver's, got {told(cuda)}")
    if strategy is not None and strategy not in list(KVCacheStrategy):
        problems.append(f"strategy: wanted {', '.join(KVCacheStrategy)} or None, got {told(strategy)}")
    where = _device_of(device, problems)
    refuse("kv_cache_strategy", problems)
    assert where is not None
    refused = _refused(where, layout, cuda)
    if strategy is not None:
        wanted = KVCacheStrategy(strategy)
        if wanted in refused:
            reason = refused[wanted]
            raise KVCacheError(f"strategy={wanted.value!r}: {reason.message}", reason.code)
        return StrategyChoice(wanted, "it was requested", refused)
    chosen, because = _by_facts(where, max_sequences, captured, paged, KVCacheStrategy.VIRTUAL in refused)
    return StrategyChoice(chosen, because, refused)


def _by_facts(
    device: torch.device, max_sequences: int | None, captured: bool, paged: bool, no_virtual: bool
) -> tuple[KVCacheStrategy, str]:
    if paged:
        return KVCacheStrategy.PAGED, "a number of pages was given"
    if device.type == "cpu":
        return KVCacheStrategy.CONTIGUOUS, "the operating system maps a CPU's memory on demand as it is"
    if max_sequences is not None and max_sequences > MOST_ROWS and not captured:
        return KVCacheStrategy.PAGED, f"{max_sequences} sequences are more than {MOST_ROWS}"
    if no_virtual:
        return KVCacheStrategy.CONTIGUOUS, "virtual memory cannot be had here"
    graphs = "captured steps want addresses that stay, " if captured else ""
    return KVCacheStrategy.VIRTUAL, f"{graphs}contiguous kernels serve rows that grow"


def _refused(device: torch.device, layout: str, cuda: int | None) -> dict[KVCacheStrategy, Reason]:
    found: dict[KVCacheStrategy, Reason] = {}
    unsupported = ReasonCode.KV_STRATEGY_UNSUPPORTED
    hint = "Take 'contiguous' or 'paged'"
    if device.type not in ("cpu", "cuda"):
        reason = Reason(unsupported, "the device of such a cache", "cpu or cuda", device.type, hint)
        found |= dict.fromkeys((KVCacheStrategy.VIRTUAL, KVCacheStrategy.UNIFIED), reason)
    if layout != "NHD":
        found[KVCacheStrategy.VIRTUAL] = Reason(unsupported, "the layout of rows that grow", "NHD", layout, hint)
    if layout in ("VLLM", "VLLM_CPU"):
        reason = Reason(unsupported, "the layout of rows", "NHD or HND", layout, "Take 'paged'")
        found |= dict.fromkeys((KVCacheStrategy.CONTIGUOUS, KVCacheStrategy.UNIFIED), reason)
    if device.type == "cuda":
        version = _driver_version() if cuda is None else cuda
        if version < LEAST_CUDA:
            got: Any = _told_version(version) if version else "none"
            old = ReasonCode.DRIVER_VERSION_UNSUPPORTED
            reason = Reason(old, "the driver's CUDA", f">= {_told_version(LEAST_CUDA)}", got, hint)
            found |= dict.fromkeys((KVCacheStrategy.VIRTUAL, KVCacheStrategy.UNIFIED), reason)
    return found


def _told_version(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver_version() -> int:
    from layerzero.ops.kv.ranges import driver

    found = driver()
    return 0 if found is None else found.version()
