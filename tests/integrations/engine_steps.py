"""Steps of serving engines: sequences, their places in a cache, and what attention over them gives."""

from __future__ import annotations

import sys
import types

import torch

from layerzero.ops.attention.reference import attention_reference

PAGE = 16


def module(monkeypatch, name, **members):
    """A module that stands for one which needs what is not installed."""
    made = types.ModuleType(name)
    vars(made).update(members)
    made.__path__ = []
    monkeypatch.setitem(sys.modules, name, made)
    return made


STEPS = [((17, 33, 1), (1, 1, 1)), ((17, 40, 6), (1, 8, 6)), ((20, 5), (20, 3))]
"""Lengths and new tokens of each sequence: decodes, a mixed step, prefills one of which is a chunk."""


class Sequences:
    """Keys and values of every sequence as a list of tokens, and their places in a cache."""

    def __init__(self, lens, counts, heads=4, kv_heads=2, dim=16):
        torch.manual_seed(0)
        self.lens, self.counts = torch.tensor(lens, dtype=torch.int32), counts
        self.starts = torch.tensor([sum(counts[:each]) for each in range(len(counts) + 1)], dtype=torch.int32)
        self.query = torch.randn(sum(counts), heads, dim)
        self.keys, self.values = ([torch.randn(length, kv_heads, dim) for length in lens] for _ in range(2))
        blocks = -(-max(lens) // PAGE)
        self.tables = torch.randperm(len(lens) * blocks + 2)[: len(lens) * blocks].view(len(lens), blocks).int()
        self.pages = len(lens) * blocks + 2

    def slots(self):
        """Where each sequence's tokens lie."""
        for table, length in zip(self.tables, self.lens.tolist(), strict=True):
            places = torch.arange(length)
            yield table[places // PAGE].long() * PAGE + places % PAGE

    def new(self, of):
        """This step's tokens, one sequence after the other."""
        return torch.cat([each[len(each) - count :] for each, count in zip(of, self.counts, strict=True)])

    def wanted(self, **scores):
        found = []
        for row, count in enumerate(self.counts):
            query = self.query[self.starts[row] : self.starts[row] + count]
            dense = (each.unsqueeze(0) for each in (query, self.keys[row], self.values[row]))
            found.append(attention_reference(*dense, **{"causal": True, **scores})[0])
        return torch.cat(found)

    def fill(self, keys, values):
        """Write what was there before this step into (slots, K, D)."""
        for row, slots in enumerate(self.slots()):
            before = slots[: len(slots) - self.counts[row]]
            keys[before], values[before] = self.keys[row][: len(before)], self.values[row][: len(before)]
