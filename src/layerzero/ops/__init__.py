"""Operations and the functions that lead to them: a file or a folder a family, gathered here.

Add an operation: declare it in its family (:mod:`layerzero.ops.declaration`) and name it in the ``OPERATIONS`` there; a
new family is a new file or folder, with ``OPERATIONS``, ``FUNCTIONS`` and, where there are such things,
``ALIASES`` (names of several operations), ``EXPORTS`` (names that users find along with the functions) and ``LIMITS``
(kinds of limits that are its own, by the names that descriptors know them by) and ``DROP_INS`` (functions that stand
for another library's). Operations that take no tensors stand in ``PLAIN_OPERATIONS`` and ``PLAIN_FUNCTIONS``.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings

from layerzero.core import argument_errors
from layerzero.core.argument_errors import DropIn
from layerzero.core.limits import register_kinds
from layerzero.core.operation import Function, Operation
from layerzero.core.plain import PlainFunction

OPERATIONS: dict[str, Operation] = {}
FUNCTIONS: dict[str, Function] = {}
OPERATION_ALIASES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {}
"""Names for several operations: those that they cover, and the facts that they imply."""

PLAIN_OPERATIONS: dict[str, Operation] = {}
"""Operations without tensors: registered, chosen for and explained like the others, by a way of their own."""

PLAIN_FUNCTIONS: dict[str, PlainFunction] = {}
"""What users call of them."""

EXPORTS: dict[str, str] = {}
"""What families offer users besides their functions (a handle's class): the name and the module that it lives in."""

DROP_INS: dict[str, DropIn] = {}
"""Functions with another library's signature, by name."""


FORMER_NAMES: dict[str, str] = {}
"""Names that functions had before, with those of today."""


def current_name(name: str, stacklevel: int = 2) -> str:
    """The name that a function has today; a DeprecationWarning names it where the function had another one before."""
    if name not in FORMER_NAMES:
        return name
    text = f"lz.{name} is now lz.{FORMER_NAMES[name]}; version 0.2 removes the old name"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)
    return FORMER_NAMES[name]


def plain_function_of(name: str) -> PlainFunction | None:
    """The public function of an operation without tensors, by its name or the operation's; None else."""
    for function in PLAIN_FUNCTIONS.values():
        if name == function.name or any(each.name == name for each in function.operations):
            return function
    return None


def function_of(operation: str) -> Function | None:
    """The public function whose calls may be routed to an operation, None where there is none."""
    for function in FUNCTIONS.values():
        if any(each.name == operation for each in function.operations):
            return function
    return None


argument_errors.ELSEWHERE |= {
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "scaling": ("scale",),
    "is_causal": ("causal",),
    "window_size": ("window",),
    "logits_soft_cap": ("softcap",),
    "soft_cap": ("softcap",),
    "logit_cap": ("softcap",),
    "attn_bias": ("attn_mask",),
    "attention_mask": ("attn_mask",),
    "dropout": ("dropout_p",),
    "p": ("top_p",),
    "k": ("key", "top_k"),
    "q": ("query",),
    "v": ("value",),
    "alibi": ("alibi_slopes",),
    "s_aux": ("sinks",),
    "return_softmax_lse": ("return_lse",),
    "tensor_layout": ("layout",),
    "seqused_k": ("kv_lens",),
    "k_cache": ("key_cache",),
    "v_cache": ("value_cache",),
    "block_table": ("block_tables",),
    "cache_seqlens": ("context_lens",),
    "seq_lens": ("context_lens",),
    "k_scale": ("key_scale",),
    "v_scale": ("value_scale",),
    "epsilon": ("eps",),
    "variance_epsilon": ("eps",),
    "layer_norm_eps": ("eps",),
    "gamma": ("weight",),
    "beta": ("bias",),
    "x": ("input",),
    "hidden_states": ("input",),
    "minp": ("min_p",),
    "topk": ("top_k",),
    "topp": ("top_p",),
    "repetition_penalty": ("repetition",),
    "presence_penalty": ("presence",),
    "frequency_penalty": ("frequency",),
}
"""By a foreign name, ours that mean the same; a function has at most one of them.

A name of another meaning has no place here: the error must lead to the same numbers. Read in the signatures of torch
2.13, flash-attn 2.8, FlashInfer 0.7, xFormers 0.0.35, vLLM 0.33 and Transformers 5.24.
"""

argument_errors.NEEDLESS |= {"enable_gqa": ("key", "leave it out: key and value may have fewer heads than query")}
"""Foreign names for which nothing stands here: an argument of the functions that are meant, and what to do."""

for _family in sorted(each.name for each in pkgutil.iter_modules(__path__)):
    _module = importlib.import_module(f"{__name__}.{_family}")
    if not hasattr(_module, "OPERATIONS"):
        continue
    OPERATIONS |= {operation.name: operation for operation in _module.OPERATIONS}
    FUNCTIONS |= {function.name: function for function in _module.FUNCTIONS}
    PLAIN_OPERATIONS |= {operation.name: operation for operation in getattr(_module, "PLAIN_OPERATIONS", ())}
    PLAIN_FUNCTIONS |= {function.name: function for function in getattr(_module, "PLAIN_FUNCTIONS", ())}
    OPERATION_ALIASES |= getattr(_module, "ALIASES", {})
    DROP_INS |= {each.name: each for each in getattr(_module, "DROP_INS", ())}
    EXPORTS |= dict.fromkeys(getattr(_module, "EXPORTS", ()), _module.__name__)
    FORMER_NAMES |= {
        old: new for function in _module.FUNCTIONS for old, new in function.renamed.items() if new == function.name
    }
    register_kinds(getattr(_module, "LIMITS", {}))
