"""The texts on which a tokenizer in another form has to give the same ids: what differs between implementations.

Every script of the list, every Unicode category, emoji with modifiers and joiners, combining marks in odd orders,
control characters, runs of one character, numbers, contractions, whitespace of all kinds, code, the texts of special
tokens, and random mixtures of all of it. Everything is drawn from a seed: machines whose Python knows one Unicode
prove the same thing. A proof runs all of it, and texts that are drawn of it.
"""

from __future__ import annotations

import functools
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from layerzero.core.operation import Case
from layerzero.ops.tokenize import rows as oracle
from layerzero.ops.tokenize.tokenizer import Tokenizer, resolve

SEED = 20261122

EDITION = "3"
"""Raised where the texts change: what was proved on an earlier edition is proved again."""

SCRIPTS = (
    "The quick brown fox doesn't jump; it's over 13 lazy dogs' HOUSES. I'LL we've they'd",
    "Größe Straße Œuvre naïve coöperate señor İstanbul ıspanak ǅungla",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ёлка їжак",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία ἄνθρωπος ᾧ",
    "אֲנִי יָכוֹל לֶאֱכֹל זְכוּכִית שלום עולם",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ١٢٣ لا إله",
    "मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती। क्षत्रिय ३२१",
    "আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না।",
    "நான் கண்ணாடி சாப்பிடுவேன், அதனால் எனக்கு ஒரு கேடும் வராது.",
    "నేను గాజు తినగలను మరియు అలా చేసినా నాకు ఏమి ఇబ్బంది లేదు",
    "ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ ๑๒๓",
    "ຂອ້ຍກິນແກ້ວໄດ້ໂດຍທີ່ມັນບໍ່ໄດ້ເຮັດໃຫ້ຂອ້ຍເຈັບ",
    "ཤེལ་སྒོ་ཟ་ནས་ང་ན་གི་མ་རེད།",
    "ကျွန်တော် ကျွန်မ မှန်စားနိုင်တယ်။",
    "ខ្ញុំអាចញុំកញ្ចក់បាន ដោយគ្មានបញ្ហា",
    "მინას ვჭამ და არა მტკივა ႠႡႢ",
    "Կրնամ ապակի ուտել և ինծի անհանգիստ չըներ։",
    "አማርኛ ብርጭቆ መብላት እችላለሁ",
    "私はガラスを食べられます。それは私を傷つけません。ｶﾞﾗｽ ㍿",
    "我能吞下玻璃而不伤身体。𠀀𪚥〇〡",
    "나는 유리를 먹을 수 있어요. 그래도 아프지 않아요 ᄒᆞᆫ글",
    "ᓀᐦᐃᔭᐍᐏᐣ ᏣᎳᎩ ᚠᛇᚻ ᚁᚂ 𐌰𐌱 𓀀𓁐 ߒߞߏ ⴰⵣⵓⵍ ꦲꦏ",
)
"""A line for each of more than 20 scripts."""

