"""What happens to a model behind the back of ``lz.optimize``: hooks of the process, other forwards, hidden writes."""

from __future__ import annotations

import copy
import types

import pytest
import torch

import layerzero as lz
from drawing import mostly

transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")


def made(kind="Llama", **more):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


IDS = torch.arange(1, 13).view(2, 6)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_hooks_of_the_process_hear_every_module():
    model = made()
    heard = []
    names = {id(module): name for name, module in model.named_modules()}
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(names.get(id(module))))
    try:
        logits(model)
        wanted, heard[:] = sorted(heard), []
        lz.optimize(model)
        heard.clear()
        logits(model)
    finally:
        hook.remove()
    assert sorted(heard) == wanted


def test_a_forward_that_was_put_around_stays_when_ours_is_taken_off():
    model = made()
    before = logits(model)
    report = lz.optimize(model)
    layer = model.model.layers[0]
    ours, called = layer.forward, []

    def around(self, *given, **named):
        called.append(self)
        return type(self).forward(self, *given, **named)

    layer.forward = types.MethodType(around, layer)
    report.undo()
    assert ours is not layer.forward
    assert torch.equal(logits(model), before)
    assert called == [layer]


@pytest.mark.parametrize("whole", [True, False], ids=["layers", "norms alone"])
def test_a_weight_that_is_written_past_torchs_count_counts_at_once(whole):
    model = made("Gemma2", head_dim=8, query_pre_attn_scalar=8)
    target = model if whole else model.model.norm
    report = lz.optimize(target)
    assert report.replaced
    logits(model)
    with torch.no_grad():
        for each in (model.model.norm, model.model.layers[1].input_layernorm):
            each.weight.data.copy_(torch.randn_like(each.weight))
    got = logits(model)
    report.undo()
    torch.testing.assert_close(got, logits(model), atol=1e-4, rtol=1e-4)


def test_norms_whose_weight_is_every_other_number_are_served():
    model = made("Gemma2", head_dim=8, query_pre_attn_scalar=8)
    for each in (model.model.norm, model.model.layers[0].input_layernorm):
        each.weight.data = torch.randn(64)[::2]
    before = logits(model)
    lz.optimize(model)
    torch.testing.assert_close(logits(model), before, atol=1e-4, rtol=1e-4)


def test_a_forward_of_ours_that_was_put_back_after_undo_is_no_reason_to_leave_a_module():
    model = made()
    report = lz.optimize(model)
    layer = model.model.layers[0]
    ours = layer.forward
    layer.forward = types.MethodType(lambda self, *given, **named: type(self).forward(self, *given, **named), layer)
    report.undo()
    layer.forward = ours  # as accelerate does when it takes its own away
    again = lz.optimize(model)
    assert [each.kind for each in again.replaced].count("layer") == 2


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:While compiling"
)
@pytest.mark.parametrize("way", mostly(["export", "strict export", "trace"], ["export", "trace"]))
def test_what_is_exported_of_an_optimized_model_is_the_stock_model(way, monkeypatch):
    def operators(model):
        if way == "trace":
            traced = torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, IDS, check_trace=False)
            return [each.kind() for each in traced.inlined_graph.nodes()]
        program = torch.export.export(model, (IDS,), {"use_cache": False}, strict=way == "strict export")
        return [str(each.target) for each in program.graph.nodes if each.op == "call_function"]

    monkeypatch.setattr("layerzero.integrations.optimize.entrance.time_random_rows", lambda *_, **__: None)
    model = made().requires_grad_(False)  # which a trace keeps as constants
    try:
        wanted = operators(model)
    except IndexError as error:  # of Transformers 5.4's mask in a trace
        pytest.skip(f"stock is not exported either: {error}")
    report = lz.optimize(model)
    assert {"attention", "layer"} <= {each.kind for each in report.replaced}
    assert operators(model) == wanted


@pytest.mark.parametrize("behind", [True, False], ids=["behind a layer", "before the next"])
def test_hooks_between_layers_may_write_past_torchs_count(behind):
    """A layer has the norm with which the next one begins ready, of the numbers that it returned."""

    def steer(module, given, result=None):
        (given[0] if result is None else result).data[:, -1] += 3.0

    model = made()
    stock = copy.deepcopy(model)
    report = lz.optimize(model)
    assert "layer" in {each.kind for each in report.replaced}, str(report)
    for each in (model, stock):
        first, second = each.model.layers
        first.register_forward_hook(steer) if behind else second.register_forward_pre_hook(steer)
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


def test_a_layers_first_norm_may_be_written_between_layers():
    """As calibrations do that run layers one by one."""
    model = made()
    stock = copy.deepcopy(model)
    report = lz.optimize(model)
    assert "layer" in {each.kind for each in report.replaced}, str(report)

    def by_layer(model):
        first, second = model.model.layers
        with torch.no_grad():
            rows = model.model.embed_tokens(IDS)
            named = {"position_embeddings": model.model.rotary_emb(rows, torch.arange(6)[None])}
            rows = first(rows, **named)
            second.input_layernorm.weight.mul_(1.5)
            return second(rows, **named)

    torch.testing.assert_close(by_layer(model), by_layer(stock), rtol=1e-4, atol=1e-4)


def test_heads_may_be_pruned_later():
    def prune(model):
        for each in (one.self_attn for one in model.model.layers):
            each.q_proj.weight.data = each.q_proj.weight.data[:16]
            each.k_proj.weight.data, each.v_proj.weight.data = each.k_proj.weight.data[:8], each.v_proj.weight.data[:8]
            each.o_proj.weight.data = each.o_proj.weight.data[:, :16]
        return model

    model = made()
    stock = prune(copy.deepcopy(model))
    report = lz.optimize(model)
    assert "layer" in {each.kind for each in report.replaced}, str(report)
    torch.testing.assert_close(logits(prune(model)), logits(stock), rtol=1e-4, atol=1e-4)


def test_a_call_may_ask_for_attention_in_both_directions():
    model = made()
    with torch.no_grad():
        expected = model(IDS, is_causal=False).logits
        report = lz.optimize(model)
        assert "layer" in {each.kind for each in report.replaced}, str(report)
        torch.testing.assert_close(model(IDS, is_causal=False).logits, expected, rtol=1e-4, atol=1e-4)
