"""Run every suspect in a child process of its own, and remember what was found."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from layerzero.core.ledger import Suspect, Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.testing.process import APART, child_environment, ended_how, last_line
from layerzero.tuning.proving import child

TIMEOUT_S = 120.0
"""How long a child may take before it counts as hanging; importing torch and compiling a kernel are part of it."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a child found about a suspect; ``verdict`` is None where it could not be run, and it stays a suspect."""

    kernel_id: str
    call_class: str
    verdict: Verdict | None
    detail: str

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        verdict = "unknown" if self.verdict is None else str(self.verdict)
        return {
            "kernel_id": self.kernel_id, "call_class": self.call_class, "verdict": verdict, "detail": self.detail,
        }  # fmt: skip

    def __str__(self) -> str:
        verdict = "still a suspect" if self.verdict is None else str(self.verdict)
        return f"{self.kernel_id} for {self.call_class}: {verdict}: {self.detail}"


def confirm_suspects(
    *, modules: Sequence[str] = (), again: bool = False, timeout_s: float = TIMEOUT_S
) -> tuple[Confirmation, ...]:
    """Run every suspect in a child process, with blocking launches, and compare its results with the reference's.

    One that passes may be chosen again. One that is wrong, crashes or hangs is banned, for calls with sizes like these
    and until its library or torch has another version.

    Args:
        modules: modules that register kernels, imported in the child; those of entry points are found by themselves.
        again: run the banned as well, as after a repair that changed no version.
        timeout_s: seconds after which a child counts as hanging.
    """
    found = []
    for suspect in ENGINE.ledger.suspects():
        if suspect.verdict is None or again:
            confirmation = _confirm(suspect, modules, timeout_s)
            if confirmation.verdict is not None:
                ENGINE.ledger.settle(suspect, confirmation.verdict, confirmation.detail)
            found.append(confirmation)
    if found:
        ENGINE.bump()
    return tuple(found)


def _confirm(suspect: Suspect, modules: Sequence[str], timeout_s: float) -> Confirmation:
    named = [*modules]
    if suspect.module and suspect.module != "__main__" and not suspect.module.startswith("layerzero."):
        named.append(suspect.module)
    question = msgspec.json.encode(child.Question(suspect.kernel_id, suspect.call, named))
    with tempfile.TemporaryDirectory(prefix="layerzero-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "layerzero.tuning.proving.child", str(answer)]
        try:
            ended = subprocess.run(  # noqa: S603  # our own interpreter and module
                command,
                input=question,
                env=child_environment(APART),
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            reply, ended = _reply(answer), None
        else:
            reply = _reply(answer)
    verdict, detail = _judged(reply, ended, timeout_s)
    return Confirmation(suspect.kernel_id, suspect.call_class, verdict, detail)


def _reply(answer: Path) -> child.Reply | None:
    try:
        return msgspec.json.decode(answer.read_bytes(), type=child.Reply)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _judged(
    reply: child.Reply | None, ended: subprocess.CompletedProcess[bytes] | None, timeout_s: float
) -> tuple[Verdict | None, str]:
    """What the answer, or its absence, means."""
    if ended is None:
        started = reply is not None and reply.state == child.RUNNING
        text = f"it did not end within {timeout_s:g} s"
        return (Verdict.HUNG, text) if started else (None, f"the child process did not start within {timeout_s:g} s")
    if reply is None:
        return None, f"the child process did not start: {last_line(ended.stderr)}"
    if reply.state == child.RUNNING:
        return Verdict.CRASHED, ended_how(ended.returncode, ended.stderr)
    if reply.state == child.UNKNOWN:
        return None, reply.detail
    return Verdict(reply.state), reply.detail
