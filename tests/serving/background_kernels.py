"""Kernels that compile, for children: what they build is a file in a folder that the environment names."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import torch

import layerzero as lz


def folder() -> Path:
    return Path(os.environ["BACKGROUND_KERNELS"])


def is_built(facts) -> bool:
    return (folder() / f"{facts.size('hidden')}.so").is_file()


def load(facts):
    name, how = f"{facts.size('hidden')}.so", os.environ.get("BACKGROUND_KERNELS_DO", "")
    with (folder() / "log").open("a") as told:
        told.write(f"{os.getpid()} {'loads' if is_built(facts) else 'builds'} {name}\n")
    if not is_built(facts):
        if how == "raise":
            raise RuntimeError("\n".join(["many lines"] * 40 + ["ninja: no such compiler"]))
        if how == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "lack room":
            raise OSError(errno.ENOSPC, "No space left on device")
        if how != "keep nothing":
            (folder() / name).write_text("compiled")

    def rms_norm(input, weight, *, eps):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    return rms_norm


KERNEL = lz.Kernel(
    id="background.rms_norm",
    operations=("norm.rms",),
    backend=lz.Backend("background", "files for artefacts", origin="code"),
    load=load,
    accepts=("eps",),
    jit=True,
    build_key=lambda facts: facts.size("hidden"),
    prebuilt=is_built,
    priority=99,
)

lz.register_backend([KERNEL])
