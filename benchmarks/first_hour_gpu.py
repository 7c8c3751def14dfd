"""What a user of a GPU gets without a command: the first calls, the calls after background builds, those after tuning.

    python benchmarks/first_hour_gpu.py --calls 24 --seed 0 --wait-s 120 --tune-s 300 --until-s 530 --out hour.json
    python benchmarks/first_hour_gpu.py --calls 10 --seed 0,1,2      as many calls of each seed, in the same processes

Calls are random attention calls with heads of published models, for which no table was made. Every state is a process
over one fresh cache folder, and says which kernel its calls get; the last process times all kernels of each call, and
the libraries' own functions, side by side. So states are compared by the same times:

- *device*: device time of the kernel that a state chose, over the quickest of all that are legal, and over torch's own
  function;
- *launching*: the public function in bursts, over the quickest direct call of a library's own function in bursts.

Beside the table, the file keeps what each state knew of its kernels when it chose (``why``), what each first call took
(``took_s``) and what tuning measured of each call (``contests``).

The process that waits for its builds calls on meanwhile, and says what those calls took on the host; the one that comes
after it says what they take without builds, and whether it chooses what the other chose at last.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STARTED = time.time()

import torch  # noqa: E402  # a restart is timed from before the imports
from entries import own_entry  # noqa: E402
from judged import LLAMA, judged_jobs  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.core.plan import Candidate  # noqa: E402
from layerzero.engine.functions import CALLS  # noqa: E402
from layerzero.engine.jit import BUILT  # noqa: E402
from layerzero.ops.attention.sweep import decode_case  # noqa: E402
from layerzero.serving.background_builds import BUILDS  # noqa: E402
from layerzero.testing.generate import RandomCall  # noqa: E402
from layerzero.tuning.measurement.clocks import Clock, clock_of  # noqa: E402
from layerzero.tuning.measurement.contest import bound_plan, taking_part, torch_default, window  # noqa: E402
from layerzero.tuning.measurement.jobs import Job  # noqa: E402
from layerzero.tuning.measurement.timing import Effort, Runner, quantile, race  # noqa: E402

STATES = ("first", "built", "restarted", "tuned")
DEVICE = torch.device("cuda")
EFFORT = Effort(samples=12, budget_s=0.25, steady=0.0)

LAYERS, STEPS = 32, 8
"""Calls of each length, and lengths, where decoding is timed as models call it."""

QUICK_TO_BUILD = ("flash_attn", "quack")
"""Libraries whose kernels compile in seconds: they are timed, whether a state built them or not."""


def calls_of(options: argparse.Namespace) -> list[Job]:
    """What is called in every state."""
    drawn = (judged_jobs("cuda", seed, options.calls, ("bfloat16",), published=True) for seed in options.seed)
    return [job for jobs in drawn for _, job in jobs]


def chosen(
    jobs: Sequence[Job], took: list[float] | None = None, why: list[list[dict[str, Any]]] | None = None
) -> list[str | None]:
    """Call each once, and say which kernel it got.

    What each call took is added to ``took``, s, and what is known of its best kernels to ``why``.
    """
    found = []
    for job in jobs:
        call = job.make(DEVICE)
        with torch.no_grad():
            began = time.monotonic()
            CALLS[call.function].fast(**call.arguments)
            if took is not None:
                torch.cuda.synchronize()
                took.append(time.monotonic() - began)
            report = lz.explain(call.function, **call.arguments)
        found.append(report.kernel_id)
        if why is not None:
            why.append([known_of(each) for each in report.candidates if each.legal][:6])
        del call
    torch.cuda.synchronize()
    return found


def known_of(candidate: Candidate) -> dict[str, Any]:
    """What a choice knows of a kernel."""
    terms = {term.name: round(term.points, 2) for term in candidate.terms}
    return {"kernel": candidate.kernel.id, "us": candidate.time_us, "from": candidate.provenance, "terms": terms,
            "confidence": candidate.confidence, "noise": candidate.noise}  # fmt: skip


def host_times(over: Callable[[], bool]) -> dict[str, float]:
    """Call one small decode over and over, and say what a call took on the host, us."""
    call = Job(*decode_case(LLAMA, 1, 512), "bfloat16").make(DEVICE)
    fast, times, now = CALLS[call.function].fast, [], time.perf_counter_ns
    with torch.no_grad():
        for _ in range(200):
            fast(**call.arguments)
        while not times or not over():
            for _ in range(64):
                started = now()
                fast(**call.arguments)
                times.append((now() - started) / 1000)
            torch.cuda.synchronize()
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "p99.99": 0.9999, "max": 1.0}
    return {"calls": len(times)} | {name: quantile(times, share) for name, share in shares.items()}


def of_state(state: str, options: argparse.Namespace) -> dict[str, Any]:
    """Which kernels calls get in a process of this state."""
    jobs = calls_of(options)
    began = time.monotonic()
    took: list[float] = []
    why: list[list[dict[str, Any]]] = []
    found: dict[str, Any] = {"chosen": chosen(jobs, took, why), "took_s": took, "why": why}
    found["seconds"], found["since_start_s"] = time.monotonic() - began, time.time() - STARTED
    if state == "first":
        found["host"] = host_times(lambda: BUILDS.idle.is_set() or time.monotonic() - began > options.wait_s)
        found["idle_s"] = time.monotonic() - began
        found["done"] = BUILDS.idle.is_set()
        found["later"] = chosen(jobs)
    if state == "restarted":
        until = time.monotonic() + options.quiet_s
        found["host"] = host_times(lambda: time.monotonic() > until)
    status = lz.jit_status()
    found["built"] = [f"{each.kernel_id} {each.seconds:.0f} s" for each in status.built]
    found["failed"] = [f"{each.kernel}: {each.log[-200:]}" for each in status.failed]
    return found


def runs_of(call: RandomCall, wanted: Sequence[str]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """What is timed of a call: kernels by id, libraries' own functions and torch's; and what was left out."""
    with window():
        report = lz.explain(call.function, **call.arguments)
    runs: dict[str, Callable[[], Any]] = {}
    out = []
    for candidate in taking_part(report, ("torch.sdpa.math",)):
        kernel = candidate.kernel
        built = not kernel.jit or BUILT.ready(kernel, report.facts) or kernel.source in QUICK_TO_BUILD
        if not built and kernel.id not in wanted:
            out.append(f"{kernel.id}: not built")
            continue
        try:
            with window():
                run = bound_plan(candidate, report, call)[1]
                run()
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  # what fails is a line, and the others are timed
            out.append(f"{kernel.id}: {type(error).__name__}: {str(error)[:100]}")
            continue
        if kernel.jit:
            BUILT.add(kernel, report.facts)
        runs[kernel.id] = run
        try:
            own = own_entry(kernel.id, call.function, call.arguments)
            if own is not None:
                own()
                torch.cuda.synchronize()
                runs[f"own {kernel.id}"] = own
        except Exception as error:  # noqa: BLE001  # the library's own function does not take such calls
            out.append(f"own {kernel.id}: {type(error).__name__}")
    default = torch_default(call.function, call.arguments)
    if default is not None:
        runs["torch"] = default
    return runs, out


def timed(job: Job, kernels: Sequence[str | None], clock: Clock) -> dict[str, Any]:
    """Times of one call, us: on the device by name, in bursts of direct calls, and through LayerZero by kernel."""
    call = job.make(DEVICE)
    wanted = sorted({each for each in kernels if each is not None})
    with torch.no_grad():
        runs, out = runs_of(call, wanted)
        raced = race(runs, clock, EFFORT)
        direct = [name for name in raced if name.startswith("own ") or name == "torch"]
        first = sorted(direct, key=lambda name: burst(raced[name]))[:2]
        through = {}
        for kernel in wanted:
            public = functools.partial(getattr(lz, call.function), **call.arguments)
            lz.lock(job.operation, kernel)
            try:
                public()
                again = race({"lz": public, **{name: runs[name] for name in first}}, clock, EFFORT)
            finally:
                lz.unlock(job.operation)
            best = min(burst(again[name]) for name in first) if first else math.nan
            through[kernel] = {"us": burst(again["lz"]), "direct_us": best}
        grows = job.operation.endswith(".decode") and "torch" in runs
        lengths = growing(call, wanted, job.operation) if grows else {}
    device = {name: each.device_us or math.nan for name, each in raced.items()}
    found = {"call": job.name, "device_us": device, "through": through, "direct": first}
    return found | {"growing_us": lengths, "out": out}


def growing(call: RandomCall, kernels: Sequence[str], operation: str) -> dict[str, float]:
    """Decoding as models call it, us of a call: each length for so many layers, then the next; by torch and by kernel.

    What a function plans anew for every length shows here, and not where one call is repeated.
    """
    last = call.arguments["key"].shape[1]

    def per_call(run: Callable[..., Any]) -> float:
        spent = 0.0
        for back in range(STEPS, 0, -1):
            cut = {name: call.arguments[name][:, : last - back].contiguous() for name in ("key", "value")}
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(LAYERS):
                run({**call.arguments, **cut})
            torch.cuda.synchronize()
            spent += time.perf_counter() - started
        return spent * 1e6 / STEPS / LAYERS

    def own(arguments: dict[str, Any]) -> Any:
        function = torch_default(call.function, arguments)
        return None if function is None else function()

    found = {"torch": per_call(own)}
    for kernel in kernels:
        lz.lock(operation, kernel)
        try:
            found[kernel] = per_call(lambda arguments: getattr(lz, call.function)(**arguments))
        finally:
            lz.unlock(operation)
    return found


def burst(each: Runner) -> float:
    """What a call takes with launching: in bursts, or, of long ones, on the device."""
    return each.host_us or each.device_us or math.nan


def times(options: argparse.Namespace, states: dict[str, list[str | None]]) -> list[dict[str, Any]]:
    """Time all calls, as far as the time goes."""
    clock, found = clock_of(DEVICE), []
    for number, job in enumerate(calls_of(options)):
        if time.time() > options.judge_until:
            print(f"out of time before {job.name}", file=sys.stderr)
            break
        try:
            found.append({"number": number} | timed(job, [each[number] for each in states.values()], clock))
        except Exception as error:  # noqa: BLE001  # one call's trouble is a line
            print(f"{job.name}: {type(error).__name__}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()
    return found


def mean(values: list[float]) -> float:
    """The geometric mean; none of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def row_of(state: list[str | None], found: list[dict[str, Any]]) -> dict[str, Any]:
    """What a state's choices took over the best, over torch's own, and with launching."""
    best, own, through, grown = [], [], [], []
    worst = {"over_best": ("", 0.0), "over_torch": ("", 0.0)}
    for each in found:
        kernel, device = state[each["number"]], each["device_us"]
        if kernel not in device:
            continue
        best.append(device[kernel] / min(device.values()))
        quickest = min(device, key=device.__getitem__)
        text = f"{each['call']}: {kernel} {device[kernel]:.1f}, {quickest} {device[quickest]:.1f}"
        worst["over_best"] = max(worst["over_best"], (text, best[-1]), key=lambda pair: pair[1])
        if "torch" in device:
            own.append(device[kernel] / device["torch"])
            text = f"{each['call']}: {kernel} {device[kernel]:.1f}, torch {device['torch']:.1f}"
            worst["over_torch"] = max(worst["over_torch"], (text, own[-1]), key=lambda pair: pair[1])
        if kernel in each["growing_us"]:
            grown.append(each["growing_us"][kernel] / each["growing_us"]["torch"])
        launched = each["through"].get(kernel)
        if launched and math.isfinite(launched["direct_us"]):
            through.append(launched["us"] / launched["direct_us"])
    return {"calls": len(best), "over_best": mean(best), "worst_over_best": max(best, default=math.nan),
            "over_torch": mean(own), "worst_over_torch": max(own, default=math.nan), "launching": mean(through),
            "launched": len(through), "growing": mean(grown), "worst": worst}  # fmt: skip


