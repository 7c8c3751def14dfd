"""Small decoders of Transformers, and a stand-in for CUDA graphs, for tests of captured steps on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.integrations.optimize.models import steps

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.2, "num_hidden_layers": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 6},
    "Phi3": {},
    "Olmo2": {},
}


def made(kind: str = "Llama") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS.get(kind, {}))
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def tokens(rows: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: torch.Tensor, new: int = 24, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids, max_new_tokens=new, do_sample=False, **more)
    return found


def output(model: Any, ids: torch.Tensor | None = None, **arguments: Any) -> Any:
    with torch.no_grad():
        return model(tokens() if ids is None else ids, **arguments)[0]


class Recorded:
    """Stands for a CUDA graph where there is none: replayed, it writes into the outputs that it has."""

    captured = 0

    def __init__(self, run: Callable[[], Any], made: tuple[Any, Any]) -> None:
        self.run, (self.output, self.ids) = run, made
        Recorded.captured += 1

    def replay(self) -> None:
        output, ids = self.run()
        self.output.logits.copy_(output.logits)
        if ids is not None:
            self.ids.copy_(ids)


def state_of(report: Any) -> Any:
    (found,) = [each for each in report.states if isinstance(each, steps.Steps)]
    return found


def stepped(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
    return logits
