"""Optimised models on every kind of call: compiled, traced, with inputs that are compared, of sentences."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
from optimized_models import SIZES, made
from scaled_modules import Gated, Scaled
from torch import nn
from torch.overrides import TorchFunctionMode

import layerzero as lz
from decoders import output, tokens
from drawing import mostly
from layerzero.integrations.optimize.attention.transformers import attention_swap
from layerzero.integrations.optimize.modules.norms import norm
from layerzero.integrations.optimize.modules.products import block, linear
from layerzero.integrations.optimize.swaps.candidate import Candidate, quiet
from layerzero.integrations.optimize.swaps.swap import is_swapped

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]


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


def test_a_step_of_training_has_the_models_own_attention() -> None:
    """Of one without ``sdpa``, too, whose cap no fast kernel gives gradients of: the slow reference computed it."""
    model, stock = made("gemma2"), made("gemma2")
    if model._supports_sdpa:
        pytest.skip("this version of Transformers has sdpa for the model")
    first = model.model.layers[0].self_attn
    first.__class__ = type("Own", (type(first),), {})  # in this file, not in that of Transformers' function
    attention_swap(model).on()
    given = {"input_ids": tokens(), "labels": tokens()}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            called = {each.function for each in lz.trace(model, **given).rows}
        assert ("attention" in called) != grad
    for each in (model, stock):
        each(**given).loss.backward()
    for one, two in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)


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


class Squared(TorchFunctionMode):
    """Exchanges an activation, as modes that calibrate or study a model do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].square() if function is nn.functional.gelu else function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("find", [block, linear])
def test_functions_that_a_mode_exchanges_count(find: Any) -> None:
    stock = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    model, rows = copy.deepcopy(stock), torch.randn(3, 16)
    find(model if find is block else model[0]).swap.on()
    with Squared(), torch.device("cpu"):
        torch.testing.assert_close(model(rows), stock(rows))
    called = {each.function for each in lz.trace(model, rows).rows}
    with torch.device("cpu"):
        assert {each.function for each in lz.trace(model, rows).rows} == called != set()


@torch.no_grad()
@pytest.mark.usefixtures("packs", "layer_clock")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nested_tensors_are_the_modules_own(dtype: torch.dtype) -> None:
    """They have no sizes to choose a kernel or a packed form by."""
    stock = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(dtype).eval()
    model = copy.deepcopy(stock)
    rows = torch.nested.nested_tensor([torch.randn(each, 16, dtype=dtype) for each in (3, 5)])
    assert lz.optimize(model).replaced
    for got, wanted in zip(model(rows).unbind(), stock(rows).unbind(), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_it_compiles_without_a_break(name: str, graph: bool) -> None:
    model = made(name)
    expected = output(model)
    lz.optimize(model, graph=graph)
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


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = Scaled(16, "written"), Gated(nn.SiLU())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x=self.norm(x=rows))
        return out


def test_names_of_arguments_are_those_of_the_modules_class() -> None:
    """Callers may use them, and trainers, exporters and pipelines ask for them."""
    model = Root().eval()
    rows = torch.randn(3, 16)
    expected, names = model(rows), [inspect.signature(each.forward) for each in model.modules()]
    lz.optimize(model)
    for found in (norm(model.norm), block(model.block)):
        assert isinstance(found, Candidate)
        if not is_swapped(found.swap.module):
            found.swap.on()
    for twin in (model, copy.deepcopy(model)):
        assert [inspect.signature(each.forward) for each in twin.modules()] == names
        with torch.no_grad():
            assert [each.function for each in lz.trace(twin, rows).rows] == ["rms_norm", "mlp"]
            torch.testing.assert_close(twin(rows=rows), expected)
        with pytest.raises(TypeError, match=r"Scaled.forward\(\) got an unexpected keyword argument 'y'"):
            twin.norm(y=rows)


def test_a_forward_without_a_signature_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code has none."""

    class Unsigned(Scaled):
        pass

    def signature(function: Any, own: Any = inspect.signature) -> inspect.Signature:
        if function is Unsigned.forward:
            raise ValueError("no signature found")
        return own(function)  # type: ignore[no-any-return]

    monkeypatch.setattr(inspect, "signature", signature)
    model, rows = Unsigned(16, "written").eval(), torch.randn(3, 16)
    expected, found = model(rows), norm(model)
    assert isinstance(found, Candidate)
    found.swap.on()
    for given in ({"x": rows}, {}):
        with torch.no_grad():
            torch.testing.assert_close(model(**given) if given else model(rows), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripting_gives_modules_their_own_code_back_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))).eval()
    rows = torch.randn(3, 16)
    expected = model(rows)
    lz.optimize(model)
    for each in (model[0], model[1][1]):  # type: ignore[index]
        if not is_swapped(each):
            linear(each).swap.on()  # type: ignore[union-attr]
    with pytest.warns(lz.LayerZeroWarning, match=r"give it a copy\.deepcopy of the model"):
        torch.testing.assert_close(torch.jit.script(copy.deepcopy(model))(rows), expected)
    assert any(map(is_swapped, model.modules()))
    with pytest.warns(lz.LayerZeroWarning, match="run theirs from now on"):
        torch.testing.assert_close(torch.jit.script(model)(rows), expected)
    assert not any({"forward", "_layerzero", "__prepare_scriptable__"} & set(vars(each)) for each in model.modules())
    assert torch.equal(model(rows), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_scripted_module_keeps_its_mode() -> None:
    dropout = torch.jit.script(nn.Dropout(0.5))
    with quiet(nn.Sequential(dropout.train())):
        assert torch.equal(dropout(torch.ones(64)), torch.ones(64)), "its mode lies where no attribute of Python does"
    assert dropout.training
    assert "training" not in vars(dropout)
