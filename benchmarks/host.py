"""Host microseconds of a call: the kernel's own callable, torch's public function for its kernels, and LayerZero's.

Calls are small, so that the device keeps up and the queue never fills: what is timed is the launching. *direct* calls
what the kernel's loader returned with the very arguments that its plan gives it; *lz* is the public function, locked to
that kernel and warm. Rounds take turns; the quickest tenth of them counts.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from entries import own_entry

import layerzero as lz
from layerzero.engine.functions import CALLS
from layerzero.ops.attention.sweep import Heads, decode_case, prefill_case
from layerzero.ops.norm.declare import norm_case
from layerzero.testing.generate import RandomCall
from layerzero.tuning.measurement.contest import bound_plan, window
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import quantile

CALLS_A_ROUND, ROUNDS = 50, 40

SMALL = (
    prefill_case(Heads(8, 2, 64), 1, 32, causal=True),
    decode_case(Heads(8, 2, 64), 1, 128),
    norm_case("norm.rms", 1, 1024),
    norm_case("norm.layer", 1, 1024),
    norm_case("norm.add_rms", 1, 1024),
)


def host_times(device: torch.device, leave_out: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for each small call and each kernel that is legal for it."""
    rows = []
    for operation, case in SMALL:
        call = Job(operation, case, "bfloat16").make(device)
        with torch.no_grad():
            rows += _rows(call, device, leave_out)
    return rows


def _rows(call: RandomCall, device: torch.device, leave_out: tuple[str, ...]) -> list[dict[str, Any]]:
    function, rows = CALLS[call.function], []
    given = function.function.bind((), call.arguments)
    with window():
        report = lz.explain(call.function, **call.arguments)
        candidates = [each for each in report.candidates if each.legal and not each.kernel.is_reference]
    for candidate in candidates:
        kernel = candidate.kernel
        if kernel.id in leave_out or kernel.source in leave_out:
            continue
        try:
            with window():
                plan, run = bound_plan(candidate, report, call)
                run()
            direct = _direct(plan.run, tuple(given.values()))
        except Exception as error:  # noqa: BLE001  # a kernel that fails is a line of the table
            rows.append({"call": call.name, "kernel": kernel.id, "error": f"{type(error).__name__}: {error}"[:200]})
            continue
        lz.lock(report.operation, kernel.id)
        lz.configure(allow_jit_compile=True)
        try:
            public = functools.partial(getattr(lz, call.function), **call.arguments)
            public()
            runs: dict[str, Callable[[], Any]] = {"direct": direct, "lz": public}
            own = _own_entry(kernel.id, call)
            runs |= {"own": own} if own is not None else {}
            times = _host_us(runs, device)
        finally:
            lz.configure(allow_jit_compile=None)
            lz.unlock(report.operation)
        rows.append({"call": call.name, "kernel": kernel.id, **times, "lz_minus_direct": times["lz"] - times["direct"]})
    return rows


def _direct(run: Callable[..., Any], values: tuple[Any, ...]) -> Callable[[], Any]:
    """What the kernel's loader returned, with the arguments that a plan gives it."""
    namespace = run.__globals__
    target, seen = namespace["kernel"], []

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(functools.partial(target, *args, **kwargs))
        return target(*args, **kwargs)

    namespace["kernel"] = watch
    try:
        run(*values)
    finally:
        namespace["kernel"] = target
    return seen[0]


def _own_entry(kernel: str, call: RandomCall) -> Callable[[], Any] | None:
    """The library's public function, once it has run; None where there is none, or it fails, which is said."""
    try:
        entry = own_entry(kernel, call.function, call.arguments)
        if entry is not None:
            entry()
    except Exception as error:  # noqa: BLE001  # a library's own function that fails leaves its column empty
        print(f"{kernel}: its own function does not run: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None
    return entry


def _host_us(runs: Mapping[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    order, names = random.Random(0), list(runs)
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        order.shuffle(names)
        for name in names:
            run = runs[name]
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter_ns()
            for _ in range(CALLS_A_ROUND):
                run()
            rounds[name].append((time.perf_counter_ns() - started) / 1000.0 / CALLS_A_ROUND)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {name: quantile(each, 0.1) for name, each in rounds.items()}
