"""Time every legal attention and norm kernel of this machine's GPU, side by side, and write the tables.

    python benchmarks/gpu.py --out results            all cases
    python benchmarks/gpu.py --out results --only paged

What compiles is compiled first and counted apart. Candidates of a case run interleaved, the L2 cache is flushed before
each run, and device time is taken by events: the median of the runs. Host time is that of a call whose kernel is tiny,
the library's own queue never full. Shapes and the order of the first table follow the case lists below.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import layerzero as lz

RUNS = 30
FLUSH_BYTES = 256 * 2**20

# name, batch, queries, keys, heads, kv heads, head dim, causal
ATTENTION = [
    ("prefill B1 S128 (32/8/128)", 1, 128, 128, 32, 8, 128, True),
    ("prefill B1 S512 (32/8/128)", 1, 512, 512, 32, 8, 128, True),
    ("prefill B1 S2048 (32/8/128)", 1, 2048, 2048, 32, 8, 128, True),
    ("prefill B1 S8192 (32/8/128)", 1, 8192, 8192, 32, 8, 128, True),
    ("prefill B1 S32768 (32/8/128)", 1, 32768, 32768, 32, 8, 128, True),
    ("prefill B4 S2048 (32/8/128)", 4, 2048, 2048, 32, 8, 128, True),
    ("prefill B16 S512 (32/8/128)", 16, 512, 512, 32, 8, 128, True),
    ("prefill B64 S128 (32/8/128)", 64, 128, 128, 32, 8, 128, True),
    ("B8 S1024 (16/16/64) causal", 8, 1024, 1024, 16, 16, 64, True),
    ("B2 S4096 (24/24/128) full", 2, 4096, 4096, 24, 24, 128, False),
    ("B32 S256 (16/16/64) full", 32, 256, 256, 16, 16, 64, False),
    ("B2 S4096 (10/10/64) full", 2, 4096, 4096, 10, 10, 64, False),
    ("B2 S2048 (16/4/256) causal", 2, 2048, 2048, 16, 4, 256, True),
    ("decode B1 KV512 (32/8/128)", 1, 1, 512, 32, 8, 128, False),
    ("decode B1 KV8192 (32/8/128)", 1, 1, 8192, 32, 8, 128, False),
    ("decode B64 KV2048 (32/8/128)", 64, 1, 2048, 32, 8, 128, False),
    ("decode B64 KV8192 (32/8/128)", 64, 1, 8192, 32, 8, 128, False),
]
# name, batch, tokens a sequence, heads, kv heads, head dim, page size
PAGED = [
    ("paged B1 KV4096 (32/8/128) page 16", 1, 4096, 32, 8, 128, 16),
    ("paged B64 KV2048 (32/8/128) page 16", 64, 2048, 32, 8, 128, 16),
    ("paged B8 KV1024 (16/16/64) page 16", 8, 1024, 16, 16, 64, 16),
]
ROWS = [(1, 4096), (64, 4096), (4096, 4096), (16384, 8192)]


def calls(only: str, dtype: torch.dtype) -> list[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """(name, function, maker of the arguments) of every case."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    made: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
    for name, batch, seq_q, seq_k, heads, kv_heads, dim, causal in ATTENTION:

        def attention(b=batch, q=seq_q, k=seq_k, h=heads, kv=kv_heads, d=dim, c=causal) -> dict[str, Any]:
            tensors = {"query": normal(b, q, h, d), "key": normal(b, k, kv, d), "value": normal(b, k, kv, d)}
            return {**tensors, "causal": c, "layout": "BSHD"}

        made.append((name, "attention", attention))
    for name, batch, tokens, heads, kv_heads, dim, page in PAGED:

        def paged(b=batch, t=tokens, h=heads, kv=kv_heads, d=dim, n=page) -> dict[str, Any]:
            blocks = t // n
            tables = torch.randperm(b * blocks, device="cuda").int().view(b, blocks)
            lens = torch.full((b,), t, dtype=torch.int32, device="cuda")
            caches = {"key_cache": normal(b * blocks, n, kv, d), "value_cache": normal(b * blocks, n, kv, d)}
            step = lz.StepMetadata(tables, lens, max_context_len=t)
            given = {"block_tables": tables, "context_lens": lens, "max_context_len": t, "step": step}
            return {"query": normal(b, 1, h, d), **caches, **given}

        made.append((name, "paged_attention", paged))
    for rows, hidden in ROWS:
        for function in ("rms_norm", "layer_norm", "add_rms_norm"):

            def norm(r=rows, n=hidden, f=function) -> dict[str, Any]:
                more = {"normalized_shape": (n,), "bias": normal(n)} if f == "layer_norm" else {}
                more |= {"residual": normal(r, n)} if f == "add_rms_norm" else {}
                return {"input": normal(r, n), "weight": normal(n), **more}

            made.append((f"{function} {rows}x{hidden}", function, norm))
    for tokens in (64, 2048):

        def append(t=tokens) -> dict[str, Any]:
            slots = torch.randperm(8192 * 16, device="cuda")[:t]
            caches = {"key_cache": normal(8192, 16, 8, 128), "value_cache": normal(8192, 16, 8, 128)}
            return {"key": normal(t, 8, 128), "value": normal(t, 8, 128), **caches, "slot_mapping": slots}

        made.append((f"append {tokens} tokens (8/128)", "append_paged_kv", append))
    return [each for each in made if only in each[0]]


