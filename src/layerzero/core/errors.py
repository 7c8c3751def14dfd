"""Every exception and warning that LayerZero raises on purpose.

LayerZeroError
+-- InvalidCallError (ValueError)          the caller's arguments are wrong
+-- PolicyError (ValueError)               a configuration key or value is wrong
+-- RegistrationError (ValueError)         a kernel, operation or backend is declared wrongly
|   +-- DescriptorError                    a capability descriptor is invalid or fits no kernel
+-- UnknownOperationError                  a name of no operation: a PolicyError, RegistrationError and KeyError
+-- NoKernelFoundError                     nothing legal is left to run
+-- CudaGraphUnsafeError                   a capture is open and no graph-safe kernel is legal
+-- NoCompatibleKernelPairError            a target and its draft have no kernels that fit together
+-- KernelExecutionError                   a kernel was called and failed
+-- FrozenChoiceError                      this process would not make the choices that a document has
|   +-- VersionMismatchError               ranks that agree have other versions
LayerZeroWarning (UserWarning)
+-- LayerZeroFallbackWarning               the reference ran, or a kernel failed and another took over
+-- LayerZeroPerformanceWarning            a call has to run in a slow way, and what would spare it

Errors of calls that do not fit a signature: the public name, and the argument that a misspelt one may have meant.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn, SupportsIndex, TypeVar

from msgspec.structs import replace

from layerzero.core.reasons import Reason, ReasonCode


class LayerZeroError(Exception):
    """Base of every error that LayerZero raises on purpose. Survives pickling, for process pools and data loaders."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[LayerZeroError], args: tuple[Any, ...], state: dict[str, Any]) -> LayerZeroError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


def in_short(error: BaseException) -> str:
    """The class of an error and the beginning of what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def printable(value: object) -> str:
    """Text that can be encoded: what is no Unicode, as in names of files, is written as escapes."""
    return str(value).encode("utf-8", "backslashreplace").decode()


def _listed(name: str, problems: Sequence[str]) -> str:
    """A problem behind a name, or several, each on a line of its own."""
    return f"{name}: {problems[0]}" if len(problems) == 1 else "\n  - ".join([f"{name}:", *problems])


class InvalidCallError(LayerZeroError, ValueError):
    """The caller's arguments are wrong; no kernel could make them right, so none is tried.

    Attributes:
        function: the public function or operation that was called.
        problems: one line per problem, each with what was wanted and what came.
        code: the reason code where the catalogue has one (mask together with causal, heads that do not divide).
    """

    def __init__(self, function: str, problems: Sequence[str], code: ReasonCode | None = None) -> None:
        self.function = function
        self.problems = tuple(problems)
        self.code = code
        super().__init__(f"{f'[{code}] ' if code is not None else ''}{_listed(function, problems)}")


def stays(function: str, kind: str, instead: str) -> Callable[..., NoReturn]:
    """Make the ``__reduce_ex__`` of what belongs to one process: it raises InvalidCallError with what to do instead."""

    def reduce(held: object, _protocol: SupportsIndex = 0) -> NoReturn:
        problem = f"wanted a {kind} in the process that made it, got a copy or a pickle of {held!r}; {instead}"
        raise InvalidCallError(function, [problem])

    return reduce


def refuse(function: str, problems: Sequence[str]) -> None:
    """Raise InvalidCallError if anything is wrong with a call.

    Routes of functions ask for problems themselves before they call this: each call counts on the way of a miss.
    """
    if problems:
        raise InvalidCallError(function, problems)


class PolicyError(LayerZeroError, ValueError):
    """A configuration key is unknown or its value does not fit; the message names the origin and the nearest key.

    Attributes:
        problems: what is wrong, one line each.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class RegistrationError(LayerZeroError, ValueError):
    """A kernel, operation or backend was declared in a way that cannot work."""


class UnknownOperationError(PolicyError, RegistrationError, KeyError):
    """No operation, function, alias or glob has this name, wherever it was said; the message names the nearest.

    It is a PolicyError for settings, a RegistrationError for kernels, and a KeyError for questions.
    """

    __str__ = Exception.__str__  # a KeyError's is quoted


class DescriptorError(RegistrationError):
    """A capability descriptor is invalid, or speaks of kernels that do not exist; nothing of it is used.

    Attributes:
        name: the file, or what stands for it.
        problems: one line per problem, each with the field, what was wanted and what came.
        code: of a document that is not understood; None where it speaks of kernels that do not exist.
    """

    def __init__(self, name: str, problems: Sequence[str], code: ReasonCode | None = None) -> None:
        self.name = name
        self.problems = tuple(problems)
        self.code = code
        super().__init__(f"{f'[{code}] ' if code is not None else ''}{_listed(name, problems)}")


_MOST_LISTED = 12
"""Kernels that a message lists, so that it fits a screen."""

