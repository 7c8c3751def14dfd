"""A virtual cache beside others: decoding over it, what growing costs, what it takes, and what steps cost the host.

    python benchmarks/kv_cache.py --device cuda

Times of decoding are medians of interleaved calls in one process, of every kernel that takes both.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import layerzero as lz

HEADS, KV_HEADS, DIM = 32, 8, 128


def timed(calls: list, device: str, rounds: int) -> list[float]:
    """Median microseconds of each call, one after the other in each round."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for place, call in enumerate(calls):
            if device == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(100_000)  # so that launching is not what is measured
                first.record()
                for _ in range(5):
                    call()
                last.record()
                last.synchronize()
                found[place].append(first.elapsed_time(last) * 200)
            else:
                started = time.perf_counter()
                call()
                found[place].append((time.perf_counter() - started) * 1e6)
    return [statistics.median(each) for each in found]


def filled(batch: int, length: int, device: str, dtype: torch.dtype, layers: int) -> lz.KVCache:
    """A virtual cache of as many tokens in each row, random ones in its first layer."""
    cache = lz.KVCache(
        layers,
        KV_HEADS,
        DIM,
        max_sequences=batch,
        max_length=2 * length,
        dtype=dtype,
        device=device,
        strategy="virtual",
    )
    names = [cache.allocate() for _ in range(batch)]
    cache.writing(names, length).commit()
    for tensor in (cache.layer(0).keys, cache.layer(0).values):
        for row in range(batch):
            tensor[row, :length] = torch.randn(length, KV_HEADS, DIM, device=device, dtype=dtype)
    return cache


def decode(batch: int, length: int, device: str, dtype: torch.dtype, rounds: int) -> None:
    """Decode over both, kernel by kernel."""
    cache = filled(batch, length, device, dtype, 1)
    keys, values, _ = cache.rows(list(cache), 0)
    plain = keys.contiguous(), values.contiguous()
    query = torch.randn(batch, 1, HEADS, DIM, device=device, dtype=dtype)
    report = lz.explain("attention", query, *plain, layout="BSHD")
    operation = report.facts.operation.name
    for kernel in [each.kernel.id for each in report.candidates if each.legal]:
        with lz.scope(locks={operation: kernel}):
            calls = [
                lambda: lz.attention(query, *plain, layout="BSHD"),
                lambda: lz.attention(query, keys, values, layout="BSHD"),
            ]
            try:
                worst = (calls[0]().float() - calls[1]().float()).abs().max().item()
                one, other = timed(calls, device, rounds)
            except lz.LayerZeroError as error:
                print(f"  {kernel}: {str(error).splitlines()[0][:120]}")
                continue
        times = f"plain {one:8.1f} us  virtual {other:8.1f} us  {other / one:.3f}"
        print(f"  B{batch} KV{length} {kernel:32s} {times}  {worst:.1e}")
    cache.close()


def growth(batch: int, device: str, dtype: torch.dtype, layers: int) -> None:
    """What adding memory costs, when a step has to wait for it and when a thread does it."""
    cache = lz.KVCache(
        layers, KV_HEADS, DIM, max_sequences=batch, max_length=65536, dtype=dtype, device=device, strategy="virtual"
    )
    names = [cache.allocate() for _ in range(batch)]
    cache.writing(names, 4096).commit()
    before, steps = cache.usage(), []
    for _ in range(1024):
        started = time.perf_counter()
        cache.writing(names).commit()
        steps.append((time.perf_counter() - started) * 1e6)
        time.sleep(0.001)  # a decode step's time, in which the thread works
    after = cache.usage()
    grown, waited = after.growths - before.growths, after.waited_growths - before.waited_growths
    pieces = max((after.committed_bytes - before.committed_bytes) / 2**21, 1)
    spent = after.growth_us - before.growth_us
    cost = f"{spent / pieces:.0f} us for 2 MiB ({layers} layers, {batch} rows)"
    print(f"  growth: {grown} of rows, {waited} waited for; {cost}")
    print(f"  a step's bookkeeping: median {statistics.median(steps):.0f} us, longest {max(steps):.0f} us")
    cache.close()


def memory(length: int, device: str, dtype: torch.dtype) -> None:
    """What is taken beside what is needed."""
    cache = filled(4, length, device, dtype, 4)
    usage = cache.usage()
    extra = usage.committed_bytes / usage.needed_bytes
    print(
        f"  memory: {length} tokens a row: {usage.committed_bytes / 2**20:.0f} MiB taken, {extra:.3f} of what is needed"
    )
    cache.close()


def bookkeeping(device: str, steps: int = 300) -> None:
    """What a decode step costs the host, by strategy: tables of pages beside tables of one row."""
    batch, length, caches = 64, 4096, {}
    for strategy in ("paged", "contiguous", "virtual"):
        sizes = {"max_sequences": batch, "max_length": 2 * length, "strategy": strategy, "device": device}
        cache = lz.KVCache(1, 1, 8, dtype=torch.bfloat16, **sizes)
        names = [cache.allocate() for _ in range(batch)]
        cache.writing(names, length).commit()
        blocks = -(-2 * length // cache.page_size)
        step = cache.writing(names, blocks=blocks)
        step.commit()
        caches[strategy] = cache, names, step
    calls = [lambda each=each: each[0].writing(each[1], reuse=each[2]).commit() for each in caches.values()]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(steps):
        for place, call in enumerate(calls):
            started = time.perf_counter()
            call()
            found[place].append((time.perf_counter() - started) * 1e6)
    told = (f"{name} {statistics.median(each):.0f} us" for name, each in zip(caches, found, strict=True))
    print(f"  a step of {batch} decodes behind {length} tokens, in the buffers of the one before: {', '.join(told)}")
    for cache, *_ in caches.values():
        cache.close()


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description="A virtual cache beside a plain one.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    cuda = given.device == "cuda"
    dtype = torch.bfloat16
    shapes = ((1, 32768), (16, 8192), (64, 2048)) if cuda else ((2, 512),)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if cuda else 'cpu'}")
    for batch, length in shapes:
        decode(batch, length, given.device, dtype, given.rounds if cuda else 3)
    growth(8 if cuda else 2, given.device, dtype, 8 if cuda else 1)
    for length in (8192, 16384, 32768) if cuda else (4096,):
        memory(length, given.device, dtype)
    bookkeeping(given.device)


if __name__ == "__main__":
    main()
