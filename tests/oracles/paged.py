"""A paged cache: what lies on the pages of each sequence, one token after the other."""

from __future__ import annotations

import numpy as np

from oracles.attention import attend, shaped, told
from oracles.ragged import each_alone


def _of(c, sequence, head):
    """The keys and the values of a sequence that one of its query heads reads."""
    length, size = int(c["context_lens"][sequence]), c["key_cache"].shape[1]
    group = c["query"].shape[-2] // c["key_cache"].shape[2]
    slots = [(int(c["block_tables"][sequence, token // size]), token % size) for token in range(length)]
    for name in ("key_cache", "value_cache"):
        found = [c[name][page, offset, head // group] for page, offset in slots]
        yield np.array(found).reshape(length, c[name].shape[-1])


def decode(c):
    """One query a sequence, its newest token."""
    output, sums = shaped(c, c["value_cache"].shape[-1])
    batch, _, heads, _ = output.shape
    for b in range(batch):
        for h in range(heads):
            output[b, :, h], sums[b, h] = attend(c, b, h, *_of(c, b, h), int(c["context_lens"][b]))
    return told(c, output, sums)


def _rows(c):
    """One query a request over a contiguous cache of its own."""
    output, sums = shaped(c, c["value_cache"].shape[-1])
    batch, _, heads, _ = output.shape
    group = heads // c["key_cache"].shape[2]
    for b in range(batch):
        length = int(c["kv_lens"][b])
        for h in range(heads):
            held = (c[name][b, :length, h // group] for name in ("key_cache", "value_cache"))
            output[b, :, h], sums[b, h] = attend(c, b, h, *held, length)
    return told(c, output, sums)


def _tokens(c):
    return each_alone(c, c["cu_seqlens_q"], c["value_cache"].shape[-1], lambda sequence, head: _of(c, sequence, head))


def _append(c):
    size = c["key_cache"].shape[1]
    for token, slot in enumerate(c["slot_mapping"]):
        if slot >= 0:
            for name in ("key", "value"):
                c[f"{name}_cache"][slot // size, slot % size] = c[name][token]
    return c["key_cache"], c["value_cache"]


def _number(name, token, width):
    """Where a number of a token lies in a page of tiles, as an index behind the page and the head."""
    if name == "key_cache":
        return token // 16, width // 2, token % 16, width % 2
    return width // 16, token // 2, width % 16, token % 2


def _tiled(c):
    """The same over pages whose numbers lie in tiles."""
    pages, heads, tiles, pairs = c["key_cache"].shape[:4]
    plain = dict(c)
    for name in ("key_cache", "value_cache"):
        plain[name] = np.empty((pages, 16 * tiles, heads, 2 * pairs))
        for token, width in np.ndindex(16 * tiles, 2 * pairs):
            place = _number(name, token, width)
            plain[name][:, token, :, width] = c[name][(slice(None), slice(None), *place)]
    return _tokens(plain)


def _append_tiled(c):
    size = 16 * c["key_cache"].shape[2]
    for token, slot in enumerate(c["slot_mapping"]):
        for name in ("key", "value") if slot >= 0 else ():
            for head, width in np.ndindex(c[name].shape[1:]):
                place = _number(f"{name}_cache", slot % size, width)
                c[f"{name}_cache"][(slot // size, head, *place)] = c[name][token, head, width]
    return c["key_cache"], c["value_cache"]


def _scaled(of):
    """The same over a cache whose numbers are multiples of scales."""

    def run(c):
        wide = dict(c)
        for name in ("key", "value"):
            scale = np.asarray(c[f"{name}_scale"])
            wide[f"{name}_cache"] = c[f"{name}_cache"] * (scale[..., None] if scale.ndim else scale)
        return of(wide)

    return run


ORACLES = {
    **dict.fromkeys((f"attention.{kind}.decode.paged" for kind in ("standard", "gqa")), decode),
    **dict.fromkeys(
        (f"attention.{kind}.{form}.paged" for kind in ("standard", "gqa") for form in ("prefill", "mixed")), _tokens
    ),
    "attention.quantized.decode.paged": _scaled(decode),
    "attention.quantized.prefill.paged": _scaled(_tokens),
    "attention.converted.decode.paged": decode,
    "attention.converted.prefill.paged": _tokens,
    "attention.gqa.decode.batched": _rows,
    "kv.append.paged": _append,
    "attention.tiled.paged": _tiled,
    "kv.append.tiled": _append_tiled,
}
