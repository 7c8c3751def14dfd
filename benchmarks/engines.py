"""vLLM serving requests as they arrive, by its own attention and by LayerZero's: one table of both.

    python benchmarks/engines.py --rates 1,4,inf --requests 20      a small Llama; requests a second
    python benchmarks/engines.py --file calls.jsonl                 {"at_s": 0.5, "prompt": 120, "output": 40} a line
    python benchmarks/engines.py --model DIR --options '{"dtype": "bfloat16"}'
    python benchmarks/engines.py --gpu --batches 1,16,64,256        a Llama 3 of 8B without weights, prompts of 512

Requests arrive by a Poisson process, or all at once (``inf``, and batches), with lengths by :data:`LENGTHS`. Each way
of serving is a process, which serves them once for nothing. Then they take turns, so that what else runs on the machine
meets all. Where a GPU cannot hold all of them (``--turns sleep``), one that has no turn keeps its weights on the host;
with ``--turns apart`` each runs all of its rounds alone.
The table has medians of rounds, and of their ratios to vLLM's own. ``make test-engines`` makes an environment for it;
``benchmarks/vllm_offline.sh`` packs one for a GPU host without a network.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LENGTHS = ((20, 40), (60, 30), (150, 60), (400, 20), (30, 80))
"""Tokens of a prompt and of its answer: short and long questions, a document with a short answer."""

WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "vLLM": ({}, {}),
    "LayerZero's attention": ({"attention_backend": "CUSTOM"}, {}),
    "and operators": ({"attention_backend": "CUSTOM"}, {"LAYERZERO_VLLM_OPERATORS": "all"}),
}
"""What differs: options of vLLM, and variables of its process."""

CUSTOM_OPS = {"compilation_config": {"custom_ops": ["+rms_norm", "+silu_and_mul"]}}
WAYS_OF_A_GPU: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "vLLM's FLASH_ATTN": ({"attention_backend": "FLASH_ATTN"}, {}),
    "LayerZero's attention": ({"attention_backend": "CUSTOM"}, {}),
    "and operators": ({"attention_backend": "CUSTOM"} | CUSTOM_OPS, {"LAYERZERO_VLLM_OPERATORS": "all"}),
    "in pieces": ({"attention_backend": "CUSTOM", "compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {}),
    "vLLM's FLASHINFER": ({"attention_backend": "FLASHINFER"}, {}),
}
"""``in pieces`` are graphs that break at LayerZero's attention. FlashInfer is the last: it may compile meanwhile."""

