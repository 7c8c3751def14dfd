"""cuDNN's attention through its graph API: a graph for each shape, with the mask alignment and window that torch lacks.

Read: nvidia-cudnn-frontend 1.32.0 (_pygraph.py, _sdpa_validate.py, _handle.py, the bindings' docstrings) and cuDNN's
support matrix for 9.18 (2026-11-21). ``F.scaled_dot_product_attention`` runs the same engines for square causal calls
without a log-sum-exp; here causal is aligned bottom-right (S_q <= S_k only) and a window may bound keys to the left.
cuDNN counts a query's own position into the window, so ``left`` grows by one; a left bound needs a right one.
A graph is bound to shapes and strides. It is built on the first call with them, in 10 ms to seconds, so a growing key
length builds one for each length: decoding is left to others. The frontend's own engines, which compile with
the CuTe DSL, are taken out of a graph's plans: cuDNN's are what was measured. The workspace is allocated for each call,
and a handle belongs to a thread, so calls of several streams do not share memory.
Library: nvidia-cudnn-frontend 1.32 (MIT) on cuDNN 9.10 or newer.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.shape_cache import Prepared
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import NotDecoding

CUDNN = Backend(
    name="cudnn",
    summary="cuDNN's fused attention through its graph API",
    import_name="cudnn",
    distribution="nvidia-cudnn-frontend",
    versions=">=1.30,<1.33",
    tested=("1.32.0",),
    requires=("cuda>=12.0",),
    platforms=("cuda",),
    least_sm=(8, 0),
    install="pip install nvidia-cudnn-frontend",
    homepage="https://github.com/NVIDIA/cudnn-frontend",
)

_Q, _K, _V, _OUT, _STATS = 1, 2, 3, 4, 5  # tensor uids
_THREAD = threading.local()


class _Settings(NamedTuple):
    """What a graph fixes besides shapes and strides."""

    causal: bool
    left: int
    scale: float
    lse: bool

    @staticmethod
    def of(facts: Facts) -> _Settings:
        window: Any = facts["window"]
        scale: Any = facts["scale"]
        left, right = window or (-1, -1)
        causal = facts.get("causal") is True or right == 0
        return _Settings(
            causal, left, facts.size("head_dim") ** -0.5 if scale is None else scale, bool(facts["return_lse"])
        )


class Graph(NamedTuple):
    """A built graph and the bytes it needs besides its results."""

    execute: Callable[..., None]
    workspace_bytes: int


def _forget_handles() -> None:
    """Let the main thread's handles go as the process ends: the library tells what outlives it as leaked."""
    _THREAD.__dict__.clear()


atexit.register(_forget_handles)


def handle(index: int) -> Any:
    """This thread's handle for a device, on its current stream."""
    import cudnn

    handles = _THREAD.__dict__.setdefault("handles", {})
    if index not in handles:
        with torch.cuda.device(index):
            handles[index] = cudnn.create_handle()
    cudnn.set_stream(handles[index], torch.cuda.current_stream(index).cuda_stream)
    return handles[index]


