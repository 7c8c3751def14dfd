"""Caches that grow in memory with room: what they hold is what Transformers' own would, whatever is done with them."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import architectures
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import layerzero as lz
from decoders import made, stepped, tokens, transformers
from drawing import examples
from launches import Counted
from layerzero.integrations.optimize.attention import dynamic_cache
from layerzero.integrations.optimize.attention.dynamic_cache import NAMES, appended, cache_in, name_in, name_of
from layerzero.integrations.transformers import attention_forward

HEADS, WIDTH = 2, 3


def fresh(batch: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    keys, values = torch.randn(2, batch, count, HEADS, WIDTH)
    return keys.transpose(1, 2), values.transpose(1, 2)


def same(mine: Any, stock: Any) -> None:
    for one, other in zip(mine.layers, stock.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    assert mine.get_seq_length() == stock.get_seq_length()


def both(batch: int = 2, prompt: int = 4) -> tuple[Any, Any]:
    """A cache that grows here, and one of Transformers' own, with a prompt."""
    caches = transformers.DynamicCache(), transformers.DynamicCache()
    for cache in caches:
        for layer in range(2):
            cache.update(*fresh(batch, prompt, layer), layer)
    return caches


@pytest.mark.parametrize("at_once", [False, True])
def test_a_layer_of_no_values_grows(monkeypatch, at_once):
    """Some latent caches keep nothing beside their keys."""
    monkeypatch.setattr(dynamic_cache, "runs_a_library", lambda *_: at_once)
    mine, stock = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for count in (5, 1, 1, 2, 1):
            keys, values = fresh(2, count, count)[0], torch.empty(2, HEADS, count, 0)
            got = appended(mine, keys, values, 0) if count != 5 else mine.update(keys, values, 0)
            wanted = stock.update(keys, values, 0)
            assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


ACTIONS = ("append", "append", "append", "several", "crop", "reorder", "select", "repeat", "copy", "assign", "write")


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), max_size=24), st.integers(1, 5), st.booleans()
)
def test_a_cache_holds_what_transformers_own_would(actions: list[tuple[str, int]], least: int, at_once: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dynamic_cache, "LEAST", least)  # so that room ends often
        patch.setattr(dynamic_cache, "runs_a_library", lambda *_: at_once)  # keys and values by one launch, as on a GPU
        mine, stock = both()
        for action, number in actions:
            batch = stock.layers[0].keys.shape[0]
            if action in ("append", "several"):
                count = 1 if action == "append" else 1 + number % 4
                for layer in range(2):
                    given = fresh(batch, count, number + layer)
                    got, wanted = appended(mine, *given, layer), stock.update(*given, layer)
                    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
            for cache in (mine, stock):
                if action == "crop" and stock.get_seq_length() > 1 + number % 2:
                    cache.crop(-1 - number % 2)
                elif action == "reorder":
                    cache.reorder_cache(torch.arange(batch - 1, -1, -1))
                elif action == "select" and batch > 1:
                    cache.batch_select_indices(torch.tensor([number % batch, 0]))
                elif action == "repeat" and batch < 4:
                    cache.batch_repeat_interleave(2)
                elif action == "assign":
                    cache.layers[0].keys = cache.layers[0].keys * 2
                elif action == "write":
                    cache.layers[1].values[:, :, number % stock.get_seq_length()].neg_()
            if action == "copy":
                left, mine = mine, copy.deepcopy(mine)
                other = copy.deepcopy(stock)
                for cache, growth in ((left, appended), (other, lambda of, *given: of.update(*given))):
                    growth(cache, *fresh(batch, 1, number), 0)  # what the first one gets is none of the copy's
                assert torch.equal(left.layers[0].keys, other.layers[0].keys)
            same(mine, stock)


@torch.no_grad()
def test_a_step_writes_its_own_tokens_alone() -> None:
    mine, _ = both(prompt=300)
    appended(mine, *fresh(2, 1, 0), 0)  # the first one copies the prompt into memory with room
    there = mine.layers[0].keys.data_ptr()
    with Counted() as counted:
        for step in range(100):
            appended(mine, *fresh(2, 1, step), 0)
    assert mine.layers[0].keys.data_ptr() == there
    copies = [each for each in counted.calls if each in ("aten.cat.default", "aten.copy_.default")]
    assert copies == ["aten.copy_.default"] * 200
    assert mine.layers[0].keys.untyped_storage().nbytes() < 2 * HEADS * WIDTH * 4 * 600


