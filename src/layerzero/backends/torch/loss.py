"""Cross-entropy by torch: its function, its chunked linear one (torch 2.13), and chunks that take every argument.

Both chunked kernels make the logits of a few rows, their gradient in the same memory, and what it adds to the
gradients of rows and weight, as Liger does: three products in place of a fourth that would make the logits again. Where
each row's loss is the result, and in float16, what comes from behind weighs the rows: the backward pass makes the
logits again.

torch's takes no smoothing, softcap or z-loss, rounds the loss to the input's dtype, and gives gradients of NaN to the
mean of no row, for which torch.nn.functional.cross_entropy has 0: rows are added up, and divided here. On a CPU it
widens a weight of half precision as a whole, which costs twice its memory (torch 2.13,
torch/nn/modules/linear_cross_entropy.py). 2048 tokens of 2048 features and 32,000 classes in float32 took it 1.00 of
the time and 0.83 of the memory of all logits, chunks 0.96 and 0.43 (one thread, AMD EPYC, torch 2.13.0, 2026-11-27).
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.gradients import from_kept, given_away
from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.declaration import wide
from layerzero.ops.loss.declare import CROSS_ENTROPY, CROSS_ENTROPY_ROWS

_LOGITS, _ROWS = 2**23, 128
"""Numbers of a chunk's logits, 32 MiB in float32, as far as that is 128 rows: products of fewer take longer a row."""


def _from_2_13(facts: Facts) -> Reason | None:
    if hasattr(functional, "linear_cross_entropy"):
        return None
    return Reason(ReasonCode.VERSION_UNSUPPORTED, "torch", ">=2.13", torch.__version__)


_HAS_ONE = limit.Custom("torch 2.13, which brought the function", _from_2_13)


REDUCED, BY_ROW = "loss.linear_cross_entropy", "loss.linear_cross_entropy.rows"


