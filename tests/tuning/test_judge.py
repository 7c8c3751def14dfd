"""The judge of ``benchmarks/``: what it says about choices, and that its command runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import judge

    return judge


def verdict(judge, chosen, times, *, again=None, torch=None, group="named"):
    first = {name.partition(".")[0]: name for name in times}
    return judge.Verdict(group, f"call {chosen}", "norm.rms", chosen, "measured", times, again, None, torch, {}, first)


def test_ratios_means_and_noise(judge):
    verdicts = [
        verdict(judge, "a.x", {"a.x": 10.0, "b.x": 20.0}, again=11.0, torch=20.0),
        verdict(judge, "a.x", {"a.x": 40.0, "b.x": 10.0}, again=40.0, torch=10.0, group="random"),
    ]
    assert [each.ratio for each in verdicts] == [1.0, 4.0]
    assert [each.noise for each in verdicts] == [1.1, 1.0]
    found = judge.summary(verdicts)["all"]
    assert found["mean"] == pytest.approx(2.0)
    assert (found["worst"], found["worst_call"], found["within_5_percent"]) == (4.0, "call a.x: a.x for b.x", 1)
    assert found["noise_worst"] == pytest.approx(1.1)
    assert found["libraries"]["b"]["mean"] == pytest.approx(2.0**0.5)
    assert found["torch_default"]["mean"] == pytest.approx(2.0**0.5)
    assert judge.summary(verdicts)["group random"]["calls"] == 1


def test_a_library_that_cannot_serve_a_call_leaves_it_to_torch(judge):
    verdicts = [verdict(judge, "a.x", {"a.x": 10.0}, torch=30.0), verdict(judge, "b.x", {"b.x": 10.0}, torch=50.0)]
    libraries = judge.summary(verdicts)["all"]["libraries"]
    assert libraries["a"] == {"calls": 2, "mean": pytest.approx(5.0**0.5), "worst": 5.0, "served": 1}
    assert "all with a choice" not in judge.summary(verdicts)


def test_what_is_judged_was_not_tuned(judge):
    from judged import NAMED_ON_GPU, judged_jobs

    from layerzero.tuning.measurement.jobs import default_grid

    assert len(NAMED_ON_GPU) == 19
    jobs = judged_jobs("cuda", 0, 40, ("bfloat16",))
    assert [job.name for _, job in jobs] == [job.name for _, job in judged_jobs("cuda", 0, 40, ("bfloat16",))]
    drawn = [job for group, job in jobs if group == "random"]
    assert len(drawn) == 40
    tuned = {job.name for job in default_grid("cuda")}
    assert not [job.name for job in drawn if job.name in tuned]
    assert {job.operation.rpartition("attention.")[2].partition(".")[2] for job in drawn} >= {"prefill", "decode"}


@pytest.mark.slow
def test_the_command_tunes_judges_and_writes(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--dtype", "float32", "--random", "1"]
    command += ["--only", "norm.rms 3x768|norm.rms 16x512", "--without", "inductor,flex_attention", "--samples", "3"]
    source = str(BENCHMARKS.parent / "src")
    environment = {**os.environ, "PYTHONPATH": source, "LAYERZERO_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run(
        [*command, "--steps", "tune,judge", "--out", str(tmp_path)], check=True, env=environment, capture_output=True
    )
    data = json.loads((tmp_path / "judge.json").read_text())
    assert data["summary"]["all"]["calls"] == 1
    assert [each["call"] for each in data["tuned"]["measured"]] == ["norm.rms 16x512 float32"]
    (case,) = data["cases"]
    assert case["chosen"] in case["times_us"]
    assert case["ratio"] >= 1.0
    page = (tmp_path / "judge.md").read_text()
    assert "| norm.rms | 1 |" in page
    assert "| always `torch` |" in page
