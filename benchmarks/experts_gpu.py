"""Every kernel for the experts of a mixture on a GPU, by model, format and tokens: eager, captured, beside the floor.

    LAYERZERO_REQUIRE_VETTING=0 python benchmarks/experts_gpu.py --budget-s 400 --out experts.json

The floor is the time to read the weights of the active experts, or their arithmetic where that takes longer. ``error``
is the largest distance from torch's loop in float32, in units of the largest number.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import layerzero as lz
from layerzero.ops.quantize.schemes import scheme_of

MODELS = {"qwen3": (128, 2048, 768, 8), "olmoe": (64, 2048, 1024, 8), "gpt_oss": (32, 2880, 2880, 4)}
MODELS |= {"mixtral": (8, 4096, 14336, 2)}
"""Experts, hidden and inner features, experts of a token."""

FORMATS = ("bfloat16", "compressed-tensors:bits=4,group=128", "fp8", "fp8:group=128,rows=128", "mxfp4")
FORMATS += ("compressed-tensors:bits=8", "nvfp4", "awq:bits=4,group=128,zeros=stored")
BANDWIDTH, ARITHMETIC = 3.35e12, 989e12
"""Of an H100: bytes and bfloat16 operations a second."""


def made(shape: tuple[int, int, int], text: str) -> Any:
    """A stack of weights on the GPU, of a format; groups of 128 become 64 where they do not divide a row."""
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[2] ** -0.5)
    if text == "bfloat16":
        return weight
    if shape[2] % 128 and text.endswith(("group=128", "group=128,zeros=stored")):
        text = text.replace("group=128", "group=64")
    return lz.quantize_weight(weight, text)


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Microseconds of a call: the median of runs between events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) for one, other in itertools.pairwise(marks)) * 1e3


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same as a graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(name: str, text: str, tokens: int, weights: tuple[Any, Any], given: dict[str, Any]) -> list[dict[str, Any]]:
    """A line for each kernel that takes a call."""
    experts, hidden, inner, top_k = MODELS[name]
    rows = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    shares, ids = lz.moe_route(torch.randn(tokens, experts, device="cuda"), top_k=top_k)
    arguments = (rows, *weights, ids, shares)
    if text == "bfloat16":
        given = given | {"packed_gate_up": lz.PackedWeight(weights[0]), "packed_down": lz.PackedWeight(weights[1])}
    active, operation = len(ids.unique()), "moe.experts" if text == "bfloat16" else "moe.experts.quant"
    bits = 16 if text == "bfloat16" else scheme_of(weights[0].format).bits(weights[0].format)
    numbers = 3 * hidden * inner
    floor = max(active * numbers * bits / 8 / BANDWIDTH, 2 * tokens * top_k * numbers / ARITHMETIC) * 1e6
    found, exact = [], None
    if tokens <= 16:
        wide = [each if text == "bfloat16" else each.dequantized(torch.bfloat16) for each in weights]
        with lz.scope(locks={"moe.experts": "torch.experts_each"}):
            own = {key: each for key, each in given.items() if not key.startswith("packed")}
            exact = lz.moe_experts(rows, *wide, ids, shares, **own).float()
    for each in lz.explain("moe_experts", *arguments, **given).candidates:
        if each.reasons or each.kernel.id.startswith("reference"):
            continue
        kernel = each.kernel.id
        line: dict[str, Any] = {"model": name, "format": text, "tokens": tokens, "kernel": kernel, "floor": floor}
        try:
            with lz.scope(locks={operation: kernel}):

                def call() -> Any:
                    return lz.moe_experts(*arguments, **given)

                start = time.perf_counter()
                result = call()
                torch.cuda.synchronize()
                line["first_s"] = time.perf_counter() - start
                if exact is not None:
                    line["error"] = float((result.float() - exact).abs().amax() / exact.abs().amax())
                line["eager"] = timed(call, 10)
                if each.kernel.graph_safe:
                    line["graph"] = timed(captured(call), 20)
        except Exception as error:  # noqa: BLE001  # the next kernel may work
            line["failed"] = f"{type(error).__name__}: {error}"[:300]
        found.append(line)
        print(told(line), flush=True)
    return found


def told(line: dict[str, Any]) -> str:
    """A line for people."""
    numbers = " ".join(f"{key} {line[key]:.4g}" for key in ("first_s", "error", "eager", "graph") if key in line)
    over = f" x{line['graph'] / line['floor']:.2f}" if "graph" in line else ""
    what = f"{line['model']:8} {line['format'][:24]:24} t{line['tokens']:<5} {line['kernel']:28}"
    return f"{what} floor {line['floor']:.0f} {numbers}{over} {line.get('failed', '')}"


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3,gpt_oss,mixtral,olmoe")
    parser.add_argument("--formats", default=";".join(FORMATS[:5]), help="with semicolons; all for every one")
    parser.add_argument("--tokens", default="1,16,256,2048")
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    formats = FORMATS if asked.formats == "all" else asked.formats.split(";")
    start, found = time.perf_counter(), []
    for name in asked.models.split(","):
        experts, hidden, inner, _ = MODELS[name]
        for text in formats:
            if time.perf_counter() - start > asked.budget_s:
                break
            weights = made((experts, 2 * inner, hidden), text), made((experts, hidden, inner), text)
            given: dict[str, Any] = {}
            if name == "gpt_oss":
                given = {"activation": "swiglu_oai"}
                given["gate_up_bias"] = torch.randn(experts, 2 * inner, device="cuda", dtype=torch.bfloat16)
                given["down_bias"] = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16)
            for tokens in map(int, asked.tokens.split(",")):
                if time.perf_counter() - start < asked.budget_s:
                    found += measure(name, text, tokens, weights, given)
            del weights
            torch.cuda.empty_cache()
    if asked.out is not None:
        asked.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "lines": found}, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        main()
