"""Padded batches without their padding: the same at real positions, whatever the mask, and stock where it must be."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import Context
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from padded_models import MODELS, PADDED, SIZES, T5, counted, made, state_of

import layerzero as lz
from drawing import examples, mostly

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

from layerzero.integrations.optimize.models.padding import ONE_ROW, Plan, noted  # noqa: E402
from layerzero.integrations.optimize.models.stacks import _example  # noqa: E402

pytestmark = pytest.mark.usefixtures("whatever_it_takes")


UNLIKE = {"bert", "distilbert", "mpnet", "t5", "modernbert"}
"""The others are BERT by other names."""


def check_same(got: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> None:
    keep = mask.bool().unsqueeze(-1)
    allowed = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}[dtype]
    scale = expected[keep.squeeze(-1)].abs().max()
    assert ((got - expected) * keep).abs().max() <= allowed * scale


CASES = list(itertools.product(MODELS, (torch.float32, torch.bfloat16)))


QUICK = {*((each, torch.float32) for each in UNLIKE), ("bert", torch.bfloat16)}


@pytest.mark.parametrize("case", mostly(CASES, QUICK), ids=lambda case: f"{case[0]}-{case[1]}")
def test_real_positions_are_stocks_and_undo_restores_them_bit_for_bit(case: tuple[str, torch.dtype]) -> None:
    name, dtype = case
    model = made(name, dtype)
    with torch.no_grad():
        expected = model(**PADDED)
    report = lz.optimize(model)
    (one,) = (each for each in report.replaced if each.kind == "padding")
    assert state_of(model).forms == MODELS[name][1]
    assert one.error is not None
    for forms in [{form} for form in MODELS[name][1]]:
        state_of(model).forms = frozenset(forms)
        with counted(1):
            got = model(**PADDED)
        mask = PADDED["attention_mask"]
        assert type(got) is type(expected)
        assert got.keys() == expected.keys()
        check_same(got.last_hidden_state, expected.last_hidden_state, mask, dtype)
        if "pooler_output" in got:
            torch.testing.assert_close(got.pooler_output, expected.pooler_output, rtol=0.1, atol=4e-2)
        behind = torch.arange(mask.shape[1]) >= mask.sum(1, keepdim=True)
        assert not got.last_hidden_state[behind].any()
    assert "positions behind a row's last real token give zeros" in str(report)
    report.undo()
    with counted(0):
        assert torch.equal(model(**PADDED).last_hidden_state, expected.last_hidden_state)


def test_a_call_that_undo_overtakes_runs_the_stacks_own_code() -> None:
    model = made("bert", torch.float32)
    lz.optimize(model)
    state_of(model).stamp = None  # as undo leaves it, for a call that holds the state already
    with torch.no_grad(), counted(0):
        model(**PADDED)


def test_undo_within_a_packed_row_lets_no_sequence_see_another() -> None:
    model = made("bert", torch.float32)
    with torch.no_grad():
        expected = model(**PADDED)[0]
    report = lz.optimize(model)
    state_of(model).forms = frozenset({ONE_ROW})
    run = Plan.run

    def undone(plan: Plan, stock: Callable[..., Any]) -> Any:
        report.undo()
        return run(plan, stock)

    with torch.no_grad(), mock.patch.object(Plan, "run", undone):
        got = model(**PADDED)[0]
    check_same(got, expected, PADDED["attention_mask"], torch.float32)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize("name", mostly(MODELS, UNLIKE))
def test_any_mask_gives_what_stock_gives(name: str, data: st.DataObject) -> None:
    """Holes, left padding, rows without a token; 2-d, 4-d, bool and float masks."""
    stock, model = _pair(name)
    rows, longest = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 20))
    bits = st.lists(st.booleans(), min_size=longest, max_size=longest)
    prefix = st.integers(1, longest).map(lambda count: [place < count for place in range(longest)])
    keep = torch.tensor([data.draw(st.one_of(prefix, prefix, bits)) for _ in range(rows)])
    ids = torch.randint(3, 101, keep.shape, generator=torch.Generator().manual_seed(longest))
    given = data.draw(st.sampled_from(["long", "bool", "4-d"] if name not in {"t5", "modernbert"} else ["long"]))
    mask: torch.Tensor = {"long": keep.long(), "bool": keep, "4-d": keep[:, None, None].expand(-1, 1, longest, -1)}[
        given
    ]
    if given == "4-d" and name == "mpnet":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    state_of(model).forms = frozenset(data.draw(st.sampled_from(sorted(MODELS[name][1]))).split())
    with torch.no_grad():
        expected = stock(ids, attention_mask=mask).last_hidden_state
        got = model(ids, attention_mask=mask).last_hidden_state
    real = keep.any(1)
    if real.any():
        check_same(got[real], expected[real], keep[real], torch.float32)


_PAIRS: dict[str, tuple[Any, Any]] = {}


def _pair(name: str) -> tuple[Any, Any]:
    if name not in _PAIRS:
        model = made(name)
        _PAIRS[name] = copy.deepcopy(model), model
        lz.optimize(model)
    return _PAIRS[name]


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "t5", "modernbert"])
def test_every_way_to_call_it_gives_the_same(name: str) -> None:
    stock, model = _pair(name)
    state_of(model).forms = frozenset(MODELS[name][1])
    mask = PADDED["attention_mask"]
    with torch.no_grad():
        whole, plain = model(**PADDED, output_hidden_states=True), model(**PADDED, return_dict=False)
        expected = stock(**PADDED, output_hidden_states=True)
    assert isinstance(plain, tuple)
    assert len(whole.hidden_states) == len(expected.hidden_states)
    for got, wanted in zip((*whole.hidden_states, plain[0]), (*expected.hidden_states, expected[0]), strict=True):
        check_same(got, wanted, mask, torch.float32)
    embeds = model.get_input_embeddings()(PADDED["input_ids"])
    with counted(1):
        check_same(
            model(inputs_embeds=embeds, attention_mask=mask)[0],
            stock(inputs_embeds=embeds, attention_mask=mask)[0],
            mask,
            torch.float32,
        )
    if name in {"bert", "roberta"}:
        more = {"token_type_ids": torch.zeros_like(mask), "position_ids": torch.arange(17).flip(0).unsqueeze(0)}
        with counted(1):
            check_same(model(**PADDED, **more)[0], stock(**PADDED, **more)[0], mask, torch.float32)


def causal(model: Any) -> dict[str, Any]:
    """A mask of the caller's own that hides more than padding."""
    return {"attention_mask": torch.ones(17, 17).tril().bool().expand(5, 1, -1, -1)}


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {"attention_mask": torch.ones(5, 17, dtype=torch.long)},
        lambda _: {"attention_mask": None},
        lambda _: {"attention_mask": PADDED["attention_mask"] * torch.tensor([1, 1, 0, 1, 1]).unsqueeze(1)},
        causal,
        lambda model: model.encoder.layer[1].register_forward_hook(lambda *_: None) and {},
        lambda model: model.encoder.layer[0].register_forward_pre_hook(lambda *_: None) and {},
        lambda model: vars(model.encoder.layer[0].output).update(forward=model.encoder.layer[0].output.forward) or {},
        lambda _: {"output_attentions": True},
        lambda model: model.set_attn_implementation("eager") or setattr(model.config, "output_attentions", True) or {},
        lambda model: model.encoder.train() and {},
    ],
    ids=["full", "none", "empty row", "causal", "hook", "pre-hook", "forward", "weights", "config", "train"],
)  # fmt: skip
def test_what_is_no_padding_or_waits_for_inner_calls_is_the_stacks_own(change: Callable[[Any], dict[str, Any]]) -> None:
    model = made("bert")
    lz.optimize(model)
    with counted(1):
        model(**PADDED)
    arguments = PADDED | change(model)
    with counted(0):
        model(**arguments)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("where", ["gradients", "autocast", "compiled", "traced"])