def test_what_is_differentiated_compiled_or_not_plain_is_left_to_transformers() -> None:
    mine, _ = both()
    keys, values = fresh(2, 1, 0)
    appended(mine, keys.requires_grad_(), values, 0)[0].sum().backward()
    assert keys.grad is not None
    for cache in (transformers.DynamicCache(), transformers.StaticCache(made("Llama").config, max_cache_len=8)):
        assert torch.equal(appended(cache, *fresh(2, 3, 1), 0)[0][:, :, :3], fresh(2, 3, 1)[0])
    with torch.inference_mode():
        mine, stock = both()
        for cache, growth in ((mine, appended), (stock, lambda of, *given: of.update(*given))):
            growth(cache, *fresh(2, 1, 0), 0), growth(cache, *fresh(2, 1, 0), 1)
    with torch.no_grad():  # nothing of inference mode may be written into here
        for layer in range(2):
            appended(mine, *fresh(2, 1, 7), layer), stock.update(*fresh(2, 1, 7), layer)
        same(mine, stock)


@torch.no_grad()
def test_an_optimized_models_cache_is_saved_and_goes_on_elsewhere() -> None:
    model, stock = made("Llama"), made("Llama")
    lz.optimize(model)
    caches = []
    for each in (model, stock):
        cache = transformers.DynamicCache(config=each.config)
        for ids in (tokens(), tokens(2, 1), tokens(2, 1, 3)):
            stepped(each, cache, ids)
        caches.append(cache)
    assert type(caches[0].layers[0]) is type(caches[1].layers[0])
    assert dynamic_cache._ROOMS.get(caches[0].layers[0]) is not None
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
    kept = io.BytesIO()
    torch.save([(each.keys, each.values) for each in caches[0].layers], kept)
    kept.seek(0)
    loaded = transformers.DynamicCache([*torch.load(kept)])
    torch.testing.assert_close(
        stepped(stock, loaded, tokens(2, 1, 4)), stepped(model, caches[0], tokens(2, 1, 4)), rtol=1e-4, atol=1e-4
    )


def test_slots_of_a_capture_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's hold no numbers before it is replayed, and those of a step before it would be freed under it."""
    capturing, made = [False], []

    def arange(first: int, end: int, step: int, device: torch.device) -> torch.Tensor:
        made.append(capturing[0])
        return torch.tensor(list(range(first, end, step)))

    monkeypatch.setattr(dynamic_cache, "_LAST", {})
    monkeypatch.setattr(dynamic_cache.torch, "arange", arange)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: torch.tensor(0))
    monkeypatch.setattr(torch.Tensor, "cuda_stream", 7, raising=False)
    slots = [dynamic_cache._slots(torch.device("cuda", 0), 2, 128, 5)]
    capturing[0] = True
    slots += [dynamic_cache._slots(torch.device("cuda", 0), 2, 128, 5) for _ in range(2)]
    capturing[0] = False
    slots.append(dynamic_cache._slots(torch.device("cuda", 0), 2, 128, 5))
    assert [each.tolist() for each in slots] == [[5, 133]] * 4
    assert made == [False, True, True]
    assert slots[3] is slots[0]


@torch.no_grad()
def test_tokens_are_any_tensors_to_autograd() -> None:
    """What is written behind tokens that somebody kept is no change of them: stock's would be tensors of their own."""
    mine, stock = both()
    for cache, growth in ((mine, appended), (stock, lambda of, *given: of.update(*given))):
        growth(cache, *fresh(2, 1, 0), 0)
    grads = []
    for cache, growth in ((mine, appended), (stock, lambda of, *given: of.update(*given))):
        probe = torch.ones(WIDTH, requires_grad=True)
        with torch.enable_grad():
            loss = (cache.layers[0].keys * probe).sum()
        growth(cache, *fresh(2, 1, 1), 0)
        loss.backward()
        with torch.enable_grad():
            cache.layers[0].values.mul_(probe).sum().backward()
        grads.append(probe.grad)
    torch.testing.assert_close(*grads)


