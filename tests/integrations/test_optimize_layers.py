"""Whole decoder layers under ``lz.optimize``: few calls, one product, weights that are not copied, and who is heard."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

import layerzero as lz
from decoders import output, tokens
from drawing import mostly, pairs
from layerzero.engine.dispatch import ENGINE
from layerzero.integrations.optimize.attention.transformers import AttentionSwap, compared
from layerzero.integrations.optimize.layers import find as whole
from layerzero.integrations.optimize.layers.layer import Heads, Layer
from layerzero.integrations.optimize.swaps import weights as packing
from layerzero.integrations.optimize.swaps.joined_codes import CodedParts, following_weights

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning")
]

SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": None
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "Phi3": {},
    "Olmo2": {},
    "StableLm": {"partial_rotary_factor": 0.5},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # its norms take queries as a whole, as Olmo2's do
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},  # half a table
}
MIXTURES = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss")


def made(kind: str = "Llama", layers: int = 2, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind], **sizes, num_hidden_layers=layers)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(dtype)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide much
                each.add_(0.3 * torch.randn(each.shape).to(dtype))
    return model


@pytest.fixture(params=["packed", "joined"])
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU; or joined, as on devices whose kernels read weights as they lie."""
    if request.param == "joined":
        monkeypatch.setattr(packing, "PACKING", frozenset())
    return str(request.param)


def test_a_model_whose_attention_was_chosen_gets_what_another_gets() -> None:
    """Whoever loads with attn_implementation="layerzero" loses no layer and no step by it, and keeps the setting."""
    stock, chosen = made(), made()
    lz.register_with_transformers()
    chosen.set_attn_implementation("layerzero")
    ids = tokens()
    expected = stock.generate(ids, max_new_tokens=16, do_sample=False)
    reports = [lz.optimize(each, graph=True) for each in (stock, chosen)]
    kinds = [{(each.path, each.kind) for each in report.replaced} for report in reports]
    assert {kind for _, kind in kinds[1]} >= {"layer", "step"}
    assert kinds[0] - kinds[1] == {("", "attention")}
    assert any("LayerZero's already" in each.why for each in reports[1].left)
    assert torch.equal(chosen.generate(ids, max_new_tokens=16, do_sample=False), expected)
    reports[1].undo()
    assert chosen.config._attn_implementation == "layerzero"
    assert torch.equal(chosen.generate(ids, max_new_tokens=16, do_sample=False), expected)
    reports[0].undo()
    assert stock.config._attn_implementation == "sdpa"


def test_a_layer_is_compared_with_transformers_attention_also_where_layerzeros_is_set() -> None:
    model = made()
    lz.register_with_transformers()
    model.set_attn_implementation("layerzero")
    swap = AttentionSwap(model)
    with swap.stock():
        assert model.config._attn_implementation == "sdpa"
    assert swap.chosen
    assert model.config._attn_implementation == "layerzero"


QUICK = {"Llama", "Gemma2", "Phi3", "Olmo2", "StableLm", "Olmoe", "GptOss"}


@pytest.mark.parametrize(("kind", "weights"), pairs(KINDS, ["packed", "joined"], QUICK), indirect=["weights"])
def test_layers_are_taken_whole_and_give_stocks_tokens(kind: str, weights: str) -> None:
    model, ids = made(kind), tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected, plain = model.generate(ids, **arguments), model.generate(ids, max_new_tokens=16, do_sample=False)
    report = lz.optimize(model)
    assert "layer" in {each.kind for each in report.replaced}, report
    assert torch.equal(model.generate(ids, **arguments), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False), plain)
    report.undo()
    assert torch.equal(model.generate(ids, **arguments), expected)


