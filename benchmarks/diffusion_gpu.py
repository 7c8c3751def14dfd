"""Attention of diffusion models on a GPU: torch's own function, AITune's choice and LayerZero's, side by side.

    python benchmarks/diffusion_gpu.py --out diffusion.json

Flux, SD3 and Wan attend without a mask over thousands of tokens; SDXL and an encoder are there to see what is lost
where nothing is to be gained. Tensors lie as BSHD, seen as BHSD, or as BHSD. ``lz.scaled_dot_product_attention`` is
called in three states: *fresh* (shipped times, nothing built), *built* (what the background built meanwhile), *tuned*
(after ``lz.tune(module, inputs)`` of each case). AITune takes part where it is installed; its providers that need a
network are left out. Every time is the device's, of rounds in turn behind a flushed cache.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import layerzero as lz
from layerzero.serving.background_builds import BUILDS
from layerzero.tuning.measurement.clocks import clock_of
from layerzero.tuning.measurement.timing import Effort, race

Call = Callable[[], torch.Tensor]

EFFORT = Effort(samples=15, budget_s=0.4, hopeless=0.0, steady=0.0)


@dataclass(frozen=True)
class Case:
    """Batch, sequence, heads and head dim of one attention, and whether diffusion models call it."""

    name: str
    batch: int
    seq: int
    heads: int
    dim: int
    diffusion: bool = True

    def tensors(self, layout: str, device: str) -> tuple[torch.Tensor, ...]:
        """Query, key, value as (batch, heads, sequence, head dim); as BSHD they are views."""
        shape = (self.batch, self.seq, self.heads, self.dim)
        if layout == "BHSD":
            return tuple(
                torch.randn(self.batch, self.heads, self.seq, self.dim, device=device, dtype=torch.bfloat16)
                for _ in range(3)
            )
        return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))


CASES = (
    Case("Flux", 1, 4608, 24, 128),
    Case("SD3", 2, 4250, 24, 64),
    Case("Wan", 1, 16384, 12, 128),
    Case("SDXL", 2, 4096, 10, 64, diffusion=False),
    Case("encoder", 32, 512, 12, 64, diffusion=False),
)
SMALL = (Case("small", 1, 64, 4, 64),)


class Stock(torch.nn.Module):
    """What a model calls."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend."""
        return F.scaled_dot_product_attention(query, key, value)


class Ours(torch.nn.Module):
    """The same through LayerZero."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend."""
        return lz.scaled_dot_product_attention(query, key, value)


def aitune() -> Any:
    """AITune's ``kernel_forge`` without what needs TensorRT; None where it is not installed."""
    spec = importlib.util.find_spec("aitune")
    if spec is None or spec.origin is None:
        return None
    base = Path(spec.origin).parent / "torch"
    for name in ("", "module", "checkpoint", "backend", "tune_data"):
        package = types.ModuleType(f"aitune.torch.{name}".rstrip("."))
        package.__path__ = [str(base / name)]
        sys.modules[package.__name__] = package
    import aitune.torch.kernel_forge as forge

    return forge


def planned(forge: Any, tensors: tuple[torch.Tensor, ...]) -> tuple[Call | None, str]:
    """What AITune takes for a call, and its name; None where it keeps the stock function."""
    from aitune.torch.kernel_forge import kernel_provider as providers
    from torch.nn.attention import SDPBackend

    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    offered = [providers.TorchSDPAKernelProvider(each) for each in backends]
    offered.append(providers.FlashAttention4KernelProvider())
    model, keep = Stock(), F.scaled_dot_product_attention
    try:
        plan = forge.KernelOptimizer(offered).make_plan(model, [(tensors, {})], module=model)
    finally:
        F.scaled_dot_product_attention = keep
    if not plan.providers:
        return None, "stock"
    chosen = plan.providers[0]
    return lambda: chosen(*tensors), str(chosen.name)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance, in units of the largest value."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def timed(runs: dict[str, Call], device: str) -> dict[str, float]:
    """Microseconds on the device (on a CPU of a call)."""
    raced = race(runs, clock_of(torch.device(device)), EFFORT)
    return {name: each.device_us or sorted(each.samples)[len(each.samples) // 2] for name, each in raced.items()}


def state_of(
    state: str, cases: list[tuple[Case, str]], forge: Any, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All ways of every case in one state; what is measured for one case may not speak for another before its turn."""
    ours, found = Ours(), []
    if state == "built":
        BUILDS.idle.wait(options.wait_s)
    if state == "tuned":
        for case, layout in cases:
            lz.tune(ours, case.tensors(layout, options.device), budget_s=options.tune_s)
    for case, layout in cases:
        tensors = case.tensors(layout, options.device)
        stock = functools.partial(F.scaled_dot_product_attention, *tensors)
        runs: dict[str, Call] = {"stock": stock, "lz": functools.partial(ours, *tensors)}
        name = "not installed"
        if forge is not None:
            theirs, name = planned(forge, tensors)
            runs["AITune"] = theirs or stock
        wanted = stock()
        errors = {way: off(run(), wanted) for way, run in runs.items()}
        kernel = lz.explain("attention", *tensors, causal=False, layout="BHSD").kernel_id
        us = timed(runs, options.device)
        told = ", ".join(f"{way} {each:.1f} ({each / us['stock']:.3f})" for way, each in us.items())
        print(f"{state} {case.name} {layout}: {told}; {kernel}; AITune took {name}; off {errors}", flush=True)
        found.append({"state": state, "case": case.name, "layout": layout, "diffusion": case.diffusion, "us": us,
                      "kernel": kernel, "AITune": name, "off": errors})  # fmt: skip
        del tensors, runs, stock, wanted
    return found


def mean(found: list[dict[str, Any]], way: str, over: str = "stock") -> float:
    """The geometric mean of a way's times over another's."""
    ratios = [each["us"][way] / each["us"][over] for each in found]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def main() -> None:
    """Run all cases, and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wait-s", type=float, default=30.0, help="for what the background builds")
    parser.add_argument("--tune-s", type=float, default=20.0, help="of lz.tune, a case")
    parser.add_argument("--small", action="store_true", help="one tiny case, to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    forge, found, began = aitune(), [], time.monotonic()
    cases = [(case, layout) for case in (SMALL if options.small else CASES) for layout in ("BSHD", "BHSD")]
    with torch.no_grad():
        for state in ("fresh", "built", "tuned"):
            found += state_of(state, cases, forge, options)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {time.monotonic() - began:.0f} s; geometric means over stock")
    for kind, wanted in (("diffusion", True), ("others", False)):
        for state in ("fresh", "built", "tuned"):
            some = [each for each in found if each["state"] == state and each["diffusion"] is wanted]
            if some:
                theirs = f", AITune {mean(some, 'AITune'):.3f}" if forge is not None else ""
                print(f"{kind:10} {state:6} LayerZero {mean(some, 'lz'):.3f}{theirs}")


if __name__ == "__main__":
    main()
