"""FlashInfer's attention on dense tensors: FlashAttention 2 and 3 templates on tensor cores, and decode on CUDA cores.

Read: flashinfer-python 0.7.2.post1, prefill.py, decode.py, jit/ and csrc/ (2026-11-21), and what 0.7.4 changed there
and in what other adapters call (2026-12-01). Each module is compiled for dtype, head dims, sliding window and softcap
by nvcc, 10 to 80 s, and kept in ~/.cache/flashinfer. A kernel is legal once it was built here (``lz.warmup``), or where
flashinfer-jit-cache brought the module (flashinfer_modules.py).
Modules are called directly; FlashInfer's own Python costs 29 us a call (H200 host, 2026-11-21).

A single sequence needs no plan. For more FlashInfer plans where each tile works; as dense lengths follow from the
shape, a plan is made once for a shape and kept. Its integer workspace is written by planning only and so shared; what a
call writes is allocated for the call, in its stream. A window bounds keys to the left, only a causal mask those to the
right. Log-sum-exps come in base 2 as (tokens, heads).

Its other backends are left out: ``cudnn`` is cuDNN, which LayerZero calls itself; ``trtllm-gen`` is for paged keys;
``cutlass`` (sm_100) writes in front of its output and shares a workspace between streams.
Library: flashinfer-python 0.7.2, Apache-2.0, arXiv:2501.01005.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.modules import Variant, build_key, compiled_for, planned, prebuilt
from layerzero.backends.flashinfer.plan import PLANS, FlashInferPlan, plan_before_capture, plan_key
from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.shape_cache import launch_lock
from layerzero.core import limits as limit
from layerzero.core.facts import Facts, TensorFacts
from layerzero.core.kernel import Backend, Kernel, Load
from layerzero.core.limit_kinds import Limit, OfTensors
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.reference import lse_of_spoiled_rows

FLASHINFER = Backend(
    name="flashinfer",
    summary="FlashInfer: attention, sampling, norms and rotations, compiled on first use",
    import_name="flashinfer",
    distribution="flashinfer-python",
    # All kernels of 0.7.4 passed conformance but for threads in three: norms, PODs and tinygemm. Under the lock below
    # norms and decodes were right in threads, and tinygemm in fresh ones. PODs share what decodes do, and did not run
    # again (H200, 2026-12-01).
    versions=">=0.7.2,<0.7.5",
    tested=("0.7.2.post1",),
    requires=("cuda>=12.0",),
    platforms=("cuda",),
    least_sm=(8, 0),
    install="pip install flashinfer-python==0.7.2.post1",
    homepage="https://github.com/flashinfer-ai/flashinfer",
    flags=("graph_safe", "jit", "device_guard"),
)


def kernel(name: str, operations: str | tuple[str, ...], load: Load, *more: Limit, **fields: Any) -> Kernel:
    """Declare a kernel of FlashInfer whose launches on a device come from one thread at a time.

    Threads share a norm's shared memory ("invalid argument"), a stream's workspace and the counters of PODs. In four
    threads 8 of 1,600 decodes were wrong, and with the lock none (0.7.4, whose launches are those of 0.7.2, H200,
    2026-12-01). The lock takes 0.35 us of a call.
    """

    @functools.wraps(load)
    def loaded(facts: Facts) -> Callable[..., Any]:
        run, alone = load(facts), launch_lock("flashinfer", facts.device.index)

        def launched(*tensors: Tensor, **options: Any) -> Any:
            with alone:
                return run(*tensors, **options)

        return launched

    return FLASHINFER.kernel(name, operations, loaded, *more, **fields)


_NHD = 0  # TensorLayout.NHD
_FULL, _CAUSAL, _CUSTOM = 0, 1, 2  # MaskMode
_UNTURNED = 1.0, 1e4  # scale and theta of a rotation that is none
_SCRATCH_BYTES = 32 * 2**20  # what its own wrappers give a single call for the parts of split keys
_LN_2 = math.log(2.0)


def _packed(mask: Tensor, batch: int, seq_q: int, seq_k: int) -> Tensor:
    """Bits of a mask, each sequence's beginning at a byte."""
    from flashinfer.quantization import packbits

    bits = mask.expand(batch, 1, seq_q, seq_k).reshape(batch, -1)
    if bits.shape[1] % 8:
        bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    packed: Tensor = packbits(bits.reshape(-1).contiguous(), bitorder="little")
    return packed


def _natural(output: Tensor, lse: Tensor) -> Tensor:
    """(tokens, H) in base 2 to (B, H, S_q) in base e; of parts that it merges, those of NaN are left out."""
    natural = lse.mul_(_LN_2).view(len(output), -1, lse.shape[-1]).transpose(1, 2)
    return lse_of_spoiled_rows(output.transpose(1, 2), natural)


