"""Every model of the installed Transformers that reads text and can be made small: nothing of it may change.

    python benchmarks/every_model.py                 # some 200 of them in about four minutes, one line each
    python benchmarks/every_model.py gemma2 mamba    # some, by model type
    python benchmarks/every_model.py --device cuda   # steps are CUDA graphs there

Each is made with random weights from its own configuration, small sizes written over it (several ways are tried, since
configurations check themselves), and runs two rows, one padded on the left, in float32: stock, with
``attn_implementation="layerzero"``, after ``lz.optimize``, undone, and after ``lz.optimize(graph=True)``. Logits may be
0.001 of the largest away, 24 greedy tokens must be the same, and what is undone must give what it gave bit for bit.
What stock itself cannot run is told as such, and where
attention is refused when a model is loaded, `optimized` stands alone. A loop of a user's own that gives no positions
writes tokens, too.
"""

from __future__ import annotations

import argparse
import copy
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import layerzero as lz

TOKENS, ALLOWED, MOST_S, MOST_WEIGHTS = 24, 1e-3, 120, 30_000_000

HIDDEN = ("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "word_embed_proj_dim", "emb_dim")
FORWARD = (
    "intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "ffn_dim",
    "hidden_dim",
    "ffn_hidden_size",
)
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "num_layers", "n_layers")
LAYERS += ("num_decoder_layers", "num_encoder_layers")
HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head", "num_heads", "n_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SMALL: dict[str, Any] = {
    **dict.fromkeys(HIDDEN, 32),
    **dict.fromkeys(FORWARD, 48),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),  # attention that differs from uniform
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 1,
    "num_key_value_heads": 2,
    "sliding_window": 6,
    "rotary_dim": 4,
    "d_kv": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "state_size": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "dropout", "activation_dropout", "dropout_rate"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
}
WAYS: tuple[dict[str, Any], ...] = (
    {"head_dim": 8},
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 8},
    {"num_key_value_heads": 4, "num_hidden_layers": 8},
    {"head_dim": 8, "num_hidden_layers": 8, "mamba_d_ssm": 64},
    {"mamba_n_heads": 8, "mamba_d_head": 16, "hidden_size": 64, "num_hidden_layers": 6},
    {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    {"layer_types": ["conv", "full_attention"]},
    {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    dict.fromkeys((*EXPERTS, "moe_k"), 8) | {"moe_topk": 2},
    {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 8]},
)
"""What the sizes are tried with, in turn: heads of their own size, hybrids of several kinds of layers, more experts."""

PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "encoder_config")


class TooLongError(BaseException):
    """One model took more than its share; no Exception, for many a place here and in libraries catches those."""


