"""The ``torch.ops.layerzero`` operators of a function: their schemas in torch's language, from its public signature."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from layerzero.core.errors import RegistrationError

if TYPE_CHECKING:
    from layerzero.core.operation import Function


@dataclass(frozen=True, slots=True)
class TorchSchema:
    """One ``torch.ops.layerzero`` operator of a function.

    Attributes:
        signature: arguments and returns in torch's schema language.
        order: the function's parameter for each argument of that schema.
        fixed: parameters that this operator pins, because a torch operator's return type may not depend on a flag.
        lists: parameters that are lists there; a lone number becomes one on the way in, a tuple on the way out.
    """

    signature: str
    order: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict)
    lists: tuple[str, ...] = ()


_WORDS: dict[Any, str] = {
    torch.Tensor: "Tensor",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
    torch.Generator: "Generator",
}


def torch_schemas(function: Function, known: dict[str, TorchSchema]) -> Mapping[str, TorchSchema]:
    """The operators of a function by name: one for the plain call, one for each result that a flag asks for.

    They are written into ``known`` the first time.

    A handle of the caller's own type has no place in an operator of tensors, and is left out.
    Raises: RegistrationError for a parameter whose annotation is no type that torch's operators have.
    """
    if known:
        return known
    hints = typing.get_type_hints(function.signature) | dict.fromkeys(function.given_as, torch.Tensor | None)
    schemas = [operation.schema for operation in function.operations]
    flags = {output.when: output for schema in schemas for output in schema.outputs if output.when}
    written: dict[str, tuple[str, bool]] = {}
    letters = iter("abcdefgh")
    for parameter in function.parameters:
        if parameter.name in flags:
            continue
        apart = torch.Tensor if parameter.name in function.given_as.values() else None
        kind, is_list = _kind(hints.get(parameter.name, Any), apart)
        if kind is None and parameter.name in function.handles:
            continue
        if kind is None:
            got = hints.get(parameter.name, "nothing")
            wanted = "wanted an annotation such as Tensor, float | None or tuple[int, int]"
            raise RegistrationError(f"function {function.name!r}: {parameter.name}: {wanted}, got {got}")
        if parameter.name in function.mutates:
            kind = f"Tensor({next(letters)}!)"
        written[parameter.name] = f"{kind} {parameter.name}{_default(parameter, is_list=is_list)}", is_list
    order = tuple(name for name in function.order or written if name in written)
    lists = tuple(name for name in order if written[name][1])
    arguments = ", ".join(written[name][0] for name in order)
    outputs = max((schema.outputs for schema in schemas), key=len)
    found = {}
    for flag in ("", *flags):
        results = [each for each in outputs if not each.when or each.when == flag]
        returns = ", ".join("Tensor" for _ in results)
        text = f"({arguments}) -> {returns if len(results) == 1 else f'({returns})'}"
        name = f"{function.name}_{flags[flag].name}" if flag else function.name
        found[name.replace(".", "_")] = TorchSchema(text, order, {flag: True} if flag else {}, lists)
    known.update(found)
    return known


def _kind(annotation: Any, apart: type | None = None) -> tuple[str | None, bool]:
    """A parameter's type in torch's language, without what another one has, and whether it is a list there."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [each for each in typing.get_args(annotation) if each not in (type(None), apart)]
        optional = "?" if type(None) in typing.get_args(annotation) else ""
        lists = [each for each in members if _is_list(each)]
        kind, is_list = _kind(lists[0] if lists else members[0])
        if kind is None or (len(members) > 1 and not lists):
            return None, False
        return kind + optional, is_list
    if _is_list(annotation):
        return ("int[]" if typing.get_origin(annotation) is tuple else "SymInt[]"), True
    return _WORDS.get(annotation), False


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (tuple, list, Sequence)


def _default(parameter: inspect.Parameter, *, is_list: bool) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    value = parameter.default
    if isinstance(value, str):
        return f'="{value}"'
    return f"=[{value}]" if is_list and isinstance(value, int) else f"={value}"
