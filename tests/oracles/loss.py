"""Cross-entropy of classes, a row after the other."""

from __future__ import annotations

import numpy as np


def _of_row(scores, place, weights, c):
    """The loss that a mean weighs by class, the class's weight, and the z-loss."""
    if c.get("softcap") is not None:
        scores = c["softcap"] * np.tanh(scores / c["softcap"])
    top = scores.max()
    total = top + np.log(np.exp(scores - top).sum())
    smoothing = c.get("label_smoothing", 0.0)
    certain = np.zeros(scores.size)
    certain[place] = 1.0 - smoothing
    return ((certain + smoothing / scores.size) * weights * (total - scores)).sum(), weights[place], total**2


def _cross_entropy(logits, weights, c, by_row):
    weights = np.ones(logits.shape[-1]) if weights is None else weights
    losses, shares, extra = (np.zeros(c["target"].size) for _ in range(3))
    for row, place in enumerate(c["target"].reshape(-1)):
        if place != c.get("ignore_index", -100):
            scores = logits.reshape(-1, logits.shape[-1])[row]
            losses[row], shares[row], extra[row] = _of_row(scores, place, weights, c)
    extra *= c.get("z_loss", 0.0)
    if by_row:
        return ((losses + extra).reshape(c["target"].shape),)
    if c.get("reduction", "mean") == "sum":
        return (losses.sum() + extra.sum(),)
    with np.errstate(all="ignore"):
        return (losses.sum() / shares.sum() + extra.sum() / (c["target"] != c.get("ignore_index", -100)).sum(),)


def _of_logits(by_row):
    return lambda c: _cross_entropy(c["logits"], c.get("weight"), c, by_row)


def _of_hidden(by_row):
    def oracle(c):
        logits = c["hidden"] @ c["weight"].T + (0.0 if c.get("bias") is None else c["bias"])
        return _cross_entropy(logits, c.get("class_weight"), c, by_row)

    return oracle


ORACLES = {
    "loss.cross_entropy": _of_logits(by_row=False),
    "loss.cross_entropy.rows": _of_logits(by_row=True),
    "loss.linear_cross_entropy": _of_hidden(by_row=False),
    "loss.linear_cross_entropy.rows": _of_hidden(by_row=True),
}
