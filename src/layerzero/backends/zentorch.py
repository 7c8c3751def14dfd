"""AMD's zentorch, loaded as an operator library: attention and RMS norms on CPUs with AVX-512.

``import zentorch`` takes 1.6 s and brings torch.compile along; its shared library alone loads in 0.02 s and holds the
same operators. Limits were found by probing zentorch 2.13.0.2 with torch 2.13.0 on an Intel Xeon with AMX, 2026-11-21;
much that the operators cannot do they do wrong in silence. Norms take 0.02 to 0.5 of torch's time, bfloat16 attention a
third on an AMD EPYC (Zen 5) and up to four times as long on the Xeon, hence a priority below torch's own.
Library: zentorch 2.13.0.2, MIT.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.core import forking
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.reuse_conditions import WITHIN, Condition, SizedCall, conditions
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.reference import attention_reference

ZENTORCH = Backend(
    name="zentorch",
    summary="AMD's kernels for CPUs with AVX-512",
    import_name="zentorch",
    distribution="zentorch",
    versions=">=2.13.0.2,<2.13.1",  # it is built for one torch
    tested=("2.13.0.2",),
    known_bad="==2.13.0.1",  # it answers from stale pointers
    requires=("torch>=2.13,<2.14",),
    platforms=("cpu",),
    install="pip install zentorch==2.13.0.2",
    homepage="https://github.com/amd/ZenDNN-pytorch-plugin",
)

_ONE_AT_A_TIME = forking.lock()
"""zentorch_sdpa sets OpenMP's nesting depth to 1 for the whole process, and back: of two threads in it, one soon spins
for ever in a barrier of its matrix product (float32 and bfloat16, within 100 calls, 2026-11-21)."""


@functools.cache
def _operators() -> Any:
    # Read once, at the first matrix product: without it zentorch_linear_unary reorders the caller's weights in place.
    os.environ.setdefault("ZENDNNL_MATMUL_WEIGHT_CACHE", "0")
    spec = importlib.util.find_spec("zentorch")
    if spec is None or spec.origin is None:
        raise ImportError("zentorch is not installed")
    torch.ops.load_library(str(Path(spec.origin).parent / "libzentorch.so"))  # type: ignore[no-untyped-call]
    return torch.ops.zentorch


def _load_sdpa(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., tuple[Tensor, Tensor]] = _operators().zentorch_sdpa.default
    # Its maximum skips NaN beside -inf, so a broken row passes for hidden; its bfloat16 exponential makes 0 of NaN.
    drops_nan = facts["dtype"] is torch.bfloat16 or facts.get("causal") is True

    def sdpa(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        seq_k = key.shape[2]
        if attn_mask is not None and attn_mask.shape[-1] != seq_k:  # raises for a last axis to broadcast; others work
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], seq_k)
        if (drops_nan or attn_mask is not None) and not math.isfinite(query.sum() + key.sum()):
            return _reference(query, key, value, causal=causal, scale=scale, attn_mask=attn_mask)
        with _ONE_AT_A_TIME:
            return operator(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]

    return sdpa


def _reference(*tensors: Tensor, **arguments: Any) -> Tensor:
    output = attention_reference(*(tensor.transpose(1, 2) for tensor in tensors), **arguments)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2)


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., Tensor] = _operators().zentorch_rms_norm.default
    hidden = facts.size("hidden")

    def run(input: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:  # noqa: A002
        # It takes the first axis for the rows: of three axes it leaves most unwritten, of one it overruns the memory.
        return operator(input.view(-1, hidden), weight, epsilon).view(input.shape)

    return operator if facts["input_ndim"] == 2 else run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator = _operators().zentorch_add_rms_norm_.default
    hidden = facts.size("hidden")

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:  # noqa: A002
        output = input.clone(memory_format=torch.contiguous_format)  # it writes the norm over its input, the caller's
        operator(output.view(-1, hidden), weight, residual.view(-1, hidden), eps)
        increment_version(residual)  # as the operator should: whoever saved it for a backward pass must hear of it
        return output

    return run


@dataclass(frozen=True, slots=True)
class RowsApart(limit.Limit):
    """Queries, keys and values have dense rows that do not overlap; repairable by a copy.

    Rows closer than head_dim (sliding windows) give arbitrary numbers, a stride of 0 raises, even that of a single row.
    """

    def check(self, facts: Facts) -> limit.Findings:
        found = []
        for name in ("query", "key", "value"):
            tensor = facts.tensors[name]
            if tensor.strides[3] != 1 or tensor.strides[2] < tensor.shape[3]:
                reason = Reason(ReasonCode.NOT_CONTIGUOUS, name, "rows one after another", f"strides {tensor.strides}")
                found.append(limit.Finding(reason, limit.Repair("copy", name)))
        return tuple(found)

    def describe(self) -> str:
        return "dense rows: query, key, value"


@conditions.register
def _rows_apart(limit: RowsApart, call: SizedCall) -> Iterable[Condition]:
    for name in ("query", "key", "value"):  # that the last stride is 1 is in the coarse key
        rows, head_dim = call.kernel_axes(name)[2], call.facts.tensors[name].shape[3]
        yield WITHIN, (call.operand(name, rows, stride=True),), (head_dim, 2**62)


def _scale(facts: Facts) -> Reason | None:
    """A scale of 0 means the default one to it; a negative one turns the -inf of its causal mask round."""
    scale, causal = facts["scale"], facts.get("causal")
    if not isinstance(scale, (int, float)) or scale > 0 or (scale < 0 and not causal):
        return None
    return Reason(ReasonCode.CONSTRAINT_FAILED, "scale", "above 0" if causal else "not 0", scale)


def _eps_normal(facts: Facts) -> Reason | None:
    """It reads eps as float32, and returns memory that it never wrote where that is 0."""
    eps = facts["eps"]
    normal = isinstance(eps, (int, float)) and eps >= 1e-37
    return None if normal else Reason(ReasonCode.CONSTRAINT_FAILED, "eps", "at least 1e-37", eps)


_VECTORS = limit.cpu_feature("avx512")  # without, attention is torch's own, and norms were never tried
# float16: errors of 0.012 in attention and 0.014 in norms on the Xeon, NaN norms on the EPYC. float64: torch's own
# attention, which reads a float32 mask wrongly, and an error from the norms.
_DTYPES = limit.dtype("float32", "bfloat16")
_EPS = limit.Custom("eps >= 1e-37", ("eps",), _eps_normal)
# Without it the norms, not the attention, kill the process with an illegal instruction (Skylake Xeon, 2026-11-21).
_BFLOAT16 = limit.cpu_feature("avx512_bf16", dtype="bfloat16")

KERNELS = (
    Kernel(
        id="zentorch.sdpa",
        operations=attention.ALL,
        backend=ZENTORCH,
        load=_load_sdpa,
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask"),  # its second result is not the log-sum-exp but unwritten memory
        folds=("causal", "attn_mask", "window", "alibi_slopes"),
        limits=(
            _VECTORS,
            _DTYPES,
            limit.equal("value_dim", "head_dim"),
            limit.dim("seq_k", min=16),  # of fewer keys than vector lanes, a row of NaN passes for hidden and gives 0
            limit.SquareCausal(),
            limit.one_of("attn_mask", "none", "float", foldable=True),
            limit.Custom("scale: not 0, above 0 beside causal", ("scale", "causal"), _scale),
            RowsApart(),
        ),
        deterministic=True,
        sizes_bound=(),
        priority=45,
    ),
    Kernel(
        id="zentorch.rms_norm",
        operations=("norm.rms",),
        backend=ZENTORCH,
        load=_load_rms_norm,
        accepts=("eps",),
        renames={"eps": "epsilon"},
        limits=(_VECTORS, _BFLOAT16, _DTYPES, _EPS, limit.contiguous("input", "weight")),
        deterministic=True,
        sizes_bound=("hidden", "input_ndim"),
        priority=60,
    ),
    Kernel(
        id="zentorch.add_rms_norm",
        operations=("norm.add_rms",),
        backend=ZENTORCH,
        load=_load_add_rms_norm,
        accepts=("eps",),
        limits=(_VECTORS, _BFLOAT16, _DTYPES, _EPS, limit.contiguous("residual", "weight")),
        deterministic=True,
        sizes_bound=("hidden",),
        priority=60,
    ),
)
