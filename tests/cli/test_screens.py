"""What `bench`, `tune` and `vet` show at their ends: the answer first, on one screen, and what was left out."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex

import pytest
import torch
from torch.nn.functional import rms_norm
from typer.testing import CliRunner

import layerzero as lz
from layerzero.cli import bench_tables
from layerzero.cli import tune as tune_command
from layerzero.cli import vet as vet_command
from layerzero.cli.app import main
from layerzero.cli.bench import answer_of, shown_on_screen
from layerzero.cli.calls import VetFlags
from layerzero.cli.output import stdout_console
from layerzero.cli.tables import SCREEN, not_measured
from layerzero.core.evidence import Measurement
from layerzero.core.kernel import Backend, Kernel, Trust
from layerzero.core.ledger import Verdict
from layerzero.core.operation import Work
from layerzero.engine.dispatch import ENGINE
from layerzero.tuning.measurement.admission import Ceiling
from layerzero.tuning.measurement.bench import TORCH, Benched, Line, TimedBy
from layerzero.tuning.measurement.comparison import Compared
from layerzero.tuning.measurement.contest import ContestEntry, Status
from layerzero.tuning.measurement.timing import Deadline
from layerzero.tuning.measurement.tune import Tuned
from layerzero.tuning.verification.vetting import Vetted
from others import OTHERS


def run(line, code=0):
    result = CliRunner().invoke(main, shlex.split(line), prog_name="layerzero", env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output
    return result


def lines_of(parts):
    """What a screen of 100 columns shows."""
    text = io.StringIO()
    console = stdout_console(text)
    for part in parts:
        console.print(part)
    return text.getvalue().rstrip("\n").splitlines()


def benched(operation, case, times, chosen, of_torch=100.0):
    """A call with these times of kernels, beside torch's own function."""
    lines = [
        Line(name, "timed", name == chosen, time_us, time_us, 0.01, 9, against_torch=of_torch / time_us)
        for name, time_us in times.items()
    ]
    lines.append(Line(TORCH, "timed", False, of_torch, of_torch))
    lines.sort(key=lambda line: line.median_us)
    return Benched(f"{operation} {case} float32", operation, {}, None, None, tuple(lines), {}, chosen)


def compared(found, **more):
    given = {"left": (), "skipped": {}, "needs_bytes": {}, "not_built": {}, "seconds": 60.0}
    return Compared(found=tuple(found), **{**given, **more})


QUICK, SLOW = {"a.quick": 50.0, "b.other": 80.0}, {"a.quick": 90.0, "b.other": 30.0}
FOUND = [
    benched("zork.decode", "one", QUICK, "a.quick"),
    benched("zork.decode", "two", QUICK, "a.quick"),
    benched("zork.prefill", "one", SLOW, "a.quick"),
]


def test_the_answer_says_who_is_fastest_where_what_that_gains_and_what_is_chosen():
    fastest, gain, chosen = answer_of(FOUND, "zork")
    assert fastest == "Fastest: a.quick in 2 of 3 calls (decode 2), b.other in 1 (prefill 1)."
    assert "2.37x as quick as torch's own function in the mean, at most 3.33x (zork.prefill one float32)" in gain
    assert "in 2 of 3 calls; in 1 it takes longer, at most 3.00x (zork.prefill one float32)" in chosen
    assert "`layerzero tune zork`" in chosen
    (only,) = answer_of(FOUND[:1], "zork")
    assert only == (
        "Fastest for zork.decode one float32: a.quick 50.0 us, 2.00x as quick as torch's own; "
        "LayerZero chooses: the same."
    )


def test_a_busy_machine_is_told_with_the_answer():
    busy = [dataclasses.replace(each, condition="load=high,power=full") for each in FOUND[:2]]
    assert list(answer_of([*busy, FOUND[2]], "zork"))[-1] == (
        "Believe none of this to the percent: load=high for 2 calls."
    )


def test_where_nothing_has_a_time_the_answer_says_so():
    failed = Benched("zork one", "zork", {}, None, None, (Line("a.quick", "failed"),), {}, "a.quick")
    assert list(answer_of([failed, failed], "zork")) == ["No kernel has a time."]
    assert "a.quick: failed for zork one and 9 other calls" in "\n".join(
        lines_of(shown_on_screen(compared([failed] * 10), "zork", 60.0))
    )


