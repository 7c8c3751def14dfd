"""Run in a child process what never ran on this machine, so that whoever measures it afterwards survives it.

One child answers many questions, since most of its time goes into importing torch, loading libraries and compiling; a
library's kernels go to the same child. Where one ends it, a new child goes on with the next. Results are not compared
here: whoever measures does that, and once is enough.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, class_text, home_of
from layerzero.core.recipe import CallRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.first_run import marked
from layerzero.testing.process import APART, child_environment, ended_how, hand_over
from layerzero.tuning.proving import child
from layerzero.tuning.proving.confirm import TIMEOUT_S
from layerzero.tuning.proving.rehearsal_child import Line

_LOOK_S = 0.05
"""How often the answers are looked at."""

_MOST_CHILDREN = 6
_CORES_A_CHILD = 2
"""A child imports torch, and the compilers that it starts have threads of their own."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a child found about a kernel and a call; ``verdict`` is None where it could not be asked."""

    kernel: Kernel
    facts: Facts
    verdict: Verdict | None
    detail: str

    @property
    def guilty(self) -> bool:
        """Whether the kernel must not run calls of this class here."""
        return self.verdict not in (None, Verdict.PASSED)


def is_new(kernel: Kernel, facts: Facts) -> bool:
    """Whether a kernel never ran a call's class on this machine, as far as the ledger remembers machines.

    torch's own kernels are as trusted as torch is. Without a folder to remember in, nothing counts as new.
    """
    if not marked(kernel) or ENGINE.ledger.verdict(kernel, facts) is not None:
        return False
    return ENGINE.ledger.unproved(kernel, facts)


def rehearse(
    pairs: Sequence[tuple[Kernel, Facts]], *, modules: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> list[Rehearsed]:
    """Run each kernel on a call like its own in child processes; remember who was wrong, crashed or hung.

    Args:
        modules: modules that register kernels, imported in the child.
        timeout_s: seconds that one kernel may take, loading and compiling included.
    """
    classes = {(kernel.id, class_text(facts)): (kernel, facts) for kernel, facts in pairs}
    shares = _shares(list(classes.values()), max(1, min(_MOST_CHILDREN, (os.cpu_count() or 1) // _CORES_A_CHILD)))
    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        done = pool.map(lambda share: _answered(share, modules, timeout_s), shares)
        found = [each for answers in done for each in answers]
    for each in found:
        if each.guilty and each.verdict is not None:
            ENGINE.ledger.record_verdict(each.kernel, each.facts, each.verdict)
    if any(each.guilty for each in found):
        ENGINE.bump()
    return found


def _shares(pairs: Sequence[tuple[Kernel, Facts]], count: int) -> list[list[tuple[Kernel, Facts]]]:
    """One share for each child, as even as they get with every library's kernels in one."""
    libraries: dict[str, list[tuple[Kernel, Facts]]] = defaultdict(list)
    for kernel, facts in pairs:
        libraries[kernel.source].append((kernel, facts))
    shares: list[list[tuple[Kernel, Facts]]] = [[] for _ in range(count)]
    for each in sorted(libraries.values(), key=len, reverse=True):
        min(shares, key=len).extend(each)
    return [share for share in shares if share]


def _answered(pairs: Sequence[tuple[Kernel, Facts]], modules: Sequence[str], timeout_s: float) -> list[Rehearsed]:
    """What is found about a share, by as many children as it takes, one after another."""
    left, found = list(pairs), []
    while left:
        answers = _asked([_question(*pair, modules) for pair in left], timeout_s)
        for pair, (verdict, detail) in zip(left, answers, strict=False):
            found.append(Rehearsed(*pair, verdict, detail))
        left = left[len(answers) :]
    return found


def _question(kernel: Kernel, facts: Facts, modules: Sequence[str]) -> child.Question:
    home = home_of(kernel)
    own = [home] if home and home != "__main__" and not home.startswith("layerzero.") else []
    return child.Question(kernel.id, CallRecipe.of(facts), [*modules, *own], compare=False)


def _asked(questions: Sequence[child.Question], timeout_s: float) -> list[tuple[Verdict | None, str]]:
    """The answers of one child: at least one, all of them if nothing ended it."""
    with tempfile.TemporaryDirectory(prefix="layerzero-") as folder:
        answers, errors = Path(folder) / "answers", Path(folder) / "errors"
        answers.touch()
        command = [sys.executable, "-m", "layerzero.tuning.proving.rehearsal_child", str(answers)]
        with errors.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=child_environment(APART)
            )
            assert process.stdin is not None
            hand_over(process.stdin, msgspec.json.encode(list(questions)))
            hung = _watched(process, answers, timeout_s)
        lines = _lines(answers)
        said = errors.read_bytes()
    finished = [line for line in lines if line.state != child.RUNNING]
    replies = [_judged(line) for line in finished]
    if len(replies) == len(questions):
        return replies
    if len(lines) == len(finished):  # it ended between two, or before the first
        text = f"the child process did not answer: {ended_how(process.returncode, said)}"
        return [*replies, (None, f"nothing was said within {timeout_s:g} s" if hung else text)]
    if hung:
        return [*replies, (Verdict.HUNG, f"it did not end within {timeout_s:g} s")]
    return [*replies, (Verdict.CRASHED, ended_how(process.returncode, said))]


def _watched(process: subprocess.Popen[bytes], answers: Path, timeout_s: float) -> bool:
    """Wait for the end of a child; kill it, and say so, where it says nothing new for too long."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        now = answers.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > timeout_s:
            process.kill()
            process.wait()
            return True
        time.sleep(_LOOK_S)
    return False


def _lines(answers: Path) -> list[Line]:
    """What was said; each question's kernel as running only if nothing followed."""
    last: dict[int, Line] = {}
    for text in answers.read_bytes().splitlines():
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.DecodeError:  # the last line, half written
            break
        last[line.number] = line
    return [last[number] for number in sorted(last)]


def _judged(line: Line) -> tuple[Verdict | None, str]:
    return (None if line.state == child.UNKNOWN else Verdict(line.state)), line.detail
