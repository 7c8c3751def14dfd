"""Attention as serving engines call it: every legal kernel side by side, and what the bookkeeping of a step costs.

    python benchmarks/serving.py                          decodes, mixed steps, ragged prefills, shared prefixes, ...
    python benchmarks/serving.py --only mixed,cascade     some of them
    python benchmarks/serving.py --device cpu --small     that it runs at all

Times are medians of interleaved rounds, microseconds a call, launching included where the host is the slower one; then
how many times the best they are, and the largest distance of their results from any other kernel's.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import layerzero as lz

ROUNDS, CALLS = 9, 5
HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass
class Scenario:
    """One call, and the bytes that it has to read at least."""

    name: str
    function: str
    operation: str
    arguments: dict[str, Any]
    least_bytes: float = 0.0


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
            made["step"] = lz.StepMetadata(
                made["block_tables"], made["context_lens"], host=(lens,), max_context_len=context
            )
            name = f"decode B{batch} KV{context // 2}-{context} page {page}"
            yield Scenario(name, "paged_attention", "attention.gqa.decode.paged", made, cache_bytes(lens))


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
        made["step"] = lz.StepMetadata(
            made["block_tables"],
            made["context_lens"],
            cu_seqlens_q=made["cu_seqlens_q"],
            host=(lens, starts),
            max_context_len=context,
        )
        name = f"mixed {first} decodes and {chunks} x {chunk} at {context}"
        yield Scenario(name, "paged_attention", "attention.gqa.mixed.paged", made, cache_bytes(lens))


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
        made["step"] = lz.StepMetadata(
            made["block_tables"], made["context_lens"], host=(lens,), max_context_len=prefix + own
        )
        least = cache_bytes(lens - prefix) + cache_bytes(torch.tensor([prefix]))
        name = f"cascade {batch} sequences, {prefix} shared, {own} own"
        yield Scenario(name, "cascade_attention", "attention.cascade.decode.paged", made, least)


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
        made["step"] = lz.StepMetadata(
            made["block_tables"], made["context_lens"], host=(lens,), max_context_len=context
        )
        least = batch * context * 576 * 2.0
        yield Scenario(
            f"mla B{batch} KV{context} {heads} heads", "mla_attention", "attention.mla.decode.paged", made, least
        )


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


def locked(scenario: Scenario, kernel: str) -> Callable[[], Any]:
    """The public function with one kernel."""
    function = getattr(lz, scenario.function)

    def run() -> Any:
        with lz.scope(locks={scenario.operation: kernel}, allow_jit_compile=True):
            return function(**scenario.arguments)

    return run


def measure(scenario: Scenario, device: str, without: Sequence[str]) -> None:
    """Print a line for each kernel that takes the call."""
    runs: dict[str, Callable[[], object]] = {}
    results: dict[str, torch.Tensor] = {}
    for kernel in [each.id for each in lz.list_kernels() if scenario.operation in each.operations]:
        if any(fnmatch.fnmatchcase(kernel, each) for each in ("reference.*", *without)):  # a reference pads everything
            continue
        run = locked(scenario, kernel)
        try:
            results[kernel] = run().float()
        except Exception as error:  # noqa: BLE001  # told and left out
            print(f"    {kernel}: left out: {' '.join(str(error).split())[:300]}")
            continue
        runs[kernel] = run
    chosen = lz.explain(scenario.function, **scenario.arguments).kernel_id
    times: dict[str, list[float]] = {kernel: [] for kernel in runs}
    for number in range(ROUNDS + 1):
        for kernel, run in runs.items():
            spent = timed(run, device)
            if number:  # the first round warms clocks and caches up
                times[kernel].append(spent)
    floor = scenario.least_bytes / 4.187e12 * 1e6
    print(f"{scenario.name}" + (f" (reading the cache: {floor:.0f} us on an H200)" if floor >= 1 else ""))
    best = min(statistics.median(each) for each in times.values())
    for kernel, each in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        middle = statistics.median(each)
        away = max(float((results[kernel] - other).abs().max()) for other in results.values())
        mark = "  <- chosen" if kernel == chosen else ""
        print(f"  {middle:10.1f}  {middle / best:5.2f}  {away:8.1e}  {kernel}{mark}", flush=True)


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
    for name, run in {
        "a new step and its slots": anew,
        "advance and its slots": lambda: step.advance(**there),
    }.items():
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
    parser.add_argument("--only", default=",".join((*GROUPS, "step")), help="groups, with commas")
    parser.add_argument("--without", default="", help="globs of kernels to leave out, with commas")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    given = parser.parse_args()
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    torch.manual_seed(0)
    wanted = given.only.split(",")
    for name, group in GROUPS.items():
        if name in wanted:
            for scenario in group(given.device, given.small):
                measure(scenario, given.device, given.without.split(","))
    if "step" in wanted:
        bookkeeping(given.device, given.small)


if __name__ == "__main__":
    main()
