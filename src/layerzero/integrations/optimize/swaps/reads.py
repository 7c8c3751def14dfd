"""What a module's own code asks while it runs: numbers of tensors, sizes that it compares, and what lies outside of it.

One run of an ``if`` shows one way of two. Code that asks may take the other one for another input, or tomorrow. So code
of others than the :data:`LIBRARIES` may call what computes, and nothing that may answer otherwise another time: no
clock, environment, random numbers or state of the process. What it names outside of itself is listed for stamps.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero.core.eager_state import uncompiled

READS = "its code reads numbers of tensors, as an `if` does, so that other input may take another way"

COMPARES = "its code compares how many rows its input has or how they lie, so that other input may take another way"

OUTSIDE = "its code calls {}, which another time may answer otherwise"
LIMITS = "its code calls {}, which may change few values, none of them tried"

LIBRARIES = frozenset({"torch", "transformers", "diffusers", "layerzero", "accelerate", "peft", "einops", "numpy"})
"""Packages whose modules ask only what their own tests know."""

HARMLESS = frozenset({
    *("_collections_abc", "abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "types"),
    *("typing",),
})  # fmt: skip
"""Others of which code may call functions in Python."""

_OF_TORCH = (
    *("_compile", "_jit_internal", "_library", "_meta_registrations", "_ops", "_prims", "_refs", "_subclasses"),
    *("_tensor", "_utils", "amp", "autograd", "compiler", "functional", "jit", "nn", "overrides", "utils"),
)  # fmt: skip
"""Modules of torch that compute, or tell of states in which the modules' own code runs anyway."""

IN_C = frozenset({
    *("_operator", "cmath", "itertools", "math"),
    *(f"torch._C._{each}" for each in ("fft", "linalg", "nested", "nn", "sparse", "special")),
})  # fmt: skip
"""The same of modules in C."""

BUILT_IN = frozenset({
    *("abs", "all", "any", "callable", "divmod", "getattr", "hasattr", "isinstance", "issubclass", "iter", "len"),
    *("max", "min", "next", "pow", "round", "setattr", "sorted", "sum", "is_autocast_enabled", "_get_tracing_state"),
})  # fmt: skip
"""Functions in C of which code may ask, by name."""

TYPES: tuple[type, ...] = (
    *(Tensor, torch.Size, torch.dtype, str, bytes, int, float, complex, tuple, list, dict, set, frozenset, type),
    *(slice, range),
)  # fmt: skip
"""Classes whose methods compute."""

