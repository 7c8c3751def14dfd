"""``lz.optimize(graph=True)``: the same tokens, a cache that stays the caller's, and what is no step."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from architectures import decoders, padded

import layerzero as lz
from decoders import KINDS, SIZES, greedy, made, state_of, stepped, tokens, transformers
from drawing import pairs
from layerzero.integrations.optimize.models import generation, steps
from layerzero.integrations.optimize.models.step_cache import PAGE, bucket

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]


WHERE = ["host", "device"]


@pytest.mark.parametrize(("kind", "where"), pairs(KINDS, WHERE, {"Qwen3", "Mistral", "Olmo2"}), indirect=["where"])
def test_tokens_are_stocks(kind: str, where: str) -> None:
    model, ids = made(kind), tokens()
    expected = greedy(model, ids, 20)  # twice a sliding window and more
    torch.manual_seed(3)
    sampled = model.generate(ids, max_new_tokens=8, do_sample=True)
    report = lz.optimize(model, graph=True)
    assert torch.equal(greedy(model, ids, 20), expected)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=True), sampled)
    state = state_of(report)
    assert not state.left
    assert state.graphs == (1 if where == "device" else 0)
    report.undo()
    assert "forward" not in vars(model)
    assert torch.equal(greedy(model, ids, 20), expected)


def test_longer_sequences_get_graphs_of_their_own_and_more_memory(where: str) -> None:
    model, ids = made(), tokens(1, PAGE - 20)
    expected = greedy(model, ids, 40), greedy(model, tokens(1, 2 * PAGE), 8)
    report = lz.optimize(model, graph=True)
    assert torch.equal(greedy(model, ids, 40), expected[0])
    before = state_of(report).bytes
    assert torch.equal(greedy(model, tokens(1, 2 * PAGE), 8), expected[1])
    assert state_of(report).bytes > before
    assert torch.equal(greedy(model, ids, 40), expected[0])
    assert not state_of(report).left
    assert report.extra_bytes >= state_of(report).bytes
    assert f"; {state_of(report).bytes / 1e6:.1f} MB of keys and values in steps" in str(report)
    forms = report.weight_bytes + report.extra_bytes - state_of(report).bytes
    assert f"{forms / 1e6:.1f} MB with packed forms" in str(report)


def test_buckets_hold_a_length_and_waste_no_more_than_half() -> None:
    assert [bucket(each * PAGE) // PAGE for each in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        12,
        12,
        16,
    ]
    assert all(length <= bucket(length) < 2 * length + PAGE for length in range(1, 20 * PAGE, 37))


def test_what_is_no_step_runs_as_it_is_and_is_counted(where: str) -> None:
    model, ids = made(), tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    calls: dict[str, Callable[[Any], torch.Tensor]] = {
        "tokens are hidden": lambda each: greedy(each, ids, 6, attention_mask=mask),
        "its cache is a StaticCache": lambda each: greedy(each, ids, 6, cache_implementation="static"),
        "it got output_hidden_states": lambda each: greedy(each, ids, 6, output_hidden_states=True),
    }
    expected = {why: call(model) for why, call in calls.items()}
    beams = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=3)
    report = lz.optimize(model, graph=True)
    for why, call in calls.items():
        assert torch.equal(call(model), expected[why])
        assert any(why in each for each in state_of(report).left), (why, state_of(report).left)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=3), beams)
    assert "steps ran as they are" in str(report)
    cache = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    model(tokens(2, 1), past_key_values=cache).logits.sum().backward()
    assert "gradients are on" in state_of(report).left


@pytest.mark.parametrize(
    "told",
    [{"attention_mask": torch.ones(2, 9, dtype=torch.int64)}, {"logits_to_keep": torch.tensor([0, 0])}],
    ids=["a mask of the prompt alone hides the new token", "one logit twice"],
)
def test_arguments_of_a_step_hold(told: dict[str, Any], where: str) -> None:
    model, ids = made(), tokens()
    stock = copy.deepcopy(model)
    lz.optimize(model, graph=True)
    found = []
    for each in (model, stock):
        cache = transformers.DynamicCache(config=each.config)
        with torch.no_grad():
            each(ids, past_key_values=cache)
            found.append([each(ids[:, :1], past_key_values=cache, **told).logits for _ in range(2)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_the_cache_stays_the_callers(where: str) -> None:
    """Copied, cropped, continued by a longer input, exchanged for another, kept after undo: as stock's."""
    ids = [tokens(2, length, seed) for seed, length in enumerate((9, 1, 1, 1, 3, 1, 1))]
    results = []
    for optimized in (False, True):
        model = made("Mistral")
        report = lz.optimize(model, graph=True) if optimized else None
        first, second = (transformers.DynamicCache(config=model.config) for _ in range(2))
        got = [stepped(model, first, each) for each in ids[:3]]
        got += [stepped(model, second, each) for each in ids[:2]]  # takes the memory
        got += [stepped(model, first, ids[3])]  # takes it back
        twin, kept = copy.deepcopy(first), first.layers[0].keys
        got += [stepped(model, first, each) for each in ids[4:]]
        got += [stepped(model, twin, ids[3]), stepped(model, second, ids[2])]
        if report is not None:
            report.undo()
        got += [stepped(model, first, ids[1]), first.layers[0].keys, second.layers[1].values]
        got += [kept, torch.tensor([each.get_seq_length() for each in (first, second, twin)])]
        results.append(got)
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_cropped_cache_is_continued_where_it_was_cropped(where: str) -> None:
    results = []
    for optimized in (False, True):
        model = made()
        if optimized:
            lz.optimize(model, graph=True)
        cache = transformers.DynamicCache(config=model.config)
        got = [stepped(model, cache, each) for each in (tokens(), tokens(2, 1), tokens(2, 1, 5))]
        kept = cache.layers[0].keys
        cache.crop(-2)
        got += [stepped(model, cache, tokens(2, 1, seed)) for seed in (7, 8)]
        results.append([*got, kept[:, :, :9], cache.layers[0].keys])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