_ELSEWHERE = {
    "for other hardware": frozenset(
        {
            *(ReasonCode.PLATFORM_MISMATCH, ReasonCode.SM_TOO_OLD, ReasonCode.SM_TOO_NEW),
            *(ReasonCode.INSTRUCTION_SET_MISMATCH, ReasonCode.GPU_GENERATION_UNSUPPORTED),
        }
    ),
    "not installed": frozenset({ReasonCode.NOT_INSTALLED}),
}
"""What kernels that no change of the call brings to run are counted by."""


class NoKernelFoundError(LayerZeroError):
    """No kernel of the operation is legal for this call.

    The message lists the kernels that this device could run, each with its first reason, and counts the others. Where a
    lock names kernels (``wanted``), it has every reason of these, and counts all others.

    Attributes:
        operation: the operation of the call.
        failures: kernel id to the reasons why it was refused, all of them.
    """

    def __init__(
        self, operation: str, failures: Mapping[str, Sequence[Reason]], hint: str = "", wanted: Sequence[str] = ()
    ) -> None:
        self.operation = operation
        self.failures = {kernel_id: tuple(reasons) for kernel_id, reasons in failures.items()}
        listed, counts = [], dict.fromkeys(("refused as well", *_ELSEWHERE), 0)
        for kernel_id, reasons in self.failures.items():
            codes = {reason.code for reason in reasons}
            why = next((each for each, those in _ELSEWHERE.items() if codes & those), None)
            if kernel_id in wanted:
                listed += [f"  {kernel_id}: [{reason.code}] {reason.message}" for reason in reasons]
            elif why is not None or wanted or len(listed) == _MOST_LISTED:
                counts[why or "refused as well"] += 1
            else:
                also = ", ".join(f"[{reason.code}]" for reason in reasons[1:])
                more = f" (also {also})" if also else ""
                listed += [f"  {kernel_id}: [{reason.code}] {reason.message}{more}" for reason in reasons[:1]]
        lines = [f"no kernel of {operation} is legal for this call", *listed]
        others = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
        lines += [f"  others: {others}"] if others else []
        lines += [f"  next step: {hint}"] if hint else []
        lines.append(f"  every reason: `layerzero explain {operation} --shape ...`, or this error's `failures`")
        super().__init__("\n".join(lines))


class NotPreparedError(InvalidCallError):
    """A kernel keeps something on a handle that it cannot make of it, or may not in the CUDA graph capture now open.

    Nothing was launched yet: another kernel may run, and where none is left, the caller reads what to do before.
    """


class CudaGraphUnsafeError(LayerZeroError):
    """A CUDA graph capture is open and every legal kernel would spoil it.

    Attributes:
        operation: the operation of the call.
        excluded: ids of the kernels that would be legal outside a capture.
        reasons: why a capture may not have one, where more is known than that it says so itself.
    """

    def __init__(self, operation: str, excluded: Sequence[str], reasons: Mapping[str, Reason] | None = None) -> None:
        self.operation = operation
        self.excluded = tuple(excluded)
        self.reasons = dict(reasons or {})
        names = ", ".join(excluded) or "none installed"
        super().__init__(
            f"{operation}: a CUDA graph is being captured and no graph-safe kernel is ready; "
            f"not graph-safe or not ready: {names}. Call it once with these shapes before the capture."
            + "".join(f"\n  {kernel}: {replace(reason, hint='')}" for kernel, reason in self.reasons.items())
            + "".join(f"\n  next step: {hint}" for hint in dict.fromkeys(each.hint for each in self.reasons.values()))
        )


