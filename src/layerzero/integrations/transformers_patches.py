"""Functions of Transformers that are wrapped: the check of a model's attention, and continuous batching.

**The check** says whether a model can have its attention computed by another library, while it is made. Transformers
lets every registered name pass (5.23), whatever a model does with it: models that compute attention by themselves then
run as before and say nothing, fail with a KeyError, or add a mask of another kind to their scores. There is no hook for
this, so the method that checks the names of all models is wrapped; for other names it is what it was.

**Continuous batching** (``generate_batch``) has pages. Transformers packs the new tokens of all sequences into one row
and copies the keys and values that they may see out of its pages. It takes ``sdpa``, which tells sequences apart by a
float mask, and names of its own alone, and has no place where another library could say that it serves the same call.
So the functions that look at the name are wrapped, and are what they were for every other one. 5.23 gives its pages and
a mask to attention. 5.24 reads the pages before and says where sequences begin. On a CPU they are attended to one by
one: 32 prompts of 256 tokens took 8.2 s, and 17.7 with the mask of ``sdpa`` (EPYC Zen 4, two cores, 2026-11-30).
Elsewhere its own functions run batches, and a warning says so: its flash attention reads pages without copies.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.nn import functional

import layerzero as lz
from layerzero.core.errors import InvalidCallError, LayerZeroWarning
from layerzero.core.system import warn

EXCHANGES: ContextVar[bool] = ContextVar("layerzero_exchanges", default=False)
"""Whether LayerZero's attention is compared as ``lz.optimize`` would put it in the place of torch's function."""


def torchs_attention() -> Callable[..., Any]:
    """Transformers' own attention by torch's function, under the name ``sdpa``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torchs: Callable[..., Any] = sdpa_attention_forward
    return torchs


def exchanges() -> bool:
    """Whether that is so now; nothing is compared in code that is compiled, and Dynamo knows no ContextVar."""
    return not torch.compiler.is_compiling() and EXCHANGES.get()


VERSIONS = SpecifierSet(">=5.4,<6")
"""Versions of Transformers whose masks, layers and caches are known: before 5.4 ``cache_position`` made masks."""


def version_problem() -> str:
    """What is wrong with the Transformers that is here; empty where its internals are known."""
    try:
        from transformers import __version__ as found
    except ImportError:
        found = "none"
    known = found != "none" and VERSIONS.contains(found, prereleases=True)
    return "" if known else f"wanted transformers {VERSIONS}, whose internals are known, got {found}"


BATCHED = frozenset({"cache", "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"})
"""Arguments of a batch: where keys and values are written and read, and which logits are wanted."""


def is_of_a_batch(named: dict[str, Any]) -> bool:
    """Whether a call is one of a batch; models hand on caches of their own to their attention, too (5.24)."""
    places = ("read_index", "write_index", "block_table")
    return named["cache"] is not None and any(named.get(each) is not None for each in places)


def says_where_rows_begin(key: Tensor, named: dict[str, Any]) -> bool:
    """Whether a call is one of a batch on a CPU whose keys and values were read out of the pages before (5.24)."""
    others = named.get("cache") is not None or named.get("block_table") is not None
    begins = isinstance(named.get("cu_seq_lens_k"), Tensor) and key.device.type == "cpu"
    return begins and named["write_index"] is not None and not others


