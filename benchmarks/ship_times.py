"""Measure what the package ships: times of a device as tables of priors, one for each set of operations.

    for shard in 0 1 2 3 4 5 6 7; do python benchmarks/ship_times.py dense --build $shard/8 & done; wait
    python benchmarks/ship_times.py dense layer --budget-s 250 --out tables

Writes ``DEVICE_SET.json`` (of a CPU with a hash of what tells its kind), which goes to ``src/layerzero/tuning/priors``
as it is. Calls come so that every beginning covers the whole as evenly as it can, so that a budget cuts off detail. The
cache folder keeps what was measured: a second run goes on, and its table has all of it. A set's table stands for its
families alone: one that lies there already and has some of them should be replaced whole.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from build_kernels import artefacts, compile_all
from judged import PUBLISHED

import layerzero as lz
from layerzero.engine.dispatch import ENGINE
from layerzero.ops.attention.sweep import decode_case, prefill_case
from layerzero.tuning.measurement.jobs import Job, default_grid, spread
from layerzero.tuning.measurement.loop import Step
from layerzero.tuning.measurement.timing import Effort
from layerzero.tuning.measurement.tune import run_jobs
from layerzero.tuning.storage import archive
from layerzero.tuning.storage.environment import capability_hash
from layerzero.tuning.storage.tables import slug, table_of

DENSE = ("attention.gqa.prefill", "attention.standard.prefill", "attention.gqa.decode", "attention.standard.decode")
SETS = {
    "dense": DENSE,
    "paged": ("attention.*.decode.paged", "attention.*.prefill.paged", "attention.*.mixed.paged",
              "attention.*.prefill.ragged", "attention.merge_states"),
    "layer": ("norm.*", "posenc.*", "mlp.silu_mul*", "mlp.gelu_mul*", "mlp.linear", "mlp.qkv*", "kv.*",
              "activation.*", "embedding.lookup"),
    "sampling": ("sampling.*",),
    "experts": ("moe.experts",),
}  # fmt: skip
"""Globs of operations; ``layer`` is everything between the attentions of a decoder."""

LENGTHS = ((1, 128), (1, 1024), (1, 8192), (2, 4096), (4, 2048), (8, 640), (24, 300))
CONTEXTS = ((1, 512), (1, 8192), (4, 1024), (16, 2048), (32, 256), (64, 700))
"""Batch and length, of prefill and of decoding, with the heads of models that the grid has not."""


def jobs_of(name: str, device: str, dtypes: Sequence[str]) -> list[Job]:
    """The calls of a set."""
    jobs = [
        job for job in default_grid(device, dtypes) if any(fnmatch.fnmatchcase(job.operation, g) for g in SETS[name])
    ]
    if name == "dense":
        cases = [prefill_case(heads, *size, causal=True) for heads in PUBLISHED for size in LENGTHS]
        cases += [decode_case(heads, *size) for heads in PUBLISHED for size in CONTEXTS]
        jobs += [Job(operation, case, dtype) for dtype in dtypes for operation, case in cases]
    return spread(jobs)


def told(step: Step) -> None:
    """A line for each call."""
    if step.contest is not None and step.contest.best is not None:
        times = ", ".join(
            f"{each.kernel.id} {each.measurement.median_us:.1f}"
            if each.measurement
            else f"{each.kernel.id} {each.status}"
            for each in step.contest.entries
        )
        print(f"[{step.number}/{step.total}] {step.job.name}: {times}", flush=True)
    elif step.skipped not in ("", "known"):
        print(f"[{step.number}/{step.total}] {step.job.name}: {step.skipped}", flush=True)


def main() -> None:
    """Build, or measure and write tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS), help=f"of {', '.join(SETS)}")
    parser.add_argument("--budget-s", type=float, default=250.0, help="for all sets together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", help="dtypes, with commas")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--call-s", type=float, default=0.12, help="seconds for each kernel of a call")
    parser.add_argument("--without", default="", help="globs of kernels, or libraries, to leave out, with commas")
    parser.add_argument("--replays", action="store_true", help="half of the time for replays of CUDA graphs")
    parser.add_argument("--in-process", action="store_true", help="try nothing in children first: one crash ends it")
    parser.add_argument("--build", metavar="I/N", help="only compile, every Nth artefact from the Ith")
    parser.add_argument("--out", type=Path, default=Path("tables"))
    given = parser.parse_args()
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    device, leave_out = torch.device(given.device), tuple(filter(None, given.without.split(",")))
    dtypes = tuple(given.dtype.split(","))
    sets = {name: jobs_of(name, device.type, dtypes) for name in given.sets}
    if given.build:
        first, step = (int(number) for number in given.build.split("/"))
        pairs = artefacts([job for jobs in sets.values() for job in jobs], device, leave_out)
        print(f"{len(pairs)} artefacts, every {step}th of them from the {first}th:", flush=True)
        for text in compile_all(pairs[first::step], device):
            print(text, flush=True)
        return
    effort = Effort(given.samples, given.call_s, fill=device.type == "cpu")
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.budget_s
    for number, (name, jobs) in enumerate(sets.items()):
        ways = (False, True) if given.replays else (False,)
        for turn, graph in enumerate(ways):
            budget_s = max(until - time.monotonic(), 0.0) / (len(sets) - number) / (len(ways) - turn)
            tuned = run_jobs(
                jobs, device, effort=effort, budget_s=budget_s, leave_out=leave_out, graph=graph, progress=told,
                isolate=not given.in_process,
            )  # fmt: skip
            print(f"{name}{', replays' if graph else ''}: {tuned}; not built: {dict(tuned.not_built)}", flush=True)
        print(f"{name}: {write(name, device, given.out)}", flush=True)


def _named(device: lz.Device) -> str:
    """A device in a file's name; a CPU with what tells its kind, since dozens of them are called AMD EPYC."""
    kind = f"_{capability_hash(device)[:8]}" if device.platform == "cpu" else ""
    return slug(device.name) + kind


def write(name: str, device: torch.device, folder: Path) -> str:
    """The table of a set, of everything in the cache folder that counts here."""
    database, holds = ENGINE.ledger.times.database, archive.here()  # type: ignore[attr-defined]  # the store that is in use
    rows = [
        row
        for row in archive.rows(database)
        if any(fnmatch.fnmatchcase(row.facts.get("operation", ""), glob) for glob in SETS[name]) and holds(row)
    ]
    if not rows:
        return "no times"
    file = folder / f"{_named(lz.Device.detect(str(device)))}_{name}.json"
    try:
        table = table_of(rows, f"python benchmarks/ship_times.py {name}")
    except ValueError as error:  # the cache folder keeps the times, and the other sets are written
        return f"no table of {len(rows)} times: {error}"
    archive.export_prior(table, file)
    cases = sum(len(family.cases) for family in table.families)
    return f"{file}: {len(table.families)} families, {cases} calls, {file.stat().st_size // 1000} kB"


if __name__ == "__main__":
    main()
