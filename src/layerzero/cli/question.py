"""A call without tensors: from ``--shape 1x2048x32x128 --dtype bfloat16`` to what ``lz.explain`` takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from layerzero.cli.calls import CallFlags
from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_name, dtype_named
from layerzero.core.errors import meant
from layerzero.core.known_devices import KNOWN_DEVICES
from layerzero.core.operation import Case, Function, Operation
from layerzero.core.plan import Report
from layerzero.engine.config import SCOPES
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import ALIASES, SETTINGS
from layerzero.inspection.answers import explain, unknown_operation
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, function_of
from layerzero.ops.calls import accepted, arguments_of, case_of_shapes, function_for

_SIZES = re.compile(r"\d+(?:[x,]\d+)*")
_MOST_ELEMENTS = 2**60 - 1
"""Torch counts a tensor's bytes in 63 bits."""

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class CallQuestion:
    """A function's name, its arguments on ``meta``, a device, and libraries (None: those installed)."""

    name: str
    arguments: Mapping[str, Any]
    device: Device
    libraries: Mapping[str, str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    capturing: bool = False

    def ask(self) -> Report:
        """Ask it. Raises: what :func:`layerzero.explain` raises."""
        with SCOPES.scope(self.settings):
            return explain(
                self.name, **self.arguments, device=self.device, libraries=self.libraries, capturing=self.capturing
            )


def question(flags: CallFlags) -> CallQuestion:
    """Read the flags. Raises: KeyError or ValueError with wanted and got."""
    function, operations = _named(flags.name)
    device = device_of(flags.device)
    dtype = dtype_of(flags, device)
    given = dict(pair_of(text, "--param", "name=value") for text in flags.params)
    kinds = {each.name: each.types for operation in function.operations for each in operation.schema.params}
    values = {
        name: value_of(kinds.get(name, str), text, f"--param {name}")
        for name, text in given.items()
        if name not in function.tensors
    }
    for name in given:
        _check_parameter(function, name, "--param")
    chosen = {name: getattr(flags, name) for name in ("layout", "causal") if getattr(flags, name) is not None}
    for name in chosen:
        _check_parameter(function, name, f"--{name}")
    arguments = (
        _of_case(flags, operations, dtype) if flags.case is not None else _of_shapes(flags, operations, dtype, values)
    )
    arguments |= values | chosen
    for name in function.tensors:
        if name in given:
            arguments[name] = _tensor(function, name, given[name], dtype)
    if flags.grad:
        for name in set(function.tensors) - set(function.mutates):
            if isinstance(arguments.get(name), torch.Tensor) and arguments[name].is_floating_point():
                arguments[name].requires_grad_()
    missing = [each.name for each in function.parameters if each.default is each.empty and each.name not in arguments]
    if missing:
        raise ValueError(f"--param: wanted {', '.join(f'{each}=VALUE' for each in missing)} with --shape, got none")
    libraries = libraries_of(flags.installed, flags.missing)
    return CallQuestion(flags.name, arguments, device, libraries, settings_of(flags.settings), flags.capturing)


def device_of(name: str | None) -> Device:
    """A device by name: ``cpu``, ``cuda``, ``cuda:1`` mean this machine's; anything else a known device."""
    if name is None:
        return Device.detect("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", name):
        count = torch.cuda.device_count() if name != "cpu" else 1
        if int(name.partition(":")[2] or 0) >= count:
            known = ", ".join(KNOWN_DEVICES)
            raise ValueError(f"--device: wanted cpu or one of {count} CUDA devices, got {name}; named ones: {known}")
        return Device.detect(name)
    return Device.named(name)


def dtype_of(flags: CallFlags, device: Device) -> torch.dtype:
    """The dtype of the tensors; that of models on such a device where none is named."""
    if flags.dtype is None:
        return torch.float32 if device.platform == "cpu" else torch.bfloat16
    return dtype_named(flags.dtype)


def _named(name: str) -> tuple[Function, Sequence[Operation]]:
    """The function that a name asks about, and the operations it may mean."""
    names = OPERATION_ALIASES[name][0] if name in OPERATION_ALIASES else (name,)
    if function_of(names[0]) is None:
        REGISTRY.ready()  # a plugin may bring it
    if name in FUNCTIONS:
        return FUNCTIONS[name], FUNCTIONS[name].operations
    function = function_of(names[0])
    if function is not None:
        return function, [operation for operation in function.operations if operation.name in names]
    raise unknown_operation(name)


def _of_case(flags: CallFlags, operations: Sequence[Operation], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a named case."""
    if flags.shape is not None or flags.kv_shape is not None:
        raise ValueError("--case: wanted either --case or --shape, got both")
    operation, case = case_named(flags.case or "", operations)
    return _made(operation, case, flags, dtype)


def _made(operation: Operation, case: Case, flags: CallFlags, dtype: torch.dtype) -> dict[str, Any]:
    made = arguments_of(operation, case, dtype, "meta", layout=flags.layout or None)
    return accepted(function_for(operation), made)


def _of_shapes(
    flags: CallFlags, operations: Sequence[Operation], dtype: torch.dtype, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that the shapes of the first tensors say; the others follow from them."""
    first = operations[0].schema
    if flags.shape is None:
        cases = ", ".join(dict.fromkeys(case.name for operation in operations for case in operation.cases))
        raise ValueError(f"{flags.name}: wanted --shape (1x2048x32x128) or --case, got neither; cases: {cases}")
    shapes = [sizes(flags.shape, "--shape")]
    if flags.kv_shape is not None:
        if len(first.required) < 2 or first.required[0].ndim != first.required[1].ndim:
            raise ValueError(f"--kv-shape: wanted a function of two tensors alike, got {flags.name}")
        shapes.append(sizes(flags.kv_shape, "--kv-shape"))
    layout = flags.layout or None
    made = None
    try:
        for operation in operations:
            case = case_of_shapes(operation, shapes, layout, values)
            if case is not None:
                made = _made(operation, case, flags, dtype)
                break
    except RuntimeError as error:  # of a size that follows from them: a product, or more than an integer holds
        why = str(error).partition("\n")[0]
        raise ValueError(f"--shape: wanted sizes that tensors may have, got {flags.shape!r}: {why}") from None
    if made is None:  # what is wrong with them, the function says best
        alike = first.required[0].ndim
        made = {each.name: _empty(shapes[-1], dtype) for each in first.required if each.ndim in (alike, None)}
        missing = [each.name for each in first.required if each.name not in made]
        if missing:
            cases = ", ".join(dict.fromkeys(case.name for operation in operations for case in operation.cases))
            wanted = f"wanted --case and one of {cases}"
            raise ValueError(
                f"{flags.name}: {wanted}, got --shape or --kv-shape, which do not say {', '.join(missing)}"
            )
    if layout is None:
        made.pop("layout", None)  # none was named
    return made | {each.name: _empty(shape, dtype) for each, shape in zip(first.required, shapes, strict=False)}


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def case_named(name: str, operations: Sequence[Operation]) -> tuple[Operation, Case]:
    """A case of one of these operations, and whose it is. Raises: ValueError with the names that there are."""
    found = [(operation, case) for operation in operations for case in operation.cases if case.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(operation.name for operation, _ in found)
        raise ValueError(f"--case: {name!r} is a case of {names}; ask about one of them by name")
    known = dict.fromkeys(case.name for operation in operations for case in operation.cases)
    raise ValueError(f"--case: wanted one of {', '.join(known)}, got {name!r}")


def _check_parameter(function: Function, name: str, flag: str) -> None:
    known = [parameter.name for parameter in function.parameters]
    if name not in known:
        near = meant(name, known) or f"; it has {', '.join(known)}"
        raise ValueError(f"{flag}: {function.name} has no argument {name!r}{near}")


def sizes(text: str, flag: str) -> tuple[int, ...]:
    """A shape from a flag's text. Raises: ValueError with wanted and got."""
    if not _SIZES.fullmatch(text):
        raise ValueError(f"{flag}: wanted sizes like 1x2048x32x128, got {text!r}")
    found = tuple(int(size) for size in re.split("[x,]", text))
    if math.prod(max(size, 1) for size in found) > _MOST_ELEMENTS:
        raise ValueError(f"{flag}: wanted sizes whose product is below 2**60, got {text!r}")
    return found


def _tensor(function: Function, name: str, text: str, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor argument as ``SHAPE[:DTYPE]``; without a dtype, the call's where that is allowed."""
    if text == "none":
        return None
    shape, colon, named = text.partition(":")
    schema = next(each for op in function.operations for each in op.schema.inputs if each.name == name)
    allowed = schema.dtype_constraint
    if colon:
        dtype = dtype_named(named)
    elif allowed is not None and dtype not in allowed:
        dtype = min(allowed, key=dtype_name)
    return torch.empty(sizes(shape, f"--param {name}"), dtype=dtype, device="meta")


def value_of(kind: object, text: str, flag: str) -> object:
    """A value of these types from a flag's text. Raises: ValueError with wanted and got."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if text.lower() == "none":
        return None
    if torch.dtype in kinds:
        return dtype_named(text)
    if bool in kinds:
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        raise ValueError(f"{flag}: wanted true or false, got {text!r}")
    if tuple in kinds:
        try:
            return tuple(int(part) for part in re.split("[x,]", text))
        except ValueError:
            raise ValueError(f"{flag}: wanted integers like 128,0, got {text!r}") from None
    if float in kinds or int in kinds:
        try:
            return float(text) if float in kinds else int(text)
        except ValueError:
            raise ValueError(f"{flag}: wanted a number, got {text!r}") from None
    return text


def pair_of(text: str, flag: str, wanted: str) -> tuple[str, str]:
    """Name and value of ``name=value``. Raises: ValueError with wanted and got."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{flag}: wanted {wanted}, got {text!r}")
    return name.strip(), value.strip()


def settings_of(texts: Iterable[str]) -> dict[str, Any]:
    """Settings of ``--set`` that hold for the question; a list may be written with commas."""
    settings = {}
    for text in texts:
        key, value = pair_of(text, "--set", "key=value")
        setting = SETTINGS.get(ALIASES.get(key, key))
        plain = setting is not None and setting.kind == list[str]
        try:
            settings[key] = [part.strip() for part in value.split(",")] if plain else yaml.safe_load(value)
        except yaml.YAMLError as error:
            why = getattr(error, "problem", None) or error
            raise ValueError(
                f"--set {key}: wanted a value as a file of settings has it, got {value!r}: {why}"
            ) from None
    return settings


def libraries_of(installed: Sequence[str], missing: Sequence[str]) -> dict[str, str] | None:
    """What is installed here, with more or with less; None if nothing is pretended."""
    if not installed and not missing:
        return None
    from layerzero.cli.flags import pretend

    return pretend(dict(pair_of(text, "--with", "NAME=VERSION") for text in installed), missing)
