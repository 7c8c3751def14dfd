"""Tokenizer libraries beside each other's threads: one object for all, and children that were forked meanwhile."""

import os
import random
import signal
import threading
import time

import pytest

import layerzero as lz
import vocabularies
from drawing import examples
from layerzero.core.operation import Routed
from layerzero.engine.plain import plain_facts
from layerzero.engine.registry import REGISTRY
from layerzero.ops import PLAIN_OPERATIONS
from layerzero.ops.tokenize import rows
from layerzero.ops.tokenize.corpus import differential, prove_encode, sample
from layerzero.ops.tokenize.tokenizer import resolve

ENCODE = PLAIN_OPERATIONS["tokenize.encode"]
LIBRARIES = [
    *(("byte_level", each) for each in ("tokenizers", "splintr", "gigatoken", "fastokens", "kitoken")),
    *(("few", each) for each in ("tiktoken", "gigatoken", "fastokens")),
    *(("as_it_is", each) for each in ("sentencepiece", "kitoken")),
    ("word_piece", "splintr.encode_known"),
]
FORKS = 4
HANGS_S = 20


@pytest.fixture(params=LIBRARIES, ids=[" ".join(each) for each in LIBRARIES])
def asked(request, tmp_path):
    kind, library = request.param
    pytest.importorskip(library.partition(".")[0])
    kernel = REGISTRY.kernel(library if "." in library else f"{library}.encode")
    if kind == "few":
        tokenizer = resolve(vocabularies.encoding())
    else:
        made = {"byte_level": vocabularies.byte_level, "word_piece": vocabularies.word_piece}
        path = tmp_path / ("a.model" if kind == "as_it_is" else "a.json")
        path.write_bytes(vocabularies.as_it_is() if kind == "as_it_is" else made[kind]().encode())
        tokenizer = resolve(str(path))
    yield tokenizer, kernel
    lz.forget_tokenizer()


def given(tokenizer, batched):
    return {
        "tokenizer": tokenizer, "items": [] if batched else "", "batched": batched, "return_offsets": False,
        "add_special_tokens": False, "parse_special": tokenizer.parses,
    }  # fmt: skip


def loaded(tokenizer, kernel):
    """What the library runs for one text, and for several."""
    return [kernel.load(plain_facts(Routed(ENCODE, given(tokenizer, batched)))) for batched in (False, True)]


@pytest.mark.slow
def test_threads_and_forked_children_get_the_ids_of_one_thread(asked):
    tokenizer, kernel = asked
    long, texts = sample(40_000, 1), [sample(200, seed) for seed in range(150)]
    wanted = rows.encode([long, *texts], tokenizer=tokenizer, batched=True, parse_special=tokenizer.parses)
    one, many = loaded(tokenizer, kernel)
    wrong, ended = [], threading.Event()

    def work(seed):
        place = seed
        try:
            while not ended.is_set():
                place = (place + 7) % len(texts)
                if one(texts[place]) != wanted[place + 1] or many(texts[:20]) != wanted[1:21]:
                    wrong.append(place)
                if seed == 0 and one(long) != wanted[0]:
                    wrong.append("long")
        except BaseException as error:  # noqa: BLE001  # some libraries panic in classes of their own
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    ends = []
    for _ in range(FORKS):
        time.sleep(0.02)
        child = os.fork()
        if child == 0:
            signal.alarm(HANGS_S)
            code = 3
            try:
                first, several = loaded(tokenizer, kernel)
                code = 0 if first(long) == wanted[0] and several(texts) == wanted[1:] else 4
            finally:
                os._exit(code)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ended.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert ends == [0] * FORKS


def test_a_child_has_the_pools_that_its_parent_began(asked):
    tokenizer, kernel = asked
    texts, long = [sample(400, seed) for seed in range(300)], sample(200_000, 2)
    one, many = loaded(tokenizer, kernel)
    wanted, whole = many(texts), one(long)
    child = os.fork()  # the same callables, as tables of choices hold them
    if child == 0:
        signal.alarm(HANGS_S)
        code = 3
        try:
            code = 0 if many(texts) == wanted and one(long) == whole else 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_word_pieces_of_old_characters_are_exact_and_others_are_the_librarys_own(tmp_path):
    pytest.importorskip("splintr")
    (tmp_path / "a.json").write_text(vocabularies.word_piece())
    tokenizer, kernel = resolve(str(tmp_path / "a.json")), REGISTRY.kernel("splintr.encode_known")
    load = lambda more: kernel.load(plain_facts(Routed(ENCODE, {**given(tokenizer, False), "items": "", **more})))
    asked = {"tokenizer": tokenizer, "add_special_tokens": False, "parse_special": True}
    assert prove_encode(lambda more: load({**more, "items": [] if more["batched"] else ""}), asked) == []
    one, drawn = loaded(tokenizer, kernel)[0], random.Random(4)
    known = [each for each in differential(tokenizer.specials, mixtures=examples(400)) if len(each) < 300]
    for number in range(examples(800)):  # words that splintr knows otherwise, alone, side by side and far apart
        parts = [drawn.choice(known) + drawn.choice((" ", "", "\n", sample(150, number))) for _ in range(6)]
        text = "".join(parts)
        assert one(text) == rows.encode(text, tokenizer=tokenizer, parse_special=True), text
    report = lz.explain("tokenize", "a", tokenizer, parse_special=False)
    assert "CONSTRAINT_FAILED" in {str(each.code) for each in report.reasons("splintr.encode_known")}
    lz.forget_tokenizer()
