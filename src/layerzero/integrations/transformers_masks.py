"""Masks of Transformers that causality alone says: marked where they are made, and skipped where attention runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError

_SEEN = "_layerzero_seen"
"""On a mask that causality alone says: its version, and how many keys its last query sees."""


def mark(mask: Tensor, seen: int) -> None:
    """Say that causality alone says a mask whose last query sees so many keys; without versions nothing can be said."""
    if not mask.is_inference():
        setattr(mask, _SEEN, (mask._version, seen))


def keys_seen(mask: Tensor, q_length: int) -> int:
    """How many keys the last query sees where this is, unchanged, a mask that causality alone says; 0 otherwise.

    For one query it hides nothing then.
    """
    if torch.compiler.is_compiling():
        return 0
    version, seen = getattr(mask, _SEEN, (None, 0))
    return seen if version is not None and version == mask._version and mask.shape[2] == q_length else 0


def ends_with_its_keys(q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **call: Any) -> bool:
    """Whether causality alone hides keys of a prompt's part that ends with the last of them.

    Transformers leaves the mask of its last query out then.
    """
    from transformers.masking_utils import sdpa_mask

    last = kv_length + kv_offset - 1
    if q_length == 1 or type(q_offset) is not int or q_offset + q_length - 1 != last:
        return False
    return sdpa_mask(q_length=1, kv_length=kv_length, q_offset=last, kv_offset=kv_offset, **call) is None


def check_only_causal(visible: Callable[..., Any], config: Any) -> None:
    """Refuse a mask that hides more than the future and what lies before a window: it is not made for one token.

    Checked at the beginning of windows, where one of another kind (chunks) differs.
    """
    from transformers.masking_utils import causal_mask_function

    if visible is causal_mask_function:
        return
    window = getattr(config, "sliding_window", None) or 0
    known = type(window) is int and window > 0
    for query in (window * 3, window * 1000 + 1) if known else ():
        keys = torch.tensor([0, query - window - 1, query - window, query - window + 1, query - 1, query])
        seen = [bool(visible(torch.tensor(0), torch.tensor(0), torch.tensor(query), each)) for each in keys]
        known = known and seen == [query - window < int(each) for each in keys]
    if not known:
        problem = (
            "wanted masks that hide the future and what lies before config.sliding_window, got one that hides more"
        )
        raise InvalidCallError("lz.optimize(graph=True)", [problem])
