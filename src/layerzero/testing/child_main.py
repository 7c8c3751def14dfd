"""``python -P -m layerzero.testing.child_main WORKER PARENT``: a process that may die of the jobs that it does.

``WORKER`` is a module with ``work(job: T, tell: Tell)``, where ``T`` is a msgspec type; ``PARENT`` is the process that
asks. Jobs come on stdin and messages leave on what was stdout, one JSON document a line;
:mod:`layerzero.testing.children` has the other end. The last message before the process ended says what it died of.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NoReturn

import msgspec

from layerzero.core.errors import printable

LOST = 17
"""The exit code of a process that can do no more, as after a device error that stays."""

_PR_SET_PDEATHSIG = 1


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a child says.

    Attributes:
        kind: it wants a job, and is done with the one before; a step begins, and from now on its kernel is to blame;
            what is about to run; what the step found; that the jobs make no sense.
        text: the step's name, what runs, or why.
        value: what was found, in plain values.
        seconds: how long the step may be silent; 0 for as long as the job says.
        more: whether other steps of the job follow.
    """

    kind: Literal["wants", "begins", "runs", "found", "refused"]
    text: str = ""
    value: Any = None
    seconds: float = 0.0
    more: bool = False


class Tell:
    """The way back to the parent."""

    def __init__(self, say: Callable[[Message], None]) -> None:
        self.say = say

    def begins(self, step: str = "", seconds: float | None = None) -> None:
        """Say that a step begins, and how long it may be silent where that is not what the job says."""
        self.say(Message("begins", step, seconds=seconds or 0.0))

    def runs(self, text: str) -> None:
        self.say(Message("runs", text))

    def found(self, value: Any, *, more: bool = False) -> None:
        """Say what was found: the end of the job unless there is more."""
        self.say(Message("found", value=value, more=more))

    def refused(self, why: str) -> None:
        """Say that this job makes no sense, and neither would the others."""
        self.say(Message("refused", why))

    def leave(self, why: str) -> NoReturn:
        """End this process, which can do no more; the step that runs is to blame."""
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
        os._exit(LOST)


def encoded(message: Message) -> bytes:
    """A message as JSON, whatever an error says of names of files."""
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return msgspec.json.encode(_readable(msgspec.to_builtins(message)))


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _readable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_readable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def end_with(parent: int) -> None:
    """Have the system end this process when its parent ends, whatever runs then; end now if that is past.

    A parent of 0 is none that it can see, as from a container.
    """
    if not parent:
        return
    if sys.platform == "linux":  # elsewhere the next message, or the end of the jobs, ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def jobs_of(worker: ModuleType) -> msgspec.json.Decoder[Any]:
    """A decoder of the jobs that a worker does, by the annotation of what ``work`` takes first."""
    job, _ = inspect.signature(worker.work, eval_str=True).parameters.values()
    return msgspec.json.Decoder(job.annotation)


def main(worker: str, parent: int) -> None:
    """Do jobs until there are none."""
    end_with(parent)
    jobs, messages = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print, from Python or from C, is no message
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # and what they read is no job
    warnings.simplefilter("ignore")  # they are for a call's user, not for this process

    def say(message: Message) -> None:
        try:
            messages.write(encoded(message) + b"\n")
            messages.flush()
        except BrokenPipeError:  # the parent is gone
            os._exit(0)

    gc.disable()  # torch and what it needs are no garbage: to look through them took a quarter of a child's start
    module = importlib.import_module(worker)
    gc.freeze()
    gc.enable()
    decoder = jobs_of(module)
    say(Message("wants"))
    for line in jobs:
        module.work(decoder.decode(line), Tell(say))
        say(Message("wants"))
    gc.freeze()  # nor does its end look


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
