"""Proofs and times of operations without tensors: through Python, and through the command line."""

import json
import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import layerzero as lz
import vocabularies
from layerzero.cli.app import main
from layerzero.cli.tune import shown
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.ops.tokenize.corpus import EDITION, SCRIPTS, differential, prove_decode, prove_encode, sample
from layerzero.ops.tokenize.declare import ENCODE
from layerzero.ops.tokenize.identity import digest
from layerzero.ops.tokenize.tokenizer import resolve
from layerzero.tuning.measurement import plain
from layerzero.tuning.measurement.clocks import Sample
from layerzero.tuning.measurement.comparison import record_times
from layerzero.tuning.measurement.plain import plain_jobs, tune_plain
from layerzero.tuning.prediction.fitting import FULL_SAMPLES
from layerzero.tuning.storage.rows import work_of


def test_the_corpus_is_the_same_everywhere_and_has_what_it_promises():
    texts = list(differential(["<|end|>"]))
    assert texts == list(differential(["<|end|>"]))
    assert len(SCRIPTS) >= 20
    assert len(texts) > 5000
    assert any("<|end|>" in each for each in texts)
    assert sample(5000, 1) == sample(5000, 1)
    assert len(sample(5000, 1)) == 5000


@pytest.mark.skipif(unicodedata.unidata_version != "14.0.0", reason="categories of another Unicode are other texts")
def test_a_change_of_the_corpus_is_a_new_edition():
    texts = list(differential(["<|end|>"]))
    sums = {"3": "16e527b6d0294bde57cc4facb8e187cf0b09cf96f6b81344a9991789a7c2c7cd"}
    assert digest(texts) == sums[EDITION], "the texts changed: raise EDITION, so that all is proved again"


def test_markers_in_text_are_text(tmp_path):
    known = vocabularies.files(tmp_path)
    for kind in ("bpe", "unigram"):
        tokenizer = resolve(known[kind])
        assert {"<s>", "</s>", "<unk>"} <= set(tokenizer.specials)
        assert any("a<s>b" in text for text in differential(tokenizer.specials))
        assert tokenizer.native.bos_id() not in lz.tokenize("a<s>b", known[kind])["input_ids"]
    lz.forget_tokenizer()


def wrong_where(marked):
    """A library that is right but for one kind of text."""

    def load_of(tokenizer):
        def load(asked):
            native = tokenizer.native

            def one(text):
                ids = native.encode(text, add_special_tokens=False).ids
                return [*ids, 0] if marked(text) else ids

            return (lambda texts: [one(text) for text in texts]) if asked["batched"] else one

        return load

    return load_of


@pytest.mark.parametrize(
    "marked",
    [
        lambda text: "\u0301" in text,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (
        lambda text: "\x1c" in text, lambda text: "👩🏿" in text, lambda text: len(text) > 19_000,
        lambda text: "'LL" in text, lambda text: "<|end|>" in text, lambda text: text == "", lambda text: "क" in text,
        lambda text: "\r\n" in text, lambda text: "𠀀" in text, lambda text: "   \n" in text,
        )),
    ],
)  # fmt: skip
def test_a_proof_finds_what_differs_in_one_kind_of_text(place, marked):
    tokenizer = resolve(place)
    given = {"tokenizer": tokenizer, "add_special_tokens": False, "parse_special": True}
    assert prove_encode(wrong_where(marked)(tokenizer), given)


@pytest.mark.slow
def test_a_proof_finds_nothing_where_nothing_differs(place):
    tokenizer = resolve(place)
    given = {"tokenizer": tokenizer, "add_special_tokens": False, "parse_special": True}
    assert prove_encode(wrong_where(lambda _: False)(tokenizer), given) == []


@pytest.mark.slow
def test_a_proof_finds_a_batch_that_differs(place):
    tokenizer = resolve(place)
    given = {"tokenizer": tokenizer, "add_special_tokens": False, "parse_special": True}
    right = wrong_where(lambda _: False)(tokenizer)
    shuffled = lambda asked: (lambda texts: right(asked)(texts)[::-1]) if asked["batched"] else right(asked)
    assert "as a batch" in prove_encode(shuffled, given)[0]


@pytest.mark.slow
def test_a_proof_finds_a_second_time_that_differs(place):
    tokenizer = resolve(place)
    given = {"tokenizer": tokenizer, "add_special_tokens": False, "parse_special": True}
    right = wrong_where(lambda _: False)(tokenizer)
    seen = {}

    def forgetful(asked):
        def one(text):
            seen[text] = seen.get(text, 0) + 1
            ids = right({"batched": False})(text)
            return ids if seen[text] < 2 else [*ids, 0]

        return right(asked) if asked["batched"] else one

    assert prove_encode(forgetful, given)


