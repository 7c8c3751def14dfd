"""``lz.optimize`` on small random models of Transformers: the same tokens, values and names, and the way back."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz
from drawing import mostly

transformers = pytest.importorskip("transformers", "5.0", reason="needs transformers >= 5")

from layerzero.integrations.optimize.attention.transformers import AttentionSwap  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
GQA = SIZES | {"num_key_value_heads": 2}
T5 = {
    "vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "dropout_rate": 0.0,
}  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GQA)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GQA, head_dim=8)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GQA, head_dim=8, sliding_window=6)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GQA, sliding_window=6)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**GQA)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=96, eos_token_id=None, bos_token_id=1
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "t5": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "t5 gated": lambda: transformers.T5EncoderModel(
        transformers.T5Config(**T5, feed_forward_proj="gated-gelu")
    ),
}  # fmt: skip
UNLIKE = {"llama", "gemma2", "phi3", "gpt2", "bert", "t5 gated"}
"""The others differ from one of these in a bias, a window or a norm."""

ENCODERS = ("bert", "t5", "t5 gated")
DECODERS = tuple(name for name in MODELS if name not in ENCODERS)

COUNTS = {
    "llama": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "qwen2": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "qwen3": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "gemma2": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "mistral": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "phi3": {"attention": 1, "layer": 2, "norm": 1, "linear": 1},
    "gpt2": {"attention": 1, "block": 2, "linear": 5},
    "bert": {"attention": 1, "layer": 2, "linear": 2, "padding": 1},
    "t5": {"attention": 1, "block": 2, "norm": 5, "linear": 8, "padding": 1},
    "t5 gated": {"attention": 1, "block": 2, "norm": 5, "linear": 8, "padding": 1},
}
"""Replaced without inputs, by kind, with packed products on this CPU."""


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval().to(dtype)


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def output(model: Any, ids: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens() if ids is None else ids, **arguments)[0]


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_found_by_what_they_compute(name: str) -> None:
    report = lz.optimize(made(name))
    counts: dict[str, int] = {}
    for each in report.replaced:
        counts[each.kind] = counts.get(each.kind, 0) + 1
    if any("packed" in (each.kernel or "") for each in report.replaced):
        assert counts == COUNTS[name]
    assert all(each.error is None or each.error <= 2e-5 for each in report.replaced)
    assert "replaced" in str(report)


@pytest.mark.parametrize("name", mostly(DECODERS, UNLIKE))
def test_greedy_tokens_are_stocks(name: str) -> None:
    model = made(name)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # on the left
    arguments = {"attention_mask": mask, "max_new_tokens": 32, "do_sample": False}
    expected = model.generate(ids, **arguments)
    lz.optimize(model)
    assert torch.equal(model.generate(ids, **arguments), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", mostly(MODELS, UNLIKE))
def test_results_are_as_near_to_the_truth_as_stocks(name: str, dtype: torch.dtype) -> None:
    model = made(name, dtype)
    truth = output(copy.deepcopy(model).double())
    stock = output(model)
    lz.optimize(model)
    optimized = output(model)
    scale = truth.abs().max()
    allowed = 1.5 * (stock - truth).abs().max() + (1e-5 if dtype is torch.float32 else 8e-3) * scale
    assert (optimized - truth).abs().max() <= allowed


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_what_is_found_does_not_depend_on_the_default_dtype(name: str) -> None:
    model = made(name, torch.bfloat16)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            report = lz.optimize(model)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([(each.path, each.kind) for each in report.replaced])
        report.undo()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", mostly(MODELS, UNLIKE))
def test_undo_gives_back_what_was(name: str) -> None:
    model = made(name)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    expected, before = output(model), [set(vars(each)) for each in model.modules()]
    setting = model.config._attn_implementation
    report = lz.optimize(model)
    assert report.is_on
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    output(model)
    report.undo()
    assert not report.is_on
    assert torch.equal(output(model), expected)
    assert [set(vars(each)) for each in model.modules()] == before
    assert model.config._attn_implementation == setting
    report.undo()  # once more changes nothing
    assert torch.equal(output(model), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_weights_may_be_loaded_moved_and_cast_afterwards(name: str) -> None:
    torch.manual_seed(5)
    other = MODELS[name]().eval()
    model = made(name)
    report = lz.optimize(model)
    output(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(output(model), output(other), rtol=1e-4, atol=1e-4)
    model.load_state_dict({key: value.clone() for key, value in made(name).state_dict().items()}, assign=True)
    torch.testing.assert_close(output(model), output(made(name)), rtol=1e-4, atol=1e-4)
    uncapped = name == "gemma2" and model._supports_sdpa  # stock leaves the cap out, with Transformers 5.17
    off = 1e-4 if uncapped else 1e-5
    torch.testing.assert_close(output(model.double()), output(made(name).double()), rtol=off, atol=off)
    wide = output(made(name, torch.bfloat16)).float()
    torch.testing.assert_close(output(model.bfloat16()).float(), wide, rtol=0.05, atol=0.05 * wide.abs().max().item())
    report.undo()
    assert torch.equal(output(model.float()), output(made(name, torch.bfloat16).float()))


def test_training_steps_reach_the_packed_weights() -> None:
    model, stock = made("llama"), made("llama")
    lz.optimize(model)
    output(model)
    for each in (model, stock):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.train()
        each(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        each.eval()
    torch.testing.assert_close(output(model), output(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_gradients_are_stocks(name: str) -> None:
    model, stock = made(name), made(name)
    lz.optimize(model)
    output(model)
    for each in (model, stock):
        each(tokens(), labels=tokens()).loss.backward()
    for (key, got), expected in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: key + text)


def test_gradients_of_inputs_pass_frozen_weights() -> None:
    grads = []
    for optimized in (False, True):
        model = made("llama").requires_grad_(False)
        if optimized:
            lz.optimize(model)
        inputs = model.get_input_embeddings()(tokens()).detach().requires_grad_()
        model(inputs_embeds=inputs)[0].square().sum().backward()
        grads.append(inputs.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-3 * grads[0].abs().max().item())


def test_a_setting_that_somebody_chose_meanwhile_is_saved() -> None:
    model = made("llama")
    report = lz.optimize(model)
    model.set_attn_implementation("eager")
    twin = pickle.loads(pickle.dumps(model))  # ours
    assert twin.config._attn_implementation == "eager"
    report.undo()
    assert model.config._attn_implementation == "eager"
    assert not any("_layerzero_setting" in vars(each) for each in model.modules())


def test_parts_of_an_optimized_model_are_saved_with_the_stock_setting() -> None:
    model = made("llama")
    report = lz.optimize(model)
    for part in (model, model.model, model.model.layers[0].self_attn, copy.deepcopy(model.model)):
        twin = pickle.loads(pickle.dumps(part))  # ours
        assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "layerzero"
    report.undo()


def test_a_second_exchange_keeps_what_the_first_wrote_down() -> None:
    model = made("llama")
    first = AttentionSwap(model)
    first.on()
    report = lz.optimize(model)
    assert pickle.loads(pickle.dumps(model)).config._attn_implementation == "sdpa"  # ours
    report.undo()
    assert pickle.loads(pickle.dumps(model)).config._attn_implementation == "sdpa"  # ours
    first.off()


@pytest.mark.parametrize("way", ["deepcopy", "save", "state"])
def test_copies_compute_with_their_own_weights(way: str, tmp_path: Any) -> None:
    model = made("llama")
    expected = output(model)
    report = lz.optimize(model)
    output(model)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
        assert any("_layerzero" in vars(each) for each in twin.modules())
        assert copy.copy(twin.config)._attn_implementation == "layerzero"
    elif way == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert not any(vars(each).get("_layerzero") for each in twin.modules())
        assert model.config._attn_implementation == "layerzero"
        assert twin.config._attn_implementation == "sdpa"  # of a process that may have no LayerZero
        assert lz.optimize(twin).replaced
    else:
        model.save_pretrained(tmp_path)
        twin = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(twin), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    stock = made("llama")
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(output(twin), output(stock), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    torch.testing.assert_close(output(twin), output(stock), rtol=1e-4, atol=1e-4)


def test_a_model_that_was_optimized_on_nothing_serves_every_kind_of_call() -> None:
    model, stock = made("llama"), made("llama")
    lz.optimize(model)
    ids, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5], mask[1, :2] = 0, 0
    torch.testing.assert_close(
        output(model, ids, attention_mask=mask)[:, 5:],
        output(stock, ids, attention_mask=mask)[:, 5:],
        rtol=1e-4,
        atol=1e-4,
    )
    for static in (False, True):
        logits = []
        for each in (model, stock):
            cache = transformers.StaticCache(config=each.config, max_cache_len=32) if static else None
            cache = cache or transformers.DynamicCache(config=each.config)
            steps = [output(each, part, past_key_values=cache) for part in tokens(1, 14).split([9, 1, 1, 3], 1)]
            logits.append(torch.cat(steps, 1))
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(output(model), output(stock), rtol=0.05, atol=0.1)


def test_two_models_share_nothing() -> None:
    first, second, stock = made("llama"), made("llama"), made("llama")
    expected = output(stock)
    reports = [lz.optimize(first), lz.optimize(second)]
    errors: list[str] = []

    def run(model: Any) -> None:
        for _ in range(6):
            error = (output(model) - expected).abs().max().item()
            if error > 1e-4:
                errors.append(f"{error}")

    threads = [threading.Thread(target=run, args=(each,)) for each in (first, second, stock, second) * 2]
    for each in threads:
        each.start()
    reports[0].undo()
    for each in threads:
        each.join()
    assert not errors
    assert not reports[0].is_on
    assert reports[1].is_on
    assert torch.equal(output(first), expected)
    assert torch.equal(output(stock), expected)


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_it_compiles_without_a_break(name: str) -> None:
    model = made(name)
    expected = output(model)
    lz.optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(output(compiled), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroWarning")
def test_inputs_are_compared_and_timed() -> None:
    model = made("llama")
    expected = output(model)
    report = lz.optimize(model, {"input_ids": tokens()}, rounds=1, isolate=False)
    assert report.error is not None
    assert report.error < 1e-4
    assert report.timed is not None
    assert set(report.timed.gains) == {"attention", "layer", "norm", "linear"}
    kinds = {each.kind for each in report.replaced}
    assert ("times as fast" if kinds else "nothing was kept, so it is as before") in str(report)  # by what it gained
    assert kinds.isdisjoint(report.timed.dropped)
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    assert torch.equal(output(model), expected)


def test_a_failing_input_leaves_the_model_as_it_was() -> None:
    model = made("llama")
    expected, calls = output(model), []

    def fail() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("planted")
        model(tokens())

    with pytest.raises(RuntimeError, match="planted"):
        lz.optimize(model, fail)
    assert torch.equal(output(model), expected)
    assert not any("_layerzero" in vars(each) for each in model.modules())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("planted", mostly(["zeros", "no mask", "no scale"], {"no mask"}))
@pytest.mark.parametrize("inputs", [False, True])
def test_wrong_attention_is_refused_by_name(planted: str, inputs: bool) -> None:
    def wrong(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As if it had heads before the sequence; what it is told is that it hasn't."""
        group = query.shape[2] // key.shape[2]
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.mT * (1.0 if planted == "no scale" else query.shape[-1] ** -0.5)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        if attn_mask is not None and planted != "no mask":
            bias = (
                torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -1e9)
                if attn_mask.dtype is torch.bool
                else attn_mask
            )
            scores = scores + bias
        return (scores.softmax(-1) @ v * (planted != "zeros")).transpose(1, 2)

    model = made("llama")
    expected = output(model)
    mask = torch.ones_like(tokens())
    mask[0, :3] = 0
    lz.register_kernel("attention.gqa.prefill", "planted.attention")(wrong)
    try:
        with lz.prefer("planted.attention"):
            given = {"input_ids": tokens(), "attention_mask": mask} if inputs else None
            report = lz.optimize(model, given, rounds=1, isolate=False)
    finally:
        lz.unregister_kernel("planted.attention")
    assert "attention" not in {each.kind for each in report.replaced}
    assert any("planted.attention was off by" in each.why for each in report.left), report
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)


