"""A tokenizer that changes after its first call: every later call is one of what it is now."""

import gc
import os
import shutil

import pytest

import layerzero as lz
import vocabularies
from drawing import at_once
from layerzero.ops.tokenize import identity, tokenizer
from layerzero.ops.tokenize.tokenizer import resolve

tokenizers = pytest.importorskip("tokenizers")

TEXT = "Hello <x> World, a self"
LONG = TEXT * 60
"""Long enough that its ids are kept."""

SPECIAL = tokenizers.AddedToken("<x>", lstrip=True, special=True)


@pytest.fixture(autouse=True)
def read_anew():
    yield
    lz.forget_tokenizer()


def native_of(kind):
    return tokenizers.Tokenizer.from_str(getattr(vocabularies, kind)())


def retrained(native):
    trainer = tokenizers.trainers.BpeTrainer(show_progress=False, special_tokens=["<|end|>", "<|pad|>"])
    native.train_from_iterator(["<x> self World"] * 3, trainer)


def smaller(native):
    kept = {piece: place for piece, place in native.get_vocab().items() if place < 300}
    native.model = tokenizers.models.BPE(vocab=kept, merges=[])


def in_place(native):
    step = native.pre_tokenizer
    step.add_prefix_space = True


CHANGES = {
    "add_tokens": lambda native: native.add_tokens(["<x>"]),
    "add_special_tokens": lambda native: native.add_special_tokens(["<x>"]),
    "a piece of the vocabulary made special": lambda native: native.add_special_tokens([" self"]),
    "normalizer": lambda native: setattr(native, "normalizer", tokenizers.normalizers.Lowercase()),
    "pre_tokenizer": lambda native: setattr(native, "pre_tokenizer", tokenizers.pre_tokenizers.ByteLevel()),
    "pre_tokenizer, in place": in_place,
    "post_processor": lambda native: setattr(
        native,
        "post_processor",
        tokenizers.processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)]),
    ),
    "model": smaller,
    "training": retrained,
    "a setting of the model": lambda native: setattr(native.model, "end_of_word_suffix", "</w>"),
}


@at_once("change", CHANGES)
@at_once("text", [TEXT, LONG, [TEXT, "a"]])
def test_a_changed_object_gives_its_new_ids(change, text):
    native = native_of("byte_level")
    for _ in range(3):  # chosen, found in the table, kept
        before = lz.tokenize(text, native)["input_ids"]
    CHANGES[change](native)
    rows = [native.encode(each).ids for each in ([text] if isinstance(text, str) else text)]
    wanted = rows[0] if isinstance(text, str) else rows
    for _ in range(3):
        assert lz.tokenize(text, native)["input_ids"] == wanted
    assert change == "a setting of the model" or wanted != before
    assert lz.detokenize(rows, native) == native.decode_batch(rows, skip_special_tokens=False)


def test_flags_of_a_token_that_was_added_before_are_seen():
    native = native_of("byte_level")
    native.add_tokens(["<x>"])
    before = lz.tokenize(TEXT, native)["input_ids"]
    native.add_special_tokens([SPECIAL])
    assert lz.tokenize(TEXT, native)["input_ids"] == native.encode(TEXT).ids != before
    many = native_of("byte_level")
    many.add_tokens([f"<{place}>" for place in range(identity.FEW_ADDED)] + ["<x>"])
    lz.tokenize(TEXT, many)
    many.add_special_tokens([SPECIAL])
    found = [lz.tokenize(TEXT, many)["input_ids"] for _ in range(identity.SELDOM + 1)]
    assert found[-1] == many.encode(TEXT).ids, "too many to be compared at each call"


def test_what_a_library_object_takes_as_text_is_its_own_default():
    native = native_of("byte_level")
    text = "a <|end|> b"
    parsed = lz.tokenize(text, native)["input_ids"]
    native.encode_special_tokens = True
    assert lz.tokenize(text, native)["input_ids"] == native.encode(text).ids != parsed
    assert lz.tokenize(text, native, parse_special=True)["input_ids"] == parsed


def test_a_tokenizer_that_does_not_change_is_read_once(monkeypatch):
    native = native_of("word_piece")
    lz.tokenize(TEXT, native)
    first = resolve(native)
    monkeypatch.setattr("layerzero.ops.tokenize.formats.of_object", lambda _: pytest.fail("read anew"))
    native.encode_batch([TEXT])
    for _ in range(2 * identity.SELDOM):
        lz.tokenize(TEXT, native)
    assert resolve(native) is first


def test_what_it_was_before_is_let_go_of():
    native = native_of("byte_level")
    for place in range(5):
        lz.tokenize(TEXT, native)
        native.add_tokens([f"<{place}>"])
    lz.tokenize(TEXT, native)
    gc.collect()
    assert [each for each in tokenizer.known() if each.name == "tokenizers.Tokenizer"] == [resolve(native)]


def test_a_model_that_gives_added_tokens_other_ids_once_it_is_written_is_refused():
    native = native_of("byte_level")
    lz.tokenize(TEXT, native)
    native.model = native_of("word_piece").model
    with pytest.raises(lz.InvalidCallError, match="wanted added tokens with the ids that they have once it is written"):
        lz.tokenize(TEXT, native)


