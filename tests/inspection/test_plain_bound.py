"""Calls without tensors are bound, recorded, frozen and tuned from a manifest as all others."""

import json
import subprocess
import sys

import pytest

import layerzero as lz
import vocabularies
from layerzero.core.errors import FrozenChoiceError, InvalidCallError
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Verdict
from layerzero.core.operation import Routed
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import plain_facts
from layerzero.engine.registry import REGISTRY
from layerzero.ops import PLAIN_OPERATIONS
from layerzero.ops.tokenize.tokenizer import resolve
from layerzero.tuning.measurement.workload import Manifest, cases_of, jobs_of


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(vocabularies.byte_level())
    yield str(path)
    lz.forget_tokenizer()


def quicker(place, name, text):
    """Let a library be proved, and measured to be quicker for texts of this size."""
    pytest.importorskip(name.partition(".")[0])
    facts = lz.facts("tokenize.encode", text, place)
    ENGINE.ledger.record_verdict(REGISTRY.kernel(name), facts, Verdict.PASSED)
    for kernel, time_us in (("tokenizers.encode", 100.0), (name, 1.0)):
        ENGINE.ledger.record_time(REGISTRY.kernel(kernel), facts, Measurement(time_us, time_us, 0.0, 20, 0.01))
    ENGINE.bump()


@pytest.mark.parametrize("guard", [True, False])
def test_a_bound_call_gives_what_the_function_gives(place, guard):
    for options in ({}, {"truncation": True, "max_length": 4}, {"return_offsets": True}, {"add_special_tokens": False}):
        for example, others in (("the example", ("a text", "", "x" * 5000)), (["a b", "c"], (["x"], ["y z"] * 40))):
            bound = lz.bind(lz.tokenize, example, place, guard=guard, **options)
            for items in (example, *others):
                assert bound(items) == lz.tokenize(items, place, **options)
    back = lz.bind("detokenize", [5, 6, 7], place, guard=guard)
    assert back([8, 9]) == lz.detokenize([8, 9], place)
    assert back.parameters == ("tokens",)
    assert "bound to tokenizers.decode, takes tokens" in repr(back)


def test_what_is_bound_is_guarded(place):
    bound = lz.bind("tokenize.encode", "the example", place)
    assert bound.report.kernel_id == bound.plan.kernel_id == "tokenizers.encode"
    with pytest.raises(InvalidCallError, match="wanted one as bound, got several"):
        bound(["a", "b"])
    with pytest.raises(InvalidCallError, match="wanted a string"):
        bound(3)
    with pytest.raises(InvalidCallError):
        lz.bind("tokenize.decode", "no ids", place)
    with pytest.raises(TypeError, match="bind tokenize"):
        lz.bind(lz.tokenize, "a", place, nothing=3)
    with pytest.raises(InvalidCallError, match="lone surrogate"):
        bound("the exa\ud800ple")


def test_a_bound_call_is_chosen_anew_when_another_library_wins(place):
    bound = lz.bind(lz.tokenize, "the example", place)
    quicker(place, "gigatoken.encode", "the example")
    assert bound("the example") == lz.tokenize("the example", place)
    assert bound.plan.kernel_id == "gigatoken.encode"
    with lz.scope(locks={"tokenize.encode": "tokenizers.encode"}):
        assert bound("the example") == lz.tokenize("the example", place)


def test_a_failure_of_what_is_bound_is_answered_as_everywhere(place):
    bound = lz.bind(lz.tokenize, "the example", place)
    loose = lz.bind(lz.tokenize, "the example", place, guard=False)

    def broken(_):
        raise RuntimeError("broken")

    bound._quick = loose._quick = broken
    assert bound("the example") == lz.tokenize("the example", place)
    with pytest.raises(RuntimeError, match="broken"):
        loose("the example")


def calls_in(run):
    """How many functions a call enters, of Python and of C: what it does, however fast this machine is."""
    count = 0

    def seen(_, event, __):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("example", ["the example", "a long example " * 100, ["the", "examples"]])
def test_a_bound_call_does_no_more_than_the_call_that_it_binds(place, example, guard):
    bound = lz.bind(lz.tokenize, example, place, guard=guard)
    for run in (bound, lambda items: lz.tokenize(items, place)):
        for _ in range(5):  # what is chosen, encoded and kept on the way is there
            run(example)
    call = lz.tokenize
    assert calls_in(lambda: bound(example)) <= calls_in(lambda: call(example, place)) + 1  # its own __call__