def test_a_trace_shows_what_optimized_layers_run() -> None:
    model = made("llama")
    lz.optimize(model)
    with torch.no_grad():
        found = lz.trace(model, tokens())
    assert {row.function for row in found.rows} == {
        "attention",
        "linear",
        "mlp",
        "rms_norm",
        "add_residual_rms_norm_",
        "qkv_linear",
        "rope_",
    }


def test_what_hidden_tokens_give_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that sees no key gets what its kernel likes; torch's efficient kernel on a GPU gives no zeros."""
    from transformers.integrations import sdpa_attention

    stock = sdpa_attention.sdpa_attention_forward

    def otherwise(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        found, _ = stock(module, query, key, value, mask, **named)
        if mask is not None:
            found = found.masked_fill(~mask.any(-1).transpose(1, 2).unsqueeze(-1), 7.0)
        return found, None

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", otherwise)
    report = lz.optimize(made("llama"))
    assert {"attention", "layer"} <= {each.kind for each in report.replaced}, report


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.usefixtures("packs")
@pytest.mark.parametrize("state", mostly(["new", "new, with inputs", "used"], {"new, with inputs", "used"}))
def test_a_sentence_transformer_gives_the_same_embeddings(state: str, tmp_path: Any) -> None:
    """A new one is in training mode until it encodes."""
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules", reason="needs version 6 of it")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "small", "random", "words", "are", "enough"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES | {"vocab_size": len(words)})).save_pretrained(tmp_path)
    encoder = parts.Transformer(str(tmp_path), max_seq_length=16)
    model = library.SentenceTransformer(modules=[encoder, parts.Pooling(32)], device="cpu")
    texts = ["small words", "random words are enough", "small"]
    expected = torch.as_tensor(copy.deepcopy(model).encode(texts))
    if state == "used":
        model.encode(texts)
    assert model.training is (state != "used")
    if state == "new, with inputs":
        assert not lz.optimize(model, model.tokenize(texts)).replaced  # called as it is, in training mode
        report = lz.optimize(model, lambda: model.encode(texts), rounds=1, isolate=False)
        assert report.timed is not None
    else:
        report = lz.optimize(model)
        assert {"attention", "linear"} <= {each.kind for each in report.replaced}, report
    torch.testing.assert_close(torch.as_tensor(model.encode(texts)), expected, rtol=1e-4, atol=1e-4)
    report.undo()
    assert torch.equal(torch.as_tensor(model.encode(texts)), expected)