CHANGES = ["values", "tensors", "module", "hook"]


@pytest.mark.parametrize(("change", "where"), pairs(CHANGES, WHERE, CHANGES), indirect=["where"])
def test_a_graph_is_of_the_model_as_it_is(change: str, where: str) -> None:
    model, other, ids = made(), made(), tokens()
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(0.8)
    lz.optimize(model, graph=True)
    before = greedy(model, ids, 12)
    heard: list[int] = []
    if change == "module":
        other = made()
        other.lm_head = model.lm_head = torch.nn.Linear(32, 101, bias=False)
    elif change == "hook":
        other = made()
        for each in (model, other):
            each.model.norm.register_forward_hook(lambda *_: heard.append(1))
    else:
        given = {key: value.clone() for key, value in other.state_dict().items()}
        model.load_state_dict(given, assign=change == "tensors")
    expected = greedy(other, ids, 12)
    assert torch.equal(greedy(model, ids, 12), expected)
    assert torch.equal(before, expected) == (change == "hook")
    assert len(heard) == (2 * 12 if change == "hook" else 0)


def test_a_step_that_cannot_be_captured_is_told_and_runs_as_it_is(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(), tokens()
    expected = greedy(model, ids)
    report = lz.optimize(model, graph=True)

    def fail(*_: Any) -> Any:
        raise RuntimeError("planted: it waits for the device")

    monkeypatch.setattr(steps.Steps, "_on_host" if where == "host" else "_captured", fail)
    with pytest.warns(lz.LayerZeroWarning, match="planted"):
        got = greedy(model, ids)
    assert torch.equal(got, expected)
    assert "planted" in str(report)


def test_masks_that_hide_more_are_refused() -> None:
    from transformers.masking_utils import chunked_overlay, sliding_window_causal_mask_function

    from layerzero.integrations.transformers_patches import check_only_causal

    config = transformers.MistralConfig(sliding_window=8)
    check_only_causal(sliding_window_causal_mask_function(8), config)
    for wrong in (sliding_window_causal_mask_function(9), chunked_overlay(8, torch.zeros(1, dtype=torch.long))):
        with pytest.raises(lz.InvalidCallError, match="hides more"):
            check_only_causal(wrong, config)


@pytest.mark.parametrize("kind", ["bert", "T5", "softcap"])
def test_models_without_such_steps_are_left_with_a_reason(kind: str) -> None:
    if kind == "bert":
        config = transformers.BertConfig(hidden_size=36, intermediate_size=48, num_hidden_layers=1, vocab_size=101)
        model, why = transformers.BertModel(config).eval(), "does not generate"
    elif kind == "T5":
        config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=101)
        model, why = transformers.T5ForConditionalGeneration(config).eval(), "encoder"
    else:
        config = transformers.Gemma2Config(**SIZES, head_dim=8)
        model, why = transformers.Gemma2ForCausalLM(config).eval(), "not LayerZero's"
    report = lz.optimize(model, graph=True)
    assert any(each.why.startswith("graph:") and why in each.why for each in report.left) or kind == "softcap", report
    assert "step" not in {each.kind for each in report.replaced} or kind == "softcap"


