"""The hit path in C, where it was built and torch has what it reads; ``LAYERZERO_NATIVE=0`` leaves it out.

It needs the GIL: a free-threaded interpreter switches the GIL on for all when it is imported, so Python serves there.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from layerzero.core import indices
from layerzero.core.eager_state import declared
from layerzero.core.operation import Function
from layerzero.core.plan import Plan
from layerzero.core.system import log, resources
from layerzero.engine.config import SCOPES
from layerzero.engine.services import SERVICES
from layerzero.engine.transforms import in_dispatch_mode, in_transform

VALUE, SEQUENCE, BOUND, HANDLE, TENSOR, OPTIONAL_TENSOR, PASSED = range(7)
"""Kinds of parameters, as ``_native/hot.h`` numbers them."""


class Passed(NamedTuple):
    """One argument that a kernel gets: under which keyword, if any, and what: a parameter by name, else a constant."""

    keyword: str
    parameter: str
    constant: object = None


INTERFACE = 7
"""What ``_native/hot.h`` calls so: an extension of other sources than these is left out."""


class _Absent(Exception):  # noqa: N818  # no error: the reason why Python serves
    pass


def _classify() -> int:
    """Tell the C path of a combination of torch's dispatch keys that it has not seen: -1 the slow way, 1 autocast."""
    if in_dispatch_mode() or in_transform():
        return -1
    return int(torch._C._is_any_autocast_enabled())


def _without_gil() -> bool:
    return not getattr(sys, "_is_gil_enabled", lambda: True)()  # from Python 3.13 on


def _load() -> Any:
    wish = os.environ.get("LAYERZERO_NATIVE", "").lower()
    if wish in ("0", "false", "no", "off"):
        raise _Absent("LAYERZERO_NATIVE is 0")
    if wish not in ("", "1", "true", "yes", "on", "dlpack"):
        log.warning("environment: LAYERZERO_NATIVE: wanted 1, 0 or dlpack, got %r; it decides nothing", wish)
        wish = ""
    if not wish and _without_gil():
        raise _Absent("this process has no GIL, and the extension would switch it on; LAYERZERO_NATIVE=1 lets it")
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        raise _Absent(f"torch {torch.__version__} has no DLPack exchange API")
    try:
        hot = importlib.import_module("layerzero._native.hot")
    except ImportError as error:
        raise _Absent(f"the extension was not built: {error}") from error
    if _without_gil():
        raise _Absent("the extension needs the GIL, which this process keeps off (PYTHON_GIL=0, -X gil=0)")
    if getattr(hot, "INTERFACE", 1) != INTERFACE:
        raise _Absent("the extension was built of other sources; build it again")
    sources = {
        "exchange": exchange,
        "tensor": torch.Tensor,
        "parameter": Parameter,
        "dtype": torch.dtype,
        "used": Plan.__dict__["used"],
        "grad_enabled": torch.is_grad_enabled,
        "function_modes": torch._C._len_torch_function_stack,
        "deterministic": torch._C._get_deterministic_algorithms,
        "inference": torch.is_inference_mode_enabled,
        "classify": _classify,
        "forward_ad": vars(forward_ad),
        "strided": torch.strided,
        "samples": () if wish == "dlpack" else _samples(),
        **_libraries(),
    }
    try:
        hot.setup(**sources)
        if not _reads_rightly(hot):
            hot.setup(**{**sources, "c10": None, "torch_cpu": None})
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise _Absent(f"the extension does not fit torch {torch.__version__}: {error}") from error
    SCOPES.watch(hot.set_scopes)
    indices.NAMES.update(distinct=hot.distinct, within=hot.within, firsts_within=hot.firsts_within)
    indices.IN_C["slots"] = hot.slots
    indices.IN_C.update((name, getattr(hot, name)) for name in ("stands", "checksum") if hasattr(hot, name))
    return hot


def _libraries() -> dict[str, str | None]:
    """Where torch's own symbols are looked up; without them its builtins answer, and Python for dispatch keys."""
    folder = Path(torch.__file__).parent / "lib"
    paths = {name: folder / f"lib{name}.so" for name in ("c10", "torch_cpu")}
    return {name: str(path) if path.exists() else None for name, path in paths.items()}


def _samples() -> tuple[torch.Tensor, ...]:
    """Tensors that two ways of reading must agree about before the faster one serves."""
    plain = torch.zeros(2, 3, 4, device="cpu", dtype=torch.float32)
    others = plain.transpose(0, 2)[1:], torch.zeros(5, device="cpu", dtype=torch.int64), torch._neg_view(plain)
    return plain, *others, plain.clone().requires_grad_()


def _reads_rightly(hot: Any) -> bool:
    """Whether what is read by symbol is what its name says: it changes with the state, and comes back."""
    torch.get_num_threads()  # torch tells OpenMP so in each thread when that first asks
    plain = hot.state()
    with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Python):
        keys_inside, *_ = hot.state()
    with torch.inference_mode():
        keys_inference, *_ = hot.state()
    grads = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            grads.append(hot.state()[1])
    with torch.overrides.BaseTorchFunctionMode():
        modes = plain[2], hot.state()[2]
    told = plain[0] is None or len({plain[0], keys_inside, keys_inference}) == 3
    told = told and grads in ([True, False], [None, None]) and modes in ((0, 1), (None, None))
    return told and plain[3] in (None, torch.get_num_threads()) and hot.state() == plain