def rows_each(classes: int) -> int:
    """Rows of a chunk."""
    return max(_ROWS, _LOGITS // classes)


def _load_torchs(facts: Facts) -> Callable[..., Any]:
    made = torch.nn.LinearCrossEntropyOptions  # type: ignore[attr-defined, unused-ignore]
    compute = functional.linear_cross_entropy  # type: ignore[attr-defined, unused-ignore]
    by_row = facts["operation"] == BY_ROW

    def run(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int,
        reduction: str = "mean",
    ) -> Tensor:
        flat = target.reshape(-1).long()
        found: Tensor = compute(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            flat,
            linear_bias=bias,
            weight=class_weight,
            reduction="none" if by_row else "sum",
            ignore_index=ignore_index,
            options=made(batch_chunk_size=rows_each(weight.shape[0]), acc_policy="compact"),
        )
        if by_row:
            return found.view(target.shape)
        if reduction == "sum":
            return found
        counted = flat != ignore_index
        weighed = counted if class_weight is None else counted * class_weight.take(flat.masked_fill(~counted, 0))
        divisor = weighed.sum()
        return torch.where(divisor == 0, torch.nan, found / divisor.masked_fill(divisor == 0, 1))

    return run


class _Loss:
    """What a chunk needs besides its rows: the weight of the layer, and how losses are computed."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        label_smoothing: float,
        softcap: float | None,
        z_loss: float,
    ) -> None:
        self.weight, self.bias, self.softcap, self.z_loss = weight, bias, softcap, z_loss
        self.smoothing = label_smoothing / weight.shape[0]
        self.certain = 1.0 - label_smoothing
        self.of_classes = None if class_weight is None else class_weight.to(wide(weight.dtype))
        self.all_classes = weight.shape[0] if self.of_classes is None else self.of_classes.sum()

    def chunk(
        self, rows: Tensor, target: Tensor, share: Tensor, extra: Tensor, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The losses of rows, each times its share, and the gradient of their logits.

        Shapes: rows (n, D), target, share and extra (n,) → (n,), (n, V). ``extra`` weighs the z-loss.
        """
        logits = functional.linear(rows, self.weight, self.bias).to(share.dtype)
        slope = None
        if self.softcap is not None:
            bounded = logits.div_(self.softcap).tanh_()
            slope = 1.0 - bounded.square() if gradient else None
            logits = bounded.mul_(self.softcap)
        places, total = target.unsqueeze(-1), None
        at_class = logits.gather(-1, places)[:, 0]
        likely = torch.log_softmax(logits, -1)
        picked = share if self.of_classes is None else share * self.of_classes[target]
        found = -self.certain * picked * likely.gather(-1, places)[:, 0]
        if self.smoothing:
            of_all = likely.sum(-1) if self.of_classes is None else likely @ self.of_classes
            found -= self.smoothing * share * of_all
        if self.z_loss:
            total = at_class - likely.gather(-1, places)[:, 0]
            found += self.z_loss * extra * total.square()
        if not gradient:
            return found, None
        of_softmax = self.certain * picked + self.smoothing * self.all_classes * share
        if total is not None:
            of_softmax += 2.0 * self.z_loss * extra * total
        made = likely.exp_().mul_(of_softmax.unsqueeze(-1))
        if self.smoothing:
            made -= self.smoothing * share.unsqueeze(-1) * (1.0 if self.of_classes is None else self.of_classes)
        made.scatter_add_(-1, places, -self.certain * picked.unsqueeze(-1))
        return found, made if slope is None else made.mul_(slope)


def _over_chunks(
    loss: _Loss, hidden: Tensor, target: Tensor, share: Tensor, extra: Tensor, needed: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss of each row and the gradients of rows, weight and bias that are needed, of the sum of all losses.

    Gradients of weight and bias are added up in float32 or wider, and rounded once.
    """
    weight, dtype = loss.weight, share.dtype
    losses = torch.empty_like(share)
    of_hidden = torch.empty_like(hidden) if needed[0] else None
    of_weight = torch.empty_like(weight, dtype=dtype) if needed[1] else None
    of_bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needed[2] else None
    step = rows_each(weight.shape[0])
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        found, made = loss.chunk(hidden[part], target[part], share[part], extra[part], gradient=any(needed))
        losses[part] = found.masked_fill_(share[part] == 0.0, 0.0)  # what counts nowhere may be NaN
        if made is None:
            continue
        if of_bias is not None:
            of_bias += made.sum(0)
        made = made.to(weight.dtype)
        if of_hidden is not None:
            torch.mm(made, weight, out=of_hidden[part])
        if of_weight is not None and dtype == weight.dtype:
            torch.addmm(of_weight, made.t(), hidden[part], beta=1.0 if start else 0.0, out=of_weight)
        elif of_weight is not None and start:
            of_weight += made.t() @ hidden[part]
        elif of_weight is not None:
            of_weight.copy_(made.t() @ hidden[part])
        del made
    of_weight = None if of_weight is None else of_weight.to(weight.dtype)
    return losses, of_hidden, of_weight, None if of_bias is None else of_bias.to(weight.dtype)


def _scaled(gradient: Tensor, *gradients: Tensor | None) -> list[Tensor | None]:
    return [None if each is None else each.mul_(gradient) for each in gradients]


def _load_chunked(facts: Facts) -> Callable[..., Any]:
    by_row, recording = facts["operation"] == BY_ROW, facts["requires_grad"]

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
        dtype, flat = out_dtype or hidden.dtype, target.reshape(-1)
        counted = flat != ignore_index
        places = flat.masked_fill(~counted, 0).long()
        extra = counted.to(wide(hidden.dtype))
        own, classes = (None if each is None else each.detach() for each in (bias, class_weight))
        loss = _Loss(weight.detach(), own, classes, label_smoothing, softcap, z_loss)
        rows, share = hidden.reshape(-1, hidden.shape[-1]), extra
        if not recording:  # else parameters would get gradients, at three times the work
            rows, weight, bias = rows.detach(), loss.weight, loss.bias
        divisor = None
        if reduction == "mean" and not by_row:
            divisor = (extra if loss.of_classes is None else extra * loss.of_classes[places]).sum()
            share, extra = (share / divisor).nan_to_num_(0.0), (extra / extra.sum()).nan_to_num_(0.0)

        def once(needed: tuple[bool, bool, bool], hidden: Tensor, *_: Tensor | None) -> tuple[Tensor, Any]:
            losses, *gradients = _over_chunks(loss, hidden, places, share, extra, needed)
            return losses.sum() if divisor is None else losses.sum() * (divisor / divisor), gradients  # NaN of no row

        def again(hidden: Tensor, weight: Tensor, *_: Tensor | None) -> tuple[Tensor, Any]:
            kept = hidden, weight, places, share, extra
            return _over_chunks(loss, hidden, places, share, extra, (False, False, False))[0], kept

        def differentiate(kept: Any, needed: tuple[bool, bool, bool], gradient: Tensor) -> Any:
            hidden, _, places, share, extra = kept
            return _over_chunks(loss, hidden, places, share * gradient, extra * gradient, needed)[1:]

        if not by_row and not (recording and hidden.dtype is torch.float16):
            found = given_away(once, _scaled, rows, weight, bias)
            return found.to(dtype)
        # Gradients of a mean over 2048 rows of 32,000 classes are below float16's smallest number, and the factor that
        # GradScaler lifts them by is known in the backward pass alone.
        found = from_kept(again, differentiate, rows, weight, bias)
        if by_row:
            return found.view(target.shape).to(dtype)
        found = found.sum()
        return (found if divisor is None else torch.where(divisor == 0, torch.nan, found)).to(dtype)

    return run


KERNELS = (
    *(
        Kernel.of_expression(
            each,
            id=f"torch.{each.name.partition('.')[2].replace('.', '_')}",
            backend=TORCH,
            limits=(FLOATS,),
            handles_negated=True,
            priority=40,
            stock=True,
        )
        for each in (CROSS_ENTROPY, CROSS_ENTROPY_ROWS)
    ),
    *(
        kernel(
            f"torch.{name}{'_rows' if operation == BY_ROW else ''}",
            operation,
            load,
            *limits,
            accepts=("bias", "class_weight", "ignore_index", *more, *(() if operation == BY_ROW else ("reduction",))),
            grad=True,
            handles_negated=True,
            priority=priority,
        )
        for name, load, more, limits, priority in (
            (
                *("linear_cross_entropy", _load_torchs, ()),
                *((limit.platform("cpu"), limit.dtype("float32", "float64"), _HAS_ONE), 40),
            ),
            (
                *("linear_cross_entropy_chunked", _load_chunked),
                *(("label_smoothing", "softcap", "z_loss", "out_dtype"), (FLOATS,), 45),
            ),
        )
        for operation in (REDUCED, BY_ROW)
    ),
)