def test_copies_have_memory_of_their_own(where: str) -> None:
    model, ids = made(), tokens()
    expected = greedy(model, ids)
    lz.optimize(model, graph=True)
    greedy(model, ids)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert torch.equal(greedy(twin, ids), expected)
    assert not torch.equal(greedy(model, ids), expected)


def test_a_copy_of_a_cache_keeps_its_tokens_when_another_takes_the_memory(where: str) -> None:
    model = made()
    lz.optimize(model, graph=True)
    cache, other = (transformers.DynamicCache(config=model.config) for _ in range(2))
    for each in (tokens(), tokens(2, 1)):
        stepped(model, cache, each)
    twin, before = copy.copy(cache), cache.layers[0].keys.clone()
    del cache
    for each in (tokens(seed=9), tokens(2, 1, 4)):
        stepped(model, other, each)
    torch.testing.assert_close(twin.layers[0].keys, before)


def test_a_batch_that_is_not_the_caches_is_stocks_error(where: str) -> None:
    model = made()
    report = lz.optimize(model, graph=True)
    cache = transformers.DynamicCache(config=model.config)
    stepped(model, cache, tokens(3))
    with pytest.raises(RuntimeError):
        stepped(model, cache, tokens(1, 1))
    assert "it got 1 sequences, and a cache of 3" in state_of(report).left


def test_memory_made_in_inference_mode_serves_outside(where: str) -> None:
    model = made()
    report = lz.optimize(model, graph=True)
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        for each in (tokens(), tokens(2, 1)):
            model(each, past_key_values=cache, use_cache=True)
    stepped(model, transformers.DynamicCache(config=model.config), tokens())
    cache = transformers.DynamicCache(config=model.config)
    for each in (tokens(), tokens(2, 1)):
        stepped(model, cache, each)
    assert not state_of(report).refused


@pytest.mark.parametrize(("side", "where"), pairs(["none", "left"], WHERE, {"none", "left"}), indirect=["where"])
def test_a_model_that_reads_its_masks_itself_takes_no_steps(side: str, where: str) -> None:
    """DeepSeek-V3.2: each query sees 4 of the keys that its mask shows; its attention is LayerZero's all the same."""
    stock, _ = next(each for each in decoders() if each.name == "DeepseekV32").pair()
    stock.set_attn_implementation("sdpa")
    batch = padded(side)
    expected = stock.generate(**batch, max_new_tokens=12, do_sample=False)
    report = lz.optimize(stock, graph=True)
    assert "attention" in {each.kind for each in report.replaced}, report
    assert torch.equal(stock.generate(**batch, max_new_tokens=12, do_sample=False), expected)
    assert state_of(report).graphs == 0