OPTIONS = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 512, "seed": 0}
OPTIONS |= {"enforce_eager": True, "skip_tokenizer_init": True, "enable_prefix_caching": False}
OPTIONS |= {"kv_cache_memory_bytes": 2**28, "disable_log_stats": True}
LLAMA = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1408, "head_dim": 64}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.05}
LLAMA_3_8B = {"vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
LLAMA_3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
LLAMA_3_8B |= {"rope_theta": 500000.0, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
OF_A_GPU = {"dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": 256, "max_num_batched_tokens": 8192}
OF_A_GPU |= {"enforce_eager": False, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 19 * 2**30}
OF_A_GPU |= {"cudagraph_capture_sizes": [1, 16, 64, 256]}
"""Keys and values of 256 sequences of 576 tokens take 18 GiB; graphs are captured for the batches that are served."""
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
ALONE |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
MARK = "SERVED "
STREAMS: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
MEASURES = {
    "tokens a second": lambda turn: turn["tokens_a_s"],
    "first token, ms": lambda turn: 1e3 * statistics.median(turn["first_s"]),
    "slowest of 20": lambda turn: 1e3 * statistics.quantiles(turn["first_s"] * 2, n=20, method="inclusive")[-1],
    "between tokens, ms": lambda turn: 1e3 * statistics.median(turn["between_s"]),
    "attention, us a call": lambda turn: statistics.median(turn["attention_us"] or [math.nan]),
}
"""The last is of a CPU alone: a layer's attention as vLLM calls it, with the write of its keys and values."""


def arrivals(rate: float, count: int, seed: int) -> list[dict[str, Any]]:
    """When each request comes, and how long its prompt and its answer are."""
    draw, at_s, found = random.Random(seed), 0.0, []
    for prompt, output in itertools.islice(itertools.cycle(LENGTHS), count):
        found.append({"at_s": at_s, "prompt": prompt, "output": output})
        at_s += draw.expovariate(rate)  # at a rate of inf 0
    return found


def child() -> None:
    """Load the model that the first line names, then serve the loads of each further line."""
    import vllm

    if "CUSTOM" in sys.argv or os.environ.get("LAYERZERO_VLLM_OPERATORS"):
        import layerzero_engines

        layerzero_engines.vllm_plugin()  # as vLLM itself does where LayerZero is installed
    llm = vllm.LLM(**json.loads(sys.stdin.readline()))
    sleeps = llm.llm_engine.vllm_config.model_config.enable_sleep_mode
    if sleeps:
        llm.sleep(level=1)
    times = attention_times(llm.llm_engine.vllm_config)
    print(f"{MARK}{json.dumps('ready')}", flush=True)
    for turn, line in enumerate(sys.stdin):
        if sleeps:
            llm.wake_up()
        loads = enumerate(json.loads(line))
        found = []
        for number, load in loads:
            times.clear()
            found.append(served(llm.llm_engine, load, f"{turn}-{number}", vllm.SamplingParams))
            found[-1]["attention_us"] = [*times]
        if sleeps:
            llm.sleep(level=1)
        print(f"{MARK}{json.dumps(found)}", flush=True)


def attention_times(config: Any) -> list[float]:
    """What each call of a layer's attention takes from now on, in us, on a CPU.

    LayerZero writes keys and values in it; vLLM's own backend does so just before, which counts here.
    """
    times, spent_us = list[float](), [0.0]

    def timed(compute: Any, *, ends: bool) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = compute(*args, **named)
            spent_us[0] += 1e6 * (time.perf_counter() - began)
            if ends:
                times.append(spent_us[0])
                spent_us[0] = 0.0
            return result

        return call

    layers = config.compilation_config.static_forward_context.values()
    classes = {type(each.impl) for each in layers if hasattr(each, "impl")}
    for owner in classes if config.device_config.device_type == "cpu" else ():
        owner.forward = timed(owner.forward, ends=True)
        if hasattr(owner, "do_kv_cache_update"):
            owner.do_kv_cache_update = timed(owner.do_kv_cache_update, ends=False)
    return times


def served(engine: Any, requests: list[dict[str, Any]], turn: str, params: Any) -> dict[str, Any]:
    """Serve requests as they come: seconds to the first token and between later ones, tokens a second, the tokens."""
    draw, waiting, times, tokens = random.Random(0), list(enumerate(requests)), [[] for _ in requests], {}
    prompts = [[draw.randrange(LLAMA["vocab_size"]) for _ in range(each["prompt"])] for each in requests]
    began = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1]["at_s"] <= time.perf_counter() - began:
            number, each = waiting.pop(0)
            wanted = params(temperature=0, max_tokens=each["output"], ignore_eos=True, detokenize=False)
            engine.add_request(f"{turn}-{number}", {"prompt_token_ids": prompts[number]}, wanted)
        if not engine.has_unfinished_requests():
            time.sleep(1e-3)
        for output in engine.step():
            number = int(output.request_id.split("-")[2])
            times[number].append(time.perf_counter() - began)
            tokens[number] = list(output.outputs[0].token_ids)
    said = [token for number in sorted(tokens) for token in tokens[number]]
    return {
        "first_s": [of[0] - each["at_s"] for of, each in zip(times, requests, strict=True)],
        "between_s": [(of[-1] - of[0]) / max(each["output"] - 1, 1) for of, each in zip(times, requests, strict=True)],
        "tokens_a_s": len(said) / max(of[-1] for of in times),
        "tokens": said,
    }


class Way:
    """A process that serves in one way."""

    def __init__(self, name: str, options: dict[str, Any], variables: dict[str, str], patience_s: float) -> None:
        self.name, self.options, self.patience_s = name, options, patience_s
        self.rounds: list[list[dict[str, Any]]] = []
        command = [sys.executable, __file__, "--child", options.get("attention_backend", "")]
        self.process: Any = subprocess.Popen(command, env=os.environ | ALONE | variables, **STREAMS)

    def tell(self, what: Any) -> None:
        """Write a line to it; one that ended is found when it is asked."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(what), file=self.process.stdin, flush=True)

    def said(self) -> Any:
        """What it answers; None where it ended, and what it wrote says why, or said nothing for long."""
        timer = threading.Timer(self.patience_s, self.process.kill)
        timer.start()
        found = next((line for line in self.process.stdout if line.startswith(MARK)), None)
        timer.cancel()
        return None if found is None else json.loads(found.removeprefix(MARK))

    def serve(self, loads: list[Any]) -> None:
        """One round of all loads; nothing of a process that ended."""
        if self.process.poll() is not None:
            return
        self.tell(loads)
        found = self.said()
        self.rounds += [found] if found else []
        speeds = ", ".join(f"{turn['tokens_a_s']:.1f}" for turn in found or ())
        told = f"{speeds} tokens a second" if found else "ended"
        print(f"{self.name}: {told}", file=sys.stderr, flush=True)


def row(turns: list[dict[str, Any]], own: list[dict[str, Any]]) -> str:
    """Medians of rounds, and of their ratios to the rounds of vLLM's own that ran just before."""
    cells = []
    for measure in MEASURES.values():
        ratio = statistics.median(measure(one) / measure(two) for one, two in zip(turns, own, strict=True))
        cells.append(f"{statistics.median(map(measure, turns)):.1f} ({ratio:.2f})")
    pairs = list(zip(turns[0]["tokens"], own[0]["tokens"], strict=True))
    return " | ".join([*cells, f"{sum(one == two for one, two in pairs)} of {len(pairs)}"])


def take_turns(ways: list[Way], loads: list[Any], given: argparse.Namespace) -> list[Way]:
    """Rounds of all ways, the first of which counts for nothing, while there is time: those that ran, with the rest."""
    began, groups = time.monotonic(), [[each] for each in ways] if given.turns == "apart" else [ways]
    for way in ways if given.turns == "together" else ():
        way.tell(way.options)
    for number, group in enumerate(groups, 1):
        for way in group:
            if given.turns != "together":
                way.tell(way.options)
            started = way.said() or "did not start"
            print(f"{way.name}: {started}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        ends, took_s = began + given.seconds * number / len(groups), 0.0
        for turn in range(given.rounds + 1):
            started_s = time.monotonic()
            if turn < 2 or started_s + took_s < ends:
                for way in group:
                    way.serve(loads)
                took_s = time.monotonic() - started_s
        for way in group if given.turns == "apart" else ():  # ends take seconds where weights lie on the host
            way.process.kill()
            way.process.wait()
    ran = [way for way in ways if len(way.rounds) > 1]
    if not ran:
        raise SystemExit("wanted two rounds of a way of serving, got none; what the processes wrote says why")
    least = min(len(way.rounds) for way in ran)
    for way in ran:
        way.rounds = way.rounds[1:least]
    return ran


def summary(ran: list[Way], names: list[str]) -> list[str]:
    """Tokens a second as ratios to the quickest of vLLM's own, and their geometric mean."""
    speeds = {
        way.name: [statistics.median(turn[place]["tokens_a_s"] for turn in way.rounds) for place in range(len(names))]
        for way in ran
    }
    own = [max(each) for each in zip(*[speeds[name] for name in speeds if name.startswith("vLLM")], strict=True)]
    lines = []
    for name, each in speeds.items() if own else ():
        ratios = [one / two for one, two in zip(each, own, strict=True)]
        cells = " | ".join(f"{ratio:.3f}" for ratio in (*ratios, statistics.geometric_mean(ratios)))
        lines.append(f"| {name} | {cells} |")
    head = f"| to vLLM's quickest, {len(ran[0].rounds)} rounds | {' | '.join(names)} | geometric mean |"
    return [head, f"{'|---' * (2 + len(names))}|", *lines]


def main(given: argparse.Namespace, folder: str) -> None:
    """Serve by every way, in turns, and print the table."""
    if given.model is None:
        import transformers

        transformers.set_seed(0)
        if given.gpu:
            transformers.LlamaConfig(**LLAMA_3_8B | given.shape).save_pretrained(folder)
        else:
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    loads = {rate: arrivals(float(rate), given.requests, given.seed) for rate in given.rates.split(",")}
    if given.file:
        loads = {given.file: list(map(json.loads, Path(given.file).read_text().splitlines()))}
    if given.batches:
        one = {"at_s": 0.0, "prompt": given.prompt, "output": given.output}
        loads = {f"{batch} at once": [one] * int(batch) for batch in given.batches.split(",")}
    options = {"model": given.model or folder} | OPTIONS | (OF_A_GPU if given.gpu else {}) | given.options
    options |= {"enable_sleep_mode": True} if given.turns == "sleep" else {}
    kinds = WAYS_OF_A_GPU if given.gpu else WAYS
    wanted = given.ways.split(",") if given.ways else [*kinds]
    with contextlib.ExitStack() as stack:
        ways = []
        for name in wanted:
            more, variables = kinds[name]
            ways.append(Way(name, options | more, variables, given.patience))
            stack.callback(ways[-1].process.kill)
        ran = take_turns(ways, [*loads.values()], given)
    print(f"| arrivals a second | way | {' | '.join(MEASURES)} | same tokens |\n{'|---' * (3 + len(MEASURES))}|")
    for place, load in enumerate(loads):
        own = [turn[place] for turn in ran[0].rounds]
        for way in ran:
            print(f"| {load} | {way.name} | {row([turn[place] for turn in way.rounds], own)} |", flush=True)
    print("", *summary(ran, [*loads]), sep="\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = {"rates": "1,4,inf", "requests": 20, "rounds": 5, "seed": 0, "prompt": 512, "output": 64, "seconds": 3600}
    usual |= {"patience": 600}
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    for name in ("file", "model", "child", "batches", "ways"):
        parser.add_argument(f"--{name}")
    for name in ("options", "shape"):
        parser.add_argument(f"--{name}", type=json.loads, default={})
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--turns", choices=("together", "sleep", "apart"), default="together")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        child() if arguments.child is not None else main(arguments, temporary)
