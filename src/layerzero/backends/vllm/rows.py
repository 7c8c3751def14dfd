"""vLLM's kernels over rows on CUDA, loaded as operator libraries of an installed vllm, which is never imported.

**RMS norms.** ``import vllm`` takes seconds and sets up logging, plugins and a platform; ``vllm/_C.abi3.so`` alone
registers the same ``torch.ops._C``. It is built for one torch. Limits follow csrc/layernorm_kernels.cu: inputs of two
to four axes with any strides but a dense last axis; vector loads of what of 16 bytes divides a row; the weight's dtype
is never compared; the output's row starts are computed in 32 bits. It rounds the normalised value before it multiplies
with the weight. Its fused_add_rms_norm writes the norm over its input: norm.add_rms.inplace. For norm.add_rms it would
need a copy of the input first, which costs more than the addition does: see FlashInfer's. 5.0 us at 1 x 4096, 23.8 at
4096 x 4096 (bfloat16, H200, 2026-11-21).

**Activations.** Read: the operators that ``vllm/_C.abi3.so`` of 0.20.0 defines, and csrc/activation_kernels.cu. They
read dense rows, whatever the strides say; where a row is whole vectors of 16 bytes they load those from wherever the
data begins, so it has to begin at 16. A block a row; row starts in 64 bits. gpt-oss's gate comes by turns, clamped by
the device's minimum, which drops a NaN: it is left out. Each number is computed by itself, so that it is the same in
every batch.

Norms are not: blocks have 1,024 threads below 256 rows and 256 from there on (csrc/layernorm_kernels.cu).

**The penalty for repetition**; frequency and presence are torch's, as vLLM has them. Read: csrc/sampler.cu and
csrc/torch_bindings.cpp of vLLM (``apply_repetition_penalties_(Tensor! logits, Tensor prompt_mask, Tensor output_mask,
Tensor repetition_penalties) -> ()``). It works in place on dense rows, takes masks for all rows and a penalty for each
in the dtype of the logits, and counts places of a row in 32 bits. Conforms on an H200 (torch 2.11, 2026-11-22).

**The choice of experts**: a softmax and the best of it in one kernel, a warp for a few rows. Read:
csrc/moe/torch_bindings.cpp of vLLM (``topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor!
token_expert_indices, Tensor gating_output, bool renormalize, Tensor? bias) -> ()``). Logits go in as float32, which
every version reads; the third tensor is scratch. A row whose length is a power of two, or a multiple of 64, is read by
vectors of at most 16 bytes: on an H200 float32 logits off such a boundary ended in a misaligned address, everything
else was right; with what it demands now it conforms there (torch 2.11, 2026-11-23). Its ``grouped_topk`` is left out:
nothing says in which order it names the experts. Its products of experts are Triton code within the package, which is
never imported.
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.norm_limits import ElementsBelow, RowsAligned, sum_then
from layerzero.backends.torch.quantized_linear import on_boundary
from layerzero.backends.vllm.library import VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.sampling.formulas import of_row, penalised


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator = operators("_C.abi3.so", "_C").rms_norm.default
    empty_like, hidden = torch.empty_like, facts.size("hidden")
    contiguous = torch.contiguous_format

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = empty_like(input, memory_format=contiguous)
        operator(output, input, weight, eps)
        return output

    def flat(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return run(input.reshape(-1, hidden), weight, eps=eps).view(input.shape)

    return run if 2 <= facts.size("input_ndim") <= 4 else flat


def _load_add_rms_norm_inplace(facts: Facts) -> Callable[..., Any]:
    operator: Callable[..., Any] = operators("_C.abi3.so", "_C").fused_add_rms_norm.default

    def one_row(input: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> None:
        operator(input.view(1, -1), residual.view(1, -1), weight, epsilon)

    return one_row if facts.size("input_ndim") == 1 else operator  # it asks for the stride of the axis before the last


IN_32_BITS = "vllm 0.20.0 computes where rows start in 32 bits, and reads others beyond (H200, 2026-11-30)"

_LIMITS = (
    limit.dim("hidden", min=2),  # the last stride must be 1, which that of a single element need not be
    ElementsBelow(2**32),
    limit.contiguous("weight"),
)


def gate_of(facts: Facts, library: Any) -> Callable[..., None]:
    """The operator of vLLM's that gates as a call asks for."""
    if facts["operation"] == "mlp.silu_mul.joined":
        return library.silu_and_mul.default  # type: ignore[no-any-return]
    return (library.gelu_tanh_and_mul if facts["approximate"] == "tanh" else library.gelu_and_mul).default  # type: ignore[no-any-return]


def gated(operator: Callable[..., None]) -> Callable[..., Tensor]:
    """What a kernel calls whose operator writes rows of half the input's width."""

    def run(input: Tensor, **_: Any) -> Tensor:
        output = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
        operator(output, input)
        return output

    return run


