"""What lies between the attentions of a decoder, by device time: the chosen kernel, the best one, and the memory floor.

    for shard in 0 1 2 3; do python benchmarks/layers_gpu.py --build $shard/4 & done; wait
    python benchmarks/layers_gpu.py --budget-s 150 --out layers.json

Widths of Llama-3-8B, Qwen2.5-7B and Gemma-2-9B in bfloat16, from one token to 16384, and draws of tokens. Calls of
each kernel are captured in a CUDA graph; where one cannot be captured, all of that call are compared between events.
*shipped* is what is chosen before anything is measured here, *tuned* afterwards.

    LAYERZERO_REQUIRE_VETTING=0 python benchmarks/layers_gpu.py --weights --only "llama-8b 4096x28672 1 |gptq"

With ``--weights`` the calls are products with quantised weights instead, beside bfloat16's: layers of Llama-3-8B,
Qwen3-30B-A3B and DeepSeek-V3, from one row to 4096. Kernels that never ran here are timed, too, and compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from build_kernels import artefacts, compile_all

import layerzero as lz
from layerzero.core.known_devices import KNOWN_DEVICES
from layerzero.core.operation import Case
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import WeightFormat
from layerzero.tuning.measurement.admission import copy_gb_s
from layerzero.tuning.measurement.bench import TORCH, Benched, TimedBy, bench
from layerzero.tuning.measurement.clocks import clock_of
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import Effort
from layerzero.tuning.measurement.tune import run_jobs
from layerzero.tuning.storage import archive
from layerzero.tuning.storage.rows import work_of
from layerzero.tuning.storage.tables import Case as TimedSizes
from layerzero.tuning.storage.tables import Family, Table, read_table, told_apart

TOKENS = (1, 4096, 64, 512, 16384, 16)
"""In an order of which every beginning says most."""

ROWS, VOCAB = (1, 16, 64, 256), 128256
H200_GB_S = 4300.0
"""What copies and sums reach on an H200; on another device its own copy is measured."""

FLOOR_FROM = 512
"""Tokens from which on memory is what a call waits for."""


@dataclass(frozen=True)
class Width:
    """A model's sizes."""

    name: str
    hidden: int
    features: int
    heads: int
    kv_heads: int
    head_dim: int


WIDTHS = (
    Width("llama-8b", 4096, 14336, 32, 8, 128),
    Width("qwen2.5-7b", 3584, 18944, 28, 4, 128),
    Width("gemma-2-9b", 3584, 14336, 16, 8, 256),
)


WEIGHTS = {
    "llama-8b": ((4096, 28672), (4096, 6144), (14336, 4096), (4096, 4096)),
    "qwen3-30b-a3b": ((2048, 5120), (4096, 2048), (2048, 1536), (768, 2048)),
    "deepseek-v3": ((7168, 36864), (16384, 7168), (7168, 2112), (1536, 24576)),
}
"""Inputs and outputs of products: gate and up, projections, down; of DeepSeek's attention both halves of each."""

FORMATS = (
    "gptq:bits=4,group=128,zeros=minus_one",
    "compressed-tensors:bits=4,group=128",
    "fp8:group=128,rows=128",
    "compressed-tensors:bits=8",
    "mxfp4",
    "nvfp4",
)
BATCHES = (1, 32, 2048, 8, 128, 512, 16, 64, 256, 1024, 4096)
"""Rows, in an order of which every beginning says most."""


def of_weights() -> list[tuple[int, Job]]:
    """Products of every format, and those in bfloat16, int8 and float8 rows beside them."""
    found = []
    for rows in BATCHES:
        for model, shapes in WEIGHTS.items():
            for inputs, outputs in shapes:
                sizes = {"rows": rows, "in_features": inputs, "out_features": outputs}
                name = f"{model} {inputs}x{outputs} {rows}"
                plain = ("mlp.linear", "mlp.linear.quant.int8", "mlp.linear.quant.fp8_e4m3")
                found += [(rows, Job(operation, Case(name, sizes), "bfloat16")) for operation in plain]
                for text in FORMATS:
                    named = Case(f"{name} {text}", sizes, {"weight_format": text})
                    operation = FORMATTED[scheme_of(WeightFormat.of(text)).operation].name
                    found.append((rows, Job(operation, named, "bfloat16")))
    return found