_FEW = frozenset({
    *("clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "threshold", "nan_to_num", "maximum", "minimum", "fmax"),
    *("fmin", "max", "min", "gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal"),
    *("not_equal", "isnan", "isinf", "isfinite", "isclose", "heaviside", "sign", "sgn", "floor", "ceil", "round"),
    *("trunc", "fix", "frac", "fmod", "remainder", "bucketize", "searchsorted"),
})  # fmt: skip
"""Operators that change few fractions, or tell few from most: a run on others does not show what they do."""

_EQUAL, _LARGEST = frozenset({"eq", "ne", "not_equal"}), frozenset({"max", "min"})

_LOOKS = frozenset({
    *("shape", "dtype", "ndim", "T", "mT", "H", "mH", "data", "real", "imag", "nbytes", "itemsize", "layout"),
})  # fmt: skip
"""Attributes of tensors that are computed with, or noted otherwise."""


def _finds_few(name: str, others: list[Any]) -> bool:
    """Whether an operator with these arguments behind the first does; which numbers are above 0, random ones show."""
    if name in _LARGEST:  # along an axis, else
        return any(isinstance(each, Tensor) for each in others)
    zeros = [type(each) in {int, float} and each == 0 for each in others if each is not None]
    return name in _FEW and (name in _EQUAL or not zeros or not all(zeros))


@functools.cache
def is_own(module: str) -> bool:
    """Whether it is no library's: a user's file, or a package that is not known."""
    first = module.partition(".")[0]
    return first not in LIBRARIES and first not in sys.stdlib_module_names


def _allowed(called: Any) -> bool:
    """Whether code may call a function in C."""
    name, of = str(called.__name__), getattr(called, "__self__", None)
    if isinstance(of, TYPES):
        return name != "is_inference"
    if getattr(torch._C._VariableFunctions, name, None) == called:
        return True
    return getattr(of, "__name__", "") in IN_C or name in BUILT_IN


@functools.cache
def _may_call(name: str) -> bool:
    """Whether code may call functions in Python of a module of this name, or what these call is looked at."""
    first, _, rest = name.partition(".")
    if first == "torch":
        return rest.startswith(_OF_TORCH)
    return first in LIBRARIES or first in HARMLESS or first not in sys.stdlib_module_names


def functions_of(of: Any) -> Iterator[Any]:
    """The forward of a module or a class, methods and properties that it names, own functions, and what these name."""
    cls: Any = of if isinstance(of, type) else type(of)
    held = {} if cls is of else vars(of)
    waiting, done = [cls.forward], set[int]()
    while waiting:
        function = waiting.pop()
        inner, code = getattr(function, "__wrapped__", None), getattr(function, "__code__", None)
        if id(function) in done or function is getattr(Module, getattr(function, "__name__", ""), None):
            continue
        done.add(id(function))
        waiting += [] if inner is None else [inner]
        if not isinstance(code, CodeType) or (inner is not None and not is_own(function.__module__)):
            continue
        yield function
        names, space = names_in(code), function.__globals__
        methods = [getattr(cls, each, None) for each in names]
        waiting += [each.fget if isinstance(each, property) else each for each in methods if each is not None]
        files = [vars(each) for each in map(space.get, names) if type(each) is ModuleType and is_own(each.__name__)]
        found = [each.get(name) for each in (space, held, *files, kept_by(function)) for name in names]
        waiting += [each for each in found if isinstance(each, FunctionType) and is_own(each.__module__)]


def kept_by(function: Any) -> dict[str, Any]:
    """What a function keeps: of the functions around it, and as defaults."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    kept = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    defaults = {f"default {place}": each for place, each in enumerate(function.__defaults__ or ())}
    return {**kept, **defaults, **(function.__kwdefaults__ or {})}


def code_of(of: Any) -> tuple[set[str], list[dict[str, Any]]]:
    """The names in the code of :func:`functions_of`, and the globals and cells of that code."""
    names, spaces = set[str](), dict[int, dict[str, Any]]()
    for function in functions_of(of):
        kept = kept_by(function)
        names |= names_in(function.__code__) | kept.keys()
        spaces |= {id(each): each for each in (function.__globals__, kept) if each}
    return names, list(spaces.values())


def names_in(code: CodeType) -> set[str]:
    """Names in code: of globals, attributes, and variables of functions around it; texts, which ``getattr`` takes."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    texts = [each for each in code.co_consts if isinstance(each, str) and each.isidentifier()]
    return set(code.co_names).union(code.co_freevars, texts, *inner)


def is_object(value: Any) -> bool:
    """Whether it only holds attributes, as a configuration does."""
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(
        value, (type, Module, Tensor, ModuleType, FunctionType)
    )


def is_called(read: dis.Instruction) -> bool:
    """Whether an instruction reads what is called at once, which a profiler hears."""
    return read.opname == "LOAD_METHOD" or "NULL" in read.argrepr


def _letter(each: dis.Instruction) -> str:
    """What an instruction reads, in a letter: a constant, self, an attribute (a number, or one that tensors have)."""
    name = each.opname
    if name in {"LOAD_CONST", "LOAD_SMALL_INT", "BUILD_SLICE", "BUILD_TUPLE"}:  # none is a number of rows
        return "c"
    if name == "LOAD_GLOBAL" and each.argval in {"range", "math", "operator"}:
        return "f" if is_called(each) else "g"
    if name in {"LOAD_ATTR", "LOAD_METHOD"}:
        number = isinstance(getattr(math, each.argval, None), float)
        return "M" if is_called(each) else "P" if number else "t" if hasattr(Tensor, each.argval) else "a"
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and each.argrepr == "[]"):
        return "i"
    if name.startswith("LOAD_FAST") and each.argrepr.split(", ")[-1] == "self":
        return "s"
    return {"BINARY_OP": "o", "CALL": "C", "PRECALL": "", "PUSH_NULL": "N"}.get(name, "x")


