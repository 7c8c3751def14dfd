"""Many architectures of Transformers, small and random: what eager attention gives, LayerZero's gives."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import layerzero as lz

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

import architectures  # noqa: E402  # it imports transformers
from architectures import Architecture, inputs, padded  # noqa: E402

from layerzero.engine.dispatch import ENGINE  # noqa: E402
from layerzero.integrations import transformers as integration  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registered", "quiet_transformers"),
    # gradients through a softcap or sinks have no kernel on the CPU but the reference, and LayerZero says so once
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

EVERY = architectures.everything()
DECODERS = architectures.decoders()
QUICK = {"Llama", "Mistral", "Gemma2", "GptOss", "DeepseekV3", "Qwen3Moe", "Qwen3Next", "Bert", "Bart", "ViT", "Llava"}
"""One of each kind, for every run of the tests."""


def named(given: list[Architecture], quick: frozenset[str] | set[str] = frozenset()) -> Any:
    return pytest.mark.parametrize(
        "architecture",
        [pytest.param(each, id=each.name, marks=[] if each.name in quick else pytest.mark.slow) for each in given],
    )


def result(output: Any) -> torch.Tensor:
    return next(output[name] for name in ("logits", "logits_per_image", "last_hidden_state") if name in output)


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """In units of the largest value: layers without a norm at their end make large ones."""
    largest = wanted.abs().max()
    torch.testing.assert_close(got / largest, wanted / largest, atol=2e-5, rtol=1e-4)


def assert_same_calls(pair: tuple[Any, Any], call: dict[str, Any]) -> None:
    with torch.no_grad():
        wanted, got = (result(model(**call)) for model in pair)
    seen = call.get("attention_mask")
    if seen is not None and seen.shape == wanted.shape[:2]:  # what stands at padded positions means nothing
        wanted, got = wanted[seen.bool()], got[seen.bool()]
    assert_equal(got, wanted)


def test_there_are_more_than_forty_of_all_kinds() -> None:
    assert len({each.name for each in EVERY}) >= 60
    kinds = {each.kind for each in EVERY}
    assert kinds >= {"dense", "sliding", "softcap", "sinks", "MLA", "experts", "hybrid", "encoder", "twice"}
    assert kinds >= {"vision", "audio", "speech", "both"}
    assert {each.name for each in EVERY} >= QUICK


@named(EVERY, QUICK)
def test_left_padded_rows_give_what_eager_gives(architecture: Architecture) -> None:
    assert_same_calls(architecture.pair(), inputs(architecture.kind, "left"))


@named(EVERY)
def test_right_padded_and_full_rows_give_what_eager_gives(architecture: Architecture) -> None:
    pair = architecture.pair()
    for side in ("right", "none"):
        assert_same_calls(pair, inputs(architecture.kind, side))


@named([each for each in DECODERS if each.kind != "hybrid"], {"Llama"})
def test_packed_rows_do_not_see_each_other(architecture: Architecture) -> None:
    pair = architecture.pair()
    ids, positions = torch.randint(2, 99, (1, 17)), torch.cat([torch.arange(9), torch.arange(8)])[None]
    with torch.no_grad():
        wanted, got = (model(input_ids=ids, position_ids=positions, use_cache=False).logits for model in pair)
    assert_equal(got, wanted)


@named([*DECODERS, *architectures.writers()], {"Mistral", "T5"})
def test_chunks_through_a_cache_give_what_eager_gives(architecture: Architecture) -> None:
    pair = architecture.pair()
    ids = torch.randint(2, 99, (2, 16))
    twice = architecture.kind == "twice"
    name, told = ("decoder_input_ids", {"input_ids": ids}) if twice else ("input_ids", {})
    logits = []
    with torch.no_grad():
        for model in pair:
            cache, parts = None, []
            for start, stop in ((0, 9), (9, 14), (14, 15), (15, 16)):
                output = model(**told, **{name: ids[:, start:stop]}, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                parts.append(output.logits)
            logits.append(torch.cat(parts, 1))
    assert_equal(logits[1], logits[0])


@named([each for each in DECODERS if each.kind != "hybrid"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating_writes_the_same_tokens(architecture: Architecture, cache: str) -> None:
    batch = padded("left")
    told = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    wanted, got = (model.generate(**batch, **told) for model in architecture.pair())
    assert got.tolist() == wanted.tolist()


@named(EVERY)
def test_gradients_are_those_of_eager(architecture: Architecture) -> None:
    pair = architecture.pair()
    call = inputs(architecture.kind, "left")
    for model in pair:
        output = result(model(**call))
        seen = call.get("attention_mask")
        rows = output[seen.bool()] if seen is not None and seen.shape == output.shape[:2] else output
        rows.float().square().mean().backward()
    gradients = [{name: each.grad for name, each in model.named_parameters()} for model in pair]
    for name, wanted in gradients[0].items():
        assert (wanted is None) == (gradients[1][name] is None), name
        if wanted is not None:
            torch.testing.assert_close(gradients[1][name], wanted, atol=1e-4, rtol=2e-3, msg=name)


@pytest.mark.slow
@named([each for each in EVERY if each.name in {"Llama", "Gemma2", "Bert", "ViT", "Qwen3", "DistilBert"}])
def test_it_compiles_as_one_graph(architecture: Architecture) -> None:
    _, ours = architecture.pair()
    call = inputs(architecture.kind, "left")
    with torch.no_grad():
        wanted = result(ours(**call))
        try:
            got = result(torch.compile(ours, fullgraph=True, backend="eager")(**call))
        finally:
            torch._dynamo.reset()
    assert_equal(got, wanted)


# what is refused, and when

ITS_OWN = {
    "BloomModel": ({"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}, "'eager'"),
    "FalconModel": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99},
        "'eager' or 'sdpa'",
    ),
    "DebertaModel": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99},
        "'eager'",
    ),
    "SamVisionModel": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
        "'eager' or 'sdpa'",
    ),
}
"""Scores of their own, a table of classes without our name, and one that would call nothing and say nothing."""


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch 2.11
@pytest.mark.parametrize("name", ITS_OWN)
def test_a_model_with_attention_of_its_own_is_refused_when_it_is_made(name: str) -> None:
    sizes, works = ITS_OWN[name]
    config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**sizes)
    wanted = f"wanted a model that calls .*, got {name}, which computes it by itself; load it with attn_impl.*={works}"
    with pytest.raises(lz.InvalidCallError, match=wanted):
        getattr(transformers, name)._from_config(config, attn_implementation="layerzero")
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_a_model_is_served_whose_file_has_a_table_of_classes_that_it_does_not_use() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.GitVisionConfig(**sizes, image_size=16, patch_size=8)
    model = transformers.GitVisionModel._from_config(config, attn_implementation="layerzero").eval()
    pictures = torch.randn(1, 3, 16, 16)
    got = model(pictures).last_hidden_state
    model.set_attn_implementation("eager")
    torch.testing.assert_close(got, model(pictures).last_hidden_state)


def test_a_tower_is_served_that_is_told_which_of_its_layers_is_read() -> None:
    """Transformers adds what the configuration says of it to calls of towers: Video-LLaVA's gets the strategy."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    picture = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8} | sizes
    text = {"model_type": "llama", "vocab_size": 101} | sizes
    config = transformers.VideoLlavaConfig(text_config=text, vision_config=picture)
    model = transformers.VideoLlavaModel(config).eval()
    told = {"pixel_values_videos": torch.randn(1, 8, 3, 16, 16), "vision_feature_layer": -2}

    def seen() -> torch.Tensor:
        with torch.no_grad():
            found: Any = model.get_video_features(**told)
        features: torch.Tensor = getattr(found, "pooler_output", found)
        return features

    wanted = seen()
    model.set_attn_implementation("layerzero")
    torch.testing.assert_close(seen(), wanted)


