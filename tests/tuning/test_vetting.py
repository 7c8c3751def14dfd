"""Kernels prove themselves in a child: each danger is found, and what may run then."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from kernels_to_vet import CALL, PLUGIN, found, installed, registered

import layerzero as lz
from layerzero.backends import zentorch
from layerzero.backends.vllm_cpu.norm import VLLM_CPU
from layerzero.cli import tune as command
from layerzero.core.ledger import Verdict, class_text
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.verification.vetting import Background, vet_calls
from others import OTHERS


@pytest.mark.slow
@installed(zentorch.ZENTORCH)
def test_a_weight_that_zentorch_reorders_in_place_is_found(dangers):
    with pytest.warns(lz.LayerZeroWarning, match="not chosen any more"):
        verdicts = lz.vet("attention.standard.decode", kernels=["danger.reorders"], dtype="float32")
    assert {each.verdict for each in verdicts} == {Verdict.WRONG}
    told = [each.detail for each in verdicts]
    # The reorder shows in the key's own bytes, or before that in what the next call of the same memory gives.
    assert all("key: wanted it untouched" in detail or "elements too far" in detail for detail in told), told


@pytest.mark.parametrize(
    "library",
    [pytest.param("zentorch", marks=installed(zentorch.ZENTORCH)), pytest.param("vllm", marks=installed(VLLM_CPU))],
)
@pytest.mark.slow
def test_a_strided_rms_norm_that_two_libraries_misread_is_found(dangers, library):
    with pytest.warns(lz.LayerZeroWarning, match="not chosen any more"):
        each = found(f"danger.{library}", shapes=[(8, 256)], dtype="float32")
    assert each.verdict is Verdict.WRONG
    assert each.detail.startswith("strided input")
    assert "got nan" in each.detail


@installed(zentorch.ZENTORCH)
@pytest.mark.slow
def test_a_half_precision_norm_that_zentorch_gets_wrong_is_found(dangers):
    with pytest.warns(lz.LayerZeroWarning, match="not chosen any more"):
        each = found("danger.half", shapes=[(8, 4096)], dtype="float16")
    assert each.verdict is Verdict.WRONG
    assert found("danger.half", shapes=[(8, 4096)], dtype="float32", again=True).verdict is Verdict.PASSED


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
@pytest.mark.parametrize(
    ("kernel", "shape", "verdict", "text"),
    [
        pytest.param("sound", (4, 2048), Verdict.PASSED, "calls right", marks=pytest.mark.slow),
        pytest.param("large", (4, 2048), Verdict.WRONG, "hidden = 4095: ", marks=pytest.mark.slow),
        ("mutates", (4, 64), Verdict.WRONG, "input: wanted it untouched"),
        # whichever check gets memory that another one had
        pytest.param("prepacked", (4, 64), Verdict.WRONG, "", marks=pytest.mark.slow),
        pytest.param("unsteady", (4, 64), Verdict.WRONG, "declared deterministic", marks=pytest.mark.slow),
        pytest.param("gradient", (4, 64), Verdict.WRONG, "the gradient of weight", marks=pytest.mark.slow),
        pytest.param(
            "dead",
            (4, 64),
            Verdict.CRASHED,
            "it ended the process with SIGSEGV; it ran rms_norm(",
            marks=pytest.mark.slow,
        ),
        pytest.param("needed", (4, 64), Verdict.PASSED, "calls right", marks=pytest.mark.slow),
    ],
)
def test_each_planted_mistake_is_found(planted, kernel, shape, verdict, text):
    each = found(f"planted.{kernel}", shapes=[shape], dtype="float32")
    assert each.verdict is verdict
    assert text in each.detail


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
def test_a_nan_in_one_dtype_is_found_and_the_kernel_is_trusted_in_none(planted):
    verdicts = {each.call_class.split()[1]: each.verdict for each in lz.vet(
        "norm.rms", kernels=["planted.nan"], shapes=[(4, 64)]
    )}  # fmt: skip
    assert verdicts == {"float32": Verdict.PASSED, "float16": Verdict.WRONG}
    (reason,) = lz.explain("rms_norm", *CALL).reasons("planted.nan")
    assert reason.code is lz.ReasonCode.UNHEALTHY
    assert "wrong for norm.rms float16" in reason.message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
def test_a_hang_is_ended_and_the_other_classes_are_asked(planted):
    verdicts = lz.vet("norm.rms", kernels=["planted.hangs"], shapes=[(4, 2304), (4, 64)], dtype="float32", timeout_s=20)
    assert [each.verdict for each in verdicts] == [Verdict.HUNG, Verdict.PASSED]
    assert "no sign of life for 20 s" in verdicts[0].detail


# what may run


def test_a_plugin_runs_only_where_it_was_vetted_and_explain_says_how(plugin):
    lz.configure(unmeasured="priority")
    report = lz.explain("rms_norm", *CALL)
    (reason,) = report.reasons("plug.rms")
    assert reason.code is lz.ReasonCode.NOT_VETTED
    assert "layerzero vet --kernel plug.rms" in reason.message
    assert found("plug.rms", shapes=[(4, 64)], dtype="float32").verdict is Verdict.PASSED
    assert lz.which("rms_norm", *CALL)["kernel_id"] == "plug.rms"
    assert lz.which("rms_norm", torch.randn(4, 64, dtype=torch.float64), CALL[1].double())["kernel_id"] != "plug.rms"
    with lz.scope(require_vetting=False):
        other = lz.which("rms_norm", torch.randn(4, 64, dtype=torch.float64), CALL[1].double())
    assert other["kernel_id"] == "plug.rms"


@pytest.mark.parametrize(("error", "verdict"), [("ValueError", Verdict.CRASHED), ("ImportError", None)])
def test_an_error_that_is_no_unicode_is_told_and_ends_no_process(monkeypatch, tmp_path, error, verdict):
    raises = f"    raise {error}('a file named \\udcff.so')\n"
    registered(monkeypatch, tmp_path, "plug", PLUGIN.replace("    def run(", f"{raises}    def run("))
    told = found("plug.rms", shapes=[(4, 64)], dtype="float32")
    assert (told.verdict, told.detail) == (verdict, rf"raised {error}: a file named \udcff.so")


@pytest.mark.slow
def test_doctor_says_what_is_not_vetted(plugin):
    def told():
        return next(line for line in str(lz.doctor()).splitlines() if line.startswith("  plug "))

    assert "usable, not vetted: `layerzero vet`" in told()
    lz.vet()
    assert "not vetted" not in told()


def test_a_lock_overrides_a_missing_verdict_but_no_wrong_result(plugin):
    with lz.scope(locks={"norm.rms": "plug.rms"}):
        assert lz.which("rms_norm", *CALL)["kernel_id"] == "plug.rms"
        facts = lz.facts("rms_norm", torch.randn(900, 64), CALL[1])
        ENGINE.ledger.record_verdict(REGISTRY.kernel("plug.rms"), facts, Verdict.WRONG, "planted")
        ENGINE.bump()
        with pytest.raises(lz.NoKernelFoundError, match=r"wrong for norm\.rms float32 .*: planted"):
            lz.rms_norm(*CALL)


def test_one_that_died_is_refused_for_its_class_only(plugin):
    kernel = REGISTRY.kernel("plug.rms")
    small, large = lz.facts("rms_norm", *CALL), lz.facts("rms_norm", torch.randn(900, 64), CALL[1])
    ENGINE.ledger.record_verdict(kernel, small, Verdict.PASSED)
    ENGINE.ledger.record_verdict(kernel, large, Verdict.CRASHED)
    assert ENGINE.ledger.verdict(kernel, small) is Verdict.PASSED
    assert ENGINE.ledger.verdict(kernel, large) is Verdict.CRASHED


@pytest.mark.slow
def test_vet_without_names_asks_about_what_may_not_run_before(plugin):
    verdicts = lz.vet("norm.rms", shapes=[(4, 64)], dtype="float32")
    assert [each.kernel_id for each in verdicts] == ["plug.rms"]
    assert lz.vet("norm.rms", shapes=[(4, 64)], dtype="float32") == (), "it has a verdict"
    assert len(lz.vet("norm.rms", shapes=[(4, 64)], dtype="float32", again=True)) == 1


@pytest.mark.slow
def test_warmup_vets_what_it_could_not_choose_otherwise(plugin):
    lz.configure(unmeasured="priority")
    lz.warmup("norm.rms", shapes=[(4, 64)])
    assert lz.which("rms_norm", *CALL)["kernel_id"] == "plug.rms"


@pytest.mark.slow
def test_tuning_vets_what_it_could_not_measure_otherwise(plugin):
    tuned = lz.tune("norm.rms", [(4, 64)], "float32", "cpu", samples=3)
    (contest,) = tuned.contests
    assert "plug.rms" in {kernel.id for kernel in contest.times}
    assert ENGINE.ledger.verdict(REGISTRY.kernel("plug.rms"), contest.facts) is Verdict.PASSED


@pytest.mark.slow
def test_tuning_vets_what_it_is_about_to_measure_and_tells_what_it_found(plugin, monkeypatch):
    asked = []

    def vetted(pairs, **given):
        asked.append([(kernel.id, class_text(facts)) for kernel, facts in pairs])
        return vet_calls([], **given)

    given = {"dtype": "float32", "device": "cpu", "samples": 3}
    with monkeypatch.context() as patched:
        patched.setattr("layerzero.tuning.measurement.loop.vet_calls", vetted)
        lz.tune("norm.rms", [(4, 64)], budget_s=0.0, **given)
        assert asked == [], "no time for it"
        lz.tune("norm.rms", [(4, 64)], leave_out=[*OTHERS, "plug.*"], **given)
        assert asked == [], "nothing to vet, and nobody is asked"
    found = lz.tune("norm.rms", [(4, 64)], leave_out=OTHERS, again=True, **given)
    assert [(each.kernel_id, each.verdict) for each in found.vetted] == [("plug.rms", Verdict.PASSED)]
    assert found.to_dict()["vetted"][0]["verdict"] == "passed"


def test_a_child_that_does_not_start_ends_neither_tuning_nor_warmup(plugin, monkeypatch, caplog):
    def dead(*_, **__):
        raise RuntimeError("a vetting process did not get to work: no memory")

    monkeypatch.setattr("layerzero.tuning.verification.vetting.run_apart", dead)
    lz.configure(deny=["inductor"])  # a warmup would build for 8 s, and for 26 on a machine that never did
    tuned = lz.tune("norm.rms", [(4, 64)], "float32", "cpu", samples=3, leave_out=OTHERS)
    assert len(tuned.contests) == 1
    assert {(each.kernel_id, each.verdict) for each in tuned.vetted} == {("plug.rms", None)}
    assert "did not get to work: no memory" in tuned.vetted[0].detail
    shown = "\n".join(str(each) for each in command.shown(tuned))
    assert "plug.rms for norm.rms float32" in shown
    assert "not vetted: not tried: a vetting process did not get to work" in shown
    caplog.clear()
    lz.warmup("norm.rms", shapes=[(4, 64)])
    assert "vetting ended early" in caplog.text
    with pytest.raises(RuntimeError, match="no memory"):
        lz.vet("norm.rms", shapes=[(4, 64)], dtype="float32")


@pytest.mark.skipif(shutil.which("false") is None, reason="nothing here dies at once")
def test_a_child_that_dies_before_it_reads_is_told_by_its_end(plugin, monkeypatch):
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: shutil.which("false"))
    more_than_a_pipe_holds = ["m" * 2**20]
    with pytest.raises(RuntimeError, match=r"did not get to work.*exit code 1"):
        lz.vet("norm.rms", shapes=[(4, 64)], dtype="float32", modules=more_than_a_pipe_holds)


@pytest.mark.slow
def test_the_background_vets_once_what_a_miss_would_have_chosen(plugin, monkeypatch):
    from layerzero.tuning.verification import vetting

    background = Background()
    monkeypatch.setattr(vetting, "BACKGROUND", background)
    lz.configure(vet_in_background=True, unmeasured="priority")
    lz.rms_norm(*CALL)
    background.idle.wait()
    assert lz.which("rms_norm", *CALL)["kernel_id"] == "plug.rms"


def test_where_no_thread_can_be_started_calls_run_and_a_line_says_what_is_left_out(monkeypatch, caplog):
    def none_left(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    caplog.set_level("DEBUG", "layerzero")
    Background().add(REGISTRY.kernel("torch.rms_norm"), lz.explain("rms_norm", *CALL).facts)
    assert "nothing is vetted in the background: no thread could be started" in caplog.text