def test_steps_of_a_model_are_captured_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a pool share memory within a stream alone, and libraries keep workspaces for each."""
    captured: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_stream(self, _: Any) -> None:
            pass

    @contextlib.contextmanager
    def capture(graph: Any, *, pool: Any, stream: Any) -> Iterator[None]:
        captured.append((pool, stream, stream.device))
        yield

    for name, stub in {
        "Stream": Stream, "current_stream": lambda device: Stream(device), "CUDAGraph": object,
        "graph_pool_handle": object, "stream": lambda _: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(steps, "capturing", capture)
    state = steps.Steps(made("Llama"))
    for number in (0, 0, 1):
        state._captured(lambda: None, torch.device("cuda", number))
        state._graphs[0, number, ""] = object()  # type: ignore[assignment]
    first, second, third = captured
    assert first == second
    assert (third[0], third[2].index) == (first[0], 1)
    state._graphs.clear()
    state._captured(lambda: None, torch.device("cuda", 1))
    assert captured[-1][0] != first[0], "torch refuses a pool whose graphs are all gone"


def test_a_model_whose_cache_keeps_latents_takes_no_steps(where: str) -> None:
    """DeepSeek-V3 attends to keys that it makes of those which the cache gives back."""
    stock, _ = next(each for each in decoders() if each.name == "DeepseekV3").pair()
    stock.set_attn_implementation("sdpa")
    ids = tokens(2, 9)
    expected = stock.generate(ids, max_new_tokens=12, do_sample=False)
    report = lz.optimize(stock, graph=True)
    with pytest.warns(lz.LayerZeroWarning, match="latent"):
        got = stock.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(got, expected)
    assert "latent" in state_of(report).refused
    assert state_of(report).graphs == 0
    assert state_of(report).bytes == 0, "no step reads that memory any more"


def test_attention_to_others_than_the_values_of_the_cache_is_stocks(where: str) -> None:
    """DiffLlama attends twice with the same keys, to halves of its values."""
    model, ids = made("DiffLlama"), tokens(2, 9)
    expected = greedy(model, ids, 12)
    lz.optimize(model, graph=True)
    with warnings.catch_warnings():  # of Transformers 5.4 it computes attention by itself, and no step is tried
        warnings.filterwarnings("ignore", ".*keys and values that the cache keeps", lz.LayerZeroWarning)
        assert torch.equal(greedy(model, ids, 12), expected)


def by_hand(model: Any, ids: torch.Tensor, new: int = 6) -> torch.Tensor:
    """Logits of tokens that come without positions."""
    cache, logits = transformers.DynamicCache(), []
    for each in (ids[:, :-new], *ids[:, -new:].split(1, dim=1)):
        logits.append(stepped(model, cache, each))
        if len(logits) == 1 and hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = torch.full((len(ids), 1), -4)  # as after a picture
    return torch.stack(logits, 1)


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
TOWER |= {"image_size": 16, "patch_size": 4}


def counting_from_one() -> Any:
    text = SIZES | {"head_dim": 8, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=TOWER, image_token_index=100)
    return transformers.PaliGemmaForConditionalGeneration(config)


class Counting(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Notes its calls, which makes it another model for a graph."""

    calls = 0

    def forward(self, input_ids: Any, position_ids: Any = None, past_key_values: Any = None, **named: Any) -> Any:
        self.calls += 1
        return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **named)


def test_how_a_model_counts_is_looked_at_once(where: str) -> None:
    model, ids = Counting(transformers.LlamaConfig(**SIZES)).eval(), tokens()
    report = lz.optimize(model, graph=True)
    with mock.patch.object(steps, "why_not_by_place", side_effect=steps.why_not_by_place) as looks:
        by_hand(model, ids)
    assert looks.call_count == 1, report


def test_how_a_model_counts_is_looked_at_again_where_memory_ran_out(where: str) -> None:
    """Otherwise one full moment of a device would leave the model without steps for good."""
    model, ids, full = Counting(transformers.LlamaConfig(**SIZES)).eval(), tokens(), []
    report = lz.optimize(model, graph=True)

    def run_out(given: Any, device: torch.device) -> str:
        full.append(device)
        if len(full) > 1:
            return generation.why_not_by_place(given, device)
        with mock.patch.object(type(given), "forward", side_effect=torch.OutOfMemoryError("CUDA out of memory.")):
            return generation.why_not_by_place(given, device)

    with mock.patch.object(steps, "why_not_by_place", side_effect=run_out):
        by_hand(model, ids)
    assert len(full) == 2, report
    assert sum(state_of(report).left.values()) == 1


PICTURE = 100