def calls_of_a_layer(weights: str) -> Counter[str]:
    """What a step of two more layers calls more."""
    found: list[Counter[str]] = []
    for layers in (2, 4):
        model = made(layers=layers)
        lz.optimize(model)
        cache = transformers.DynamicCache(config=model.config)
        output(model, past_key_values=cache)
        output(model, tokens(2, 1), past_key_values=cache)
        seen: Counter[str] = Counter()

        def watcher(function: Any, _: Any, seen: Counter[str] = seen) -> None:
            seen.update([function.name])

        ENGINE.watch(watcher)
        try:
            output(model, tokens(2, 1), past_key_values=cache)
        finally:
            ENGINE.unwatch(watcher)
        found.append(seen)
    return Counter({name: count // 2 for name, count in (found[1] - found[0]).items()})


def test_a_layer_is_few_calls(weights: str) -> None:
    found = calls_of_a_layer(weights)
    if weights == "packed":
        assert found == {
            "qkv_linear": 1,
            "rope_": 1,
            "attention": 1,
            "linear": 1,
            "add_residual_rms_norm_": 2,
            "mlp": 1,
        }
    else:
        assert found == {"rope_": 1, "attention": 1, "linear": 4, "add_residual_rms_norm_": 2, "silu_mul": 1}


def test_joined_weights_are_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACKING", frozenset())
    model = made("Qwen2")
    values = copy.deepcopy(model.state_dict())
    expected = output(model)
    report = lz.optimize(model)
    heads, block = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for parts in ((heads.q_proj, heads.k_proj, heads.v_proj), (block.gate_proj, block.up_proj)):
        (joined,) = {each.weight.untyped_storage().data_ptr() for each in parts}
        assert parts[0].weight.untyped_storage().nbytes() == sum(each.weight.nbytes for each in parts)
        assert joined == parts[0].weight.data_ptr()
    assert heads.q_proj.bias.untyped_storage().data_ptr() == heads.v_proj.bias.untyped_storage().data_ptr()
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)
    other = made("Qwen2")
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(0.7)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(output(model), output(other), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output(copy.deepcopy(model)), output(other), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output(copy.deepcopy(model).double()), output(other.double()), rtol=1e-4, atol=1e-4)
    report.undo()
    assert heads.q_proj.weight.untyped_storage().nbytes() == heads.q_proj.weight.nbytes
    assert torch.equal(output(model), output(other.float()))


def _pruned(model: Any) -> None:
    for each in (one.mlp for one in model.model.layers):
        each.gate_proj.weight.data, each.up_proj.weight.data = each.gate_proj.weight[:20], each.up_proj.weight[:20]
        each.down_proj.weight.data = each.down_proj.weight[:, :20]


def _biased(model: Any) -> None:
    for each in model.model.layers:
        each.self_attn.q_proj.bias = torch.nn.Parameter(torch.ones(32))
        each.mlp.up_proj.bias = torch.nn.Parameter(torch.ones(48))


def _turned(model: Any) -> None:
    for each in (one.self_attn.q_proj.weight for one in model.model.layers):
        each.data = each.data.t()


def _negated(model: Any) -> None:
    for each in (one.self_attn.v_proj.weight for one in model.model.layers):
        each.data = torch._neg_view(each.data)


@pytest.mark.parametrize("change", [_pruned, _biased, _turned, _negated])
def test_weights_that_lie_otherwise_where_they_lay_are_followed(change: Any, weights: str) -> None:
    model = made()
    stock = copy.deepcopy(model)
    report = lz.optimize(model)
    assert "layer" in {each.kind for each in report.replaced}, str(report)
    with torch.no_grad():
        for each in (model, stock):
            change(each)
    torch.testing.assert_close(output(model), output(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["new", "in place", "kept"])
def test_who_changes_what_lies_between_layers_is_heard(way: str) -> None:
    model, stock = made(layers=3), made(layers=3)
    lz.optimize(model)
    kept: list[torch.Tensor] = []

    def change(module: Any, given: Any, result: torch.Tensor) -> torch.Tensor | None:
        if way == "new":
            return result * 1.5
        if way == "in place":
            result.mul_(1.5)
        kept.append(result)
        return None

    for each in (model, stock):
        kept.clear()
        each.model.layers[1].register_forward_hook(change)
        each.got = output(each), [one.clone() for one in kept]
    torch.testing.assert_close(model.got, stock.got, rtol=1e-4, atol=1e-4)


def test_hidden_states_are_stocks_and_a_recorder_costs_nothing_later() -> None:
    model, stock = made(layers=3), made(layers=3)
    lz.optimize(model)
    with torch.no_grad():
        for _ in range(2):
            states = [each(tokens(), output_hidden_states=True).hidden_states for each in (model, stock)]
            torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
        found = lz.trace(model, tokens())
    assert "add_residual_rms_norm_" in {row.function for row in found.rows}


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_layers_called_alone_and_in_another_order(mode: str) -> None:
    model, stock = made(layers=3), made(layers=3)
    lz.optimize(model)
    with torch.inference_mode() if mode == "inference" else torch.no_grad():
        torch.testing.assert_close(model(tokens())[0], stock(tokens())[0], rtol=1e-4, atol=1e-4)
        for each in (model, stock):
            each.model.layers = torch.nn.ModuleList([each.model.layers[number] for number in (2, 0, 1)])
        got, expected = (each(tokens(), use_cache=False)[0] for each in (model, stock))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Olmoe", "Qwen2"])
def test_a_window_that_no_mask_says_hides_nothing(kind: str) -> None:
    """OLMoE's attention is told a window, and its mask hides the future alone; torch's function reads the mask."""
    model = made(kind, sliding_window=6)
    given = tokens(2, 17)
    told = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    report = lz.optimize(model)
    assert "attention" in {each.kind for each in report.replaced}
    for each in model.model.layers:
        each.self_attn.sliding_window = 6  # as a layer that was taken from another place
    got = model.generate(given, **told)
    report.undo()
    expected = model.generate(given, **told)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_an_exchange_is_compared_without_a_window_that_no_mask_says() -> None:
    model, given = made("Olmoe", sliding_window=6), tokens(2, 17)
    with torch.no_grad():
        off, why = compared(AttentionSwap(model), lambda: model(given))
        assert (off is not None and off < 1e-5, why) == (True, "")
        model.set_attn_implementation("layerzero")
        assert "off by" in compared(AttentionSwap(model), lambda: model(given))[1], "a chosen one reads the window"


def test_a_chosen_window_holds_over_a_prompt_in_parts() -> None:
    lz.register_with_transformers()
    model, given = made("Olmoe", sliding_window=6), tokens(2, 17)
    model.set_attn_implementation("layerzero")
    for each in model.model.layers:
        each.self_attn.sliding_window = 6
    with torch.no_grad():
        whole = model(given).logits
        cache = transformers.DynamicCache()
        model(given[:, :9], past_key_values=cache)
        last = model(given[:, 9:], past_key_values=cache).logits
        free = model.set_attn_implementation("sdpa") or model(given).logits
    torch.testing.assert_close(last, whole[:, 9:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole, free, atol=1e-2), "the window hides something"


@pytest.mark.parametrize(
    "function", mostly(["norm.add_rms", "mlp.fused.gated", "posenc.rope.inplace"], {"norm.add_rms"})
)
def test_a_wrong_kernel_of_a_layer_is_refused_by_name(function: str) -> None:
    def nothing(*tensors: torch.Tensor, **_: Any) -> torch.Tensor | None:
        return None if function.startswith("posenc") else torch.zeros_like(tensors[0])

    accepts = {
        "norm.add_rms": lambda input, residual, weight, *, eps: nothing(input),
        "mlp.fused.gated": lambda input, up_weight, down_weight, gate_weight, *, activation: nothing(input),
        "posenc.rope.inplace": lambda query, key, cos, sin, *, positions=None: nothing(query),
    }
    model = made()
    expected = output(model)
    lz.register_kernel(function, "planted.wrong")(accepts[function])
    try:
        with lz.prefer("planted.wrong"):
            report = lz.optimize(model)
    finally:
        lz.unregister_kernel("planted.wrong")
    whole_ones = [each for each in report.replaced if each.kind == "layer"]
    if function == "mlp.fused.gated":  # a block is compared by itself before, and a layer calls what is its own
        assert all("planted.wrong" not in each.kernel for each in whole_ones)
    else:
        assert not whole_ones
        assert any("planted.wrong" in each.why for each in report.left), report
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering"])
def test_layers_below_a_head_that_returns_no_cache_are_found(head: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2)
    model = getattr(transformers, f"Llama{head}")(config).eval()
    ids = tokens()
    with torch.no_grad():
        wanted = model(ids)[0]
        report = lz.optimize(model, graph=True)
        got = model(ids)[0]
    assert Counter(each.kind for each in report.replaced)["layer"] == 2, str(report)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def test_a_layer_that_adds_otherwise_is_left_with_a_reason() -> None:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(**SIZES, num_hidden_layers=2, residual_multiplier=0.5)
    model = transformers.GraniteForCausalLM(config).eval()
    expected = output(model)
    report = lz.optimize(model)
    assert any("none of the layers' formulas" in each.why for each in report.left), report
    assert {"block", "norm"} <= {each.kind for each in report.replaced}
    torch.testing.assert_close(output(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (lambda _, rows: rows.shape[1] > 100, "compares how many rows"),
        (lambda _, rows: rows.shape[:1].numel() > 2, "compares how many rows"),
        (lambda _, rows: bool(rows.max() > 50), "reads numbers of tensors"),
        (lambda layer, rows: setattr(layer, "last", rows), "writes into its attributes"),
    ],
    ids=["tokens", "rows", "numbers", "writes"],
)
@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_a_layer_that_may_take_another_way_is_left(kind: str, turns: Any, told: str) -> None:
    bert = transformers.BertConfig(**SIZES, num_hidden_layers=2)
    model: Any = made() if kind == "Llama" else transformers.BertModel(bert).eval()
    layers = model.model.layers if kind == "Llama" else model.encoder.layer

    class Turning(type(layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
            return super().forward(hidden_states, *others, **named) * (2 if turns(self, hidden_states) else 1)

    for each in layers:
        each.__class__ = Turning
    report = lz.optimize(model, padding=False)
    assert "layer" not in {each.kind for each in report.replaced}
    assert all(told in each.why for each in report.left if each.module == "Turning"), report


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_layers_know_what_they_cover(kind: str) -> None:
    """A module within a layer that is exchanged, hooked or trained later is not passed over."""
    model, stock = made(kind), made(kind)
    report = lz.optimize(model)
    assert sum(isinstance(each, Layer) for each in report.states) == 2
    heard: list[int] = []
    for each in (model, stock):
        each.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: heard.append(1))
        each.model.layers[1].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
        each.model.layers[1].mlp.down_proj.weight.data.fill_(0.01)
    torch.testing.assert_close(output(model), output(stock), rtol=1e-3, atol=1e-3)
    assert heard == [1, 1]


@pytest.mark.parametrize("kind", mostly(MIXTURES, {"Mixtral", "GptOss"}))
def test_a_layer_around_experts_is_proved_by_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong attention is found though a stand-in computes for the experts, and nobody is left with the stand-in."""
    project = Heads.project

    def wrong(self: Heads, rows: torch.Tensor, table: Any) -> Any:
        query, key, value = project(self, rows, table)
        return query, key, value.flip(-1)

    with monkeypatch.context() as patched:
        patched.setattr(Heads, "project", wrong)
        report = lz.optimize(made(kind))
    assert "layer" not in {each.kind for each in report.replaced}
    assert any("none of the layers' formulas" in each.why for each in report.left), report
    model, stock = made(kind), made(kind)
    lz.optimize(model)
    assert not any("forward" in vars(each) for each in model.modules() if not hasattr(each, "_layerzero"))
    torch.testing.assert_close(output(model), output(stock), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", MIXTURES)
def test_what_changes_within_experts_is_heard(kind: str) -> None:
    """A layer calls its experts' module as before: hooks in it run, and new weights count."""
    model, stock = made(kind), made(kind)
    lz.optimize(model)
    heard: list[int] = []
    for each in (model, stock):
        mlp = each.model.layers[0].mlp
        mlp.experts.register_forward_hook(lambda *_: heard.append(1))
        with torch.no_grad():
            mlp.experts.down_proj.mul_(0.5)
    torch.testing.assert_close(output(model), output(stock), rtol=1e-3, atol=1e-3)
    assert heard == [1, 1]


def test_a_layer_whose_parts_fit_no_form_is_told_by_its_sizes() -> None:
    from architectures import decoders

    (deepseek,) = (each for each in decoders() if each.name == "DeepseekV3")
    config = transformers.DeepseekV3Config(**deepseek.sizes)
    model = transformers.DeepseekV3ForCausalLM._from_config(config).eval()
    (why,) = (each.why for each in lz.optimize(model).left if each.path == "model.layers.0")
    assert "its products and norms have the sizes of no form" in why


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda out: out * float("nan"), "a form's output has NaN or infinities on random input"),
        (lambda out: out[:, :1], "a form gave (2, 1, 32), the layer (2, 5, 32)"),
        (None, "a form raised RuntimeError: no such size"),
    ],
)
def test_a_form_that_cannot_be_compared_is_told_by_what_happened(spoil: Any, told: str) -> None:
    class Swapped:
        def __init__(self) -> None:
            self.module = self.state = self

        def modules(self) -> list[Any]:
            return []

        def is_proved(self, _: torch.Tensor) -> bool:
            return True

        def on(self) -> None: ...

        def off(self) -> None: ...

        def forward(self, rows: torch.Tensor, **_: Any) -> torch.Tensor:
            if spoil is None:
                raise RuntimeError("no such\n size")
            return spoil(rows)

    rows = [torch.ones(2, 5, 32)]
    run = lambda function, _module, hidden, *_: (function(each) for each in hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "_run", run)
        assert whole._error(Swapped(), rows, [rows[0] * 2], [((2, 5, 32), {})], None) == told


def test_a_refused_weight_that_another_thread_packed_anew_is_computed_with_once_more() -> None:
    class Parts(CodedParts):
        weights: Any = ()  # renewing them finds nothing to follow
        calls = 0

        @following_weights
        def compute(self) -> int:
            self.calls += 1
            if self.calls == 1:
                raise lz.InvalidCallError("linear", ["packed: wanted the weight's, got another's"])
            return self.calls

    assert Parts((), pack=False).compute() == 2
