"""What ``lz.optimize`` gives whole models: stock, LayerZero's attention alone, optimized on its inputs; in turn.

    python benchmarks/optimize.py llama --dtype bfloat16 --threads 1
    python benchmarks/optimize.py minilm --dtype float32

Random weights; a Llama-shaped decoder (hidden 1024, 8 layers, 16 heads on 4, intermediate 2816, vocabulary 32000) and
an encoder of MiniLM's shape (hidden 384, 6 layers, 12 heads) on 32 texts of 128 tokens. Each round times every variant
once, stock first, and the medians are compared.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import layerzero as lz

PROMPT, STEPS = 512, 16


def llama(dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().to(dtype)


def minilm(dtype: torch.dtype) -> Any:
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12
    )
    return transformers.BertModel(config).eval().to(dtype)


def llama_runs(model: Any) -> dict[str, Callable[[], float]]:
    """Seconds of a prompt, and of one token after it."""
    ids = torch.randint(1, 32000, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def prefill() -> float:
        started = time.perf_counter()
        model(ids, logits_to_keep=1)
        return time.perf_counter() - started

    def decode() -> float:
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache, logits_to_keep=1)
        seconds = []
        for step in range(STEPS):
            started = time.perf_counter()
            model(ids[:, step : step + 1], past_key_values=cache)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    return {"prefill": prefill, "decode": decode}


def minilm_runs(model: Any) -> dict[str, Callable[[], float]]:
    ids = torch.randint(1, 30522, (32, 128), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)

    def encode() -> float:
        started = time.perf_counter()
        model(ids, attention_mask=mask)
        return time.perf_counter() - started

    return {"encode": encode}


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Callable[[], float]]]]] = {
    "llama": (llama, llama_runs),
    "minilm": (minilm, minilm_runs),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-inputs", action="store_true", help="optimize without measuring")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    make, runs_of = MODELS[asked.model]
    stock = make(getattr(torch, asked.dtype))
    attention, optimized = copy.deepcopy(stock), copy.deepcopy(stock)
    lz.register_with_transformers()
    attention.set_attn_implementation("layerzero")
    started = time.perf_counter()
    whole = list(runs_of(optimized).values())[-1]  # a prompt and its tokens
    inputs = None if asked.no_inputs else whole
    report = lz.optimize(optimized, inputs, rounds=asked.rounds)
    print(report)
    print(f"optimize took {time.perf_counter() - started:.0f} s")
    variants = {"stock": stock, "attention alone": attention, "lz.optimize": optimized}
    with torch.no_grad():
        runs = {name: runs_of(model) for name, model in variants.items()}
        for what in runs["stock"]:
            times: dict[str, list[float]] = {name: [] for name in variants}
            for turn in range(asked.rounds + 1):
                for name in variants:
                    seconds = runs[name][what]()
                    if turn:
                        times[name].append(seconds)
            base = times["stock"]
            for name, seconds in times.items():
                ratio = statistics.median(a / b for a, b in zip(base, seconds, strict=True))
                middle = statistics.median(seconds) * 1e3
                print(f"{what:8} {name:16} {middle:8.2f} ms ({min(seconds) * 1e3:.2f})  {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
