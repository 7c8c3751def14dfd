"""benchmarks/same_tokens.py, model by model: 64 greedy tokens, and bfloat16 as near to the truth as stock's.

And how benchmarks/every_model.py reads what it is asked for.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import Any

import pytest
from architectures import generating

WRITERS = [each.name for each in generating()]
BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def judge() -> Any:
    return loaded("same_tokens")


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
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


@pytest.mark.parametrize(("ratio", "ends_with"), [(1.0, 0), (float("nan"), 1)])
def test_no_number_is_a_difference(judge: Any, monkeypatch: pytest.MonkeyPatch, ratio: float, ends_with: int) -> None:
    monkeypatch.setattr(judge, "compared", lambda *_: (["", "", ""], [[1.0, ratio], [1.0, 1.0]]))
    monkeypatch.setattr(sys, "argv", ["same_tokens.py", "Llama"])
    assert judge.main() == ends_with


@pytest.mark.parametrize("name", ["same_tokens", "every_model"])
def test_a_name_that_is_none_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "nothing"])
    with pytest.raises(SystemExit):
        loaded(name).main()
    assert "got nothing" in capsys.readouterr().err


def test_a_type_whose_class_another_has_too_is_found() -> None:
    assert list(loaded("every_model").models(["llama"])) == [("decoder", "llama", "LlamaForCausalLM")]