@pytest.mark.parametrize(
    ("operations", "each"), [(4, 15), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 80), (40, 2)))]
)
def test_the_end_fits_on_a_screen_whatever_was_measured_and_all_unfolds_it(operations, each):
    times = {f"kernel.number_{number}": 10.0 + number for number in range(9)}
    found = [
        benched(f"zork.operation_{number}", f"case_{case}", times, "kernel.number_3")
        for number in range(operations)
        for case in range(each)
    ]
    known = compared(
        found,
        left=tuple(f"zork.operation case_{number} bfloat16" for number in range(30)),
        skipped={f"zork.operation large_{number} float32": "too little memory: so much" for number in range(10)},
        needs_bytes={f"zork.operation large_{number} float32": number for number in range(10)},
        not_built={"compiles.one": "the time was over", "compiles.two": "the time was over"},
    )
    shown = lines_of(shown_on_screen(known, "zork", 60.0))
    assert len(shown) <= SCREEN
    assert shown[0].startswith("Fastest: kernel.number_0 in ")
    text = " ".join(" ".join(shown).split())
    assert "30 calls were left when 60 s were over (zork.operation case_0 bfloat16, ...): --budget-s inf" in text
    assert "10 calls were not measured for want of memory, the largest zork.operation large_9 float32" in text
    assert "compile: compiles.one, compiles.two: --budget-s inf waits for them" in text
    everything = " ".join(" ".join(lines_of(shown_on_screen(known, "zork", 60.0, everything=True))).split())
    assert everything.count(TORCH) >= operations * each
    assert "zork.operation case_29 bfloat16" in everything
    assert everything.count("too little memory") == 10


def test_few_calls_have_their_whole_tables():
    shown = "\n".join(lines_of(shown_on_screen(compared(FOUND[:2]), "zork", 60.0)))
    assert shown.count("median us") == 2
    assert "were left" not in shown


@pytest.mark.parametrize("command", ["bench rms_norm", "vet rms_norm", "bench tokenize --param tokenizer_id=x"])
@pytest.mark.parametrize("budget", ["0", "-3", "nan"])
def test_a_budget_is_more_than_nothing(command, budget):
    told = run(f"{command} --budget-s {budget}", code=2).stderr
    assert f"--budget-s: wanted more than 0 seconds, got {budget}; leave it out for the default, inf has no end" in told


@pytest.mark.parametrize("flag", ["bench --shapes 1x2", "bench --dtype float32", "tune --graph", "vet --device cpu"])
def test_flags_of_tensors_are_refused_where_there_are_none(flag):
    command, *given = flag.split()
    told = run(f"{command} tokenize --param tokenizer_id=x {' '.join(given)}", code=2).stderr
    assert f"{command} tokenize: it has no tensors: wanted no --shapes," in told
    assert f"got {given[0]}; leave" in told


@pytest.mark.parametrize("command", ["bench", "vet"])
def test_a_kernel_that_nothing_has_is_refused_without_tensors_too(command):
    told = run(f"{command} tokenize --param tokenizer_id=x --kernel zork", code=2).stderr
    assert "--kernel: wanted a library or kernel, got 'zork'" in told


def over(_):
    """A deadline that has passed."""
    hands = iter([0.0, 0.0])
    return Deadline(1.0, lambda: next(hands, 2.0))


def test_bench_without_time_measures_nothing_and_says_how_long_it_had(monkeypatch):
    lz.configure(deny=OTHERS)
    monkeypatch.setattr("layerzero.cli.bench.deadline_of", over)
    ask = "bench rms_norm --dtype float32 --shapes 8x64 --budget-s 1"
    assert "1 call was left when 1 s were over (norm.rms 8x64 float32)" in run(ask, code=1).stdout.replace("\n", " ")
    data = json.loads(run(f"{ask} --json", code=1).stdout)
    assert (data["calls"], data["cut"], data["left"]) == ([], True, ["norm.rms 8x64 float32"])
    assert data["budget_s"] == 1


# vet


@pytest.fixture
def plugin():
    def load(facts):
        return lambda input, weight, *, eps: rms_norm(input, weight.shape, weight, eps)

    kernel = Kernel(
        id="plug.rms",
        operations=("norm.rms",),
        backend=Backend(name="plug", summary="a plugin", origin="plugin"),
        trust=Trust.PLUGIN,
        load=load,
        accepts=("eps",),
        priority=100,
    )
    lz.register_backend([kernel])
    return kernel


def test_a_vet_that_was_cut_is_no_whole_vet_and_leaves_what_was_as_it_was(plugin, monkeypatch):
    monkeypatch.setattr(vet_command, "deadline_of", over)
    ask = "vet rms_norm --kernel plug.rms --dtype float32 --shapes 4x64,4x128 --budget-s 1"
    told = " ".join(run(ask, code=1).stdout.split())
    assert "2 classes: 2 not reached" in told
    text = "no whole vet: 2 classes were left when 1 s were over, and nothing new is known of them; --budget-s inf asks"
    assert text in told, "the same command would end there again"
    data = json.loads(run(f"{ask} --json", code=1).stdout)
    assert (data["cut"], data["left"], data["counts"]) == (True, 2, {"not reached": 2})
    assert [each["verdict"] for each in data["classes"]] == [None, None]
    facts = lz.facts("rms_norm", torch.empty(4, 64), torch.empty(64))
    assert ENGINE.ledger.judgement(plugin, facts) is None
    reasons = {str(each.code) for each in lz.explain(facts).reasons("plug.rms")}
    assert "NOT_VETTED" in reasons