ABSENT = ""
"""Why Python serves every call; empty if C does."""

HOT: Any = None
"""The extension; None where Python serves."""


def _load_or_tell() -> None:
    global HOT, ABSENT
    try:
        HOT = _load()
    except _Absent as reason:
        ABSENT = str(reason)


def _in_plain_state(work: Callable[[], None]) -> None:
    """Run in a new thread: transforms, modes and the grad mode of the first call belong to the thread that makes it."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised below, where the caller hears it
            failures.append(error)

    thread = resources.started("layerzero-setup", run)
    if thread is None:
        global ABSENT
        ABSENT = "the system gave no thread to set up the extension in"
        return
    thread.join()
    if failures:
        raise failures[0]


_in_plain_state(_load_or_tell)


def _owner(name: str) -> Any:
    return SERVICES.call(name).native


if HOT is not None:

    class Owner(HOT.Function):  # type: ignore[misc]  # an extension without types where it was not built
        """What a builtin belongs to; pickling a builtin asks its owner for it by name."""

        def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
            return _owner, (self.builtin().__name__,)


class ArgumentPlaces(NamedTuple):
    """Where the arguments of a kernel come from: how many values there are, and what ``HOT.Direct`` takes of them."""

    values: int
    places: tuple[int, ...]
    constants: tuple[object, ...]
    keywords: tuple[str, ...]


def places(names: Sequence[str], passed: Sequence[Passed]) -> ArgumentPlaces:
    """Where a kernel finds what it is passed among the values of ``names``."""
    found = tuple(names.index(each.parameter) if each.parameter else -1 for each in passed)
    keywords = tuple(each.keyword for each in passed if each.keyword)
    return ArgumentPlaces(len(names), found, tuple(each.constant for each in passed), keywords)


def direct(target: Callable[..., Any], places: ArgumentPlaces) -> Callable[..., Any] | None:
    """A kernel with its constants in place, called with the values of all names; None where there is no C path."""
    if HOT is None:
        return None
    made: Callable[..., Any] = HOT.Direct(target, *places)
    return made


def declare(function: Function, ways: dict[str, Callable[..., Any]]) -> Any:
    """Make the C callable's owner for a function; ``ways`` are the Python ones that it hands over to."""
    parameters = function.parameters
    tensors = [each.name for each in parameters if each.name in function.tensors]
    names = [each.name for each in parameters]
    described = []
    for each in parameters:
        required = each.default is inspect.Parameter.empty
        param, kind = function.param(each.name), VALUE
        if each.name in tensors:
            kind = TENSOR if required else OPTIONAL_TENSOR
        elif each.name in function.bounds:
            kind = BOUND
        elif each.name in function.handles:
            kind = HANDLE
        elif param is not None and tuple in param.kinds:
            kind = SEQUENCE
        elif each.name in function.scalars:
            kind = PASSED
        made_of = tuple(names.index(name) for name, number in function.given_as.items() if number == each.name)
        asked, bounds = None, (0.0, 0.0)
        types: tuple[type, ...] = ()
        if param is not None and kind == HANDLE:
            made_of, asked = tuple(names.index(tensor) for tensor in param.made_of), param.kind
        if param is not None and (kind == PASSED or asked is not None):
            types, bounds = tuple(param.plain - {type(None)}), (param.least, param.most)
        default = None if required else each.default
        described.append((each.name, kind, default, required, made_of, asked, types, *bounds))
    mutated = []
    for name in function.mutates:
        others = [other for other in tensors if other != name]
        shared = [other for other in others if frozenset({name, other}) in function.may_share_storage]
        apart = sum(1 << tensors.index(other) for other in others if other not in shared)
        mutated.append((tensors.index(name), apart, sum(1 << tensors.index(other) for other in shared)))
    try:
        return Owner(
            name=function.name,
            doc=_doc(function),
            parameters=tuple(described),
            positional=sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in function.parameters),
            mutated=tuple(mutated),
            asked=_asked(function),
            **ways,
        )
    except ValueError as error:  # more tensors or parameters than C has room for: Python serves this function
        log.debug("%s has no C path: %s", function.name, error)
        return None


def _asked(function: Function) -> tuple[tuple[object, ...], ...]:
    """What the function's state is read by, as C takes it: also where, and for floats of how many bits."""
    return tuple(
        (
            each.ask,
            each.given,
            each.answers,
            _WHERE[each.cuda],
            8 * state.dtype.itemsize if state.dtype is not None else 0,
        )
        for state in declared(function.state)
        for each in state.questions
    )


_WHERE = {None: 0, True: 1, False: 2}
"""Where a query is made, as ``_native/asked.c`` numbers it."""


def _doc(function: Function) -> str:
    """The docstring behind the signature, in the form that ``inspect.signature`` reads from a builtin."""
    public = [each for each in function.parameters if each.name not in function.given_as]
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in public]
    signature = str(inspect.Signature(plain)).replace("(", "($self, ", 1)
    return f"{function.name}{signature}\n--\n\n{inspect.getdoc(function.signature)}"
