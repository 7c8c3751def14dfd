"""What belongs to one operation is named in ``ops/`` and ``backends/`` alone: a new family touches its own folder.

Names are those that the declared operations bring, so a new family is covered as soon as it is declared. Read are the
strings, attributes, fields, parameters and keywords of all other code; what documents it (docstrings, comments) is
passed over.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import layerzero
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, OPERATIONS

ROOT = Path(layerzero.__file__).parent
AT_HOME = ("ops", "backends")

GENERAL = {
    "cast": "a step of any plan whose tensors have another dtype",
    "dtype": "a fact that calls of all operations have",
    "generator": "torch's source of random numbers, wherever some are drawn",
    "input": "every operation, command and stream has one",
    "output": "every operation, command and stream has one",
    "key": "of a dictionary, a cache, an order",
    "sampling": "a kind of operations, which each of them has",
    "seed": "of random numbers, wherever some are drawn",
    "temperature": "of a machine, which times depend on",
    "value": "of a setting, a parameter, a dictionary",
    "layout": "a fact that calls of all operations have",
}
"""Words that an operation uses and that mean something else, or something of all operations, everywhere."""

WORDS = {
    "alpha": "the chance of a false alarm in statistics",
    "batch": "calls or sentences that are worked on together",
    "bias": "of a module",
    "block_size": "of an engine's cache: tokens a page",
    "decodes": "what a tokenizer does",
    "features": "of a machine, a library, a project",
    "group": "entry points, processes, calls that belong together",
    "groups": "things that belong together",
    "hidden": "what nobody sees",
    "ids": "of kernels",
    "joined": "put together",
    "k": "a letter",
    "last": "the latest, the end of a row",
    "length": "how long something is",
    "limit": "what a kernel demands",
    "loss": "of accuracy, of a memory's content; a family of operations",
    "m": "a letter: python -m, minutes",
    "max_blocks": "blocks of a launch grid",
    "n": "a letter: a count, a line break",
    "packed": "put together",
    "pages": "of an operating system's memory",
    "padding": "what fills up a batch of texts, a table, an axis",
    "parents": "of a folder",
    "per": "a preposition",
    "presence": "being there",
    "rows": "of a table, a database, a tensor",
    "sample": "a time that was measured",
    "scale": "of a plot",
    "scoring": "how kernels are ranked",
    "seq": "of a message",
    "seq_len": "tokens of a sequence that a whole model gets: what a bucket of a plan is named by",
    "step": "what to do next, an advance",
    "stride": "of a tensor's axis in memory, of a window over text",
    "table": "of text, of kept choices, of priors",
    "target": "what an order, a limit or a thread is meant for",
    "tensor": "what holds numbers",
    "up": "an adverb",
    "weight": "how often something is drawn; of a font",
}
"""Words that mean something else within a text, or as an attribute or a parameter. A string that is such a word alone
may name an operation's fact, so it counts."""

_EXAMPLES = "help and pages that show how real calls are asked about"
_OPTION = "an option of commands for the calls that most are asked about"
_SPECIFIED = "a parameter that the specification gives a public function"
_DESCRIBED = "the descriptor's format has fields for bounds of this size, and published files have them"
_VERSION_1 = "version 1.0 of the descriptor had flags for attention alone, which are translated into its arguments"
_CATALOGUE = "the specification's codes of heads, and the catalogue of codes with their sentences is closed"
_ENGINE = "a serving engine's attention layers are calls of these functions, with these arguments"
_TRANSFORMERS = "an attention function for Transformers: its arguments are what it translates"
_EXPERTS = "activation alpha down_bias experts gate_up_bias limit moe_experts swiglu_oai"
_VLLM = (
    "alibi_slopes append_paged_kv_ append_quantized_kv_ attention causal destination key_scale kv_cache_dtype "
    "max_seqlen_k max_seqlen_q num_heads num_kv_heads query ragged_attention scale sinks slot_mapping softcap starts "
    "value_scale window"
)
_REPLACED = "a model's modules, whose parameters have these names, and what is called in their place"
_LAYER = "a decoder layer of Transformers: its modules and arguments are named so, and so is what is called instead"
_DRAWN = "the next tokens of a model, which its functions draw"
_CACHE = "a cache of Transformers as tensors that a captured step reads, and what that step is told by"
_PADDED = "encoders with padding taken out: what a batch of texts has, and what attends within a packed row"
_DRAFTS = "drafts have tokens, trees nodes, and the caches that are matched have heads and pages"
_MEMORY = "how a tensor lies in memory: dense in its rows"