LEFT = (
    "no whole vet: 1 class was left when 100 s were over, and nothing new is known of it; "
    "the same command goes on, --budget-s inf asks about all"
)


def test_each_kernel_has_a_line_and_those_first_that_did_not_pass():
    found = [
        Vetted("a.one", "x", Verdict.PASSED, ""),
        Vetted("a.one", "y", Verdict.PASSED, ""),
        Vetted("b.two", "x", Verdict.PASSED, ""),
        Vetted("b.two", "y", None, "the time given was over before its turn ended", reached=False),
    ]
    assert list(vet_command.shown(found, 100.0)) == [
        "b.two: 1 not reached, 1 passed",
        "a.one: 2 passed",
        "4 classes: 1 not reached, 3 passed",
        LEFT,
    ]
    assert "goes on" not in list(vet_command.shown(found, 100.0, again=True))[-1]
    assert vet_command.code_of(found) == 1
    assert vet_command.code_of(found[:3]) == 0


def test_kernels_and_operations_take_turns():
    assert vet_command.in_turn([["first", "third"], ["second"]]) == ["first", "second", "third"]
    flags = VetFlags(kernel=["torch.rms_norm", "torch.layer_norm"], device="cpu", dtype="float32", again=True)
    pairs, _ = vet_command._of_tensors(flags, "norm.*")
    assert [facts.operation.name for _, facts in pairs[:4]] == ["norm.layer", "norm.rms"] * 2


# tune


@pytest.fixture
def tuned():
    lz.configure(deny=OTHERS)
    shapes = [(8, 32 * (number + 1)) for number in range(tune_command.MOST_ROWS + 1)]
    return lz.tune("rms_norm", shapes, "float32", samples=3, isolate=False, leave_out=OTHERS)


def test_what_did_not_change_is_a_line_for_each_operation(tuned):
    assert {now.before for now in tuned.choices} == {now.kernel_id for now in tuned.choices}
    shown = lines_of(tune_command.shown(tuned))
    count = len(tuned.contests)
    assert sum(line.startswith("norm.rms: ") for line in shown) == 1
    assert f"norm.rms: {count} calls as before: {tuned.choices[0].kernel_id} {count}" in shown
    assert "norm.rms 8x32 float32" not in "\n".join(shown)
    everything = "\n".join(lines_of(tune_command.shown(tuned, everything=True)))
    assert everything.count("the same") == count
    assert "norm.rms 8x32 float32" in everything


def test_what_became_of_many_kernels_alike_is_one_line(tuned):
    over = "the time given was over before its turn ended"
    kernels = [dataclasses.replace(tuned.contests[0].entries[0].kernel, id=f"user.{number}") for number in range(5)]
    entries = tuple(ContestEntry(kernel, Status.UNTRIED, None, over) for kernel in kernels)
    other = (ContestEntry(kernels[0], Status.UNTRIED, None, "it raised"),)
    contests = tuple(
        dataclasses.replace(found, entries=each)
        for found, each in zip(tuned.contests[:2], (entries, other), strict=True)
    )
    cut = Tuned(**{name: getattr(tuned, name) for name in Tuned.__slots__} | {"contests": contests})
    shown = " ".join(str(each) for each in tune_command._untimed(cut, everything=False))
    assert f"user.0, user.1, user.2 and 2 more kernels on 1 call: {Status.UNTRIED}: {over}" in shown
    assert shown.count(over) == 1
    assert "it raised" in shown, "another reason of one of them is told"
    assert str(list(tune_command._untimed(cut, everything=True))).count(over) == 5


def test_few_calls_have_a_row_each(tuned):
    few = Tuned(**{name: getattr(tuned, name) for name in Tuned.__slots__} | {
        "contests": tuned.contests[:2], "choices": tuned.choices[:2],
    })  # fmt: skip
    assert "\n".join(lines_of(tune_command.shown(few))).count("the same") == 2