def _loader(backend: str) -> Callable[[Facts], Callable[..., Any]]:
    def load(facts: Facts) -> Callable[..., Any]:
        return _load_batch(backend, facts) if planned(backend, facts) else _load_single(backend, facts)

    return load


# The functions below get scale, causal, window and softcap by keyword, too; their plan's facts have said them already.


def _load_single(backend: str, facts: Facts) -> Callable[..., Any]:
    from flashinfer.prefill import get_single_prefill_module

    run = get_single_prefill_module(backend, *compiled_for(facts), False).run
    variant = Variant.of(facts)
    seq_q, seq_k, heads, value_dim = (facts.size(name) for name in ("seq_q", "seq_k", "heads", "value_dim"))
    scratch_bytes = _SCRATCH_BYTES if backend == "fa2" else 1
    mode = _CAUSAL if variant.causal else _FULL

    def single(*tensors: Tensor, attn_mask: Tensor | None = None, return_lse: bool = False, **_: Any) -> Any:
        query, key, value = tensors
        output = query.new_empty((1, seq_q, heads, value_dim))
        lse = query.new_empty((seq_q, heads), dtype=torch.float32) if return_lse else None
        run(
            *(query[0], key[0], value[0], query.new_empty(scratch_bytes, dtype=torch.uint8), output[0], lse),
            *(mode if attn_mask is None else _CUSTOM, _NHD, variant.left),
            None if attn_mask is None else _packed(attn_mask, 1, seq_q, seq_k),
            *(None, variant.softcap, variant.scale, None, None, None),  # ALiBi before, scales of q, k and v behind
            *_UNTURNED,
        )
        return output if lse is None else (output, _natural(output, lse))

    return single


def overlaps(facts: Facts) -> bool:
    """Whether a kernel may start before the one ahead of it ends: it waits by itself."""
    return facts.device.sm is not None and facts.device.sm >= (9, 0)


def _load_batch(backend: str, facts: Facts) -> Callable[..., Any]:
    plan: FlashInferPlan = PLANS.get(*plan_key(backend)(facts), capturing=bool(facts["capturing"]))
    variant = Variant.of(facts)
    batch, seq_q, seq_k, heads, value_dim = (
        facts.size(name) for name in ("batch", "seq_q", "seq_k", "heads", "value_dim")
    )
    mode = _CAUSAL if variant.causal else _FULL
    dependent_launch = overlaps(facts)

    def ragged(*tensors: Tensor, attn_mask: Tensor | None = None, return_lse: bool = False, **_: Any) -> Any:
        query = tensors[0]
        output = query.new_empty((batch, seq_q, heads, value_dim))
        lse = query.new_empty((batch * seq_q, heads), dtype=torch.float32) if return_lse else None
        plan.module.ragged_run(
            *(query.new_empty(plan.scratch_bytes, dtype=torch.uint8), plan.integers, plan.info),
            *(each.flatten(0, 1) for each in tensors),
            *(plan.queries, plan.keys, output.view(-1, heads, value_dim), lse),
            *(mode if attn_mask is None else _CUSTOM, _NHD, variant.left, dependent_launch),
            *((None, None) if attn_mask is None else (_packed(attn_mask, batch, seq_q, seq_k), plan.masks)),
            *(None,) * 4,  # ALiBi, and three lists for scoring many items at once
            *(variant.softcap, variant.scale, *_UNTURNED, 0),
        )
        return output if lse is None else (output, _natural(output, lse))

    return ragged


def _load_decode(facts: Facts) -> Callable[..., Any]:
    from flashinfer.decode import get_single_decode_module

    run = get_single_decode_module(*compiled_for(facts)).run
    variant = Variant.of(facts)
    heads, value_dim = facts.size("heads"), facts.size("value_dim")

    def decode(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool = False, **_: Any) -> Any:
        output = query.new_empty((1, 1, heads, value_dim))
        lse = query.new_empty((1, heads), dtype=torch.float32) if return_lse else None
        run(
            *(query[0, 0], key[0], value[0], query.new_empty(_SCRATCH_BYTES, dtype=torch.uint8), output[0, 0]),
            *(None if lse is None else lse[0], None),  # ALiBi
            *(_NHD, variant.left, variant.softcap, variant.scale, *_UNTURNED),
        )
        return output if lse is None else (output, _natural(output, lse))

    return decode


