"""Processes of gloo that tuned differently, end, or have other versions; and the examples of the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranks_of_gloo import two_ranks

RANK = """
import os, sys, torch, layerzero as lz
from datetime import timedelta
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import DECIDE_NOTHING, SETTINGS
from layerzero.tuning.measurement.comparison import record_times
rank, store, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def group(seconds):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=seconds)
    )
group(2 if what == "dies" else 120)
def norm(input, weight, *, eps):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
for name in ("mine.one", "mine.two"):
    lz.register_kernel("norm.rms", name, supported_dtypes=["float32"])(norm)
lz.configure(distributed_selection="agree", deny=["inductor.*", "vllm.*"])
x, weight = torch.randn(4, 64), torch.ones(64)
chosen = lambda: lz.which("rms_norm", x, weight)["kernel_id"]
def tuned(one, two):
    times = {"mine.one": one, "mine.two": two}
    facts = lz.facts("rms_norm", x, weight)
    record_times(facts, {REGISTRY.kernel(name): Measurement(us, us, 0.0, 30) for name, us in times.items()})
tuned(*((9.0, 1.0) if rank == 0 else (1.0, 9.0)))
said = [chosen()]
if what == "version" and rank:
    lz.__version__ = "9.0.0"
if what == "dies" and rank:
    os._exit(0)
try:
    lz.warmup(lambda x: lz.rms_norm(x, weight), shapes=x)
    said.append(chosen())
    tuned(*((1.0, 90.0) if rank == 0 else (90.0, 1.0)))
    said.append(chosen())
    found = lz.agree()
    said += [chosen(), found.hash]
    torch.distributed.destroy_process_group()
    store += "2"
    group(120)
    said.append(lz.agree().hash)
except lz.FrozenChoiceError as error:
    said.append(str(error))
print("|".join(said))
"""


@pytest.mark.slow
def test_two_processes_that_tuned_differently_run_the_same_kernels(tmp_path):
    """Before, by priority; after warmup, by the lowest rank's times; then by its new ones; and in a second group."""
    one, two = two_ranks(tmp_path, RANK, "tuned")
    assert one[:4] == two[:4] == ["mine.one", "mine.two", "mine.two", "mine.one"]
    assert one[4:] == two[4:]
    assert one[4] == one[5]


@pytest.mark.slow
def test_a_rank_that_ends_is_named_by_the_other(tmp_path):
    one, _ = two_ranks(tmp_path, RANK, "dies")
    assert "rank 1 did not come within 2 s" in one[-1]


@pytest.mark.slow
def test_two_processes_of_other_versions_are_both_told(tmp_path):
    one, two = two_ranks(tmp_path, RANK, "version")
    assert one[1] == two[1] == "agree: rank 1: layerzero: wanted 0.1 as on the first rank, got 9"


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_examples_of_the_page_run_under_torchrun(tmp_path, place):
    page = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text()
    script = tmp_path / "script.py"
    script.write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[place])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--redirects", "1", "--log-dir", str(tmp_path)]  # lines of two ranks run together in one pipe
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (file.read_text().split()[1:] for file in tmp_path.rglob("stdout.log"))
    assert one == two
    assert len(one) > 1
