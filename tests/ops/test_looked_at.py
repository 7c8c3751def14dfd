"""Numbers in a step's tensors: looked at by the first of its calls of a kind, and again once they may have changed."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.core.errors import InvalidCallError
from layerzero.ops.ragged import starts
from paged_calls import paged

NAMES = ("query", "key_cache", "value_cache", "block_tables", "context_lens", "cu_seqlens_q")


@pytest.fixture
def looks(monkeypatch):
    """How often starts were looked at."""
    seen, look = [], starts._are_right
    monkeypatch.setattr(starts, "_are_right", lambda *given: (seen.append(given), look(*given))[1])
    return seen


def made():
    """A call's tensors, and a step of them."""
    tensors = dict(zip(NAMES, paged(dtype=torch.float32), strict=True))
    step = lz.StepMetadata(tensors["block_tables"], tensors["context_lens"], cu_seqlens_q=tensors["cu_seqlens_q"])
    return tensors, step


def test_layers_of_a_step_look_once_and_calls_without_one_each_time(looks):
    tensors, step = made()
    lz.paged_attention(**tensors, step=step)
    lz.paged_attention(**tensors)
    assert looks
    looks.clear()  # a call of a new kind is looked at while its kernel is chosen, too
    for _ in range(2):
        lz.paged_attention(**tensors, step=step)
    assert not looks
    step.advance()
    lz.paged_attention(**tensors, step=step)
    assert len(looks) == 1, "the numbers may be others"
    for _ in range(3):
        lz.paged_attention(**tensors)
    assert len(looks) == 4


def test_a_step_of_inference_tensors_looks_each_time():
    with torch.inference_mode():
        tensors, step = made()
        lz.paged_attention(**tensors, step=step)
        tensors["block_tables"].fill_(1000)
        with pytest.raises(InvalidCallError, match="block_tables"):
            lz.paged_attention(**tensors, step=step)


def test_a_cache_of_fewer_pages_is_looked_at_again():
    tensors, step = made()
    lz.paged_attention(**tensors, step=step)
    fewer = {name: tensors[name][:1] for name in ("key_cache", "value_cache")}
    with pytest.raises(InvalidCallError, match="block_tables"):
        lz.paged_attention(**tensors | fewer, step=step)