class NoCompatibleKernelPairError(LayerZeroError):
    """A target and its draft have no kernels that fit together, or break a rule of ranks; the message says each.

    Attributes:
        reasons: all of them.
    """

    def __init__(self, reasons: Sequence[Reason]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(_listed("speculative_pair", [str(each) for each in reasons]))


class KernelExecutionError(LayerZeroError):
    """A kernel failed while running, and nothing else may run in its place; the cause is chained.

    Attributes:
        kernel_id: the kernel that failed.
        operation: the operation it was running.
    """

    def __init__(self, kernel_id: str, operation: str, why_no_fallback: str) -> None:
        self.kernel_id = kernel_id
        self.operation = operation
        super().__init__(f"{kernel_id} failed in {operation}; nothing ran in its place because {why_no_fallback}")


class IsolatedKernelError(LayerZeroError):
    """A kernel raised, hung or ended the process of its own that it ran in; the caller's tensors are as they were.

    The message has the error's type and text, or the signal and the last words of the process.
    """


class FrozenChoiceError(LayerZeroError):
    """A document of frozen choices is damaged, or this process would not make them; nothing was frozen.

    Attributes:
        name: the file, or what stands for it.
        problems: one line for each difference, with what was wanted and what came.
    """

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        self.name = name
        self.problems = tuple(problems)
        super().__init__(_listed(name, problems))


class VersionMismatchError(FrozenChoiceError):
    """Ranks that agree differ in versions or kernels, and in nothing else; ``on_version_mismatch`` is ``error``."""


class LayerZeroWarning(UserWarning):
    """Base of every warning that LayerZero issues."""


class LayerZeroFallbackWarning(LayerZeroWarning):
    """The slow reference runs, or a kernel failed and another one took its place."""


class LayerZeroPerformanceWarning(LayerZeroWarning):
    """A call has to run in a slower way than its kernel could, because of its sizes."""


_Init = TypeVar("_Init", bound=Callable[..., None])


def misfit(
    name: str,
    error: TypeError,
    passed: Iterable[str],
    known: Iterable[str],
    renamed: Mapping[str, str] = MappingProxyType({}),
    lacking: str = "",
) -> TypeError:
    """The error to raise in place of Python's own, by the names of a call, those of the signature and former ones.

    ``lacking`` says what the arguments are that the call leaves out.
    """
    known = list(known)
    stranger = next((each for each in passed if each not in known), None)
    if stranger is None:
        return TypeError(f"{name}: {error}{lacking}")
    if stranger in renamed:
        return TypeError(f"{name}: got an unexpected keyword argument {stranger!r}; it is {renamed[stranger]!r} now")
    wanted = ", ".join(each for each in known if each != "self")
    hint = meant(stranger, known) or f"; wanted {wanted}"
    return TypeError(f"{name}: got an unexpected keyword argument {stranger!r}{hint}")


ELSEWHERE: dict[str, tuple[str, ...]] = {}
"""Names that other libraries have for arguments, and those of ours that mean the same; the families in ``ops/`` say."""

NEEDLESS: dict[str, tuple[str, str]] = {}
"""The same of names for which nothing stands here: an argument of the functions that are meant, and what to do."""


def meant(stranger: str, known: Sequence[str]) -> str:
    """Which of these arguments a foreign or misspelt name means, as the end of a message; empty if that is not sure.

    A guess that is only near may be of another meaning: ``softmax_scale`` is no misspelt ``softcap``.
    """
    ours = next((each for each in ELSEWHERE.get(stranger, ()) if each in known), None)
    beside, what_to_do = NEEDLESS.get(stranger, ("", ""))
    if ours is None and beside in known:
        return f"; {what_to_do}"
    return f"; did you mean {ours!r}?" if ours is not None else did_you_mean(stranger, known, _SURE)


_SHORT, _SURE = 4, 0.8
"""Letters of a word of which a misspelt one has few left: ``epz`` has two thirds in common with ``eps``. And the part
in common from which a word is another one misspelt, whatever it begins with: rope is no misspelt nope."""


def did_you_mean(word: str, known: Iterable[str], least: float | None = None) -> str:
    """Name the closest known word, as the end of an error message; empty if nothing is close."""
    if least is None:
        least = 0.5 if len(word) <= _SHORT else 0.7  # at a half, mine.own would be mlp.linear.quant
    for each in get_close_matches(word, known, n=3, cutoff=least):
        if each[:1].lower() == word[:1].lower() or SequenceMatcher(None, each, word).ratio() >= _SURE:
            return f"; did you mean {each!r}?"
    return ""


def public(name: str) -> Callable[[_Init], _Init]:
    """Let a constructor say its public name where a call does not fit it, whatever class it is written in."""

    def of(init: _Init) -> _Init:
        @functools.wraps(init)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                init(self, *args, **kwargs)
            except TypeError:
                bound(name, init, (self, *args), kwargs)
                raise

        return made  # type: ignore[return-value]  # the same signature

    return of


def bound(name: str, of: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults filled in. Raises: TypeError with the public name for a misfit."""
    signature = inspect.signature(of)
    try:
        found = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise misfit(name, error, kwargs, signature.parameters) from None
    found.apply_defaults()
    return dict(found.arguments)


Made = tuple[dict[str, Any], tuple[str, ...]]
"""The arguments of the public function, and notes about what of them is not as the caller gave it."""


@dataclass(frozen=True, slots=True)
class DropIn:
    """What questions about such a function need to know.

    Attributes:
        name: what it is called.
        function: name of the public function that it calls.
        home: the module that has it, which is imported on first use.
        library: whose function it stands for, and which runs the calls that the public one does not take.
        call: from all its arguments, and the type of device in question (empty for that of the tensors), to the call
            that it makes; InvalidCallError with the reason and what to do where it makes none.
        instead: the call of the public function that means the same for tensors as they are.
    """

    name: str
    function: str
    home: str
    library: str
    call: Callable[[Mapping[str, Any], str], Made]
    instead: str