def counting_behind_pictures() -> Any:
    """What a picture took is kept in the model, as after a prompt with one."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 4, "hidden_size": 32}
    text = SIZES | {"rope_scaling": rope}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=PICTURE)
    return transformers.Qwen2VLForConditionalGeneration(config)


@pytest.mark.parametrize("where", ["device"], indirect=True)
@pytest.mark.parametrize("make", [counting_from_one, counting_behind_pictures])
def test_positions_that_are_no_places_of_the_cache_are_the_models_own(make: Callable[[], Any], where: str) -> None:
    torch.manual_seed(0)
    model, ids = make().eval(), tokens(2, 15)
    expected = by_hand(model, ids)
    report = lz.optimize(model, graph=True)
    torch.testing.assert_close(by_hand(model, ids), expected)
    (why,) = state_of(report).left
    assert why.startswith("it got no position_ids")


@pytest.mark.parametrize("where", ["device"], indirect=True)
def test_positions_along_the_axes_of_a_picture_are_those_of_the_call(where: str) -> None:
    """Two pictures of other sizes after each other: what a graph read of the first is not kept."""
    torch.manual_seed(0)
    model, calls = counting_behind_pictures().eval(), []
    for side in (4, 8):
        ids = torch.cat((tokens(1, 5), torch.full((1, side * side // 4), PICTURE), tokens(1, 3, seed=2)), 1)
        pixels = {"pixel_values": torch.randn(side * side, 1176), "image_grid_thw": torch.tensor([[1, side, side]])}
        calls.append({"inputs": ids, **pixels, "mm_token_type_ids": (ids == PICTURE).long()})

    def written() -> list[torch.Tensor]:
        told = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        return [torch.stack(model.generate(**each, **told).logits) for each in calls]

    expected = written()
    report = lz.optimize(model, graph=True)
    torch.testing.assert_close(written(), expected, rtol=1e-4, atol=1e-4)
    # generate of Transformers 5.4 hands the sizes of pictures on to steps
    assert state_of(report).left.keys() <= {"it got image_grid_thw"}


def test_attention_that_is_told_a_window_where_its_cache_has_none_is_no_step(where: str) -> None:
    """Stock's mask says what a token sees, and what the module was told hides nothing."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    model, ids = transformers.Qwen2ForCausalLM(config).eval(), tokens(2, 9)  # a window in the second layer alone
    expected = greedy(model, ids, 12)
    report = lz.optimize(model, graph=True)
    model.model.layers[0].self_attn.sliding_window = 6
    with pytest.warns(lz.LayerZeroWarning, match="window of None, got 6"):
        assert torch.equal(greedy(model, ids, 12), expected)
    assert "window" in state_of(report).refused


def test_a_step_that_fails_otherwise_than_the_models_own_code_runs_as_it_is(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = made(), tokens()
    expected = greedy(model, ids, 8)
    report = lz.optimize(model, graph=True)

    def odd(*_: Any) -> Any:
        raise AttributeError("a model's code that looks into its cache")

    monkeypatch.setattr(steps, "step_cache", odd)
    with pytest.warns(lz.LayerZeroWarning, match="looks into its cache"):
        assert torch.equal(greedy(model, ids, 8), expected)
    assert sum(state_of(report).left.values()) == 7


def test_a_configuration_that_asks_for_routers_logits_gets_them() -> None:
    model, ids = made("Mixtral"), tokens()
    model.config.output_router_logits = True
    report, cache = lz.optimize(model, graph=True), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        given = model(ids[:, :1], past_key_values=cache)
    assert len(given.router_logits) == SIZES["num_hidden_layers"]
    assert [each for each in state_of(report).left if "logits of routers" in each]


def test_kinds_of_tokens_that_a_model_makes_masks_of_leave_other_steps_captured(where: str) -> None:
    sizes = SIZES | {"head_dim": 8, "sliding_window": 6}
    told = {"image_token_index": 100, "boi_token_index": 98, "eoi_token_index": 99, "mm_tokens_per_image": 4}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=sizes, vision_config=TOWER, **told)
    model, ids = transformers.Gemma3ForConditionalGeneration(config).eval(), tokens() % 97
    results = []
    for report in (None, lz.optimize(copy.deepcopy(model), graph=True)):
        each = model if report is None else report.replaced[-1].exchange.module
        cache, kinds = transformers.DynamicCache(config=config), {"token_type_ids": torch.zeros(2, 1, dtype=torch.long)}
        with torch.no_grad():
            results.append([each(ids, past_key_values=cache).logits])
            results[-1] += [each(ids[:, :1], past_key_values=cache, **more).logits for more in (kinds, {}, kinds)]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    # Transformers 5.4 makes no mask of kinds that are all 0
    assert dict(state_of(report).left) in ({"it got token_type_ids": 2}, {})
