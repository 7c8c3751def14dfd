"""Captures of kernels and calls of all operations on a GPU: proved in children, then made as a user makes them.

    python benchmarks/torture --only captures --times 300 --seconds 300

Every case is proved in a child, and its verdict written where a second child asks for it, in strict mode: it captures
the call through the public function, replays it with other values and compares. Kernels that wait, read on the host,
remember, launch on another stream, die or hang in a capture are among the cases.
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from _captured import CaptureFound, CaptureTask
from keeping import Found, cache

from layerzero.core.device import Device
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, capture_text
from layerzero.core.recipe import CallRecipe
from layerzero.engine import probe
from layerzero.engine.registry import REGISTRY
from layerzero.testing.children import End, Task, run_apart
from layerzero.testing.process import APART
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.verification.child import ChildTask, Reply
from layerzero.tuning.verification.vetting import class_pairs

CASES, WORKERS, STEP_S, UNSAFE_S = 300, 12, 60.0, 15.0

MOST = 24
"""Cases of a kernel that are drawn from."""

UNSAFE = "unsafe."

LINES = 22
"""Findings that are printed, the most frequent ones."""

SLOW_BUILDS = ("flashinfer",)
"""Libraries whose modules nvcc builds, a minute each."""

Pair = tuple[Kernel, Facts]


def captured(draw: random.Random, until: float, times: int | None) -> Found:
    """Prove, then capture."""
    zero = Counter({"wrong replays": 0, "unusable streams": 0, "unsafe and captured": 0, "lost captures": 0})
    other: Counter[str] = Counter()
    if not torch.cuda.is_available():
        return zero, {"CUDA devices": 0}
    began, now = time.monotonic(), time.monotonic
    with cache() as folder:
        pairs = _drawn(draw, times or CASES)
        ledger = FileLedger(folder)
        verdicts: dict[tuple[str, str], Verdict | None] = {}
        details: dict[tuple[str, str], str] = {}

        def proved(task: Task, reply: Reply) -> None:
            kernel, facts = task.about
            name = kernel.id, capture_text(facts)
            verdicts[name], details[name] = reply.verdict, reply.detail
            if reply.verdict is not None:
                safe = reply.verdict is Verdict.PASSED
                ledger.record_capture(kernel, facts, "" if safe else reply.detail or str(reply.verdict))

        half = now() + (until - now()) * 0.55
        _ask("layerzero.tuning.verification.child", pairs, ChildTask, proved, lambda: now() > half, folder, graph=True)
        seen: Counter[str] = Counter()
        who: dict[str, set[str]] = {}

        def made(task: Task, found: CaptureFound) -> None:
            kernel, facts = task.about
            verdict = verdicts.get((kernel.id, capture_text(facts)))
            zero["wrong replays"] += found.state == "wrong"
            zero["unusable streams"] += not found.usable
            zero["lost captures"] += found.state == "lost"
            zero["unsafe and captured"] += found.state in ("equal", "wrong") and verdict is not Verdict.PASSED
            other["captured"] += found.state in ("equal", "wrong", "lost")
            other["equal replays"] += found.state == "equal"
            other["refused before"] += found.state == "refused"
            other["died or hung"] += found.state == "ended"
            other["left"] += found.state in ("left", "stopped")
            if found.state in ("wrong", "lost", "ended") or not found.usable:
                print(f"{found.state.upper()} {kernel.id} {facts.operation.name} {verdict}: {found.detail[:300]}")
            elif found.state in ("refused", "left"):
                text = f"{found.state}: {_short(found.detail)}"
                seen[text] += 1
                who.setdefault(text, set()).add(kernel.id)

        proofs, known = now() - began, []
        for kernel, facts in pairs:
            name = kernel.id, capture_text(facts)
            if verdicts.get(name) is not None:
                known.append((kernel, facts))
            text = f"proof {verdicts.get(name) or 'without a verdict'}: {_short(details.get(name, 'not reached'))}"
            seen[text] += 1
            who.setdefault(text, set()).add(kernel.id)
        _ask("_captured", known, CaptureTask, made, lambda: now() > until, folder)
        for text, count in seen.most_common(LINES):
            names = ", ".join(sorted(who.get(text, ()))[:3])
            print(f"{count:4} {text}" + (f" ({names})" if names and "passed" not in text else ""))
    other |= {"cases": len(pairs), "kernels": len({kernel.id for kernel, _ in pairs})}
    other |= {f"proofs {each or 'without a verdict'}": n for each, n in Counter(verdicts.values()).items()}
    other |= {"s of the proofs": round(proofs), "s in all": round(now() - began)}
    return zero, other


def _short(text: str) -> str:
    return re.sub(r"\d+\.?\d*(e-?\d+)?", "N", text)[:110]


def _drawn(draw: random.Random, count: int) -> list[Pair]:
    """Some of each kernel in turn, of all that are installed, with the operations' cases; a tenth are unsafe ones."""
    device, machine = Device.detect("cuda"), probe.this_machine()
    kernels = [
        each
        for each in REGISTRY.kernels("*")
        if machine.state(each.backend, device).reason is None
        and not (each.jit and each.source in SLOW_BUILDS)
        and not each.operations[0].startswith("comm.")  # they need a second process
        and (device.platform in each.backend.platforms or each.backend.origin == "decorator")
    ]
    unsafe = [each for each in kernels if each.id.startswith(UNSAFE)]
    shapes = [(1 << draw.randrange(12), 64 << draw.randrange(6)) for _ in range(8)]
    found = []
    for each in unsafe:
        few = 2 if each.id.endswith("hangs") else -(-count // (10 * len(unsafe)))  # one that hangs takes its time
        found += _few(draw, class_pairs([each], "norm.rms", device, shapes, graph=True))[:few]
    others = [each for each in kernels if each not in unsafe]
    draw.shuffle(others)
    of = [iter(_few(draw, itertools.islice(class_pairs([each], "*", device, graph=True), MOST))) for each in others]
    while of and len(found) < count:
        for each in list(of):
            pair = next(each, None)
            if pair is None:
                of.remove(each)
            else:
                found.append(pair)
    return found[:count]


def _few(draw: random.Random, pairs: Iterator[Pair]) -> list[Pair]:
    found = [(kernel, facts) for kernel, facts in pairs if not facts["requires_grad"]]
    draw.shuffle(found)
    return found


def _ask(
    worker: str,
    pairs: list[Pair],
    job: Callable[..., Any],
    told: Callable[[Task, Any], None],
    stop: Callable[[], bool],
    folder: Path,
    **more: Any,
) -> None:
    """Have every case done by children; one that dies costs its own case."""
    reply = Reply if more else CaptureFound

    def ended(task: Task, end: End) -> None:
        if more:
            told(task, Reply(end.verdict, str(end)))
        else:
            told(task, CaptureFound("stopped" if end.kind in ("stopped", "given up") else "ended", str(end)))

    tasks = deque[Task]()
    for number, (kernel, facts) in enumerate(pairs):
        recipe = CallRecipe.of(facts).for_graph(facts.operation.schema.handles)
        harmful = kernel.id.startswith(UNSAFE)
        asked, seconds = job(kernel.id, recipe, ["_captured"], **more), UNSAFE_S if harmful else STEP_S
        tasks.append(Task(asked, kernel.id, seconds, f"child {number % WORKERS}", (kernel, facts), harmful))
    run_apart(
        worker,
        tasks,
        found=lambda task, value: told(task, msgspec.convert(value, reply)),
        ended=ended,
        at_once=WORKERS,
        modules=["_captured"],
        environment={**APART, **({} if more else {"LAYERZERO_CACHE_DIR": str(folder), "CUDA_LAUNCH_BLOCKING": "0"})},
        stop=stop,
    )


PARTS = (captured,)
