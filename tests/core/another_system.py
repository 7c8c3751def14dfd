"""Runs a call, a command and a model as on a system without POSIX: ``python another_system.py win32 doctor``."""

# what torch and the libraries of commands need of this system, before it is gone
import importlib.metadata
import io
import multiprocessing
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request

import rich.progress
import rich.table
import torch
import typer

NEEDED = (importlib.metadata, multiprocessing, rich, sqlite3, subprocess, tempfile, typer, urllib)
MODULES = ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty")
FUNCTIONS = (
    *("chown", "fchmod", "fork", "geteuid", "getegid", "getloadavg", "getuid", "killpg", "mkfifo", "nice", "pread"),
    *("pwrite", "register_at_fork", "sched_getaffinity", "setsid", "statvfs", "sysconf", "uname"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK"),
)
SIGNALS = ("SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGSTOP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "setitimer")


def without_files_of_linux(path, *args, opened=io.open, **kwargs):
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "no such file on this system", str(path))
    return opened(path, *args, **kwargs)


def main(system, *command):
    exists = pathlib.Path.exists
    pathlib.Path.exists = lambda path: not str(path).startswith(("/proc/", "/sys/")) and exists(path)
    io.open = without_files_of_linux
    sys.modules.update(dict.fromkeys(MODULES))
    for module, names in ((os, FUNCTIONS), (signal, SIGNALS)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = system

    import layerzero as lz

    x, query = torch.randn(4, 64), torch.randn(1, 8, 4, 64)
    torch.testing.assert_close(lz.rms_norm(x, torch.ones(64)), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
    assert lz.attention(query, query, query, layout="BSHD").shape == query.shape
    layers = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)).eval()
    with torch.inference_mode():
        wanted, made = layers(x), lz.optimize(layers)
        torch.testing.assert_close(getattr(made, "model", layers)(x), wanted)
    place = pathlib.Path(tempfile.mkdtemp()) / "choices.json"
    frozen = lz.freeze()
    frozen.write(place)
    lz.thaw()
    assert type(frozen).load(place) == frozen

    from layerzero.cli.app import main as run

    sys.argv = ["layerzero", *command]
    run()


if __name__ == "__main__":
    main(*sys.argv[1:])
