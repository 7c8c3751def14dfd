"""Sinks beside a kernel that knows none: one more logit a head, which all keys share their sum with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor, *, return_lse: bool) -> Any:
    """Results of a softmax that one more logit a head had taken part in; the output is changed in place.

    Zeros are what a query gives that sees no key where the sink is -inf. A sink of NaN or +inf gives NaN, as a softmax
    over it does.
    Shapes: output (..., H, S, D), lse (..., H, S), sinks (H,) → output, or (output, lse).
    """
    logits = sinks.to(lse.dtype).unsqueeze(-1)
    # -inf as the least number there is: no key beside it is a share of 0, and any key one of 1
    share = torch.sigmoid(lse - logits.nan_to_num(nan=torch.nan, posinf=torch.nan))
    output.mul_(share.unsqueeze(-1))
    return (output, torch.logaddexp(lse, logits)) if return_lse else output
