"""Why a module is left as it is, before anybody asks what it computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from layerzero.integrations.optimize.stamp import is_recorder
from layerzero.integrations.optimize.swapping import has_own_forward, is_swapped

_HOOKS = (*("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),)
_ADAPTERS = ("peft.",)
"""Packages whose modules compute with others' weights and exchange them meanwhile."""


def refusal(module: Module, parent: Module | None = None) -> str:
    """Say why a module, or what it covers, may not be replaced; empty where nothing speaks against it."""
    for path, each in module.named_modules():
        where = f" of {path}" if path else ""
        if isinstance(each, torch.jit.ScriptModule):
            return f"its code{where} is TorchScript's, whose forward is none of Python"
        if is_swapped(each):
            return f"its forward{where} is LayerZero's already; undo() the first report to begin anew"
        if has_own_forward(each):
            return f"its forward{where} was exchanged on the instance, as accelerate's offloading does"
        if any(not is_recorder(hook) for name in _HOOKS for hook in getattr(each, name).values()):
            return f"it has hooks{where}, which wait for its calls"
        for name, parameter in each.named_parameters(recurse=False):
            problem = _weight_problem(parameter)
            if problem:
                return f"{path + '.' if path else ''}{name} {problem}"
        if "parametrizations" in each._modules:
            return f"its parameters{where} are computed anew for each call (parametrizations)"
    if parent is not None and type(parent).__module__.startswith(_ADAPTERS):
        return f"it lies under an adapter ({type(parent).__name__}); merge and unload that first"
    return ""


def _weight_problem(parameter: Parameter) -> str:
    if parameter.is_meta:
        return "is on the meta device and has no values"
    if type(parameter.data) is not Tensor:
        return f"is no plain tensor but a {type(parameter.data).__name__}: quantised or sharded"
    if parameter.layout is not torch.strided:
        return f"is no dense tensor but {str(parameter.layout).removeprefix('torch.')}"
    if not parameter.is_floating_point():
        return f"is {str(parameter.dtype).removeprefix('torch.')}: quantised"
    return ""