ROW_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Names by which Transformers tells flash attention where sequences of a packed row begin, and how long they are."""


def packed_by(query: Tensor, key: Tensor, kwargs: dict[str, Any], *beside: Any) -> Callable[..., Tensor] | None:
    """Take where sequences of a packed row begin out of a call; what attends to such a row (1, H, T, D) within them.

    None, and nothing taken, for a call that says less, or that has a bias or dropout ``beside``, or is deterministic.
    """
    of_query, of_key = kwargs.get("cu_seq_lens_q"), kwargs["cu_seq_lens_k"]
    batched = kwargs.get("write_index") is not None
    least = 2 if batched else 3  # nothing else says that a batch has one sequence
    if not isinstance(of_query, Tensor) or not isinstance(of_key, Tensor) or len(query) != 1:
        return None
    if min(of_query.numel(), of_key.numel()) < least or query.shape[2] > key.shape[2]:
        return None
    if kwargs.get("deterministic") or any(each is not None for each in beside):
        return None
    del kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    told: dict[str, Any] = {f"max_seqlen_{of}": kwargs.pop(f"max_length_{of}", None) for of in "qk"}
    if batched:  # what fills rows up for compiled batches is a sequence of its own, maybe the longest
        of_query = functional.pad(of_query, (0, 1), value=query.shape[2])
        of_key, told = functional.pad(of_key, (0, 1), value=key.shape[2]), {}
    told |= {"cu_seqlens_q": of_query, "cu_seqlens_k": of_key}

    def attend(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        function: Any = lz.ragged_attention  # it returns a pair only with return_lse=True
        attended: Tensor = function(*(each[0].transpose(0, 1) for each in (query, key, value)), **told, **named)
        return attended.unsqueeze(0)

    return attend


def check_unpacked(kwargs: dict[str, Any]) -> None:
    """Raises: InvalidCallError where nothing but these arguments tells sequences apart."""
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        if (got := kwargs.get(name)) is not None and got.numel() > 2:
            wanted = f"{name}: wanted packed sequences to be separated by position_ids (which make a mask)"
            step = "pass position_ids that start at 0 for each of them"
            problem = f"{wanted}, got {got.numel() - 1} sequences and no mask; {step}"
            raise InvalidCallError("attn_implementation='layerzero'", [problem])


def keys_of(
    module: Any, key: Tensor, value: Tensor, mask: Tensor | None, named: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Write the new keys and values (1, K, T, D) into the batch's cache; all that its tokens may see, (1, K, N, D).

    Takes the arguments of the batch out of ``named``. Raises: InvalidCallError for a batch that no mask tells apart.
    """
    if mask is None or named.get("block_table") is not None:
        got = "none" if mask is None else "a block table as well"
        wanted = "wanted continuous batching with a mask, as Transformers 5.23 makes it for attn_implementation='sdpa'"
        raise InvalidCallError("attn_implementation='layerzero'", [f"cache: {wanted}, got {got}; set 'sdpa' for it"])
    key, value = named["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=named)
    for name in (*BATCHED, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        named.pop(name, None)
    return key, value


def _reads_before() -> bool:
    """Whether keys and values are read out of the pages before attention, which hears where sequences begin (5.24)."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    return "kwargs" in inspect.signature(PagedAttentionCache.update).parameters


def serve_batches(names: Collection[str]) -> None:
    """Let ``generate_batch`` run models whose attention has one of these names, as it runs ``sdpa``; once is enough.

    A version of Transformers without these functions keeps its own refusal, which names what works.
    """
    try:
        from transformers.generation.continuous_batching import input_outputs
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager
    except ImportError:
        return
    if not hasattr(Manager, "switch_to_cb_friendly_attn"):
        return
    masked = "cache" in inspect.signature(torchs_attention()).parameters  # 5.23
    served = hasattr(input_outputs, "attn_mask_is_needed") and (masked or _reads_before())
    switch = Manager.switch_to_cb_friendly_attn
    if hasattr(switch, "_layerzero"):
        return

    @functools.wraps(switch)
    def switched(self: Any, model: Any, *others: Any, **named: Any) -> None:
        name, where = model.config._attn_implementation, model.device.type
        if name not in names:
            switch(self, model, *others, **named)
        elif not served or (not masked and where != "cpu"):  # flash attention reads pages on a GPU
            own = "sdpa" if model._supports_sdpa else "eager"
            said = f"generate_batch of this version of Transformers takes no {name!r} on {where}: {own!r} runs"
            warn(said, LayerZeroWarning, stacklevel=2)
            model.set_attn_implementation(own)
            switch(self, model, *others, **named)
            self._original_attn_impl = name  # which is set again when the batches end

    switched._layerzero = True  # type: ignore[attr-defined]
    Manager.switch_to_cb_friendly_attn = switched
    if served and masked:
        is_needed = input_outputs.attn_mask_is_needed
        input_outputs.attn_mask_is_needed = functools.wraps(is_needed)(
            lambda config: config._attn_implementation in names or is_needed(config)
        )


_CALL = "ALL_ATTENTION_FUNCTIONS"
"""How code of Transformers names the functions from which a model takes the wanted one."""


def check_at_load(method: str, names: Collection[str], *checks: Callable[[Any], None]) -> None:
    """Have classes of models checked where a method of theirs gets one of these names; again changes nothing.

    Transformers calls it when models are made, or switched. A version without the method is left as it is.
    """
    from transformers import PreTrainedModel

    original = getattr(PreTrainedModel, method, None)
    if original is None or hasattr(original, "_layerzero"):
        return

    @functools.wraps(original)
    def checked(self: Any, *given: Any, **named: Any) -> Any:
        if any(isinstance(each, str) and each in names for each in (*given, *named.values())):
            for check in checks:
                check(type(self))
        return original(self, *given, **named)

    checked._layerzero = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, method, checked)


def check_class(model: Any) -> None:
    """Refuse a class of models that would not call what was registered; tell where nothing would call it.

    Raises: InvalidCallError that names the class and the settings that work for it.
    """
    name = model.__name__
    if not model._can_set_attn_implementation() or _chooses_itself(model):
        problem = (
            f"wanted a model that calls its attention through AttentionInterface, got {name}, which computes it by "
            f"itself; load it with {settings_of(model)}. As a part of another model, name the others alone: "
            "attn_implementation={'text_config': 'layerzero'}"
        )
        raise InvalidCallError("attn_implementation='layerzero'", [problem])
    if _gives_sinks_of_tokens(model):
        problem = (
            f"wanted a model whose sinks are those of its weights, got {name}, which gives one for each token; "
            f"load it with {settings_of(model)}"
        )
        raise InvalidCallError("attn_implementation='layerzero'", [problem])
    if not _calls(model):
        warn(
            f"attn_implementation='layerzero': {name} computes no attention through Transformers' AttentionInterface, "
            "so nothing of it is LayerZero's. lz.optimize(model) may find norms and products in it",
            LayerZeroWarning,
            stacklevel=5,
        )


def models_of(config_type: type) -> list[Any]:
    """Every loaded model class of this config, or else those whose config has parts of it, as T5Gemma's has."""
    from transformers import PreTrainedModel

    found: list[Any] = []
    waiting: list[Any] = [PreTrainedModel]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        found += [(getattr(each, "config_class", None), each) for each in below]
    own = [each for config, each in found if config is config_type]
    return own or [each for config, each in found if config_type in getattr(config, "sub_configs", {}).values()]


def settings_of(model: Any) -> str:
    """The values of ``attn_implementation`` that a class of models says to support."""
    known = ["'eager'"]
    known += ["'sdpa'"] if model._supports_sdpa else []
    known += ["'flash_attention_2'"] if model._supports_flash_attn else []
    return "attn_implementation=" + " or ".join(known)


@functools.cache
def _chooses_itself(model: Any) -> bool:
    """Whether a class, or one of its file that it names, has a table of attention classes by setting.

    A registered name is no key in it. What other classes of the file do does not matter: the text model of
    DeepSeek-OCR 2 is in one file with a vision tower that has such a table.
    """
    there = vars(sys.modules[model.__module__])
    tables = {name for name, each in there.items() if isinstance(each, dict) and isinstance(each.get("eager"), type)}
    named, waiting = {model.__name__}, [model] if tables else []
    while waiting:
        words: set[str] = set()
        with suppress(OSError, TypeError):  # a class that was made without a source names nothing
            words.update(re.findall(r"\w+", inspect.getsource(waiting.pop())))
        found = {name for name in words - named if getattr(there.get(name), "__module__", "") == model.__module__}
        waiting += [there[name] for name in found if isinstance(there[name], (type, FunctionType))]
        named |= words
    return not named.isdisjoint(tables)


@functools.cache
def of_generate() -> frozenset[str]:
    """Arguments that say how a model writes: Kosmos-2's ``generate`` tells them its tower, too."""
    from transformers import GenerationConfig, GenerationMixin

    return frozenset(vars(GenerationConfig())) | inspect.signature(GenerationMixin.generate).parameters.keys()


@functools.cache
def _gives_sinks_of_tokens(model: Any) -> bool:
    """Whether its file calls attention with ``sinks``, which Inkling 2 makes of each token: no kernel takes them."""
    if not model.__module__.startswith("transformers.models."):
        return False
    try:
        return re.search(r"^ +sinks=", inspect.getsource(sys.modules[model.__module__]), re.MULTILINE) is not None
    except OSError:  # it has no source: its first call is refused
        return False


@functools.cache
def _calls(model: Any) -> bool:
    """Whether the code of a class, or of one that it is derived from, asks for the function, or has parts that may."""
    if getattr(model.config_class, "sub_configs", None):
        return True
    for each in model.__mro__:
        module = sys.modules.get(each.__module__)
        if module is None or not each.__module__.startswith(("transformers.models.", "transformers_modules.")):
            continue
        try:
            code = inspect.getsource(module)
        except OSError:  # it has no source
            return True
        if _CALL in code or "AutoModel" in code:
            return True
    return not model.__module__.startswith("transformers.models.")


_SEEN = "_layerzero_seen"
"""On a mask that causality alone says: its version, and how many keys its last query sees."""


def mark(mask: Tensor, seen: int) -> None:
    """Say that causality alone says a mask whose last query sees so many keys; without versions nothing can be said."""
    if not mask.is_inference():
        setattr(mask, _SEEN, (mask._version, seen))


def keys_seen(mask: Tensor, q_length: int) -> int:
    """How many keys the last query sees where this is, unchanged, a mask that causality alone says; 0 otherwise.

    For one query it hides nothing then.
    """
    if torch.compiler.is_compiling():
        return 0
    version, seen = getattr(mask, _SEEN, (None, 0))
    return seen if version is not None and version == mask._version and mask.shape[2] == q_length else 0


def ends_with_its_keys(q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **call: Any) -> bool:
    """Whether causality alone hides keys of a prompt's part that ends with the last of them.

    Transformers leaves the mask of its last query out then.
    """
    from transformers.masking_utils import sdpa_mask

    last = kv_length + kv_offset - 1
    if q_length == 1 or type(q_offset) is not int or q_offset + q_length - 1 != last:
        return False
    return sdpa_mask(q_length=1, kv_length=kv_length, q_offset=last, kv_offset=kv_offset, **call) is None


def check_only_causal(visible: Callable[..., Any], config: Any) -> None:
    """Refuse a mask that hides more than the future and what lies before a window: it is not made for one token.

    Checked at the beginning of windows, where one of another kind (chunks) differs.
    """
    from transformers.masking_utils import causal_mask_function

    if visible is causal_mask_function:
        return
    window = getattr(config, "sliding_window", None) or 0
    known = type(window) is int and window > 0
    for query in (window * 3, window * 1000 + 1) if known else ():
        zero, at, *keys = torch.tensor(
            [0, query, 0, query - window - 1, query - window, query - window + 1, query - 1, query], device="cpu"
        )
        seen = [bool(visible(zero, zero, at, each)) for each in keys]
        known = known and seen == [query - window < int(each) for each in keys]
    if not known:
        problem = (
            "wanted masks that hide the future and what lies before config.sliding_window, got one that hides more"
        )
        raise InvalidCallError("lz.optimize(graph=True)", [problem])
