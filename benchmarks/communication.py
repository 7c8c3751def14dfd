"""Collectives by size: every kernel that may run, alone and behind it a residual and a norm, beside torch's own calls.

    torchrun --nproc-per-node 2 benchmarks/communication.py [--out FILE]   # NCCL where each rank has a GPU, else gloo

First all kernels are compared with the sum in float64, and the bits of all ranks with each other; then they are timed:
on GPUs as CUDA graphs of several calls, which is what a decode step runs, on a CPU call by call. A time is the median
of the slowest rank's. Last, ranks whose times differ call collectives of random sizes, which would end none of them if
two ran different kernels. Nothing here uses NVLink's multicast.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn import functional

import layerzero as lz
from layerzero.backends.torch import collectives
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.measurement.comparison import record_times

SIZES = [2**place for place in (10, 12, 14, 16, 18, 19, 20, 21, 22, 23, 24, 26)]
TOKENS = (1, 4, 16, 32, 64)
HIDDEN = 8192
CALLS, REPLAYS = 20, 7

BROKEN: set[str] = set()
"""Kernels that raised on every rank: they are told, denied, and not timed."""


def begin() -> torch.device:
    """Join the group, on a GPU of its own where there is one for each rank."""
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if torch.cuda.device_count() >= ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    of_gpus = {"device_id": device} if device.type == "cuda" else {}
    backend, wait = "nccl" if of_gpus else "gloo", timedelta(seconds=45)
    distributed.init_process_group(backend, timeout=wait, **of_gpus)
    return device


def took_us(run: Callable[[], object], device: torch.device, calls: int = CALLS) -> float:
    """Microseconds a call, the slowest rank's."""
    for _ in range(2):
        run()
    found = []
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with lz.capturing(graph):
            for _ in range(calls):
                run()
        for _ in range(REPLAYS + 2):
            distributed.barrier()
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            ends[0].record()
            graph.replay()
            ends[1].record()
            torch.cuda.synchronize()
            found.append(ends[0].elapsed_time(ends[1]) * 1e3 / calls)
        found = found[2:]
    else:
        for _ in range(REPLAYS):
            distributed.barrier()
            before = time.perf_counter()
            for _ in range(calls):
                run()
            found.append((time.perf_counter() - before) * 1e6 / calls)
    slowest = torch.tensor([statistics.median(found)], device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return float(slowest)


def legal(function: str, *given: Tensor) -> list[str]:
    found = [each.kernel.id for each in lz.explain(function, *given).candidates if each.legal]
    return [each for each in found if each not in BROKEN]


def under(name: str, operation: str, run: Callable[[], object]) -> object:
    """Run with a kernel locked; what it raises, on all ranks alike, is told and breaks it."""
    lz.lock(operation, name)
    try:
        return run()
    except (lz.LayerZeroError, RuntimeError) as error:
        BROKEN.add(name)
        print(f"rank {distributed.get_rank()}: {name}: {type(error).__name__}: {error}"[:600], flush=True)
        return None
    finally:
        lz.unlock(operation)


def bits(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(each.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def said_by_all(word: str) -> list[str]:
    found: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, word)
    return found


def compared(device: torch.device) -> list[str]:
    """What is wrong with any kernel, on this rank."""
    wrong, rank, ranks = [], distributed.get_rank(), distributed.get_world_size()
    weight = torch.linspace(0.5, 1.5, HIDDEN).to(device)
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((8,), (3, 7), (1, HIDDEN), (64, HIDDEN), (515, HIDDEN)):
            drawn = torch.Generator().manual_seed(sum(shape))
            parts = [torch.randn(shape, generator=drawn).to(dtype).to(device) for _ in range(ranks)]
            truth = torch.stack(parts).double().sum(0)
            odd = torch.empty(parts[0].numel() + 1, dtype=dtype, device=device)[1:].view(shape).copy_(parts[rank])
            for name in legal("all_reduce", parts[rank]):

                def twice(mine=parts[rank], odd=odd) -> tuple[Tensor, Tensor]:
                    return lz.all_reduce(mine), lz.all_reduce(odd if rank else mine)  # one begins between 16 bytes

                found = under(name, "comm.all_reduce", twice)
                if found is None:
                    continue
                got, again = found
                near = 3e-2 if dtype is torch.bfloat16 else 1e-5
                if not torch.allclose(got.double(), truth, near, near):
                    wrong.append(f"{name} {dtype} {shape}: off by {(got.double() - truth).abs().max():.3g}")
                if len(set(said_by_all(bits(got, again)))) > 1 or not torch.equal(got, again):
                    wrong.append(f"{name} {dtype} {shape}: bits differ")
            if shape[-1] != HIDDEN:
                continue
            given = parts[rank], parts[0], weight.to(dtype)
            for name in legal("all_reduce_add_rms_norm", *given):
                found = under(
                    name, "comm.all_reduce_add_rms_norm", lambda given=given: lz.all_reduce_add_rms_norm(*given)
                )
                if found is None:
                    continue
                want = functional.rms_norm(truth + parts[0].double(), (HIDDEN,), weight.double(), 1e-6)
                if not torch.allclose(found[0].double(), want, 5e-2, 5e-2):
                    wrong.append(f"{name} {dtype} {shape}: off by {(found[0].double() - want).abs().max():.3g}")
                if len(set(said_by_all(bits(*found)))) > 1:
                    wrong.append(f"{name} {dtype} {shape}: bits differ")
    return wrong


def moved(device: torch.device) -> list[str]:
    """What is wrong with the collectives that have one kernel, and with what they refuse, on this rank."""
    wrong, rank, ranks = [], distributed.get_rank(), distributed.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        numbers = torch.arange(6 * ranks * ranks).view(6, -1)
        parts = [(numbers + 100 * each).to(dtype).to(device) for each in range(ranks)]
        mine, rows = parts[rank], torch.cat([each.T.chunk(ranks)[rank] for each in parts])
        pairs = [
            ("all_gather", lz.all_gather(mine, -1), torch.cat(parts, -1)),
            ("all_to_all", lz.all_to_all(mine.T.contiguous()), rows),
        ]
        if dtype is not torch.int64:
            pairs.append(("reduce_scatter", lz.reduce_scatter(mine, 1), sum(parts).chunk(ranks, 1)[rank]))
        wrong += [f"{name} {dtype}" for name, got, want in pairs if not torch.equal(got, want)]
    if lz.facts("all_reduce", torch.ones(64, device=device))["group_reach"] == "peers":
        new, graph, x = distributed.new_group(), torch.cuda.CUDAGraph(), torch.ones(64, device=device)

        def captured() -> None:
            with lz.capturing(graph):
                lz.all_reduce(x, group=new)

        for name, run in (("a CPU tensor", lambda: lz.all_reduce(torch.ones(4))), ("a first call captured", captured)):
            try:
                run()
                said = "ran"
            except Exception as error:  # noqa: BLE001  # it is what is told
                said = f"{type(error).__name__}: {error}"
            if not rank:
                print(f"{name}: {said[:150]}", flush=True)
        if float(lz.all_reduce(x, group=new)[0]) != ranks:
            wrong.append("after a capture that was refused")
    return wrong


def by_size(device: torch.device, sizes: list[int]) -> list[dict[str, object]]:
    """Times of all_reduce of bfloat16."""
    rows = []
    facts = lz.facts("all_reduce", torch.ones(8, device=device))
    for size in sizes:
        x = torch.randn(size // 2, device=device).to(torch.bfloat16)
        row: dict[str, object] = {"bytes": size, "chosen": lz.which("all_reduce", x)["kernel_id"]}
        calls = CALLS if size <= 2**22 else 4
        row["in place"] = took_us(lambda x=x: distributed.all_reduce(x), device, calls)
        for name in legal("all_reduce", x):
            run = functools.partial(took_us, functools.partial(lz.all_reduce, x), device, calls)
            row[name] = under(name, "comm.all_reduce", run)
        for shots, run in (("one", collectives.one_shot), ("two", collectives.two_shot)):  # beyond their limits, too
            name = f"torch.symm_{shots}_shot_all_reduce"
            if name not in row and facts["group_reach"] == "peers" and 2**18 <= size <= collectives.BUFFER_BYTES:
                row[name] = took_us(functools.partial(run, x), device, calls)
        rows.append(row)
    return rows


def fused(device: torch.device) -> list[dict[str, object]]:
    """Times of all_reduce, residual and norm of bfloat16; the first two columns are what stands without LayerZero."""
    rows = []
    weight = torch.ones(HIDDEN, device=device, dtype=torch.bfloat16)
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device=device).to(torch.bfloat16)
        residual = torch.zeros_like(x)

        def apart(x=x, residual=residual) -> Tensor:
            distributed.all_reduce(x)
            residual.add_(x)
            return functional.rms_norm(residual, (HIDDEN,), weight, 1e-6)

        def two(x=x) -> Tensor:
            distributed.all_reduce(x)
            return functional.rms_norm(x, (HIDDEN,), weight, 1e-6)

        row: dict[str, object] = {"tokens": tokens}
        row["chosen"] = lz.which("all_reduce_add_rms_norm", x, residual, weight)["kernel_id"]
        row["in place, add, norm"], row["in place, norm"] = took_us(apart, device), took_us(two, device)
        for name in legal("all_reduce_add_rms_norm", x, residual, weight):
            call = functools.partial(lz.all_reduce_add_rms_norm, x, residual, weight)
            row[name] = under(name, "comm.all_reduce_add_rms_norm", functools.partial(took_us, call, device))
        rows.append(row)
    return rows


def mixed(device: torch.device, seconds: float, most: int) -> tuple[int, int]:
    """Random collectives of ranks with other times: calls, and those with a wrong sum; all end at the same call."""
    shared, own, rank = random.Random(0), random.Random(distributed.get_rank()), distributed.get_rank()
    names, ranks = [each.id for each in REGISTRY.candidates("comm.all_reduce")], distributed.get_world_size()
    wrong, until = 0, time.perf_counter() + seconds
    for number in range(most):
        size = 8 * shared.choice([1, 3, 64, 1000, 20000, 70000]) + shared.choice([0, 0, 0, 1])
        x = torch.full((size,), float(rank + 1), device=device, dtype=shared.choice([torch.float32, torch.bfloat16]))
        if not number % 50:
            facts = lz.facts("all_reduce", x)
            times = {REGISTRY.kernel(each): Measurement(*[own.uniform(1, 99)] * 2, 0.0, 30) for each in names}
            record_times(facts, times)
        got = lz.all_reduce(x, shared.choice(["sum", "sum", "max"]))
        wrong += float(got[-1]) not in (ranks * (ranks + 1) / 2, ranks)
        if number % 200 == 199:
            over = torch.tensor([time.perf_counter() > until], dtype=torch.int32, device=device)
            distributed.all_reduce(over, distributed.ReduceOp.MAX)
            if over.item():
                return number + 1, wrong
    return most, wrong


def table(rows: list[dict[str, object]]) -> str:
    """Short rows: the chosen kernel has a star."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "chosen"))
    short = [name.replace("all_reduce_add_rms_norm", "fused").replace("all_reduce", "ar") for name in names]
    lines = [" | ".join(short)]
    for row in rows:
        timed = [
            f"{row[name]:.1f}{'*' * (name == row['chosen'])}" if row.get(name) is not None else "-"
            for name in names[1:]
        ]
        lines.append(" | ".join([f"{row[names[0]]}", *timed]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the numbers as JSON")
    parser.add_argument("--seconds", type=float, default=10.0, help="of random collectives")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    given = parser.parse_args()
    device, said = begin(), {}

    def tell(text: str) -> None:
        if not distributed.get_rank():
            print(text, flush=True)

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    facts = lz.facts("all_reduce", torch.ones(8192, device=device))
    tell(f"{distributed.get_world_size()} ranks, {where}, torch {torch.__version__}, {facts['transport']}, ranks are "
         f"{facts['group_reach']}")  # fmt: skip
    said["wrong"] = sorted({each for each in said_by_all("; ".join(compared(device)[:6])) if each})
    if BROKEN:
        lz.configure(deny=sorted(BROKEN))
    tell(f"compared: {said['wrong'] or 'all near float64, the same bits on all ranks'}")
    said["all_reduce"] = by_size(device, [size for size in SIZES if size <= given.largest])
    tell(f"us of all_reduce of bfloat16 by bytes (* chosen):\n{table(said['all_reduce'])}")
    said["fused"] = fused(device)
    tell(f"us of all_reduce, residual and norm of {HIDDEN} by tokens:\n{table(said['fused'])}")
    said["moved"] = [each for each in said_by_all("; ".join(moved(device))) if each]
    tell(f"other collectives: {said['moved'] or 'right'}")
    said["calls"], said["wrong sums"] = mixed(device, given.seconds, 100_000)
    tell(f"{said['calls']} random all_reduce calls with other times on each rank: {said['wrong sums']} wrong, 0 hung")
    if given.out and not distributed.get_rank():
        given.out.write_text(json.dumps(said, indent=1))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
