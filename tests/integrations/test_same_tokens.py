"""benchmarks/same_tokens.py, model by model: 64 greedy tokens, and bfloat16 as near to the truth as stock's."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import Any

import pytest
from architectures import decoders, everything

WITH_ENCODER = {"twice", "speech", "both", "prefix"}
WRITERS = [*(each.name for each in decoders()), *(each.name for each in everything() if each.kind in WITH_ENCODER)]
FILE = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "same_tokens.py"


@pytest.fixture(scope="module")
def judge() -> Any:
    spec = importlib.util.spec_from_file_location("same_tokens", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_every_model_that_writes_is_judged(judge: Any) -> None:
    assert [each.name for each in judge.WRITERS] == WRITERS
    assert {"Mixtral", "Gemma2", "GptOss", "Bamba", "Bart", "Whisper", "Llava"} <= set(WRITERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_model_is_not_told_from_stock(judge: Any, name: str) -> None:
    texts, ratios = judge.compared(next(each for each in judge.WRITERS if each.name == name), "cpu")
    assert texts == ["", "", ""]
    assert max(map(max, ratios)) <= 1.5


def test_a_model_that_writes_otherwise_is_told(judge: Any) -> None:
    architecture = next(each for each in judge.WRITERS if each.name == "Llama")
    stock, other = judge.made(architecture, "cpu")
    other.model.norm.weight.data[:8] *= -1.0
    call = judge.drawn("dense", "cpu", "left", 0)
    said = judge.differing(stock, call, judge.written(stock, call), judge.written(other, call))
    assert "from token" in said
    assert "stock's best two" in said