class _OneStep(OfTensors):
    """Batch and sequence of these tensors step as one axis, so that (B, S, H, D) is (B * S, H, D).

    Where a sequence starts is computed in 32 bits: beyond, it is another's (fa2, 0.7.2, H200, 2026-11-30).
    """

    __slots__ = ()

    def problem(self, name: str, tensor: TensorFacts, _: Facts, /) -> Reason | None:
        batch, seq = tensor.shape[:2]
        dense = tensor.strides[0] == math.prod(tensor.shape[1:])
        if not dense and (reach := (batch - 1) * tensor.strides[0]) >= 2**32:
            wanted = "sequences that start within 2**32 numbers"
            return Reason(ReasonCode.NOT_CONTIGUOUS, name, wanted, f"the last one {reach} behind the first")
        if batch == 1 or seq == 1 or tensor.strides[0] == seq * tensor.strides[1]:
            return None
        return Reason(ReasonCode.NOT_CONTIGUOUS, name, "one step for batch and sequence", f"strides {tensor.strides}")

    def describe(self) -> str:
        return "batch and sequence step as one"


TEMPLATE_DIMS = limit.rule(
    "head_dim: 64, 128 or 256 like value_dim, or 192 with a value_dim of 128",
    lambda facts: (facts["head_dim"], facts["value_dim"]) in ((64, 64), (128, 128), (256, 256), (192, 128)),
    "HEAD_DIM_INVALID",
    got=lambda facts: f"{facts['head_dim']} with a value_dim of {facts['value_dim']}",
)

_TENSORS = ("query", "key", "value")
_ARGUMENTS = ("causal", "scale", "window", "softcap", "return_lse")
_SHARED = (
    limit.dtype("float16", "bfloat16"),
    limit.positive("scale"),
    limit.rule(
        "window: None with a mask, or (left, 0) or (left, -1)",  # one query needs no bound to the right
        lambda facts: (
            facts["window"] is None
            or (facts["attn_mask"] == "none" and (facts["seq_q"] == 1 or facts["window"][1] in (-1, 0)))
        ),
        "WINDOW_UNSUPPORTED",
    ),
    limit.aligned(16, *_TENSORS),
)
_TEMPLATES = (
    *(*_SHARED, TEMPLATE_DIMS, limit.last_stride_one(*_TENSORS), _OneStep(("query", "key", "value"))),
    ElementsBelow(2**32, ("batch", "seq_q", "heads", "head_dim")),  # of dense ones, which no copy brings nearer
    ElementsBelow(2**32, ("batch", "seq_k", "kv_heads", "head_dim")),
)


def _template(backend: str, operations: tuple[str, ...], kind: str, priority: int, *limits: Limit) -> Kernel:
    masks = ("attn_mask",) if backend == "fa2" else ()
    return kernel(
        f"flashinfer.{backend}.{kind}",
        operations,
        _loader(backend),
        layout="BSHD",
        accepts=tuple(name for name in (*_ARGUMENTS, *masks) if kind == "prefill" or name != "causal"),
        limits=(*limits, *_TEMPLATES, plan_before_capture(backend)),
        build_key=build_key(backend),
        prebuilt=prebuilt(backend),
        workspace_bytes=lambda _: _SCRATCH_BYTES,
        priority=priority,
        aliases=("flashinfer.causal",) if kind == "prefill" else (),
    )


_HOPPER = (limit.arch(min=(9, 0), max=(9, 9)), limit.instruction("wgmma"))
_MASKED = (
    limit.one_of("attn_mask", "none", "bool"),
    # a mask is one bit for a query and a key
    limit.rule(
        "attn_mask: the same for all heads",
        lambda facts: (mask := facts.tensors.get("attn_mask")) is None or mask.shape[-3:-2] in ((), (1,)),
        "ATTN_MASK_UNSUPPORTED",
    ),
)

# with fewer keys its kernel for one sequence raises, and that for more is wrong (0.7.2 and 0.7.4, H200, 2026-12-01)
_KEYS = limit.rule(
    "causal: seq_q <= seq_k",
    lambda facts: (
        facts["attn_mask"] != "none" or not Variant.of(facts).causal or facts.size("seq_q") <= facts.size("seq_k")
    ),
)

KERNELS = (
    _template("fa3", attention.PREFILL, "prefill", 85, *_HOPPER),
    _template("fa2", attention.PREFILL, "prefill", 75, *_MASKED, _KEYS),
    _template("fa2", attention.DECODE, "decode", 80, *_MASKED),  # packs the query heads of a kv head into one tile
    kernel(
        "flashinfer.decode",
        attention.DECODE,
        _load_decode,
        limit.arch(min=(7, 5)),
        limit.dim("batch", max=1),  # more sequences only as pages
        *_SHARED,
        limit.dim("head_dim", one_of=(64, 128, 256)),
        limit.equal("value_dim", "head_dim"),
        limit.dim("group", one_of=(1, 2, 3, 4, 6, 8, 16)),
        limit.contiguous(*_TENSORS),  # it takes strides for granted
        layout="BSHD",
        accepts=tuple(name for name in _ARGUMENTS if name != "causal"),
        build_key=build_key("decode"),
        prebuilt=prebuilt("decode"),
        workspace_bytes=lambda _: _SCRATCH_BYTES,
        priority=80,
    ),
)
