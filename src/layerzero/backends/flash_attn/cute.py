"""FlashAttention 4: kernels in the CuTe DSL that compile for a configuration on its first call, in 1 to 3 seconds.

Read: flash_attn/cute of flash-attn-4 4.0.0b36 (2026-11-21). Limits are the checks of its interface.py; declared are
Hopper, and Blackwell's data-centre parts with tcgen05. Its kernels for sm_80 and sm_120 are slower copies of
FlashAttention 2's and not declared. Values wider than keys are accepted there and not here, where they were not
compared.

The package's own Python takes 78 us a call (H200 host, 2026-11-21): it derives a compile key of 70 entries each time.
What it derives follows from shapes, strides and arguments. So the first call of some shapes and strides goes through
the package, a recorder in place of its table of compiled functions writes down which one it called and with what, and
the next calls alike call that function with their own tensors. A decode step has a new length, for which its first
layer asks the package again: another plan for it would cost 2 ms. The recorder stands in a copy of the package's
function: nothing of the package changes. No keys are split between blocks: Hopper's kernels cannot, and a split is two
functions. What it compiled serves other processes, too (``attention``). Where gradients are recorded the package's own
function runs, which gives sinks their gradient, too. On Hopper results and gradients are the reference's in float16 and
bfloat16 (conformance, 4.0.0b36, H200, torch 2.11, 2026-11-27); 4 x 1024 tokens of 32 heads of 64 took forward and back
2.13 ms, torch's three fused kernels 1.54 to 1.82: they come first. On Blackwell no backward pass ran.
Library: flash-attn-4 4.0, BSD-3-Clause.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flash_attn.attention import cache_folder, in_its_words, kept
from layerzero.backends.gradients import with_gradients
from layerzero.backends.shape_cache import stamps
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel, Trust
from layerzero.core.limit_kinds import Limit
from layerzero.core.system import forking
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import LseWithoutGradient
from layerzero.ops.attention.reference import with_lse

FLASH_ATTN_4 = Backend(
    name="flash_attn",
    summary="FlashAttention 4: Hopper and Blackwell, compiled on first use",
    import_name="flash_attn.cute",  # in a namespace that FlashAttention 2 has, too
    distribution="flash-attn-4",
    versions=">=4.0.0b36,<4.1",
    tested=("4.0.0b36",),
    requires=("cuda>=12.8", "driver>=575.51.03"),  # the CuTe DSL's
    platforms=("cuda",),
    install="pip install --pre flash-attn-4",
    homepage="https://github.com/Dao-AILab/flash-attention",
    flags=("jit",),
)


class _Recorder:
    """Stands where the package keeps its compiled functions; remembers the last one called and its arguments."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.function: Callable[..., Any] | None = None
        self.arguments: tuple[Any, ...] = ()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiled

    def __setitem__(self, key: Hashable, function: Any) -> None:
        self._compiled[key] = function

    def __getitem__(self, key: Hashable) -> Callable[..., Any]:
        function = self._compiled[key]

        def record(*arguments: Any) -> Any:
            self.function, self.arguments = function, arguments
            return function(*arguments)

        return record


def _recording(forward: types.FunctionType) -> tuple[Callable[..., Any], _Recorder]:
    """The package's forward function with a recorder before its compiled functions."""
    recorders: list[_Recorder] = []

    def recorded(cache: Any) -> _Recorder:
        recorders.append(_Recorder(cache))
        return recorders[-1]

    return kept(forward, recorded), recorders[0]


_Q, _K, _V, _OUT, _LSE, _SINK = 0, 1, 2, 3, 4, 13  # where the compiled function takes what changes between calls
_CONSTANT_FROM = _LSE + 1


def _load(facts: Facts) -> Callable[..., Any]:
    from flash_attn.cute.interface import _flash_attn_fwd

    forward, recorder = _recording(_flash_attn_fwd)
    value_dim = facts.size("value_dim")
    recording = forking.lock()  # what one thread's call records is not what another's did
    last: tuple[Any, ...] = ((), None, (), ())  # shapes and strides, the function, and its constants

    def v4(*tensors: Tensor, sinks: Tensor | None = None, return_lse: bool = False, **scores: Any) -> Any:
        query, key, value = tensors
        nonlocal last
        if query.requires_grad or key.requires_grad or value.requires_grad:  # a leaf, in no_grad: no exchange takes it
            query, key, value = query.detach(), key.detach(), value.detach()
        if sinks is not None:
            sinks = sinks.detach()
        shape = query.shape
        output = query.new_empty((*shape[:3], value_dim))
        lse = query.new_empty((shape[0], shape[2], shape[1]), dtype=torch.float32) if return_lse else None
        about = shape, key.shape, query.stride(), key.stride(), value.stride()
        known = last  # once: another thread may write it
        if known[0] == about:
            known[1](query, key, value, output, lse, *known[2], sinks, *known[3])
            return output if lse is None else with_lse(output, lse, sinks)
        own = {"learnable_sink": sinks, "num_splits": 1, "return_lse": return_lse, "out": output, "lse": lse}
        with recording:
            forward(query, key, value, **own, **of_v4(**scores))
            function, arguments = recorder.function, recorder.arguments
            recorder.arguments = ()  # a caller's tensors are its own
        given = (arguments[_K].shape, arguments[_OUT].data_ptr(), arguments[_LSE], arguments[_SINK])
        if (*given[:2], given[2] is lse, given[3] is sinks) != (key.shape, output.data_ptr(), True, True):
            raise RuntimeError("flash_attn.cute calls its compiled function with other arguments than 4.0.0b36 does")
        last = about, function, arguments[_CONSTANT_FROM:_SINK], arguments[_SINK + 1 :]
        return output if lse is None else with_lse(output, lse, sinks)

    return v4