@pytest.mark.slow
def test_a_proof_of_decoding_finds_halves_of_characters(place):
    tokenizer = resolve(place)
    native = tokenizer.native
    given = {"tokenizer": tokenizer, "skip_special_tokens": False}

    def load_of(mend):
        def load(asked):
            one = lambda ids: mend(native.decode(ids, skip_special_tokens=False))
            return (lambda rows: [one(row) for row in rows]) if asked["batched"] else one

        return load

    assert prove_decode(load_of(lambda text: text), given) == []
    assert prove_decode(load_of(lambda text: text.replace("\ufffd", "")), given)


def test_times_are_taken_of_what_is_right_and_remembered(place):
    kernels = {each.id: each for each in lz.list_kernels("tokenize.encode")}
    for name in ("gigatoken.encode", "splintr.encode"):
        pytest.importorskip(name.partition(".")[0])
        facts = lz.facts("tokenize.encode", "a", place)
        ENGINE.ledger.record_verdict(kernels[name], facts, Verdict.PASSED)
    leave_out = ["fastokens", "kitoken"]
    with lz.scope(deny=leave_out):
        tuned = tune_plain(
            plain_jobs("tokenize.encode", {"tokenizer_id": place}), samples=3, budget_s=0.5, leave_out=leave_out
        )
    assert tuned.contests
    assert all(len(each.entries) == len(each.times) == 3 for each in tuned.contests)
    assert [(each.before, bool(each.kernel_id)) for each in tuned.choices] == [
        (tuned.contests[0].report.kernel_id, True)
    ] * len(tuned.contests)
    report = lz.explain("tokenize", "abcdef", place)
    assert {each.provenance for each in report.candidates if each.legal} == {"measured"}
    assert json.dumps(tuned.to_dict())


def test_times_are_of_a_tokenizer_and_not_of_its_name(place, tmp_path):
    other = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")
    shutil.copyfile(place, other)
    one, two = (lz.facts("tokenize.encode", "abcdef", name) for name in (place, other))
    assert one["tokenizer_id"] != two["tokenizer_id"]
    assert work_of(one) == work_of(two)
    assert work_of(two).key
    with lz.record() as recording:
        lz.tokenize("abc", other)
    (recorded,) = recording.manifest().calls
    assert Path(recorded.call.params["source"]).read_text() == Path(place).read_text()


def test_a_few_samples_of_near_ones_are_not_enough(place, monkeypatch):
    """A sample of the stock library took so long that it got three, and stayed before one of half its time."""

    def few(found, samples, origin):
        return {
            kernel: Measurement(median_us=1e5, p95_us=1e5, variance_us2=1.0, samples=3, noise=0.0)
            for kernel in found.runs
        }

    pytest.importorskip("splintr")
    kernel = next(each for each in lz.list_kernels("tokenize.encode") if each.id == "splintr.encode")
    ENGINE.ledger.record_verdict(kernel, lz.facts("tokenize.encode", "a", place), Verdict.PASSED)
    monkeypatch.setattr(plain, "_times", few)
    monkeypatch.setattr(plain, "record_times", lambda *given: record_times(*given) or True)
    leave_out = ["fastokens", "kitoken", "gigatoken"]
    cases = ENCODE.cases[:1]
    with lz.scope(deny=leave_out):
        tuned = tune_plain(plain_jobs("tokenize.encode", {"tokenizer_id": place}, cases), leave_out=leave_out)
    (contest,) = tuned.contests
    assert {each.id for each in contest.times} == {"tokenizers.encode", "splintr.encode"}
    (choice,) = tuned.choices
    assert tuned.winners_changed == (choice.kernel_id != choice.before), "its times are recorded several times"
    assert all(each.samples >= FULL_SAMPLES and each.median_us < 1e5 for each in contest.times.values())


@pytest.mark.parametrize("status", ["failed", "wrong"])
def test_a_kernel_that_is_lost_is_told_where_one_remains(place, status):
    def run(items):
        if status == "failed":
            raise RuntimeError("no such text")
        return [0]

    library = lz.Backend("mine", "a library of a test", origin="code")
    mine = lz.Kernel(
        id="mine.encode", operations=("tokenize.encode",), backend=library, load=lambda _: run,
        accepts=ENCODE.schema.arguments,
    )  # fmt: skip
    REGISTRY.register_kernel(mine)
    others = sorted({each.source for each in REGISTRY.kernels("tokenize.encode")} - {"mine", "tokenizers"})
    lines, jobs = [], plain_jobs("tokenize.encode", {"tokenizer_id": place}, ENCODE.cases[:1])
    with lz.scope(deny=others):
        tuned = tune_plain(jobs, leave_out=others, progress=lines.append)
        assert (status == "wrong") is bool(lz.explain("tokenize", "abc", place).reasons("mine.encode"))
    why = "RuntimeError: no such text" if status == "failed" else "another result than the reference"
    assert [(each.kernel, str(each.status), each.detail) for each in tuned.contests[0].entries] == [(mine, status, why)]
    assert lines == [f"{jobs[0].name}: mine.encode {status}: {why}"]
    assert tuned.known == 0
    assert json.dumps(tuned.to_dict())
    assert any(why in str(each) for each in shown(tuned))


