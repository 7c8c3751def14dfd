"""What a user of a CPU gets without a command: the first calls, the calls after background builds, those after tuning.

    python benchmarks/first_hour.py --calls 32 --seed 0 --budget-s 60 --out first_hour.json

Every state is a process of its own over one fresh cache folder. Each says which kernel its calls get; the last process
times all legal kernels of each call side by side, so that states are compared by the same times: the kernel that a
state chose over the quickest one, and over what torch's own function runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import layerzero as lz
from layerzero.engine.functions import CALLS
from layerzero.engine.jit import BUILT
from layerzero.serving.background_builds import BUILDS
from layerzero.testing.generate import RandomCall
from layerzero.tuning.measurement.contest import Contest, contest, window
from layerzero.tuning.measurement.timing import Effort

MODELS = ((384, 12, 12, 32, 1536), (768, 12, 12, 64, 3072), (896, 14, 2, 64, 4864), (1024, 16, 8, 128, 3072),
          (2048, 32, 8, 64, 8192), (2048, 16, 16, 128, 5504))  # fmt: skip
"""Hidden size, heads, heads of keys, head dim, width of the middle: MiniLM, BERT, Qwen2 and 3, Llama 3.2, OLMo."""

TOKENS = (1, 7, 40, 128, 512)
STATES = ("first", "built", "tuned")
BUILDS_S = 300.0


def drawn(seed: int, count: int) -> Iterator[RandomCall]:
    """Calls of these models, the functions in turn."""
    order = random.Random(seed)  # an order, no secret
    for number in range(count):
        hidden, heads, kv_heads, dim, middle = order.choice(MODELS)
        tokens = order.choice(TOKENS)
        dtype = order.choice((torch.float32, torch.bfloat16))

        def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype)

        past = order.choice((0, 100, 1000)) if tokens == 1 else 0
        functions: tuple[tuple[str, dict[str, Any]], ...] = (
            ("attention", {"query": (1, tokens, heads, dim), "key": (1, tokens + past, kv_heads, dim),
                           "value": (1, tokens + past, kv_heads, dim), "causal": True, "layout": "BSHD"}),
            ("rms_norm", {"input": (tokens, hidden), "weight": (hidden,)}),
            ("layer_norm", {"input": (tokens, hidden), "normalized_shape": hidden, "weight": (hidden,),
                            "bias": (hidden,)}),
            ("add_residual_rms_norm_", {"input": (tokens, hidden), "residual": (tokens, hidden), "weight": (hidden,)}),
            ("linear", {"input": (tokens, hidden), "weight": (middle, hidden)}),
            ("silu", {"input": (tokens, middle)}),
            ("gelu", {"input": (tokens, middle)}),
        )  # fmt: skip
        name, shapes = functions[number % len(functions)]
        arguments = {
            key: made(*value) if isinstance(value, tuple) and isinstance(value[0], int) else value
            for key, value in shapes.items()
        }
        yield RandomCall(name, arguments, f"{name} {tokens}x{hidden} {str(dtype).removeprefix('torch.')}")


def chosen(calls: list[RandomCall]) -> list[str | None]:
    """Call each once, and say which kernel it got."""
    found = []
    for call in calls:
        CALLS[call.function].fast(**call.arguments)
        found.append(lz.explain(call.function, **call.arguments).kernel_id)
    return found


def of_state(state: str, calls: list[RandomCall]) -> dict[str, Any]:
    """Which kernels calls get in a process of this state."""
    started = time.perf_counter()
    found = chosen(calls)
    if state == "built":
        BUILDS.idle.wait(BUILDS_S)
        found = chosen(calls)
    status = lz.jit_status()
    return {
        "chosen": found,
        "seconds": time.perf_counter() - started,
        "built": [each.kernel_id for each in status.built],
    }


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a call's kernels, by id, and which of them torch's own function runs."""

    us: dict[str, float]
    stock: list[str]