_OF_OPTIMIZE = (
    ("attention/transformers", _REPLACED, "attention query"),
    ("attention/diffusers", _REPLACED, "attention heads out_features rope_"),
    ("layers/encoders", _REPLACED, "activation attention bias heads layer_norm linear mlp qkv qkv_linear weight"),
    ("attention/dynamic_cache", _CACHE, "append_paged_kv_ tokens"),
    ("modules/coded_experts", _REPLACED, f"{_EXPERTS} activations packed rows weight weight_scale"),
    ("modules/experts", _REPLACED, f"{_EXPERTS} silu"),
    ("swaps/joined_codes", _REPLACED, "activations"),
    ("models/generation", _DRAWN, "greedy k logits min_p sample_topk sample_topk_topp sample_topp tokens top_k top_p"),
    (
        "layers/layer",
        _LAYER,
        (
            "bias cos eps heads is_causal k_bias k_weight linear norm packed_k packed_q packed_v plus_one positions "
            "q_bias q_weight qk_norm_rope qkv_linear rope_ sin split_qkv_norm_rope v_bias weight"
        ),
    ),
    ("layers/layer_timing", _LAYER, "activation heads kv tokens"),
    ("layers/inner", _LAYER, "activation cos positions sin"),
    ("layers/find", _LAYER, "add_residual_rms_norm_ attention heads linear mlp positions rope_"),
    ("swaps/codes", _REPLACED, "activations bias quantize quantized_linear weight weight_format"),
    ("swaps/weights", _REPLACED, "bias linear quantized weight"),
    ("modules/quantised", _REPLACED, "activations block_size in_features scale weight weight_scale"),
    ("entrance", _REPLACED, "activations padding"),
    ("modules/int8", _REPLACED, "activations bias norm packed quantized quantized_linear"),
    ("modules/weights", _REPLACED, "activations quantized weight"),
    ("models/padding", _PADDED, "groups tokens"),
    ("models/stacks", _PADDED, "is_causal packed padding positions ragged_attention rows tokens"),
    ("modules/find", _REPLACED, "bias conv1d conv2d dilation packed weight"),
    ("modules/norms", _REPLACED, "add_residual_rms_norm_ add_rms_norm_ bias eps layer_norm norm rms_norm weight"),
    (
        "modules/products",
        _REPLACED,
        ("activation bias down_bias gate_bias linear mlp packed packed_down packed_gate packed_up up_bias weight"),
    ),
    ("times/report", _LAYER, "padding positions tokens"),
    ("times/workload", _LAYER, "logits tokens"),
    ("selection", _REPLACED, "attention padding positions step"),
    (
        "models/step_cache",
        _CACHE,
        ("append_paged_kv_ attention block_tables context_lens paged_attention query sinks softcap tokens window"),
    ),
    ("models/training", _REPLACED, "eps linear_cross_entropy logits loss norm out_dtype reduction rms_norm"),
    (
        "models/gguf_steps",
        _LAYER,
        (
            "activations attention bias eps head_dim heads mlp norm quantized_linear silu step weight "
            "weight_format window"
        ),
    ),
    ("models/steps", _CACHE, "attention logits max_context_len step tokens"),
    ("swaps/candidate", _REPLACED, "eps num_heads"),
    ("swaps/swap", _REPLACED, "weight"),
)
"""Files of ``lz.optimize``, each with why and which names it may use."""

