"""Put kernels against their operations' references: all that they declare, at its boundaries, in other processes.

    from layerzero.testing import conformance

    report = conformance.run(kernels=["mine.*"])
    print(report)
    assert report.ok and report.passed

Kernels run in a child process, so that one that dies or hangs is a finding: the check that it died in is recorded, and
another child goes on after it.
"""

from __future__ import annotations

import functools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import torch

from layerzero.core.device import Device
from layerzero.testing import child
from layerzero.testing.process import child_environment, hand_over, how_it_ended
from layerzero.testing.report import ConformanceReport, KernelReport, Result

__all__ = ["ConformanceReport", "KernelReport", "Result", "run"]

SECONDS = 60.0
"""How long a check may be silent before its process counts as hanging."""

CALLS = 20
"""Random calls of each operation and dtype."""

DEATHS = 3
"""After so many processes that died or hung of one kernel, its other checks are given up: each costs a new process."""

Progress = Callable[[str], None]


def run(
    kernels: Sequence[str] | None = None,
    operation: str = "*",
    *,
    backends: Sequence[str] | None = None,
    device: str | None = None,
    seed: int = 0,
    calls: int = CALLS,
    modules: Sequence[str] = (),
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> ConformanceReport:
    """Check kernels against the references of their operations.

    Args:
        kernels: ids, globs or libraries; every kernel if None.
        operation: an operation, function, alias or glob.
        backends: libraries; those of their kernels that ``kernels`` names.
        device: where the tensors lie; ``cuda`` where there is one, else ``cpu``.
        seed: draws the random calls; the same seed draws the same.
        calls: random calls of each operation and dtype.
        modules: modules to import first, whose import registers kernels.
        seconds: how long a check may be silent before it counts as hanging.
        progress: called with a line for each kernel and operation as its checks begin.
    Returns: the report. A kernel that only this process knows, registered by decorator, is checked in this process, and
        the report says so.
    Raises: ValueError for a module that does not import; KeyError for an unknown operation; RuntimeError if a process
        does not even start.
    """
    started = time.perf_counter()
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = ConformanceReport(seed, target)
    job: dict[str, Any] = {
        "kernels": None if kernels is None else list(kernels),
        "backends": None if backends is None else list(backends),
        "operation": operation,
        "device": target,
        "seed": seed,
        "calls": calls,
        "modules": list(modules),
        "done": [],  # (kernel, operation, check)
        "finished": [],  # libraries
        "given_up": [],  # kernels
    }
    _Parent(report, job, seconds, progress or (lambda _: None)).work()
    if not modules:
        _in_this_process(report, job)
    report.seconds = time.perf_counter() - started
    return report


def _in_this_process(report: ConformanceReport, job: dict[str, Any]) -> None:
    """Check what no child could see."""
    seen = {each.kernel_id for each in report.kernels}
    device = Device.detect(job["device"])
    for kernel in child.selected(job):
        if kernel.id in seen:
            continue
        mine = child.described(kernel, job["operation"], device)
        mine.note = "registered in this process only, and so checked in it: a crash or a hang would have ended it"
        report.kernels.append(mine)
        if not mine.refused:
            child.play([(kernel, mine)], job, functools.partial(_keep, mine))


def _keep(report: KernelReport, message: dict[str, Any]) -> None:
    if "result" in message and message["result"]["status"] != "nothing":
        report.results.append(Result(**message["result"]))


class _Parent:
    """Starts children until every check is done, and records what each of them died of."""

    def __init__(self, report: ConformanceReport, job: dict[str, Any], seconds: float, progress: Progress) -> None:
        self.report, self.job, self.seconds, self.progress = report, job, seconds, progress
        self.reports: dict[str, KernelReport] = {}
        self.check: list[str] | None = None
        self.started = 0.0
        self.at = ""
        self.told: tuple[str, str] | None = None

    def work(self) -> None:
        """Run child after child; each does the rest of one library."""
        while True:
            before = (len(self.job["done"]), len(self.job["finished"]))
            with tempfile.TemporaryFile() as words:
                finished = self._child(words)
            if finished:
                return
            if (len(self.job["done"]), len(self.job["finished"])) == before:
                raise RuntimeError("a conformance process ended without having done anything")

    def _child(self, words: IO[bytes]) -> bool:
        """One child; whether it had nothing left to do."""
        command = [sys.executable, "-m", "layerzero.testing.child"]
        process = subprocess.Popen(  # noqa: S603  # our own module, started by this interpreter
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, env=child_environment(), text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.check = None
        limit = max(self.seconds, SECONDS)  # the start takes seconds, and is no kernel's
        with process:
            hand_over(process.stdin, json.dumps(self.job))
            lines = Lines(process.stdout)
            while True:
                try:
                    message = lines.get(limit)
                except queue.Empty:
                    process.kill()
                    self._ended("hung", f"no sign of life for {limit:.0f} s; the process was killed")
                    return False
                if message is None:
                    break
                if "finished" in message:
                    self.job["finished"] += message["finished"]
                    return not message["more"]
                limit = self._heard(message) or limit
        if process.returncode == child.CONTEXT_LOST:
            mine = self.reports[self.job["done"][-1][0]]
            if mine.counts["died"] + mine.counts["hung"] == DEATHS:
                self._give_up(mine, self.job["done"][-1][1])
            return False
        words.seek(0)
        last = words.read().decode(errors="replace").strip().splitlines()[-1:]
        self._ended("died", f"died with {how_it_ended(process.returncode)}", *last)
        return False

    def _heard(self, message: dict[str, Any]) -> float | None:
        """Take in one message; the time that the next one may take, None if that does not change."""
        if "error" in message:
            raise ValueError(message["error"])
        if "kernels" in message and not self.reports:
            for each in message["kernels"]:
                each["operations"] = tuple(each["operations"])
                self.reports[each["kernel_id"]] = KernelReport(**each)
            self.report.kernels.extend(self.reports.values())
        elif "start" in message:
            self.check, self.at, self.started = message["start"], "", time.perf_counter()
            if self.told != tuple(self.check[:2]):
                self.told = (self.check[0], self.check[1])
                self.progress(f"{self.check[0]}: {self.check[1]}")
            return message["seconds"] or self.seconds
        elif "at" in message:
            self.at = message["at"]
        elif "result" in message:
            self.job["done"].append(self.check)
            _keep(self.reports[message["result"]["kernel_id"]], message)
            self.check = None
            return max(self.seconds, SECONDS)  # what lies between checks is no kernel's
        return None

    def _ended(self, status: str, how: str, *words: str) -> None:
        """Record the check in which a child ended; beyond a limit that only shows that the limit is needed."""
        if self.check is None:
            raise RuntimeError(f"a conformance process {how} outside of any check: {' '.join(words) or 'no message'}")
        kernel_id, operation, name = self.check
        message = f"{how} during {name!r}" + (f", {self.at}" if self.at else "")
        message += f" ({words[0][:200]})" if words else ""
        mine = self.reports[kernel_id]
        if name.startswith("beyond "):
            status, message = "needed", message.replace("died with", "dies with", 1)
        seconds = time.perf_counter() - self.started
        mine.results.append(Result(kernel_id, operation, name, status, message, seconds))
        self.job["done"].append(self.check)
        if mine.counts["died"] + mine.counts["hung"] == DEATHS:
            self._give_up(mine, operation)
        self.check = None

    def _give_up(self, mine: KernelReport, operation: str) -> None:
        self.job["given_up"].append(mine.kernel_id)
        why = f"given up after {DEATHS} processes that died or hung"
        mine.results.append(Result(mine.kernel_id, operation, "every other check", "not tried", why))


class Lines:
    """Lines of a stream as they come, read in a thread of their own, so that waiting for one can end."""

    def __init__(self, stream: IO[str]) -> None:
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for message in _parsed(stream):
            self._queue.put(message)
        self._queue.put(None)

    def get(self, seconds: float) -> dict[str, Any] | None:
        """The next message, None at the end. Raises: queue.Empty if none comes in time."""
        return self._queue.get(timeout=seconds)


def _parsed(stream: IO[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        try:
            yield json.loads(line)
        except ValueError:  # the process died in the middle of a line: what it was at was told before
            return