def in_process(state: str, options: argparse.Namespace, environment: dict[str, str], **more: Any) -> Any:
    """One state, in a process of its own."""
    file = Path(environment["LAYERZERO_CACHE_DIR"]).with_name(f"{state}.json")
    command = [sys.executable, __file__, "--calls", str(options.calls), "--state", state]
    command += ["--seed", ",".join(map(str, options.seed))]
    command += ["--wait-s", str(options.wait_s), "--quiet-s", str(options.quiet_s), "--out", str(file)]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
    began = time.monotonic()
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    print(f"{state}: {time.monotonic() - began:.0f} s", flush=True)
    return json.loads(file.read_text())


def whole(options: argparse.Namespace) -> dict[str, Any]:
    """All states, then the times."""
    began = time.time()
    with tempfile.TemporaryDirectory() as name:
        folders = {"LAYERZERO_CACHE_DIR": f"{name}/lz", "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor",
                   "TRITON_CACHE_DIR": f"{name}/triton", "FLASHINFER_WORKSPACE_BASE": f"{name}/flashinfer",
                   "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{name}/cute"}  # fmt: skip
        environment = dict(os.environ) | folders
        first = in_process("first", options, environment)
        found: dict[str, Any] = {"first": first, "built": {"chosen": first["later"]}}
        found["restarted"] = in_process("restarted", options, environment)
        tuning = time.monotonic()
        command = [sys.executable, "-m", "layerzero", "tune", "--budget-s", str(options.tune_s), "--json"]
        with Path(name, "tune.json").open("w") as file:
            subprocess.run(command, env=environment, stdout=file, check=False)
        seconds = time.monotonic() - tuning
        try:
            said = json.loads(Path(name, "tune.json").read_text())
        except ValueError:  # it failed, which its own output says
            said = {}
        found["tuned"] = in_process("tuned", options, environment)
        states = {state: found[state]["chosen"] for state in STATES}
        Path(name, "states.json").write_text(json.dumps(states))
        never = environment | {"LAYERZERO_JIT": "never"}
        judged = in_process(
            "times", options, never, states=f"{name}/states.json", judge_until=began + options.until_s
        )  # fmt: skip
    tuned = {"budget_s": options.tune_s, "seconds": seconds, "measured": len(said.get("measured", ())),
             "left": said.get("left"), "skipped": said.get("skipped"), "not_built": said.get("not_built"),
             "winners_changed": said.get("winners_changed"), "contests": said.get("measured")}  # fmt: skip
    rows = {state: row_of(states[state], judged) for state in STATES}
    for seed in options.seed if len(options.seed) > 1 else ():
        mine = [each for each in judged if options.seed[each["number"] // options.calls] == seed]
        rows |= {f"{state}, seed {seed}": row_of(states[state], mine) for state in STATES}
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "states": found,
            "tuning": tuned, "times": judged}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """The table, and what else was asked about."""
    states = found["states"]
    for each in found["times"]:
        numbers = sorted((us, name) for name, us in each["device_us"].items())
        said = ", ".join(f"{name} {us:.1f}" for us, name in numbers[:6])
        mine = " | ".join(str(states[state]["chosen"][each["number"]]) for state in STATES)
        print(f"{each['call']}: {mine}: {said}; {'; '.join(each['out'])[:300]}")
    print("tuning:", {name: value for name, value in found["tuning"].items() if name not in ("skipped", "contests")})
    print("tuning skipped:", json.dumps(found["tuning"]["skipped"])[:2000])
    first, again = states["first"], states["restarted"]
    print(f"built in the background ({first['idle_s']:.0f} s, done: {first['done']}):", first["built"], first["failed"])
    print("host us while building:", {name: round(us, 1) for name, us in first["host"].items()})
    print("host us without building:", {name: round(us, 1) for name, us in again["host"].items()})
    same = sum(one == other for one, other in zip(first["later"], again["chosen"], strict=True))
    took = f"in {again['seconds']:.1f} s, {again['since_start_s']:.1f} s with imports"
    print(f"restarted: {same} of {len(again['chosen'])} as before {took}; built again: {again['built']}")
    slow = sorted(zip(again["took_s"], again["chosen"], strict=True), key=lambda pair: -pair[0])[:6]
    print("slowest of them:", ", ".join(f"{kernel} {seconds:.1f} s" for seconds, kernel in slow))
    print(f"{found['device']}, torch {found['torch']}")
    heads = "state, calls, over best, worst, over torch, worst, with launching over direct, calls, growing over torch"
    print("| " + heads.replace(", ", " | ") + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    for state, row in found["rows"].items():
        cells = ("over_best", "worst_over_best", "over_torch", "worst_over_torch", "launching")
        print(f"| {state} | {row['calls']} | " + " | ".join(f"{row[name]:.3f}" for name in cells)
              + f" | {row['launched']} | {row['growing']:.3f} |")  # fmt: skip
    for state in STATES:
        row = found["rows"][state]
        print(state, "worst:", "; ".join(f"{name} {ratio:.2f}: {text}" for name, (text, ratio) in row["worst"].items()))


def seeds(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Run everything, or one state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--seed", type=seeds, default=[0], help="of the calls; several with commas")
    parser.add_argument("--wait-s", type=float, default=120.0, help="from the first call to the second look")
    parser.add_argument("--quiet-s", type=float, default=10.0, help="calls without builds, in the restarted process")
    parser.add_argument("--tune-s", type=float, default=300.0)
    parser.add_argument("--until-s", type=float, default=530.0, help="judge calls until so many seconds from the start")
    parser.add_argument("--state", default="")
    parser.add_argument("--states", type=Path)
    parser.add_argument("--judge-until", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=Path("first_hour_gpu.json"))
    options = parser.parse_args()
    if options.state == "times":
        options.out.write_text(json.dumps(times(options, json.loads(options.states.read_text()))))
    elif options.state:
        options.out.write_text(json.dumps(of_state(options.state, options)))
    else:
        found = whole(options)
        options.out.write_text(json.dumps(found, indent=1))
        show(found)


if __name__ == "__main__":
    main()