def _catches_or_indexes(code: CodeType, *, sized: bool) -> bool:
    """Whether code goes on after errors or, where it read how many rows there are, indexes or counts by a number."""
    read = list(dis.get_instructions(code))
    for before, each in itertools.pairwise(read):
        if before.opname == "PUSH_EXC_INFO" and each.opname != "WITH_EXCEPT_START":
            return True
    settled = re.sub("s[aP]+|gP", "c", "".join(map(_letter, read)))  # no more than the module's settings
    return sized and re.search("(?<!c)i|[fg]", re.sub("(f[aMt]?|gM|g[at]N)[co]*C", "x", settled)) is not None


class _Size(int):
    """A size that notes that it was compared."""

    of: _Python

    @classmethod
    def noted(cls, found: Any, of: _Python) -> Any:
        """A whole number that notes, or sizes of which all but the last do: that one is the module's own."""
        if isinstance(found, torch.Size):
            return torch.Size([*(cls.noted(each, of) for each in found[:-1]), *found[-1:]])
        if type(found) is not int:
            return found
        made = cls(found)
        made.of = of
        return made


def _file_of(frame: FrameType | None) -> str:
    return "sys" if frame is None else str(frame.f_globals.get("__name__", ""))


def _noting(name: str, *, compares: bool) -> Callable[..., Any]:
    """A method of whole numbers that notes: what gives no size counts as a comparison, which may follow unseen."""
    compute = getattr(int, name)

    def method(self: _Size, *others: Any) -> Any:
        found = compute(self, *others)
        if not compares and found is not NotImplemented:
            return _Size.noted(found, self.of)
        if not isinstance(next(iter(others), None), Tensor):  # with a fraction, too, which goes on without
            self.of.compared.add(_file_of(sys._getframe(1)))
        return found

    return method


for _word in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "hash", "truediv", "rtruediv", "divmod"):
    setattr(_Size, f"__{_word}__", _noting(f"__{_word}__", compares=True))
for _word in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "neg", "pos"),
    *("abs", "invert", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift"),
):  # fmt: skip
    setattr(_Size, f"__{_word}__", _noting(f"__{_word}__", compares=False))

_Size.__format__ = _noting("__format__", compares=True)  # type: ignore[method-assign]
_Size.__repr__ = _noting("__repr__", compares=True)  # type: ignore[method-assign]

_NUMBERS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
_LIES = frozenset({Tensor.__len__, Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset, Tensor.data_ptr})
_HELD: tuple[Any, ...] = Tensor.shape, Tensor.ndim, Tensor.nbytes
_SIZES = frozenset({Tensor.size, Tensor.dim, Tensor.numel, torch.numel, *(each.__get__ for each in _HELD)})


