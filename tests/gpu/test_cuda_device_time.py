"""Device times on a GPU: graphs of many calls, and what cannot be captured."""

from __future__ import annotations

import pytest
import torch

from layerzero.core.operation import Case
from layerzero.tuning.measurement.bench import TimedBy, bench
from layerzero.tuning.measurement.clocks import CudaClock, device_times
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.measurement.timing import Effort

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_large_copy_takes_what_lies_between_events():
    source = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    alone = device_times({"": (lambda: target.copy_(source),)})[""].time_us
    between = min(CudaClock().device(lambda: target.copy_(source)) for _ in range(5))
    assert alone == pytest.approx(between, rel=0.15)


def test_a_capture_that_fails_leaves_torch_as_it_was():
    rows = torch.randn(64, 64, device="cuda")
    found = device_times({"bad": [lambda: rows.sum().item()], "good": [lambda: rows + 1]})
    assert found["bad"].time_us is None
    assert found["bad"].problem
    assert 0 < found["good"].time_us < 100
    assert torch.randn(4, device="cuda").isfinite().all()


def test_bench_has_both_times():
    job = Job("norm.rms", Case("64x4096", {"rows": 64, "hidden": 4096}), "bfloat16")
    found = bench(job, torch.device("cuda"), effort=Effort(5, 0.05), clock=CudaClock(), timed=TimedBy.BOTH)
    graphs = [line for line in found.lines if line.device_from.startswith("graph")]
    assert graphs
    assert all(line.device_us > 0 for line in graphs)  # a neighbour on the GPU makes either longer
