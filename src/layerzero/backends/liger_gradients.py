"""Liger's Triton kernels with their backward passes: norms, gates and cross-entropy, on NVIDIA's and AMD's GPUs.

Results and gradients of norms and gates are the reference's in float32, float16 and bfloat16 (conformance,
liger-kernel 0.8.5, H200, torch 2.11, Triton 3.6, 2026-11-27). Forward and backward in bfloat16 took rms_norm 1.25 and
layer_norm 1.42 of torch's time at 4096 x 2048, silu_mul 1.28 at 4096 x 8192: torch's come first. Liger's own functions
of cross-entropy passed there, too, and took 0.88 of torch's time and a third of its memory for 4096 x 128,256 logits.
Their kernel has been launched from here since, in 0.94 of the time: results and gradients passed there, too.
Conformance builds one variant, without a bias, class weights, smoothing, softcap and z-loss. The others, and bfloat16
of cross-entropy's mean, ran under Triton's interpreter alone (``tests/kernels/test_library_gradients.py``).
What is done otherwise than in Liger's own functions:

- The gates' backward kernels write over gate and up, which a caller may still read: they get copies.
- Cross-entropy writes gradients over the logits, and zeros over ignored rows without gradients, too: it gets a copy.
- The mean of no row is NaN, where Liger has 0.
- A weight gets its gradient where the hidden states want none; Liger gives None then.
- Of the linear layer's loss only the kernel is Liger's, which writes gradients over the logits; chunks and products are
  :mod:`layerzero.backends.gradients`'s. Liger's own chunks, of as many rows as bring logits to the size of hidden
  states, took 39.7 ms for 4096 rows of 2048 features and 128,256 classes (bfloat16, H200, torch 2.11, 2026-11-27).
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
from layerzero.backends.gradients import (
    Needed,
    Sizes,
    from_kept,
    given_away,
    over_chunks,
    scaled,
    sizes,
    with_gradients,
)
from layerzero.backends.layerzero_triton import on_amd
from layerzero.backends.shape_cache import triton_cache
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Trust


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


class _Entropy:
    """Launches Liger's kernel: losses of rows, and the gradient of logits over them.

    Its function around it waits for the device three times, and gives it counts of rows as integers: Triton makes a
    variant for one that is 1 or a multiple of 16, whatever was built. Here they are floats, and waited for once.
    """

    def __init__(
        self,
        target: Tensor,
        class_weight: Tensor | None,
        classes: int,
        *,
        ignore_index: int,
        label_smoothing: float,
        softcap: float | None = None,
        z_loss: float,
        reduction: str,
    ) -> None:
        from liger_kernel.ops import cross_entropy
        from liger_kernel.ops.utils import is_hip
        from liger_kernel.utils import infer_device_arch

        self.kernel = cross_entropy.liger_cross_entropy_kernel
        self.classes, self.ignored, self.reduction = classes, ignore_index, reduction
        self.smoothing, self.z_loss = float(label_smoothing), float(z_loss)
        self.softcap = None if softcap is None else float(softcap)
        self.places = target.reshape(-1).to(torch.int64, copy=True)  # aligned, as Triton's variant is
        self.of_classes = None if class_weight is None else class_weight.detach().to(torch.float32, copy=True)
        self.block = min(cross_entropy.MAX_FUSED_SIZE, 1 << (classes - 1).bit_length())
        self.warps = 16 if is_hip() else 32
        self.few_warps = 8 if infer_device_arch().startswith("blackwell") else self.warps
        counted = self.places != ignore_index
        inside = self.places.masked_fill(~counted, 0)
        found = [counted.sum(), *inside.aminmax()] if len(inside) else [counted.sum()] * 3
        if self.of_classes is not None:
            found += [(self.of_classes.take(inside.clamp(0, classes - 1)) * counted).sum(), self.of_classes.sum()]
        self.count, least, most, *sums = torch.stack([each.double() for each in found]).tolist()
        if least < 0 or most >= max(classes, 1):
            raise IndexError(f"target: wanted classes 0 to {classes - 1}, got {least:.0f} to {most:.0f}")
        self.sum: float
        self.of_all: float
        self.sum, self.of_all = sums or (self.count, 0.0)

    def __call__(self, logits: Tensor, part: slice) -> Tensor:
        """Losses in float32, 0 where a row is ignored; logits become their gradient, wanted or not, in one variant.

        Shapes: logits (n, V), contiguous → (n,)
        """
        places = self.places[part]
        losses = torch.zeros(len(places), dtype=torch.float32, device=logits.device)
        self.kernel[(len(places),)](
            *(logits, self.classes, places, 1, self.of_classes, losses, None, 1, None, 0, None, 0),
            *(self.classes, self.count, self.sum, self.of_all, self.ignored, self.z_loss, self.smoothing),
            *(self.reduction, self.softcap),
            RETURN_Z_LOSS=False,
            RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False,
            HAS_WEIGHT=self.of_classes is not None,
            HAS_SOFTCAPPING=self.softcap is not None,
            HAS_GRADIENTS=True,
            BLOCK_SIZE=self.block,
            num_warps=self.few_warps if logits.element_size() == 2 else self.warps,
        )
        return losses

    def reduced(self, losses: Tensor) -> Tensor:
        """NaN where it is the mean of no row."""
        if self.reduction == "none":
            return losses
        return losses.sum() if self.count or self.reduction == "sum" else losses.new_full((), torch.nan)


def _load_cross_entropy(facts: Facts) -> Callable[..., Any]:
    by_row = facts["operation"] == "loss.cross_entropy.rows"

    def run(
        logits: Tensor, target: Tensor, *, weight: Tensor | None = None, reduction: str = "mean", **formula: Any
    ) -> Tensor:
        classes = logits.shape[-1]
        entropy = _Entropy(target, weight, classes, reduction="none" if by_row else reduction, **formula)

        def compute(_: Needed, logits: Tensor) -> Any:
            over = logits.clone(memory_format=torch.contiguous_format)
            losses = entropy(over, slice(None))
            return entropy.reduced(losses).to(logits.dtype), (over,)

        def behind(gradient: Tensor, made: Tensor) -> Any:
            return (made.mul_(gradient.unsqueeze(-1)),) if by_row else scaled(gradient, made)

        loss = given_away(compute, behind, logits.reshape(-1, classes))
        return loss.view(target.shape) if by_row else loss

    return run


def _load_linear_cross_entropy(facts: Facts) -> Callable[..., Any]:
    by_row = facts["operation"] == "loss.linear_cross_entropy.rows"

    def run(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        reduction: str = "mean",
        out_dtype: torch.dtype | None = None,
        **formula: Any,
    ) -> Tensor:
        entropy = _Entropy(target, class_weight, len(weight), reduction="none" if by_row else reduction, **formula)
        cut = sizes(len(entropy.places), weight)
        cut = Sizes(cut.block, cut.block)  # it reads and writes logits in their dtype

        def all_of(
            needed: Needed, rows: Tensor, weight: Tensor, bias: Tensor | None, behind: Tensor | None = None
        ) -> Any:
            def chunk(rows: Tensor, part: slice, room: Tensor | None) -> Tensor:
                if bias is None:
                    logits = torch.mm(rows, weight.t(), out=room)
                else:
                    logits = torch.addmm(bias, rows, weight.t(), out=room)
                losses = entropy(logits, part)
                if behind is not None:
                    logits.mul_(behind[part].unsqueeze(-1))
                return losses

            losses, *gradients = over_chunks(chunk, rows, weight, needed, cut)
            return entropy.reduced(losses), gradients

        def losses(*given: Any) -> Any:
            return all_of((False, False, False), *given)[0], given

        def differentiate(kept: Any, needed: Needed, gradient: Tensor) -> Any:
            rows, weight, bias = kept
            return all_of(needed, rows, weight, bias, gradient)[1]

        given = hidden.reshape(-1, hidden.shape[-1]), weight, bias
        if by_row:
            loss = from_kept(losses, differentiate, *given)
            loss = loss.view(target.shape)
        else:
            loss = given_away(all_of, scaled, *given, anew=True)
        return loss.to(out_dtype or hidden.dtype)

    return run


def _specialised(facts: Facts) -> Hashable:
    """What Triton makes a variant for: the formula's numbers but for the softcap's own.

    Of integers the kernel gets the classes and the one that is ignored; 1 and multiples of 16 have variants.
    """
    constants = tuple(facts[each] for each in ("label_smoothing", "z_loss"))
    ignored: Any = facts["ignore_index"]
    kinds = facts["softcap"] is None, facts.get("reduction"), tuple(facts.tensors)
    return facts.device.sm, facts["dtype"], facts.size("vocab"), *constants, *kinds, ignored == 1, ignored % 16 == 0


_FORWARD = {each.id.removeprefix("liger."): each for each in liger.KERNELS}

KERNELS = (
    *(
        with_gradients(_FORWARD[name], load, priority=priority, trust=Trust.DECLARED, proved_first=on_amd)
        for name, load, priority in (
            ("rms_norm", _load_rms_norm, 8),
            ("layer_norm", _load_layer_norm, 38),
            ("silu_mul", _load_silu_mul, 44),
            ("gelu_mul", _load_gelu_mul, 44),
        )
    ),
    *(
        liger.LIGER.kernel(
            f"liger.{name}{'_rows' if rows else ''}",
            f"loss.{name}{'.rows' if rows else ''}",
            load,
            limit.arch(min=(8, 0)),  # of NVIDIA's: Triton has no bfloat16 before
            limit.dtype("float32", "bfloat16"),
            limit.contiguous("logits", "hidden", "weight"),
            accepts=(
                "ignore_index",
                "label_smoothing",
                "softcap",
                "z_loss",
                *accepts,
                *(() if rows else ("reduction",)),
            ),
            grad=True,
            graph_safe=False,
            cache_folder=triton_cache,
            build_key=_specialised,
            proved_first=on_amd,
            priority=priority,  # 175 checks passed, 0 wrong (H200, liger-kernel 0.8.5, 2026-11-27)
        )
        for name, load, accepts, priority in (
            ("cross_entropy", _load_cross_entropy, ("weight",), 42),
            # 11.2 ms where torch's own chunks take 17.1 (H200, linear_loss.py)
            ("linear_cross_entropy", _load_linear_cross_entropy, ("bias", "class_weight", "out_dtype"), 50),
        )
        for rows in (False, True)
    ),
)