@pytest.mark.skipif(not hasattr(transformers, "Inkling2ForCausalLM"), reason="Transformers has no Inkling 2")
def test_a_model_with_sinks_of_tokens_is_refused_when_it_is_made() -> None:
    kind = transformers.Inkling2ForCausalLM
    config = kind.config_class(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=99)
    with (
        torch.device("meta"),
        pytest.raises(lz.InvalidCallError, match=r"got Inkling2.*, which gives one for each token"),
    ):
        kind._from_config(config, attn_implementation="layerzero")


def test_a_model_without_attention_is_told() -> None:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=99)
    with pytest.warns(lz.LayerZeroWarning, match="MambaModel computes no attention through Transformers'"):
        transformers.MambaModel._from_config(config, attn_implementation="layerzero")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformers.MambaModel._from_config(
            transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=99)
        )


def test_the_check_is_put_there_once_and_leaves_other_names_alone() -> None:
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    lz.register_with_transformers()
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is check
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=99)
    assert transformers.BloomModel._from_config(config).config._attn_implementation == "eager"


def _takes_a_cache() -> bool:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return "cache" in inspect.signature(sdpa_attention_forward).parameters


@pytest.mark.parametrize("way", ["attention", "optimized", "compiled"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_continuous_batching_gives_the_tokens_of_one_by_one(name: str, way: str) -> None:
    pytest.importorskip("transformers", "5.23")
    (architecture,) = (each for each in DECODERS if each.name == name)
    stock, ours = architecture.pair()
    if way == "optimized":
        stock.set_attn_implementation("sdpa" if stock._supports_sdpa else "eager")
        ours = stock
    prompts = [[1, 2, 3], [7, 5, 9, 11, 4, 8, 3, 2], [6]]
    told = transformers.GenerationConfig(max_new_tokens=7, eos_token_id=-1, pad_token_id=0, do_sample=False)
    with torch.no_grad():
        wanted = [
            stock.generate(torch.tensor([each]), generation_config=told)[0, len(each) :].tolist() for each in prompts
        ]
    report = lz.optimize(ours) if way == "optimized" else None
    more = {}
    if way == "compiled":  # rows are filled up to fixed lengths
        more = {"varlen_compile_config": transformers.CompileConfig(backend="eager", fullgraph=False, dynamic=True)}
    told_batch = transformers.ContinuousBatchingConfig(block_size=16, num_blocks=16, max_batch_tokens=16, **more)
    ran: list[str] = []
    watch = lambda function, plan: ran.append(function.name)
    ENGINE.watch(watch)
    try:
        found = ours.generate_batch(prompts, generation_config=told, continuous_batching_config=told_batch)
    finally:
        ENGINE.unwatch(watch)
    assert [each.generated_tokens for each in found.values()] == wanted
    assert way == "compiled" or ("attention" if _takes_a_cache() else "ragged_attention") in ran
    assert ours.config._attn_implementation == "layerzero"
    if report is not None:
        report.undo()


@pytest.mark.skipif(not _takes_a_cache(), reason="this version of Transformers refuses every name but its own")
def test_a_model_that_was_loaded_before_anything_was_registered_is_batched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    (llama,) = (each for each in DECODERS if each.name == "Llama")
    stock, _ = llama.pair()
    stock.set_attn_implementation("sdpa")
    method = Manager.switch_to_cb_friendly_attn
    monkeypatch.setattr(Manager, "switch_to_cb_friendly_attn", getattr(method, "__wrapped__", method))
    report = lz.optimize(stock)
    assert hasattr(Manager.switch_to_cb_friendly_attn, "_layerzero")
    report.undo()


@pytest.mark.skipif(_takes_a_cache(), reason="this version of Transformers hands its pages over, wherever they are")
def test_batches_on_a_gpu_are_left_to_transformers() -> None:
    pytest.importorskip("transformers", "5.24")
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    (llama,) = (each for each in DECODERS if each.name == "Llama")
    _, ours = llama.pair()
    manager = Manager.__new__(Manager)
    with (
        mock.patch.object(type(ours), "device", torch.device("cuda")),
        pytest.warns(lz.LayerZeroWarning, match="takes no 'layerzero' on cuda: 'sdpa' runs"),
    ):
        manager.switch_to_cb_friendly_attn(ours, auto_switch_to_flash=False)
    assert ours.config._attn_implementation == "sdpa"
    assert manager._original_attn_impl == "layerzero"


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize(("given", "said"), [({"dropout": 0.1}, "without dropout"), ({"odd": torch.ones(1)}, "odd")])
def test_what_no_batch_can_have_is_refused(exchanged: bool, given: Any, said: str) -> None:
    (llama,) = (each for each in DECODERS if each.name == "Llama")
    stock, ours = llama.pair()
    stock.set_attn_implementation("sdpa")
    report = lz.optimize(stock)
    module = (stock if exchanged else ours).model.layers[0].self_attn
    query, starts = torch.randn(1, 4, 3, 8), torch.tensor([0, 1, 3], dtype=torch.int32)
    batch = {"write_index": [torch.arange(3)], "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    with pytest.raises(lz.InvalidCallError, match=said):
        integration.attention_forward(module, query, query, query, None, **batch, **given)
    report.undo()


def test_a_batch_without_a_mask_is_refused() -> None:
    (llama,) = (each for each in DECODERS if each.name == "Llama")
    _, ours = llama.pair()
    query = torch.randn(1, 4, 3, 8)
    module = next(each for each in ours.modules() if hasattr(each, "layer_idx") and hasattr(each, "q_proj"))
    with pytest.raises(lz.InvalidCallError, match=r"wanted continuous batching with a mask.*got none; set 'sdpa'"):
        integration.attention_forward(module, query, query, query, None, cache=object(), write_index=[torch.arange(3)])


def test_meta_tensors_give_shapes() -> None:
    config = transformers.LlamaConfig(**architectures.GQA)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="layerzero")
        logits = model(torch.zeros(2, 5, dtype=torch.long)).logits
    assert (logits.shape, logits.device.type) == ((2, 5, 101), "meta")


def test_a_pipeline_takes_it_as_an_argument(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0")
    model = transformers.BertModel._from_config(transformers.BertConfig(**architectures.SIZES)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    told = {"model": str(tmp_path), "tokenizer": str(tmp_path), "device": "cpu"}
    stock = transformers.pipeline("feature-extraction", **told)
    ours = transformers.pipeline("feature-extraction", **told, model_kwargs={"attn_implementation": "layerzero"})
    assert (stock.model.config._attn_implementation, ours.model.config._attn_implementation) == ("sdpa", "layerzero")
    for text in ("w3 w4 w5", "w9"):
        wanted, got = (torch.tensor(each(text)) for each in (stock, ours))
        assert_equal(got, wanted)