def test_who_is_far_behind_is_not_measured_longer():
    def time(median_us, samples):
        return Measurement(median_us=median_us, p95_us=median_us, variance_us2=1.0, samples=samples, noise=0.0)

    assert plain._open({"a": time(1.0, 20), "b": time(1.9, 3), "c": time(9.0, 3)}, 10) == ["a", "b"]
    assert plain._open({"a": time(1.0, 3), "c": time(9.0, 3)}, 10) == []
    assert plain._open({"a": time(1.0, 20), "b": time(1.9, 20)}, 10) == []


def test_what_has_to_be_named_is_asked_for(place):
    runner = CliRunner()
    for command in ("tune tokenize", "vet tokenize", "bench tokenize", "explain tokenize"):
        result = runner.invoke(main, command.split())
        assert result.exit_code != 0
        assert "tokenizer_id" in result.output
    result = runner.invoke(
        main, ["explain", "tokenize", "--param", f"tokenizer_id={place}", "--shape", "16x100", "--json"]
    )
    facts = json.loads(result.output)["facts"]
    assert (facts["batch"], facts["characters"]) == (32, 2048)
    assert (
        runner.invoke(main, ["which", "tokenize", "--param", f"tokenizer_id={place}"]).output.strip()
        == "tokenizers.encode"
    )
    for flags in (["--shape", "ax3"], ["--case", "none"], ["--param", "nothing=1"]):
        assert runner.invoke(main, ["explain", "tokenize", "--param", f"tokenizer_id={place}", *flags]).exit_code != 0
    assert runner.invoke(main, ["tune", "rms_norm", "--param", "a=1"]).exit_code != 0


def test_what_only_tensors_have_is_refused(place):
    for given in ({"graph": True}, {"shapes": [(4, 64)]}, {"dtype": "float32"}, {"device": "cpu"}):
        with pytest.raises(lz.InvalidCallError, match=rf"wanted none of .* got {next(iter(given))}="):
            lz.vet("tokenize", params={"tokenizer_id": place}, kernels=["nothing"], **given)
    for flags in (["--graph"], ["--shapes", "4x64"], ["--dtype", "float32"], ["--device", "cpu"]):
        command = ["vet", "tokenize", "--param", f"tokenizer_id={place}", "--kernel", "nothing", *flags]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2, result.output
        assert f"got {flags[0]}; leave" in result.output.replace("\n", "")


@pytest.mark.slow
def test_a_child_proves_and_the_verdict_lets_it_run(place, tmp_path, monkeypatch):
    pytest.importorskip("gigatoken")
    result = CliRunner().invoke(main, ["vet", "tokenize", "--param", f"tokenizer_id={place}", "--kernel", "gigatoken"])
    assert result.exit_code == 0, result.output
    assert "gigatoken.encode" in result.output
    assert "passed" in result.output
    report = lz.explain("tokenize", "abcdef", place)
    assert report.reasons("gigatoken.encode") == ()
    with lz.scope(locks={"tokenize.encode": "gigatoken.encode"}):
        assert lz.tokenize("abc def", place)["input_ids"] == resolve(place).native.encode("abc def").ids
    assert lz.vet("tokenize", params={"tokenizer_id": place}, kernels=["gigatoken"]) == ()


def test_a_library_that_is_hopeless_in_one_long_call_gets_no_other(monkeypatch):
    """A text of 800,000 characters: the slowest of three took most of what measuring takes."""

    class Told:
        def once(self, run):
            return run()

        def sample(self, run, about_us):
            return Sample(run())

        def calmer(self):
            return None

    def of(name, about_us):
        return lambda: (ran.append(name), about_us)[1]

    kernels, ran = [each for each in REGISTRY.kernels() if each.is_reference][:3], []
    runs = {kernel: of(kernel.id, us) for kernel, us in zip(kernels, (24e3, 30e3, 9e5), strict=True)}
    monkeypatch.setattr(plain, "clock_of", lambda _: Told())
    times = plain._times(plain._Contest(None, None, runs), 20, "tune")
    assert [ran.count(kernel.id) > 1 for kernel in kernels] == [True, True, False]
    assert list(times) == kernels
