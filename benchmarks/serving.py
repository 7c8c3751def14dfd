"""Attention as serving engines call it: every legal kernel side by side, and what the bookkeeping of a step costs.

    python benchmarks/serving.py                          decodes, mixed steps, ragged prefills, shared prefixes, ...
    python benchmarks/serving.py --only mixed,cascade     some of them
    python benchmarks/serving.py --tune-s 60              after as long of lz.tune; on a GPU half of it for replays
    python benchmarks/serving.py --device cpu --small     that it runs at all

Times are medians of interleaved rounds, microseconds a call: *called*, launching included where the host is the slower
one, and *replayed* in a CUDA graph, as engines decode. Then how many times the best each is, and the largest distance
of its results from any other kernel's.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import layerzero as lz

ROUNDS, CALLS = 9, 5
HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass
class Scenario:
    """One call, and the bytes that it has to read at least; ``step_of`` is told whether it is for a graph."""

    name: str
    function: str
    operation: str
    arguments: dict[str, Any]
    least_bytes: float = 0.0
    step_of: Callable[[bool], Any] | None = None
    in_graph: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step_of is not None:
            self.arguments["step"] = self.step_of(False)
            self.in_graph = {"step": self.step_of(True)}


def step_of(made: Mapping[str, Any], host: tuple[torch.Tensor, ...]) -> Callable[[bool], lz.StepMetadata]:
    """How the metadata of a call over pages is made."""
    tables, lens, starts = made["block_tables"], made["context_lens"], made.get("cu_seqlens_q")
    most = made["max_context_len"]

    def make(capturable: bool) -> lz.StepMetadata:
        return lz.StepMetadata(
            tables, lens, cu_seqlens_q=starts, host=host, max_context_len=most, capturable=capturable
        )

    return make


def paged(batch: int, lens: torch.Tensor, page: int, device: str, *, blocks: int = 0) -> dict[str, Any]:
    """A cache of shuffled pages, tables and lengths."""
    columns = blocks or -(-int(lens.max()) // page)
    pages = batch * columns
    shape = (pages, page, KV_HEADS, DIM)
    caches = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    table = torch.randperm(pages, device=device).int().view(batch, columns)
    found = {"key_cache": caches[0], "value_cache": caches[1], "block_tables": table}
    return found | {"context_lens": lens.to(device)}


def tokens(count: int, device: str, *, single: bool = False) -> torch.Tensor:
    """Random queries."""
    shape = (count, 1, HEADS, DIM) if single else (count, HEADS, DIM)
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def cache_bytes(lens: torch.Tensor) -> float:
    """Keys and values of all tokens once."""
    return float(lens.sum()) * KV_HEADS * DIM * 2 * 2


def decodes(device: str, small: bool) -> Iterator[Scenario]:
    """One token a sequence, lengths from half of the longest to it."""
    sizes = [(2, 64)] if small else [(1, 4096), (1, 32768), (16, 512), (16, 8192), (64, 2048), (64, 8192), (256, 4096)]
    for page in (16, 64):
        for batch, context in sizes:
            lens = torch.linspace(context // 2, context, batch).int() if batch > 1 else torch.tensor([context]).int()
            made = paged(batch, lens, page, device) | {"query": tokens(batch, device, single=True)}
            made["max_context_len"] = context
            name = f"decode B{batch} KV{context // 2}-{context} page {page}"
            least, step = cache_bytes(lens), step_of(made, (lens,))
            yield Scenario(name, "paged_attention", "attention.gqa.decode.paged", made, least, step)


def mixed(device: str, small: bool) -> Iterator[Scenario]:
    """Decodes and chunks of prefills behind a prefix, all at the same length."""
    for first, chunks, chunk, context in (
        [(2, 1, 8, 64)] if small else [(64, 8, 512, 4096), (8, 2, 2048, 4096), (128, 1, 256, 2048)]
    ):
        batch = first + chunks
        lens = torch.full((batch,), context, dtype=torch.int32)
        starts = torch.tensor([*range(first), *(first + chunk * each for each in range(chunks + 1))], dtype=torch.int32)
        made = paged(batch, lens, 16, device) | {"query": tokens(int(starts[-1]), device)}
        made |= {"cu_seqlens_q": starts.to(device), "max_seqlen_q": chunk, "decodes": first, "max_context_len": context}
        name = f"mixed {first} decodes and {chunks} x {chunk} at {context}"
        least, step = cache_bytes(lens), step_of(made, (lens, starts))
        yield Scenario(name, "paged_attention", "attention.gqa.mixed.paged", made, least, step)


def ragged(device: str, small: bool) -> Iterator[Scenario]:
    """Prefills of unlike lengths, one after the other."""
    for count, longest in [(3, 16)] if small else [(8, 1024), (4, 4096), (64, 256)]:
        lengths = torch.linspace(longest // 4, longest, count).int()
        starts = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
        total, device_starts = int(starts[-1]), starts.to(device)
        keys = {
            name: torch.randn(total, KV_HEADS, DIM, device=device, dtype=torch.bfloat16) for name in ("key", "value")
        }
        made = keys | {"query": tokens(total, device), "cu_seqlens_q": device_starts, "cu_seqlens_k": device_starts}
        made |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        made["step"] = lz.RaggedMetadata(device_starts, device_starts, host=(starts, starts))
        yield Scenario(
            f"ragged {count} x {longest // 4}-{longest}", "ragged_attention", "attention.gqa.prefill.ragged", made
        )


def cascade(device: str, small: bool) -> Iterator[Scenario]:
    """Decodes behind a prefix that all sequences share."""
    for batch, prefix, own in [(3, 32, 16)] if small else [(64, 8192, 512), (16, 8192, 512), (64, 2048, 2048)]:
        lens = torch.full((batch,), prefix + own, dtype=torch.int32)
        made = paged(batch, lens, 16, device) | {"query": tokens(batch, device, single=True)}
        shared = prefix // 16
        made["block_tables"][:, :shared] = made["block_tables"][:1, :shared]
        made |= {"shared_blocks": shared, "max_context_len": prefix + own}
        least, step = cache_bytes(lens - prefix) + cache_bytes(torch.tensor([prefix])), step_of(made, (lens,))
        name = f"cascade {batch} sequences, {prefix} shared, {own} own"
        yield Scenario(name, "cascade_attention", "attention.cascade.decode.paged", made, least, step)
        flat = {name: value for name, value in made.items() if name not in ("shared_blocks", "step")}
        name = f"the same {batch} sequences, flat"
        yield Scenario(name, "paged_attention", "attention.gqa.decode.paged", flat, least, step_of(flat, (lens,)))


def mla(device: str, small: bool) -> Iterator[Scenario]:
    """Latent decodes with DeepSeek-V3's heads and widths, over planes that are columns of one tensor."""
    for batch, context in [(2, 64)] if small else [(64, 4096), (64, 16384), (8, 4096), (128, 2048)]:
        heads, page, columns = 4 if small else 128, 64, -(-context // 64)
        lens = torch.full((batch,), context, dtype=torch.int32)
        both = torch.randn(batch * columns, page, 576, device=device, dtype=torch.bfloat16)
        query = torch.randn(batch, 1, heads, 576, device=device, dtype=torch.bfloat16)
        made: dict[str, Any] = {"q_nope": query[..., :512], "q_pe": query[..., 512:], "scale": 192**-0.5}
        made |= {"ckv_cache": both[..., :512], "kpe_cache": both[..., 512:]}
        made["block_tables"] = torch.randperm(len(both), device=device).int().view(batch, columns)
        made |= {"context_lens": lens.to(device), "max_context_len": context}
        name, least, step = (
            f"mla B{batch} KV{context} {heads} heads",
            batch * context * 576 * 2.0,
            step_of(made, (lens,)),
        )
        yield Scenario(name, "mla_attention", "attention.mla.decode.paged", made, least, step)


def sparse(device: str, small: bool) -> Iterator[Scenario]:
    """Prefills of one sequence whose blocks see a quarter of the keys, the first block always among them."""
    for length, size in [(128, 16)] if small else [(8192, 64), (16384, 128)]:
        count = length // size
        seen = torch.rand(count, count) < 0.25
        seen[:, 0] = True
        starts = torch.cat((torch.zeros(1), seen.sum(1).cumsum(0))).int().to(device)
        columns = seen.nonzero()[:, 1].int().to(device)
        made: dict[str, Any] = {"query": tokens(length, device), "block_indptr": starts, "block_indices": columns}
        for name in ("key", "value"):
            made[name] = torch.randn(length, KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
        made |= {"block_rows": size, "block_cols": size, "block_pattern": lz.BlockPattern(starts, columns)}
        yield Scenario(f"sparse {length} blocks of {size}", "sparse_attention", "attention.sparse.block", made)


GROUPS: dict[str, Callable[[str, bool], Iterator[Scenario]]] = {
    "decode": decodes,
    "mixed": mixed,
    "ragged": ragged,
    "cascade": cascade,
    "mla": mla,
    "sparse": sparse,
}


def timed(run: Callable[[], object], device: str) -> float:
    """Microseconds a call, of several in a row."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(CALLS):
            run()
        return (time.perf_counter() - started) / CALLS * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / CALLS * 1e3


class Way:
    """The public function with one kernel, called and replayed.

    Attributes:
        result: of the call.
        graph: so many calls, captured; None where the kernel is not captured.
        called, replayed: times, us.
    """

    def __init__(self, scenario: Scenario, kernel: str) -> None:
        self.function, self.scenario = getattr(lz, scenario.function), scenario
        self.locks = {scenario.operation: kernel}
        self.called: list[float] = []
        self.replayed: list[float] = []
        with self.locked():
            self.result = self.function(**scenario.arguments).float()
        self.graph = self.captured() if self.result.is_cuda and scenario.in_graph else None

    def locked(self) -> Any:
        """Let this kernel run alone, and compile where it has to."""
        return lz.scope(locks=self.locks, allow_jit_compile=True)

    def captured(self) -> torch.cuda.CUDAGraph | None:
        """Several calls in one graph."""
        arguments = self.scenario.arguments | self.scenario.in_graph
        try:
            with self.locked():
                for _ in range(2):
                    self.function(**arguments)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with lz.capturing(graph):
                    for _ in range(CALLS):
                        self.function(**arguments)
            graph.replay()
            torch.cuda.synchronize()
        except (lz.LayerZeroError, RuntimeError) as error:
            print(f"    {next(iter(self.locks.values()))}: not captured: {' '.join(str(error).split())[:160]}")
            return None
        return graph

    def sample(self, device: str, *, keep: bool) -> None:
        """Take a time of each kind."""
        with self.locked():
            for _ in range(2):  # a new scope chooses anew, which is no part of a call: a fifth of that was in each time
                self.function(**self.scenario.arguments)
            called = timed(lambda: self.function(**self.scenario.arguments), device)
        replayed = timed(self.graph.replay, device) / CALLS if self.graph is not None else None
        if keep:
            self.called.append(called)
            self.replayed += [] if replayed is None else [replayed]


def tuned(wanted: Sequence[str], device: str, small: bool, budget_s: float) -> None:
    """Measure the calls as a user does: they are recorded, then tuned, called and replayed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "calls.json")
        with lz.record(file):
            for name in wanted:
                for scenario in GROUPS[name](device, small) if name in GROUPS else ():
                    getattr(lz, scenario.function)(**scenario.arguments)
        ways = (False, True) if device == "cuda" else (False,)
        for graph in ways:
            started = time.perf_counter()
            found = lz.tune(manifest=file, budget_s=budget_s / len(ways), graph=graph)
            what = "replays" if graph else "calls"
            for name, why in {**found.not_built, **found.skipped}.items():
                print(f"  not measured: {name}: {why[:160]}")
            print(
                f"tuned {what} in {time.perf_counter() - started:.0f} s: {' '.join(str(found).split())[:200]}",
                flush=True,
            )


def measure(scenario: Scenario, device: str, without: Sequence[str]) -> None:
    """Print a line for each kernel that takes the call."""
    ways: dict[str, Way] = {}
    report = lz.explain(scenario.function, **scenario.arguments)
    elsewhere = {lz.ReasonCode.NOT_INSTALLED, lz.ReasonCode.PLATFORM_MISMATCH}
    for kernel in [each.id for each in lz.list_kernels() if scenario.operation in each.operations]:
        if any(fnmatch.fnmatchcase(kernel, each) for each in ("reference.*", *without)):  # a reference pads everything
            continue
        if any(reason.code in elsewhere for reason in report.failures.get(kernel, ())):
            continue
        try:
            ways[kernel] = Way(scenario, kernel)
        except Exception as error:  # noqa: BLE001  # told and left out
            print(f"    {kernel}: left out: {' '.join(str(error).split())[:160]}")
    for number in range(ROUNDS + 1):
        for way in ways.values():
            way.sample(device, keep=bool(number))  # the first round warms clocks and caches up
    floor = scenario.least_bytes / 4.187e12 * 1e6
    print(f"{scenario.name}" + (f" (reading the cache: {floor:.0f} us on an H200)" if floor >= 1 else ""))
    chosen = lz.explain(scenario.function, **scenario.arguments).kernel_id
    in_graph = ""
    if device == "cuda" and scenario.in_graph:
        arguments = scenario.arguments | scenario.in_graph
        in_graph = str(lz.explain(scenario.function, capturing=True, **arguments).kernel_id)
    called = {kernel: statistics.median(way.called) for kernel, way in ways.items()}
    replayed = {kernel: statistics.median(way.replayed) for kernel, way in ways.items() if way.replayed}
    for kernel, middle in sorted(called.items(), key=lambda item: item[1]):
        away = max(float((ways[kernel].result - other.result).abs().max()) for other in ways.values())
        line = f"  {middle:9.1f} {middle / min(called.values()):6.2f}"
        if kernel in replayed:
            line += f" | {replayed[kernel]:9.1f} {replayed[kernel] / min(replayed.values()):6.2f}"
        elif replayed:
            line += f" | {'':16}"
        line += f" | {away:8.1e}  {kernel}"
        marks = [text for text, its in (("chosen", chosen), ("chosen in a graph", in_graph)) if its == kernel]
        print(line + (f"  <- {', '.join(marks)}" if marks else ""), flush=True)


def bookkeeping(device: str, small: bool) -> None:
    """Host time of a step's metadata and slots, with lengths on the host, without any library's plan."""
    (scenario,) = list(mixed(device, small))[:1]
    given = scenario.arguments
    there = {"host": given["step"].host, "host_tables": given["block_tables"].cpu()}

    def anew() -> None:
        step = lz.StepMetadata(
            given["block_tables"], given["context_lens"], cu_seqlens_q=given["cu_seqlens_q"], **there
        )
        step.slot_mapping(16)

    step = given["step"]
    step.slot_mapping(16)
    lz.paged_attention(**given)  # as a layer has by then: the first call loads what later ones need
    for name, run in {"a new step and its slots": anew, "advance and its slots": lambda: step.advance(**there)}.items():
        for _ in range(20):
            run()
        spent = []
        for _ in range(200):
            if device != "cpu":
                torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            spent.append((time.perf_counter() - started) * 1e6)
        print(f"step: {name}: {statistics.median(spent):.0f} us of host time")


def main() -> None:
    """Run what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default=",".join(("step", *GROUPS)), help="groups in their order, with commas")
    parser.add_argument("--without", default="", help="globs of kernels to leave out, with commas")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--tune-s", type=float, default=0.0, help="seconds for measuring these calls first")
    given = parser.parse_args()
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    torch.manual_seed(0)
    wanted = given.only.split(",")
    if unknown := set(wanted) - {*GROUPS, "step"}:
        parser.error(f"--only: wanted some of {', '.join((*GROUPS, 'step'))}, got {', '.join(sorted(unknown))}")
    if given.tune_s:
        tuned(wanted, given.device, given.small, given.tune_s)
    for name in wanted:
        if name == "step":
            bookkeeping(given.device, given.small)
            continue
        for scenario in GROUPS[name](given.device, given.small):
            measure(scenario, given.device, given.without.split(","))


if __name__ == "__main__":
    main()
