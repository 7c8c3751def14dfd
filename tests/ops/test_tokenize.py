"""Text to tokens and back: formats, identities, what is asked of rows, bad input, streams."""

import copy
import json
import os
import pickle
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import layerzero as lz
import vocabularies
from drawing import examples
from layerzero.ops.tokenize import declare, rows
from layerzero.ops.tokenize.corpus import differential
from layerzero.ops.tokenize.identity import of_json
from layerzero.ops.tokenize.tokenizer import resolve

KINDS = ["byte_level", "word_piece", "bpe", "unigram", "few"]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return {**vocabularies.files(tmp_path_factory.mktemp("vocabularies")), "few": vocabularies.encoding()}


@pytest.fixture(autouse=True)
def read_anew():
    yield
    lz.forget_tokenizer()


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda path: path.with_suffix(".py").write_text("raise SystemExit('no licence')"), "SystemExit: no licence"),
        (lambda path: path.with_suffix(".py").write_text("raise ImportError('half')"), "ImportError: half"),
        (lambda path: path.mkdir(), "no package tiktoken"),
    ],
)
def test_a_library_that_does_not_load_is_named_with_what_to_do(tmp_path, monkeypatch, made, got):
    made(tmp_path / "tiktoken")
    lz.tokenize("a", vocabularies.encoding())  # what it imports itself is not looked for below
    monkeypatch.delitem(sys.modules, "tiktoken")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(lz.InvalidCallError, match=f"pip install .*tiktoken.*{got}"):
        resolve("cl100k_base")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_library_that_defines_it(known, kind):
    tokenizer = resolve(known[kind])
    texts = list(differential(tokenizer.specials, mixtures=examples(400)))
    wanted = [rows.encode(text, tokenizer=tokenizer, parse_special=tokenizer.parses) for text in texts]
    assert [lz.tokenize(text, known[kind], add_special_tokens=False)["input_ids"] for text in texts] == wanted
    assert lz.tokenize(texts, known[kind], add_special_tokens=False)["input_ids"] == wanted
    back = [rows.decode(ids, tokenizer=tokenizer) for ids in wanted]
    assert lz.detokenize(wanted, known[kind]) == back
    assert [lz.detokenize(ids, known[kind]) for ids in wanted[:300]] == back[:300]


def test_a_tokenizer_json_has_its_template_and_its_offsets(known):
    native = resolve(known["word_piece"]).native
    texts = ["class Value: pass", "é [SEP] x", ""]
    found = lz.tokenize(texts, known["word_piece"], return_offsets=True)
    encoded = native.encode_batch(texts)
    assert found["input_ids"] == [each.ids for each in encoded]
    assert found["offset_mapping"] == [each.offsets for each in encoded]
    assert "offset_mapping" not in lz.tokenize(texts, known["word_piece"])
    assert lz.detokenize(found["input_ids"], known["word_piece"], skip_special_tokens=True) == native.decode_batch(
        [each.ids for each in encoded], skip_special_tokens=True
    )


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_offsets_of_sentencepiece_lie_on_the_text(known, kind):
    texts = ["class Value: pass", "déjà  vu \u6f22\u5b57 👍🏽", ""]
    found = lz.tokenize(texts, known[kind], return_offsets=True)
    assert found["input_ids"] == lz.tokenize(texts, known[kind])["input_ids"]
    native = resolve(known[kind]).native
    for text, ids, offsets in zip(texts, *found.values(), strict=True):
        assert len(ids) == len(offsets)
        assert all(type(each) is tuple for each in offsets)
        assert [end for _, end in offsets] == sorted(end for _, end in offsets)
        assert not text or offsets[-1][1] == len(text)
        for place, (start, end) in zip(ids, offsets, strict=True):
            piece = native.id_to_piece(place).replace("\u2581", "")
            assert native.is_byte(place) or not piece.isascii() or text[start:end].strip() == piece
    assert lz.tokenize(texts[0], known[kind], return_offsets=True)["offset_mapping"] == found["offset_mapping"][0]