def _load_with_gradients(facts: Facts) -> Callable[..., Any]:
    from flash_attn.cute.interface import flash_attn_func

    def v4(*tensors: Tensor, sinks: Tensor | None = None, return_lse: bool = False, **scores: Any) -> Tensor:
        acting = in_its_words(learnable_sink=sinks, **scores)
        acting["window_size"] = tuple(side if side >= 0 else None for side in acting["window_size"])
        output: Tensor = flash_attn_func(*tensors, **acting)[0]
        return output

    return v4


def of_v4(**scores: Any) -> dict[str, Any]:
    """What acts on scores, in the words of FlashAttention 4's own function."""
    acting = in_its_words(**scores)
    left, right = acting.pop("window_size")
    bounds = {"window_size_left": left if left >= 0 else None, "window_size_right": right if right >= 0 else None}
    return {**acting, **bounds, "softcap": scores.get("softcap")}


def _build_key(facts: Facts) -> Hashable:
    device, head_dim, group = facts.device, facts.size("head_dim"), facts.size("group")
    window: Any = facts["window"]
    left, right = window or (-1, -1)
    rows = facts.size("seq_q") * group  # query heads of a kv head are packed into one tile
    sinks = facts.tensors.get("sinks")
    broadcast = tuple(facts.tensors[name].repeated for name in ("query", "key", "value"))
    return (
        (device.sm, facts["dtype"], head_dim, facts["value_dim"], group),
        (facts.get("causal"), left >= 0, right >= 0, facts["softcap"], facts["return_lse"], sinks and sinks.dtype),
        (rows <= 128, rows <= 192, rows <= 256, broadcast),
        stamps(),
        # Blackwell pairs two blocks for wide heads where the grid leaves room
        (facts["batch"], facts["heads"], facts["seq_q"]) if head_dim == 256 and device.sm != (9, 0) else None,
    )


OF_SINKS: tuple[Limit, ...] = (
    limit.contiguous("sinks"),
    limit.rule(
        "sinks: float16, bfloat16 or float32",
        lambda facts: (
            "sinks" not in facts.tensors
            or facts.tensors["sinks"].dtype in (torch.float16, torch.bfloat16, torch.float32)
        ),
        got=lambda facts: str(facts.tensors["sinks"].dtype),
    ),
)

_TENSORS = ("query", "key", "value")


def _kernel(kernel_id: str, aliases: tuple[str, ...], priority: int, *limits: Limit) -> Kernel:
    return FLASH_ATTN_4.kernel(
        kernel_id,
        attention.ALL,
        _load,
        *limits,
        limit.dtype("float16", "bfloat16"),
        *limit.dims("head_dim", "value_dim", min=8, max=256, multiple=8),
        # wider ones compile, and have not been compared with the reference
        limit.rule(
            "value_dim: at most head_dim", lambda facts: facts["value_dim"] <= facts["head_dim"], "HEAD_DIM_INVALID"
        ),
        limit.positive("scale"),
        limit.last_stride_one(*_TENSORS),
        limit.aligned(16, *_TENSORS),  # it copies otherwise, sinks as well, and what was recorded would not
        *OF_SINKS,
        limit.aligned(4, "sinks"),
        layout="BSHD",
        accepts=("causal", "scale", "window", "softcap", "sinks", "return_lse"),
        graph_safe=True,
        build_key=_build_key,
        cache_folder=cache_folder,
        priority=priority,
        aliases=aliases,
    )


_FORWARD = (
    _kernel(
        "flash_attn.v4",
        ("flash_attn.v4.causal",),
        100,  # tcgen05 is what it was written for
        limit.arch(min=(10, 0), max=(11, 9)),
        limit.instruction("tcgen05.mma"),
        limit.rule(
            "head_dim: at most 128, or 192 with a value_dim of 128, or 256",
            lambda facts: (
                max(both := (facts["head_dim"], facts["value_dim"])) <= 128 or both in ((192, 128), (256, 256))
            ),
            "HEAD_DIM_INVALID",
            got=lambda facts: f"{facts['head_dim']} with a value_dim of {facts['value_dim']}",
        ),
    ),
    _kernel(
        "flash_attn.v4.sm90",
        ("flash_attn.v4", "flash_attn.v4.causal"),  # a lock on either means whichever the device can run
        70,  # 1.67 times the best over 19 shapes of an H200, with 78 us of host time a call; best of six of them
        limit.arch(min=(9, 0), max=(9, 9)),
        limit.instruction("wgmma"),
    ),
)

KERNELS = (
    *_FORWARD,
    *(
        with_gradients(
            each, _load_with_gradients, priority=priority, trust=trust, limits=(*each.limits, LseWithoutGradient())
        )
        for each, priority, trust in zip(_FORWARD, (99, 39), (Trust.UNTRIED, Trust.DECLARED), strict=True)
    ),
)
