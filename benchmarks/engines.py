"""vLLM serving requests as they arrive, by its own attention and by LayerZero's: one table of both.

    python benchmarks/engines.py --rates 1,4,inf --requests 20      a small Llama; requests a second
    python benchmarks/engines.py --file calls.jsonl                 {"at_s": 0.5, "prompt": 120, "output": 40} a line
    python benchmarks/engines.py --model DIR --options '{"dtype": "bfloat16"}'

Requests arrive by a Poisson process, or all at once (``inf``), with lengths by :data:`LENGTHS`. Each way of serving is
a process, which serves them once for nothing. Then they take turns, so that what else runs on the machine meets all.
The table has medians of rounds, and of their ratios to vLLM's own. ``make test-engines`` makes an environment for it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
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

OPTIONS = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 512, "seed": 0}
OPTIONS |= {"enforce_eager": True, "skip_tokenizer_init": True, "enable_prefix_caching": False}
OPTIONS |= {"kv_cache_memory_bytes": 2**28, "disable_log_stats": True}
LLAMA = {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1408, "head_dim": 64}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.05}
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
ALONE |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
MARK = "SERVED "
STREAMS: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
MEASURES = {
    "tokens a second": lambda turn: turn["tokens_a_s"],
    "first token, ms": lambda turn: 1e3 * statistics.median(turn["first_s"]),
    "slowest of 20": lambda turn: 1e3 * statistics.quantiles(turn["first_s"], n=20, method="inclusive")[-1],
    "between tokens, ms": lambda turn: 1e3 * statistics.median(turn["between_s"]),
}


def arrivals(rate: float, count: int, seed: int) -> list[dict[str, Any]]:
    """When each request comes, and how long its prompt and its answer are."""
    draw, at_s, found = random.Random(seed), 0.0, []
    for prompt, output in itertools.islice(itertools.cycle(LENGTHS), count):
        found.append({"at_s": at_s, "prompt": prompt, "output": output})
        at_s += draw.expovariate(rate)  # at a rate of inf 0
    return found


def child(model: str, options: dict[str, Any]) -> None:
    """Load the model, then serve what each line of the input holds."""
    import vllm

    engine = vllm.LLM(model=model, **options).llm_engine
    for turn, line in enumerate(sys.stdin):
        print(f"{MARK}{json.dumps(served(engine, json.loads(line), turn, vllm.SamplingParams))}", flush=True)


def served(engine: Any, requests: list[dict[str, Any]], turn: int, params: Any) -> dict[str, Any]:
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
            number = int(output.request_id.split("-")[1])
            times[number].append(time.perf_counter() - began)
            tokens[number] = list(output.outputs[0].token_ids)
    said = [token for number in sorted(tokens) for token in tokens[number]]
    return {
        "first_s": [of[0] - each["at_s"] for of, each in zip(times, requests, strict=True)],
        "between_s": [(of[-1] - of[0]) / max(each["output"] - 1, 1) for of, each in zip(times, requests, strict=True)],
        "tokens_a_s": len(said) / max(of[-1] for of in times),
        "tokens": said,
    }


def turn_of(process: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """What a process says of one turn. Raises: StopIteration where it ends; what it wrote says why."""
    print(json.dumps(requests), file=process.stdin, flush=True)
    said = next(line for line in process.stdout if line.startswith(MARK))
    return dict(json.loads(said.removeprefix(MARK)))


def row(turns: list[dict[str, Any]], own: list[dict[str, Any]]) -> str:
    """Medians of rounds, and of their ratios to the rounds of vLLM's own that ran just before."""
    cells = []
    for measure in MEASURES.values():
        ratio = statistics.median(measure(one) / measure(two) for one, two in zip(turns, own, strict=True))
        cells.append(f"{statistics.median(map(measure, turns)):.1f} ({ratio:.2f})")
    pairs = list(zip(turns[0]["tokens"], own[0]["tokens"], strict=True))
    return " | ".join([*cells, f"{sum(one == two for one, two in pairs)} of {len(pairs)}"])


def main(given: argparse.Namespace, folder: str) -> None:
    """Serve by every way, in turns, and print the table."""
    if given.model is None:
        import transformers

        transformers.set_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    loads = {rate: arrivals(float(rate), given.requests, given.seed) for rate in given.rates.split(",")}
    if given.file:
        loads = {given.file: list(map(json.loads, Path(given.file).read_text().splitlines()))}
    print(f"| arrivals a second | way | {' | '.join(MEASURES)} | same tokens |\n{'|---' * (3 + len(MEASURES))}|")
    with contextlib.ExitStack() as stack:
        processes = []
        for more, variables in WAYS.values():
            options = json.dumps(OPTIONS | given.options | more)
            command = [sys.executable, __file__, "--child", given.model or folder, "--options", options]
            processes.append(subprocess.Popen(command, env=os.environ | ALONE | variables, **STREAMS))
            stack.callback(processes[-1].kill)
        for rate, requests in loads.items():
            rounds = [[turn_of(each, requests) for each in processes] for _ in range(given.rounds + 1)][1:]
            for way, turns in zip(WAYS, zip(*rounds, strict=True), strict=True):
                print(f"| {rate} | {way} | {row(list(turns), [each[0] for each in rounds])} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("rates", "1,4,inf"), ("requests", 20), ("rounds", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    for name in ("file", "model", "child"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        child(arguments.child, arguments.options) if arguments.child else main(arguments, temporary)