def bound(function: str, operation: str, kernel: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """A call of one kernel with these arguments."""
    call = getattr(lz, function)

    def run() -> Any:
        with lz.scope(locks={operation: kernel}, allow_jit_compile=True, memory_headroom_mb=65536):
            return call(**arguments)

    return run


def first(run: Callable[[], Any]) -> float:
    """Seconds of the first call, whatever it compiles included."""
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def device_us(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median device time of each candidate, interleaved, L2 flushed."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(RUNS + 3):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            flush.zero_()
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end) * 1000)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Run and write ``gpu.json`` and ``gpu.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", default="")
    parser.add_argument("--budget-s", type=float, default=1e9, help="stop starting cases after so many seconds")
    parser.add_argument("--build", metavar="I/N", help="only compile, every Nth case from the Ith; run N at once first")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", lz.LayerZeroWarning)
    torch.manual_seed(0)
    started, results = time.perf_counter(), []
    cases = calls(given.only, torch.bfloat16)
    if given.build:
        first_case, step = (int(number) for number in given.build.split("/"))
        for name, function, make in cases[first_case::step]:
            with torch.no_grad():
                print(
                    name, {kernel: round(run_s, 1) for kernel, run_s in built(function, make())[1].items()}, flush=True
                )
        return
    for name, function, make in cases:
        if time.perf_counter() - started > given.budget_s:
            print(f"out of time before {name}")
            break
        with torch.no_grad():
            results.append(case(name, function, make()))
        print(line(results[-1]), flush=True)
        (given.out / "gpu.json").write_text(json.dumps({"versions": versions(), "cases": results}, indent=1))
        torch.cuda.empty_cache()
    (given.out / "gpu.md").write_text(tables(results))
    print(tables(results))


def built(function: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, float], dict[str, Any], dict[str, str]]:
    """The report, seconds of each legal kernel's first call, its call, and what failed."""
    with lz.scope(allow_jit_compile=True, memory_headroom_mb=65536):
        report = lz.explain(function, **arguments)
    runs, compile_s, errors = {}, {}, {}
    for candidate in report.candidates:
        if not candidate.legal or candidate.kernel.is_reference:
            continue
        kernel = candidate.kernel.id
        run = bound(function, report.operation, kernel, arguments)
        try:
            compile_s[kernel] = first(run)
            runs[kernel] = run
        except Exception as error:  # noqa: BLE001  # a kernel that fails is a line of the table
            errors[kernel] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return report, compile_s, runs, errors


def case(name: str, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Time every legal kernel of one case."""
    chosen = lz.which(function, **arguments)["kernel_id"]
    report, compile_s, runs, errors = built(function, arguments)
    return {
        "case": name,
        "function": function,
        "operation": report.operation,
        "device_us": device_us(runs),
        "first_s": compile_s,
        "errors": errors,
        "chosen": chosen,
        "refused": {kernel: [str(reason) for reason in reasons] for kernel, reasons in report.failures.items()},
    }


def line(result: dict[str, Any]) -> str:
    """One case in one line, fastest first."""
    times = sorted(result["device_us"].items(), key=lambda item: item[1])
    text = ", ".join(f"{kernel} {time_us:.1f}" for kernel, time_us in times)
    errors = "".join(f"; {kernel} FAILED {error}" for kernel, error in result["errors"].items())
    return f"{result['case']}: {text}{errors}"


def versions() -> dict[str, str]:
    """What was measured."""
    names = ["torch", "flashinfer-python", "flash-attn-4", "vllm", "liger-kernel", "quack-kernels", "triton"]
    names += ["nvidia-cudnn-frontend", "xformers", "nvidia-cutlass-dsl"]
    found = {"layerzero": lz.__version__, "device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def tables(results: list[dict[str, Any]]) -> str:
    """A Markdown table for each function: a row a case, a column a kernel, and slowdowns against the best."""
    lines = [", ".join(f"{name} {version}" for name, version in versions().items()), ""]
    for function in dict.fromkeys(result["function"] for result in results):
        rows = [result for result in results if result["function"] == function]
        kernels = sorted({kernel for row in rows for kernel in row["device_us"]})
        lines += [f"| {function}, us | " + " | ".join(kernels) + " |", "|---" * (len(kernels) + 1) + "|"]
        for row in rows:
            best = min(row["device_us"].values(), default=0.0)
            cells = [_cell(row["device_us"].get(kernel), best) for kernel in kernels]
            lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
        lines.append("| slowdown against the best, geometric mean | " + " | ".join(_means(rows, kernels)) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(time_us: float | None, best: float) -> str:
    if time_us is None:
        return ""
    text = f"{time_us:.1f}" if time_us < 100 else f"{time_us:.0f}"
    return f"**{text}**" if time_us == best else text


def _means(rows: list[dict[str, Any]], kernels: list[str]) -> list[str]:
    texts = []
    for kernel in kernels:
        ratios = [
            row["device_us"][kernel] / min(row["device_us"].values()) for row in rows if kernel in row["device_us"]
        ]
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        texts.append(f"{mean:.2f} ({len(ratios)} of {len(rows)})")
    return texts


if __name__ == "__main__":
    main()
