"""Operations without tensors: policy, locks, evidence, failures, scopes and answers, by the judges of all others."""

import pytest

import layerzero as lz
import vocabularies
from layerzero.core.evidence import Measurement
from layerzero.core.ledger import Verdict
from layerzero.core.operation import Routed
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import PlainDispatcher, plain_facts
from layerzero.engine.registry import REGISTRY
from layerzero.ops import PLAIN_OPERATIONS
from layerzero.ops.tokenize.tokenizer import resolve

ENCODE = PLAIN_OPERATIONS["tokenize.encode"]
MINE = lz.Backend("mine", "a library of a test", origin="code")


@pytest.fixture
def few():
    yield resolve(vocabularies.encoding())
    lz.forget_tokenizer()


def facts_of(tokenizer, text="", **flags):
    given = {"add_special_tokens": False, "parse_special": False, "return_offsets": False, "batched": False, **flags}
    return plain_facts(Routed(ENCODE, {"tokenizer": tokenizer, "items": text, **given}))


def register(name, run=None, *, load=None, proved_first=False, **declared):
    accepts = ENCODE.schema.arguments
    REGISTRY.register_kernel(
        lz.Kernel(
            id=f"mine.{name}", operations=("tokenize.encode",), backend=MINE, accepts=accepts,
            load=load or (lambda _: run), deterministic=True, proved_first=proved_first, **declared,
        )
    )  # fmt: skip


def test_the_librarys_own_is_chosen_and_everything_else_has_a_reason(few):
    report = lz.explain("tokenize", "the self", few)
    assert report.kernel_id == "tiktoken.encode"
    codes = {kernel: {str(each.code) for each in reasons} for kernel, reasons in report.failures.items()}
    assert "TOKENIZER_ID_MISMATCH" in codes["tokenizers.encode"]
    assert "TOKENIZER_ID_MISMATCH" in codes["sentencepiece.encode"]
    assert {"VOCAB_HASH_MISMATCH", "MERGES_HASH_MISMATCH"} <= codes["bpe_openai.encode"]
    assert "VOCAB_HASH_MISMATCH" in codes["splintr.encode"]
    assert lz.which("tokenize.decode", [97], few)["kernel_id"] == "tiktoken.decode"
    assert lz.validate("tokenizers.encode", "a", few)[0] is False


def test_reasons_name_the_part_of_the_tokenizer(few, tmp_path):
    files = vocabularies.files(tmp_path)
    codes = lambda *args, **kwargs: {
        str(each.code) for reasons in lz.explain("tokenize", *args, **kwargs).failures.values() for each in reasons
    }
    assert "SPECIAL_TOKENS_MISMATCH" in codes("a", few, parse_special=True)
    assert "ADDED_TOKENS_MISMATCH" in codes("a", files["byte_level"], parse_special=False)
    assert "NORMALIZER_MISMATCH" in codes("a", files["word_piece"])


def test_facts_have_whole_hashes_and_sizes_as_powers_of_two(few):
    facts = facts_of(few, "a" * 1000)
    assert facts["characters"] == 1024
    assert facts["batch"] == 1
    assert len(facts["tokenizer_hash"]) == len(facts["vocab_hash"]) == 64
    assert facts_of(few, ["abc", "de"], batched=True)["characters"] == 8


def test_locks_denials_rules_and_scopes(few):
    register("encode", lambda text: [7])
    assert lz.tokenize("the", few)["input_ids"] == resolve(few).native.encode_ordinary("the")
    with lz.scope(locks={"tokenize": "mine.encode"}):
        assert lz.tokenize("the", few)["input_ids"] == [7]
        assert lz.tokenize("the", few)["input_ids"] == [7]
    assert lz.tokenize("the", few)["input_ids"] != [7]
    with lz.scope(deny=["tiktoken"]):
        assert lz.tokenize("the", few)["input_ids"] == [7]
    with lz.scope(rules=[{"match": {"operation": "tokenize.encode", "characters": ">4"}, "deny": ["tiktoken"]}]):
        assert lz.tokenize("the", few)["input_ids"] != [7]
        assert lz.tokenize("the self", few)["input_ids"] == [7]
    with lz.scope(deny=["tiktoken", "mine"]), pytest.raises(lz.NoKernelFoundError, match="POLICY_DENIED"):
        lz.tokenize("the", few)
    lz.configure(deny=["tiktoken"])
    assert lz.tokenize("the", few)["input_ids"] == [7]


def test_times_choose_by_length(few):
    register("encode", lambda text: [7])
    kernels = {name: REGISTRY.kernel(name) for name in ("tiktoken.encode", "mine.encode")}
    for text, quick in (("a" * 10, "mine.encode"), ("a" * 1000, "tiktoken.encode")):
        for name, kernel in kernels.items():
            median_us = 1.0 if name == quick else 10.0
            ENGINE.ledger.record_time(kernel, facts_of(few, text), Measurement(median_us, median_us, 0.0, 20))
    ENGINE.bump()
    assert lz.tokenize("b" * 12, few)["input_ids"] == [7]
    assert lz.tokenize("b" * 900, few)["input_ids"] != [7]


