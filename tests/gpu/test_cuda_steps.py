"""Captured steps on a GPU: logits of a replay, streams and threads, draws of a graph, and what ends nothing."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

import layerzero as lz

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
]


def made(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.1,
        } | more
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().cuda().to(torch.bfloat16)


def tokens(rows=2, length=40, seed=1):
    return torch.randint(1, 512, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


def steps_of(model):
    return vars(model)["_layerzero"]


def logits_of(model, ids, new=6):
    """Logits of tokens that are given, so that nothing depends on a tie."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-new], past_key_values=cache)
        return [
            model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(ids.shape[1] - new, ids.shape[1])
        ]


def near(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.float() - theirs.float()).abs().max() <= 0.05 * theirs.float().abs().max()


def test_logits_of_a_replay_are_stocks():
    model = made()
    expected = logits_of(model, tokens())
    lz.optimize(model, graph=True)
    near(logits_of(model, tokens()), expected)
    near(logits_of(model, tokens()), expected)
    assert steps_of(model).graphs >= 1
    assert not steps_of(model).left


def test_steps_are_captured_anew_once_all_graphs_are_gone():
    model = made()
    expected = logits_of(model, tokens())
    lz.optimize(model, graph=True)
    near(logits_of(model, tokens()), expected)
    attention, model.config._attn_implementation = model.config._attn_implementation, "eager"
    logits_of(model, tokens())
    assert steps_of(model).left
    model.config._attn_implementation = attention
    steps_of(model)._look()
    steps_of(model).left.clear()
    near(logits_of(model, tokens()), expected)
    assert steps_of(model).graphs >= 1
    assert not steps_of(model).left


def test_streams_share_one_models_steps():
    """Two caches of one size in turn, each on a stream of its own, without a synchronisation between."""
    model = made()
    inputs = [tokens(seed=each) for each in (1, 2)]
    expected = [logits_of(model, each) for each in inputs]
    lz.optimize(model, graph=True)
    logits_of(model, inputs[0])
    streams = [torch.cuda.Stream() for _ in inputs]
    caches = [transformers.DynamicCache(config=model.config) for _ in inputs]
    got = [[], []]
    torch.cuda.synchronize()
    for at in range(7):
        for number, (ids, stream, cache) in enumerate(zip(inputs, streams, caches, strict=True)):
            with torch.cuda.stream(stream), torch.no_grad():
                part = ids[:, :-6] if at == 0 else ids[:, at - 7 : at - 6 or None]
                logits = model(part, past_key_values=cache).logits
                if at:
                    got[number].append(logits)
    torch.cuda.synchronize()
    for mine, theirs in zip(got, expected, strict=True):
        near(mine, theirs)
    assert not steps_of(model).left


def test_threads_with_streams_of_their_own():
    model = made()
    inputs = [tokens(seed=each) for each in range(4)]
    expected = [logits_of(model, each) for each in inputs]
    lz.optimize(model, graph=True)
    logits_of(model, inputs[0])
    errors = []

    def run(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(4):
                    found = logits_of(model, inputs[number])
                    torch.cuda.current_stream().synchronize()
                    near(found, expected[number])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors, errors[0]


def test_a_held_cache_is_written_read_and_pickled():
    model = made()
    lz.optimize(model, graph=True)
    logits_of(model, tokens())
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(), past_key_values=cache)
        model(tokens(2, 1), past_key_values=cache)
        twin = pickle.loads(pickle.dumps(cache))
        first = model(tokens(2, 1, 3), past_key_values=cache).logits
        near([model(tokens(2, 1, 3), past_key_values=twin).logits], [first])
        cache.layers[0].values.zero_()
        changed = model(tokens(2, 1, 4), past_key_values=cache).logits
        same = model(tokens(2, 1, 4), past_key_values=twin).logits
    assert (changed.float() - same.float()).abs().max() > 0.01 * same.float().abs().max()


@pytest.mark.parametrize("numbers", [{}, {"temperature": 1.5}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_a_graph_draws_the_same_for_the_same_seed(numbers):
    model = made()
    lz.optimize(model, graph=True)

    def generated(seed):
        cache, found = transformers.DynamicCache(config=model.config), [tokens()]
        for _ in range(20):
            found.append(lz.generate_step(model, cache, found[-1], seed=seed, **numbers))
        return torch.cat(found, -1)

    state = torch.cuda.get_rng_state()
    first = generated(3)
    torch.cuda.manual_seed(99)
    assert torch.equal(generated(3), first)
    assert torch.equal(generated(4), first) == (not numbers)
    assert steps_of(model).graphs >= 1
    assert not steps_of(model).left
    if not numbers:
        assert torch.equal(model.generate(tokens(), max_new_tokens=20, do_sample=False), first)
    torch.cuda.set_rng_state(state)


def test_no_memory_for_a_step_ends_nothing(monkeypatch):
    from layerzero.integrations.optimize.models import steps

    model = made()
    expected = logits_of(model, tokens())
    lz.optimize(model, graph=True)

    def full(*_):
        raise torch.OutOfMemoryError("planted: no memory")

    own = steps.Steps._captured
    monkeypatch.setattr(steps.Steps, "_captured", full)
    with pytest.warns(lz.LayerZeroWarning, match="planted"):
        near(logits_of(model, tokens()), expected)
    monkeypatch.setattr(steps.Steps, "_captured", own)
    near(logits_of(model, tokens()), expected)
    assert not steps_of(model).refused
    assert steps_of(model).graphs == 1
