"""What a mixture of experts takes by each of Transformers' ways and by LayerZero's; in turn.

    python benchmarks/mixtures.py --dtype bfloat16 --threads 2
    python benchmarks/mixtures.py --dtype float32 --without batched_mm

Random weights; a decoder of Mixtral's kind (hidden 1024, 4 layers, 16 heads on 4, 8 experts of 2048 features of which a
token has 2, vocabulary 32000). Each round times every variant once, ``grouped_mm`` first, which is Transformers'
default; medians of the samples are compared in which other processes took less than 8 % of the time. Tokens follow a
prompt that ``grouped_mm`` computed; ``batched_mm`` computes no prompt, for it copies the weights of all experts of each
token.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import layerzero as lz

PROMPT, STEPS = 256, 10
WAYS = ("grouped_mm", "eager", "batched_mm", "layerzero")


def mixtral(dtype: torch.dtype) -> Any:
    """The model, in Transformers' default."""
    config = transformers.MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=2048,
    )  # fmt: skip
    return transformers.MixtralForCausalLM._from_config(config, dtype=dtype).eval().requires_grad_(False)


def runs_of(model: Any, filled: Any) -> dict[str, Callable[[], float]]:
    """Seconds of a prompt, and of one token after it."""
    ids = prompt()

    def prefill() -> float:
        started = time.perf_counter()
        model.model(ids)  # torch copies the output weight where one row is cut out, which would hide the experts
        return time.perf_counter() - started

    def decode() -> float:
        cache, seconds = copy.deepcopy(filled), []
        for step in range(STEPS):
            started = time.perf_counter()
            model(ids[:, step : step + 1], past_key_values=cache)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    return {"prefill": prefill, "decode": decode}


def prompt() -> torch.Tensor:
    """The same each time."""
    return torch.randint(1, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def main() -> None:
    """Time them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without", action="append", default=[], help="one of the ways; again for more")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    stock = mixtral(getattr(torch, asked.dtype))
    lz.register_with_transformers()
    variants: dict[str, Any] = {}
    for way in WAYS:
        if way not in asked.without:
            variants[way] = shared(stock)
            variants[way].set_experts_implementation(way)
    variants["lz.optimize"] = shared(stock)
    report = lz.optimize(variants["lz.optimize"])
    print(report)
    kinds = {each.kind: each for each in report.replaced}
    if "experts" in kinds:
        variants["its experts alone"] = shared(stock)
        alone = lz.optimize(variants["its experts alone"])
        for each in alone.replaced:
            if each.kind != "experts" and each.exchange is not None:
                each.exchange.off()
    with torch.no_grad():
        filled = transformers.DynamicCache(config=stock.config)
        stock(prompt(), past_key_values=filled, logits_to_keep=1)
        runs = {name: runs_of(model, filled) for name, model in variants.items()}
        for what in ("prefill", "decode"):
            names = [name for name in variants if (name, what) != ("batched_mm", "prefill")]
            times: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(asked.rounds + 1):
                for name in names:
                    seconds, is_alone = watched(runs[name][what])
                    if turn and is_alone:
                        times[name].append(seconds)
            base = statistics.median(times["grouped_mm"]) if times["grouped_mm"] else 0.0
            for name, samples in times.items():
                if not samples:
                    print(f"{what:8} {name:18} never alone on this machine in {asked.rounds} rounds")
                    continue
                middle, count = statistics.median(samples), len(samples)
                print(f"{what:8} {name:18} {middle * 1e3:8.2f} ms, {count} times; {base / middle:.2f} times as fast")


def watched(run: Callable[[], float]) -> tuple[float, bool]:
    """What a run tells, and whether it was nearly alone on the machine meanwhile (Linux counts in 10 ms)."""
    before = _busy_s(), time.process_time(), time.perf_counter()
    seconds = run()
    all_s, own_s, wall_s = _busy_s() - before[0], time.process_time() - before[1], time.perf_counter() - before[2]
    return seconds, all_s - own_s <= max(0.02, 0.08 * wall_s)


def _busy_s() -> float:
    counts = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(counts) - counts[3] - counts[4]) / os.sysconf("SC_CLK_TCK")


def shared(model: Any) -> Any:
    """A copy that has the very parameters: a machine holds them once, and every variant reads the same memory."""
    memo: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


if __name__ == "__main__":
    main()
