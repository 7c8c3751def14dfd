"""A call of a function that stands for another library's, from flags: its own signature says what they mean."""

from __future__ import annotations

import importlib
import inspect
import types
import typing

import torch

from layerzero.cli.question import Flags, Question, device_of, libraries_of, pair_of, settings_of, sizes, value_of
from layerzero.core.drop_in import DropIn
from layerzero.core.dtypes import dtype_named
from layerzero.engine.settings import nearest


def question(flags: Flags, of: DropIn) -> Question:
    """Read the flags. Raises: KeyError or ValueError with wanted and got."""
    function = getattr(importlib.import_module(of.home), of.name)
    kinds = {
        name: _kinds(each.annotation) for name, each in inspect.signature(function, eval_str=True).parameters.items()
    }
    tensors = [name for name, types_ in kinds.items() if types_ == (torch.Tensor,)]
    for flag, value in (("--case", flags.case), ("--layout", flags.layout), ("--causal", flags.causal)):
        if value is not None:
            wanted = f"{of.name} has {of.library}'s arguments: wanted --shape, --kv-shape and --param NAME=VALUE"
            raise ValueError(f"{flag}: {wanted}{_near(flag[2:], list(kinds))}")
    if flags.shape is None:
        raise ValueError(f"{of.name}: wanted --shape, the sizes of {tensors[0]} in {of.library}'s order, got none")
    device = device_of(flags.device)
    dtype = dtype_named(flags.dtype) if flags.dtype else torch.float32 if device.platform == "cpu" else torch.bfloat16
    first = sizes(flags.shape, "--shape")
    others = first if flags.kv_shape is None else sizes(flags.kv_shape, "--kv-shape")
    arguments: dict[str, object] = {
        name: torch.empty(first if name == tensors[0] else others, dtype=dtype, device="meta", requires_grad=flags.grad)
        for name in tensors
    }
    for text in flags.params:
        name, value = pair_of(text, "--param", "name=value")
        if name not in kinds:
            raise ValueError(f"--param: {of.name} has no argument {name!r}{_near(name, list(kinds))}")
        arguments[name] = _value(kinds[name], value, f"--param {name}", dtype)
    libraries = libraries_of(flags.installed, flags.missing)
    return Question(of.name, arguments, device, libraries, settings_of(flags.settings), flags.capturing)


def _kinds(annotation: object) -> tuple[object, ...]:
    """The types that an argument has."""
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _value(kinds: tuple[object, ...], text: str, flag: str, dtype: torch.dtype) -> object:
    """A value of these types; a tensor as ``SHAPE[:DTYPE]``, by default of the call's dtype."""
    if torch.Tensor not in kinds or text == "none":
        return value_of(kinds, text, flag)
    shape, colon, named = text.partition(":")
    return torch.empty(sizes(shape, flag), dtype=dtype_named(named) if colon else dtype, device="meta")


def _near(name: str, known: list[str]) -> str:
    return nearest(name, known) or f"; it has {', '.join(known)}"
