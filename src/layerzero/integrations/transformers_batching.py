"""Continuous batching of Transformers (``generate_batch``) for attention of ours: its pages, and the mask over them.

Transformers packs the new tokens of all sequences into one row, copies the keys and values that they may see out of its
pages, and tells sequences apart by a float mask. It does so for ``sdpa`` and for names of its own alone (5.23), and has
no place where another library could say that it serves the same call; so the two functions that look at the name are
wrapped, and are what they were for every other one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

from torch import Tensor

from layerzero.core.errors import InvalidCallError

BATCHED = frozenset({"cache", "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"})
"""Arguments of a batch: where keys and values are written and read, and which logits are wanted."""


def is_of_a_batch(named: dict[str, Any]) -> bool:
    """Whether a call is one of a batch; models hand on caches of their own to their attention, too (5.24)."""
    places = ("read_index", "write_index", "block_table")
    return named["cache"] is not None and any(named.get(each) is not None for each in places)


def keys_of(
    module: Any, key: Tensor, value: Tensor, mask: Tensor | None, named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Write the new keys and values (1, K, T, D) into the batch's cache; all that its tokens may see, (1, K, N, D).

    Takes the arguments of the batch out of ``named``. Raises: InvalidCallError for a batch that no mask tells apart.
    """
    if mask is None or named.get("block_table") is not None:
        got = "none" if mask is None else "a block table beside it"
        wanted = "wanted continuous batching with a mask, as Transformers 5.23 makes it for attn_implementation='sdpa'"
        raise InvalidCallError("attn_implementation='layerzero'", [f"cache: {wanted}, got {got}; set 'sdpa' for it"])
    key, value = named["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=named)
    for name in (*BATCHED, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        named.pop(name, None)
    return key, value


def serve_batches(names: Collection[str]) -> None:
    """Let ``generate_batch`` run models whose attention has one of these names, as it runs ``sdpa``; once is enough.

    A version of Transformers without these functions keeps its own refusal, which names what works.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    try:
        from transformers.generation.continuous_batching import input_outputs
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager
    except ImportError:
        return
    there = hasattr(input_outputs, "attn_mask_is_needed") and hasattr(Manager, "switch_to_cb_friendly_attn")
    if not there or "cache" not in inspect.signature(sdpa_attention_forward).parameters:
        return
    switch, is_needed = Manager.switch_to_cb_friendly_attn, input_outputs.attn_mask_is_needed
    if hasattr(switch, "_layerzero"):
        return

    @functools.wraps(switch)
    def switched(self: Any, model: Any, *others: Any, **named: Any) -> None:
        if model.config._attn_implementation not in names:
            switch(self, model, *others, **named)

    @functools.wraps(is_needed)
    def needed(config: Any) -> bool:
        return config._attn_implementation in names or is_needed(config)

    switched._layerzero = True  # type: ignore[attr-defined]
    Manager.switch_to_cb_friendly_attn = switched
    input_outputs.attn_mask_is_needed = needed