def test_offsets_of_ranks_begin_where_tiktoken_says(known):
    encoding = known["few"]
    text = "def the self: 漢字 👍🏽 é\n    pass"
    found = lz.tokenize(text, encoding, return_offsets=True)
    _, starts = encoding.decode_with_offsets(found["input_ids"])
    assert [start for start, _ in found["offset_mapping"]] == starts
    assert all(start <= end for start, end in found["offset_mapping"])


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("asked", "padding", "cut"),
    [
        ({"padding": True}, {}, 0),
        ({"padding": True, "pad_to_multiple_of": 8}, {"pad_to_multiple_of": 8}, 0),
        ({"padding": "max_length", "max_length": 12, "truncation": True}, {"length": 12}, 12),
        ({"padding": "longest", "max_length": 5, "truncation": "longest_first"}, {}, 5),
    ],
)
def test_rows_are_cut_and_filled_as_tokenizers_does(known, asked, padding, cut, left):
    side = "left" if left else "right"
    tokenizer = resolve(known["word_piece"])
    tokenizer.pads_left = tokenizer.cuts_left = left
    native = type(tokenizer.native).from_str(vocabularies.word_piece())
    native.enable_padding(direction=side, pad_id=0, **padding)
    if cut:
        native.enable_truncation(cut, direction=side)
    texts = ["import json", "for each in range(10): print(each)", "x"]
    found = lz.tokenize(texts, tokenizer, **asked)
    encoded = native.encode_batch(texts)
    assert found["input_ids"] == [each.ids for each in encoded]
    assert found["attention_mask"] == [each.attention_mask for each in encoded]


def test_special_tokens_are_parsed_or_text(known):
    tokenizer = resolve(known["few"])
    end = tokenizer.native._special_tokens["<|end|>"]
    assert lz.tokenize("a<|end|>", tokenizer, parse_special=True)["input_ids"] == [97, end]
    assert end not in lz.tokenize("a<|end|>", tokenizer)["input_ids"]
    special = resolve(known["byte_level"]).native.token_to_id("<|end|>")
    assert special in lz.tokenize("a<|end|>", known["byte_level"])["input_ids"]
    assert special not in lz.tokenize("a<|end|>", known["byte_level"], parse_special=False)["input_ids"]


def test_empty_texts_and_lists(known):
    assert lz.tokenize("", known["byte_level"]) == {"input_ids": []}
    assert lz.tokenize([], known["byte_level"]) == {"input_ids": []}
    assert lz.tokenize([], known["word_piece"], padding=True) == {"input_ids": [], "attention_mask": []}
    assert lz.tokenize(["", "a"], known["byte_level"])["input_ids"][0] == []
    assert lz.tokenize("", known["word_piece"])["input_ids"] == resolve(known["word_piece"]).native.encode("").ids
    assert lz.detokenize([], known["byte_level"]) == ""
    assert lz.detokenize([[], [97]], known["few"]) == ["", "a"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [3, None, b"bytes", ["a", 3], ["a", None], [["a"]], {"a"}])
def test_what_is_no_text_is_an_error(known, kind, texts):
    with pytest.raises(lz.InvalidCallError, match=r"wanted .*string"):
        lz.tokenize(texts, known[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_character_is_an_error_that_blames_nobody(known, kind):
    for texts in ("a\ud800b", ["fine", "\udfff"]):
        for _ in range(2):  # chosen for, and from the table
            with pytest.raises(lz.InvalidCallError, match="lone surrogate"):
                lz.tokenize(texts, known[kind])
    assert lz.tokenize("ab", known[kind])["input_ids"]
    assert not lz.doctor().to_dict().get("breakers")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[-1], [10**9], [2**70], [10**5000], ["a"], [1.5], [True], "ids", None])
def test_what_is_no_id_is_an_error(known, kind, ids):
    with pytest.raises(lz.InvalidCallError, match=r"wanted (ids|lists of ids)"):
        lz.detokenize(ids, known[kind])


