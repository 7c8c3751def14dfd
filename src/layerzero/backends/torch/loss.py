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

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.gradients import Needed, from_kept, given_away, once, over_chunks, scaled, sizes, wide_product
from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.backends.torch.cpu_half import padding_for
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.declaration import wide
from layerzero.ops.loss import CROSS_ENTROPY, CROSS_ENTROPY_ROWS

_HAS_ONE = limit.rule(
    "torch: 2.13, which brought the function",
    lambda _: hasattr(functional, "linear_cross_entropy"),
    "VERSION_UNSUPPORTED",
    got=torch.__version__,
)


REDUCED, BY_ROW = "loss.linear_cross_entropy", "loss.linear_cross_entropy.rows"


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
        rows, counted = hidden.reshape(-1, hidden.shape[-1]), flat != ignore_index
        if not bool(counted.all()):  # it weighs rows that count nowhere by 0, and 0 times their NaN is NaN
            rows = rows.masked_fill(~counted.unsqueeze(-1), 0.0)
        found: Tensor = compute(
            rows,
            weight,
            flat,
            linear_bias=bias,
            weight=class_weight,
            reduction="none" if by_row else "sum",
            ignore_index=ignore_index,
            options=made(batch_chunk_size=sizes(len(flat), weight).chunk, acc_policy="compact"),
        )
        if by_row:
            return found.view(target.shape)
        if reduction == "sum":
            return found
        weighed = counted if class_weight is None else counted * class_weight.take(flat.masked_fill(~counted, 0))
        divisor = weighed.sum()
        return torch.where(divisor == 0, torch.nan, found / divisor.masked_fill(divisor == 0, 1))

    return once(run, str(facts["operation"]))


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

    def logits(self, rows: Tensor, room: Tensor | None) -> Tensor:
        """In float32 or wider; in the room for their gradient where that has the dtype."""
        dtype = wide(rows.dtype)
        if rows.dtype is not dtype:
            found = wide_product(rows, self.weight.t())
            return found if self.bias is None else found.add_(self.bias)
        if self.bias is None:
            return torch.mm(rows, self.weight.t(), out=room)
        return torch.addmm(self.bias, rows, self.weight.t(), out=room)

    def chunk(self, rows: Tensor, target: Tensor, share: Tensor, extra: Tensor, room: Tensor | None) -> Tensor:
        """The losses of rows, each times its share; the gradient of their logits is left in room.

        Shapes: rows (n, D), target, share and extra (n,), room (n, V) → (n,). ``extra`` weighs the z-loss.
        """
        logits = self.logits(rows, room)
        slope = None
        if self.softcap is not None:
            bounded = logits.div_(self.softcap).tanh_()
            slope = None if room is None else 1.0 - bounded.square()
            logits = bounded.mul_(self.softcap)
        places, largest = target.unsqueeze(-1), logits.amax(-1)
        at_class, of_all = logits.gather(-1, places)[:, 0], None
        if self.smoothing:
            of_all = logits.sum(-1) if self.of_classes is None else logits @ self.of_classes
        likely = torch.softmax(logits, -1)
        del logits
        # The likeliest class has 1 / V at least: its logarithm is exact where that of the target's may be of 0.
        beyond = likely.amax(-1).log_()
        log_likely, total = at_class - largest + beyond, largest - beyond
        picked = share if self.of_classes is None else share * self.of_classes[target]
        found = -self.certain * picked * log_likely
        if of_all is not None:
            found -= self.smoothing * share * (of_all - self.all_classes * total)
        if self.z_loss:
            found += self.z_loss * extra * total.square()
        found.masked_fill_(share == 0.0, 0.0)  # what counts nowhere may be NaN
        if room is None:
            return found
        of_softmax = self.certain * picked + self.smoothing * self.all_classes * share
        if self.z_loss:
            of_softmax += 2.0 * self.z_loss * extra * total
        at_class = of_softmax * likely.gather(-1, places)[:, 0] - self.certain * picked
        more = self.smoothing > 0.0 or slope is not None  # what is computed before a gradient is rounded
        made = torch.mul(likely, of_softmax.unsqueeze(-1), out=likely if more else room)
        made.scatter_(-1, places, at_class.unsqueeze(-1).to(made.dtype))
        if self.smoothing:
            made -= self.smoothing * share.unsqueeze(-1) * (1.0 if self.of_classes is None else self.of_classes)
        if slope is not None:
            made.mul_(slope)
        if more:
            room.copy_(made)
        return found


def _load_chunked(facts: Facts) -> Callable[..., Any]:
    by_row, recording, padded = facts["operation"] == BY_ROW, facts["requires_grad"], padding_for(facts)

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
        hidden, weight = padded(hidden, weight)
        counted = flat != ignore_index
        places = flat.masked_fill(~counted, 0).long()
        extra = counted.to(wide(hidden.dtype))
        classes = None if class_weight is None else class_weight.detach()
        formula = functools.partial(_Loss, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss)
        rows, share = hidden.reshape(-1, hidden.shape[-1]), extra
        if not recording:  # else parameters would get gradients, at three times the work
            rows, weight, bias = rows.detach(), weight.detach(), None if bias is None else bias.detach()
        divisor = None
        if reduction == "mean" and not by_row:
            divisor = (extra if classes is None else extra * classes.to(extra.dtype)[places]).sum()
            share, extra = (share / divisor).nan_to_num_(0.0), (extra / extra.sum()).nan_to_num_(0.0)

        cut = sizes(len(rows), weight)

        # what these functions hold lives as long as the loss: the tensors are those that autograd hands over and frees
        def all_of(given: Any, shares: tuple[Tensor, Tensor], needed: Needed = (False, False, False)) -> Any:
            hidden: Tensor = given[0]
            loss = formula(*given[1:])

            def chunk(rows: Tensor, part: slice, room: Tensor | None) -> Tensor:
                return loss.chunk(rows, places[part], shares[0][part], shares[1][part], room)

            return over_chunks(chunk, hidden, loss.weight, needed, cut, padded)

        def at_once(needed: Needed, *given: Tensor | None) -> tuple[Tensor, Any]:
            losses, *gradients = all_of(given, (share, extra), needed)
            total = losses.sum() if divisor is None else losses.sum() * (divisor / divisor)  # NaN of no row
            return total, [*gradients, None]

        def again(*given: Tensor | None) -> tuple[Tensor, Any]:
            return all_of(given, (share, extra))[0], (*given, share, extra)

        def differentiate(kept: Any, needed: Needed, gradient: Tensor) -> Any:
            *given, share, extra = kept
            return (*all_of(given, (share * gradient, extra * gradient), needed)[1:], None)

        if not by_row and not (recording and hidden.dtype is torch.float16):
            found = given_away(at_once, scaled, rows, weight, bias, classes, anew=True)
            return found.to(dtype)
        # Gradients of a mean over 2048 rows of 32,000 classes are below float16's smallest number, and the factor that
        # GradScaler lifts them by is known in the backward pass alone.
        found = from_kept(again, differentiate, rows, weight, bias, classes)
        if by_row:
            return found.view(target.shape).to(dtype)
        found = found.sum()
        return (found if divisor is None else torch.where(divisor == 0, torch.nan, found)).to(dtype)

    return once(run, str(facts["operation"]))


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
