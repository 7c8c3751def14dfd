"""Liger's Triton kernels with their backward passes: norms, gates and cross-entropy, on NVIDIA's and AMD's GPUs.

None of them ran on a GPU yet. Under Triton's interpreter, on a CPU, results and gradients in float32 and bfloat16 are
the reference's (``tests/kernels/test_library_gradients.py``). What is done otherwise than in Liger's own functions:

- The gates' backward kernels write over gate and up, which a caller may still read: they get copies.
- Cross-entropy writes gradients over the logits, and zeros over ignored rows without gradients, too: it gets a copy.
- The mean of no row is NaN, where Liger has 0.
- A weight gets its gradient where the hidden states want none; Liger gives None then.
- Gradients of the linear layer's weight are added up in float32; Liger rounds each chunk's to the weight's dtype.
- Rotary positions are not here: the tables' gradients, which the reference has, Liger does not compute.

float16 is refused by the losses: gradients of a mean lie below its smallest number, before GradScaler's factor comes.
Both losses read counts on the host, and wait for the device: no graph captures them. What the backward pass launches
compiles inside the first one.
Library: liger-kernel 0.8.5, BSD-2-Clause, arXiv:2410.10989; read line by line, hence one version only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends import liger
from layerzero.backends.compiler_caches import triton_cache
from layerzero.backends.gradients import from_kept, given_away, with_gradients
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust

Needed = tuple[bool, ...]


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import _CASTING_MODE_GEMMA, rms_norm_backward, rms_norm_forward
    from liger_kernel.ops.utils import calculate_settings

    settings = calculate_settings(facts.size("hidden"))
    mode = _CASTING_MODE_GEMMA.value

    def differentiate(kept: Any, needed: Needed, gradient: Tensor) -> Any:
        rows, weight, scales = kept
        in_place = False  # else over the gradient that another branch of the graph may read
        return rms_norm_backward(gradient, rows, weight, scales, 0.0, mode, *settings, in_place, None, needed[1])

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        def compute(input: Tensor, weight: Tensor) -> Any:
            output, rows, scales, *_ = rms_norm_forward(input, weight, float(eps), 0.0, mode, None)
            return output, (rows, weight, scales)

        return from_kept(compute, differentiate, input, weight)

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    hidden = facts.size("hidden")

    def differentiate(kept: Any, needed: Needed, gradient: Tensor) -> Any:
        return layer_norm_backward(gradient, *kept, *needed[1:])

    def run(input: Tensor, *, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        def compute(rows: Tensor, weight: Tensor, bias: Tensor) -> Any:
            output, rows, mean, scales, *_ = layer_norm_forward(rows, weight, bias, float(eps))
            return output, (rows, weight, bias, mean, scales)

        given = input.view(-1, hidden), weight.view(hidden), bias.view(hidden)
        output = from_kept(compute, differentiate, *given)
        return output.view(input.shape)

    return run


def _gate(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    def compute(gate: Tensor, up: Tensor) -> Any:
        return forward(gate, up)[2], (gate, up)

    def differentiate(kept: Any, _: Needed, gradient: Tensor) -> Any:
        return backward(*(each.clone() for each in kept), gradient)

    def run(gate: Tensor, up: Tensor, *, approximate: str = "tanh") -> Tensor:
        return from_kept(compute, differentiate, gate, up)

    return run


def _load_gelu_mul(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.geglu import geglu_backward, geglu_forward

    return _gate(geglu_forward, geglu_backward)


def _load_silu_mul(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops import swiglu

    if "up" in facts.tensors:
        return _gate(swiglu.swiglu_forward, swiglu.swiglu_backward)

    def compute(input: Tensor) -> Any:
        return swiglu.swiglu_fused_gate_up_forward(input)[1], (input,)

    def differentiate(kept: Any, _: Needed, gradient: Tensor) -> Any:
        found: Tensor = swiglu.swiglu_fused_gate_up_backward(kept[0], gradient)  # of two axes, whatever it was given
        return (found.view(kept[0].shape),)

    def together(input: Tensor) -> Tensor:
        return from_kept(compute, differentiate, input)

    return together


def _of_rows(loss: Tensor, places: Tensor, ignored: int, reduction: str) -> Tensor:
    """NaN where it is the mean of no row."""
    return loss if reduction != "mean" else torch.where((places != ignored).any(), loss, torch.nan)


def _load_cross_entropy(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.cross_entropy import cross_entropy_backward, cross_entropy_forward

    by_row = facts["operation"] == "loss.cross_entropy.rows"

    def run(
        logits: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None = None,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None = None,
        z_loss: float,
        reduction: str = "mean",
    ) -> Tensor:
        reduction = "none" if by_row else reduction
        places, cap = target.reshape(-1).long(), None if softcap is None else float(softcap)
        more = float(z_loss), float(label_smoothing), reduction, cap, False

        def compute(needed: Needed, logits: Tensor) -> Any:
            over = logits.clone(memory_format=torch.contiguous_format).requires_grad_(needed[0])
            found, *_, made = cross_entropy_forward(over, places, weight, ignore_index, *more)
            return _of_rows(found, places, ignore_index, reduction), (made.detach(),)

        loss = given_away(
            compute,
            lambda gradient, made: (cross_entropy_backward(made, gradient),),
            logits.reshape(-1, logits.shape[-1]),
        )
        return loss.view(target.shape) if by_row else loss

    return run


def _load_linear_cross_entropy(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.fused_linear_cross_entropy import (
        fused_linear_cross_entropy_backward,
        fused_linear_cross_entropy_forward,
    )

    by_row = facts["operation"] == "loss.linear_cross_entropy.rows"

    def run(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None = None,
        z_loss: float,
        reduction: str = "mean",
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        reduction = "none" if by_row else reduction
        places = target.reshape(-1).long()
        named = {
            "ce_weight": None if class_weight is None else class_weight.detach(),
            "ignore_index": ignore_index,
            "lse_square_scale": float(z_loss),
            "label_smoothing": float(label_smoothing),
            "reduction": reduction,
            "softcap": None if softcap is None else float(softcap),
            "accum_dtype": torch.float32,
        }

        def all_of(needed: Needed, rows: Tensor, weight: Tensor, bias: Tensor | None, **more: Any) -> Any:
            found, *_, of_rows, of_weight, of_bias = fused_linear_cross_entropy_forward(
                rows,
                weight,
                places,
                bias=bias,
                compute_gradients=any(needed),
                weight_requires_grad=needed[1],
                **named,
                **more,
            )
            return _of_rows(found, places, ignore_index, reduction), (of_rows, of_weight, of_bias)

        def losses(*given: Any) -> Any:
            return all_of((False, False, False), *given)[0], given

        def differentiate(kept: Any, needed: Needed, gradient: Tensor) -> Any:
            return all_of(needed, *kept, token_grad_output=gradient)[1]

        given = hidden.reshape(-1, hidden.shape[-1]), weight, bias
        if by_row:
            loss = from_kept(losses, differentiate, *given)
            loss = loss.view(target.shape)
        else:
            loss = given_away(all_of, fused_linear_cross_entropy_backward, *given)
        return loss.to(out_dtype or hidden.dtype)

    return run


def _specialised(facts: Facts) -> Hashable:
    """The numbers of the formula are constants to Triton, but for the softcap's own."""
    constants = (facts[each] for each in ("label_smoothing", "z_loss"))
    kinds = facts["softcap"] is None, facts.get("reduction"), tuple(facts.tensors)
    return facts.device.sm, facts["dtype"], facts.size("vocab"), *constants, *kinds