def test_what_records_or_compiles_runs_the_stacks_own_code(where: str) -> None:
    model = made("bert")
    lz.optimize(model)
    with noted() as found:
        if where == "gradients":
            model(**PADDED).last_hidden_state.sum().backward()
            assert model.encoder.layer[0].output.dense.weight.grad is not None
        elif where == "autocast":
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                model(**PADDED)
        elif where == "compiled":
            with torch.no_grad():
                torch.compile(model, backend="eager", fullgraph=False)(**PADDED)
        else:
            with torch.no_grad():
                hidden = model.requires_grad_(requires_grad=False).embeddings(PADDED["input_ids"])
                mask = PADDED["attention_mask"].bool()[:, None, None].expand(-1, 1, 17, -1)
                torch.jit.trace(lambda *given: model.encoder(*given)[0], (hidden, mask), check_trace=False)
    assert not found


def test_frozen_weights_record_no_gradients() -> None:
    model = made("bert").requires_grad_(False)
    lz.optimize(model)
    with noted() as found:
        model(**PADDED)
    assert len(found) == 1


@pytest.mark.parametrize("change", ["half", "attention", "copy", "threads", "inference"])
def test_a_model_that_changed_is_followed(change: str) -> None:
    model = made("bert")
    lz.optimize(model)
    stock = made("bert")
    dtype = torch.float32
    if change == "half":
        dtype = torch.bfloat16
        model, stock = model.to(dtype), stock.to(dtype)
    elif change == "attention":  # no packed row can be told apart then
        model.set_attn_implementation("sdpa")
        assert not state_of(model).is_packing
    elif change == "copy":
        model = copy.deepcopy(model)
    with torch.inference_mode() if change == "inference" else nullcontext(), counted(1):
        got = []
        if change == "threads":
            worker = threading.Thread(target=lambda: got.append(_run(model)))
            Context().run(worker.start)  # without a GIL it inherits what counts
            worker.join()
        own = model(**PADDED)[0]
        for each in (*got, own):
            check_same(each, stock(**PADDED)[0], PADDED["attention_mask"], dtype)


