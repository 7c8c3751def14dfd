"""An operation of invented names goes through every tool: what an operation is, only the operation says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.testing import conformance, fuzz, random_call

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
alien = pytest.importorskip("alien")
sys.path.remove(str(HERE))


@pytest.fixture(autouse=True)
def known_to_children(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")
    alien.RAN.clear()


def given(rows=(3,), width=16, pool=5, dtype=torch.float32):
    torch.manual_seed(0)
    foo, bar = torch.randn(*rows, width, dtype=dtype), torch.randn(pool, width, dtype=dtype)
    return foo, bar, torch.randint(0, pool, rows)


def cli(line):
    command = [sys.executable, "-m", "layerzero", *line.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def same(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_it_is_called_under_its_own_name():
    arguments = given()
    same(alien.blend(*arguments), alien.reference(*arguments))
    assert lz.zork_blend is alien.blend
    assert alien.RAN == ["mine.blend"]


def test_what_is_passed_chooses_nothing_and_reaches_the_kernel():
    arguments, dispatcher = given(), _dispatcher()
    alien.blend(*arguments, tilt=0.5)
    kept = dispatcher.cache.size()
    for tilt in (0.25, -1.0, 2, 3.5):
        same(alien.blend(*arguments, tilt=tilt), alien.reference(*arguments, tilt=tilt))
    assert dispatcher.cache.size() == kept
    for wrong in (5.0, True, "1"):
        with pytest.raises(lz.InvalidCallError, match="tilt: wanted"):
            alien.blend(*arguments, tilt=wrong)


def test_a_handle_is_used_while_it_belongs_to_the_call():
    foo, bar, pick = given()
    crest = alien.Crest(bar)
    for _ in range(2):
        same(alien.blend(foo, bar, pick, sharp=True, crest=crest), alien.reference(foo, bar, pick, sharp=True))
    assert set(alien.RAN) == {"mine.blend with a crest"}
    bar.add_(1.0)
    with pytest.raises(lz.InvalidCallError, match="a stale one"):
        alien.blend(foo, bar, pick, sharp=True, crest=crest)
    crest.refresh()
    same(alien.blend(foo, bar, pick, sharp=True, crest=crest), alien.reference(foo, bar, pick, sharp=True))
    with pytest.raises(lz.InvalidCallError, match="a foreign one"):
        alien.blend(foo, bar.clone(), pick, crest=crest)


def test_it_is_explained_and_chosen_for():
    report = lz.explain("zork_blend", *given())
    assert report.kernel_id == "mine.blend"
    assert lz.which("zork.blend", *given())["operation"] == "zork.blend"
    assert lz.explain(lz.facts("zork.blend", *given())).kernel_id == "mine.blend"
    with lz.scope(locks={"zork.blend": "reference.zork.blend"}):
        assert lz.which("zork_blend", *given())["kernel_id"] == "reference.zork.blend"
    assert lz.validate("mine.blend", *given()) == (True, ())


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        (lz.limits.dim("pool", max=3), "SEQ_TOO_LONG"),
        (lz.limits.dim("pool", min=6), "CONSTRAINT_FAILED"),
        (lz.limits.dim("qux", one_of=(3, 5)), "HEAD_DIM_INVALID"),
        (lz.limits.dim("qux", multiple=5), "HEAD_DIM_ALIGNMENT"),
        (lz.limits.equal("qux", "pool"), "HEAD_DIM_INVALID"),
        (lz.limits.equal("pool", "qux"), "CONSTRAINT_FAILED"),
    ],
    ids=str,
)
def test_its_sizes_say_why_they_are_refused(limit, code):
    lz.register_kernel("zork.blend", kernel_id="mine.small", priority=1, limits=[limit])(alien.reference)
    try:
        valid, (reason,) = lz.validate("mine.small", *given())
        assert (valid, reason.code) == (False, code)
    finally:
        lz.unregister_kernel("mine.small")


def test_the_command_line_knows_it():
    assert "mine.blend" in cli("explain zork.blend --module alien --case tiny")
    assert "mine.blend" in cli("bench zork.blend --module alien --dtype float32")


def test_conformance_checks_it_in_a_child():
    report = conformance.run(kernels=["mine.blend"], modules=["alien"], calls=3)
    assert report.ok, str(report)
    (mine,) = report.kernels
    assert mine.counts["passed"] > 20


def test_a_planted_mistake_is_found():
    @lz.register_kernel("zork.blend", kernel_id="mine.dull", priority=1)
    def dull(foo, bar, pick, *, sharp, tilt=None):
        return alien.reference(foo, bar, pick, sharp=False, tilt=tilt)

    try:
        report = conformance.run(kernels=["mine.dull"], calls=3)
        assert not report.ok
    finally:
        lz.unregister_kernel("mine.dull")


def test_the_fuzzer_draws_it():
    calls = [random_call(7, number, function="zork_blend") for number in range(20)]
    assert len({str(call.text) for call in calls}) > 10
    assert any("tilt" in call.arguments for call in calls)
    report = fuzz.run(30, 3, kernels=["mine.blend"])
    assert report.ok, str(report)


def test_warmup_tune_and_bench_make_its_calls():
    assert lz.warmup("zork.blend") == []
    tuned = lz.tune("zork.blend", shapes="cases", dtype=torch.float32, budget_s=20)
    assert [[entry.kernel.id for entry in each.entries] for each in tuned.contests] == [["mine.blend"]] * 2


def test_it_is_vetted_in_a_child():
    found = lz.vet("zork.blend", kernels=["mine.blend"], dtype=torch.float32, modules=["alien"])
    assert {str(each.verdict) for each in found} == {"passed"}


def test_it_is_recorded_and_made_again(tmp_path):
    file = tmp_path / "calls.json"
    with lz.record(file):
        alien.blend(*given(), tilt=0.5, sharp=True)
        foo, bar, pick = given((2, 3))
        alien.blend(foo, bar, pick[:, :1].expand(2, 3), crest=alien.Crest(bar))
    calls = json.loads(file.read_text())["calls"]
    assert {each["call"]["operation"] for each in calls} == {"zork.blend"}
    tuned = lz.tune("zork.blend", manifest=file, budget_s=20)
    assert {each.name.split()[0] for each in tuned.contests} == {"zork.blend"}


def test_choices_are_frozen():
    alien.blend(*given())
    frost = lz.freeze()
    try:
        assert any(name.startswith("zork.blend") for name in frost.choices)
        frost_again = lz.thaw()
        assert frost_again.hash
        lz.freeze(frost)
    finally:
        if lz.frozen() is not None:
            lz.thaw()


def test_it_is_compiled_without_a_break():
    compiled = torch.compile(lambda *arguments: alien.blend(*arguments, tilt=0.5), fullgraph=True, backend="aot_eager")
    same(compiled(*given()), alien.reference(*given(), tilt=0.5))
    torch.library.opcheck(torch.ops.layerzero.zork_blend.default, given())


def _dispatcher():
    from layerzero.engine.functions import CALLS

    return CALLS["zork_blend"].dispatcher


SCRIPT = """
import torch, layerzero as lz
operation = lz.Operation(
    schema=lz.OperationSchema("zork.bad", (lz.TensorSchema("foo", ("n",)),), (lz.TensorSchema("out", ("n",)),)),
    summary="", reference={reference}, fake=lambda foo: torch.empty_like(foo),
    cases=(lz.Case("one", {{"n": 3}}),), tolerance={{torch.float32: lz.Tolerance(1e-5, 1e-5)}}, tolerance_reason="x",
)
def zork_bad(foo: torch.Tensor) -> torch.Tensor: ...
from layerzero.core.operation import Routed
lz.register_operation(operation)
lz.register_function(lz.Function("zork_bad", zork_bad, lambda given, _: Routed(operation, given), (operation,)))
"""


@pytest.mark.parametrize(("reference", "problem"), [
    ("lambda foo: foo.nothing()", "its reference raised: AttributeError"),
    ("lambda foo: (foo, foo)", "wanted 1 results as the schema says, got 2 of the reference"),
    ("lambda foo: foo[:1]", "fake says torch.float32 (3,), the reference gives torch.float32 (1,)"),
    ("lambda foo: foo.double()", "the reference gives torch.float64"),
])  # fmt: skip
def test_an_operation_whose_parts_do_not_agree_is_refused(reference, problem):
    script = SCRIPT.format(reference=reference)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode
    assert "RegistrationError" in ended.stderr
    assert problem in ended.stderr
