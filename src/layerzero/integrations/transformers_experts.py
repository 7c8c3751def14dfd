"""Transformers 5: ``experts_implementation="layerzero"`` sends the experts of a mixture to ``lz.moe_experts``.

The rules are those of Transformers' own ``grouped_mm`` (5.23, ``integrations/moe.py``): rows (T, D), ids and shares (T,
k), weights (E, 2 F, D) and (E, D, F) or, where a class says so, transposed. Which gate a class has follows from the
values of its ``_apply_gate``. What ``lz.moe_experts`` does not compute runs in ``grouped_mm``, Transformers' default,
and a warning says why: experts that are divided among ranks, without a gate, with a gate of another kind or a norm
behind them. Compiled code, autocast and transforms of ``torch.func`` run ``grouped_mm`` as well: the compiler sees all
of that, and no kernel of ours takes more than plain tensors there.

Weights are read as they lie: only ``lz.optimize`` keeps them in a second order, and bounds how much that takes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

import layerzero as lz
from layerzero.core.errors import LayerZeroWarning, in_short
from layerzero.core.system import warn
from layerzero.engine.transforms import in_transform
from layerzero.integrations.transformers_patches import check_at_load
from layerzero.ops.moe.experts import ALPHA, GATES, LIMIT, gated

SIZES = (1.0, 10.0, 1000.0)
"""Sizes of the values that tell a gate: what is cut off from 7 or 10 on looks like another gate below."""

_SAME = 1e-5
"""The two forms of gelu are 5e-4 apart, so this tells them apart."""


@dataclass(frozen=True)
class Gate:
    """What stands between the two products, in the words of ``lz.moe_experts``."""

    activation: str
    alpha: float = ALPHA
    limit: float = LIMIT


_gates: weakref.WeakKeyDictionary[Module, tuple[tuple[Any, ...], Gate | str]] = weakref.WeakKeyDictionary()
"""Of each module that was called, what its gate was made of, and the gate, or why it has none that is known."""

_PLAIN = frozenset({int, float, bool, str, FunctionType, BuiltinFunctionType, MethodType, functools.partial})
"""Types of attributes that a gate may read."""

_told: set[tuple[type, str]] = set()


def is_reserved(name: str, registered: Collection[str]) -> bool:
    """Whether Transformers gives a name of experts a meaning."""
    interface = _interface()
    return name == "eager" or (interface is not None and name not in registered and name in interface)


def register_experts(name: str, registered: Collection[str]) -> None:
    """Make ``experts_implementation=name`` known; a version of Transformers without the interface is left as it is."""
    interface = _interface()
    if interface is not None:
        interface.register(name, experts_forward)
        check_at_load("_check_and_adjust_experts_implementation", registered, _tell_without)


def _interface() -> Any:
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # older than 5
        return None
    return ALL_EXPERTS_FUNCTIONS


def experts_forward(self: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Send rows through their experts for a module of Transformers; the signature is that of its ``ExpertsInterface``.

    Shapes: hidden_states (T, D), top_k_index and top_k_weights (T, k) → (T, D)
    Raises: InvalidCallError for shapes that do not fit and for experts that there are not.
    """
    if not torch.compiler.is_compiling() and not _is_special(hidden_states):
        own: Any = self
        why = _why_not(own, hidden_states)
        if not why:
            gate = _gate_of(own)
            if isinstance(gate, Gate):
                gate_up, down = own.gate_up_proj, own.down_proj
                if own.is_transposed:
                    gate_up, down = gate_up.mT, down.mT
                return lz.moe_experts(
                    hidden_states,
                    gate_up,
                    down,
                    top_k_index,
                    top_k_weights,
                    gate_up_bias=own.gate_up_proj_bias if own.has_bias else None,
                    down_bias=own.down_proj_bias if own.has_bias else None,
                    activation=gate.activation,
                    alpha=gate.alpha,
                    limit=gate.limit,
                )
            why = gate
        _tell(type(own), why)
    from transformers.integrations.moe import grouped_mm_experts_forward

    stock: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return stock


