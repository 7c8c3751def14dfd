"""Tuning runs of a few norms with an end."""

from __future__ import annotations

import torch

import layerzero as lz
from layerzero.tuning.measurement.timing import Effort
from layerzero.tuning.measurement.tune import asked_jobs, run_jobs
from others import OTHERS

LEFT_OUT = [name for name in OTHERS if name != "inductor"]


def run(jobs, deadline=None, **more):
    given = {"effort": Effort(3, 0.0), "isolate": False, "leave_out": OTHERS, "deadline": deadline}
    return run_jobs(jobs, torch.device("cpu"), **{**given, **more})


def norms(*hiddens):
    return asked_jobs("rms_norm", [(8, hidden) for hidden in hiddens], ["float32"], "cpu")


def norm_facts(rows, hidden=8192):
    return lz.facts("rms_norm", torch.empty(rows, hidden, device="meta"), torch.empty(hidden, device="meta"))


def timed(found):
    return ["plug.rms" in {kernel.id for kernel in contest.times} for contest in found.contests]