ALLOWED: dict[str, dict[str, str]] = {
    "inspection/descriptors.py": dict.fromkeys(
        ("attn_mask", "causal", "dropout_p", "head_dim", "heads", "seq_k", "seq_q", "value_dim"), _VERSION_1
    ),
    "cli/app.py": dict.fromkeys(
        (
            *("attention", "attention.gqa", "attention.gqa.decode", "attn_mask", "causal", "kv"),
            *("rms_norm", "softcap"),
        ),
        _EXAMPLES,
    ),
    "cli/calls.py": {
        **dict.fromkeys(("attention", "attention.causal", "layer_norm", "norm", "norm.rms", "rms_norm"), _EXAMPLES),
        **dict.fromkeys(("attn_mask", "return_lse", "softcap", "window"), _EXAMPLES),
        **dict.fromkeys(("causal", "query"), _OPTION),
    },
    "cli/demo.py": dict.fromkeys(
        ("attention", "linear", "logits", "packed", "tokens"), "calls of a model, for what is shown"
    ),
    "cli/demo_screen.py": dict.fromkeys(("attention", "packed"), _EXAMPLES),
    "cli/checks.py": dict.fromkeys(("norm", "rms_norm"), _EXAMPLES),
    "cli/perfdb.py": {"rows": "of the database, in what it writes as JSON"},
    "cli/perfdb_exchange.py": {"attention": _EXAMPLES, "rows": "of the database, in what it writes as JSON"},
    "cli/question.py": dict.fromkeys(("causal", "kv"), _OPTION),
    "cli/flags.py": dict.fromkeys(("causal", "kv"), _OPTION),
    "core/capability.py": dict.fromkeys(("head_dim", "seq_k", "seq_q"), _DESCRIBED),
    "core/eager_state.py": {"attention": "torch's own switches of its kernels, told to people"},
    "core/emulation.py": {"linear": "torch's own function, which is timed"},
    "core/evidence.py": {"n": "any size, where the number of axes is told", "rows": _MEMORY},
    "core/operation.py": {"tensor": "a kind of operation: one that works on tensors"},
    "core/reasons.py": dict.fromkeys(("heads", "kv", "query"), _CATALOGUE),
    "engine/accelerator.py": {"tensor": "torch.Tensor, as native code is told it"},
    "engine/cache.py": {"last": "a slot: the latest call"},
    "engine/function_kernels.py": {"head_dim": f"{_SPECIFIED}: max_head_dim"},
    "integrations/diffusers.py": dict.fromkeys(
        ("attention", "attn_mask", "dropout_p", "is_causal", "query", "return_lse"), "diffusers' names for what it asks"
    ),
    "integrations/diffusers_rotary.py": dict.fromkeys(
        ("cos", "heads", "interleaved", "out_features", "positions", "rope_", "sin"),
        "attributes of diffusers' attentions; what their rotations are given, and what is called in their place",
    ),
    **{
        f"integrations/optimize/{file}.py": dict.fromkeys(names.split(), reason) for file, reason, names in _OF_OPTIMIZE
    },
    "integrations/paged.py": dict.fromkeys(
        (
            *("causal", "cu_seqlens_q", "decodes", "longest_k", "longest_q", "max_context_len", "max_seqlen_q"),
            *("alibi_slopes", "paged_attention", "query", "sinks", "starts", "step", "tree_mask"),
        ),
        _ENGINE,
    ),
    "integrations/sglang.py": dict.fromkeys(
        (
            *("attention", "causal", "head_dim", "heads", "page_size", "query", "softcap", "tokens", "window"),
            *("batch_size", "key_scale", "tree_mask", "value_scale", "verified"),
        ),
        _ENGINE,
    ),
    "integrations/transformers_experts.py": dict.fromkeys(
        (
            *("activation", "alpha", "down_bias", "experts", "gate_up_bias", "limit", "moe_experts", "norm"),
            "swiglu_oai",
        ),
        "Transformers' interface for experts, and what is called in its place",
    ),
    "integrations/vllm_operators.py": dict.fromkeys(
        (
            *("add_residual_rms_norm_", "approximate", "gelu_mul", "interleaved", "positions", "residual", "rms_norm"),
            *("activation", "query", "rope_", "silu_mul"),
        ),
        "vLLM's layers, and what is called in their place",
    ),
    "integrations/vllm_latent.py": dict.fromkeys(
        (
            *("alibi_slopes", "append_paged_kv_", "attention", "causal", "kv_cache_dtype", "max_context_len"),
            *("max_seqlen_k", "max_seqlen_q", "mla_attention", "num_heads", "num_kv_heads", "ragged_attention"),
            *("slot_mapping", "step"),
        ),
        _ENGINE,
    ),
    "integrations/vllm.py": dict.fromkeys(_VLLM.split(), _ENGINE),
    "integrations/tokenizers.py": dict.fromkeys(("padding", "stride"), "what Transformers' tokenizers are called with"),
    "integrations/torch.py": dict.fromkeys(
        ("attention", "attn_mask", "dropout_p", "is_causal", "query"),
        "torch's own function of that name and its arguments",
    ),
    "integrations/transformers.py": dict.fromkeys(
        (
            *("attention", "attn_mask", "block_indices", "dropout_p", "heads", "is_causal", "query", "sinks"),
            *("causal", "softcap", "window"),
        ),
        _TRANSFORMERS,
    ),
    "integrations/transformers_patches.py": dict.fromkeys(
        ("attention", "cu_seqlens_k", "cu_seqlens_q", "query", "ragged_attention", "sinks"), _TRANSFORMERS
    ),
    "serving/solve.py": dict.fromkeys(("batch", "seq_len"), _SPECIFIED),
    "serving/speculation.py": dict.fromkeys(("nodes", "tokens"), _DRAFTS),
    "serving/speculative_pairs.py": dict.fromkeys(("heads", "nodes", "page_size", "target", "tokens"), _DRAFTS),
    "engine/headroom.py": {"query": "a method of torch's streams"},
    "testing/compare.py": {"conv": "torch's name of what a precision is for"},
    "tuning/storage/rows.py": {"n": "any size, where the number of axes is told", "rows": _MEMORY},
    "tuning/measurement/online.py": {"query": "a method of torch's events"},
    "tuning/measurement/tune.py": {"head_dim": _SPECIFIED},
}
"""By file, the names that it may use, each with its reason."""


