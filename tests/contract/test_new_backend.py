"""``python -m tools new-backend``: what it writes is complete, runs at once, and says what it still lacks."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.engine import probe
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS
from tools.__main__ import main

ROOT = Path(__file__).parents[2]
TABLE = "src/layerzero/backends/__init__.py"


@pytest.fixture
def checkout(tmp_path):
    for name in ("pyproject.toml", "src/layerzero/__init__.py", TABLE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def fastlib(monkeypatch):
    library = types.ModuleType("fastlib")
    library.rms_norm = lambda input, weight, *, eps: torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
    library.__spec__ = importlib.util.spec_from_loader("fastlib", None)
    monkeypatch.setitem(sys.modules, "fastlib", library)
    real = probe.installed_version
    monkeypatch.setattr(probe, "installed_version", lambda name: "1.0" if name == "fastlib" else real(name))
    return library


@pytest.fixture
def run(checkout, capsys):
    def called(*words, root=checkout, code=0):
        got = main(["--root", str(root), "new-backend", *words])
        said = capsys.readouterr()
        assert got == code, said
        return said.err if code else said.out

    return called


def declared(path):
    """The kernels of a written file."""
    spec = importlib.util.spec_from_file_location(f"written_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KERNELS


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_in_a_checkout_it_writes_a_built_in_backend(checkout, run):
    said = run("fastlib", "--operation", "rms_norm")
    assert "next steps:" in said
    assert "layerzero conformance --kernel fastlib.rms_norm" in said
    table = re.findall(r'^    "([\w.]+)",$', (checkout / TABLE).read_text(), re.MULTILINE)
    assert table == sorted(table)
    assert "fastlib" in table
    ignored = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"][0]["module"]
    assert "fastlib.*" in ignored
    assert set(ignored) > set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"][0]["module"]
    )
    (kernel,) = declared(checkout / "src/layerzero/backends/fastlib.py")
    assert kernel.operations == ("norm.rms",)
    assert 10 <= kernel.priority <= 30
    assert "from layerzero.backends.fastlib import KERNELS" in (checkout / "tests/kernels/test_fastlib.py").read_text()


def test_what_it_writes_fails_with_the_next_step_until_it_is_filled_in(checkout, fastlib, run):
    run("fastlib", "--operation", "rms_norm")
    path = checkout / "src/layerzero/backends/fastlib.py"
    x, w = torch.randn(4, 64), torch.randn(64)
    with pytest.raises(NotImplementedError, match=r"wanted the import of fastlib in _library\(\) of .*fastlib.py"):
        declared(path)[0].load(lz.facts("rms_norm", x, w))
    path.write_text(
        re.sub(r"raise NotImplementedError\(.*\)", "import fastlib\n\n    return fastlib", path.read_text())
    )
    lz.register_backend(declared(path))
    with lz.scope(locks={"rms_norm": "fastlib.rms_norm"}):
        torch.testing.assert_close(lz.rms_norm(x, w), torch.nn.functional.rms_norm(x, (64,), w, 1e-6))


def alike(function):
    schemas = [each.schema for each in function.operations]
    return len({(bool(each.layouts), *(tensor.name for tensor in each.required)) for each in schemas}) == 1


ASKED = [name for name, function in FUNCTIONS.items() if alike(function)]


@pytest.mark.parametrize("function", sorted(FUNCTIONS.keys() - ASKED))
def test_a_function_whose_operations_take_other_tensors_is_told_apart(run, function):
    said = run("fastlib", "--operation", function, code=2)
    assert f"got {', '.join(each.name for each in FUNCTIONS[function].operations)}; name one" in said


EACH = [pytest.param(each.name, marks=pytest.mark.slow) for each in lz.list_operations()]


QUICK = ("rms_norm", "paged_attention", "attention.causal")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*ASKED, "attention.causal")]


@pytest.mark.parametrize("operation", [*ALL, *EACH])
def test_every_operation_gets_a_declaration_that_registers_and_passes_the_linter(checkout, run, operation):
    run("fastlib", "--operation", operation)
    kernels = declared(checkout / "src/layerzero/backends/fastlib.py")
    lz.register_backend(kernels)
    wanted = [operation] if operation in REGISTRY.operations() else REGISTRY.operations_named(operation)
    assert list(kernels[0].operations) == wanted
    for name in ("src/layerzero/backends/fastlib.py", "tests/kernels/test_fastlib.py") if shutil.which("ruff") else ():
        line = ["ruff", "check", "--ignore", "I001", "--stdin-filename", name, "-"]  # its module is not where it looks
        text = (checkout / name).read_text()
        done = subprocess.run(line, check=False, cwd=ROOT, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_with_a_folder_for_it_it_writes_a_package(tmp_path, run):
    said = run("fastlib", "--operation", "attention", "--package", str(tmp_path), root=tmp_path / "nowhere")
    assert said.splitlines()[:3] == [
        f"wrote {tmp_path}/fastlib/{each}"
        for each in ("pyproject.toml", "src/layerzero_fastlib/__init__.py", "tests/test_fastlib.py")
    ]
    project = tomllib.loads((tmp_path / "fastlib/pyproject.toml").read_text())["project"]
    assert project["entry-points"]["layerzero.backends"] == {"fastlib": "layerzero_fastlib"}
    (kernel,) = declared(tmp_path / "fastlib/src/layerzero_fastlib/__init__.py")
    assert set(kernel.operations) == {each.name for each in FUNCTIONS["attention"].operations}
    ast.parse((tmp_path / "fastlib/tests/test_fastlib.py").read_text())


def test_nothing_is_overwritten(checkout, run, tmp_path_factory):
    run("fastlib", "--operation", "rms_norm")
    before = files(checkout)
    assert "do not exist yet" in run("fastlib", "--operation", "layer_norm", code=2)
    (checkout / "src/layerzero/backends/other").mkdir()
    assert "without a folder" in run("other", "--operation", "rms_norm", code=2)
    assert files(checkout) == before
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "fastlib").mkdir()
    assert "does not exist yet" in run("fastlib", "--operation", "rms_norm", "--package", str(elsewhere), code=2)
    assert files(elsewhere) == {}


@pytest.mark.parametrize(("words", "text"), [
    (("Fast-Lib", "--operation", "rms_norm"), "wanted the library's module"),
    (("class", "--operation", "rms_norm"), "wanted the library's module"),
    (("fastlib", "--operation", "norm.rsm"), "did you mean 'norm.rms'"),
    (("fastlib", "--operation", "norm.*"), "wanted operations of the same tensors"),
])  # fmt: skip
def test_a_question_that_makes_no_sense_writes_nothing(checkout, run, words, text):
    before = files(checkout)
    assert text in run(*words, code=2)
    assert files(checkout) == before


def test_without_a_checkout_it_names_the_other_way(tmp_path, run):
    said = run("fastlib", "--operation", "rms_norm", root=tmp_path / "nowhere", code=2)
    assert "wanted a source checkout of layerzero, got none; --package writes a package" in said
