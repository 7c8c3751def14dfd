"""Kernels prove themselves in a child: each danger is found, verdicts hold for a version, locks have their limits."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shlex
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from packaging.version import Version
from typer.testing import CliRunner

import layerzero as lz
from layerzero.backends import zentorch
from layerzero.backends.vllm_cpu.norm import VLLM_CPU
from layerzero.cli import tune as command
from layerzero.cli.app import main
from layerzero.core.device import Device
from layerzero.core.kernel import Backend, Kernel, Trust
from layerzero.core.ledger import Verdict, class_text
from layerzero.engine import probe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.engine.vet_command import how_to_vet
from layerzero.tuning.storage import files
from layerzero.tuning.storage.files import FileLedger
from layerzero.tuning.verification.vetting import Background, class_pairs, vet_calls
from others import OTHERS

CALL = torch.randn(4, 64), torch.randn(64)
PLUGIN = """
import torch
import layerzero as lz
from layerzero.core.kernel import Backend, Kernel, Trust

MODE = "right"

def load(facts):
    def run(input, weight, *, eps):
        output = torch.nn.functional.rms_norm(input, weight.shape, weight, eps)
        return output + 1 if MODE == "wrong" else output
    return run

KERNEL = Kernel(
    id="plug.rms", operations=("norm.rms",), backend=Backend(name="plug", summary="a plugin", origin="plugin"),
    trust=Trust.PLUGIN, load=load, accepts=("eps",), priority=100,
)
lz.register_backend([KERNEL])
"""


def registered(monkeypatch, folder, name, source=None):
    """Import a module that registers kernels, here and for child processes."""
    if source is not None:
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def dangers(monkeypatch, request):
    return registered(monkeypatch, request.path.parent, "dangers")


@pytest.fixture
def planted(monkeypatch, request):
    return registered(monkeypatch, request.path.parents[1] / "kernels", "planted")


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    return registered(monkeypatch, tmp_path, "a_plugin", PLUGIN)


def found(kernel, operation="norm.rms", **asked):
    """What vetting says about one kernel and class."""
    (each,) = lz.vet(operation, kernels=[kernel], **asked)
    return each


def absent(backend):
    return probe.this_machine().state(backend, Device.detect("cpu")).reason


def installed(backend):
    return pytest.mark.skipif(absent(backend) is not None, reason=str(absent(backend)))


# the dangers


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
    tuned = lz.tune("norm.rms", [(4, 64), (4, 65)], "float32", "cpu", samples=3, leave_out=OTHERS)
    assert len(tuned.contests) == 2
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
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
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


# versions


@pytest.fixture
def versioned(plugin, monkeypatch, tmp_path):
    """The plugin with a distribution whose version can be set, and files that remember."""
    versions = {"plug": "1.5"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    lz.unregister_kernel("plug.rms")
    backend = Backend(name="plug", summary="a library", distribution="plug", versions=">=1,<2")
    lz.register_backend([replace(plugin.KERNEL, backend=backend, trust=Trust.DECLARED)])
    ENGINE.ledger = FileLedger(tmp_path / "cache")

    def install(version):
        versions["plug"] = version
        probe.forget()
        ENGINE.bump()

    install("1.5")
    yield install
    probe.forget()


def codes():
    return [each.code for each in lz.explain("rms_norm", *CALL).reasons("plug.rms")]


def test_a_version_that_nobody_tested_is_refused_until_it_was_vetted(versioned):
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL)
    assert codes() == []
    versioned("2.1")
    (reason,) = lz.explain("rms_norm", *CALL).reasons("plug.rms")
    assert reason.code is lz.ReasonCode.VERSION_UNSUPPORTED
    assert "layerzero vet --backend plug" in reason.message
    ENGINE.ledger.record_verdict(kernel, facts, Verdict.PASSED)
    assert codes() == []
    versioned("2.2")
    assert codes() == [lz.ReasonCode.VERSION_UNSUPPORTED], "a verdict of another version"
    assert ENGINE.ledger.verdict(kernel, facts) is None


def test_what_was_wrong_is_not_chosen_until_its_version_changes(versioned, tmp_path):
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", torch.randn(900, 64), CALL[1])
    ENGINE.ledger.record_verdict(kernel, facts, Verdict.WRONG, "planted")
    assert codes() == [lz.ReasonCode.UNHEALTHY]
    ENGINE.ledger = FileLedger(tmp_path / "cache")
    assert codes() == [lz.ReasonCode.UNHEALTHY], "another process"
    versioned("1.6")
    assert codes() == []


def test_a_version_known_to_be_bad_cannot_be_vetted(versioned):
    kernel = REGISTRY.kernel("plug.rms")
    lz.unregister_kernel("plug.rms")
    lz.register_backend([replace(kernel, backend=replace(kernel.backend, known_bad="==2.1"))])
    versioned("2.1")
    ENGINE.ledger.record_verdict(REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL), Verdict.PASSED)
    assert codes() == [lz.ReasonCode.VERSION_UNSUPPORTED]


def test_a_file_that_changed_is_another_version_of_a_kernel_without_a_package(plugin, tmp_path):
    ledger = FileLedger(tmp_path / "cache")
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL)
    ledger.record_verdict(kernel, facts, Verdict.WRONG)
    assert ledger.verdict(kernel, facts) is Verdict.WRONG
    path = tmp_path / "a_plugin.py"
    path.write_text(path.read_text() + "# repaired\n")
    from layerzero.tuning.storage import records

    records.source_of.cache_clear()
    assert ledger.verdict(kernel, facts) is None


# other processes


def test_what_another_process_cleared_is_seen_by_one_that_runs(tmp_path, monkeypatch, plugin):
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    kernel, facts = REGISTRY.kernel("plug.rms"), lz.facts("rms_norm", *CALL)
    mine, other = FileLedger(tmp_path / "cache"), FileLedger(tmp_path / "cache")
    mine.suspect(kernel, facts, "planted")
    assert other.suspicion(kernel, facts) == "planted"
    assert mine.suspicion(kernel, facts) == "planted"
    (suspect,) = other.suspects()
    other.settle(suspect, Verdict.PASSED, "")
    assert mine.suspicion(kernel, facts) is None
    other.record_verdict(kernel, facts, Verdict.WRONG, "planted")
    assert mine.verdict(kernel, facts) is Verdict.WRONG
    mine.record_verdict(kernel, facts, Verdict.PASSED)
    assert other.verdict(kernel, facts) is Verdict.PASSED


def test_a_kernel_that_no_child_knows_is_not_vetted_and_the_answer_says_why(monkeypatch):
    @lz.register_kernel("norm.rms", "mine.local")
    def local(input, weight, *, eps=1e-6):
        return input

    monkeypatch.setattr(local, "__module__", "__main__")
    object.__setattr__(REGISTRY.kernel("mine.local").load, "__module__", "__main__")
    each = found("mine.local", shapes=[(4, 64)], dtype="float32")
    assert each.verdict is None
    assert "register it through an entry point" in each.detail


@pytest.mark.parametrize("seq", [128, 2048, 32768])
def test_a_call_too_large_for_the_reference_is_cut_until_it_fits(seq):
    from layerzero.core.operation import Case
    from layerzero.testing.sizes import cuts, fits

    operation = next(each for each in lz.list_operations() if each.name == "attention.gqa.prefill")
    sizes = dict(operation.cases[0].sizes) | {"batch": 4, "heads": 32, "kv_heads": 8, "seq_q": seq, "seq_k": seq}
    found = list(cuts(operation, Case("large", sizes, {"causal": True}), "cpu"))
    assert found
    for text, case in found:
        assert fits(operation, case, "cpu")
        assert case.sizes["heads"] == 4 * case.sizes["kv_heads"]
        assert ("seq_q" in text) == (case.sizes["seq_q"] < seq)
    assert any(case.sizes["seq_k"] == seq for _, case in found), "keys stay as long as they are, where that may be"


@pytest.mark.slow
def test_a_kernel_that_compiles_is_built_once_and_checked_as_built(planted):
    each = found("planted.right_key", shapes=[(4, 64)], dtype="float32")
    assert each.verdict is Verdict.PASSED
    assert int(each.detail.split()[0]) > 5


def test_nothing_to_vet_starts_no_process():
    assert vet_calls([]) == ()


# the command


def layerzero(*arguments):
    return CliRunner().invoke(main, list(arguments))


proven = pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="what this torch compiles is untried")


@proven
@pytest.mark.slow  # in test_vetting_demands.py it vets recorded calls
def test_the_command_vets_and_says_what_was_found(plugin):
    answer = layerzero("vet", "--operation", "rms_norm", "--shapes", "4x64", "--dtype", "float32", "--json")
    assert answer.exit_code == 0, answer.output
    data = json.loads(answer.stdout)
    assert data["counts"] == {"passed": 1}
    assert data["classes"][0]["kernel_id"] == "plug.rms"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")
def test_the_command_exits_with_one_where_a_kernel_is_wrong(planted):
    answer = layerzero("vet", "--kernel", "planted.mutates", "--shapes", "4x64", "--dtype", "float32")
    assert answer.exit_code == 1
    assert "planted.mutates for norm.rms float32" in answer.stdout


@pytest.mark.slow
def test_it_says_nothing_twice_and_tells_why_there_is_nothing_to_do(plugin):
    ask = ("vet", "rms_norm", "--kernel", "plug.rms", "--dtype", "float32")
    answer = layerzero(*ask, "--shapes", "4x64,9x64")
    assert answer.stdout.count("plug.rms for norm.rms float32") == 2
    assert answer.stderr == ""
    assert "each class of these calls has a verdict" in layerzero(*ask, "--shapes", "4x64").stdout
    layerzero(*ask)
    assert "other sizes need --shapes" in layerzero(*ask).stdout
    assert "no such kernel has this operation" in layerzero("vet", "layer_norm", "--kernel", "plug.rms").stdout


def test_cases_that_are_no_call_in_a_dtype_are_left_out():
    """A linear layer's case that names float32 for its result is none of float64."""
    found = class_pairs(REGISTRY.kernels("mlp.linear"), "mlp.linear", Device.detect("cpu"))
    assert {torch.float32, torch.float64} <= {facts["dtype"] for _, facts in found}


