"""Imports point one way, and importing layerzero loads no kernel library and costs little."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import layerzero

ROOT = Path(layerzero.__file__).parent
ORDER = (
    *("_native", "core", "ops", "backends", "engine", "asking", "testing", "tuning", "serving", "integrations", "cli"),
)
ASSEMBLY = "layerzero._assembly"
"""The one file that the order does not bind; only the engine's entrance asks it."""

BACKEND_LIBRARIES = (
    *("flash_attn", "flash_attn_interface", "flashinfer", "xformers", "triton", "transformers", "liger_kernel"),
    *("zentorch", "onnxruntime", "vllm", "apex", "quack"),
)


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [alias.name for alias in node.names]
            yield from (
                (f"{node.module}.{name}" if node.module == "layerzero" else node.module, node) for name in names
            )


def layer(name):
    parts = name.split(".")
    return parts[1] if parts[0] == "layerzero" and len(parts) > 1 else None


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_leftwards(path):
    here = path.relative_to(ROOT).parts[0]
    assert here in ORDER, f"{here} is no layer; the layers are {ORDER}"
    for name, _ in imported(path):
        there = layer(name)
        if there in ORDER:
            assert ORDER.index(there) <= ORDER.index(here), f"{path}: {here} imports {name}, which lies to its right"


def test_what_lies_outside_the_layers_is_known():
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", "_assembly"}
    assert [path.name for path in modules() if ASSEMBLY in {name for name, _ in imported(path)}] == [
        "dispatch.py",
        "plugins.py",
        "registry.py",
        "warmup.py",
    ]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_library_is_imported_at_the_top_of_a_module(path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        assert not {name.split(".")[0] for name in names} & set(BACKEND_LIBRARIES), f"{path}:{node.lineno}"


def test_importing_layerzero_loads_no_backend_and_no_device():
    script = f"""
import sys, torch
before = set(sys.modules)
import layerzero as lz
loaded = {{name.split(".")[0] for name in set(sys.modules) - before}} & set({BACKEND_LIBRARIES!r})
assert not loaded, loaded
backends = [n for n in sys.modules if n.startswith("layerzero.backends.") or n.startswith("layerzero.integrations")]
assert not backends, backends
assert not torch.cuda.is_initialized()
lz.attention
lz.list_kernels()
loaded = {{name.split(".")[0] for name in set(sys.modules) - before}} & set({BACKEND_LIBRARIES!r})
assert not loaded, ("declarations import libraries", loaded)
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_importing_layerzero_adds_little_to_importing_torch():
    script = "import time, torch; t = time.perf_counter(); import layerzero; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout) for _ in range(3)
    ]
    assert min(times) < 0.1


def test_files_have_a_size_that_a_reader_can_take_in():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    assert not {name: lines for name, lines in long.items() if lines > 400}


def test_names_say_what_is_inside():
    vague = {"utils", "util", "helpers", "common", "base", "misc", "manager"}
    assert not [path for path in modules() if path.stem in vague or path.parent.name in vague]


def test_everything_exported_exists():
    for name in layerzero.__all__:
        assert getattr(layerzero, name) is not None
