"""Mixed steps and decodes over caches of every layout on a CPU: what runs is no reference, whatever acts on scores."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops.paged.mixed import paged_tokens_reference
from paged_calls import paged

LAYOUTS = {
    "tokens first": ("NHD", lambda cache: cache),
    "heads first": ("HND", lambda cache: cache.transpose(1, 2).contiguous()),
    "heads first, transposed": ("HND", lambda cache: cache.permute(0, 2, 3, 1).contiguous().transpose(2, 3)),
}
SCORES = {
    "plain": {},
    "window": {"window": (2, 0)},
    "softcap": {"softcap": 3.0},
    "softcap in a window": {"softcap": 3.0, "window": (2, 0)},
    "softcap of what sees all": {"softcap": 3.0, "causal": False, "window": (-1, 1)},
    "slopes": {"alibi_slopes": torch.linspace(0.1, 0.5, 4)},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, 4)},
}


@at_once("scores", SCORES)
@at_once("layout", LAYOUTS)
def test_a_mixed_step_in_any_layout_has_a_kernel(layout, scores):
    name, arranged = LAYOUTS[layout]
    query, keys, values, tables, lens, starts = paged(dtype=torch.float32)
    keys_there, values_there = (
        arranged(keys),
        arranged(values) if "transposed" not in layout else values.transpose(1, 2),
    )
    arguments = (query, keys_there, values_there, tables, lens)
    more = {"layout": name, "cu_seqlens_q": starts, **SCORES[scores]}
    assert not lz.explain("paged_attention", *arguments, **more).chosen.kernel.is_reference
    wanted = paged_tokens_reference(query, keys, values, tables, lens, starts, **{"causal": True, **SCORES[scores]})
    torch.testing.assert_close(lz.paged_attention(*arguments, **more), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [3, 8, 700], ids=["one page", "pages", "one sequence after the other"])
@pytest.mark.parametrize("scores", [{}, {"window": (3, 0)}, {"softcap": 3.0, "window": (3, 0)}], ids=str)
def test_decodes_of_short_and_of_long_sequences_gather_no_more_than_they_see(scores, length):
    torch.manual_seed(0)
    pages, width = -(-length // 16), 64
    keys, values = (torch.full((2 * pages + 1, 16, 2, width), float("nan")) for _ in range(2))
    tables, lens = (
        torch.randperm(2 * pages).view(2, pages).int(),
        torch.tensor([length, length // 2], dtype=torch.int32),
    )
    for row, count in enumerate(lens.tolist()):
        places = torch.arange(count)
        for cache in (keys, values):
            cache[tables[row, places // 16].long(), places % 16] = torch.randn(count, 2, width)
        tables[row, -(-count // 16) :] = -1
    query = torch.randn(2, 1, 4, width)
    report = lz.explain("paged_attention", query, keys, values, tables, lens, **scores)
    assert report.chosen.kernel.id in ("torch.paged_gather", "torch.paged_softcap")
    starts = torch.arange(3, dtype=torch.int32)
    wanted = paged_tokens_reference(query[:, 0], keys, values, tables, lens, starts, causal=True, **scores)
    got = lz.paged_attention(query, keys, values, tables, lens, **scores)
    torch.testing.assert_close(got[:, 0], wanted, rtol=1e-5, atol=1e-5)