def cases(width: Width, tokens: int) -> Iterator[tuple[str, Case]]:
    """A layer's calls for so many tokens."""
    name = f"{width.name} {tokens}"
    heads = {"heads": width.heads, "kv_heads": width.kv_heads, "head_dim": width.head_dim}
    turned = {"batch": 1, "seq": tokens, **heads, "rotary_half": width.head_dim // 2, "table": 16384}
    joined = {"rows": tokens, "joined": 2 * width.features}
    yield "mlp.silu_mul.joined", Case(name, joined)
    yield "mlp.gelu_mul.joined", Case(name, joined, {"approximate": "tanh"})
    yield "posenc.rope", Case(name, turned, {}, ("positions",))
    yield "posenc.rope.inplace", Case(name, turned, {}, ("positions",))
    yield "posenc.qk_norm_rope", Case(name, turned, {}, ("positions",))
    yield "norm.add_rms", Case(name, {"rows": tokens, "hidden": width.hidden})
    yield "norm.add_rms.inplace", Case(name, {"rows": tokens, "hidden": width.hidden})


def jobs() -> list[tuple[int, Job]]:
    """Tokens and calls; the draws of tokens come first, since they are few."""
    found = []
    for rows in ROWS:
        sizes = {"rows": rows, "vocab": VOCAB}
        found += [
            (0, Job("sampling.categorical", Case(f"{rows}x{VOCAB}", sizes), "float32")),
            (0, Job("sampling.topk", Case(f"{rows}x{VOCAB}", sizes, {"k": 50}), "float32")),
            (0, Job("sampling.topp", Case(f"{rows}x{VOCAB}", sizes, {"p": 0.9}), "float32")),
            (0, Job("sampling.topk_topp", Case(f"{rows}x{VOCAB}", sizes, {"k": 50, "p": 0.9}), "float32")),
        ]
    for tokens in TOKENS:
        for width in WIDTHS:
            found += [(tokens, Job(operation, case, "bfloat16")) for operation, case in cases(width, tokens)]
    return found


@dataclass(frozen=True)
class Verdict:
    """One call.

    Attributes:
        tokens: of it; 0 for draws of tokens.
        shipped, tuned: kernels chosen before and after measuring here.
        times_us: by kernel, the device's.
        origin: where these times are from.
        floor_us: what moving its bytes takes.
        torch_us: torch's own function.
    """

    operation: str
    name: str
    tokens: int
    shipped: str | None
    tuned: str | None
    times_us: dict[str, float]
    origin: str
    floor_us: float | None
    torch_us: float | None

    @property
    def best(self) -> str:
        """The quickest kernel."""
        return min(self.times_us, key=lambda name: self.times_us[name])

    def over_best(self, kernel: str | None) -> float:
        """A kernel's time over the best one's; NaN where it has none."""
        return self.times_us.get(kernel or "", math.nan) / self.times_us[self.best]

    @property
    def over_floor(self) -> float | None:
        """The tuned choice's time over the floor, where memory is what it waits for."""
        if self.floor_us is None or self.tokens < FLOOR_FROM:
            return None
        return self.times_us.get(self.tuned or "", math.nan) / self.floor_us


def replayed(job: Job, device: torch.device) -> str | None:
    """The kernel of a call that a graph captures, which waits for the device alone; on a CPU, of the call."""
    facts = job.facts(device)
    return lz.explain(facts.on(facts.device, capturing=device.type == "cuda")).kernel_id


def table(verdicts: Sequence[Verdict], device: lz.Device, like: Table) -> Table:
    """What replays took, as a table that ships; who was not captured says nothing of them.

    ``like`` is a table of the same machine: it says what a kernel's library was.
    """
    library = {name.partition(".")[0]: version for name, version in like.versions.items()}
    known = {job.name: job for _, job in jobs()}
    versions: dict[str, str] = {}
    families: dict[tuple[tuple[str, str], ...], list[TimedSizes]] = {}
    for each in verdicts:
        if each.origin == "events":
            continue
        work = work_of(known[each.name].facts(torch.device("cpu")).on(device, capturing=True))
        times = {name: float(f"{us:.3g}") for name, us in sorted(each.times_us.items())}
        versions |= {name: library[name.partition(".")[0]] for name in times}
        families.setdefault(tuple(sorted(told_apart(dict(work.facts)))), []).append(TimedSizes(dict(work.sizes), times))
    found = [Family(dict(facts), cases, graph=True) for facts, cases in families.items()]
    made = {"families": found, "versions": dict(sorted(versions.items())), "script": "python benchmarks/layers_gpu.py"}
    return msgspec.structs.replace(like, **made, date=datetime.now(UTC).date().isoformat(), resolution_us=0.0)


def verdict(tokens: int, shipped: str | None, tuned: str | None, found: Benched, gb_s: float) -> Verdict:
    """What a bench says about a choice."""
    kernels = [line for line in found.lines if line.by(found.timed) is not None and line.name != TORCH]
    graphs = [line.device_from != "events" for line in kernels]
    if all(graphs):
        times = {line.name: line.by(found.timed) or math.nan for line in kernels}
    else:  # no time of a graph beside one between events
        times = {line.name: between for line in kernels if (between := line.events_us) is not None}
    floor = found.work.bytes / gb_s / 1e3 if found.work is not None and tokens else None
    mine = next((line for line in found.lines if line.name == TORCH), None)
    origin = kernels[0].device_from if kernels and all(graphs) else "events"
    return Verdict(
        found.operation, found.name, tokens, shipped, tuned, times, origin, floor,
        None if mine is None else mine.by(found.timed),
    )  # fmt: skip


def mean(ratios: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


def report(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """A line an operation, then the worst calls."""
    parts: dict[str, list[Verdict]] = defaultdict(list)
    for each in verdicts:
        parts[each.operation].append(each)
        parts["all of the layer" if each.tokens else "all draws"].append(each)
    columns = f"tuned/best mean worst  shipped/best mean worst  over floor mean worst (from {FLOOR_FROM})"
    yield f"{'operation':22} calls  {columns}"
    for name, those in parts.items():
        tuned = [ratio for each in those if not math.isnan(ratio := each.over_best(each.tuned))]
        shipped = [ratio for each in those if not math.isnan(ratio := each.over_best(each.shipped))]
        floor = [ratio for each in those if (ratio := each.over_floor) is not None and not math.isnan(ratio)]
        numbers = [mean(tuned), max(tuned, default=math.nan), mean(shipped), max(shipped, default=math.nan)]
        numbers += [mean(floor), max(floor, default=math.nan)]
        a, b, c, d, e, f = (f"{each:.3f}" for each in numbers)
        yield f"{name:22} {len(those):5}  {a:>15} {b:>5}  {c:>17} {d:>5}  {e:>15} {f:>5}"
    yield "worst choices by device time, after tuning:"
    for each in sorted(verdicts, key=lambda each: -(each.over_best(each.tuned) if each.tuned in each.times_us else 0))[
        :12
    ]:
        yield f"  {each.over_best(each.tuned):.2f} {line_of(each)}"
    yield f"farthest above the floor, from {FLOOR_FROM} tokens on:"
    far = [each for each in verdicts if each.over_floor is not None and not math.isnan(each.over_floor)]
    for each in sorted(far, key=lambda each: -(each.over_floor or 0.0))[:10]:
        yield f"  {each.over_floor:.2f} {line_of(each)}"
    for each in verdicts:
        sort = each.times_us.get("torch.sorted_topp", each.torch_us)
        if each.operation == "sampling.topp" and sort:
            mine = each.times_us.get(each.tuned or "", math.nan)
            yield f"top-p {each.name}: {sort / mine:.1f} times torch's sort ({sort:.0f} us over {mine:.0f})"


def line_of(each: Verdict) -> str:
    """A call with its times."""
    ordered = sorted(each.times_us.items(), key=lambda pair: pair[1])
    times = ", ".join(f"{name} {time_us:.1f}" for name, time_us in ordered[:5])
    floor = "" if each.floor_us is None else f", floor {each.floor_us:.1f}"
    return f"{each.name} [{each.origin}] {each.tuned}: {times}{floor}"


def main() -> None:
    """Build, or tune and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", metavar="I/N", help="only compile, every Nth artefact from the Ith")
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--only", default="", help="only calls whose name holds this; with | for several")
    parser.add_argument("--weights", action="store_true", help="products with quantised weights, and nothing else")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--device", default="cuda", help="on a CPU a call's time stands for the device's")
    parser.add_argument("--out", type=Path, default=Path("layers.json"))
    parser.add_argument("--table", type=Path, help="measure nothing: make a table that ships of what --out has")
    parser.add_argument("--like", type=Path, help="with --table: one of the same machine, with its libraries' versions")
    parser.add_argument(
        "--without", default="inductor", help="globs of kernels, or libraries, to leave out, with commas"
    )
    given = parser.parse_args()
    leave_out = tuple(filter(None, given.without.split(",")))
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    if given.table:
        like = read_table(given.like)
        verdicts = [Verdict(**each) for each in json.loads(given.out.read_text())]
        named = next(each for each in KNOWN_DEVICES.values() if each.name == like.device)
        archive.export_prior(table(verdicts, named, like), given.table)
        return
    device, until = torch.device(given.device), time.monotonic() + given.budget_s
    offered = of_weights() if given.weights else jobs()
    asked = [(tokens, job) for tokens, job in offered if any(part in job.name for part in given.only.split("|"))]
    if given.build:
        first, step = (int(number) for number in given.build.split("/"))
        pairs = artefacts([job for _, job in asked], device, leave_out)
        print(f"{len(pairs)} artefacts, every {step}th of them from the {first}th:", flush=True)
        for text in compile_all(pairs[first::step], device):
            print(text, flush=True)
        return
    for text in compile_all(artefacts([job for _, job in asked], device, leave_out), device):
        print(f"warmed: {text}", flush=True)
    shipped = {job.name: replayed(job, device) for _, job in asked}
    effort = Effort(given.samples, 0.05)
    tuned = run_jobs(
        [job for _, job in asked],
        device,
        effort=effort,
        budget_s=given.budget_s / 3,
        isolate=False,
        leave_out=leave_out,
    )
    print(f"tuned: {tuned}", flush=True)
    chosen = {job.name: replayed(job, device) for _, job in asked}
    name = lz.Device.detect(given.device).name
    gb_s = H200_GB_S if "H200" in name else copy_gb_s(device)
    timed = TimedBy.DEVICE if device.type == "cuda" else TimedBy.CALL
    clock, verdicts, left = clock_of(device), [], 0
    for tokens, job in asked:
        if time.monotonic() > until:
            left += 1
            continue
        try:
            found = bench(job, device, effort=effort, clock=clock, timed=timed, leave_out=leave_out)
        except Exception as error:  # noqa: BLE001  # a call that cannot be judged is a line
            print(f"{job.name}: not judged: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        if not any(line.by(timed) for line in found.lines if line.name != TORCH):
            print(
                f"{job.name}: nobody has a time: {[(line.name, line.detail[:80]) for line in found.lines]}", flush=True
            )
            continue
        verdicts.append(verdict(tokens, shipped[job.name], chosen[job.name], found, gb_s))
        print(f"{verdicts[-1].over_best(verdicts[-1].tuned):.2f} {line_of(verdicts[-1])}", flush=True)
        for line in found.lines:
            if line.device_detail:
                print(f"    {line.name}: {line.device_detail}", flush=True)
        given.out.write_text(json.dumps([asdict(each) for each in verdicts], indent=1))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"REPORT: {name}, floor at {gb_s:.0f} GB/s, {len(verdicts)} calls, {left} out of time")
    for text in report(verdicts):
        print(text)


if __name__ == "__main__":
    main()
