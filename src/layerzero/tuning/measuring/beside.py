"""Children that vet and build for a tuning run, beside its measuring where that disturbs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Report
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.jit import Outcome
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.measuring.timing import Deadline
from layerzero.tuning.proving.build_apart import build_apart
from layerzero.tuning.proving.vetting import Vetted, vet_calls

BETWEEN = 0.5
"""The share of what time is left that children may take where the measuring waits for them."""

Pairs = Sequence[tuple[Kernel, Facts]]


def times_the_chosen(kernel: Kernel, report: Report) -> float:
    """Its predicted cost over that of the kernel that would be chosen, in tenths; infinite where nobody predicts it.

    Only the chosen one has 1: who is as good by the prediction comes right after it. Tenths let calls keep their order
    where no more than the doubts of a prediction is between them.
    """
    if kernel.id == report.kernel_id:
        return 1.0
    costs_us = {each.kernel.id: each.cost_us for each in report.candidates}
    own_us, best_us = costs_us.get(kernel.id), costs_us.get(report.kernel_id or "")
    return max(1.05, round(own_us / best_us, 1)) if own_us and best_us else math.inf


class Asked(Protocol):
    """What of a run children need, and what they add to it."""

    device: torch.device
    deadline: Deadline
    modules: Sequence[str]
    vetted: list[Vetted]
    not_built: dict[str, str]

    def to_vet(self, jobs: Sequence[Job]) -> Pairs:
        """What only vetting keeps from these calls."""

    def to_build(self, jobs: Sequence[Job]) -> Pairs:
        """What children can build for these calls."""


class Beside:
    """Children that vet and build: beside the measuring, or, on a CPU, when asked to catch up."""

    def __init__(self, run: Asked) -> None:
        self.run, self.beside = run, run.device.type == "cuda"
        self._pool = ThreadPoolExecutor(1, "layerzero-tuning") if self.beside else None
        self._futures: list[Future[bool]] = []
        self._left: list[Callable[[Callable[[], bool]], bool]] = []
        self._over = self._built_one = False

    def ask(self, jobs: Sequence[Job], first: Pairs = ()) -> None:
        """Have done what these calls wait for: what is vetted, then what is built, and of that ``first`` before others.

        An H100 that was tuned for 300 s built FlashInfer's modules, a minute each, and for six of its 27 calls no
        FlashAttention 4, which takes 2 to 20 s and which five of them would have chosen (2026-11-24).
        """
        vet, build = self.run.to_vet(jobs), [*first, *self.run.to_build(jobs)]
        if not vet and not build:
            return

        def work(stop: Callable[[], bool]) -> bool:
            if vet:
                self.run.vetted += vet_calls(vet, modules=self.run.modules, go_on=True, stop=stop)
            open_ones = [pair for pair in build if pair[0].id not in self.run.not_built]  # it may have failed meanwhile
            build_apart(open_ones, self._built, stop, modules=self.run.modules)
            return True

        if self._pool is None:
            self._left.append(work)
        else:
            self._futures.append(self._pool.submit(work, lambda: self._over or self.run.deadline.passed()))

    def _built(self, kernel: Kernel, facts: Facts, outcome: Outcome) -> None:
        if outcome.log:
            self.run.not_built[kernel.id] = outcome.log.strip().splitlines()[-1]
            ENGINE.ledger.record_failure(kernel, facts, outcome.log)
        else:
            self._built_one = True

    def built_one(self) -> bool:
        """Whether something was built beside the measuring since this was asked."""
        one, self._built_one = self._built_one, False
        return one

    def caught_up(self, *, wait_for: bool) -> bool:
        """Whether something came out of them since; on a CPU they work now, for a part of what time is left."""
        left, self._left = self._left, []
        stop = self.run.deadline.part(BETWEEN)
        for work in left:
            work(stop)
        if wait_for and self._futures:
            timeout = None if self.run.deadline.left_s == float("inf") else max(self.run.deadline.left_s, 0.0)
            wait(self._futures, timeout, return_when="FIRST_COMPLETED")
        done = [each.result() for each in self._futures if each.done()]
        self._futures = [each for each in self._futures if not each.done()]
        return bool(done or left)

    @property
    def open(self) -> bool:
        """Whether more will come."""
        return bool(self._futures or self._left)

    def end(self) -> None:
        """Kill the children that still work."""
        self._over = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
