"""Texts of unlike lengths through Transformers' pipelines, and through what SentenceTransformers do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero as lz

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")

from layerzero.integrations.optimize.models import compiled_calls, stacks  # noqa: E402
from layerzero.integrations.optimize.models.padding import Costs, noted  # noqa: E402

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(60))]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
TEXTS = [" ".join(f"w{(7 * row + place) % 60}" for place in range(length)) for row, length in enumerate((3, 17, 1, 9))]


@pytest.fixture(autouse=True)
def whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is left out wherever it can be: no time of this machine decides. Nothing is compiled."""
    monkeypatch.setattr(compiled_calls, "COMPILERS", ())
    monkeypatch.setattr(stacks, "_costs", lambda *_: Costs(4.0, 1.0, 0.0, 0.0, torch.get_num_threads()))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **names)


def model_of(cls: Any) -> Any:
    torch.manual_seed(0)
    return cls(transformers.BertConfig(**SIZES)).eval()


def pair(task: str, cls: Any, tokenizer: Any) -> tuple[Any, Any, Any]:
    """A stock pipeline, the same optimised, and the report."""
    stock, ours = (transformers.pipeline(task, model=model_of(cls), tokenizer=tokenizer, device="cpu") for _ in "ab")
    return stock, ours, lz.optimize(ours)


def kinds(report: Any) -> set[str]:
    return {each.kind for each in report.replaced}


@pytest.mark.parametrize("batch", [1, 4])
def test_features_of_real_tokens_are_stocks_in_a_pipeline(tokenizer: Any, batch: int) -> None:
    stock, ours, report = pair("feature-extraction", transformers.BertModel, tokenizer)
    assert "padding" in kinds(report)
    with noted() as padded:
        found = ours(TEXTS, batch_size=batch)
    assert len(padded) == (batch > 1)
    for text, got, wanted in zip(TEXTS, found, stock(TEXTS, batch_size=batch), strict=True):
        real = len(text.split()) + 2
        assert len(got[0]) == len(wanted[0]) == (real if batch == 1 else 19)
        torch.testing.assert_close(torch.tensor(got[0][:real]), torch.tensor(wanted[0][:real]), rtol=1e-4, atol=1e-4)
        assert not any(map(any, got[0][real:]))
    report.undo()
    assert ours(TEXTS, batch_size=batch) == stock(TEXTS, batch_size=batch)


def test_classes_of_texts_are_stocks_in_a_pipeline(tokenizer: Any) -> None:
    stock, ours, report = pair("text-classification", transformers.BertForSequenceClassification, tokenizer)
    assert "padding" in kinds(report)
    with noted() as padded:
        found = ours(TEXTS, batch_size=4)
    assert len(padded) == 1
    for got, wanted in zip(found, stock(TEXTS, batch_size=4), strict=True):
        assert got["label"] == wanted["label"]
        assert got["score"] == pytest.approx(wanted["score"], abs=1e-5)


class Transformer(nn.Module):
    """The first part of a SentenceTransformer, which names what the model gets and adds what it gave to a dict."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.auto_model, self.tokenizer = model, tokenizer

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        known = {name: each for name, each in features.items() if name in {"input_ids", "attention_mask"}}
        features["token_embeddings"] = self.auto_model(**known, return_dict=True)[0]
        return features


class Pooling(nn.Module):
    """The mean over real tokens."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        mask = features["attention_mask"].unsqueeze(-1).float()
        total = (features["token_embeddings"] * mask).sum(1)
        features["sentence_embedding"] = total / mask.sum(1).clamp(min=1e-9)
        return features


class Sentences(nn.Sequential):
    """What ``SentenceTransformer.encode`` does: texts by length, in batches, which its modules hand on as a dict."""

    def encode(self, texts: list[str], batch_size: int = 32) -> Tensor:
        tokenizer: Any = self[0].tokenizer
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        found: list[Tensor] = []
        with torch.inference_mode():
            for first in range(0, len(texts), batch_size):
                some = [texts[place] for place in order[first : first + batch_size]]
                features = tokenizer(some, padding=True, truncation=True, return_tensors="pt")
                out = self(dict(features))["sentence_embedding"]
                found.extend(nn.functional.normalize(out, dim=1))
        return torch.stack([found[order.index(place)] for place in range(len(texts))])


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [False, True])
def test_embeddings_of_sentences_are_stocks(tokenizer: Any, inputs: bool) -> None:
    stock = Sentences(Transformer(model_of(transformers.BertModel), tokenizer), Pooling()).eval()
    ours = copy.deepcopy(stock)
    report = lz.optimize(ours, (lambda: ours.encode(TEXTS)) if inputs else None, rounds=1, isolate=False)
    for batch_size, without in ((32, 1), (2, 2), (1, 0)):
        with noted() as padded:
            found = ours.encode(TEXTS, batch_size)
        if not inputs:  # else what a run took decided
            assert len(padded) == without
        torch.testing.assert_close(found, stock.encode(TEXTS, batch_size), rtol=1e-4, atol=1e-5)
    report.undo()
    assert torch.equal(ours.encode(TEXTS), stock.encode(TEXTS))
