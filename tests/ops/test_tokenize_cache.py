"""Encoded texts that are kept: exact beginnings, bounded bytes, validated hits, threads, forks."""

import logging
import os
import random
import threading

import pytest

import layerzero as lz
import vocabularies
from layerzero.ops.tokenize import rows
from layerzero.ops.tokenize.corpus import differential, sample
from layerzero.ops.tokenize.identity import SCHEMES
from layerzero.ops.tokenize.prefixes import Cut, EncodedTexts, TokenizerCacheConfig, cut_of
from layerzero.ops.tokenize.tokenizer import resolve


@pytest.fixture
def few():
    yield resolve(vocabularies.encoding())
    lz.forget_tokenizer()


def run_of(tokenizer):
    return lambda text: rows.encode(text, tokenizer=tokenizer, parse_special=tokenizer.parses)


@pytest.mark.parametrize("pattern", SCHEMES)
def test_every_known_pattern_may_be_cut_before_a_space(pattern):
    tiktoken = pytest.importorskip("tiktoken")
    few = vocabularies.encoding()
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=few._mergeable_ranks, special_tokens={})
    drawn = random.Random(3)
    texts = [each for each in differential(mixtures=1500) if len(each) < 6000]
    checked = 0
    for text in texts:
        for _ in range(3):
            place = Cut().before(text, drawn.randint(0, len(text)), 0)
            if place:
                checked += 1
                parts = encoding.encode_ordinary(text[:place]) + encoding.encode_ordinary(text[place:])
                assert parts == encoding.encode_ordinary(text), (text, place)
    assert checked > 2000


@pytest.fixture(scope="module")
def cuttable(tmp_path_factory):
    """A tokenizer of each kind that may be cut."""
    folder = tmp_path_factory.mktemp("cuttable")
    made = {
        "turns.json": vocabularies.split_in_turn().encode(),
        "words.json": vocabularies.word_piece().encode(),
        "prefixed.model": vocabularies.as_it_is(),
        "bare.model": vocabularies.as_it_is(add_dummy_prefix=False),
    }
    for name, content in made.items():
        (folder / name).write_bytes(content)
    yield {name: resolve(str(folder / name)) for name in made}
    lz.forget_tokenizer()


@pytest.mark.parametrize("kind", ["turns.json", "words.json", "prefixed.model", "bare.model"])
def test_both_parts_of_a_cut_have_the_ids_of_the_whole(cuttable, kind):
    tokenizer = cuttable[kind]
    run, cut = run_of(tokenizer), cut_of(tokenizer)
    assert cut == Cut(drops=kind == "prefixed.model")
    drawn = random.Random(7)
    checked = 0
    for text in differential(tokenizer.specials, mixtures=1500):
        if 1 < len(text) < 6000:
            place = cut.before(text, drawn.randrange(len(text)), 0)
            if place:
                checked += 1
                assert run(text[:place]) + run(cut.rest(text, place)) == run(text), (text, place)
    assert checked > 1000


@pytest.mark.parametrize("kind", ["turns.json", "words.json", "prefixed.model", "bare.model"])
def test_beginnings_are_reused_wherever_a_cut_is_exact(cuttable, kind):
    tokenizer = cuttable[kind]
    cache, run = EncodedTexts(), run_of(tokenizer)
    encode = cache.reader(tokenizer, (False, tokenizer.parses))
    start, drawn = sample(2000, 8), random.Random(9)
    mixed = [each for each in differential(tokenizer.specials, mixtures=200) if len(each) < 1000]
    for tail in ("", " ", "  ", " a", *drawn.sample(mixed, 150)):
        for text in (start + tail, f"{start} {tail}"):
            assert encode(text, run) == run(text), tail
    assert cache.stats(tokenizer).prefix_hits > 30
    assert cache.stats(tokenizer).mismatches == 0


def test_texts_that_share_a_beginning_have_the_ids_of_whole_ones(few):
    run, cache = run_of(few), EncodedTexts()
    encode = cache.reader(few, (False, False))
    drawn = random.Random(5)
    start = sample(4000, 1)
    mixed = [each for each in differential(mixtures=400) if len(each) < 2000]
    for number in range(300):
        text = start[: drawn.randint(700, 4000)] + drawn.choice(mixed)
        assert encode(text, run) == run(text), number
        if number % 3 == 0:
            assert encode(text, run) == run(text)
    found = cache.stats(few)
    assert found.prefix_hits > 50
    assert found.mismatches == 0
    assert 0.0 < found.hit_rate <= 1.0


def test_a_long_prompt_is_encoded_once_for_all_questions(few):
    cache, seen = EncodedTexts(TokenizerCacheConfig(validation_rate_initial=0.0)), []
    run = run_of(few)
    encode = cache.reader(few, (False, False))

    def counted(text):
        seen.append(len(text))
        return run(text)

    prompt = sample(4096, 2)
    for number in range(6):
        text = f"{prompt} question {number} of many"
        assert encode(text, counted) == run(text)
    assert max(seen[4:]) < 400  # two are whole, the third is cut, all later ones are what is left


def test_a_beginning_that_came_once_takes_no_room(few):
    cache, run = EncodedTexts(), run_of(few)
    short, long = (cache.reader(few, (False, False)) for _ in range(2))  # readers of several lengths know the same
    texts = [f"{number} {sample(2000, number)}" for number in range(5)]
    for text in texts:
        assert short(text, run) == run(text)
    assert (cache.stats().entries, cache._bytes, cache.stats().misses) == (0, 0, 5)
    assert long(texts[-1], run) == run(texts[-1])  # of an earlier one, another's hash may have taken the mark
    assert cache.stats().entries == 1


