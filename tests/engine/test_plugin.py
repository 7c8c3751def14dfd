"""A real plugin package: installed with pip, found through its entry point, used without a line of user code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1] / "plugin"
SCRIPT = """
import json, warnings
import torch
import layerzero as lz
x, w = torch.randn(4, 64), torch.randn(64)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    vetting = [str(reason.code) for reason in lz.explain("rms_norm", x, w).reasons("example.rms_norm")]
vetted = lz.vet("norm.rms", shapes=[(4, 64)], dtype="float32")
stock = lz.which("rms_norm", x.double(), w.double())["kernel_id"]  # of which no table ships a time
lz.configure(unmeasured="priority")
used = lz.which("rms_norm", x, w)["kernel_id"]
result = lz.rms_norm(x, w)
print(json.dumps({
    "stock": stock,
    "used": used,
    "right": torch.allclose(result, torch.nn.functional.rms_norm(x, (64,), w, 1e-6), atol=1e-5),
    "warnings": [str(each.message) for each in caught],
    "listed": [kernel.id for kernel in lz.list_kernels("norm.rms")],
    "errors": lz.doctor().plugin_errors,
    "issues": lz.doctor().issues,
    "library": next(each.version for each in lz.doctor().libraries if each.name.startswith("example")),
    "too_wide": [str(r.code) for r in lz.explain(
        "rms_norm", torch.randn(4, 4097), torch.randn(4097)).reasons("example.rms_norm") if r.code != "NOT_VETTED"],
    "vetting": vetting,
    "vetted": [str(each.verdict) for each in vetted],
}))
"""


pytestmark = pytest.mark.slow  # pip builds a package; tests/reliability/test_plugins.py has plugins that need no pip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "plugin"
    source.mkdir()
    for path in PLUGIN.rglob("*"):  # build outside the repository
        if path.is_file() and "egg-info" not in str(path) and "__pycache__" not in str(path):
            copy = source / path.relative_to(PLUGIN)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(target), str(source)], check=True, capture_output=True)
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


@pytest.fixture(scope="module")
def answers(environment):
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_its_kernel_is_found_and_chosen(answers):
    assert answers["stock"] == "torch.rms_norm"  # nobody measured it, and nobody said that priority decides
    assert answers["used"] == "example.rms_norm"
    assert answers["right"]
    assert "example.rms_norm" in answers["listed"]
    assert answers["library"] == "1.2.3"


def test_its_limits_hold(answers):
    assert answers["too_wide"] == ["CONSTRAINT_FAILED"]


def test_it_is_vetted_before_it_is_chosen(answers):
    assert answers["vetting"] == ["NOT_VETTED"]
    assert answers["vetted"] == ["passed"]


def test_its_broken_entry_point_is_reported_and_harmless(answers):
    assert "a_library_that_nobody_has" in answers["errors"]["example_broken"]
    assert any("example_broken" in text and "was not loaded" in text for text in answers["warnings"])
    assert any("plugin example_broken was not loaded" in issue for issue in answers["issues"])


def test_it_conforms_as_its_own_tests_would_show(environment):
    script = [sys.executable, str(PLUGIN / "conformance.py")]
    run = subprocess.run(script, env=environment, check=True, capture_output=True, text=True)
    assert "example.rms_norm: " in run.stdout
    assert "limit hidden <= 4096: 4096 right; 4097 refused with CONSTRAINT_FAILED" in run.stdout


OPERATION = """
import torch, warnings
warnings.simplefilter("ignore")
import layerzero as lz
given = torch.randn(3, 8)
assert torch.equal(lz.example_doubled(given), given * 2)  # nobody asked for the plugin before
assert torch.equal(torch.ops.layerzero.example_doubled(given), given * 2)
print(lz.explain("example_doubled", given).kernel_id, *{str(each.verdict) for each in lz.vet("example.doubled")})
print(lz.explain("example.doubled", given).kernel_id, hasattr(lz, "example_tripled"))
"""
ASKED_FIRST = """
import torch, warnings
warnings.simplefilter("ignore")
import layerzero as lz
print(lz.explain("example_doubled", torch.randn(3, 8)).operation)
"""


def test_an_entry_point_may_bring_an_operation_and_its_function(environment):
    def said(script, **more):
        command = [sys.executable, "-c", script]
        run = subprocess.run(command, env=environment | more, check=False, capture_output=True, text=True)
        return run.stdout.split() or run.stderr.splitlines()[-1]

    assert said(OPERATION) == ["reference.example.doubled", "passed", "example.doubled", "False"]
    assert said(ASKED_FIRST) == ["example.doubled"]
    left_out = said(ASKED_FIRST, LAYERZERO_PLUGINS="none")
    assert "unknown operation 'example_doubled'" in left_out