def test_steps_in_python_are_refused_by_name():
    native = native_of("byte_level")
    lz.tokenize(TEXT, native)

    class Shouting:
        def normalize(self, text):
            text.uppercase()

    native.normalizer = tokenizers.normalizers.Normalizer.custom(Shouting())
    for _ in range(2):
        with pytest.raises(lz.InvalidCallError, match="wanted a tokenizer that can be written, without steps in Py"):
            lz.tokenize(TEXT, native)


@pytest.mark.parametrize("way", ["written over", "put in its place", "copied with its times"])
@pytest.mark.parametrize("folder", [False, True])
def test_another_file_under_the_same_path_is_read(tmp_path, way, folder):
    file, other = tmp_path / "tokenizer.json", tmp_path / "other"
    file.write_text(vocabularies.byte_level())
    other.write_text(vocabularies.word_piece())
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    place = str(tmp_path if folder else file)
    for _ in range(3):
        before = lz.tokenize(TEXT, place)["input_ids"]
    if way == "written over":
        file.write_text(other.read_text())
    elif way == "put in its place":
        other.replace(file)
    else:
        shutil.copy2(other, file)
    for _ in range(3):
        assert lz.tokenize(TEXT, place)["input_ids"] == native_of("word_piece").encode(TEXT).ids != before


def test_a_folder_says_anew_what_rows_are_like(tmp_path):
    (tmp_path / "tokenizer.json").write_text(vocabularies.byte_level())
    texts = ["a b c d", "a"]
    with pytest.raises(lz.InvalidCallError):
        lz.tokenize(texts, str(tmp_path), padding=True)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<|pad|>", "padding_side": "left"}')
    assert lz.tokenize(texts, str(tmp_path), padding=True)["input_ids"][1][0] == 1


def test_a_file_that_is_gone_stays_as_it_was_read(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(vocabularies.byte_level())
    before = lz.tokenize(TEXT, str(file))
    file.unlink()
    assert lz.tokenize(TEXT, str(file)) == before
    lz.forget_tokenizer(str(file))
    with pytest.raises(lz.InvalidCallError, match="wanted a file or folder that exists"):
        lz.tokenize(TEXT, str(file))


def test_a_sentencepiece_processor_that_loads_another_model():
    library = pytest.importorskip("sentencepiece")
    made = library.SentencePieceProcessor(model_proto=vocabularies.pieces("bpe"))
    before = lz.tokenize(TEXT, made)["input_ids"]
    made.LoadFromSerializedProto(vocabularies.pieces("unigram"))
    assert lz.tokenize(TEXT, made)["input_ids"] == made.encode(TEXT) != before


@pytest.mark.parametrize("options", [{}, {"add_bos": True}, {"add_eos": True}, {"add_bos": True, "add_eos": True}])
def test_a_sentencepiece_processor_adds_what_its_options_say(options):
    library = pytest.importorskip("sentencepiece")
    made = library.SentencePieceProcessor(model_proto=vocabularies.pieces("bpe"), **options)
    for text in (TEXT, "", LONG, LONG):
        assert lz.tokenize(text, made)["input_ids"] == made.encode(text)
    bare = library.SentencePieceProcessor(model_proto=vocabularies.pieces("bpe"))
    assert lz.tokenize(TEXT, made, add_special_tokens=False)["input_ids"] == bare.encode(TEXT)
    assert lz.tokenize([TEXT, "a"], made)["input_ids"] == [made.encode(TEXT), made.encode("a")]


def test_other_options_of_a_sentencepiece_processor_are_refused_by_their_name():
    library = pytest.importorskip("sentencepiece")
    made = library.SentencePieceProcessor(model_proto=vocabularies.pieces("bpe"), reverse=True)
    with pytest.raises(lz.InvalidCallError, match=r"wanted no options but add_bos and add_eos, got .* with reverse"):
        lz.tokenize(TEXT, made)


def test_two_python_tokenizers_that_save_the_same_are_not_one(monkeypatch):
    """What makes them differ is in their code, which ``save_pretrained`` does not write."""
    transformers = pytest.importorskip("transformers")

    class Shifted(transformers.PreTrainedTokenizer):
        vocab_size = 8

        def __init__(self, shift=0, **given):
            super().__init__(**given)
            self.init_kwargs.pop("shift", None)
            self.shift = shift

        def get_vocab(self):
            return {str(place): place for place in range(8)}

        def _tokenize(self, text, **_):
            return list(text)

        def _convert_token_to_id(self, token):
            return (int(token) + self.shift) % 8

        def _convert_id_to_token(self, index):
            return str(index)

        def save_vocabulary(self, save_directory, filename_prefix=None):
            return ()

    one, other = Shifted(), Shifted(shift=3)
    for _ in range(2):
        for each in (one, other):
            assert lz.tokenize("0123", each)["input_ids"] == each("0123")["input_ids"]
    assert lz.tokenize("0123", one) != lz.tokenize("0123", other)
