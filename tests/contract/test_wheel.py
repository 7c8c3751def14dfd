"""Wheels serve from their own files and with torch alone: built without a compiler, and of pure Python."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import layerzero as lz

ROOT = Path(__file__).parents[2]
SETUPTOOLS = 77
"""The least that reads a license as pyproject.toml says it."""

USED = """
import pathlib, sys, torch
import layerzero as lz
assert pathlib.Path(lz.__file__).is_relative_to(sys.argv[1]), lz.__file__
x = torch.randn(4, 64)
torch.testing.assert_close(lz.rms_norm(x, torch.ones(64)), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
assert "in Python" in lz.doctor().versions["hit path"]
from layerzero.cli.app import main
sys.argv = ["layerzero", "which", "rms_norm", "--shape", "4x64", "--dtype", "float32"]
main()
"""


def test_the_version_is_said_once():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited[1] == lz.__version__


@pytest.fixture
def source(tmp_path):
    """What a checkout has of the package, without what was built in it."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
        pytest.skip(f"wanted setuptools {SETUPTOOLS} or newer, got {setuptools.__version__}")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if files.returncode:
        pytest.skip("wanted a checkout of git, whose files are the source")
    for name in filter(None, files.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/", "docs/")):
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return tmp_path / "source"


@pytest.mark.slow
def test_the_sources_of_the_extension_are_packed_even_where_it_is_left_out(source):
    environment = os.environ | {"LAYERZERO_NATIVE": "0"}
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=source, check=True, env=environment, timeout=300)
    (packed,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(packed) as opened:
        names = {Path(name).name for name in opened.getnames()}
    assert {path.name for path in (ROOT / "src/layerzero/_native").glob("*.[ch]")} <= names


@pytest.mark.slow
@pytest.mark.parametrize("without", [{"CC": "false"}, {"LAYERZERO_NATIVE": "0"}], ids=["no compiler", "pure Python"])
def test_a_wheel_without_the_extension_serves_with_torch_alone(source, tmp_path, without):
    built, place = tmp_path / "built", tmp_path / "place"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(built)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LAYERZERO_NATIVE")}
    subprocess.run([*command, str(source)], check=True, env=environment | without, timeout=300)
    (wheel,) = built.glob("layerzero-*.whl")
    assert ("-py3-none-any." in wheel.name) == ("LAYERZERO_NATIVE" in without or sys.platform == "win32")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(place)
        names = set(opened.namelist())
    assert not [name for name in names if name.endswith(".so")]
    assert {"layerzero/py.typed", "layerzero/__init__.pyi", "layerzero_engines.py"} <= names
    shipped = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/layerzero/tuning/priors").glob("*.json")}
    assert shipped <= names
    (points,) = place.glob("*.dist-info/entry_points.txt")
    assert "layerzero.cli.app:main" in points.read_text()
    path = os.pathsep.join([str(ROOT / "tests" / "torch_alone"), str(place)])
    run = [sys.executable, "-P", "-W", "ignore", "-c", USED, str(place)]
    done = subprocess.run(
        run, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "torch.rms_norm"
