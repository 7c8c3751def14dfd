"""Whether ranks that tuned differently run the same kernels, and whether anything hangs where a rank fails.

    python benchmarks/ranks.py calls [--ranks 2 4 8] [--calls 10000]   # random classes, other times on each rank
    python benchmarks/ranks.py calls --backend nccl --ranks 2 --modes agree --calls 100000 --seconds 60
    python benchmarks/ranks.py faults [--ranks 2 4 8] [--runs 50]      # a rank is killed, stopped, late, or raises
    python benchmarks/ranks.py cost [--ranks 2 4 8] [--classes 500]    # what an agreement takes

Ranks are processes of this machine, forked from one that imported everything, in a group of gloo, or started anew, with
a GPU each, in one of NCCL. Each has times of its own, new ones now and then, for four kernels of a norm, which write
down what ran. Told are the calls in which ranks ran different kernels, the runs that did not end, and those in which
some ranks agreed and others did not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.inspection import agreement  # noqa: F401  # ranks are forked from a process that imported it
from layerzero.tuning.measurement.comparison import record_times

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
NAMES = [f"mine.{each}" for each in ("one", "two", "three", "four")]
TIMEOUT_S, SLACK_S = 3.0, 30.0
"""A rank waits that long for others at each of three questions; forking eight ranks on few cores takes more."""

ran: list[int] = []


def begin(
    rank: int, ranks: int, port: int, folder: Path, mode: str, timeout_s: float, backend: str = "gloo"
) -> torch.device:
    """Make this process a rank, with times of its own, and say where its tensors lie."""
    ENGINE.ledger = Ledger()  # the one on disk fits a model of each kernel at every new time
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    wait = timedelta(seconds=60)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=where, rank=rank, world_size=ranks, timeout=wait)
    distributed.distributed_c10d._get_default_group().get_group_store().set_timeout(timedelta(seconds=timeout_s))
    for place, name in enumerate(NAMES):
        register = lz.register_kernel("norm.rms", name, platform=device.type, supported_dtypes=["float32"])
        register(norm_of(place))
    others = sorted({each.source for each in REGISTRY.kernels("norm.rms")} - {"reference"})
    denied = [f"{each}.*" for each in others if each not in ("mine", "user")]
    lz.configure(unmeasured="priority", deny=denied, distributed_selection=mode, perfdb={"enabled": False})
    return device


def norm_of(place: int):
    """A kernel that writes down that it ran."""

    def norm(input, weight, *, eps):
        ran.append(place)
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    return norm


def call_of(drawn: random.Random, classes: int, device: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A call of a random class: sizes of hidden states and powers of two of rows."""
    hidden = 8 * (1 + drawn.randrange(classes))
    return torch.ones(drawn.choice([1, 3, 7, 20]), hidden, device=device), torch.ones(hidden, device=device)