def test_what_cannot_be_cut_is_kept_whole(tmp_path):
    known = vocabularies.files(tmp_path)
    for kind in ("bpe", "unigram"):  # their normalizer takes spaces away
        tokenizer = resolve(known[kind])
        assert cut_of(tokenizer) is None
        cache, run = EncodedTexts(), run_of(tokenizer)
        encode = cache.reader(tokenizer, (False, tokenizer.parses))
        text = sample(3000, 3)
        for tail in ("", "", "", "", " a", " b"):
            assert encode(text + tail, run) == run(text + tail)
        assert (cache.stats().hits, cache.stats().prefix_hits) == (1, 0)
    assert cut_of(resolve(known["byte_level"])) == Cut()
    lz.forget_tokenizer()


def test_it_never_holds_more_than_its_bytes(few):
    cache = EncodedTexts(TokenizerCacheConfig(max_bytes=200_000))
    run = run_of(few)
    encode = cache.reader(few, (False, False))
    for number in range(200):
        for _ in range(3):
            encode(f"{number} " * 20 + sample(1500, number), run)
            assert cache.stats().bytes == cache._bytes <= 200_000
    assert cache.stats().evicted > 0
    cache.configure(max_bytes=0)
    assert cache.stats().bytes == cache.stats().entries == 0
    with pytest.raises(TypeError, match="wanted one of"):
        cache.configure(bytes=3)


def test_hits_are_validated_at_the_rates_and_a_wrong_one_is_replaced(few, caplog):
    config = TokenizerCacheConfig()
    assert [config.rate(hits) for hits in (0, 99, 100, 1099, 1100, 10**6)] == [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    cache, run = EncodedTexts(config), run_of(few)
    encode = cache.reader(few, (False, False))
    text = sample(2000, 4)
    for _ in range(2 + 100 + 1000):
        encode(text, run)
    assert 18 <= cache.stats(few).validations <= 22
    head = next(iter(cache._heads.values()))
    head.kept = [(text, (1, 2, 3))]
    with caplog.at_level(logging.ERROR, "layerzero"):
        found = [encode(text, run) for _ in range(3000)]
    assert run(text) in found
    assert found[-1] == run(text)
    assert cache.stats(few).mismatches == 1
    assert "it is replaced" in caplog.text


def test_models_share_nothing_and_are_forgotten_by_name(tmp_path):
    (tmp_path / "one.json").write_text(vocabularies.byte_level())
    (tmp_path / "two.json").write_text(vocabularies.byte_level())
    one, two = (resolve(str(tmp_path / f"{name}.json")) for name in ("one", "two"))
    assert one.tokenizer_hash == two.tokenizer_hash
    cache = EncodedTexts()
    text = sample(2000, 5)
    for tokenizer in (one, one, two, two):
        cache.reader(tokenizer, (False, True))(text, run_of(tokenizer))
    assert len(cache.namespace(one)) == len(one.name) + 65
    assert (cache.stats(one).entries, cache.stats(two).entries) == (1, 1)
    assert cache.invalidate_model(one.name) == 1
    assert (cache.stats(one).entries, cache.stats(two).entries) == (0, 1)
    together = EncodedTexts(TokenizerCacheConfig(enable_namespace_isolation=False))
    assert together.namespace(one) == together.namespace(two)
    for tokenizer in (one, two):
        together.reader(tokenizer, (False, True))(text, run_of(tokenizer))
    assert together.invalidate_model("another") == 0
    assert together.invalidate_model(one.name) == 1, "what it shares with the other goes as well"
    lz.forget_tokenizer()


def hammer(tokenizer, seconds, cache_bytes):
    lz.tokenizer_cache.configure(max_bytes=cache_bytes)
    prompts = [sample(3000, seed) for seed in range(4)]
    texts = [f"{prompt} {number} and more" for prompt in prompts for number in range(12)]
    wanted = [rows.encode(text, tokenizer=tokenizer) for text in texts]
    wrong, ended = [], threading.Event()

    def work(seed):
        drawn = random.Random(seed)
        while not ended.is_set():
            place = drawn.randrange(len(texts))
            if lz.tokenize(texts[place], tokenizer)["input_ids"] != wanted[place]:
                wrong.append(place)
            if lz.tokenizer_cache._bytes > cache_bytes:
                wrong.append("bytes")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    ended.wait(seconds)
    ended.set()
    for thread in threads:
        thread.join()
    lz.tokenizer_cache.configure(max_bytes=TokenizerCacheConfig().max_bytes)
    lz.tokenizer_cache.clear()
    return wrong


def test_threads_share_it(few):
    assert hammer(few, 1.0, 60_000) == []


@pytest.mark.stress
def test_threads_share_it_for_a_minute(few):
    assert hammer(few, 60.0, 60_000) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nobody forks here")
def test_a_forked_child_encodes_alone_and_in_batches(few):
    texts = [sample(800, seed) for seed in range(64)]
    wanted = lz.tokenize(texts, few)["input_ids"]
    child = os.fork()
    if child == 0:
        same = lz.tokenize(texts, few)["input_ids"] == wanted and lz.tokenize(texts[0], few)["input_ids"] == wanted[0]
        os._exit(0 if same else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_empty_text_is_not_taken_for_one_that_came_before(few):
    texts = EncodedTexts()
    read = texts.reader(few, (False,))
    assert hash("") == 0
    for seen in (0, 1):
        assert read("", lambda _: []) == []
        assert texts.stats().entries == seen
