"""Every command that takes an operation takes that of a plugin, which nobody imported before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "plugin" / "src" / "layerzero_example_plugin"
PACKAGE = "layerzero-example-plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A folder as pip leaves it; test_plugin.py installs the same package with pip."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCE, site / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__"))
    information = site / f"{SOURCE.name}-1.2.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.2.3\n")
    entry = f"[layerzero.backends]\nexample_operation = {SOURCE.name}.operation\n"
    (information / "entry_points.txt").write_text(entry)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "LAYERZERO_CACHE_DIR": str(site / "cache"), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    "explain example_doubled --shape 3x8",
    "explain example.doubled --case wide",
    "which example_doubled --shape 3x8",
    "kernels example_doubled",
    "operations",
    "bench example_doubled --shapes 3x8 --dtype float32",
    "tune example.doubled --shapes 3x8 --dtype float32 --budget-s 5",
    "vet example_doubled --shapes 3x8 --dtype float32 --again",
    "conformance --operation example_doubled --calls 1",
    "fuzz --operation example_doubled --calls 2",
    "config check {file}",
    "which example_doubled --shape 3x8 --set locks={{example_doubled:example.doubled}}",
])  # fmt: skip
def test_a_plugins_operation_is_known_to_every_command(line, environment, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("locks: {example.doubled: example.doubled}\nrules: [{match: {op: 'example.*'}, prefer: torch}]\n")
    words = [word.format(file=file).replace(":e", ": e") for word in line.split()]
    run = subprocess.run(
        [sys.executable, "-m", "layerzero", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode in ((0, 1) if words[0] == "tune" else (0,)), (
        run.stdout + run.stderr
    )  # 1: not all was measured
    assert "example" in run.stdout or words[0] in ("config", "tune")
    assert "unknown operation" not in run.stdout + run.stderr


@pytest.mark.slow
def test_the_environment_may_lock_it(environment):
    script = "import torch, layerzero as lz; print(lz.which('example_doubled', torch.ones(3, 8))['kernel_id'])"
    for variable, said in (
        ("LAYERZERO_LOCK", "example.doubled=example.doubled"),
        ("LAYERZERO_LOCK_EXAMPLE_DOUBLED", "example.doubled"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=environment | {variable: said},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == "example.doubled\n"
