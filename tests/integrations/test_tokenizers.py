"""Wrapped tokenizers of Transformers: the same class, the same results, the same saved files."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

import layerzero as lz
import vocabularies
from layerzero.core.ledger import Verdict
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import PLAIN_CALLS
from layerzero.integrations.tokenizers import optimize_tokenizer

TEXTS = ["import json", "a much longer text, isn't it? <|end|> x", "Größe 👍", ""]


@pytest.fixture(params=["byte_level", "word_piece"])
def pair(request, tmp_path, monkeypatch):
    """A tokenizer, and it wrapped; what LayerZero encodes is what would be chosen if another library were quicker."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    native = tokenizers.Tokenizer.from_str(getattr(vocabularies, request.param)())
    pad = "<|pad|>" if request.param == "byte_level" else "[PAD]"
    stock = transformers.PreTrainedTokenizerFast(tokenizer_object=native, pad_token=pad, model_max_length=64)
    wrapped = optimize_tokenizer(stock, tune=False)
    monkeypatch.setattr(type(wrapped), "_lz_gains", lambda self, known: True)
    yield stock, wrapped
    lz.forget_tokenizer()


def same(one, other):
    assert list(one.keys()) == list(other.keys())
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"padding": True}, {"padding": True, "truncation": True, "max_length": 6}, {"add_special_tokens": False},
        {"padding": "max_length", "max_length": 16, "truncation": True}, {"return_offsets_mapping": True},
        {"return_token_type_ids": True}, {"return_attention_mask": False}, {"padding": True, "pad_to_multiple_of": 8},
        {"padding": True, "return_tensors": "pt"}, {"padding": True, "padding_side": "left"},
        {"return_special_tokens_mask": True}, {"split_special_tokens": True}, {"return_length": True},
        {"truncation": True},
    ],
)  # fmt: skip
def test_calls_give_what_the_stock_one_gives(pair, asked):
    stock, wrapped = pair
    same(stock(TEXTS, **asked), wrapped(TEXTS, **asked))
    for text in TEXTS if not asked.get("return_tensors") else ():
        same(stock(text, **asked), wrapped(text, **asked))


def test_layerzero_answers_them(pair, monkeypatch):
    _, wrapped = pair
    monkeypatch.setattr(type(wrapped).__mro__[2], "_encode_plus", lambda *_, **__: pytest.fail("its own code"))
    assert wrapped(TEXTS)["input_ids"]
    assert wrapped.encode("a") == wrapped("a")["input_ids"]


def test_what_it_does_not_know_runs_the_tokenizers_own_code(pair):
    stock, wrapped = pair
    same(stock("a", "b"), wrapped("a", "b"))
    same(stock([["a", "b"]], is_split_into_words=True), wrapped([["a", "b"]], is_split_into_words=True))
    long = "word " * 50
    asked = {"truncation": True, "max_length": 10, "stride": 2, "return_overflowing_tokens": True}
    same(stock(long, **asked), wrapped(long, **asked))
    for bad in (3, ["a", 3], "a\ud800"):
        with pytest.raises(Exception) as theirs:
            stock(bad)
        with pytest.raises(type(theirs.value)):
            wrapped(bad)


def test_pieces_are_there_when_they_are_asked_for(pair):
    stock, wrapped = pair
    one, other = stock(TEXTS), wrapped(TEXTS)
    assert one.word_ids(1) == other.word_ids(1)
    assert one.tokens(0) == other.tokens(0)
    assert one.char_to_token(1, 3) == other.char_to_token(1, 3)
    assert other.is_fast
    assert pickle.loads(pickle.dumps(other))["input_ids"] == one["input_ids"]


def test_decoding_and_chats(pair):
    stock, wrapped = pair
    ids = stock(TEXTS)["input_ids"]
    for skip in (False, True):
        assert stock.batch_decode(ids, skip_special_tokens=skip) == wrapped.batch_decode(ids, skip_special_tokens=skip)
        assert stock.decode(ids[1], skip_special_tokens=skip) == wrapped.decode(ids[1], skip_special_tokens=skip)
    assert wrapped.decode(torch.tensor(ids[0])) == stock.decode(ids[0])
    template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    chat = [{"role": "user", "content": "import json"}, {"role": "assistant", "content": "pass"}]
    made = [each.apply_chat_template(chat, chat_template=template) for each in pair]
    same(*made)


def test_it_stays_what_it_is(pair, tmp_path):
    stock, wrapped = pair
    assert isinstance(wrapped, type(stock))
    assert type(wrapped).__name__ == type(stock).__name__
    assert lz.optimize(wrapped) is wrapped
    for copied in (copy.copy(wrapped), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        same(copied(TEXTS), stock(TEXTS))
    wrapped.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path)
    same(loaded(TEXTS), stock(TEXTS))


