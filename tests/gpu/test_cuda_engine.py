"""The example's serving engine on a GPU: decode steps that are CUDA graphs write what the plain model writes."""

from __future__ import annotations

import pytest
import torch

from engine_example import loaded, printed

TOKENS = 24

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # libraries warn of each other when they are imported
    pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning"),  # which kernels there are is open
]


example = pytest.fixture(scope="module")(loaded)


def model_of(example, dtype):
    shape = example.Shape(512, 512, 3, 8, 2, 64, 1024, 256)
    return example.Llama(shape, "cuda", dtype), example.requests_of(11, shape.vocabulary)


def same(written, wanted):
    """The share of tokens up to the first that differs of each request: what follows one has another beginning."""
    equal = 0
    for mine, theirs in zip(written, wanted, strict=True):
        assert len(mine) == len(theirs) == TOKENS
        equal += next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), TOKENS)
    return equal / (TOKENS * len(wanted))


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 0.9), (torch.bfloat16, 0.25)], ids=["float32", "bfloat16"]
)
def test_graphs_write_what_is_written_one_by_one(example, dtype, least):
    """Products of several rows round otherwise than those of one: where two logits tie, tokens may part."""
    model, prompts = model_of(example, dtype)
    wanted = example.one_by_one(model, prompts, TOKENS)
    engine = example.Engine(model, pages=256, budget=96, capture=example.captured)
    for _again in range(2):  # prompts come one after the other, so that batches grow and shrink; then graphs are there
        assert same(example.serve(engine, prompts, TOKENS), wanted) >= least
        assert engine.cache.free_pages == 256
    assert len(engine.graphs) >= 3
    assert set(engine.graphs) <= {1, 2, 4, 8, 16}
    assert engine.cache.usage().found_tokens > 0


def test_graphs_write_what_steps_without_write(example):
    model, prompts = model_of(example, torch.bfloat16)
    written = []
    for capture in (None, example.captured):
        engine = example.Engine(model, pages=256, budget=96, capture=capture)
        written.append(example.serve(engine, prompts, TOKENS))
        assert bool(engine.graphs) == (capture is not None)
    assert same(*written) >= 0.25


def test_it_tells_the_roof(example, monkeypatch, capsys):
    asked = "--dtype bfloat16 --tokens 8 --requests 4 --prompt 64 --compare 1"
    told = printed(example, asked, monkeypatch, capsys)
    assert "% of the roof" in told
    assert " of 8; prompt tokens" in told
