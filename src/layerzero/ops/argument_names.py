"""What other libraries call arguments: those of ours that mean the same, for the error that a stranger's name gets.

A name of another meaning has no place here: the error must lead to the same numbers. Read in the
signatures of torch 2.13, flash-attn 2.8, FlashInfer 0.7, xFormers 0.0.35, vLLM 0.33 and Transformers 5.24.
"""

from __future__ import annotations

ELSEWHERE: dict[str, tuple[str, ...]] = {
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
"""By a foreign name, ours that mean the same; a function has at most one of them."""

NEEDLESS: dict[str, tuple[str, str]] = {
    "enable_gqa": ("key", "leave it out: key and value may have fewer heads than query"),
}
"""Foreign names for which nothing stands here: an argument of the functions that are meant, and what to do."""
