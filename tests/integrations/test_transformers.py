"""``attn_implementation="layerzero"`` on tiny random models, and on a real one where its package is installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import GQA, SIZES, padded
from attending_models import bert, llama, pair

from layerzero.integrations import transformers as integration

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


pytestmark = [
    pytest.mark.usefixtures("registered", "seeded"),
    # gradients through a softcap or sinks have no kernel on the CPU but the reference, and LayerZero says so once
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
]


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
    pytest.importorskip("transformers", "5.5", reason="in transformers 5.4 it computes attention by itself")
    return transformers.ModernBertForMaskedLM, transformers.ModernBertConfig(
        **SIZES, local_attention=8, global_attn_every_n_layers=2, attention_dropout=0.0, reference_compile=False
    )


ENCODERS = [bert, modernbert]
DECODERS = [llama, mistral, gemma2, gpt_oss]


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


@pytest.mark.parametrize("side", ["none", "right"])
def test_a_model_that_does_not_support_sdpa_hides_nothing_without_a_mask(side: str) -> None:
    """ALIGN's attention does not say that it is not causal, and gets no mask where nothing is padded."""
    eager, ours = pair(lambda: (transformers.AlignTextModel, transformers.AlignTextConfig(**SIZES)))
    batch = padded("right")
    if side == "none":
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    wanted, got = (each(**batch).last_hidden_state for each in (eager, ours))
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(got[seen], wanted[seen], atol=2e-5, rtol=1e-4)


def test_the_first_call_of_a_model_that_does_not_support_sdpa_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kind of mask it gets was looked up in its first call that was not."""
    for known in ("_checked", "_float_masked"):
        monkeypatch.setattr(integration, known, set())
    eager, ours = pair(lambda: (transformers.AlignTextModel, transformers.AlignTextConfig(**SIZES)))
    ids = padded("right")["input_ids"]
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(ours, backend="eager", fullgraph=True)(ids).last_hidden_state
    torch.testing.assert_close(got, eager(ids).last_hidden_state, atol=2e-5, rtol=1e-4)


def test_a_model_that_onnx_is_made_of_has_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter knew no function for LayerZero's attention."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    _, ours = pair(bert)
    program = torch.export.export(ours, (padded("none")["input_ids"],), strict=False)
    assert not [each for each in program.graph.nodes if "layerzero" in str(each.target)]


def test_onnx_is_made_of_no_packed_row_as_if_it_were_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    _, ours = pair(llama)

    class Packed(torch.nn.Module):
        def forward(self, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            named = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
            return integration.attention_forward(ours.model.layers[0].self_attn, rows, rows, rows, None, **named)[0]

    call = torch.randn(1, 4, 5, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    program = torch.export.export(Packed().eval(), call, strict=False)
    assert [each for each in program.graph.nodes if "ragged" in str(each.target)]


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


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_is_that_of_torch(compiled: bool) -> None:
    """On the CPU both drop in the same kernel, so the same seed drops the same weights."""
    kind, config = llama()
    config.attention_dropout = 0.5
    stock = kind._from_config(config, attn_implementation="sdpa").train()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="layerzero").train()
    ours.load_state_dict(stock.state_dict())
    results = []
    for model in (stock, ours, ours):
        run = torch.compile(model, backend="aot_eager") if compiled else model
        torch.manual_seed(len(results) // 2)
        results.append(run(**padded_once()).logits)
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
