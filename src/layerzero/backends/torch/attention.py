"""PyTorch's own attention kernels on the CPU, and its unfused one that runs everywhere, called as its operators.

Where a mask is -inf for every key, a query gives 0. Models also hide a row by the least number of a dtype, for every
key: scores vanish next to -3.4e38, and all keys get equal shares. Fused kernels form these shares anew in their
backward, from a log-sum-exp that holds no more than the mask's number there. Each share is then 1: gradients were 12
times as large as they should be of 13 keys (CPU, torch 2.13, ``F.scaled_dot_product_attention`` as well, 2026-11-24).

On ROCm, XPU and HPU torch's fused kernels are other ones in each release, and which of them takes a call is known to
torch alone: there its function itself is the kernel, and obeys the caller's ``sdpa_kernel`` context by itself.

``F.scaled_dot_product_attention`` under ``sdpa_kernel`` costs 40 us of host time a call, the operator behind it 15
(H200, torch 2.11, 2026-11-21); the context manager's decision is respected through the limit ``SdpaEnabled``. Called
through the binding that torch generates (``torch._scaled_dot_product_...``), an operator costs 2.1 to 2.6 us less than
through ``torch.ops.aten`` (4.0 for 6.1 and 13.8 for 16.5 us on tiny tensors, Intel Xeon, torch 2.13, 2026-11-22).
Limits were found by probing torch 2.13.0 with random calls against float64 (2026-11-21).

The bias of linear biases as torch expressions: a row holds every distance once, and each query sees a piece of it.

The bias of query i and key j depends on j - i alone, so of H x (q_len + kv_len - 1) numbers one copy makes all.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.cpu_half import Attend, attended, attends, in_float32
from layerzero.core import emulation
from layerzero.core import limits as limit
from layerzero.core.device import PLATFORMS
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.layout import by_group
from layerzero.ops.attention.limits import LseWithoutGradient, SdpaEnabled, SquareCausal

_LOST = -1e3
"""Next to a larger number than this a log-sum-exp in float32 keeps what it adds to it to four digits."""

_ABSORBING = -1e20
"""Scores vanish next to numbers below, in float32 and in float64."""


def loses_log_sums(mask: Tensor) -> bool:
    """Whether a log-sum-exp loses its digits in some row. It reads the values, which costs a wait on a device."""
    largest = mask.detach().amax(-1)
    return bool(((largest < _LOST) & (largest != -torch.inf)).any())


def levelled(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Shift each row of a mask so that its largest number is 0, and leave scores that vanish out of the call.

    The shares stay what they are, and a log-sum-exp holds them; nothing is read on the host. Queries whose scores
    vanish become 0 and get no gradient: their keys have equal shares whatever they are.

    Shapes: query (B, H, S_q, D), mask broadcastable to (B, H, S_q, S_k) → the same
    """
    largest = mask.detach().amax(-1, keepdim=True)
    finite = largest.masked_fill(largest == -torch.inf, 0.0)
    return query.masked_fill(finite < _ABSORBING, 0.0), mask - finite


def blanked(output: Tensor, mask: Tensor) -> Tensor:
    """Put 0 where a mask lets a query see no key: not every kernel behind torch's function is known to."""
    return output.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)


TORCH = Backend(
    name="torch",
    summary="PyTorch's own functions and operators",
    tested=("2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0", "2.15.0"),
    requires=("torch>=2.10",),
    platforms=PLATFORMS,
    homepage="https://pytorch.org",
    flags=("deterministic", "graph_safe", "device_guard"),
)
kernel = TORCH.kernel


def always(run: Callable[..., Any]) -> Callable[[Facts], Callable[..., Any]]:
    """What loads one function for every call."""
    return lambda _facts: run


def no_atomics(facts: Facts) -> bool:
    """Whether torch adds up without atomics in such a call, as on a CPU: the same bits each time, on any threads."""
    return facts.device.platform == "cpu"


BY_ITSELF: dict[str, Any] = {"batch_invariant": True, "tp_invariant": True}
"""Of kernels that compute each row by itself: neither other rows nor other ranks change its bits."""

FLOATS = limit.dtype("float32", "float64", "float16", "bfloat16")

UNLISTED = ("rocm", "xpu", "hpu", "mps")
"""Platforms whose kernels of torch are not declared one by one."""


def sdpa_operator(name: str) -> Callable[..., Any]:
    """One of torch's attention operators, by what follows ``_scaled_dot_product_``."""
    full = f"_scaled_dot_product_{name}"
    generated: Callable[..., Any] | None = getattr(torch, full, None)
    return generated or getattr(torch.ops.aten, full).default


