"""The serving engine of the examples writes what the plain model writes, request by request, whatever runs beside."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import layerzero as lz

FILE = Path(__file__).parents[2] / "examples" / "engine.py"
TOKENS = 6


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("engine_example", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def served(example):
    """A small model in float32, prompts, and what the model writes after each of them."""
    model = example.Llama(
        example.Shape(vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, longest=256)
    )
    prompts = example.requests_of(6, 64)
    return model, prompts, example.one_by_one(model, prompts, TOKENS)


@pytest.mark.parametrize(("pages", "budget"), [(64, 32), (64, 512), (20, 17)], ids=["chunks", "whole", "little room"])
def test_interleaved_requests_get_the_tokens_that_they_get_alone(example, served, pages, budget):
    model, prompts, wanted = served
    engine = example.Engine(model, pages=pages, budget=budget)
    assert example.serve(engine, prompts, TOKENS) == wanted
    assert not engine.running
    assert sorted(engine.pages.free) == list(range(pages))
    assert not any(engine.pages.users)


def test_a_known_prefix_is_not_computed_again_and_changes_no_token(example, served):
    model, prompts, wanted = served
    engine = example.Engine(model, pages=64)
    for _again in range(2):
        for prompt, tokens in zip(prompts, wanted, strict=True):
            request = engine.submit(prompt, TOKENS)
            while engine.step():
                pass
            assert request.written == tokens
    assert engine.reused >= sum((len(prompt) - 1) // example.PAGE * example.PAGE for prompt in prompts)


def test_steps_mix_prefills_and_decodes_in_one_call(example, served, monkeypatch):
    model, prompts, _ = served
    seen = []
    attend = lz.paged_attention

    def watched(query, *tensors, **others):
        seen.append((query.ndim, others.get("decodes")))
        return attend(query, *tensors, **others)

    monkeypatch.setattr(lz, "paged_attention", watched)
    example.serve(example.Engine(model, budget=24), prompts, TOKENS)
    assert {(3, None), (4, None)} < set(seen)
    assert any(decodes for _, decodes in seen)


def test_a_request_that_no_step_could_serve_is_refused(example, served):
    engine = example.Engine(served[0], pages=4)
    for prompt, count in (([], 1), ([1] * 60, 5), ([1], 0)):
        with pytest.raises(ValueError, match="wanted a prompt and at most 64 tokens"):
            engine.submit(prompt, count)


def test_it_is_small():
    assert len(FILE.read_text().splitlines()) <= 300


def test_it_runs_as_a_program(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine.py", "--width", "64", "--tokens", "2", "--device", "cpu"])
    example.main()
    told = capsys.readouterr().out
    assert "engine: " in told
    assert "tokens that are the same: 32 of 32" in told
    assert torch.get_default_dtype() is torch.float32