def test_sizes_that_no_kernel_takes_are_no_verdicts():
    ask = ("vet", "--kernel", "torch.sdpa.flash", "--dtype", "float64", "--shapes", "1x4x2x8192")
    assert "is one that the limits of torch.sdpa.flash allow" in layerzero(*ask).stdout


QUERY = torch.randn(1, 5, 4, 8)
DECODE = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
WIDE = torch.randn(4, 96, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        ("rms_norm", (torch.randn(3000, 512), torch.randn(512)), {}),
        ("rms_norm", (torch.randn(2, 30, 64), torch.randn(64)), {}),
        ("layer_norm", (WIDE, (96,), WIDE[0], WIDE[0]), {}),
        ("attention", (QUERY, QUERY, QUERY), {"layout": "BSHD"}),
        ("attention", (QUERY, QUERY, QUERY), {"layout": "BHSD"}),
        ("attention", DECODE, {}),
    ],
)
@pytest.mark.slow
def test_the_hint_of_a_refusal_vets_the_class_that_was_refused(function, arguments, options):
    facts = lz.facts(function, *arguments, **options)
    kernel = lz.explain(facts).chosen.kernel
    words = shlex.split(re.search("`layerzero (.*)`", how_to_vet(kernel, facts)).group(1))
    answer = layerzero(*words)
    assert answer.exit_code == 0, answer.output
    assert ENGINE.ledger.verdict(kernel, facts) is Verdict.PASSED


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [
        ("rms_norm", (torch.randn(2, 3, 4, 64), torch.randn(64)), {}),
        ("layer_norm", (torch.randn(2, 4, 8), (4, 8)), {}),
        ("attention", (QUERY, QUERY, QUERY), {"causal": False, "attn_mask": torch.zeros(1, 1, 5, 5), "layout": "BSHD"}),
        ("attention", (QUERY, QUERY, QUERY[..., :4].contiguous()), {"layout": "BSHD"}),
    ],
)
@pytest.mark.slow  # test_vetting_demands has a recorded call where slow tests are left out
def test_what_shapes_cannot_say_is_vetted_from_a_recorded_call(function, arguments, options, tmp_path):
    facts = lz.facts(function, *arguments, **options)
    kernel = lz.explain(facts).chosen.kernel
    assert "--manifest FILE" in how_to_vet(kernel, facts)
    with lz.record(tmp_path / "calls.json"):
        getattr(lz, function)(*arguments, **options)
    answer = layerzero("vet", "--kernel", kernel.id, "--manifest", str(tmp_path / "calls.json"))
    assert answer.exit_code == 0, answer.output
    assert ENGINE.ledger.verdict(kernel, facts) is Verdict.PASSED


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--kernel", "nobody.*"), "wanted kernels, got none of nobody.*"),
        (("--shapes", "4by64"), "got '4by64'"),
        (("--module", "no_such_module"), "--module no_such_module: wanted a module that imports"),
    ],
)
def test_a_question_without_sense_is_an_error(arguments, text):
    answer = layerzero("vet", *arguments)
    assert answer.exit_code == 2
    assert text in answer.stderr


@proven
def test_declared_kernels_are_never_asked_about_unless_named():
    assert lz.vet() == ()
    assert isinstance(REGISTRY.kernel("torch.rms_norm"), Kernel)
