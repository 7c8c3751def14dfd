"""What ``lz.optimize`` gives whole decoders on a GPU: a token after a long prompt, and a prompt; ways taken in turn.

    python benchmarks/optimize_gpu.py llama8b
    python benchmarks/optimize_gpu.py gemma2_9b --layers 12 --batches 1,16 --skip compile

Random bfloat16 weights of a real model's shape, made on the device; nothing is loaded. One model serves every way but
``torch.compile``, which has a copy: its forwards are put on and taken off between rounds. Each round times every way
once, stock first; medians of rounds are compared, and a way that fails says why and costs no other its place.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import layerzero as lz

STEPS = 16
"""Tokens of one sample; a cache grows by them in every round, so that nothing is cropped between."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama8b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    }),
    "qwen3_8b": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }),
    "gemma2_9b": ("Gemma2", {
        "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }),
    "mistral7b": ("Mistral", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
    }),
    "tiny": ("Llama", {
        "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }),
}  # fmt: skip

Run = Callable[[], float]
"""Seconds of one sample."""


@dataclass
class Bench:
    """One model and how it is run.

    Attributes:
        model: on the device, in bfloat16.
        device, kv, rounds: where, tokens before the timed ones, and how often.
        failed: of each way, why there is no time.
        report: of ``lz.optimize``, with captured steps, which are left out of the way without.
    """

    model: Any
    device: torch.device
    kv: int
    rounds: int
    skip: set[str]
    failed: dict[str, str] = field(default_factory=dict)
    report: Any = None

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ids(self, batch: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch + length)
        return torch.randint(1, self.model.config.vocab_size, (batch, length), generator=generator).to(self.device)

    def way(self, name: str) -> None:
        """Put the forwards of a way on, and take all others off."""
        report = self.report
        served = [] if report is None else [each for each in report.replaced if each.exchange is not None]
        for each in served:
            each.exchange.off()
        self.model.set_attn_implementation("layerzero" if name == "attention alone" else self.setting)
        if not name.startswith("lz"):
            return
        if name.endswith("graph") and not any(each.kind == "step" for each in served):
            raise RuntimeError("lz.optimize captures no steps of this model; its report says why")
        for each in served:
            if each.kind != "step" or name.endswith("graph"):
                each.exchange.on()

    @property
    def setting(self) -> str:
        return "sdpa" if type(self.model)._supports_sdpa else "eager"

    def filled(self, cache: Any, batch: int, model: Any = None) -> Any:
        """A cache with the tokens before the timed ones, a few rows at once where the batch is large."""
        for part in self.ids(batch, self.kv).split(512, 1):
            (model or self.model)(part, past_key_values=cache, logits_to_keep=1, use_cache=True)
        return cache

    def decode(self, cache: Any, batch: int) -> Run:
        """Tokens one after another, without waiting for the device between."""
        token = self.ids(batch, 1)

        def run() -> float:
            self.model(token, past_key_values=cache, use_cache=True)  # what was put on anew is compared by value once
            self.wait()
            started = time.perf_counter()
            for _ in range(STEPS):
                self.model(token, past_key_values=cache, use_cache=True)
            self.wait()
            return (time.perf_counter() - started) / STEPS

        return run

    def static(self, batch: int, model: Any = None) -> Any:
        """Transformers' static cache, filled."""
        longest = self.kv + STEPS * (self.rounds + 4)
        return self.filled(transformers.StaticCache(config=self.model.config, max_cache_len=longest), batch, model)

    def graphed(self, batch: int) -> Run:
        """Stock in a CUDA graph, as one would capture it by hand."""
        cache, token = self.static(batch), self.ids(batch, 1)
        position = torch.full((batch, 1), self.kv, device=self.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.model(token, past_key_values=cache, position_ids=position, use_cache=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.model(token, past_key_values=cache, position_ids=position, use_cache=True)
        return self.timed(graph.replay, keep=(cache, graph, token, position))

    def compiled(self, batch: int, *, optimized: bool) -> Run:
        """Compiled as it is or after ``lz.optimize``, with CUDA graphs of the compiler's own."""
        model = copy.deepcopy(self.model)
        if optimized:
            lz.optimize(model)
        cache, token = self.static(batch, model), self.ids(batch, 1)
        position = torch.full((batch, 1), self.kv, device=self.device)
        compiled = torch.compile(model, mode="reduce-overhead")

        def step() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(token, past_key_values=cache, position_ids=position, use_cache=True)

        for _ in range(3):
            step()
        return self.timed(step, keep=(model, compiled))

    def among(self, makers: dict[str, tuple[str, Callable[[], Run]]]) -> dict[str, float]:
        """Make ways ready, then time them in turn."""
        runs: dict[str, tuple[str, Run]] = {}
        for name, (way, make) in makers.items():
            if any(each in name for each in self.skip):
                continue
            started = time.perf_counter()
            try:
                self.way(way)
                runs[name] = way, make()
                self.check()
            except Exception as error:  # noqa: BLE001  # told in its place
                self.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
                traceback.print_exc(limit=-6)
            print(f"  {name}: ready after {time.perf_counter() - started:.1f} s", flush=True)
        return race(self, runs)

    def warm(self, most_s: float = 20.0) -> None:
        """Run stock until three samples differ by less than a twentieth: a host may be slow at first."""
        self.way("stock")
        token, started = self.ids(1, 1), time.perf_counter()
        run = self.timed(lambda: self.model(token, use_cache=False))
        last = [run()]
        while time.perf_counter() - started < most_s and (len(last) < 3 or max(last[-3:]) > 1.05 * min(last[-3:])):
            last.append(run())
        print(f"warm after {time.perf_counter() - started:.1f} s: a step of stock took {last[0] * 1e3:.1f} ms, "
              f"then {last[-1] * 1e3:.1f}", flush=True)  # fmt: skip

    def agree(self) -> None:
        """Tell how far a way's logits are from stock's, after a prompt and four tokens, in units of the largest."""
        found: dict[str, torch.Tensor] = {}
        for way in ("stock", "lz.optimize", "lz.optimize graph"):
            try:
                self.way(way)
                cache = transformers.DynamicCache(config=self.model.config)
                self.model(self.ids(2, 64), past_key_values=cache, use_cache=True)
                steps = [self.model(each, past_key_values=cache, use_cache=True) for each in self.ids(2, 4).split(1, 1)]
                found[way] = torch.cat([each.logits for each in steps], 1).double()
            except Exception as error:  # noqa: BLE001
                print(f"agreement: {way}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        for one, two in (("stock", "lz.optimize"), ("lz.optimize", "lz.optimize graph")):
            if one in found and two in found:
                off = (found[one] - found[two]).abs().max() / found[one].abs().max()
                same = (found[one].argmax(-1) == found[two].argmax(-1)).double().mean()
                print(f"agreement: {two} is {off:.1e} from {one}, {same:.0%} of greedy tokens are the same", flush=True)

    def check(self) -> None:
        """Wait for the device, which may have found something wrong meanwhile."""
        self.wait()

    def timed(self, step: Callable[[], Any], keep: Any = None) -> Run:
        """So many steps, the device waited for at the end."""

        def run(keep: Any = keep) -> float:
            self.wait()
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            self.wait()
            return (time.perf_counter() - started) / STEPS

        return run


def made(shape: str, layers: int | None, device: torch.device) -> Any:
    kind, sizes = SHAPES[shape]
    sizes = dict(sizes) | {"max_position_embeddings": 8192, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
    if layers:
        sizes["num_hidden_layers"] = layers
    config = getattr(transformers, f"{kind}Config")(**sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    return model.to(torch.bfloat16).eval()


def race(bench: Bench, runs: dict[str, tuple[str, Run]]) -> dict[str, float]:
    """Medians of each way; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(bench.rounds + 1):
        for name, (way, run) in runs.items():
            if name in bench.failed:
                continue
            try:
                bench.way(way)
                seconds = run()
                bench.check()
            except Exception as error:  # noqa: BLE001  # told in its place
                bench.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(each) for name, each in times.items() if each}


def decoding(bench: Bench, batch: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Ways without graphs in turn, twice; then those with, beside stock again, where they cost the others nothing.

    At numbers of keys that the process has not seen a step of stock took 61 ms, later 26 (H200, torch 2.11,
    2026-11-22), most likely since cuDNN's attention makes a plan for each. A way that runs after one with equal calls
    finds them made.
    """

    def dynamic() -> Run:
        return bench.decode(bench.filled(transformers.DynamicCache(config=bench.model.config), batch), batch)

    eager = {name: (name, dynamic) for name in ("stock", "attention alone", "lz.optimize")}
    yield "new lengths", bench.among(eager)
    yield "lengths seen", bench.among(eager)
    graphed: dict[str, tuple[str, Callable[[], Run]]] = {
        "stock": ("stock", dynamic),
        "lz.optimize graph": ("lz.optimize graph", dynamic),
    }
    if bench.device.type == "cuda":
        graphed["stock graph"] = "stock", lambda: bench.graphed(batch)
        if batch == 1:
            graphed["compile"] = "stock", lambda: bench.compiled(batch, optimized=False)
            graphed["compile after lz"] = "stock", lambda: bench.compiled(batch, optimized=True)
    yield "graphs", bench.among(graphed)


def prefilling(bench: Bench, batch: int, length: int) -> dict[str, float]:
    ids = bench.ids(batch, length)

    def run() -> float:
        bench.wait()
        started = time.perf_counter()
        bench.model(ids, logits_to_keep=1, use_cache=True)
        bench.wait()
        return time.perf_counter() - started

    return race(bench, {name: (name, run) for name in ("stock", "attention alone", "lz.optimize")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--kv", type=int, default=2048)
    parser.add_argument("--prefill", default="16x1024", help="batch x length; empty for none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", default="", help="ways to leave out, with commas: graph, compile, 'attention alone'")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds for measuring 32 tokens first, runs included")
    parser.add_argument("--weights", help="quantise them, as lz.optimize(weights=...) does: int4, int8")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    lz.register_with_transformers()
    started = time.perf_counter()
    model = made(asked.shape, asked.layers, device)
    print(f"{asked.shape}: {sum(each.numel() for each in model.parameters()) / 1e9:.2f}e9 parameters, "
          f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    skip = {each.strip() for each in asked.skip.split(",") if each.strip()}
    bench = Bench(model, device, asked.kv, asked.rounds, skip)
    rows: list[str] = []
    with torch.no_grad(), contextlib.ExitStack() as without:
        bench.way("stock")
        begun, inputs = time.perf_counter(), None
        if asked.tune:
            prompt = bench.ids(1, 512)
            inputs = lambda: model.generate(prompt, max_new_tokens=32, do_sample=False)  # noqa: E731
        given: dict[str, Any] = {"budget_s": asked.tune or None, "rounds": 1, "graph": "graph" not in skip}
        if asked.weights:
            given |= {"weights": asked.weights}
        bench.report = lz.optimize(model, inputs, **given)
        wrong = [
            found[1] for each in bench.report.left if (found := re.search(r"attention: (\S+) was off by", each.why))
        ]
        if wrong:  # told, and done without
            print(bench.report, f"once more without {wrong[0]}", sep="\n", flush=True)
            bench.report.undo()
            without.enter_context(lz.avoid(wrong[0]))
            bench.report = lz.optimize(model, inputs, **given)
        print(f"lz.optimize: {time.perf_counter() - begun:.1f} s\n{bench.report}", flush=True)
        bench.agree()
        bench.warm()
        for batch in [int(each) for each in asked.batches.split(",") if each]:
            for what, found in decoding(bench, batch):
                rows += table(f"decode B{batch} KV{asked.kv} {what}", found, bench)
                bench.failed.clear()
        if asked.prefill:
            batch, length = (int(each) for each in asked.prefill.split("x"))
            found = prefilling(bench, batch, length)
            rows += table(f"prefill B{batch} S{length}", found, bench)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"\n{asked.shape} on {where}, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{model.config.num_hidden_layers} layers, {time.perf_counter() - started:.0f} s in all")  # fmt: skip
    for each in bench.report.replaced:
        for why, count in getattr(getattr(each.exchange, "state", None), "left", {}).items():
            print(f"{count} steps ran as they are: {why}")
    print("\n".join(rows))


def table(what: str, found: dict[str, float], bench: Bench) -> list[str]:
    stock = found.get("stock", float("nan"))
    rows = [f"{what:32} {name:18} {each * 1e3:9.2f} ms  {each / stock:.2f} of stock" for name, each in found.items()]
    rows += [f"{what:32} {name:18} failed: {why}" for name, why in bench.failed.items()]
    print("\n".join(rows), flush=True)  # once more at the end, if that is reached
    return rows


if __name__ == "__main__":
    sys.exit(main())
