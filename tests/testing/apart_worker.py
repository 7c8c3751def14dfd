"""A worker whose jobs end it in every way that kernels were seen to end a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading

import msgspec

if at_import := os.environ.get("APART_AT_IMPORT"):
    sys.stderr.write("some warning\nno such library\n")
    sys.stderr.flush()
    os._exit(3) if at_import == "exit" else threading.Event().wait()


class Job(msgspec.Struct):
    act: str
    done: list[str] = []


def work(job: Job, tell):
    if job.act == "dies unbegun":
        os._exit(4)
    if job.act == "refused":
        tell.refused("that makes no sense")
        return
    if job.act == "steps":
        for step in ("one", "two", "three"):
            if step not in job.done:
                tell.begins(step)
                if step == "two":
                    os.abort()
                tell.found(step, more=True)
        return
    tell.begins("the step")
    tell.runs("the call")
    ACTS.get(job.act, lambda: None)()
    tell.found({"act": job.act, "pid": os.getpid(), "path": sys.path})
    if job.act == "dies between two":
        os._exit(5)


def hold(code):
    """Say through a named pipe that this runs; the pipe closes when the last process that has it ends."""
    descriptor = os.open(os.environ["APART_PIPE"], os.O_WRONLY)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    code(descriptor)


def with_a_child(descriptor):
    subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    threading.Event().wait()


def print_garbage():
    sys.stdout.write("a library's banner\n")
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, b'\xff\x00 {"kind": "no such"}\n{"kind": "found", \n[]\n\n')


BAD_ALLOC = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"

ACTS = {
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: (sys.stderr.write("the last word\n"), sys.stderr.flush(), os._exit(3)),
    "bad_alloc": lambda: (sys.stderr.write(BAD_ALLOC), sys.stderr.flush(), os.abort()),
    "raises": lambda: 1 / 0,
    "hang": lambda: threading.Event().wait(),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "garbage": print_garbage,
    "reads": lambda: sys.stdin.read(),
    "meets a writer": lambda: os.close(os.open(os.environ["APART_MEETING"], os.O_RDONLY)),
    "meets a reader": lambda: os.close(os.open(os.environ["APART_MEETING"], os.O_WRONLY)),
    "hold": lambda: hold(with_a_child),
    "hold the lock": lambda: hold(lambda _: ctypes.PyDLL(None).pause()),
}