def test_added_tokens_are_seen(pair):
    stock, wrapped = (copy.deepcopy(each) for each in pair)
    before = wrapped("a wholly_new b")["input_ids"]
    for each in (stock, wrapped):
        each.add_tokens(["wholly_new"])
    same(stock("a wholly_new b"), wrapped("a wholly_new b"))
    assert wrapped("a wholly_new b")["input_ids"] != before


CHANGES = {
    "add_tokens": lambda each: each.add_tokens(["wholly_new"]),
    "the library's add_tokens": lambda each: each.backend_tokenizer.add_tokens(["wholly_new"]),
    "the library's normalizer": lambda each: setattr(
        each.backend_tokenizer, "normalizer", pytest.importorskip("tokenizers").normalizers.Replace("a", "b")
    ),
    "split_special_tokens": lambda each: setattr(each, "split_special_tokens", True),
    "another library object": lambda each: setattr(each, "_tokenizer", copy.deepcopy(each.backend_tokenizer)),
}


@pytest.mark.parametrize("on", ["stock", "wrapped"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_either_are_seen_by_all_that_encode_it(pair, change, on):
    stock, wrapped = pair
    text = "a wholly_new b <|end|> [SEP]"
    before = wrapped(text)["input_ids"]
    assert lz.tokenize(text, stock)["input_ids"] == before
    changed = stock if on == "stock" else wrapped
    CHANGES[change](changed)
    if change == "another library object":
        changed.backend_tokenizer.add_tokens(["wholly_new"])
    for each in pair:
        wanted = type(stock)._encode_plus(each, text)["input_ids"]
        assert each(text)["input_ids"] == wanted
        assert lz.tokenize(text, each)["input_ids"] == wanted
    assert lz.tokenize(text, changed)["input_ids"] != before


def test_rows_are_filled_up_as_the_tokenizer_says_now(pair):
    stock, _ = pair
    texts = ["a wholly_new b", "a"]
    lz.tokenize(texts, stock, padding=True)
    stock.padding_side = "left"
    stock.add_special_tokens({"pad_token": "<new>"})
    found = lz.tokenize(texts, stock, padding=True)
    same(stock(texts, padding=True, return_token_type_ids=False), found)


def test_a_step_in_python_runs_the_tokenizers_own_code(pair):
    stock, wrapped = pair
    tokenizers = pytest.importorskip("tokenizers")

    class Shouting:
        def normalize(self, text):
            text.uppercase()

    wrapped("a")
    wrapped.backend_tokenizer.normalizer = tokenizers.normalizers.Normalizer.custom(Shouting())
    assert wrapped("import json")["input_ids"] == type(stock)._encode_plus(wrapped, "import json")["input_ids"]


def test_disabled_means_its_own_code(pair, monkeypatch):
    stock, wrapped = pair
    with lz.disabled():
        monkeypatch.setattr(type(wrapped), "lz_tokenizer", property(lambda self: pytest.fail("LayerZero's code")))
        same(stock(TEXTS), wrapped(TEXTS))
        assert wrapped.decode([1, 2]) == stock.decode([1, 2])


def test_what_a_scope_says_is_forgotten_behind_it(monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    native = tokenizers.Tokenizer.from_str(vocabularies.byte_level())
    wrapped = optimize_tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=native), tune=False)
    outside = current_policy()
    quick = SimpleNamespace(is_stock=lambda _: False)
    dispatcher, call = PLAIN_CALLS["tokenize"]
    asked = SimpleNamespace(
        function=dispatcher.function,
        explain=lambda _, policy: (None, [SimpleNamespace(legal=policy is outside, kernel=quick)]),
    )
    monkeypatch.setitem(PLAIN_CALLS, "tokenize", (asked, call))
    known = wrapped.lz_tokenizer
    with lz.avoid("gigatoken"):
        assert not wrapped._lz_gains(known)
    assert wrapped._lz_gains(known)
    lz.forget_tokenizer()


def test_it_is_used_where_another_library_may_be_quicker(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("gigatoken")
    native = tokenizers.Tokenizer.from_str(vocabularies.byte_level())
    wrapped = optimize_tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=native), tune=False)
    assert not wrapped._lz_gains(wrapped.lz_tokenizer)
    facts = lz.facts("tokenize.encode", "a", wrapped.lz_tokenizer)
    kernel = next(each for each in lz.list_kernels("tokenize.encode") if each.id == "gigatoken.encode")
    ENGINE.ledger.record_verdict(kernel, facts, Verdict.PASSED)
    ENGINE.bump()
    assert wrapped._lz_gains(wrapped.lz_tokenizer)
    lz.forget_tokenizer()
    with pytest.raises(lz.InvalidCallError, match="wanted a tokenizer of Transformers"):
        optimize_tokenizer("bert")
