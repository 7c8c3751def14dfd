"""Calls of sizes that nobody measured, of operations without tensors: the nearest measured ones decide."""

import pytest

import layerzero as lz
import vocabularies
from layerzero.core.evidence import Evidence, Measurement, Provenance
from layerzero.core.ledger import Ledger, Verdict
from layerzero.core.operation import Routed
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.order import FOR_SURE, reliable
from layerzero.engine.plain import plain_facts
from layerzero.ops import PLAIN_OPERATIONS
from layerzero.tuning.storage.store import StoreLedger

ENCODE = PLAIN_OPERATIONS["tokenize.encode"]


@pytest.fixture
def place(tmp_path):
    ENGINE.ledger = StoreLedger(Ledger())
    path = tmp_path / "tokenizer.json"
    path.write_text(vocabularies.byte_level())
    yield str(path)
    lz.forget_tokenizer()


def measured(place, batched):
    """Times of two libraries on the operation's own cases: one is 20 times quicker."""
    kernels = {each.id: each for each in lz.list_kernels("tokenize.encode")}
    pytest.importorskip("gigatoken")
    for number, case in enumerate(ENCODE.cases):
        if bool(case.params.get("batched")) is not batched:
            continue
        facts = plain_facts(Routed(ENCODE, ENCODE.plain.draw(case, {"tokenizer_id": place})))
        if number == 0 or batched:
            ENGINE.ledger.record_verdict(kernels["gigatoken.encode"], facts, Verdict.PASSED)
        for name, per_character in (("tokenizers.encode", 0.2), ("gigatoken.encode", 0.01)):
            time_us = 5 + per_character * case.sizes["characters"] + 0.3 * case.sizes["batch"]
            ENGINE.ledger.record_time(kernels[name], facts, Measurement(time_us, time_us, 0.0, 20, 0.01))
    ENGINE.bump()


def test_a_batch_of_any_size_gets_what_is_quickest_near_it(place):
    measured(place, batched=True)
    sizes = (50_000, 400), (100_000, 4), (7, 60_000), (3, 900_000), (30_000, 1), (40, 1), (600, 1200), (2, 3)
    chosen = {(count, size): lz.explain("tokenize", ["x" * size] * count, place).kernel_id for count, size in sizes}
    assert chosen == dict.fromkeys(sizes, "gigatoken.encode")


@pytest.mark.parametrize("size", [700, 9_000_000])
def test_a_text_of_any_length_gets_what_is_quickest_near_it(place, size):
    measured(place, batched=False)
    report = lz.explain("tokenize", "x" * size, place)
    assert report.kernel_id == "gigatoken.encode"
    known = {each.kernel.id: each.time_us for each in report.candidates if each.time_us}
    assert known["tokenizers.encode"] > known["gigatoken.encode"]


def test_rough_times_decide_where_nobody_else_may_be_the_best():
    found = reliable({
        "quick": Evidence(100.0, Provenance.MEASURED, 0.1, 0.3),
        "slow": Evidence(2000.0, Provenance.MEASURED, 0.1, 0.3),
    })  # fmt: skip
    assert {each.confidence for each in found.values()} == {FOR_SURE}
    near = reliable({
        "quick": Evidence(100.0, Provenance.MEASURED, 0.1, 0.3),
        "near": Evidence(150.0, Provenance.MEASURED, 0.1, 0.3),
    })  # fmt: skip
    assert {each.confidence for each in near.values()} == {0.1}
