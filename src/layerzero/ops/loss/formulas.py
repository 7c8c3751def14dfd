"""Cross-entropy in plain PyTorch: what is right, row by row, and what is written without LayerZero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.declaration import wide


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits within ``softcap`` of 0: ``softcap * tanh(logits / softcap)``."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def defined(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
) -> Tensor:
    """The definition, in the dtype of the logits. Shapes: logits (..., V), target (...) → (...) or ()."""
    logits = capped(logits, softcap)
    counted = target != ignore_index
    places = target.masked_fill(~counted, 0).long()
    of_classes = logits.new_ones(logits.shape[-1]) if weight is None else weight.detach().to(logits.dtype)
    of_rows = of_classes.take(places)  # an index without axes would be read, and shapes alone have no values
    total = logits.logsumexp(-1)
    total = total.masked_fill(total == torch.inf, torch.nan)  # as torch.log_softmax has it
    losses = (1.0 - label_smoothing) * of_rows * (total - logits.gather(-1, places.unsqueeze(-1))[..., 0])
    if label_smoothing:
        losses = losses + label_smoothing * ((total.unsqueeze(-1) - logits) * of_classes).mean(-1)
    extra = z_loss * total.square() if z_loss else torch.zeros_like(losses)
    losses, extra = (torch.where(counted, each, 0.0) for each in (losses, extra))
    if reduction == "none":
        return losses + extra
    if reduction == "sum":
        return losses.sum() + extra.sum()
    return losses.sum() / (of_rows * counted).sum() + extra.sum() / counted.sum()


def by_torch(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.cross_entropy``; in float32 where a softcap or a z-loss comes before or behind it."""
    dtype = logits.dtype
    if softcap is not None or z_loss:
        logits = capped(logits.to(wide(dtype)), softcap)
        weight = None if weight is None else weight.to(logits.dtype)
    found = functional.cross_entropy(
        logits, target.long(), weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    if z_loss:
        counted = target != ignore_index
        extra = z_loss * torch.where(counted, logits.logsumexp(-1).square(), 0.0)
        found = found + (extra if reduction == "none" else extra.sum() / (counted.sum() if reduction == "mean" else 1))
    return found.to(dtype)


def linear_by_torch(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **more: Any,
) -> Tensor:
    """``torch.nn.functional.linear``, then the cross-entropy of all its logits, in the dtype of the result."""
    dtype = out_dtype or hidden.dtype
    logits = functional.linear(hidden, weight, bias).to(dtype)
    of_classes = None if class_weight is None else class_weight.to(dtype)
    found = by_torch(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), weight=of_classes, **more)
    return found.view(target.shape) if found.ndim else found