@torch.no_grad()
@pytest.mark.parametrize("change", ["flip", "crop", "move"])
def test_a_tensor_that_got_other_data_is_read_as_it_is(change: str) -> None:
    mine, stock = both()
    for layer in range(2):
        appended(mine, *fresh(2, 1, layer), layer), stock.update(*fresh(2, 1, layer), layer)
    kept = mine.layers[0].keys.data
    before = kept.clone()
    for cache in (mine, stock):
        for layer in cache.layers:
            for each in (layer.keys, layer.values):
                each.data = {"flip": each.flip(0), "crop": each.data[:, :, :-2], "move": each.clone() * 2}[change]
    for layer in range(2):
        appended(mine, *fresh(2, 1, 9), layer), stock.update(*fresh(2, 1, 9), layer)
    same(mine, stock)
    assert torch.equal(kept, before)


@torch.no_grad()
@pytest.mark.parametrize("drop", ["reset", "update"])
def test_memory_is_given_back_with_the_tokens(drop: str) -> None:
    mine, stock = both()
    layer = mine.layers[0]
    appended(mine, *fresh(2, 1, 0), 0)
    memory = [StorageWeakRef(each.untyped_storage()) for each in (layer.keys, layer.values)]
    if drop == "reset":
        mine.reset()
        stock.reset()
        if (kept := stock.layers[0].keys) is not None and kept.numel():
            pytest.skip("Transformers 5.17 keeps its tensors, filled with zeros")
    else:  # as a stock model does after undo()
        mine.update(*fresh(2, 1, 1), 0)
    gc.collect()
    assert all(each.expired() for each in memory)


@torch.no_grad()
def test_a_cache_goes_on_where_memory_was_short_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, stock = both()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(dynamic_cache._Room, "_filled", _too_large)
        appended(mine, *fresh(2, 1, 7), 0)
    for layer in range(2):
        appended(mine, *fresh(2, 1, layer), layer), stock.update(*fresh(2, 1, layer), layer)
    same(mine, stock)


def _too_large(*_: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory for this many places")


class Old:
    def forward(self, input_ids, past_key_values=None):
        """Before 5.24."""


class New:
    def forward(self, input_ids, cache=None):
        """Since then."""


def test_a_model_is_asked_by_the_name_that_it_has():
    assert name_of(Old()) == "past_key_values"
    assert name_of(New()) == "cache"
    assert name_of(object()) == "past_key_values"
    config = transformers.LlamaConfig(**architectures.GQA)
    model = transformers.LlamaForCausalLM._from_config(config).eval()
    with torch.no_grad():
        first = model(input_ids=torch.tensor([[3, 4]]), use_cache=True)
        cache = getattr(first, name_of(model))
        again = model(input_ids=torch.tensor([[5]]), **{name_of(model): cache})
    assert cache_in(dict(again.items())) is cache


def test_a_model_that_only_hands_its_cache_on_is_asked_by_the_name_of_its_version():
    class Handing(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **given):
            """As ColPali does."""

    assert name_of(Handing(transformers.LlamaConfig(**architectures.GQA))) == name_of(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**architectures.GQA))
    )


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_call_is_read_by_either_name(name):
    cache = object()
    assert cache_in({name: cache}) is cache
    assert cache_in({"cache": None, "past_key_values": None, name: cache}) is cache
    assert cache_in({}) is None
    assert name_in({name: None}) == name


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_cache_that_a_model_hands_on_to_its_attention_is_not_written_again(name):
    config = transformers.LlamaConfig(**architectures.GQA)
    module = transformers.LlamaForCausalLM._from_config(config).model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    cache = transformers.DynamicCache(config=config)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    wanted = attention_forward(module, query, key, key, mask, scaling=0.5)[0]
    got = attention_forward(module, query, key, key, mask, scaling=0.5, **{name: cache})[0]
    assert torch.equal(got, wanted)
    assert cache.get_seq_length() == 0
