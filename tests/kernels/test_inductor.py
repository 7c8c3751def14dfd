"""References compiled ahead of time: refused until built, then right for every size of their class."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

import layerzero as lz
from layerzero.backends.torch import aot_inductor, inductor
from layerzero.ops.norm import declare as norm

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler to build with"),
    pytest.mark.skipif(
        not torch.__version__.startswith(("2.13.", "2.14.", "2.15.")), reason="VERSION_UNSUPPORTED: this torch"
    ),
]

SHAPES = [(64, 512), (100, 600), (127, 1023)]
"""All of one class: rows from 64 to 127, row lengths from 512 to 1023."""


def calls(function, rows, hidden):
    x, w, b = torch.randn(rows, hidden), torch.randn(hidden), torch.randn(hidden)
    normed = torch.nn.functional.rms_norm
    if function == "rms_norm":
        return (x, w), normed(x, (hidden,), w, 1e-6)
    if function == "layer_norm":
        return (x, hidden, w, b), torch.nn.functional.layer_norm(x, (hidden,), w, b)
    residual = torch.randn(rows, hidden)
    return (x, residual.clone(), w), normed(x + residual, (hidden,), w, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["rms_norm", "layer_norm", "add_residual_rms_norm_"])
def test_it_is_refused_until_built_and_then_serves_its_class(function):
    kernel = {"add_residual_rms_norm_": "inductor.add_rms_norm"}.get(function, f"inductor.{function}")
    arguments, _ = calls(function, *SHAPES[0])
    assert [str(reason.code) for reason in lz.explain(function, *arguments).reasons(kernel)] == ["JIT_DISABLED"]
    built = [each for each in lz.warmup(function, shapes=[SHAPES[0]], device="cpu") if each.kernel_id == kernel]
    assert [each.error for each in built] == [""]
    with lz.scope(locks={function: kernel}):
        for shape in SHAPES:
            arguments, wanted = calls(function, *shape)
            torch.testing.assert_close(getattr(lz, function)(*arguments), wanted, rtol=1e-5, atol=1e-5)
    arguments, _ = calls(function, 128, 512)
    assert [str(reason.code) for reason in lz.explain(function, *arguments).reasons(kernel)] == ["JIT_DISABLED"]
    assert lz.warmup(function, shapes=[SHAPES[0]], device="cpu") == [], "what is built is not built again"


@pytest.mark.slow
def test_one_build_serves_any_eps():
    (x, w), _ = calls("rms_norm", *SHAPES[0])
    assert [each.error for each in lz.warmup("rms_norm", shapes=[SHAPES[0]], device="cpu")] == [""]
    with lz.scope(locks={"rms_norm": "inductor.rms_norm"}):
        for eps in (1e-6, 0.5):
            wanted = torch.nn.functional.rms_norm(x, w.shape, w, eps)
            torch.testing.assert_close(lz.rms_norm(x, w, eps), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_was_built_counts_in_the_next_process_until_its_files_are_gone(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (x, w), wanted = calls("rms_norm", *SHAPES[0])
    code = "import torch, layerzero as lz; print(lz.warmup('rms_norm', shapes=[(64, 512)], device='cpu'))"
    monkeypatch.setattr(aot_inductor, "NOTES", "built")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "inductor.rms_norm" in done.stdout, done.stderr
    assert lz.explain("rms_norm", x, w).reasons("inductor.rms_norm") == ()
    inductor._NORMS.made.clear()
    with lz.scope(locks={"rms_norm": "inductor.rms_norm"}):
        torch.testing.assert_close(lz.rms_norm(x, w), wanted, rtol=1e-5, atol=1e-5)
    for artefact in aot_inductor.cache_folder().glob("*.pt2"):
        artefact.unlink()
    assert [str(reason.code) for reason in lz.explain("rms_norm", x, w).reasons("inductor.rms_norm")] == [
        "JIT_DISABLED"
    ]


@pytest.mark.parametrize(("bound", "top"), [(4096, 4096), (5000, 5000), (9000, 8191)])
def test_a_guard_may_leave_any_row_length_even_a_single_one(bound, top):
    """Inductor asks whether a row has at most 4096 numbers: a class that begins there was refused as tied to it."""
    dims = {0: torch.export.Dim("rows", min=8, max=15), 1: torch.export.Dim("hidden", min=4096, max=8191)}
    module = inductor._Formula(norm.RMS, {})
    arguments = torch.zeros((), dtype=torch.float64), torch.ones(12, 4096), torch.ones(4096)
    shapes = {"eps": None, "tensors": (dims, {0: dims[1]})}
    program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    given = next(node.meta["val"] for node in program.graph.nodes if node.name == "tensors_0")
    known = given.fake_mode.shape_env
    before = len(known.guards)
    assert given.shape[1] <= bound
    assert inductor._longest_row(8191, program, known.guards[before:], known) == top