def tune(own: random.Random, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Other times on each rank, as if each had measured."""
    facts = lz.facts("rms_norm", x, weight)
    record_times(facts, {REGISTRY.kernel(each): Measurement(*[own.uniform(1, 99)] * 2, 0.0, 30) for each in NAMES})


def run_calls(
    rank: int, ranks: int, port: int, folder: Path, mode: str, calls: int, backend: str, seconds: float, agreements: int
) -> None:
    """Call, tune now and then, and agree every so often, as all ranks do; end at an agreement after so many seconds."""
    device = begin(rank, ranks, port, folder, mode, 120.0, backend)
    store = distributed.PrefixStore("ends", distributed.distributed_c10d._get_default_group().get_group_store())
    shared, own, until = random.Random(0), random.Random(rank + 1), time.perf_counter() + seconds
    found, spent = [], []
    for _ in range(calls):
        if mode != "independent":
            began = time.perf_counter()
            if not rank and began > until:
                store.set("ends", "1")  # all ranks find it after the agreement that rank 0 comes to next, or none does
            if lz.agree(every=max(calls // agreements, 1)) is not None:
                spent.append(time.perf_counter() - began)
                if store.check(["ends"]):
                    break
        x, weight = call_of(shared, 40, device)
        if shared.random() < (0.02 if calls > 2000 else 0.5):
            tune(own, x, weight)
        ran.clear()
        lz.rms_norm(x, weight)
        found.append(ran[0])
    (folder / f"said{rank}").write_text(json.dumps([found, spent, own.random()]))
    distributed.destroy_process_group()


def run_faults(rank: int, ranks: int, port: int, folder: Path, fault: str, victim: int, at: int) -> None:
    """Agree several times, while one rank is late or raises; the parent kills or stops it."""
    begin(rank, ranks, port, folder, "agree", TIMEOUT_S)
    shared, own = random.Random(at), random.Random(rank + 1)
    with (folder / f"said{rank}").open("w", buffering=1) as said:
        for number in range(at + 2):
            x, weight = call_of(shared, 8)
            tune(own, x, weight)
            lz.rms_norm(x, weight)
            print("at", number, file=said)
            if rank == victim and number == at:
                if fault in ("killed", "stopped"):
                    print("ready", number, file=said)
                    time.sleep(own.random() * 0.01)
                elif fault == "late":
                    time.sleep(TIMEOUT_S * own.uniform(0.5, 2.0))
                elif fault == "raises":
                    try:
                        lz.warmup("no.such.operation")
                    except KeyError:
                        print("error", number, "raised", file=said)
                    continue
            try:
                document = lz.agree()
                print("agreed", number, document.hash, file=said)
            except lz.LayerZeroError as error:
                print("error", number, str(error).replace("\n", " ")[:300], file=said)
    (folder / f"done{rank}").touch()
    while not rank and len(list(folder.glob("done*"))) < ranks:  # it holds the store, as torchrun's agent would
        time.sleep(0.01)
    os._exit(0)


def run_cost(rank: int, ranks: int, port: int, folder: Path, classes: int) -> None:
    """The first agreement on so many classes, one on which nothing changed, and an all_reduce of one int64."""
    begin(rank, ranks, port, folder, "agree", 300.0)
    own = random.Random(rank + 1)
    for number in range(classes):
        x, weight = torch.ones(2, 8 + number), torch.ones(8 + number)
        tune(own, x, weight)
        lz.rms_norm(x, weight)

    def took(run, times: int) -> float:
        found = []
        for _ in range(times):
            distributed.barrier()
            began = time.perf_counter()
            run()
            found.append(time.perf_counter() - began)
        return statistics.median(found) * 1e3

    first, again = took(lz.agree, 1), took(lz.agree, 30)
    word = torch.ones(1, dtype=torch.int64)
    reduced = took(lambda: distributed.all_reduce(word, distributed.ReduceOp.MIN), 30)
    (folder / f"said{rank}").write_text(json.dumps([first, again, reduced, len(lz.frozen().choices)]))
    distributed.barrier()
    os._exit(0)


def started(run, ranks: int, *rest, context=FORK) -> tuple[list, Path]:
    """Start the ranks; what uses a GPU is not forked."""
    folder = Path(tempfile.mkdtemp(prefix="ranks"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=quiet, args=(run, folder, each, ranks, port, folder, *rest)) for each in range(ranks)
    ]
    for each in processes:
        each.start()
    return processes, folder


def quiet(run, folder: Path, rank: int, *rest) -> None:
    """A rank whose error stream goes to a file: stores of torch tell every lost connection."""
    with (folder / f"errors{rank}").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    run(rank, *rest)


def ended(processes: list, within_s: float) -> int:
    """Wait, and end what is left; how many those were."""
    until = time.monotonic() + within_s
    for each in processes:
        each.join(max(until - time.monotonic(), 0.01))
    left = [each for each in processes if each.is_alive()]
    for each in left:
        each.kill()
        each.join()
    return len(left)


def said_by(folder: Path, ranks: int) -> list:
    return [json.loads((folder / f"said{rank}").read_text()) for rank in range(ranks)]


def calls_of(ranks: int, calls: int, mode: str, backend: str, seconds: float, agreements: int) -> None:
    context = SPAWN if backend == "nccl" else FORK
    processes, folder = started(run_calls, ranks, mode, calls, backend, seconds, agreements, context=context)
    hung = ended(processes, min(1200, 2 * seconds + 60))
    if hung or any(each.exitcode for each in processes):
        print(f"{ranks} ranks, {mode}: {hung} hung, exits {[each.exitcode for each in processes]}, see {folder}")
        return
    said = said_by(folder, ranks)
    differ = [len(set(each)) > 1 for each in zip(*(found for found, _, _ in said), strict=True)]
    kernels = Counter(said[0][0])
    spent = [each * 1e3 for _, spent, _ in said for each in spent] or [0.0]
    print(
        f"{ranks} ranks of {backend}, {mode}: {len(differ)} calls, {sum(differ)} in which ranks ran different kernels, "
        f"0 hung; {len(kernels)} kernels ran; an agreement took {statistics.median(spent):.0f} ms, "
        f"at most {max(spent):.0f}"
    )


def fault_of(ranks: int, number: int) -> tuple[str, list[str]]:
    """One run: what was done, and what is wrong with how it ended."""
    drawn = random.Random(number)
    fault = ("killed", "stopped", "late", "raises")[number % 4]
    victim, at = drawn.randrange(ranks), drawn.randrange(1, 3)
    processes, folder = started(run_faults, ranks, fault, victim, at)
    if fault in ("killed", "stopped"):
        said, until = folder / f"said{victim}", time.monotonic() + 60
        while time.monotonic() < until and not (said.exists() and f"ready {at}" in said.read_text()):
            time.sleep(0.002)
        time.sleep(drawn.random() * 0.03)
        os.kill(processes[victim].pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        if fault == "killed":
            (folder / f"done{victim}").touch()
        else:
            time.sleep(TIMEOUT_S * drawn.uniform(0.5, 2.0))
            os.kill(processes[victim].pid, signal.SIGCONT)
    hung = ended(processes, 3 * 3 * TIMEOUT_S + SLACK_S)
    wrong = [f"{hung} hung"] if hung else []
    told: dict[int, list[list[str]]] = {}
    for rank in range(ranks):
        lines = [line.split(" ", 2) for line in (folder / f"said{rank}").read_text().splitlines()]
        told[rank] = [each for each in lines if each[0] in ("agreed", "error")]
    whole = [rank for rank in told if rank != victim or fault != "killed"]
    agreed = {rank: {each[2] for each in told[rank] if each[0] == "agreed"} for rank in told}
    lost = [rank for rank in whole if not victim and any("store" in " ".join(each[2:]) for each in told[rank])]
    for rank in told:
        if any(agreed[rank] - agreed[each] for each in lost) and "answer" not in fault:
            fault = f"{fault} in the last answer"
        wrong += [
            f"rank {rank} agreed, and not rank {each}: {told}"
            for each in whole
            if each not in lost and agreed[rank] - agreed[each]
        ]
    errors = [each[2] for rank in told for each in told[rank] if each[0] == "error" and rank != victim]
    late = fault.startswith("stopped") and not victim  # it holds the store, and finds the others gone when it goes on
    if not late and not all(
        "store" in each or "the last one ended" in each or re.search(rf"ranks? (\d+, )*{victim}\b", each)
        for each in errors
    ):
        wrong.append(f"rank {victim} is not named: {errors}")
    if not errors and fault == "raises":
        wrong.append("no rank was told")
    return f"{fault}{' (the store)' if not victim else ''}", wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("calls", "faults", "cost"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first run of faults")
    parser.add_argument("--classes", type=int, default=500)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="of calls")
    parser.add_argument("--seconds", type=float, default=600.0, help="of calls, about")
    parser.add_argument("--agreements", type=int, default=10, help="of calls, spread over them")
    parser.add_argument("--modes", nargs="+", default=["independent", "agree", "rank0_broadcast"])
    given = parser.parse_args()
    for ranks in given.ranks:
        if given.what == "calls":
            for mode in given.modes:
                count = given.calls if mode == "agree" else given.calls // 10
                calls_of(ranks, count, mode, given.backend, given.seconds, given.agreements)
        elif given.what == "cost":
            processes, folder = started(run_cost, ranks, given.classes)
            ended(processes, 1200)
            first, again, reduced, held = (
                statistics.median(each) for each in zip(*said_by(folder, ranks), strict=True)
            )
            print(
                f"{ranks} ranks, {held:.0f} classes: first agreement {first:.0f} ms, again {again:.2f} ms, "
                f"an all_reduce of one int64 by gloo {reduced:.2f} ms"
            )
        else:
            counts: Counter[str] = Counter()
            for number in range(given.first, given.first + given.runs):
                fault, wrong = fault_of(ranks, number)
                counts[fault] += 1
                for each in wrong:
                    print(f"{ranks} ranks, run {number}, {fault}: {each}")
                counts["wrong"] += bool(wrong)
            print(f"{ranks} ranks: {dict(counts)}", flush=True)


if __name__ == "__main__":
    main()