def test_an_id_amid_the_vocabulary_that_means_nothing_is_an_error(known):
    hole = max(known["few"]._mergeable_ranks.values()) + 1
    for _ in range(2):
        with pytest.raises(lz.InvalidCallError, match=f"got {hole}, which is none"):
            lz.detokenize([97, hole], known["few"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": {}}'),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}}'),
        ("tokenizer.model", b"\x0a\x0anonsense"),
        ("tokenizer.model", b""),
        ("x.tiktoken", b"YQ== 0\nYg== 1\n"),
        ("tekken.json", b'{"config": {}, "vocab": []}'),
    ],
)
def test_broken_files_are_errors_with_what_was_wanted(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(lz.InvalidCallError, match="tokenizer_id: wanted"):
            lz.tokenize("a", str(place))


@pytest.mark.parametrize("name", ["no_such_encoding", "/no/such/file", 5, object(), None, ["a"]])
def test_unknown_tokenizers_are_errors_and_nothing_is_downloaded(name, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    with pytest.raises(lz.InvalidCallError, match="tokenizer_id: wanted"):
        lz.tokenize("a", name)


@pytest.mark.parametrize(
    "asked",
    [{"truncation": "some"}, {"padding": 7}, {"max_length": 0}, {"max_length": 2.5}, {"max_length": -(10**5000)},
     {"pad_to_multiple_of": -1},
     {"add_special_tokens": "yes"}],
)  # fmt: skip
def test_arguments_that_mean_nothing_are_errors(known, asked):
    with pytest.raises(lz.InvalidCallError, match=next(iter(asked))):
        lz.tokenize("a", known["word_piece"], **asked)


@pytest.mark.parametrize("name", ["truncation", "padding", "max_length", "pad_to_multiple_of", "add_special_tokens"])
@pytest.mark.parametrize("value", [-(10**5000), "x" * 10**6, -7], ids=["digits", "characters", "small"])
def test_what_is_shown_of_a_wrong_value_is_short(known, name, value):
    with pytest.raises(lz.InvalidCallError, match=name) as error:
        lz.tokenize("a", known["word_piece"], **{name: value})
    assert len(str(error.value)) < 400


def test_what_is_shown_of_a_wrong_id_is_short(known):
    for wrong in (10**5000, -(10**5000), "x" * 10**6):
        with pytest.raises(lz.InvalidCallError, match="wanted ids from 0") as error:
            lz.detokenize([1, wrong], known["word_piece"])
        assert len(str(error.value)) < 400


def test_further_mistakes_are_told(known):
    with pytest.raises(TypeError, match="unexpected keyword argument 'pad'"):
        lz.tokenize("a", known["word_piece"], pad=True)
    with pytest.raises(lz.InvalidCallError, match="max_length"):
        lz.tokenize("a", known["word_piece"], truncation=True)
    with pytest.raises(lz.InvalidCallError, match="at least 2, the special tokens"):
        lz.tokenize("a", known["word_piece"], truncation=True, max_length=1)
    with pytest.raises(lz.InvalidCallError, match="padding"):
        lz.tokenize(["a", "bc"], known["few"], padding=True)
    with pytest.raises(lz.InvalidCallError, match="SentencePiece"):
        lz.tokenize("a", known["bpe"], parse_special=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte_level", "word_piece", "bpe", "few"])
@pytest.mark.parametrize("line", ["ab c" * 2_500_000, "x" * 1_000_000])
def test_very_long_lines_end(known, kind, line):
    found = lz.tokenize(line, known[kind], add_special_tokens=False)["input_ids"]
    tokenizer = resolve(known[kind])
    assert found == rows.encode(line, tokenizer=tokenizer, parse_special=tokenizer.parses)


def test_identity_covers_every_part(known):
    data = json.loads(vocabularies.byte_level())
    hashes = {of_json(data).tokenizer_hash}
    changes = [
        lambda each: each["model"]["vocab"].update({"zzz": 5000}),
        lambda each: each["model"]["merges"].reverse(),
        lambda each: each["model"].update(ignore_merges=True),
        lambda each: each.update(normalizer={"type": "NFC"}),
        lambda each: each.update(normalizer={"type": "NFD"}),
        lambda each: each.update(normalizer={"type": "BertNormalizer", "lowercase": True, "strip_accents": None}),
        lambda each: each.update(normalizer={"type": "BertNormalizer", "lowercase": True, "strip_accents": False}),
        lambda each: each["pre_tokenizer"].update(add_prefix_space=True),
        lambda each: each.update(post_processor={"type": "ByteLevel", "trim_offsets": False}),
        lambda each: each.update(decoder=None),
        lambda each: each["added_tokens"][0].update(lstrip=True),
        lambda each: each["added_tokens"][0].update(special=False),
    ]
    for change in changes:
        changed = json.loads(vocabularies.byte_level())
        change(changed)
        hashes.add(of_json(changed).tokenizer_hash)
    assert len(hashes) == len(changes) + 1
    assert all(len(each) == 64 for each in hashes)
    shuffled = dict(reversed(list(data.items())))
    assert of_json(shuffled).tokenizer_hash == of_json(data).tokenizer_hash


def test_one_tokenizer_has_one_identity_however_it_comes(known, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(known["word_piece"], folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(
        '{"pad_token": "[PAD]", "model_max_length": 9, "padding_side": "left"}'
    )
    loaded = tokenizers.Tokenizer.from_file(known["word_piece"])
    found = [resolve(each) for each in (known["word_piece"], folder, str(folder), loaded)]
    assert len({each.tokenizer_hash for each in found}) == 1
    assert (found[1].most, found[1].pads_left) == (9, True)
    assert resolve(known["few"]).written(tmp_path) == resolve(known["few"]).written(tmp_path)
    assert resolve(resolve(known["few"]).written(tmp_path)).tokenizer_hash == resolve(known["few"]).tokenizer_hash


def test_mistrals_files_begin_behind_their_special_tokens(tmp_path):
    encoding = vocabularies.encoding()
    import base64

    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for piece, rank in encoding._mergeable_ranks.items()
    ]
    config = {
        "pattern": encoding._pat_str,
        "default_vocab_size": len(vocabulary) + 10,
        "default_num_special_tokens": 10,
    }
    place = tmp_path / "tekken.json"
    place.write_text(json.dumps({"config": config, "vocab": vocabulary}))
    text = "def the self"
    ids = [each + 10 for each in encoding.encode_ordinary(text)]
    assert lz.tokenize(text, str(place))["input_ids"] == ids
    assert lz.tokenize(text, str(tmp_path), add_special_tokens=True)["input_ids"] == [1, *ids]


def test_encodings_by_name_need_no_network(monkeypatch):
    pytest.importorskip("tiktoken")
    pytest.importorskip("bpe_openai")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    assert lz.tokenize("hello world", "cl100k_base")["input_ids"] == [15339, 1917]
    assert lz.detokenize([15339, 1917], "cl100k_base") == "hello world"


@pytest.mark.parametrize("kind", KINDS)
def test_streams_hand_out_what_the_whole_is(known, kind):
    tokenizer = resolve(known[kind])
    drawn = random.Random(7)
    texts = [*vocabularies_texts(drawn), "Größe 👍🏽 漢字!", " a", "\n\n x", ""]
    for text in texts:
        ids = rows.encode(text, tokenizer=tokenizer, parse_special=tokenizer.parses)
        stream = lz.StreamingDetokenizer(known[kind])
        for _ in range(2):  # a stream begins anew
            parts = [stream.add(each) for each in ids]
            whole = "".join([*parts, stream.end()])
            assert whole == lz.detokenize(ids, known[kind])
            assert not any("\ufffd" in part for part in parts if "\ufffd" not in text)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_stream_goes_on_by_itself(known, kind, again):
    """As a forked sequence does, amid a character."""
    text = "Größe 👍🏽 漢字!"
    ids = rows.encode(text, tokenizer=resolve(known[kind]))
    for place in range(len(ids)):
        stream = lz.StreamingDetokenizer(known[kind])
        told = "".join(map(stream.add, ids[:place]))
        twin = again(stream)
        ends = ["".join([*map(each.add, ids[place:]), each.end()]) for each in (stream, twin)]
        assert [told + end for end in ends] == [lz.detokenize(ids, known[kind])] * 2


def test_the_cache_of_texts_is_one_in_each_process():
    assert copy.deepcopy(lz.tokenizer_cache) is pickle.loads(pickle.dumps(lz.tokenizer_cache)) is lz.tokenizer_cache


def vocabularies_texts(drawn):
    texts = list(differential(mixtures=60))[-60:]
    return drawn.sample([each for each in texts if len(each) < 300], 25)


def test_a_stream_takes_no_strange_ids(known):
    with pytest.raises(lz.InvalidCallError):
        lz.StreamingDetokenizer(known["few"]).add(10**6)


@pytest.mark.parametrize("kept", ["", "of others", "below others"])
def test_tokenizers_are_written_where_no_other_user_can_plant_a_link(tmp_path, monkeypatch, kept):
    """Another user was first in the folder that everybody can guess, and put a link there that leads to nothing yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(declare, "_PRIVATE", [])
    tokenizer, victim = resolve(vocabularies.encoding()), tmp_path / "of the victim"
    cache = tmp_path / "cache"
    planted = [tmp_path / "layerzero-tokenizers"]
    if kept:
        monkeypatch.setenv("LAYERZERO_CACHE_DIR", str(cache))
        planted = [cache / "tokenizers"]
    for folder in planted:
        folder.mkdir(parents=True)
        (folder / f"{tokenizer.tokenizer_hash}.tiktoken.json").symlink_to(victim)
        if kept:
            (folder if kept == "of others" else cache).chmod(0o777)
    place = Path(declare.written(tokenizer))
    assert not victim.exists()
    assert place.is_file()
    assert not place.is_symlink()
    assert place.parent not in planted
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert place.parent == Path(declare.written(tokenizer)).parent, "one folder a process"
    assert resolve(str(place)).tokenizer_hash == tokenizer.tokenizer_hash


@pytest.mark.slow
def test_what_a_process_wrote_for_itself_goes_with_it(tmp_path):
    code = (
        "import os, sys; from layerzero.ops.tokenize import declare; folder = declare.folder(); print(folder)\n"
        "child = os.fork()\n"
        "if not child: sys.exit(0)\n"
        "os.waitpid(child, 0); print(folder.is_dir())\n"
    )
    environment = {**os.environ, "LAYERZERO_CACHE_DIR": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    folder, there = done.stdout.splitlines()[-2:]
    assert Path(folder).parent == tmp_path
    assert there == "True", "a forked child leaves it to its parent"
    assert not Path(folder).exists()
