"""FlashAttention 2 and 3 through their own Python packages, and the cache of what FlashAttention 4 compiled.

Limits follow the packages' documentation and argument checks (flash_attn_interface.py and flash_api.cpp of both, commit
0251105a of 2026-08-15, read 2026-11-21). Their causal mask is aligned bottom-right, as LayerZero's is. Both packages'
functions have a backward pass, which never ran here, as the packages did not: they are refused until vetted. It gives
neither the log-sum-exp nor slopes a gradient, and FlashAttention 2's launches nothing, without an error, for dropout
with heads wider than 192 where a block has less than 144 KB of shared memory. FlashAttention 3 uses Hopper's wgmma:
sm_90 only, refused before and after (it fails to launch on sm_100 and sm_120). FlashAttention 2 has code for
sm_100 and sm_120 since 2.7.4, which is therefore the oldest version that is accepted. On ROCm the package runs
Composable Kernel; that half is declared from its sources (MI200 to MI355, RDNA 3 and 4, head dimensions up to 256,
softcap ignored) and has not been run.

What FlashAttention 4 compiled is kept for other processes in its package's own persistent cache, by its own key. The
package leaves it off: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 turns it on, below the system's folder for temporary
files. Kernels here use the same class in a copy of the package's function, whatever the variable says, so that a child
process can compile for this one and nothing compiles again after a restart. Where the user turned it on, or named a
folder (FLASH_ATTENTION_CUTE_DSL_CACHE_DIR), it is that one; else one in the user's own cache, since others may write
among temporary files, and what lies there is run.

Read: flash_attn/cute/cache_utils.py of flash-attn-4 4.0.0b36 (2026-11-22). Entries lie in a folder for the fingerprint
of the package's sources, Python's, CUTLASS's and tvm_ffi's version; each is moved into place whole, and one that does
not load is compiled anew.
Library: flash-attn 2.x and flash-attn-3, BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from layerzero.backends.shape_cache import temporary
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import LseWithoutGradient
from layerzero.ops.attention.reference import with_lse

NAME = "flash_attention_cute_dsl_cache"


def cache_folder() -> Path | None:
    """Where the package's entries lie; none where the user's home is unknown."""
    named = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    if named is not None:
        return Path(named)
    if os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1":
        return temporary(NAME)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME
    except RuntimeError:  # a user without a home
        return None


def kept(forward: types.FunctionType, wrapped: Callable[[Any], Any] = lambda cache: cache) -> Callable[..., Any]:
    """A copy of the package's function that keeps what it compiles on disk; ``wrapped`` stands before that cache."""
    cache = types.SimpleNamespace(compile_cache=wrapped(_on_disk(forward)))
    seen = {**forward.__globals__, forward.__name__: cache}
    copy = types.FunctionType(forward.__code__, seen, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


_CACHES: dict[Path, Any] = {}
"""One a folder: kernels of a process share what is loaded."""


def _on_disk(forward: Any) -> Any:
    """The cache on disk; the package's own where that is one, or where none can be made."""
    folder = cache_folder()
    try:
        from flash_attn.cute import cache_utils
    except ImportError:  # a version that has none
        return forward.compile_cache
    if folder is None or isinstance(forward.compile_cache, cache_utils.JITPersistentCache):
        return forward.compile_cache
    if folder not in _CACHES:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = folder / cache_utils._compute_source_fingerprint() / "fwd"
            _CACHES[folder] = cache_utils.JITPersistentCache(place)
        except OSError:  # a folder that cannot be written: it is compiled in each process, as before
            return forward.compile_cache
    return _CACHES[folder]


_HOMEPAGE = "https://github.com/Dao-AILab/flash-attention"

FLASH_ATTN_2 = Backend(
    name="flash_attn",
    summary="FlashAttention 2: Ampere and newer, AMD through Composable Kernel",
    import_name="flash_attn_2_cuda",  # its extension: FlashAttention 4 is a flash_attn package, too
    distribution="flash-attn",
    versions=">=2.7.4,<3",
    requires=("cuda>=12.0", "rocm>=6.0"),
    platforms=("cuda", "rocm"),
    install="pip install flash-attn --no-build-isolation",
    homepage=_HOMEPAGE,
    flags=("graph_safe",),
)
FLASH_ATTN_3 = Backend(
    name="flash_attn",
    summary="FlashAttention 3: Hopper",
    import_name="flash_attn_interface",
    distribution=("flash-attn-3", "flash_attn_3"),
    versions=">=3.0.0b1,<4",
    requires=("cuda>=12.3",),
    platforms=("cuda",),
    install="build the hopper folder of flash-attention",
    homepage=_HOMEPAGE,
    flags=("graph_safe",),
)


def _load_v2(facts: Facts) -> Callable[..., Any]:
    from flash_attn import flash_attn_func

    return run_v2(flash_attn_func, facts)


def run_v2(flash_attn_func: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    """What a kernel calls that has FlashAttention 2's function, from whatever package."""

    def v2(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        result = flash_attn_func(
            query,
            key,
            value,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=causal,
            window_size=window or (-1, -1),
            softcap=softcap or 0.0,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.float(),
            return_attn_probs=return_lse,
        )
        return with_lse(*result[:2]) if return_lse else result

    return v2


def in_its_words(
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What acts on scores, as functions of FlashAttention 2 and 3 have it; ``more`` has their names already.

    An adapter took 2.2 times as long with it, 1.3 us more: dense calls name each argument (EPYC, 2026-11-27).
    """
    more["softmax_scale"], more["causal"] = scale, causal
    more["window_size"], more["softcap"] = window or (-1, -1), softcap or 0.0
    return more


def _load_v3(facts: Facts) -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_func

    return run_v3(flash_attn_func, facts)


def run_v3(flash_attn_func: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    """What a kernel calls that has FlashAttention 3's function, from whatever package."""
    splits = 0 if facts.size_bits("seq_q") == 1 else 1  # 0: split the keys of a decode as the library thinks best

    def v3(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        result = flash_attn_func(
            query,
            key,
            value,
            softmax_scale=scale,
            causal=causal,
            window_size=window or (-1, -1),
            softcap=softcap or 0.0,
            num_splits=splits,
            return_attn_probs=return_lse,
        )
        output, lse = result if isinstance(result, tuple) else (result, None)
        return with_lse(output, lse) if return_lse else output

    return v3


# a causal mask makes it add slope * column in place of -slope * distance: each row is shifted by a constant
ALIBI_WITHOUT_LSE = limit.rule(
    "return_lse: False with alibi_slopes and causal",
    lambda facts: facts["alibi_slopes"] == "none" or not facts["return_lse"] or facts.get("causal") is not True,
    "LSE_UNSUPPORTED",
)
OF_SLOPES: tuple[limit.Limit, ...] = (limit.last_stride_one("alibi_slopes"), ALIBI_WITHOUT_LSE)
"""What FlashAttention 2 demands of slopes, in its own package and in others that ship it."""

WINDOW_WITHOUT_CAUSAL = limit.rule(
    "window: causal, or no more queries than keys",
    lambda facts: facts["window"] is None or facts.get("causal") is True or facts.size("seq_q") <= facts.size("seq_k"),
    "WINDOW_UNSUPPORTED",
)
"""FlashAttention 2 takes the number of keys as the right side of a window that is open there, or longer.

First queries lose keys, or see more. Seen with sequences of unlike lengths (torch 2.11, H200, 2026-12-01), whose calls
name a longer bound.
"""


BELOW_TILES: tuple[limit.Limit, ...] = (
    limit.dim("page_size", max=64),
    limit.rule(
        "page_size: below 64 with a window over heads wider than 192",
        lambda facts: facts.size("page_size") < 64 or facts["window"] is None or facts.size("head_dim") <= 192,
    ),
)
"""Pages smaller than a tile of keys, of which the smallest has 64 (hopper/tile_size.h).

Versions 3 and 4 read pages of whole tiles by TMA, with what lies beyond a sequence. They multiply that by 0, which
leaves a NaN. Version 3 does so where several queries fill a tile (``get_pagedkv_tma`` in hopper/flash_api.cpp), version
4 for one query, too (``paged_kv_non_tma`` in flash_attn/cute/interface.py).
"""


def _little_shared_memory(facts: Facts) -> Reason | None:
    """Its backward pass leaves gradients unwritten (flash_bwd_launch_template.h)."""
    sm, width = facts.device.sm, facts.size("head_dim")
    if not (facts["requires_grad"] and facts["dropout_p"]) or sm is None or width <= 192:
        return None
    if sm not in ((8, 6), (8, 9)) and sm < (12, 0):
        return None
    return Reason(ReasonCode.HEAD_DIM_TOO_LARGE, "head_dim", "at most 192 with dropout and gradients here", width)


WITH_GRADIENTS = (LseWithoutGradient(), limit.one_of("bias_grad", False))
"""What the backward passes lack."""

_SHAPES = (
    limit.dtype("float16", "bfloat16"),
    limit.dim("head_dim", max=256, multiple=8),
    limit.equal("value_dim", "head_dim"),
    limit.positive("scale"),  # as torch's build of it was measured to need
    limit.last_stride_one("query", "key", "value"),
    limit.aligned(16, "query", "key", "value"),
)


KERNELS = (
    FLASH_ATTN_3.kernel(
        "flash_attn.v3",
        attention.ALL,
        _load_v3,
        layout="BSHD",
        accepts=("causal", "scale", "window", "softcap", "return_lse"),
        limits=(limit.arch(min=(9, 0), max=(9, 9)), limit.instruction("wgmma"), *_SHAPES, *WITH_GRADIENTS),
        grad=True,
        priority=100,
        aliases=("flash_attn.v3.causal",),
    ),
    FLASH_ATTN_2.kernel(
        "flash_attn.v2",
        attention.ALL,
        _load_v2,
        limit.platform("cuda", "rocm"),
        limit.arch(min=(8, 0)),
        limit.grid(
            x=(("seq_q", 64),), y=("batch",), z=("heads",)
        ),  # flash_fwd_launch_template.h; Dao-AILab/flash-attention#1786
        *_SHAPES,
        *OF_SLOPES,
        WINDOW_WITHOUT_CAUSAL,
        # mha_fwd checks it (csrc/flash_attn/flash_api.cpp)
        limit.rule(
            "softcap: None with dropout",
            lambda facts: facts["softcap"] is None or not facts["dropout_p"],
            "SOFTCAP_UNSUPPORTED",
        ),
        limit.rule(
            "softcap: None on ROCm",
            lambda facts: facts.device.platform != "rocm" or facts["softcap"] is None,
            "SOFTCAP_UNSUPPORTED",
        ),
        *WITH_GRADIENTS,
        limit.Custom("head_dim <= 192 with dropout and gradients on sm 8.6, 8.9 and 12.x", _little_shared_memory),
        layout="BSHD",
        accepts=("causal", "scale", "dropout_p", "window", "softcap", "alibi_slopes", "return_lse"),
        grad=True,
        priority=90,
        # it knows nothing of the units of Hopper and of large Blackwell: an H200 takes 1.5 times what cuDNN takes
        # (vLLM's build of the same code, torch 2.11, 2026-11-20); small Blackwell (12.0) has none of them
        priority_since={(9, 0): 55, (12, 0): 90},
        aliases=("flash_attn.v2.causal",),
    ),
)
