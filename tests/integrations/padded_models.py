"""Models of padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

from layerzero.integrations.optimize.models.padding import GROUPS, ONE_ROW, Unpadded, noted  # noqa: E402

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
T5 = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 101, "pad_token_id": 0}
BOTH = {ONE_ROW, GROUPS}

MODELS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**SIZES)), BOTH),
    "roberta": (lambda: transformers.RobertaModel(transformers.RobertaConfig(**SIZES)), BOTH),
    "xlm-roberta": (lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZES)), BOTH),
    "camembert": (lambda: transformers.CamembertModel(transformers.CamembertConfig(**SIZES)), BOTH),
    "electra": (lambda: transformers.ElectraModel(transformers.ElectraConfig(**SIZES, embedding_size=16)), BOTH),
    "distilbert": (lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)), BOTH),
    "mpnet": (lambda: transformers.MPNetModel(transformers.MPNetConfig(**SIZES)), {GROUPS}),
    "t5": (lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)), {GROUPS}),
    "modernbert": (
        lambda: transformers.ModernBertModel(
            transformers.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2, local_attention=8)
        ),
        {GROUPS},
    ),
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype).eval()


def batch(*lengths: int, longest: int | None = None) -> dict[str, torch.Tensor]:
    """Random words, padded behind."""
    size = longest or max(lengths)
    mask = torch.arange(size) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(3, 101, mask.shape, generator=torch.Generator().manual_seed(sum(lengths)))
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


PADDED = batch(3, 17, 1, 9, 9)


def state_of(model: Any) -> Unpadded:
    (found,) = (each for part in model.modules() if isinstance(each := vars(part).get("_layerzero"), Unpadded))
    return found


@contextmanager
def counted(times: int) -> Iterator[None]:
    """So many calls of a stack are computed without padding."""
    with noted() as found, torch.no_grad():
        yield
    assert len(found) == times
