"""Tiny random models of the kinds that serving engines know, as folders that they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ALL: dict[str, Any] = {"vocab_size": 512, "bos_token_id": 256, "eos_token_id": 257}
_SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 1024}
_SEQUENTIAL = _ALL | _SIZES | {"initializer_range": 0.1}
_LLAMA = _SEQUENTIAL | {"intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32}
_EXPERTS = _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}

DECODERS: dict[str, dict[str, Any]] = {
    "Llama": _LLAMA,
    "Mistral": _LLAMA | {"sliding_window": 40},
    "Gemma2": _LLAMA
    | {"sliding_window": 40, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32, "pad_token_id": 0},
    "Qwen2": {name: value for name, value in _LLAMA.items() if name != "head_dim"},
    "Qwen3": _LLAMA,
    "GPT2": _ALL | {"n_embd": 128, "n_layer": 3, "n_head": 4, "initializer_range": 0.1},
    "OPT": _ALL | _SIZES | {"ffn_dim": 256, "word_embed_proj_dim": 128, "init_std": 0.1},
    "Bloom": _ALL | {"hidden_size": 128, "n_layer": 3, "n_head": 4, "initializer_range": 0.1},  # ALiBi
    "Falcon": {name: value for name, value in _SEQUENTIAL.items() if "position" not in name}
    | {"multi_query": True, "new_decoder_architecture": False, "alibi": False},
    "Phi": _SEQUENTIAL | {"intermediate_size": 256},
    "Mixtral": _EXPERTS,
    "GptOss": _EXPERTS | {"sliding_window": 40, "pad_token_id": 0, "rope_parameters": _YARN},  # sinks
}
"""By Transformers' name of the kind, the arguments of its configuration."""

LATENT = _SEQUENTIAL | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"q_lora_rank": None, "first_k_dense_replace": 3, "intermediate_size": 256, "num_key_value_heads": 4}
"""DeepSeek: widths of the latent vector and of its rotated part that vLLM's own kernel for CPUs has."""

ENCODERS = {"Bert": _ALL | _SIZES | {"num_hidden_layers": 2, "intermediate_size": 256}}


AUDIO = 32000
"""Samples that a Whisper hears at once, 2 s of them: 100 places of its encoder."""


def write(root: Path, kind: str) -> Path:
    """Write one, from the same random numbers each time."""
    import torch
    import transformers

    if kind == "Whisper":
        return _whisper(root / kind)
    encodes, head = kind in ENCODERS, {"GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    arguments = ENCODERS[kind] if encodes else DECODERS.get(kind, LATENT)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model" if encodes else f"{kind}{head}")
    model(getattr(transformers, f"{kind}Config")(**arguments)).save_pretrained(root / kind)
    if encodes:  # vLLM pools nothing without a tokenizer
        from tokenizers import Tokenizer, models

        words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]"))  # no password
        named = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(root / kind)
    return root / kind


def _whisper(folder: Path) -> Path:
    """An encoder of sound and a decoder that attends to it."""
    import torch
    import transformers

    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    words = {word: place for place, word in enumerate([*special, *map(chr, range(33, 127))])}
    tokens = transformers.WhisperTokenizer(vocab=words, merges=[], unk_token=special[0])  # no password
    tokens.add_special_tokens({"additional_special_tokens": special[1:]})
    sound = transformers.WhisperFeatureExtractor(chunk_length=AUDIO // 16000)
    transformers.WhisperProcessor(sound, tokens).save_pretrained(folder)
    sizes = {"d_model": 128, "max_source_positions": AUDIO // 320, "max_target_positions": 128, "vocab_size": 512}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 256}
    named = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **named, init_std=0.1))
    model.save_pretrained(folder)
    return folder