def _is_special(rows: Tensor) -> bool:
    """Whether a call is of a kind that no kernel of ours is made for, and Transformers' default is."""
    return type(rows) not in {Tensor, Parameter} or torch._C._is_any_autocast_enabled() or in_transform()


def _why_not(module: Any, rows: Tensor) -> str:
    """Say what ``lz.moe_experts`` does not compute; empty where nothing speaks against it."""
    if getattr(module, "_is_expert_parallel", False):  # of transformers 5.23, not 5.17
        return "its experts are divided among ranks"
    if not module.has_gate:
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows each of its experts"
    if "parametrizations" in module._modules:  # as of an adapter of peft
        return "its parameters are computed anew for each call (parametrizations)"
    for name in ("gate_up_proj", "down_proj"):
        weight = module._parameters.get(name)
        if weight is None or type(weight.data) is not Tensor:
            return f"{name} is no parameter that is a plain tensor: quantised or sharded"
        if weight.dtype != rows.dtype:
            return "rows and weights differ in their dtypes"
    return ""


def _gate_of(module: Any) -> Gate | str:
    """A module's gate by its values, computed anew where it changed, or why it is none of ``lz.moe_experts``."""
    plain = [each for name, each in vars(module).items() if type(each) in _PLAIN and name != "training"]
    about = type(module)._apply_gate, *module._modules.values(), *plain
    found = _gates.get(module)
    if found is None or found[0] != about:
        found = _gates[module] = about, _learned(module)
    return found[1]


def _learned(module: Any) -> Gate | str:
    width = module.gate_up_proj.shape[-1 if module.is_transposed else -2]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        rows = [torch.randn(8, width, generator=generator, dtype=torch.float32) * size for size in SIZES]
        try:
            expected = [module._apply_gate(each.clone()) for each in rows]
        except Exception as error:  # noqa: BLE001  # whatever a foreign class raises
            return f"its gate cannot be evaluated ({in_short(error)})"
        alpha, limit = numbers_of(module)
        for activation in GATES:
            numbers = (alpha, limit) if activation == "swiglu_oai" else (ALPHA, LIMIT)
            got = [gated(each, activation, *numbers) for each in rows]
            if all(_is_same(one, other) for one, other in zip(got, expected, strict=True)):
                return Gate(activation, *numbers)
    return f"its gate is none of {', '.join(GATES)}"


def numbers_of(module: Any) -> tuple[float, float]:
    """What a module keeps as ``alpha`` and ``limit`` of its gate; those of gpt-oss where it keeps none."""
    kept: list[Any] = [getattr(module, name, None) for name in ("alpha", "limit")]
    alpha, limit = (
        default if type(each) not in {int, float} else float(each)
        for each, default in zip(kept, (ALPHA, LIMIT), strict=True)
    )
    return alpha, limit


def _is_same(got: Tensor, expected: Any) -> bool:
    return (
        isinstance(expected, Tensor)
        and got.shape == expected.shape
        and got.dtype == expected.dtype
        and torch.allclose(got, expected, rtol=_SAME, atol=_SAME)
    )


def _tell(experts: type, why: str) -> None:
    """Say once for a class what runs in our place, and why."""
    if (experts, why) not in _told:
        _told.add((experts, why))
        text = f"experts_implementation='layerzero': {experts.__name__} runs as 'grouped_mm': {why}"
        warn(text, LayerZeroWarning, stacklevel=3)


def _tell_without(model: Any) -> None:
    """Warn of a class of models that has no experts which would call us; once for a model and its parts."""
    if model._can_set_experts_implementation() or getattr(model.config_class, "sub_configs", None):
        return
    if (model.config_class, "") not in _told:
        _told.add((model.config_class, ""))
        text = f"experts_implementation='layerzero': {model.__name__} has no experts that call Transformers' "
        text += "ExpertsInterface, so nothing of it is LayerZero's"
        warn(text, LayerZeroWarning, stacklevel=4)
