"""Whether a model of Transformers can have its attention computed by another library, asked while it is made.

Transformers lets every registered name pass (5.23), whatever a model does with it: models that compute attention by
themselves then run as before and say nothing, fail with a KeyError, or add a mask of another kind to their scores.
There is no place to be asked, so the method that checks the names of all models is wrapped; for other names it is what
it was.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Collection
from typing import Any

from layerzero.core.errors import InvalidCallError, LayerZeroWarning
from layerzero.integrations.transformers_batching import serve_batches

_CHECK = "_check_and_adjust_attn_implementation"
_CALL = "ALL_ATTENTION_FUNCTIONS"
"""How code of Transformers names the functions from which a model takes the one that was asked for."""


def check_at_load(names: Collection[str]) -> None:
    """Have models checked when they are made, or switched, to one of these names; doing it again changes nothing."""
    from transformers import PreTrainedModel

    original = getattr(PreTrainedModel, _CHECK)
    if hasattr(original, "_layerzero"):
        return

    @functools.wraps(original)
    def checked(self: Any, attn_implementation: str | None, *others: Any, **named: Any) -> Any:
        if attn_implementation in names:
            check_class(type(self))
            if hasattr(self, "generate_batch"):
                serve_batches(names)
        return original(self, attn_implementation, *others, **named)

    checked._layerzero = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, _CHECK, checked)


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
        warnings.warn(
            f"attn_implementation='layerzero': {name} computes no attention through Transformers' AttentionInterface, "
            "so nothing of it is LayerZero's. lz.optimize(model) may find norms and products in it",
            LayerZeroWarning,
            stacklevel=4,
        )


def settings_of(model: Any) -> str:
    """The values of ``attn_implementation`` that a class of models says to support."""
    known = ["'eager'"]
    known += ["'sdpa'"] if model._supports_sdpa else []
    known += ["'flash_attention_2'"] if model._supports_flash_attn else []
    return "attn_implementation=" + " or ".join(known)


def _chooses_itself(model: Any) -> bool:
    """Whether its file has a table of attention classes by setting, in which a registered name is no key."""
    there = vars(sys.modules[model.__module__]).values()
    return any(isinstance(each, dict) and "eager" in each and isinstance(each["eager"], type) for each in there)


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
        except OSError:  # it has no source: nobody can tell
            return True
        if _CALL in code or "AutoModel" in code:
            return True
    return not model.__module__.startswith("transformers.models.")
