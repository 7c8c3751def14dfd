"""Held caches: what the caller reads, writes, copies and pickles is his; threads and streams take turns."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from decoders import greedy, made, state_of, stepped, tokens, transformers
from drawing import mostly, pairs
from layerzero.integrations.optimize.attention import dynamic_cache
from layerzero.integrations.optimize.models import steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]


def used(model: Any, ids: torch.Tensor | None = None) -> Any:
    """A cache with a prompt and one token, which lies in the memory of an optimized model."""
    cache = transformers.DynamicCache(config=model.config)
    for each in (tokens() if ids is None else ids, tokens(2, 1)):
        stepped(model, cache, each)
    return cache


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_writes_into_a_held_cache_are_seen_by_the_next_step(kind: str, where: str) -> None:
    results = []
    for optimized in (False, True):
        model = made(kind)
        if optimized:
            lz.optimize(model, graph=True)
        cache = used(model)
        kept = cache.layers[0].keys
        kept[:, :, -1].mul_(-2.0)
        cache.layers[1].values[:, :, 0].zero_()
        got = [stepped(model, cache, tokens(2, 1, seed)) for seed in (5, 6)]
        results.append([*got, kept])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_layers_stay_the_objects_that_they_were(where: str) -> None:
    model = made("Mistral")
    lz.optimize(model, graph=True)
    cache = transformers.DynamicCache(config=model.config)
    layers = list(cache.layers)
    stepped(model, cache, tokens())
    stepped(model, cache, tokens(2, 1))
    assert all(mine is theirs for mine, theirs in zip(layers, cache.layers, strict=True))
    assert type(layers[0]).__name__ == "HeldWindowLayer"
    assert layers[0].keys.shape[2] == model.config.sliding_window - 1
    assert type(layers[0]) is transformers.cache_utils.DynamicSlidingWindowLayer


@pytest.mark.parametrize("kind", mostly(["Llama", "Mistral"], {"Mistral"}))
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "layer"])
def test_a_used_cache_is_pickled_and_copied_as_transformers_own(way: str, kind: str, where: str) -> None:
    model = made(kind)
    lz.optimize(model, graph=True)
    cache, expected = used(model), used(made(kind))
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(cache))  # what was pickled a line before
    elif way == "deepcopy":
        twin = copy.deepcopy(cache)
    else:
        twin = copy.copy(cache)
        twin.layers = [copy.copy(each) for each in cache.layers]
    assert all(type(each).__module__ == "transformers.cache_utils" for each in twin.layers)
    assert twin.get_seq_length() == expected.get_seq_length() == 10
    for mine, theirs in zip(twin.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-4)
    following = [stepped(model, each, tokens(2, 1, 4)) for each in (cache, twin)]
    torch.testing.assert_close(*following)


def test_sizes_are_asked_without_taking_tokens_out(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of one memory that another call looks at, and a batch that is not its own, copy nothing."""
    model = made()
    lz.optimize(model, graph=True)
    cache = used(model)
    with pytest.raises(RuntimeError):
        stepped(model, cache, tokens(1, 1))
    cache = used(model)
    taken: list[Any] = []
    monkeypatch.setattr("layerzero.integrations.optimize.models.step_cache.release", lambda *given: taken.append(given))
    with torch.no_grad():
        assert not state_of_model(model)._why_not({"past_key_values": cache})
    assert not state_of_model(model)._other_batch(tokens(2, 1), cache)
    assert cache.get_seq_length() == 10
    assert not taken


def state_of_model(model: Any) -> Any:
    return vars(model)["_layerzero"]


def test_threads_share_one_models_steps(where: str) -> None:
    """Each with a cache of its own of one size: they take the memory from each other between any two steps."""
    model, stock = made(), made()
    prompts = [tokens(2, 9, seed) for seed in range(6)]
    expected = [greedy(stock, each, 12) for each in prompts]
    lz.optimize(model, graph=True)
    wrong: list[str] = []

    def run(number: int) -> None:
        try:
            if not torch.equal(greedy(model, prompts[number], 12), expected[number]):
                wrong.append(f"{number}: other tokens")
        except Exception as error:  # noqa: BLE001  # a thread's error is told by the test
            wrong.append(f"{number}: {error!r}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert not state_of_model(model).refused


def test_who_reads_waits_until_a_step_is_over(where: str) -> None:
    model = made()
    lz.optimize(model, graph=True)
    cache = used(model)
    read: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: read.append(cache.layers[0].keys))
    with state_of_model(model)._turns.turn(torch.device("cpu")):
        thread.start()
        thread.join(0.2)
        assert not read
    thread.join(10)
    assert read


class Stream:
    """Stands for a stream: notes what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.of}")


@pytest.mark.parametrize("captures", [False, True])
def test_streams_wait_for_the_turn_before(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    first, second = Stream("first", log), Stream("second", log)
    current = [first]

    class Event:
        of = ""

        def record(self, stream: Stream) -> None:
            self.of = stream.name
            log.append(f"after {stream.name}")

    fake = SimpleNamespace(
        Event=Event, current_stream=lambda _: current[0], is_current_stream_capturing=lambda: captures
    )
    monkeypatch.setattr(dynamic_cache.torch, "cuda", fake)
    found = dynamic_cache.Turns()
    for each in (first, first, second, first):
        current[0] = each
        with found.turn(torch.device("cuda", 0)):
            log.append("step")
    if captures:
        assert log == ["step"] * 4
        return
    assert log == [
        "step", "after first", "step", "after first",
        "second waits for first", "step", "after second", "first waits for second", "step", "after first",
    ]  # fmt: skip


def failing(monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, times: int = 1) -> None:
    """Let the model's part of a step fail a few times."""
    own, left = steps.Steps._call, [times]

    def call(self: Any, *given: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return own(self, *given)

    monkeypatch.setattr(steps.Steps, "_call", call)


FAILURES = ["memory", "other", "uncapturable"]


@pytest.mark.parametrize(("kind", "where"), pairs(FAILURES, ["host", "device"], FAILURES), indirect=["where"])
def test_only_what_cannot_be_captured_ends_steps_for_good(
    kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = made(), tokens()
    expected = greedy(model, ids)
    report = lz.optimize(model, graph=True)
    error = {
        "memory": torch.OutOfMemoryError("planted: no memory"),
        "other": RuntimeError("planted: once"),
        "uncapturable": lz.CudaGraphUnsafeError("rms_norm", ["planted"]),
    }[kind]
    failing(monkeypatch, where, error)
    with pytest.warns(lz.LayerZeroWarning, match="planted"):
        assert torch.equal(greedy(model, ids), expected)
    state = state_of(report)
    assert bool(state.refused) == (kind == "uncapturable")
    assert state.left.total() == (23 if kind == "uncapturable" else 1)
    assert "planted" in str(report)
    assert torch.equal(greedy(model, ids), expected)


def test_a_callers_error_is_his_and_ends_nothing(where: str) -> None:
    model, stock = made(), made()
    report = lz.optimize(model, graph=True)
    cache, theirs = used(model), used(stock)
    far = torch.full((2, 1), 5000)
    with pytest.raises(IndexError) as raised:
        stepped(stock, theirs, far)
    with pytest.raises(type(raised.value)):
        stepped(model, cache, far)
    assert not state_of(report).refused
    left = state_of(report).left.total()
    torch.testing.assert_close(
        stepped(model, used(model), tokens(2, 1, 3)), stepped(stock, used(stock), tokens(2, 1, 3)), rtol=1e-4, atol=1e-4
    )
    assert state_of(report).left.total() == left