def test_what_memory_does_not_hold_is_one_line_and_other_reasons_have_their_own():
    skipped = {"a": "too little memory: 1", "b": "too little memory: 2", "c": "it raised"}
    needs = {"a": 7, "b": 9}
    folded = [str(each) for each in not_measured(skipped, needs, everything=False)]
    assert folded == [
        "not measured: c: it raised",
        "2 calls were not measured for want of memory, the largest b: too little memory: 2; --all lists them",
    ]
    assert len(list(not_measured(skipped, needs, everything=True))) == 3
    assert list(map(str, not_measured({"a": "too little memory: 1"}, needs, everything=False))) == [
        "not measured: a: too little memory: 1"
    ]


def test_a_difference_within_the_noise_is_no_headline():
    waited = Line(TORCH, "timed", False, 16000.0, 16000.0, 499.0, 21)
    steady = Line("a.quick", "timed", True, 32.0, 32.0, 0.01, 20)
    assert steady.gain_over(waited, TimedBy.CALL) == 1.0
    line = dataclasses.replace(steady, against_torch=steady.gain_over(waited, TimedBy.CALL))
    (only,) = answer_of([Benched("zork one", "zork", {}, None, None, (line, waited), {}, "a.quick")], "zork")
    assert only == (
        "Fastest for zork one: a.quick 32.0 us, as quick as torch's own within the noise; LayerZero chooses: the same."
    )


def test_calls_that_have_one_name_are_counted_each_for_itself():
    quick, slow = (Line("a.quick", "timed", chosen, 10.0, 10.0, 0.01, 20) for chosen in (True, False))
    other = Line("b.other", "timed", True, 30.0, 30.0, 0.01, 20)
    calls = [(quick, Line(TORCH, "timed", False, 20.0, 20.0, 0.01, 20)), (quick,), (slow, other)]
    found = [Benched("zork one", "zork", {}, None, None, lines, {}, "a.quick") for lines in calls]
    _, gains, choices = answer_of(found, "zork")
    assert gains == "They are 2.00x as quick as torch's own function in the mean, at most 2.00x (zork one)."
    assert choices.startswith("LayerZero now chooses the fastest, or one within 5% of it, in 2 of 3 calls; in 1 it ")
    assert "at most 3.00x (zork one)" in choices


def test_a_ceiling_that_memory_did_not_hold_is_told():
    found = dataclasses.replace(FOUND[0], work=Work(bytes=1000.0, flops=1.0), ceiling=None)
    assert bench_tables.described(found).endswith("ceiling not measured: too little memory")


def test_tune_tells_no_winner_within_the_noise(tuned):
    found = tuned.contests[0]
    kernel = found.entries[0].kernel
    times = [Measurement(32.0, 32.0, 0.0, 20, noise=0.01), Measurement(7744.0, 16000.0, 0.0, 20, noise=241.0)]
    entries = tuple(ContestEntry(kernel, Status.TIMED, each) for each in times)
    noisy = dataclasses.replace(found, entries=entries)
    assert tune_command.winner(noisy, short=True) == f"{kernel.id} 32.0 us (noise)"
    assert tune_command.winner(noisy) == f"{kernel.id} 32.0 us, no quicker than {kernel.id} within the noise"


@pytest.mark.parametrize(
    ("flops", "why"), [(1.0, "their tensors lie in a cache"), (1e9, "this product has a kinder shape")]
)
def test_no_share_of_a_ceiling_is_above_it_without_a_word(flops, why):
    work, best = Work(bytes=1000.0, flops=flops), Ceiling(gb_s=1.0, tflop_s=1.0)
    lines = [
        Line(name, "timed", False, 1.0, 1.0, ceiling_share=share)
        for name, share in (("a.cached", 1.66), ("b.memory", 0.5))
    ]
    found = dataclasses.replace(FOUND[0], lines=tuple(lines), work=work, ceiling=best)
    shown = lines_of(bench_tables.tables([found]))
    assert "166 %" not in "\n".join(shown)
    assert any("a.cached" in line and " above " in line for line in shown)
    assert any("b.memory" in line and "50 %" in line for line in shown)
    assert any(line.startswith("above the ceiling: a.cached: ") for line in shown)
    assert why in " ".join(shown)


def test_tune_takes_parameters_and_says_what_its_brackets_are():
    @lz.register_kernel("norm.rms", "mine.rms_norm")
    def mine(input, weight, *, eps=1e-6):
        return rms_norm(input, weight.shape, weight, eps)

    lz.configure(deny=OTHERS)
    result = run("tune rms_norm --param eps=0.1 --shapes 4x64 --dtype float32 --no-isolation --samples 3 --again")
    assert "rms_norm" in result.output
    said = " ".join(result.output.split())  # how wide the table is, and where its caption breaks, times decide
    assert "in brackets: how many times as long the next one takes; noise: no longer than times" in said
    assert "eps" in run("tune rms_norm --param epsilon=0.1 --shapes 4x64", 2).output