def begun(name: str, index: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """An empty graph that computes in float32, and the library's word for the dtype of its tensors."""
    import cudnn

    kind = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[dtype]
    wide = {"intermediate_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
    return cudnn.pygraph(name=name, io_data_type=kind, handle=handle(index), **wide), kind


def built(graph: Any) -> Graph:
    """Plan a graph by engines of cuDNN's own."""
    import cudnn
    from cudnn.engines.engine_ids import is_python_engine

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    plans = enumerate(graph.plans)
    compiling = [graph.get_plan_name_at_index(number) for number, plan in plans if is_python_engine(plan.engine_id)]
    if compiling:
        graph.deselect_engines(compiling)
    graph.check_support()
    graph.build_plans()
    return Graph(graph.execute, int(graph.get_workspace_size()))


def _build(
    index: int, dtype: torch.dtype, layouts: tuple[tuple[tuple[int, ...], ...], ...], settings: _Settings
) -> Graph:
    """Build the graph for tensors of these (shape, strides), BHSD; the output is dense in BSHD."""
    import cudnn

    graph, kind = begun("layerzero_sdpa", index, dtype)
    query, key, value = (
        graph.tensor(dim=list(shape), stride=list(strides), data_type=kind, name=name, uid=uid)
        for (shape, strides), name, uid in zip(layouts, "qkv", (_Q, _K, _V), strict=True)
    )
    masks: dict[str, Any] = {}
    if settings.causal:
        square = layouts[0][0][2] == layouts[1][0][2]
        alignment = cudnn.diagonal_alignment
        masks["diagonal_alignment"] = alignment.TOP_LEFT if square else alignment.BOTTOM_RIGHT
        masks["diagonal_band_right_bound"] = 0
    if settings.left >= 0:
        masks["diagonal_band_left_bound"] = settings.left + 1
    output, stats = graph.sdpa(
        q=query, k=key, v=value, attn_scale=settings.scale, generate_stats=settings.lse, name="sdpa", **masks
    )
    (batch, heads, seq_q, _), value_dim = layouts[0][0], layouts[2][0][3]
    output.set_output(True).set_uid(_OUT).set_data_type(kind)
    output.set_dim([batch, heads, seq_q, value_dim])
    output.set_stride([seq_q * heads * value_dim, value_dim, heads * value_dim, 1])
    if settings.lse:
        stats.set_output(True).set_uid(_STATS).set_data_type(cudnn.data_type.FLOAT)
        stats.set_dim([batch, heads, seq_q, 1])
        stats.set_stride([heads * seq_q, seq_q, 1, 1])
    return built(graph)


_GRAPHS = Prepared(_build, 512)


def _graph_key(facts: Facts) -> tuple[Any, ...]:
    layouts = tuple((tensor.shape, tensor.strides) for tensor in (facts.tensors[name] for name in _TENSORS))
    return facts.device.index, facts["dtype"], layouts, _Settings.of(facts)


def _load(facts: Facts) -> Callable[..., Any]:
    import cudnn  # noqa: F401  # a library that is not there must fail here

    facts.only_this_call()  # the graph of the first call is for its shapes and strides
    index, settings, capturing = facts.device.index, _Settings.of(facts), bool(facts["capturing"])
    batch, seq_q, heads, value_dim = (facts.size(name) for name in ("batch", "seq_q", "heads", "value_dim"))
    uids = (_Q, _K, _V, _OUT, _STATS) if settings.lse else (_Q, _K, _V, _OUT)
    made: Graph | None = None

    # causal, scale and window arrive by keyword, too; the plan's facts have said them already
    def sdpa(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **_: Any) -> Any:
        nonlocal made
        if made is None:  # not before: an adaptation may have changed the strides that the facts name
            layouts = tuple((tuple(tensor.shape), tensor.stride()) for tensor in (query, key, value))
            made = _GRAPHS.get(index, query.dtype, layouts, settings, capturing=capturing)
        if query.requires_grad or key.requires_grad or value.requires_grad:  # a leaf, in no_grad: no exchange takes it
            query, key, value = query.detach(), key.detach(), value.detach()
        output = query.new_empty((batch, seq_q, heads, value_dim)).transpose(1, 2)
        tensors: tuple[Tensor, ...] = (query, key, value, output)
        lse = None
        if return_lse:
            lse = query.new_empty((batch, heads, seq_q), dtype=torch.float32)
            tensors = (*tensors, lse.unsqueeze(-1))
        workspace = query.new_empty(max(made.workspace_bytes, 1), dtype=torch.uint8)
        made.execute(tensors, workspace, handle(index), tensor_uids=uids)
        return output if lse is None else (output, lse)

    return sdpa


def _wide_heads(facts: Facts) -> Reason | None:
    """Heads wider than 128: on Hopper up to 256; on data-centre Blackwell 192 with a value_dim of 128."""
    widths, sm = (facts.size("head_dim"), facts.size("value_dim")), facts.device.sm or (0, 0)
    if max(widths) <= 128 or sm[0] == 9 or (sm[0] in (10, 11) and widths == (192, 128)):
        return None
    return Reason(ReasonCode.HEAD_DIM_TOO_LARGE, "head_dim", "at most 128 on this device", max(widths))


def _window(facts: Facts) -> Reason | None:
    """A window's right bound is the diagonal; one query has none."""
    window: Any = facts["window"]
    if window is None:
        return None
    causal = facts.get("causal") is True or window[1] == 0
    if causal and window[1] in (-1, 0) and facts.size("seq_q") > 1:
        return None
    return Reason(ReasonCode.WINDOW_UNSUPPORTED, "window", "(left, 0), or (left, -1) with causal", window)


_TENSORS = ("query", "key", "value")

KERNELS = (
    CUDNN.kernel(
        "cudnn.sdpa",
        attention.ALL,
        _load,
        limit.dtype("float16", "bfloat16"),
        *limit.dims("head_dim", "value_dim", max=256, multiple=8),
        limit.Custom("head_dim > 128 on sm 9, or 192 with a value_dim of 128 on sm 10", _wide_heads),
        NotDecoding(),
        # masks that hang on the diagonal need as many keys as queries
        limit.rule(
            "seq_k: at least seq_q, under causal or a window",
            lambda facts: (
                (facts.get("causal") is not True and facts["window"] is None) or facts["seq_q"] <= facts["seq_k"]
            ),
        ),
        limit.Custom("window: (left, 0), seq_q > 1", _window),
        limit.positive("scale"),  # the maximum is taken before scaling
        limit.last_stride_one(*_TENSORS),
        limit.aligned(16, *_TENSORS),
        _GRAPHS.before_capture("its graph", _graph_key),
        layout="BHSD",
        accepts=("causal", "scale", "window", "return_lse"),
        graph_safe=True,
        plans_sizes=True,
        priority=65,
    ),
)
