"""Processes that run one script as ranks of gloo; several files of tests start them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

RANKS = """
import gc, os, sys, torch.distributed.tensor
gc.freeze()
folder, script, case, ranks = sys.argv[1:]
children = []
for rank in range(int(ranks)):
    if not (child := os.fork()):
        break
    children.append(child)
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
os.environ["LAYERZERO_CACHE_DIR"] = f"{folder}/cache{rank}"
sys.argv = ["-c", str(rank), f"{folder}/store", case, ranks]
exec(compile(script, f"rank {rank}", "exec"), {"__name__": "__main__"})
"""
"""One process imports torch and what compares, for 2 s; a rank is a fork of it that has yet to import LayerZero."""


def two_ranks(folder, script, case, ranks=2):
    """What two ranks, or more, print, split at ``|``; the script gets rank, store, case and their number.

    No rank outlives this.
    """
    command = [sys.executable, "-c", RANKS, str(folder), script, case, str(ranks)]
    with subprocess.Popen(command, start_new_session=True) as started:
        try:
            ended = started.wait(timeout=300)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
    said = [[(folder / f"{name}{rank}").read_text() for name in ("out", "err")] for rank in range(ranks)]
    assert ended == 0, said
    outs = [re.sub(r"(?m)^\[Gloo\] .*\n", "", out) for out, _ in said]  # torch 2.10 prints it there
    return [out.strip().split("|") for out in outs]
