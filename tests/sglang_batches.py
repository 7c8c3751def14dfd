"""Random batches of SGLang 0.5.23, of its classes or of stand-ins, and what attention over them gives in float64."""

from __future__ import annotations

import functools
import random
import types
from enum import Enum
from typing import Any, NamedTuple

import torch

KINDS = ("decode", "extend", "draft_extend_v2", "chain", "tree", "tree of its prefix")
_NAMES = ("decode", "idle", "dllm_extend", "target_verify")


def mode_of(kind: str) -> Any:
    """SGLang's forward mode: what it is asked for here."""
    return types.SimpleNamespace(**{f"is_{name}": functools.partial(kind.__eq__, name) for name in _NAMES})


class Pool:
    """SGLang's pool of one layer: tokens by index, or in ``hnd`` a head of a page after the other."""

    k_scale_buffer = None

    def __init__(self, slots: int, page_size: int, heads: int, dim: int, dtype: torch.dtype, layout: str = "nhd"):
        self.kv_cache_layout, self.page_size, self.heads = layout, page_size, heads
        flat = (slots // page_size, heads, page_size, dim) if layout == "hnd" else (slots, heads, dim)
        self.keys, self.values = torch.zeros(2, *flat).to(dtype)

    def set_kv_buffer(self, layer, location, keys, values, k_scale=None, v_scale=None):
        name, slots = location
        assert name == "at"
        for held, new, scale in ((self.keys, keys, k_scale), (self.values, values, v_scale)):
            codes = (new if scale is None else new / scale).view(len(slots), self.heads, held.shape[-1]).to(held.dtype)
            if self.kv_cache_layout == "hnd":
                held[slots // self.page_size, :, slots % self.page_size] = codes
            else:
                held[slots] = codes

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values


class RadixAttention(torch.nn.Module):
    """SGLang's layer: attributes of sglang 0.5.23, srt/layers/radix_attention.py."""

    def __init__(self, num_heads=4, head_dim=16, scaling=0.2, num_kv_heads=2, layer_id=0, **changes):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.head_dim = self.qk_head_dim = self.v_head_dim = head_dim
        self.scaling, self.layer_id, self.logit_cap, self.sliding_window_size = scaling, layer_id, 0.0, -1
        self.is_cross_attention, self.use_irope = False, False
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None
        self.q_scale_float = self.idx_q_scale_float = self.idx_k_scale_float = self.idx_v_scale_float = None
        self.quant_method, self.use_prefill_attention_wrapper = None, True
        self.attn_type = Enum("AttentionType", {"DECODER": "decoder"}).DECODER
        self.pos_encoding_mode, self.logit_capping_method, self.xai_temperature_len = "NONE", "tanh", -1
        for name, value in changes.items():
            setattr(self, name, value)


def verified(kind: str, drafts: int, topk: int, mask: Any) -> Any:
    """What SGLang says of drafts that are verified."""
    told = {"spec_input_type": types.SimpleNamespace(name=kind), "num_tokens_per_req": drafts}
    return types.SimpleNamespace(**told, tree_topk=topk, custom_mask=mask, ragged_verify_layout=None)


class Kit(NamedTuple):
    """Classes of SGLang, or stand-ins that have their names."""

    pool: Any
    layer: Any
    mode: Any
    batch: Any
    verified: Any


STAND_INS = Kit(Pool, RadixAttention, mode_of, types.SimpleNamespace, verified)


class Drawn:
    """One batch: requests of random lengths in a pool, all but their new tokens written, and what is asked of it."""

    def __init__(self, seed, kind, page_size=1, kit=STAND_INS, dtype=torch.float32, pool_dtype=None, scales=(1.0, 1.0),
                 layout=None, drafts=None, most=6, fill=0):  # fmt: skip
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.heads, self.kv_heads = draw.choice(((4, 2), (4, 4), (8, 1)))
        self.kind, self.dim, self.scale = kind, 32, 0.2
        lens = [draw.randint(1, 50) for _ in range(draw.randint(1, most))] + [1] * fill
        verifies = kind.startswith(("chain", "tree"))
        each = drafts or draw.randint(2, 5)
        counts = [1 if kind == "decode" else each if verifies else draw.randint(1, length) for length in lens]
        self.totals = [length + each if verifies else length for length in lens]
        self.counts, self.lens = counts, lens
        blocks = -(-60 // page_size)
        pages = torch.randperm(len(lens) * blocks + 1)[: len(lens) * blocks].view(len(lens), blocks)
        rows = (pages.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
        self.pool = kit.pool(
            *((len(lens) * blocks + 1) * page_size, page_size, self.kv_heads, self.dim, pool_dtype or dtype),
            **({} if layout is None else {"layout": layout}),
        )
        self.table = torch.cat((rows.new_full((1, rows.shape[1]), 10**6), rows)).int()
        self.slots = [row[:total] for row, total in zip(rows, self.totals, strict=True)]
        shape = self.kv_heads, self.dim
        self.keys, self.values = ([torch.randn(total, *shape).to(dtype) for total in self.totals] for _ in range(2))
        self.query = torch.randn(sum(counts), self.heads, self.dim).to(dtype)
        self.layer = kit.layer(self.heads, self.dim, self.scale, self.kv_heads, 0)
        self.scales = scales
        if pool_dtype is not None and scales != (None, None):
            self.layer.k_scale, self.layer.v_scale = (torch.tensor(each) for each in scales)
        self.sees = [self._seen(draw, count) for count in counts]
        spec = None
        if verifies:
            topk, mask = (1, None) if kind == "chain" else (-1, self._mask(own=kind == "tree"))
            spec = kit.verified("EAGLE_VERIFY" if kind == "chain" else "NGRAM_VERIFY", each, topk, mask)
        self.runner = types.SimpleNamespace(
            req_to_token_pool=types.SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            page_size=page_size,
        )
        self.batch = kit.batch(
            forward_mode=kit.mode("target_verify" if verifies else kind),
            batch_size=len(lens),
            input_ids=torch.zeros(sum(counts), dtype=torch.int64),
            req_pool_indices=torch.arange(len(lens)) + 1,
            seq_lens=torch.tensor(lens),
            seq_lens_sum=sum(lens),
            seq_lens_cpu=torch.tensor(lens),
            out_cache_loc=torch.cat([row[len(row) - count :] for row, count in self._new(self.slots)]),
            spec_info=spec,
            extend_seq_lens_cpu=None if verifies or kind == "decode" else counts,
        )

    def _new(self, of):
        return zip(of, self.counts, strict=True)

    def _seen(self, draw, count):
        """Which of a request's new tokens each of them sees: the older ones, or those of its branch."""
        sees = torch.eye(count, dtype=torch.bool)
        for row in range(1, count):
            parent = draw.randint(0, row - 1) if self.kind.startswith("tree") else row - 1
            sees[row] |= sees[parent]
        return sees

    def _mask(self, *, own):
        """One request after the other, a row for each draft: over its prefix and the drafts, or over those alone."""
        parts = [
            sees if own else torch.cat((torch.ones(len(sees), length, dtype=torch.bool), sees), 1)
            for sees, length in zip(self.sees, self.lens, strict=True)
        ]
        return torch.cat([each.flatten() for each in parts])

    def call(self, location):
        """Write what was there before, and give the arguments of a forward pass."""
        for slots, count, keys, values in zip(self.slots, self.counts, self.keys, self.values, strict=True):
            old = slice(0, len(slots) - count)
            told = (self.layer.k_scale, self.layer.v_scale)
            self.pool.set_kv_buffer(self.layer, location(slots[old]), keys[old].clone(), values[old].clone(), *told)
        new = [
            torch.cat([each[len(each) - count :] for each, count in self._new(of)]) for of in (self.keys, self.values)
        ]
        return self.query.flatten(1), *new, self.layer, self.batch

    def wanted(self, pool_dtype=None, window=None):
        """In float64, over what the pool holds of each number; a window counts depths of drafts."""
        found, begin, width = [], 0, self.heads // self.kv_heads
        for sees, count, *told in zip(self.sees, self.counts, self.keys, self.values, strict=True):
            held = [
                (each if pool_dtype is None else (each / (scale or 1)).to(pool_dtype).double() * (scale or 1)).double()
                for each, scale in zip(told, self.scales, strict=True)
            ]
            keys, values = (each.repeat_interleave(width, 1) for each in held)
            scores = torch.einsum("qhd,khd->hqk", self.query[begin : begin + count].double(), keys) * self.scale
            scores[..., len(keys) - count :].masked_fill_(~sees, float("-inf"))
            if window is not None:
                depth = sees.sum(1) - 1
                far = depth.unsqueeze(1) - torch.cat((torch.arange(count - len(keys), 0), depth))
                scores.masked_fill_(far > window, float("-inf"))
            found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1))
            begin += count
        return torch.cat(found)
