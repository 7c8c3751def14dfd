"""What bits that do not depend on the batch or on ranks cost a model, and which of its modules may lack them."""

from __future__ import annotations

import statistics

from layerzero.integrations.optimize.times.report import Optimized
from layerzero.integrations.optimize.times.workload import RUN, Workload

ROUNDS = 5
"""Runs of the model's own code and of what is put on, in turn; the first of each does not count."""


def tell_cost(report: Optimized, workload: Workload | None) -> None:
    """Say what invariant bits cost, in units of the model's own time, and which products may have other bits."""
    if workload is not None and report.time.allows("timing what invariant bits cost", RUN, 2 * ROUNDS):
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(ROUNDS):
            for on, samples in times.items():
                for each in report.replaced:
                    if each.exchange is not None:
                        each.exchange.on() if on else each.exchange.off()
                sample = workload.sample()
                samples.extend([sample] if turn else [])
        own_s, ours_s = (statistics.median(each) for each in times.values())
        report.tune.append(f"invariant bits cost {ours_s / own_s:.2f} times the model's own time on these inputs")
    left = [f"{each.path} ({each.module})" for each in report.left]
    if left:
        named = ", ".join(left[:3])
        report.tune.append(f"{len(left)} modules run their own code, whose bits may depend on the batch: {named}")