def load_cpu_flash(facts: Facts, attend: Attend | None = None) -> Callable[..., Any]:
    """Load torch's fused kernel on a CPU, BHSD, which also gives the log-sum-exp; short rows get a mask."""
    operator = attend or sdpa_operator("flash_attention_for_cpu")
    causal_here, recording = facts.get("causal") is True, bool(facts["requires_grad"])
    math = sdpa_operator("attention_math")

    def flash(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        few = mask_of_few(query, key, scale, causal=causal_here) if attn_mask is None else None
        if few is not None:
            causal, attn_mask = False, few
        elif recording and attn_mask is not None and loses_log_sums(attn_mask):
            grouped = query.shape[1] != key.shape[1]
            return math(query, key, value, attn_mask, 0.0, causal, scale=scale, enable_gqa=grouped)[0]
        output, lse = operator(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)
        if not return_lse:
            return output
        return output, lse_seen(lse, attn_mask)

    return by_group(flash, facts)


def lse_seen(lse: Tensor, mask: Tensor | None) -> Tensor:
    """The log-sum-exp of the CPU's kernel, which says 0 of a query that sees no key."""
    if mask is not None:
        lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
    return lse.float()


LANES = 16
"""Keys that a vector of the CPU's operator holds."""


def mask_of_few(query: Tensor, key: Tensor, scale: float | None, *, causal: bool) -> Tensor | None:
    """The mask that the CPU's operator needs for fewer keys than a vector holds; None where it needs none.

    That is so where no score can be NaN or infinite, by the lengths of query and key; few queries are not worth the
    look. 4,096 queries of 8 numbers on 7 keys: 304 us, with a mask 479, the look 6 (EPYC Zen 5, 2 cores, 2026-11-29).

    Shapes: query (B, H, S_q, D), key (B, K, S_k, D) → (S_q, S_k)
    """
    if key.shape[2] >= LANES:
        return None
    if query.numel() >= 256 * query.shape[3]:
        lengths = [float(torch.linalg.vector_norm(tensor.detach())) for tensor in (query, key)]
        if lengths[0] * lengths[1] * max(1.0, abs(scale or 0.0)) < 1e38:  # Cauchy and Schwarz; NaN is not below
            return None
    return short_mask(query.shape[2], key.shape[2], query.dtype, causal=causal)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(mode=False)  # a mask made inside it could not be saved for a later call's backward
def short_mask(seq_q: int, seq_k: int, dtype: torch.dtype, *, causal: bool) -> Tensor:
    """A mask for fewer keys than a vector has lanes: without one, scores of NaN pass for hidden there and give 0."""
    mask = torch.zeros((seq_q, seq_k), dtype=dtype)
    return mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu(1), -torch.inf) if causal else mask


def gives_no_lse(facts: Facts) -> bool:
    """Whether ``F.scaled_dot_product_attention`` gives the wanted results: it has no log-sum-exp to give."""
    return not facts["return_lse"]


POSITIVE_WITH_CAUSAL = limit.rule(
    "scale: above 0 with causal",
    lambda facts: facts.get("causal") is not True or not isinstance(facts["scale"], (int, float)) or facts["scale"] > 0,
)
"""The kernel hides the future before it scales: 0 * -inf is NaN, and a negative factor makes it +inf."""


def _load_math(facts: Facts) -> Callable[..., Any]:
    operator = sdpa_operator("attention_math")
    enable_gqa = facts["group"] != 1

    def math(
        *qkv: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, causal: bool = False, **scale: Any
    ) -> Any:
        return operator(*qkv, attn_mask, dropout_p, causal, enable_gqa=enable_gqa, **scale)[0]

    return math


