"""cuDNN's attention over sequences of unlike lengths that lie one after the other: a graph with ragged offsets.

A graph has room for a longest sequence, each a power of two here, so that few are built; where sequences begin and how
long they are it reads on the device. Offsets count elements, so tensors are dense. What a query without a key gets is
not documented: its output is 0 afterwards. A step has offsets, lengths and those queries once for all layers.
Read: samples and test_sdpa_thd.py of nvidia-cudnn-frontend, sdpa_support_surface.h (2026-11-22). It
was right in 145 checks on an H200 (2026-11-23).
Library: nvidia-cudnn-frontend 1.32 (MIT) on cuDNN 9.10 or newer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.cudnn_frontend import CUDNN, Graph, begun, built, handle
from layerzero.backends.flashinfer.varlen import check_belongs
from layerzero.backends.shape_cache import Prepared
from layerzero.backends.torch.varlen import longest_or
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.ragged import declare as ragged
from layerzero.ops.ragged.starts import RaggedMetadata, sequences_of

_Q, _K, _V, _OUT, _Q_OFFSETS, _K_OFFSETS, _Q_LENS, _K_LENS = _UIDS = tuple(range(1, 9))
_SHORTEST = 64
"""What the graph for the shortest sequences has room for: a tile."""


class _Shape(NamedTuple):
    """What a graph fixes; lengths are those that there is room for."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    longest_q: int
    longest_k: int
    causal: bool
    scale: float


def _build(index: int, dtype: torch.dtype, shape: _Shape) -> Graph:
    import cudnn

    graph, kind = begun("layerzero_ragged_sdpa", index, dtype)

    def column(rows: int, of: Any, uid: int) -> Any:
        return graph.tensor(dim=[rows, 1, 1, 1], stride=[1, 1, 1, 1], data_type=of, uid=uid)

    def dims(heads: int, longest: int) -> dict[str, list[int]]:
        token = heads * shape.head_dim
        return {
            "dim": [shape.batch, heads, longest, shape.head_dim],
            "stride": [longest * token, shape.head_dim, token, 1],
        }

    of_queries, of_keys = dims(shape.heads, shape.longest_q), dims(shape.kv_heads, shape.longest_k)
    query = graph.tensor(**of_queries, data_type=kind, uid=_Q)
    key, value = (graph.tensor(**of_keys, data_type=kind, uid=uid) for uid in (_K, _V))
    offsets_q, offsets_k = (column(shape.batch + 1, cudnn.data_type.INT64, uid) for uid in (_Q_OFFSETS, _K_OFFSETS))
    query.set_ragged_offset(offsets_q)
    for each in (key, value):
        each.set_ragged_offset(offsets_k)
    masks: dict[str, Any] = {}
    if shape.causal:
        masks = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
    output, _ = graph.sdpa(
        q=query,
        k=key,
        v=value,
        attn_scale=shape.scale,
        generate_stats=False,
        use_padding_mask=True,
        seq_len_q=column(shape.batch, cudnn.data_type.INT32, _Q_LENS),
        seq_len_kv=column(shape.batch, cudnn.data_type.INT32, _K_LENS),
        name="sdpa",
        **masks,
    )
    output.set_output(True).set_uid(_OUT).set_data_type(kind)
    output.set_dim(of_queries["dim"]).set_stride(of_queries["stride"])
    output.set_ragged_offset(offsets_q)
    return built(graph)


_GRAPHS = Prepared(_build, 512)


class SequencePlaces:
    """Where sequences lie, in elements and in tokens, and the queries that see no key."""

    def __init__(self, step: RaggedMetadata, tokens: int, widths: tuple[int, int], causal: bool) -> None:
        self._tokens, self._widths, self._causal = tokens, widths, causal
        self.update(step)

    def update(self, step: RaggedMetadata) -> None:
        starts = step.cu_seqlens_q, step.cu_seqlens_k
        self.offsets = [each.long() * width for each, width in zip(starts, self._widths, strict=True)]
        self.lens = [each.diff() for each in starts]
        queries, keys = self.lens
        hidden = queries - keys if self._causal else queries.where(keys == 0, 0)
        token = torch.arange(self._tokens, dtype=torch.int32, device=queries.device)
        owner = sequences_of(starts[0], token)
        self.unseeing = (token - starts[0][owner] < hidden[owner]).view(-1, 1, 1)


def _room(longest: int) -> int:
    """The power of two that holds a length."""
    return max(1 << (longest - 1).bit_length(), _SHORTEST)


def _load(facts: Facts) -> Callable[..., Any]:
    import cudnn  # noqa: F401  # a library that is not there must fail here

    index, capturing = facts.device.index, bool(facts["capturing"])
    heads, kv_heads, head_dim = (facts.size(name) for name in ("heads", "kv_heads", "head_dim"))
    widths, default = (heads * head_dim, kv_heads * head_dim), head_dim**-0.5

    def run(
        *tensors: Tensor,
        causal: bool = False,
        scale: float | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        step: RaggedMetadata | None = None,
    ) -> Tensor:
        query, key, value, cu_seqlens_q, cu_seqlens_k = tensors
        tokens = len(query)
        if step is None:
            places = SequencePlaces(RaggedMetadata(cu_seqlens_q, cu_seqlens_k), tokens, widths, causal)
        else:
            check_belongs(step.cu_seqlens_q is cu_seqlens_q and step.cu_seqlens_k is cu_seqlens_k, "ragged_attention")
            owner = ("cudnn.ragged", tokens, widths, causal)
            places = step.slot(owner, lambda each: SequencePlaces(each, tokens, widths, causal))
        rooms = _room(longest_or(max_seqlen_q, tokens)), _room(longest_or(max_seqlen_k, len(key)))
        shape = _Shape(
            len(cu_seqlens_q) - 1, heads, kv_heads, head_dim, *rooms, causal, default if scale is None else scale
        )
        graph: Graph = _GRAPHS.get(index, query.dtype, shape, capturing=capturing)
        if query.requires_grad or key.requires_grad or value.requires_grad:  # a leaf, in no_grad: no exchange takes it
            query, key, value = query.detach(), key.detach(), value.detach()
        output = torch.empty_like(query)
        workspace = query.new_empty(max(graph.workspace_bytes, 1), dtype=torch.uint8)
        columns = [each.view(-1, 1, 1, 1) for each in (*places.offsets, *places.lens)]
        graph.execute((query, key, value, output, *columns), workspace, handle(index), tensor_uids=_UIDS)
        return output.masked_fill_(places.unseeing, 0.0)

    return run


_TENSORS = ("query", "key", "value")

KERNELS = (
    CUDNN.kernel(
        "cudnn.ragged",
        ragged.RAGGED,
        _load,
        limit.dtype("float16", "bfloat16"),
        limit.dim("head_dim", max=128, multiple=8),
        limit.equal("value_dim", "head_dim"),
        limit.positive("scale"),  # the maximum is taken before scaling
        limit.contiguous(*_TENSORS, "cu_seqlens_q", "cu_seqlens_k"),
        limit.aligned(16, *_TENSORS),
        accepts=("causal", "scale", "max_seqlen_q", "max_seqlen_k", "step"),
        priority=45,
    ),
)
