"""Tokenizers of Transformers that keep their interface, and whose texts LayerZero encodes where it is exact.

    tokenizer = lz.optimize(AutoTokenizer.from_pretrained(...))

What comes back is a tokenizer of a class below the one that was given, with the same state: chat templates, padding,
saving and everything else are its own. Only the step from texts to ids and back is another, and only for calls that
LayerZero knows: pairs, pretokenized words, overflowing pieces and the like run the tokenizer's own code. So does
everything while LayerZero is disabled.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.core.errors import InvalidCallError, LayerZeroError
from layerzero.core.operation import Routed
from layerzero.core.system import log
from layerzero.engine.config import SCOPES, current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import PLAIN_CALLS, plain_facts
from layerzero.ops.tokenize.tokenizer import Tokenizer, resolve
from layerzero.tuning.measurement.plain import plain_jobs, tune_plain
from layerzero.tuning.measurement.tune import Tuned
from layerzero.tuning.measurement.workload import Manifest, cases_of

_NEUTRAL: Mapping[str, Any] = {
    "text_pair": None,
    "stride": 0,
    "is_split_into_words": False,
    "return_overflowing_tokens": False,
    "return_special_tokens_mask": False,
    "return_offsets_mapping": False,
    "return_length": False,
}
"""Arguments that LayerZero knows at these values only."""


def tune_tokenizer(
    tokenizer_id: Any = None,
    *,
    manifest: str | os.PathLike[str] | None = None,
    budget_s: float | None = None,
    again: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Let libraries prove that they are exact for a tokenizer, in a child process, and measure those that are.

    Both are remembered on this machine: the second time takes no longer than reading the tokenizer.

    Args:
        tokenizer_id: as :func:`layerzero.tokenize` takes it.
        manifest: in its place a file that ``lz.record`` wrote: the recorded calls of every tokenizer are measured.
        budget_s: seconds after which no further case is measured; None for no limit.
        again: prove and measure what is known, too.
        progress: called with a line for each proof and each case.
    Returns: what was found. Raises: ValueError for neither or both of tokenizer and manifest, or a file that is none.
    """
    if (tokenizer_id is None) is (manifest is None):
        raise ValueError("tune_tokenizer: wanted a tokenizer or a manifest, got " + ("both" if manifest else "neither"))
    if manifest is None:
        jobs = plain_jobs("tokenize.*", {"tokenizer_id": tokenizer_id})
    else:
        jobs = [
            job
            for operation, params, cases in cases_of(Manifest.load(manifest))
            for job in plain_jobs(operation.name, {"tokenizer_id": params["source"]}, cases)
        ]
    return tune_plain(jobs, budget_s=budget_s, again=again, progress=progress)


def is_tokenizer(value: object) -> bool:
    """Whether something is a tokenizer of Transformers; the library is not imported to know."""
    homes = {each.__module__.partition(".")[0] for each in type(value).__mro__}
    return "transformers" in homes and any(each.__name__ == "PreTrainedTokenizerBase" for each in type(value).__mro__)


def optimize_tokenizer(tokenizer: Any, *, tune: bool = True, budget_s: float | None = 120.0) -> Any:
    """A tokenizer with the same interface and the same ids, whose texts the fastest exact library encodes.

    Args:
        tokenizer: a tokenizer of Transformers.
        tune: whether libraries prove themselves for it and are measured first, unless that is known on this machine.
        budget_s: seconds for measuring.
    Raises: InvalidCallError for something else.
    """
    if not is_tokenizer(tokenizer):
        wanted = "wanted a tokenizer of Transformers"
        raise InvalidCallError("optimize", [f"tokenizer: {wanted}, got {type(tokenizer).__name__}"])
    if isinstance(tokenizer, _Wrapped):
        return tokenizer
    wrapped = _rebuilt(type(tokenizer), tokenizer.__dict__)
    if tune and wrapped.lz_tokenizer.identity.format != "transformers":
        tune_tokenizer(wrapped.lz_tokenizer, budget_s=budget_s)
    return wrapped


class _Wrapped:
    """What is put before a tokenizer's class."""

    _lz_asked: tuple[int, Tokenizer | None] = (-1, None)
    _lz_gain = False

    @property
    def lz_tokenizer(self) -> Tokenizer:
        """The tokenizer as LayerZero reads it now: its identity, and the name under which it was proved."""
        return resolve(self)

    def _lz_gains(self, known: Tokenizer) -> bool:
        """Whether another library than its own may be chosen for it; checked anew in each epoch, and after changes."""
        if self._lz_asked != (ENGINE.epoch, known) or SCOPES.active:
            given = {"batched": False, "add_special_tokens": False, "parse_special": known.parses}
            arguments = {"tokenizer": known, "items": "", "return_offsets": False, **given}
            dispatcher, _ = PLAIN_CALLS["tokenize"]
            facts = plain_facts(Routed(dispatcher.function.operations[0], arguments))
            ENGINE.registry.ready()
            _, ranked = dispatcher.explain(facts, current_policy())
            gains = any(each.legal and not each.kernel.is_stock(facts) for each in ranked)
            if SCOPES.active:  # what holds in a scope does not hold behind it
                return gains
            self._lz_gain, self._lz_asked = gains, (ENGINE.epoch, known)
        return self._lz_gain

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("_lz")}
        return _rebuilt, (type(self).__mro__[2], state)

    def _encode_plus(self, text: Any, **given: Any) -> Any:
        native: Callable[..., Any] = functools.partial(super()._encode_plus, text, **given)  # type: ignore[misc]
        if not current_policy().enabled:
            return native()
        try:
            known = self.lz_tokenizer
            asked = _asked(self, known, text, given) if self._lz_gains(known) else None
            if asked is None:
                return native()
            found = PLAIN_CALLS["tokenize"][1](text, known, **asked)
        except LayerZeroError as error:
            log.debug("the tokenizer's own code encodes: %s", error)
            return native()
        return _encoded(self, text, found, given, native)

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **given: Any) -> Any:
        cleans = given.get("clean_up_tokenization_spaces")
        cleans = getattr(self, "clean_up_tokenization_spaces", False) if cleans is None else cleans
        known = type(token_ids) is list and token_ids and not cleans and set(given) <= {"clean_up_tokenization_spaces"}
        if known and current_policy().enabled:
            try:
                return PLAIN_CALLS["detokenize"][1](
                    token_ids, self.lz_tokenizer, skip_special_tokens=skip_special_tokens
                )
            except LayerZeroError as error:
                log.debug("the tokenizer's own code decodes: %s", error)
        return super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **given)  # type: ignore[misc]