def test_what_has_a_form_of_its_own_waits_for_its_proof(few):
    register("encode", lambda text: [7], proved_first=True)
    kernel = REGISTRY.kernel("mine.encode")
    with lz.scope(locks={"tokenize": "mine.encode"}), pytest.raises(lz.NoKernelFoundError, match="NOT_VETTED"):
        lz.tokenize("the", few)  # a lock is no proof
    ENGINE.ledger.record_verdict(kernel, facts_of(few), Verdict.PASSED)
    with lz.scope(locks={"tokenize": "mine.encode"}):
        assert lz.tokenize("a text of any length", few)["input_ids"] == [7]
        with pytest.raises(lz.NoKernelFoundError, match="NOT_VETTED"):
            lz.tokenize("the", few, parse_special=True)  # another class
    ENGINE.ledger.record_verdict(kernel, facts_of(few, parse_special=True), Verdict.WRONG, "other ids")
    with lz.scope(locks={"tokenize": "mine.encode"}):
        assert lz.tokenize("the", few)["input_ids"] == [7]  # wrong elsewhere is not wrong here


@pytest.mark.parametrize("error", [RuntimeError, type("PanicException", (BaseException,), {})])
def test_a_kernel_that_raises_is_replaced_and_rests(few, error):
    calls = []

    def breaks(text):
        calls.append(text)
        if len(calls) > 2:
            raise error("broken")
        return [7]

    register("encode", breaks)
    lz.configure(prefer=["mine"], unmeasured="priority", avoid=["tiktoken"])
    assert [lz.tokenize("the", few)["input_ids"] for _ in range(2)] == [[7], [7]]
    with pytest.warns(lz.LayerZeroFallbackWarning, match=r"mine\.encode failed"):
        assert lz.tokenize("the", few)["input_ids"] == resolve(few).native.encode_ordinary("the")
    assert lz.tokenize("the", few)["input_ids"] != [7]
    assert len(calls) == 3
    assert any(str(each.code) == "UNHEALTHY" for each in lz.explain("tokenize", "the", few).reasons("mine.encode"))


@pytest.mark.parametrize("at", ["load", "run"])
def test_what_defines_a_tokenizer_serves_other_calls_after_one_that_it_could_not(few, at):
    def wrong(*_):
        raise ValueError("no offsets in this version")

    def load(facts):
        if facts["return_offsets"]:
            return wrong() if at == "load" else wrong
        return lambda text: [7]

    register("encode", load=load, stock=True)
    lz.configure(deny=["tiktoken"])
    for _ in range(2):
        with pytest.raises(lz.NoKernelFoundError if at == "load" else lz.KernelExecutionError) as error:
            lz.tokenize("the", few, return_offsets=True)
        assert at == "load" or "no offsets in this version" in str(error.value.__cause__)
        assert lz.tokenize("the", few)["input_ids"] == [7]


def test_interrupts_are_not_failures(few):
    def interrupted(text):
        raise KeyboardInterrupt

    register("encode", interrupted)
    with lz.scope(locks={"tokenize": "mine.encode"}), pytest.raises(KeyboardInterrupt):
        lz.tokenize("the", few)
    assert not ENGINE.health.breakers()


def test_questions_that_mean_nothing(few):
    with pytest.raises(lz.InvalidCallError):
        lz.explain("tokenize", 3, few)
    with pytest.raises(TypeError, match="tokenize"):
        lz.explain("tokenize", "a", few, nothing=1)
    with pytest.raises(KeyError, match="tokenize"):
        lz.explain("tokenise", "a", few)


def test_freezing_holds_kernels_of_tensors_alone(few):
    assert lz.tokenize("the", few)["input_ids"]
    lz.freeze()
    try:
        assert lz.tokenize("the self", few)["input_ids"] == resolve(few).native.encode_ordinary("the self")
    finally:
        lz.thaw()


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroWarning")  # of what freezes nothing
@pytest.mark.parametrize("frozen", [False, True])
def test_a_choice_during_which_choices_freeze_or_thaw_is_made_anew(few, frozen, monkeypatch):
    asked, explain = [], PlainDispatcher.explain

    def meanwhile(*args, **more):
        found = explain(*args, **more)
        asked.append(lz.frozen() is not None)
        if len(asked) == 1:
            (lz.thaw if frozen else lz.freeze)()
        return found

    if frozen:
        lz.freeze()
    monkeypatch.setattr(PlainDispatcher, "explain", meanwhile)
    try:
        assert lz.tokenize("the", few)["input_ids"]
        assert asked == [frozen, not frozen]
    finally:
        if lz.frozen() is not None:
            lz.thaw()