def _load_function(facts: Facts) -> Callable[..., Any]:
    grouped, recording = facts["group"] != 1, bool(facts["requires_grad"])
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def function(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        if attn_mask is not None and recording:
            query, attn_mask = levelled(query, attn_mask)
        output = sdpa(query, key, value, attn_mask, dropout_p, causal, scale=scale, enable_gqa=grouped)
        return output if attn_mask is None else blanked(output, attn_mask)

    return function


def _math_workspace(facts: Facts) -> int:
    """Scores and probabilities in full, in float32 or the inputs' dtype."""
    scores = facts.size("batch") * facts.size("heads") * facts.size("seq_q") * facts.size("seq_k")
    return scores * 8


SDPA_ARGUMENTS = ("causal", "scale")
"""What every kernel of torch's attention takes."""

FOLDED = ("causal", "attn_mask", "window", "alibi_slopes", "kv_lens")
"""What those with a float mask may have folded into it."""


CPU_FLASH = (
    limit.platform("cpu"),
    FLOATS,
    limit.equal("value_dim", "head_dim"),
    POSITIVE_WITH_CAUSAL,
    SdpaEnabled("flash"),
)
"""What kernels demand that run the CPU's fused kernel sequence by sequence, or by tiles."""


def _load(facts: Facts) -> Callable[..., Any]:
    wide = torch.promote_types(facts.tensors["slopes"].dtype, torch.float32)

    def run(slopes: Tensor, *, q_len: int, kv_len: int, causal: bool, out_dtype: torch.dtype | None) -> Tensor:
        behind = torch.arange(kv_len - 1, -q_len, -1, device=slopes.device)  # of the last query, then of those before
        row = slopes.to(wide).unsqueeze(1) * -behind.abs()
        if causal:
            row = row.masked_fill(behind < 0, -torch.inf)
        pieces = row.to(out_dtype or slopes.dtype).unfold(1, kv_len, 1)
        return pieces.index_select(1, torch.arange(q_len - 1, -1, -1, device=slopes.device))

    return run


def cpu_attend(facts: Facts) -> Attend:
    """The operator that kernels run of which torch has none: in float32 where the CPU emulates the call's float16."""
    operator = sdpa_operator("flash_attention_for_cpu")
    pays = facts["dtype"] is torch.float16 and emulation.emulates(facts.device, torch.float16)
    return attended(operator) if pays else operator


def _load_widened(facts: Facts) -> Callable[..., Any]:
    return load_cpu_flash(facts, attended(sdpa_operator("flash_attention_for_cpu")))


_OF_SDPA: dict[str, Any] = {"layout": "BHSD", "grad": True, "handles_negated": True, "stock": gives_no_lse}

_CPU_FLASH = kernel(
    "torch.sdpa.cpu_flash",
    attention.ALL,
    load_cpu_flash,
    limit.platform("cpu"),
    FLOATS,
    limit.equal("value_dim", "head_dim"),
    limit.one_of("bias_grad", False),  # it refuses to differentiate a mask
    SquareCausal(),
    limit.one_of("attn_mask", "none", "float", foldable=True),
    # the kernel reads a float32 mask with a float64 query as if it were float64, beyond its end
    limit.rule(
        "mask_dtype: float64 like the query's",
        lambda facts: facts["dtype"] is not torch.float64 or facts["mask_dtype"] != "float32",
        "ATTN_MASK_UNSUPPORTED",
    ),
    POSITIVE_WITH_CAUSAL,
    LseWithoutGradient(),
    SdpaEnabled("flash"),
    limit.last_stride_one("query", "key", "value"),
    accepts=(*SDPA_ARGUMENTS, "attn_mask", "return_lse"),
    folds=FOLDED,
    graph_safe=False,
    priority=50,
    aliases=("torch.sdpa.causal", "torch.sdpa"),
    **_OF_SDPA,
)

KERNELS = (
    _CPU_FLASH,
    in_float32(_CPU_FLASH, attends, _load_widened, id="torch.sdpa.cpu_flash_widened"),
    kernel(
        "torch.sdpa.math",
        attention.ALL,
        _load_math,
        FLOATS,
        SquareCausal(),
        limit.one_of("attn_mask", "none", "float", foldable=True),
        SdpaEnabled("math"),
        accepts=(*SDPA_ARGUMENTS, "attn_mask", "dropout_p"),
        folds=FOLDED,
        workspace_bytes=_math_workspace,
        priority=20,
        **_OF_SDPA,
    ),
    kernel(
        "torch.sdpa.function",
        attention.ALL,
        _load_function,
        limit.platform(*UNLISTED),
        FLOATS,
        SquareCausal(),
        limit.one_of("attn_mask", "none", "float", foldable=True),
        limit.one_of("mask_dtype", "none", "bool", "query"),
        limit.positive("scale"),
        accepts=(*SDPA_ARGUMENTS, "attn_mask", "dropout_p"),
        folds=tuple(name for name in FOLDED if name != "alibi_slopes"),  # a mask in 16 bits is too coarse for it
        deterministic=False,
        priority=50,
        aliases=("torch.sdpa.causal", "torch.sdpa"),
        **_OF_SDPA,
    ),
    kernel(
        "torch.alibi_bias",
        "posenc.alibi",
        _load,
        FLOATS,
        accepts=("q_len", "kv_len", "causal", "out_dtype"),
        grad=True,
        handles_negated=True,
        priority=50,
    ),
)