def models(types: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """What each writes or reads, its type, and its class; a class once, of all types or of those named."""
    seen = set()
    for kind, names in (
        ("decoder", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("both", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("encoder", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ):
        for model_type, named in names.items():
            name = named[0] if isinstance(named, tuple) else named
            if name not in seen and (not types or model_type in types):
                seen.add(name)
                yield kind, model_type, name


def made(model_type: str, name: str, way: dict[str, Any], device: str) -> Any:
    """A small model of random weights. Raises: whatever its classes do with such a configuration."""
    kind = CONFIG_MAPPING[model_type]
    known = {each for one in kind.__mro__ for each in getattr(one, "__annotations__", {})}
    sizes = SMALL | way
    config = kind(**copy.deepcopy({each: value for each, value in sizes.items() if each in known}))
    for part in PARTS:
        inner = getattr(config, part, None)
        for each, value in sizes.items() if inner is not None and not isinstance(inner, dict) else ():
            if hasattr(inner, each):
                setattr(inner, each, value)
    model = getattr(transformers, name)
    with torch.device("meta"):
        count = sum(each.numel() for each in model._from_config(copy.deepcopy(config)).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{count / 1e6:.0f} million weights")
    torch.manual_seed(0)
    found = model._from_config(config).eval().float().to(device)
    for each in found.parameters():
        if each.dim() >= 2 and each.std() < 1e-3:  # zeros hide what is added to them
            torch.nn.init.normal_(each, std=0.1)
    return found


class Calls:
    """What every model is asked."""

    def __init__(self, kind: str, device: str) -> None:
        torch.manual_seed(1)
        ids = torch.randint(2, 99, (2, 13)).to(device)
        mask = torch.ones_like(ids)
        mask[1, :4] = ids[1, :4] = 0
        self.kind, self.text = kind, {"input_ids": ids, "attention_mask": mask}

    def logits(self, model: Any) -> torch.Tensor:
        """Of the tokens that are seen."""
        more = {"decoder_input_ids": self.text["input_ids"][:, :5]} if self.kind == "both" else {}
        output = model(**self.text, **more)
        found: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
        seen = self.text["attention_mask"].bool()
        return found[seen] if found.shape[:2] == seen.shape else found

    def tokens(self, model: Any) -> list[list[int]]:
        """Greedily; none of an encoder."""
        if self.kind == "encoder":
            return []
        told = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        written: list[list[int]] = model.generate(**self.text, **told).tolist()
        return written + (self.by_hand(model) if self.kind == "decoder" else [])

    def by_hand(self, model: Any) -> list[list[int]]:
        """Tokens of a loop that gives the model its tokens and the cache; none of a model that returns no cache."""
        ids, cache, written = self.text["input_ids"], None, []
        while len(written) < TOKENS:
            output = model(input_ids=ids, use_cache=True, **({} if cache is None else {"past_key_values": cache}))
            cache = getattr(output, "past_key_values", None) or getattr(output, "cache", None)
            if cache is None:
                return []
            ids = output.logits[:, -1:].argmax(-1)
            written.append(ids[:, 0].tolist())
        return written


@torch.no_grad()
def compared(calls: Calls, stock: Any, wanted: torch.Tensor, tokens: list[list[int]]) -> tuple[list[str], list[str]]:
    """What each way of LayerZero changes, and what was its part; a way that raises is told with its error."""
    changes, parts = [], []

    def way(name: str, model: Any) -> None:
        off = ((calls.logits(model) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)).item()
        changes.extend([f"{name}: off by {off:.1e}"] if not off <= ALLOWED else [])
        changes.extend([f"{name}: other tokens"] if calls.tokens(model) != tokens else [])

    def attention() -> None:
        alone = copy.deepcopy(stock)
        try:
            alone.set_attn_implementation("layerzero")
        except lz.InvalidCallError:  # it computes its own: refused when it is loaded, with what works
            return
        if alone.config._attn_implementation == "layerzero":
            parts.append("attention")
            way("attention", alone)

    def optimized() -> None:
        model = copy.deepcopy(stock)
        report = lz.optimize(model)
        parts.extend(["optimized"] if report.replaced else [])
        way("optimized", model)
        report.undo()
        changes.extend([] if torch.equal(calls.logits(model), wanted) else ["undone: not what it was"])
        if calls.kind != "encoder":
            lz.optimize(model, graph=True)
            way("in steps", model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (attention, optimized):
            try:
                each()
            except Exception as error:  # noqa: BLE001  # told, and counted
                changes.append(f"{each.__name__}: raises {type(error).__name__}: {error}")
    return changes, parts


@torch.no_grad()
def judged(kind: str, model_type: str, name: str, device: str) -> tuple[str, str]:
    """How it went (same, with what was LayerZero's part; CHANGED; or not run), and what to say of it."""
    calls, why = Calls(kind, device), ""
    for way in WAYS:
        try:
            stock = made(model_type, name, way, device)
            wanted, tokens = calls.logits(stock), calls.tokens(stock)
            if not wanted.isfinite().all() or not torch.equal(calls.logits(stock), wanted):
                why = why or "stock gives no numbers, or not the same twice"
                continue
        except Exception as error:  # noqa: BLE001  # stock's own, with a configuration that nobody made for it
            why = why or f"{type(error).__name__}: {error}".replace("\n", " ")[:100]
            continue
        changes, parts = compared(calls, stock, wanted, tokens)
        if changes:
            return "CHANGED", "; ".join(changes).replace("\n", " ")[:300]
        return f"same, {' and '.join(parts) or 'untouched'}", ""
    return "not run", why


def within(seconds: int, run: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Run something that is interrupted when it takes longer."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        return run()
    except TooLongError:
        return "not run", f"took more than {seconds} s"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types, such as llama; default: all")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    chosen = list(models(asked.types))
    if unknown := set(asked.types) - {model_type for _, model_type, _ in chosen}:
        parser.error(f"types: wanted model types that read or write text, got {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    lz.register_with_transformers()
    counts: Counter[str] = Counter()
    for kind, model_type, name in chosen:
        outcome, said = within(MOST_S, lambda given=(kind, model_type, name): judged(*given, asked.device))
        counts[outcome] += 1
        print(f"{outcome:29} {name} ({model_type}){': ' if said else ''}{said}", flush=True)
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return int(counts["CHANGED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
