"""``lz.generate_step``: the tokens of ``generate()``, the same draws for the same seed, with and without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import layerzero as lz
from decoders import Recorded, greedy, made, state_of, tokens, transformers
from drawing import mostly

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]


def generated(model: Any, new: int = 8, ids: torch.Tensor | None = None, **numbers: Any) -> torch.Tensor:
    """A loop of one's own: the prompt and what came of it."""
    cache = transformers.DynamicCache(config=model.config)
    found = [tokens() if ids is None else ids]
    for _ in range(new):
        found.append(lz.generate_step(model, cache, found[-1], **numbers))  # each needs the last
    return torch.cat(found, -1)


@pytest.mark.parametrize("kind", mostly(["Llama", "Mistral", "Qwen3"], {"Mistral"}))
@pytest.mark.parametrize("optimized", ["not", "graph"])
def test_greedy_steps_give_the_tokens_of_generate(kind: str, optimized: str, where: str) -> None:
    model = made(kind)
    expected = greedy(model, tokens(), 12)
    report = lz.optimize(model, graph=True) if optimized == "graph" else None
    assert torch.equal(generated(model, 12), expected)
    assert torch.equal(generated(model, 12, temperature=0.0), expected)
    if report is not None:
        assert not state_of(report).left
        assert state_of(report).graphs == (1 if where == "device" else 0)


DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.5},
    {"top_k": 7},
    {"top_p": 0.8, "temperature": 2.0},
    {"top_k": 9, "top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.9, "temperature": 1.3},
]


def test_the_same_seed_gives_the_same_draws(where: str) -> None:
    model = made()
    lz.optimize(model, graph=True)
    likeliest = greedy(model, tokens(), 8)
    for numbers in DRAWN:
        before = torch.random.get_rng_state()
        first = generated(model, seed=5, **numbers)
        assert where == "device" or torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(123)
        assert torch.equal(generated(model, seed=5, **numbers), first), numbers
        assert not torch.equal(generated(model, seed=6, **numbers), first), numbers
        assert not torch.equal(first, likeliest), numbers


def test_without_a_seed_torchs_generator_goes_on(where: str) -> None:
    model = made()
    lz.optimize(model, graph=True)
    torch.manual_seed(1)
    generated(model, 2, temperature=2.0)  # captures
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(generated(model, temperature=2.0))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert len(set(map(tuple, generated(model, 8, torch.ones(64, 3, dtype=torch.long), temperature=3.0).tolist()))) > 32


@pytest.mark.parametrize(
    ("numbers", "likely"),
    [
        ({"top_k": 3}, lambda parts: parts >= parts.topk(3).values[..., -1:]),
        ({"min_p": 0.3}, lambda parts: parts >= 0.3 * parts.amax(-1, keepdim=True) * (1 - 1e-4)),
        ({"top_p": 0.4}, lambda parts: _above(parts) < 0.4),
        ({"min_p": 0.3, "top_k": 50}, lambda parts: parts >= 0.3 * parts.amax(-1, keepdim=True) * (1 - 1e-4)),
    ],
    ids=["top_k", "min_p", "top_p", "min_p and top_k"],
)
def test_what_may_not_come_does_not(numbers: dict[str, Any], likely: Any, where: str) -> None:
    """Many sequences of one prompt, drawn at one step: only the likely tokens come, and all of them do."""
    model, stock = made(), made()
    lz.optimize(model, graph=True)
    ids = tokens(1, 9).expand(256, -1).contiguous()
    with torch.no_grad():
        parts = (stock(ids[:1]).logits[0, -1].float() / 1.5).softmax(-1)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    drawn = lz.generate_step(model, cache, ids[:, -1:], temperature=1.5, seed=3, **numbers)
    wanted = set(likely(parts).nonzero().flatten().tolist())
    assert set(drawn.flatten().tolist()) <= wanted
    common = {number for number in wanted if parts[number] > 0.05}
    assert common <= set(drawn.flatten().tolist())


def _above(parts: torch.Tensor) -> torch.Tensor:
    values, order = parts.sort(descending=True)
    before = values.cumsum(-1) - values
    return before.gather(-1, order.argsort())


def test_one_graph_serves_every_temperature(where: str) -> None:
    model = made()
    report = lz.optimize(model, graph=True)
    drawn = [generated(model, 6, temperature=each, seed=1) for each in (1e-6, 0.5, 3.0)]
    assert torch.equal(drawn[0], greedy(model, tokens(), 6))
    assert not torch.equal(drawn[0], drawn[2])
    if where == "device":
        assert Recorded.captured == 2  # greedy's of generate, and this one
        assert state_of(report).graphs == 2


def test_any_model_and_cache_and_call_is_served(where: str) -> None:
    """Hidden tokens, a static cache, a model that nobody optimized: run as it is, and drawn by the same functions."""
    model = made()
    mask = torch.ones_like(tokens())
    mask[0, :3] = 0
    expected = greedy(model, tokens(), 2, attention_mask=mask)[:, -2:]
    report = lz.optimize(model, graph=True)
    cache = transformers.DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    first = lz.generate_step(model, cache, tokens(), attention_mask=mask, position_ids=positions)
    mask = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), -1)
    second = lz.generate_step(model, cache, first, attention_mask=mask, position_ids=positions[:, -1:] + 1)
    assert torch.equal(torch.cat((first, second), -1), expected)
    assert any("hidden" in each for each in state_of(report).left)
    static = transformers.StaticCache(config=model.config, max_cache_len=32)
    steps = [lz.generate_step(model, static, tokens())]
    steps += [lz.generate_step(model, static, steps[0])]
    assert torch.equal(torch.cat(steps, -1), greedy(model, tokens(), 2)[:, -2:])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"top_k": 0}, "top_k: wanted a whole number from 1"),
        ({"top_p": 1.5}, "top_p: wanted a number from"),
        ({"min_p": -0.1}, "min_p: wanted a number"),
        ({"temperature": -1.0}, "temperature: wanted 0"),
        ({"temperature": float("nan")}, "temperature: wanted 0"),
        ({"seed": 1.5}, "seed: wanted a whole number"),
        ({"tokens": torch.ones(3, dtype=torch.long)}, r"tokens: wanted a tensor \(B, S\)"),
        ({"cache": None}, "cache: wanted a cache of Transformers"),
    ],
)
def test_bad_input_says_what_was_wanted(given: dict[str, Any], wanted: str) -> None:
    arguments = {"cache": transformers.DynamicCache(), "tokens": tokens()} | given
    with pytest.raises(lz.InvalidCallError, match=wanted):
        lz.generate_step(made(), arguments.pop("cache"), arguments.pop("tokens"), **arguments)