def _load_gate(facts: Facts) -> Callable[..., Tensor]:
    """What loads 32 bytes at a time of more than 128 rows, from compute capability 10 on, wherever the data begins.

    Facts tell alignments of up to 16 bytes, so rows are looked at in the call. Read: ``ld256`` and
    ``LAUNCH_ACTIVATION_GATE_KERNEL`` of csrc/activation_kernels.cu (0.20.0).
    """
    gate = gated(gate_of(facts, operators("_C.abi3.so", "_C")))
    if facts.device.sm is None or facts.device.sm < (10, 0):
        return gate
    return lambda input, **given: gate(on_boundary(input, 32), **given)


def _load_penalties(facts: Facts) -> Callable[..., Any]:
    repeat = operators("_C.abi3.so", "_C").apply_repetition_penalties_.default

    def run(
        logits: Tensor,
        output_counts: Tensor,
        *,
        prompt_mask: Tensor | None = None,
        repetition: float | None = None,
        presence: float | None = None,
        frequency: float | None = None,
        repetition_by_row: Tensor | None = None,
        presence_by_row: Tensor | None = None,
        frequency_by_row: Tensor | None = None,
    ) -> Tensor:
        said = output_counts > 0
        output = logits.clone()
        if repetition is not None or repetition_by_row is not None:
            rows = output.view(-1, output.shape[-1])
            ones = rows.new_ones(len(rows))
            each = ones * repetition if repetition is not None else ones * repetition_by_row.reshape(-1)  # type: ignore[union-attr]
            asked = torch.zeros_like(said) if prompt_mask is None else prompt_mask
            repeat(rows, asked.reshape(rows.shape).contiguous(), said.reshape(rows.shape).contiguous(), each)
        return penalised(
            output, said, output_counts, None, of_row(presence, presence_by_row), of_row(frequency, frequency_by_row)
        )

    return run


def _load_moe(facts: Facts) -> Callable[..., tuple[Tensor, Tensor]]:
    operator = operators("_moe_C.abi3.so", "_moe_C").topk_softmax.default
    more = (None,) * (len(operator._schema.arguments) - 5)  # a bias; in vLLM 0.33 rows that count for nothing, too

    def route(logits: Tensor, *, top_k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
        rows = logits.to(torch.float32)
        weights = rows.new_empty((len(rows), top_k))
        places, scratch = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
        # weights of a row with NaN or inf are 0 (topk_softmax_kernels.cu of 0.20.0): experts make NaN of a token of NaN
        operator(weights, places, scratch, rows, renormalize, *more)
        return weights if scale == 1.0 else weights.mul_(scale), places

    return route


KERNELS = (
    VLLM.kernel(
        "vllm.rms_norm",
        "norm.rms",
        _load_rms_norm,
        *_LIMITS,
        limit.dtype("float32", "float16", "bfloat16"),
        limit.last_stride_one("input"),
        RowsAligned(("input", "weight")),
        accepts=("eps",),
        priority=90,
    ),
    VLLM.kernel(
        "vllm.add_rms_norm",
        "norm.add_rms",
        lambda facts: sum_then(_load_rms_norm(facts)),
        *_LIMITS,
        limit.dtype("float32", "bfloat16"),  # three roundings: of float16 more than its tolerance at times
        limit.last_stride_one("residual"),
        RowsAligned(("residual", "weight")),
        accepts=("eps",),
        priority=80,
    ),
    VLLM.kernel(
        "vllm.add_rms_norm_inplace",
        "norm.add_rms.inplace",
        _load_add_rms_norm_inplace,
        *_LIMITS,
        limit.dtype("float32", "bfloat16"),
        limit.contiguous("input", "residual"),
        limit.aligned(16, "input", "residual", "weight"),
        accepts=("eps",),
        renames={"eps": "epsilon"},
        priority=90,
    ),
    *(
        VLLM.kernel(
            f"vllm.{name}",
            f"mlp.{name}.joined",
            _load_gate,
            limit.dtype("float32", "float16", "bfloat16"),
            limit.contiguous("input"),
            limit.aligned(16, "input"),
            limit.dim("joined", multiple=8),  # no copy aligns rows of other lengths
            ElementsBelow(2**32, ("rows", "joined"), IN_32_BITS),
            accepts=accepts,
            batch_invariant=True,
            priority=85,
        )
        for name, accepts in (("silu_mul", ()), ("gelu_mul", ("approximate",)))
    ),
    VLLM.kernel(
        "vllm.penalties",
        "sampling.penalties.counted",
        _load_penalties,
        accepts=(
            "prompt_mask",
            *(f"{name}{ending}" for ending in ("", "_by_row") for name in ("repetition", "presence", "frequency")),
        ),
        limits=(limit.dtype("float32"), limit.contiguous("logits")),
        priority=60,
    ),
    VLLM.kernel(
        "vllm.topk_softmax",
        "moe.route",
        _load_moe,
        limit.dtype("float32", "float16", "bfloat16"),
        limit.dim("experts", max=512),
        limit.contiguous("logits"),
        RowsAligned(("logits",), "experts"),
        ElementsBelow(2**31, ("tokens", "experts"), IN_32_BITS),
        accepts=("top_k", "renormalize", "scale"),
        priority=30,
    ),
)