class Leak(NamedTuple):
    place: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"src/layerzero/{self.place}:{self.line}: {self.name}"


def operation_names() -> set[str]:
    """Names of operations, of what they begin with, and of functions."""
    found = {*OPERATIONS, *OPERATION_ALIASES, *FUNCTIONS}
    for operation in OPERATIONS:
        parts = operation.split(".")
        found |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return found


def own_names() -> set[str]:
    """Names of tensors, axes, parameters and facts, and what questions may call them."""
    found: set[str] = {each.name for function in FUNCTIONS.values() for each in function.parameters}
    for operation in OPERATIONS.values():
        schema = operation.schema
        for tensor in (*schema.inputs, *schema.outputs):
            found |= {tensor.name, *tensor.shape_vars, *tensor.broadcast}
        found |= {each.name for each in (*schema.params, *schema.axes)}
        found |= {*operation.derived, *operation.aliases, *operation.fixed}
    return {name for name in found if name.isidentifier()}


NAMES = operation_names() | own_names()
WORD = re.compile(r"[A-Za-z_][\w.]*")


def words_of(text: str) -> set[str]:
    """The names in a text: the text itself, or its words. A glob of operations names what it begins with."""
    if text in NAMES:
        return {text}
    found = {word.rstrip(".") for word in WORD.findall(text)}
    parts = {part for word in found for part in word.split(".")}
    return (found | parts) & NAMES - WORDS.keys()


def identifier_of(node: ast.AST) -> str | None:
    """What an attribute, a field, a parameter or a keyword is called."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return node.arg if isinstance(node, ast.arg | ast.keyword) else None


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that an operation might have named."""
    nodes = list(ast.walk(tree))  # once: each walk of the package took 0.9 s
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    formats = {
        id(part)
        for node in nodes
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None
        for part in ast.walk(node.format_spec)
    }
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documentation | formats:
                yield from ((node.lineno, name) for name in sorted(words_of(node.value)))
        else:
            name = identifier_of(node)
            if name in NAMES and name not in WORDS:
                yield node.lineno, name  # type: ignore[attr-defined]


@functools.cache
def leaks() -> list[Leak]:
    """Of every file, once: two tests ask, and a process that runs neither looks at none."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] not in AT_HOME:
            told = names_in(ast.parse(path.read_text()))
            found += [Leak(place.as_posix(), line, name) for line, name in told if name not in GENERAL]
    return found


def test_what_is_one_familys_stays_in_its_folder():
    found = [leak for leak in leaks() if leak.name not in ALLOWED.get(leak.place, {})]
    where = "\n".join(map(str, found))
    words = "a word that means something of its own there belongs into WORDS above, with what it means"
    assert not found, (
        f"names of operations' own; wanted them in ops/ or backends/ alone, got them in:\n{where}\n{words}"
    )


def test_no_exception_outlives_what_it_excuses():
    """A file that was mended leaves the list, so that nothing comes back under its name."""
    had = {(leak.place, leak.name) for leak in leaks()}
    idle = [f"{place}: {name}" for place, names in ALLOWED.items() for name in names if (place, name) not in had]
    assert not idle, f"ALLOWED: take out what no file has any more: {idle}"
    strangers = [name for name in (*GENERAL, *WORDS) if name not in NAMES]
    assert not strangers, f"GENERAL, WORDS: take out what no operation is called: {strangers}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('facts["head_dim"]', ["head_dim"]),
        ('facts["rows"]', ["rows"]),
        ('f"{count} rows of {query} heads"', ["heads"]),
        ('f"{size:n}"', []),
        ('"norm.*", "attention.gqa.*", "attention.flash"', ["attention", "attention.gqa", "norm"]),
        ('"headset, causality"', []),
        ("call(causal=True)", ["causal"]),
        ("plan.window", ["window"]),
        ("def ask(kv_heads, rows): ...", ["kv_heads"]),
        ("class Call:\n    causal: bool = False", ["causal"]),
        ('def ask():\n    """The query\'s heads."""', []),
        ("window = 3  # seq_q", []),
    ],
)
def test_names_are_found_where_they_are_used(source, found):
    assert sorted({name for _, name in names_in(ast.parse(source))}) == found