def test_what_is_bound_notices_that_its_tokenizer_changed(place):
    tokenizers = pytest.importorskip("tokenizers")
    native = tokenizers.Tokenizer.from_str(vocabularies.byte_level())
    bound, back = lz.bind(lz.tokenize, "hello <x>", native), lz.bind(lz.detokenize, [5, 6], native)
    before = bound("hello <x>")
    native.add_tokens(["<x>"])
    assert bound("hello <x>")["input_ids"] == native.encode("hello <x>").ids != before["input_ids"]
    new = native.token_to_id("<x>")
    assert back([5, new]) == native.decode([5, new])


def test_calls_are_recorded_without_their_texts_and_tuned_from_the_file(place, tmp_path):
    lz.tokenize("warm as before the recording", place)
    with lz.record(tmp_path / "workload.json") as recording:
        for _ in range(5):
            lz.tokenize("a secret text", place)
        lz.tokenize(["one", "two", "three"] * 20, place)
        lz.detokenize([5, 6], place)
    lz.tokenize("a secret text", place)
    assert recording.calls == 7
    text = (tmp_path / "workload.json").read_text()
    assert "secret" not in text
    manifest = Manifest.load(tmp_path / "workload.json")
    assert [each.count for each in manifest.calls] == [5, 1, 1]
    assert jobs_of(manifest, "cpu") == []
    found = {operation.name: (params, cases) for operation, params, cases in cases_of(manifest)}
    assert found["tokenize.encode"][0]["source"] == place
    assert [each.params["batched"] for each in found["tokenize.encode"][1]] == [False, True]
    for each in manifest.calls:  # what is measured is of the class that was recorded
        operation = REGISTRY.operation(each.call.operation)
        arguments = operation.plain.draw(operation.plain.case(each.call.params), {"tokenizer_id": place})
        facts = plain_facts(Routed(operation, arguments))
        assert {name: facts[name] for name in ("characters", "batch")}.items() <= each.call.params.items()
    with lz.scope(deny=["gigatoken", "splintr", "fastokens", "kitoken"]):
        tuned = lz.tune_tokenizer(manifest=tmp_path / "workload.json")
    assert tuned.known == 3
    with pytest.raises(ValueError, match="a tokenizer or a manifest, got neither"):
        lz.tune_tokenizer()
    assert lz.warmup(manifest=tmp_path / "workload.json") == []


def test_choices_are_frozen_and_hold_in_another_process(place, tmp_path):
    quicker(place, "gigatoken.encode", "a text")
    lz.tokenize("a text", place)
    frost = lz.freeze()
    try:
        names = [name for name, each in frost.choices.items() if each.kernel == "gigatoken.encode"]
        assert len(names) == 1
        quicker(place, "splintr.encode", "a text")
        lz.forget_tokenizer()
        assert lz.tokenize("a text", place) == lz.tokenize("a text", resolve(place))
        assert lz.which("tokenize", "a text", place)["kernel_id"] == "gigatoken.encode"
        lz.tokenize("a text of another class " * 9, place)
        assert len(lz.frozen().added) == 1
    finally:
        lz.thaw()
    frost.write(tmp_path / "frozen.json")
    with pytest.raises(FrozenChoiceError, match="this process would choose splintr"):
        lz.freeze(tmp_path / "frozen.json")


@pytest.mark.slow
def test_another_process_with_the_same_times_freezes_the_same(place, tmp_path):
    code = (
        "import sys, layerzero as lz\n"
        "place, file, what = sys.argv[1:]\n"
        "if what == 'write':\n"
        "    lz.tokenize(['a', 'b'], place); lz.tokenize('a text', place); lz.freeze().write(file)\n"
        "else:\n"
        "    frost = lz.freeze(file); lz.tokenize('a text', place); print(frost.hash == lz.thaw().hash)\n"
    )
    for what in ("write", "read"):
        done = subprocess.run(
            [sys.executable, "-c", code, place, str(tmp_path / "frozen.json"), what],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
    assert len(json.loads((tmp_path / "frozen.json").read_text())["choices"]) == 2


def test_a_description_in_another_process_has_the_facts_of_the_call(place):
    facts = lz.facts("tokenize", ["a", "b"] * 50, place)
    operation = PLAIN_OPERATIONS["tokenize.encode"]
    arguments, sizes = operation.plain.described({**dict(facts), **operation.plain.recipe(facts)})
    again = plain_facts(Routed(operation, dict(arguments))).of_sizes(sizes, {})
    assert dict(again) == dict(facts)