def timed(call: RandomCall) -> Times:
    """Time every kernel of a call that is legal and built; one that is not is no part of any state."""
    with window():
        report = lz.explain(call.function, **call.arguments)
    unbuilt = [
        each.kernel.id for each in report.candidates if each.kernel.jit and not BUILT.ready(each.kernel, report.facts)
    ]
    found: Contest = contest(call, effort=Effort(20, 0.3, fill=True), leave_out=unbuilt)
    us = {kernel.id: measured.median_us for kernel, measured in found.times.items()}
    stock = [kernel.id for kernel in found.times if kernel.is_stock(found.facts)]
    return Times(us, stock)


def in_process(state: str, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """One state, in a process of its own."""
    command = [sys.executable, __file__, "--calls", str(options.calls), "--seed", str(options.seed), "--state", state]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def mean(values: list[float]) -> float:
    """The geometric mean; none of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def whole(options: argparse.Namespace) -> dict[str, Any]:
    """All states, then the times."""
    with tempfile.TemporaryDirectory() as folder:
        common = dict(os.environ) | {
            "LAYERZERO_CACHE_DIR": f"{folder}/lz",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        found = {"first": in_process("first", options, common | {"LAYERZERO_JIT": "never"})}
        found["built"] = in_process("built", options, common)
        started = time.perf_counter()
        tune = [sys.executable, "-m", "layerzero", "tune", "--budget-s", str(options.budget_s)]
        said = subprocess.run(tune, env=common, stdout=subprocess.PIPE, text=True, check=False)
        seconds = time.perf_counter() - started
        found["tuned"] = in_process("tuned", options, common)
        times = in_process("times", options, common | {"LAYERZERO_JIT": "never"})["times"]
    rows = {}
    for state in STATES:
        over_best, over_torch = [], []
        for kernel, each in zip(found[state]["chosen"], times, strict=True):
            us = each["us"]
            if kernel in us:
                over_best.append(us[kernel] / min(us.values()))
                over_torch += [us[kernel] / min(us[name] for name in each["stock"])] if each["stock"] else []
        rows[state] = {"calls": len(over_best), "over_best": mean(over_best), "worst_over_best": max(over_best),
                       "over_torch": mean(over_torch), "worst_over_torch": max(over_torch)}  # fmt: skip
    tuning = {"budget_s": options.budget_s, "seconds": seconds, "said": " ".join(said.stdout.split()[-40:])}
    return {"rows": rows, "states": found, "tuning": tuning, "times": times}


def show(found: dict[str, Any]) -> None:
    """The table of docs/measurements/cpu_first_hour.md, and the call that each state is furthest behind in."""
    print(
        "| state | calls | over the quickest kernel: geometric mean, worst | over torch's own: geometric mean, worst |"
    )
    print("| --- | --- | --- | --- |")
    for state, row in found["rows"].items():
        best, own = (f"{row[name]:.3f}, {row[f'worst_{name}']:.2f}" for name in ("over_best", "over_torch"))
        print(f"| {state} | {row['calls']} | {best} | {own} |")
    for state in STATES:
        pairs = zip(found["states"][state]["chosen"], found["times"], strict=True)
        chosen = [(kernel, each) for kernel, each in pairs if each["us"]]
        if not chosen:
            continue
        kernel, each = max(chosen, key=lambda pair: pair[1]["us"].get(pair[0], 0.0) / min(pair[1]["us"].values()))
        quickest = min(each["us"], key=each["us"].__getitem__)
        took = f"{kernel} {each['us'].get(kernel, math.nan):.1f} us, {quickest} {each['us'][quickest]:.1f}"
        print(f"{state}, worst: {each['call']}: {took}")
    print(found["tuning"], found["states"]["built"]["built"], found["states"]["built"]["seconds"])


def main() -> None:
    """Run everything, or one state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--state", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.state:
        calls = list(drawn(options.seed, options.calls))
        if options.state == "times":
            told: dict[str, Any] = {
                "times": [
                    {"call": call.name, "us": t.us, "stock": t.stock}
                    for call, t in zip(calls, map(timed, calls), strict=True)
                ]
            }
        else:
            told = of_state(options.state, calls)
        print(json.dumps(told))
        return
    found = whole(options)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    show(found)


if __name__ == "__main__":
    main()
