"""What flags mean: shapes and parameters, seconds, threads, libraries to pretend, and calls of drop-in functions."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import time
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from layerzero.cli.calls import CallFlags
from layerzero.cli.question import (
    CallQuestion,
    case_named,
    device_of,
    dtype_of,
    libraries_of,
    pair_of,
    settings_of,
    sizes,
    value_of,
)
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import DropIn
from layerzero.core.operation import Case, Routed
from layerzero.core.plan import Report
from layerzero.engine import probe
from layerzero.engine.config import SCOPES
from layerzero.engine.plain import plain_facts
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import nearest
from layerzero.inspection.answers import explain, known_libraries, named_libraries, spellings
from layerzero.ops import PLAIN_FUNCTIONS, plain_function_of
from layerzero.tuning.measurement.jobs import Shape, operations_named
from layerzero.tuning.measurement.timing import Deadline

_SIZES = re.compile(r"\d+(?:x\d+)*")


def shapes_of(texts: Sequence[str] | None) -> list[Shape] | None:
    """Read ``1x8x4x16:1x9x2x16,2x8x4x16``. Raises: ValueError with wanted and got."""
    if not texts:
        return None
    found: list[Shape] = []
    for text in (part for each in texts for part in each.split(",")):
        several = text.split(":")
        if len(several) > 2 or not all(_SIZES.fullmatch(each) for each in several):
            raise ValueError(f"--shapes: wanted sizes like 1x2048x32x128 or 1x1x32x128:1x512x8x128, got {text!r}")
        shapes = [sizes(each, "--shapes") for each in several]
        found.append(shapes[0] if len(shapes) == 1 else shapes)
    return found


def deadline_of(budget_s: float) -> Deadline:
    """The end of a command that begins now. Raises: ValueError with wanted, got and the next step."""
    if not budget_s > 0:  # nor is what is no number
        raise ValueError(
            f"--budget-s: wanted more than 0 seconds, got {budget_s:g}; leave it out for the default, inf has no end"
        )
    return Deadline(None if budget_s == math.inf else left_of(budget_s))


def left_of(budget_s: float) -> float:
    """Seconds of a command's budget that are left: what its process has worked so far counts, up to a half.

    That is importing torch and kernel libraries: on a slow host 8 s, so that `tune --budget-s 90` took 104 (an H200's,
    2026-11-24).
    """
    return max(budget_s - time.process_time(), budget_s / 2)


def params_of(texts: Sequence[str], operation: str) -> dict[str, object]:
    """What ``--param`` says, of the types that the operations declare. Raises: ValueError with wanted and got."""
    _, names = operations_named(operation)
    schemas = [REGISTRY.operation(name).schema for name in names]
    known = {name: schema.param(name) for schema in schemas for name in (*schema.chosen, *schema.scalars)}
    found = {}
    for name, text in (pair_of(text, "--param", "name=value") for text in texts):
        if name not in known:
            raise ValueError(f"--param: wanted one of {', '.join(sorted(known)) or 'no parameters'}, got {name!r}")
        found[name] = value_of(known[name].types, text, f"--param {name}")
        problem = known[name].problem(found[name])
        if problem:
            raise ValueError(f"--param {problem}")
    return found


def covers_plain(pattern: str) -> bool:
    """Whether a name means operations without tensors, and no others."""
    if pattern in PLAIN_FUNCTIONS:
        return True
    try:
        names = REGISTRY.operations_named(pattern)
    except KeyError:
        return False
    return all(REGISTRY.operation(name).plain is not None for name in names)


def plain_params(texts: Sequence[str], pattern: str) -> dict[str, Any]:
    """What ``--param`` says of operations without tensors: at least which tokenizer.

    Raises: ValueError for a name that neither the function nor a schema has.
    """
    operations = [REGISTRY.operation(name) for name in REGISTRY.operations_named(pattern)]
    kinds = {each.name: each.types for one in operations for each in one.schema.params}
    found = {}
    for name, text in (pair_of(each, "--param", "name=value") for each in texts):
        if name != "tokenizer_id" and name not in kinds:  # what a case is drawn for
            known = ", ".join(["tokenizer_id", *kinds])
            raise ValueError(f"--param: wanted one of {known}, got {name!r}")
        found[name] = value_of(kinds.get(name, str), text, f"--param {name}")
    if "tokenizer_id" not in found:
        raise ValueError(f"{pattern}: wanted --param tokenizer_id=FILE_OR_NAME, got none")
    return found


_OF_TENSORS = ("shapes", "manifest", "dtype", "device", "layout", "threads", "graph", "model", "cases", "no_isolation")


def refuse_tensors(command: str, operation: str, flags: object) -> None:
    """Raises: ValueError where flags of calls with tensors were given to an operation without any."""
    known = {f"--{name.replace('_', '-')}": getattr(flags, name) for name in _OF_TENSORS if hasattr(flags, name)}
    if unfit := [flag for flag, value in known.items() if value]:
        wanted = f"wanted no {', '.join(known)}, got {', '.join(unfit)}"
        raise ValueError(f"{command} {operation}: it has no tensors: {wanted}; leave them out")


def plain_report(flags: CallFlags) -> Report:
    """What ``explain`` tells of a case, or of texts of a size (``--shape 16x100``: 16 texts of 100 characters)."""
    function = plain_function_of(flags.name)
    assert function is not None, flags.name
    operation = next((each for each in function.operations if each.name == flags.name), function.operations[0])
    assert operation.plain is not None
    params = plain_params(flags.params, flags.name)
    if flags.shape is None:
        _, case = case_named(flags.case or operation.cases[0].name, [operation])
    else:
        case = _case_of_size(operation.cases[0], flags.shape)
    with SCOPES.scope(settings_of(flags.settings)):
        arguments = operation.plain.draw(case, params)
        arguments |= {name: value for name, value in params.items() if name in arguments}
        return explain(plain_facts(Routed(operation, arguments)))


_MOST_DRAWN = 10_000_000
"""Characters of a question about texts; to draw them takes 2 s (Intel Xeon, 2026-12-01)."""


def _case_of_size(first: Case, shape: str) -> Case:
    sizes = [int(each) for each in shape.split("x") if each.isdecimal()]
    if len(sizes) != len(shape.split("x")) or not 1 <= len(sizes) <= 2 or not all(sizes):
        raise ValueError(f"--shape: wanted a size, or how many times a size (2000x100), got {shape!r}")
    if math.prod(sizes) > _MOST_DRAWN:
        raise ValueError(f"--shape: wanted at most {_MOST_DRAWN} in all, since they are drawn, got {shape!r}")
    names, count = list(first.sizes), sizes[0] if len(sizes) == 2 else 1
    params = {"batched": True} if len(sizes) == 2 else {}
    return Case(shape, {names[0]: sizes[-1] * count, names[1]: count}, params)


def pretend(installed: Mapping[str, str], missing: Iterable[str]) -> dict[str, str]:
    """Give distribution names and versions as ``lz.explain(libraries=...)`` takes them: what is here, changed.

    Raises: ValueError for a library that no backend asks for, or an unreadable version.
    """
    known = known_libraries()
    libraries = {
        name: version for names in known.values() for name in names if (version := probe.installed_version(name))
    }
    for name in missing:
        for spelling in spellings(name, known, "--without"):
            libraries.pop(spelling, None)
    return libraries | named_libraries(installed, "--with")


def drop_in_question(flags: CallFlags, of: DropIn) -> CallQuestion:
    """Read the flags. Raises: KeyError or ValueError with wanted and got."""
    function = getattr(importlib.import_module(of.home), of.name)
    kinds = {
        name: (typing.get_args(each.annotation) if isinstance(each.annotation, types.UnionType) else (each.annotation,))
        for name, each in inspect.signature(function, eval_str=True).parameters.items()
    }
    tensors = [name for name, types_ in kinds.items() if types_ == (torch.Tensor,)]
    for flag, value in (("--case", flags.case), ("--layout", flags.layout), ("--causal", flags.causal)):
        if value is not None:
            wanted = f"{of.name} has {of.library}'s arguments: wanted --shape, --kv-shape and --param NAME=VALUE"
            raise ValueError(f"{flag}: {wanted}{_near(flag[2:], list(kinds))}")
    if flags.shape is None:
        raise ValueError(f"{of.name}: wanted --shape, the sizes of {tensors[0]} in {of.library}'s order, got none")
    device = device_of(flags.device)
    dtype = dtype_of(flags, device)
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
        arguments[name] = _drop_in_value(kinds[name], value, f"--param {name}", dtype)
    libraries = libraries_of(flags.installed, flags.missing)
    return CallQuestion(of.name, arguments, device, libraries, settings_of(flags.settings), flags.capturing)


def _drop_in_value(kinds: tuple[object, ...], text: str, flag: str, dtype: torch.dtype) -> object:
    """A value of these types; a tensor as ``SHAPE[:DTYPE]``, by default of the call's dtype."""
    if torch.Tensor not in kinds or text == "none":
        return value_of(kinds, text, flag)
    shape, colon, named = text.partition(":")
    return torch.empty(sizes(shape, flag), dtype=dtype_named(named) if colon else dtype, device="meta")


def _near(name: str, known: list[str]) -> str:
    return nearest(name, known) or f"; it has {', '.join(known)}"