class _Python(TorchFunctionMode):
    """What no operator is needed for."""

    seen = False

    def __init__(self, files: set[str]) -> None:
        super().__init__()
        self._files, self.own = files, {each for each in files if is_own(each)}
        self.compared: set[str] = set()
        self.outside: dict[str, None] = {}
        self.few: dict[str, None] = {}
        self.codes: set[CodeType] = set()
        self.sized = False
        self._lengths: dict[tuple[Any, ...], int] = {}
        self._before: Any = None

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._before = sys.getprofile()
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *raised: object) -> None:
        own = getattr(self._before, "enable", None)  # cProfile's is no function before Python 3.12
        sys.setprofile(None if own else self._before)
        if own:
            own()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _hear(self, frame: FrameType, event: str, called: Any) -> None:
        """Note a call that own code makes; what it calls of others than libraries is its own, too."""
        if event not in {"call", "c_call"}:
            return
        name = _file_of(frame)
        if name in self.own:
            of = getattr(called, "__self__", None)
            if event == "call":
                self.codes.add(frame.f_code)
            elif isinstance(of, _Size) or (isinstance(of, torch.Size) and called.__name__ == "numel"):
                self.compared.add(name)
            elif not _allowed(called):
                where = getattr(of, "__name__", type(of).__name__)
                self.outside[f"{where}.{called.__name__}".removeprefix("builtins.")] = None
        elif event == "call" and self._files and (self.own or is_own(name)):
            caller = frame.f_back
            while caller is not None and _file_of(caller).partition(".")[0] in HARMLESS:
                caller = caller.f_back
            by = _file_of(caller)
            if by in self.own and not _may_call(name):
                self.outside[f"{name}.{frame.f_code.co_name}"] = None
            elif is_own(name) and frame.f_code.co_name != "<module>" and (by in self.own or by in self._files):
                self.own.add(name)
                self.codes.add(frame.f_code)

    def _look(self, func: Any, given: list[Any], found: Any, frame: FrameType | None) -> None:
        """Note what own code asks of a tensor; where it gets more of them in another run, it may count its rows."""
        while frame is not None and self.own and _file_of(frame).startswith("torch."):
            if _file_of(frame).startswith("torch.nn.modules"):
                return
            frame = frame.f_back
        if frame is None or _file_of(frame) not in self.own:
            return
        name = func.__name__.strip("_")
        if name == "get" and func.__self__.__name__ not in _LOOKS:
            self.outside[f"Tensor.{func.__self__.__name__}"] = None
        elif given and isinstance(given[0], Tensor) and given[0].is_floating_point() and _finds_few(name, given[1:]):
            self.few[name] = None
        elif name == "view" and isinstance(given[-1], torch.dtype):
            self.few["view(dtype)"] = None
        held = [part for each in given for part in (each if isinstance(each, (tuple, list)) else (each,))]
        if any(type(each) is _Size for each in held) and not any(isinstance(each, Tensor) for each in held):
            self.compared.add(_file_of(frame))  # what is made of them goes on as a tensor
        self.sized |= func in _SIZES and type(found) is not int
        lasts = func in _SIZES and given[0].ndim > 0  # rows may have become features
        if lasts or name == "iter" or type(found) in {tuple, list}:
            length = given[0].shape[-1] if lasts else given[0].shape[0] if name == "iter" else len(found)
            place = frame.f_code, frame.f_lasti, name, id(frame.f_locals.get("self"))
            if self._lengths.setdefault(place, length) != length:
                self.compared.add(_file_of(frame))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in _NUMBERS
        if func in _LIES:
            self.compared.add(_file_of(sys._getframe(1)))
        found = func(*args, **(kwargs or {}))
        self._look(func, [*args, *(kwargs or {}).values()], found, sys._getframe(1))
        if func not in _SIZES:
            return found
        given = [*args, *(kwargs or {}).values()]
        own = isinstance(given[0], Parameter) or (len(given) > 1 and given[1] in (-1, given[0].ndim - 1))
        return found if own else _Size.noted(found, self)


class Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the code of a module asks meanwhile, in one block or several; without one, whether numbers are read.

    Attributes:
        seen: whether it read numbers of tensors.
        compared: files whose code compared sizes other than the last one, or looked at how a tensor lies.
    """

    seen = False
    _should_skip_dynamo = classmethod(lambda _: False)
    """Else torch imports its compiler for a call: 2.2 s of the 3.7 s of a first ``lz.optimize`` (Zen 4, 2026-12-01)."""

    def __init__(self, module: Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        classes = set() if module is None else {type(each) for each in module.modules()}
        forwards: list[Any] = [inspect.unwrap(each.forward) for each in classes]
        self._files = {each.__module__ for each in (*classes, *forwards)}
        self._python = _Python(self._files)
        self.compared = self._python.compared

    def __enter__(self) -> Self:
        self._eager = uncompiled()
        self._eager.__enter__()
        self._python.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._python.__exit__(*raised)
        self._eager.__exit__(None, None, None)
        self.seen |= self._python.seen

    def why(self, *, may_read: bool = False, may_compare: bool = False) -> str:
        """Why what was computed may be something else for another input or another time; empty where nothing."""
        if self.seen and not may_read:
            return READS
        if self._python.outside:
            return OUTSIDE.format(", ".join(self._python.outside))
        if not (may_compare or may_read) and not self.compared.isdisjoint(self._files | self._python.own):
            return COMPARES
        if any(_catches_or_indexes(each, sized=self._python.sized and not may_read) for each in self._python.codes):
            return COMPARES
        return LIMITS.format(", ".join(self._python.few)) if self._python.few else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.data_dependent_output in func.tags
        if torch.Tag.nondeterministic_seeded in func.tags and not func.__name__.startswith("_"):
            self._python.outside[f"torch.{func.overloadpacket.__name__}"] = None
        return func(*args, **(kwargs or {}))