def _run(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**PADDED)[0]


@pytest.fixture
def _elsewhere() -> Iterator[None]:
    """New tensors lie on another device where a call does not say, as with ``torch.set_default_device("cuda")``."""
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_elsewhere")
def test_the_default_device_may_be_another() -> None:
    model = made("bert")
    with torch.no_grad():
        expected = model(**PADDED)[0]
    report = lz.optimize(model)
    for form in MODELS["bert"][1]:
        state_of(model).forms = frozenset({form})
        torch.set_default_device("meta")
        with counted(1):
            got = model(**PADDED)[0]
        torch.set_default_device(None)
        check_same(got, expected, PADDED["attention_mask"], torch.float32)
    report.undo()
    torch.set_default_device("meta")
    assert "padding" in {each.kind for each in lz.optimize(model).replaced}


def test_heads_that_read_padding_are_left_to_it() -> None:
    class Pooled(transformers.BertForSequenceClassification):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
            return (self.classifier(self.bert(input_ids, attention_mask=attention_mask)[0].mean(1)),)

    for cls, why in ((Pooled, "depends on padded positions"), (transformers.BertForQuestionAnswering, "start_logits")):
        torch.manual_seed(0)
        report = lz.optimize(cls(transformers.BertConfig(**SIZES)).eval())
        assert not any(each.kind == "padding" for each in report.replaced)
        assert any(each.why.startswith("padding") and why in each.why for each in report.left), report
    for name in ("BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM"):
        report = lz.optimize(getattr(transformers, name)(transformers.BertConfig(**SIZES)).eval())
        assert any(each.kind == "padding" for each in report.replaced), report


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_a_stack_that_gives_a_cache_is_left(name: str) -> None:
    """Each group of rows would make one of its own."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    sizes |= {"num_heads": 4, "head_dim": 16, "n_groups": 1} if name == "Mamba2" else {}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    report = lz.optimize(model)
    assert not any(each.kind == "padding" for each in report.replaced)


def test_decoders_are_left_without_a_word_and_the_option_leaves_all() -> None:
    decoders = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)),
    )
    for model in decoders:
        report = lz.optimize(model.eval())
        assert not any(each.kind == "padding" for each in report.replaced)
        assert not any(each.why.startswith("padding") for each in report.left)
    model = made("bert")
    report = lz.optimize(model, padding=False)
    assert not any(each.kind == "padding" for each in report.replaced)
    assert "padded" not in str(report)
    with pytest.raises(lz.InvalidCallError, match="padding: wanted True or False"):
        lz.optimize(model, padding=1)


def test_generate_hands_the_mask_on_to_an_encoder() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(**T5, decoder_start_token_id=0, eos_token_id=None)
    model = transformers.T5ForConditionalGeneration(config).eval()
    ask = {**PADDED, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**ask)
    lz.optimize(model)
    with counted(1):
        assert torch.equal(model.generate(**ask), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_inputs_show_what_reads_padding() -> None:
    """A model of the caller's own is run on what it gives; without inputs nothing tells how it pools."""

    class Mean(torch.nn.Module):
        def __init__(self, *, masked: bool) -> None:
            super().__init__()
            self.bert, self.masked = made("bert"), masked

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids, attention_mask=attention_mask)[0]
            if not self.masked:
                return hidden.mean(1)
            return (hidden * attention_mask.unsqueeze(-1)).sum(1) / attention_mask.sum(1, keepdim=True)

    report = lz.optimize(Mean(masked=False).eval(), PADDED, rounds=1, isolate=False)
    assert any("depends on padded positions" in each.why for each in report.left), report
    report = lz.optimize(Mean(masked=True).eval(), PADDED, rounds=1, isolate=False)
    assert not any("depends on padded positions" in each.why for each in report.left)
    assert report.error is not None
    assert report.error < 1e-4
    report = lz.optimize(made("bert"), PADDED, rounds=1, isolate=False)
    assert report.error is not None
    assert report.error < 1e-4  # of positions that are promised


def test_padding_of_a_composite_is_that_of_its_text() -> None:
    """Idefics 3 and SmolVLM warn where their own configuration is asked for it."""
    table = torch.nn.Embedding(101, 4)
    text = SimpleNamespace(pad_token_id=7)
    model = SimpleNamespace(
        main_input_name="input_ids", config=SimpleNamespace(text_config=text), forward=table.forward
    )
    model.get_input_embeddings = lambda: table
    example = _example(model)
    assert (example["input_ids"][example["attention_mask"] == 0] == 7).all()