EMOJI = (*("👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "1️⃣", "❤️", "☺", "👩🏿‍🚀", "🧑‍🤝‍🧑", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "\u200d👍", "🏽", "🇩", "©️™"),)

MARKS = (
    *("e\u0301", "\u0301e", "a\u0323\u0307", "a\u0307\u0323", "o\u0302\u0323x", "\u1112\u1161\u11ab", "\u0928\u093c"),
    *("n\u0303o", "\u212b\u00c5A\u030a", "\ufb01\ufb03", "\u01c4\u01c5", "z" + "\u0335\u0336\u0300" * 9, " \u0301 "),
)
"""Combining marks: composed, decomposed, out of order, without a letter, and too many."""

SPACES = (
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n", " \n ", "\t\t\n", "\u00a0", "\u2003", "\u3000", "\u200b"),
    *("\u2028", "\u0085", "\ufeff", "\x0b", "\x0c", "\x1c", "\x1f", " \u00a0 ", "\n \n  \n", "\u180e", "\u202f "),
)

CODE = (
    'def f(x: int) -> str:\n    return f"{x:>8_d}"  # ok\n\n\nclass A(B):\n\tpass\n',
    "for (size_t i=0;i<n;++i){a[i]|=b[i]<<0x1F;}/* */ //!\r\n#include <stdio.h>\r\n",
    "SELECT * FROM t WHERE a='it''s' AND b>=3.14e-10;--x\n",
    '<div class="a b" id=\'c\'>&nbsp;&#x1F600;</div><!-- -->\n{"k": [1,2,null], "é": "\\u00e9\\n"}',
    "https://example.com/a%20b?q=1&r=%E2%82%AC#x user+tag@mail.example C:\\Windows\\x64 ~/.bashrc $HOME",
    "$$\\int_0^\\infty e^{-x^2}dx=\\frac{\\sqrt\\pi}{2}$$ a_{i+1}≤∑ ∀x∈ℝ ½ ² x² ⅷ ①",
)

NUMBERS = ("0", "007", "1234567890", "3.14159", "1,000,000", "1e-5", "٣٤٥", "१२३४", "²³", "Ⅷ", "½", "10²³x", "１２３")

WORDS = (
    *("'s", "'S", "'ll", "'LL", "'ſ", "’s", "don't", "DON'T", "I'm'd", "'", "''s", "it's's", "x're ", "'\n's"),
    *("_a_", "a_b", "camelCaseHTTPServer", "HTTPServer", "ABCdef", "abcDEF", "aB", "Ǆabc", "ΑΒΓαβγ", "éÉ"),
    *("iPhone15Pro", "ﬁn", "K\u212a", "...", "?!?!", "-->", "=>>", "!\n", "/\n/", "!/\n\n/a", "#\r\n\r\n"),
    *("\u2014a", "a/b", "(a)", "«a»", "“a”", "!!a!!", "\ufffd"),
)

MARKERS = (
    *("<s>", "</s>", "<unk>", "<pad>", "<mask>", "<|endoftext|>", "<|im_start|>", "[CLS]", "[UNK]", "<0x0A>", "<0x41>"),
    *("\u2581", "\u2581a", "a\u2581b", "\u0120", "\u010a", "##a", "a</w>", "@@", "<bos>", "[INST] x [/INST]"),
)
"""What libraries write into vocabularies, as plain text: some take it for what it stands for."""

CONTROLS = tuple(chr(code) for code in (*range(1, 32), *range(127, 160)))


def _runs() -> Iterator[str]:
    """Runs of one thing: what a quadratic pattern, a cache by word and a limit by length show themselves on."""
    for piece in (*"aA \n\t1!é中👍\u0301", "ab", "a ", " a", "\r\n", "=-", "\u00a0", "aA"):
        for count in (2, 3, 4, 7, 8, 9, 16, 31, 64, 129, 700):
            yield piece * count
            yield f"x{piece * count}y"
    yield "".join(chr(97 + place * 7 % 26) for place in range(5000))
    yield "x" * 20_000


def _categories() -> Iterator[str]:
    """Characters of every category and of planes 0 to 3 and 14, in small groups between letters and spaces."""
    drawn = random.Random(SEED)
    by_category: dict[str, list[str]] = {}
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000 or 0x40000 <= code < 0xE0000 or code >= 0xF0000:
            continue
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    for known in by_category.values():
        for each in known if len(known) < 60 else drawn.sample(known, 60):
            yield f"a{each}b {each} {each}{each}1{each}\n{each}"
        yield "".join(drawn.sample(known, min(40, len(known))))


def _mixtures(count: int, specials: Sequence[str]) -> Iterator[str]:
    """Random mixtures of everything, of one to forty pieces."""
    drawn = random.Random(SEED + 1)
    words = [word for line in SCRIPTS for word in line.split(" ")]
    kinds = [words, words, EMOJI, MARKS, SPACES, SPACES, NUMBERS, WORDS, CODE, CONTROLS, MARKERS]
    kinds.append(list(specials) or words)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for _ in range(count):
        pieces = []
        for _ in range(drawn.choice((1, 2, 3, 5, 8, 13, 40))):
            if drawn.random() < 0.15:
                pieces.append("".join(drawn.choices(letters, k=drawn.randint(1, 14))))
            else:
                pieces.append(drawn.choice(drawn.choice(kinds)))
            if drawn.random() < 0.5:
                pieces.append(" ")
        yield "".join(pieces)


def _ascii(count: int) -> Iterator[str]:
    """Texts of the first 128 characters alone: some libraries are exact for them and not beyond."""
    drawn = random.Random(SEED + 2)
    every = "".join(map(chr, range(128)))
    kinds = (every, every[32:127], every[32:127] + "     aeiou", "ab'., \n\t", "A1 -_/")
    for _ in range(count):
        yield "".join(drawn.choices(drawn.choice(kinds), k=drawn.choice((1, 2, 3, 5, 9, 20, 60, 200))))


@cache
def _fixed() -> tuple[str, ...]:
    alone = (*SCRIPTS, *EMOJI, *MARKS, *SPACES, *CODE, *NUMBERS, *WORDS, *MARKERS, *CONTROLS)
    spaced = (f"a{space}b{space}{space}C{space}" for space in SPACES)
    ordered = ("".join(SCRIPTS), "\n".join(SCRIPTS), "\n\n".join(CODE) * 3, " ".join(EMOJI), "\x00", "a\x00b")
    return ("", *alone, *(f" {each}" for each in alone), *(f"{each} x" for each in alone), *spaced, *ordered,
            *_runs(), *_categories(), *_ascii(600))  # fmt: skip


def differential(specials: Sequence[str] = (), mixtures: int = 3000) -> Iterator[str]:
    """Every text of the corpus, about a megabyte; ``specials`` are the texts of the tokenizer's special tokens."""
    yield from _fixed()
    for special in list(specials)[:64]:
        yield from (special, f"a{special}b", f" {special} ", special * 2, special[:-1], f"{special}\n\n{special}")
    yield from _mixtures(mixtures, specials)


MAX_TOLD = 2

Load = Callable[[Mapping[str, Any]], Callable[..., Any]]
"""What a kernel runs, by the wanted results."""


def sample(characters: int, seed: int) -> str:
    """A text of this length to measure with: prose and code in turn, in the order that the seed draws."""
    drawn_by = random.Random(seed)  # texts, no secret
    prose = SCRIPTS[0].split(" ")
    pieces: list[str] = []
    length = 0
    while length < characters:
        if drawn_by.random() < 0.3:
            piece = drawn_by.choice(CODE)
        elif drawn_by.random() < 0.1:
            piece = drawn_by.choice(SCRIPTS) + "\n"
        else:
            syllables = "".join(
                drawn_by.choices(("ta", "ri", "on", "es", "qu", "ment", "ing", "pro"), k=drawn_by.randint(1, 4))
            )
            piece = " ".join([*drawn_by.choices(prose, k=6), syllables, drawn_by.choice((".", ",", ";")), ""])
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces)[:characters]


def drawn(what: str) -> Callable[[Case, Mapping[str, Any]], dict[str, Any]]:
    """Makes canonical arguments of a case for the tokenizer that ``tokenizer_id`` names."""

    @functools.lru_cache(maxsize=2)  # read for its facts, then measured
    def made(characters: int, count: int, tokenizer: Tokenizer, *, batched: bool) -> dict[str, Any]:
        each = characters // count
        texts = [sample(each, SEED + number) for number in range(count)]
        items: Any = texts if batched else texts[0]
        arguments: dict[str, Any] = {"tokenizer": tokenizer, "items": items, "batched": batched}
        if what == "encode":
            adds = tokenizer.surround is None and tokenizer.adds
            return arguments | {"add_special_tokens": adds, "parse_special": tokenizer.parses, "return_offsets": False}
        ids = oracle.encode(items, tokenizer=tokenizer, batched=batched, parse_special=tokenizer.parses)
        cut = [row[:each] for row in ids] if batched else ids[:each]
        return arguments | {"items": cut, "skip_special_tokens": False}

    def draw(case: Case, given: Mapping[str, Any]) -> dict[str, Any]:
        tokenizer = resolve(given["tokenizer_id"])
        batched = bool(case.params.get("batched"))
        return dict(made(case.sizes["characters"], case.sizes["batch"], tokenizer, batched=batched))

    return draw


def _texts(tokenizer: Tokenizer, parse_special: bool) -> Iterator[str]:
    yield from differential(tokenizer.specials)
    yield from (sample(size, SEED + size) for size in (500, 4000, 60_000, 250_000))
    del parse_special


def prove_encode(load: Load, given: Mapping[str, Any]) -> list[str]:
    """Encode every text of the corpus alone and in batches; what differs from the library itself, the first few."""
    tokenizer: Tokenizer = given["tokenizer"]
    flags = {"add_special_tokens": given["add_special_tokens"], "parse_special": given["parse_special"]}
    texts = list(_texts(tokenizer, given["parse_special"]))
    wanted = tokenizer.engine(  # the same for each kernel that proves itself in one process
        ("proof", *flags.values()), lambda: [oracle.encode(text, tokenizer=tokenizer, **flags) for text in texts]
    )
    one, many = load({**given, "batched": False}), load({**given, "batched": True})
    problems = _unlike(one, texts, wanted)
    for start in range(0, len(texts), 997):
        got = _tried(many, texts[start : start + 997])
        if got != wanted[start : start + 997]:
            problems.append(f"texts {start} to {start + 996} as a batch: other ids than one by one")
    again = [_tried(one, text) for text in reversed(texts)]  # with every cache of it warm
    if again[::-1] != wanted:
        problems.append("other ids at the second time")
    return _short(problems)


def prove_decode(load: Load, given: Mapping[str, Any]) -> list[str]:
    """Decode the ids of every text, their parts, and random ids; what differs from the library itself."""
    tokenizer: Tokenizer = given["tokenizer"]
    flags = {"skip_special_tokens": given["skip_special_tokens"]}
    rows = [
        oracle.encode(text, tokenizer=tokenizer, parse_special=tokenizer.parses) for text in _texts(tokenizer, True)
    ]
    rows += [row[1:] for row in rows if len(row) > 1] + [row[: len(row) // 2] for row in rows if len(row) > 1]
    order = random.Random(SEED)  # texts, no secret
    known = sorted({each for row in rows for each in row})
    rows += [order.choices(known, k=order.randint(1, 12)) for _ in range(3000)]
    rows += [[each] for each in known]
    wanted = [oracle.decode(row, tokenizer=tokenizer, **flags) for row in rows]
    one, many = load({**given, "batched": False}), load({**given, "batched": True})
    problems = _unlike(one, rows, wanted)
    if _tried(many, rows) != wanted:
        problems.append("as a batch: other texts than one by one")
    return _short(problems)


def _unlike(run: Callable[..., Any], items: Sequence[Any], wanted: Sequence[Any]) -> list[str]:
    found = [(item, result, _tried(run, item)) for item, result in zip(items, wanted, strict=True)]
    return [f"{_told(item)}: wanted {_told(result)}, got {_told(got)}" for item, result, got in found if got != result]


def _tried(run: Callable[..., Any], item: Any) -> Any:
    try:
        return run(item)
    except Exception as error:  # noqa: BLE001  # a form that raises where the library does not is another one
        return f"{type(error).__name__}: {error}"


def _short(problems: list[str]) -> list[str]:
    left = len(problems) - MAX_TOLD
    return problems if left <= 0 else [*problems[:MAX_TOLD], f"and {left} more"]


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:40]}…{text[-12:]}"
