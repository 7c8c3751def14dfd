"""Attention of Transformers' models: by their own switch, set on the model's configurations and set back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

NAME = "layerzero"
FROM = "sdpa"
"""The setting that is exchanged: it is Transformers' default, and both compute the same."""


class AttentionSwap:
    """One model's attention, which may be LayerZero's or what it was.

    Attributes:
        model: the outermost model of Transformers that has these configurations.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._before = [
            (config, config._attn_implementation)
            for config in _configs_of(model)
            if config._attn_implementation == FROM
        ]

    @property
    def is_on(self) -> bool:
        """Whether LayerZero computes it now."""
        return any(config._attn_implementation == NAME for config, _ in self._before)

    def on(self) -> None:
        """Let LayerZero compute it, wherever the model's own choice was torch's function."""
        for config, _ in self._before:
            config._attn_implementation_internal = NAME

    def off(self) -> None:
        """Give every configuration what it had, except where somebody chose another one meanwhile."""
        for config, before in self._before:
            if config._attn_implementation == NAME:
                config._attn_implementation_internal = before


def models_of(root: Module) -> Iterator[tuple[str, Any]]:
    """The outermost models of Transformers within a module, with their paths."""
    library = sys.modules.get("transformers")
    if library is None:  # nobody made a model of it
        return
    kind: Any = library.PreTrainedModel
    found: list[str] = []
    for path, module in root.named_modules():
        if isinstance(module, kind) and not any(path == each or path.startswith(f"{each}.") or not each for each in found):
            found.append(path)
            yield path, module


def why_not(model: Any) -> str:
    """Say why a model's attention is left to it; empty where it may be exchanged."""
    setting = model.config._attn_implementation
    if setting == NAME:
        return "it is LayerZero's already"
    if setting != FROM and not any(each._attn_implementation == FROM for each in _configs_of(model)):
        return f"attn_implementation={setting!r} was chosen for it, or the model has no other"
    for each in model.modules():
        if not hasattr(each, "_can_set_attn_implementation"):
            continue
        if not each._can_set_attn_implementation():
            return f"{type(each).__name__} computes attention by itself"
        if not each._supports_sdpa:
            return f"{type(each).__name__} has no attention by torch's function to compare with"
    if getattr(model.config, "output_attentions", False):
        return "it returns attention weights, which fast kernels never form"
    return ""


def attention_swap(model: Any) -> AttentionSwap:
    """The exchange for a model; makes the name known to Transformers."""
    from layerzero.integrations.transformers import register_with_transformers

    register_with_transformers(NAME)
    return AttentionSwap(model)


def _configs_of(model: Any) -> list[Any]:
    """Every configuration that a module of the model reads, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())
