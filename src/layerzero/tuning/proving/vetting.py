"""Vetting: a kernel proves itself on this machine, class by class, in a child process, before it is trusted.

    lz.vet()                                        what is refused until it is vetted, for its operations' cases
    lz.vet("norm.rms", kernels=["mine.*"], shapes=[(512, 1024)], dtype="bfloat16")

A class is a kernel, operation, dtype, layout and the power of two of each size. The verdict is kept with the versions
of the kernel's library, of torch and of the device. Nothing of this runs in a request: only where it is asked for, in
warmup, in a tuning window, or in the background where the setting ``vet_in_background`` says so.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import LayerZeroWarning
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, class_text, home_of
from layerzero.core.operation import Operation
from layerzero.core.recipe import CallRecipe
from layerzero.engine import legality
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.ops.calls import as_shapes, case_of_shapes, facts_of
from layerzero.testing import brief
from layerzero.testing.conformance import Lines
from layerzero.testing.process import APART, child_environment, hand_over, how_it_ended
from layerzero.tuning.proving import vet_child

log = logging.getLogger("layerzero")

TIMEOUT_S = 120.0
"""How long one class may be silent before its process counts as hanging."""

BUILD_S = 600.0
"""The same for a kernel that compiles."""

DEATHS = 3
"""After so many processes that a kernel ended, its other classes are left alone: each costs a new process."""

Progress = Callable[[str], None]

_VERDICTS = {brief.PASSED: Verdict.PASSED, brief.WRONG: Verdict.WRONG, brief.RAISED: Verdict.CRASHED}


@dataclass(frozen=True, slots=True)
class Vetted:
    """What was found about a kernel and a class; ``verdict`` is None where it could not be asked, with the reason."""

    kernel_id: str
    call_class: str
    verdict: Verdict | None
    detail: str

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        verdict = None if self.verdict is None else str(self.verdict)
        return {
            "kernel_id": self.kernel_id, "call_class": self.call_class, "verdict": verdict, "detail": self.detail,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.kernel_id} for {self.call_class}: {self.verdict or 'not vetted'}: {self.detail}"


def vet(
    operation: str = "*",
    *,
    kernels: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    modules: Sequence[str] = (),
    again: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> tuple[Vetted, ...]:
    """Check kernels on classes of calls in a child process, and remember the verdicts.

    Args:
        operation: an operation, function, alias or glob.
        kernels, backends: ids, globs or libraries. With neither, what may not run before it was vetted: plugins, and
            libraries at versions that nobody tested.
        shapes: shapes of the first tensor, as :func:`layerzero.warmup` takes them; the operations' own cases if None.
        dtype: dtype of the tensors; every one that operation and kernel know if None.
        device: where; the CPU, or the current CUDA device if there is one.
        modules: modules that register kernels, imported in the child; those of entry points are found by themselves.
        again: also check classes that have a verdict.
        timeout_s: seconds of silence after which a child counts as hanging.
        progress: called with a line for each class as it ends.
    Returns: what was found. A kernel that gave a wrong result is chosen for no call any more until its library has
        another version, or until it passes again; one that crashed or hung, for no call of that class.
    Raises: KeyError for an unknown operation; ValueError for a module that does not import.
    """
    target = Device.detect(str(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    chosen = [each for each in REGISTRY.kernels(operation) if _named(each, kernels, backends, target)]
    names = set(REGISTRY.operations_named(operation))
    dtypes = None if dtype is None else [dtype_named(dtype)]
    pairs = [
        (kernel, facts)
        for kernel in chosen
        for name in kernel.operations
        if name in names
        for facts in classes(kernel, REGISTRY.operation(name), target, shapes, dtypes)
        if again or ENGINE.ledger.judgement(kernel, facts) is None
    ]
    return vet_calls(pairs, modules=modules, timeout_s=timeout_s, progress=progress)


def _named(kernel: Kernel, kernels: Sequence[str] | None, backends: Sequence[str] | None, device: Device) -> bool:
    if kernel.is_reference:
        return False
    if kernels is None and backends is None:
        return legality.untrusted(kernel, device)
    of_library = backends is None or any(names_kernel(name, kernel) for name in backends)
    return of_library and (kernels is None or any(names_kernel(name, kernel) for name in kernels))


def classes(
    kernel: Kernel,
    operation: Operation,
    device: Device,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Iterator[Facts]:
    """Facts of calls that the kernel's limits allow, one for each class, in the operation's layouts."""
    if function_of(operation.name) is None:
        return
    cases = operation.cases if shapes is None else [case_of_shapes(operation, as_shapes(each)) for each in shapes]
    seen = set()
    for case in cases:
        for dtype in dtypes or operation.tolerance:
            for layout in operation.layouts or (None,):
                if case is None:
                    continue
                facts = facts_of(operation, case, dtype, device, layout)
                text = class_text(facts)
                if text not in seen and _allowed(kernel, facts):
                    seen.add(text)
                    yield facts


def _allowed(kernel: Kernel, facts: Facts) -> bool:
    found = legality.limit_findings(kernel, facts.seen_in(kernel.layout))
    return all(finding.repair is not None for finding in found)


def vet_calls(
    calls: Iterable[tuple[Kernel, Facts]],
    *,
    modules: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
    go_on: bool = False,
) -> tuple[Vetted, ...]:
    """Check the classes of calls, each once, in as few child processes as survive; remember the verdicts.

    Args:
        go_on: where no child gets to work, say of each class that is left that it was not vetted, and why; log it.
    Raises: RuntimeError or ValueError in that case otherwise.
    """
    unique: dict[tuple[str, str], tuple[Kernel, Facts]] = {}
    for kernel, facts in calls:
        unique.setdefault((kernel.id, class_text(facts)), (kernel, facts))
    if not unique:
        return ()
    children = _Children(list(unique.values()), modules, timeout_s, progress or (lambda _: None))
    try:
        children.work()
    except (RuntimeError, ValueError) as error:
        if not go_on:
            raise
        log.warning("vetting ended early, and what was not vetted is not chosen: %s", error)
        children.give_up(f"not asked: {error}")
    finally:
        ENGINE.bump()
    return tuple(each for each in children.found if each is not None)


class _Children:
    """Starts child after child until every class has an answer."""

    def __init__(
        self, pairs: list[tuple[Kernel, Facts]], modules: Sequence[str], timeout_s: float, progress: Progress
    ) -> None:
        self.pairs, self.timeout_s, self.progress = pairs, timeout_s, progress
        self.modules = [*modules, *_homes(kernel for kernel, _ in pairs)]
        self.found: list[Vetted | None] = [None] * len(pairs)
        self.deaths: dict[str, int] = {}
        self.at = ""

    def work(self) -> None:
        """Answer every class."""
        while left := [number for number, found in enumerate(self.found) if found is None]:
            with tempfile.TemporaryFile() as words:
                self._child(left, words)
            if all(self.found[number] is None for number in left):
                raise RuntimeError("a vetting process ended without having said anything")

    def give_up(self, why: str) -> None:
        """Leave the classes that have no answer without one."""
        for number, found in enumerate(self.found):
            if found is None:
                self._keep(number, None, why)

    def _child(self, left: list[int], words: IO[bytes]) -> None:
        job = vet_child.Job([(number, self._ask(number)) for number in left], list(dict.fromkeys(self.modules)))
        command = [sys.executable, "-m", "layerzero.tuning.proving.vet_child"]
        process = subprocess.Popen(  # noqa: S603  # our own module, started by this interpreter
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env=child_environment(APART),
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            hand_over(process.stdin, msgspec.json.encode(job).decode())
            now: int | None = None
            lines = Lines(process.stdout)
            while True:
                try:
                    message = lines.get(self._patience_s(now))
                except queue.Empty:
                    process.kill()
                    self._ended(now, left, Verdict.HUNG, f"no sign of life for {self._patience_s(now):g} s")
                    return
                if message is None:
                    break
                now = self._heard(message, now)
        if now is None and not any(self.found[number] is None for number in left):
            return
        words.seek(0)
        last = words.read().decode(errors="replace").strip().splitlines()[-1:]
        how = f"it ended the process with {how_it_ended(process.returncode)}"
        self._ended(now, left, Verdict.CRASHED, ": ".join([how, *(line[:300] for line in last)]))

    def _ask(self, number: int) -> vet_child.Ask:
        kernel, facts = self.pairs[number]
        axes = facts.operation.cases[0].sizes if facts.operation.cases else {}
        sizes = {name: size for name, size in facts.sizes().items() if name in axes}
        return vet_child.Ask(kernel.id, CallRecipe.of(facts), sizes)

    def _patience_s(self, now: int | None) -> float:
        if now is None:
            return max(self.timeout_s, TIMEOUT_S)  # the start takes seconds, and is no kernel's
        return max(self.timeout_s, BUILD_S) if self.pairs[now][0].jit else self.timeout_s

    def _heard(self, message: dict[str, Any], now: int | None) -> int | None:
        if "error" in message:
            raise ValueError(message["error"])
        if "start" in message:
            self.at = ""
            return int(message["start"])
        if "at" in message:
            self.at = message["at"]
            return now
        self._keep(message["found"], _VERDICTS.get(message["state"]), message["detail"])
        return None

    def _ended(self, now: int | None, left: list[int], verdict: Verdict, how: str) -> None:
        """Blame the class that a child ended in."""
        if now is None:
            raise RuntimeError(f"a vetting process did not get to work ({len(left)} classes left): {how}")
        self._keep(now, verdict, f"{how}; it ran {self.at}" if self.at else how)
        kernel = self.pairs[now][0].id
        self.deaths[kernel] = self.deaths.get(kernel, 0) + 1
        if self.deaths[kernel] < DEATHS:
            return
        for number in left:
            if self.found[number] is None and self.pairs[number][0].id == kernel:
                self._keep(number, None, f"not asked: {DEATHS} processes died or hung in other classes")

    def _keep(self, number: int, verdict: Verdict | None, detail: str) -> None:
        kernel, facts = self.pairs[number]
        found = self.found[number] = Vetted(kernel.id, class_text(facts), verdict, detail)
        if verdict is not None:
            ENGINE.ledger.record_verdict(kernel, facts, verdict, detail)
        if verdict is Verdict.WRONG:
            text = f"{kernel.id} is not chosen any more until its library has another version: {found}"
            warnings.warn(text, LayerZeroWarning, stacklevel=2)
        self.progress(str(found))


def _homes(kernels: Iterable[Kernel]) -> Iterator[str]:
    """Modules that a child has to import to know a kernel; entry points and built-in backends it finds by itself."""
    for kernel in kernels:
        home = home_of(kernel)
        known = kernel.backend.origin == "entry_point" or home.startswith("layerzero.")
        if home and home != "__main__" and not known:
            yield home