_FORWARD = {each.id.removeprefix("liger."): each for each in liger.KERNELS}

KERNELS = (
    *(
        with_gradients(_FORWARD[name], load)
        for name, load in (
            ("rms_norm", _load_rms_norm),
            ("layer_norm", _load_layer_norm),
            ("silu_mul", _load_silu_mul),
            ("gelu_mul", _load_gelu_mul),
        )
    ),
    *(
        Kernel(
            id=f"liger.{name}{'_rows' if rows else ''}",
            operations=(f"loss.{name}{'.rows' if rows else ''}",),
            backend=liger.LIGER,
            load=load,
            accepts=(
                "ignore_index",
                "label_smoothing",
                "softcap",
                "z_loss",
                *accepts,
                *(() if rows else ("reduction",)),
            ),
            limits=(
                limit.arch(min=(8, 0)),  # of NVIDIA's: Triton has no bfloat16 before
                limit.dtype("float32", "bfloat16"),
                limit.contiguous("logits", "hidden", "weight"),
            ),
            grad=True,
            graph_safe=False,
            cache_folder=triton_cache,
            build_key=_specialised,
            priority=priority,
            trust=Trust.UNTRIED,
        )
        for name, load, accepts, priority in (
            ("cross_entropy", _load_cross_entropy, ("weight",), 35),
            # three passes over a chunk's logits, in their dtype, where torch's own chunks make ten in float32
            ("linear_cross_entropy", _load_linear_cross_entropy, ("bias", "class_weight", "out_dtype"), 50),
        )
        for rows in (False, True)
    ),
)