def _rebuilt(base: type, state: dict[str, Any]) -> Any:
    """A wrapped tokenizer of a state, as in another process, or of a copy."""
    made = _class_over(base)
    wrapped = made.__new__(made)
    wrapped.__dict__.update(state)
    return wrapped


@functools.cache
def _class_over(base: type) -> Any:
    """The class of wrapped tokenizers of a class, by the same name: Transformers writes it into files."""
    return type(base.__name__, (_Wrapped, base), {"__module__": base.__module__, "__doc__": base.__doc__})


_ENCODING = frozenset({
    *_NEUTRAL, "add_special_tokens", "padding_strategy", "truncation_strategy", "max_length", "pad_to_multiple_of",
    "padding_side", "return_tensors", "return_token_type_ids", "return_attention_mask", "verbose",
    "split_special_tokens",
})  # fmt: skip


def _asked(tokenizer: Any, known: Tokenizer, text: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The call for LayerZero, None for one that the tokenizer itself answers."""
    if not set(given) <= _ENCODING or any(given.get(name, value) != value for name, value in _NEUTRAL.items()):
        return None
    if type(text) is not str and not (type(text) is list and text and all(type(each) is str for each in text)):
        return None
    if known.surround is None or known.identity.format == "transformers":
        return None
    padding = str(getattr(given.get("padding_strategy"), "value", "do_not_pad"))
    cutting = str(getattr(given.get("truncation_strategy"), "value", "do_not_truncate"))
    side = given.get("padding_side") or tokenizer.padding_side
    if cutting not in ("do_not_truncate", "longest_first", "only_first") or side != tokenizer.padding_side:
        return None
    most = given.get("max_length")
    if (cutting != "do_not_truncate" or padding == "max_length") and not most:
        return None
    splits = given.get("split_special_tokens")
    asked: dict[str, Any] = {
        "add_special_tokens": bool(given.get("add_special_tokens", True)),
        "parse_special": not (tokenizer.split_special_tokens if splits is None else splits),
    }
    if cutting != "do_not_truncate" or padding != "do_not_pad":
        asked |= {
            "truncation": cutting,
            "padding": padding,
            "max_length": most,
            "pad_to_multiple_of": given.get("pad_to_multiple_of"),
            "return_attention_mask": True,
        }
    return asked


def _encoded(
    tokenizer: Any, text: Any, found: Mapping[str, Any], given: Mapping[str, Any], native: Callable[..., Any]
) -> Any:
    """What Transformers' own function returns: the tensors that its models take, and more on request."""
    ids = found["input_ids"]
    alone = type(text) is str
    rows: Sequence[list[int]] = [ids] if alone else ids
    names = tokenizer.model_input_names
    types, masks = given.get("return_token_type_ids"), given.get("return_attention_mask")
    data: dict[str, Any] = {"input_ids": ids}
    if types or (types is None and "token_type_ids" in names):
        data["token_type_ids"] = _rows([[0] * len(row) for row in rows], alone=alone)
    if masks or (masks is None and "attention_mask" in names):
        mask = found.get("attention_mask")
        data["attention_mask"] = _rows([[1] * len(row) for row in rows], alone=alone) if mask is None else mask
    for row in rows:
        tokenizer._eventual_warn_about_too_long_sequence(row, given.get("max_length"), given.get("verbose", True))
    kind = given.get("return_tensors")
    return _batch_class()(data, native, tensor_type=kind, prepend_batch_axis=alone and kind is not None)


def _rows(rows: list[list[int]], *, alone: bool) -> Any:
    return rows[0] if alone else rows


@functools.cache
def _batch_class() -> Any:
    from transformers import BatchEncoding

    class Batch(BatchEncoding):  # type: ignore[misc]  # the library has no types
        """A batch whose pieces (``tokens()``, ``word_ids()``) are computed when they are read."""

        def __init__(self, data: Any, native: Callable[..., Any], **kwargs: Any) -> None:
            self._native: Callable[..., Any] | None = native
            self._found: Any = None
            super().__init__(data, n_sequences=1, **kwargs)

        @property
        def _encodings(self) -> Any:
            if self._native is not None:
                native, self._native = self._native, None
                self._found = native()._encodings
            return self._found

        @_encodings.setter
        def _encodings(self, value: Any) -> None:
            if value is not None:
                self._native, self._found = None, value

        def __reduce__(self) -> Any:
            return BatchEncoding, (dict(self.data), self._encodings)

        @property
        def is_fast(self) -> bool:
            return True

    return Batch
