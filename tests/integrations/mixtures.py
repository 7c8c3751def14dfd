"""Small random mixtures of experts of Transformers, of sizes that every kernel takes."""

from __future__ import annotations

import copy
from typing import Any

import architectures
import torch
from architectures import transformers  # skips the tests where it is absent

SIZES = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
COUNTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
NAMES = (
    "Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss", "DeepseekV2", "DeepseekV3", "Qwen3Next",
)  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model, the same each time."""
    architecture = next(each for each in architectures.decoders() if each.name == name)
    sizes = copy.deepcopy(architecture.sizes)
    sizes |= {each: value for each, value in (SIZES | COUNTS).items() if each in sizes}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, **settings).eval()
    for each, parameter in model.named_parameters():
        if each.endswith(
            ("gate.weight", "router.weight", "_bias", "sinks")
        ):  # some begin as zeros, and then tell nothing
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def experts_of(model: Any) -> list[Any]:
    """Its experts, layer by layer."""
    return [each for each in model.modules() if type(each).__name__.endswith("Experts")]


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    """The same each time."""
    return torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Of all positions."""
    with torch.no_grad():
        found: torch.Tensor = model(tokens() if ids is None else ids).logits
    return found


def in_two_parts(model: Any) -> torch.Tensor:
    """The same logits, through a cache: a prompt, then token by token."""
    ids, cache, found = tokens(), None, []
    with torch.no_grad():
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
            output = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits)
    return torch.cat(found, 1)


def written(model: Any) -> list[list[int]]:
    """The likeliest tokens."""
    found: list[list[int]] = model.generate(tokens(), max_new_tokens=12, do_sample=False).tolist()
    return found


def true(module: Any) -> Any:
    """A copy in float64, which no grouped product takes."""
    twin = copy.deepcopy(module).double()
    for each in twin.modules():
        if hasattr(each, "config"):
            each.config._experts_implementation = "eager"
    return twin


def assert_as_near(got: torch.Tensor, stock: torch.Tensor, truth: torch.Tensor) -> None:
    """At most 1.5 times as far from the truth as stock, both by the largest and by the mean difference."""
    for size in (torch.amax, torch.mean):
        far, allowed = size((got - truth).abs()), 1.5 * size((stock - truth).abs()) + 1e-6 * truth.abs().max()
        assert far <= allowed, (far.item(), allowed.item())
