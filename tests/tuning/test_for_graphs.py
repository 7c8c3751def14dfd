"""What is measured for replays of a graph: calls whose steps a graph can go on reading, and kernels that take them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import layerzero as lz
from layerzero.tuning.measuring.contest import taking_part
from layerzero.tuning.measuring.grid import default_grid
from layerzero.tuning.measuring.jobs import Job
from layerzero.tuning.measuring.manifest import jobs_of
from paged_calls import PAGE, paged

LIBRARIES = {"torch": "2.11.0", "flashinfer-python": "0.7.2.post1", "vllm": "0.20.0"}


def recorded(step: bool) -> Job:
    """A call over pages, with an eager step or without one, as a workload has it."""
    queries, *caches, table, lens, _ = paged(queries=(1, 1), lens=(5, 7), dtype=torch.float32)
    with lz.record() as recording:
        made = lz.StepMetadata(table, lens) if step else None
        lz.paged_attention(queries.unsqueeze(1), *caches, table, lens, step=made)
    (job,) = jobs_of(recording.manifest(), "cpu")
    return job


def of_the_grid() -> Job:
    return next(each for each in default_grid("cpu", ("float32",)) if each.operation.endswith("decode.paged"))


@pytest.mark.parametrize("made", [lambda: recorded(True), of_the_grid], ids=["recorded", "case"])
def test_steps_of_calls_that_are_replayed_stay_where_they_are(made):
    job = made()
    assert (job.facts("cpu")["step"], job.make("cpu").arguments["step"].kind) == ("eager", "eager")
    replayed = dataclasses.replace(job, for_graph=True)
    assert replayed.facts("cpu")["step"] == "capturable"
    assert replayed.make("cpu").arguments["step"].capturable


def test_a_call_without_a_step_is_replayed_without_one():
    replayed = dataclasses.replace(recorded(False), for_graph=True)
    assert replayed.facts("cpu")["step"] == "none"


@pytest.mark.parametrize(("kind", "takes_part"), [("none", False), ("eager", False), ("capturable", True)])
def test_who_plans_on_the_host_is_not_replayed_without_a_step_that_stays(kind, takes_part):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    query, cache = meta(4, 1, 32, 128), meta(64, PAGE, 8, 128)
    table, lens = meta(4, 16, dtype=torch.int32), meta(4, dtype=torch.int32)
    step = None if kind == "none" else lz.StepMetadata(table, lens, capturable=kind == "capturable")
    with lz.scope(allow_jit_compile=True):
        report = lz.explain(
            "paged_attention", query, cache, cache, table, lens, step=step, device="H200", libraries=LIBRARIES
        )
        named = {each.kernel.id for each in taking_part(report, graph=True)}
        eager = {each.kernel.id for each in taking_part(report)}
    assert "flashinfer.paged_decode" in eager
    assert ("flashinfer.paged_decode" in named) is takes_part
