"""``experts_implementation="layerzero"``: what Transformers' own functions give, and what is left to them and why."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import layerzero as lz
from drawing import mostly

transformers = pytest.importorskip(
    "transformers", "5.7", reason="transformers before 5.7 takes no further names of experts"
)

import mixtures  # noqa: E402  # it imports transformers

from layerzero.core.errors import LayerZeroWarning  # noqa: E402
from layerzero.integrations import transformers_experts as integration  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered", "quiet_transformers")

UNLIKE = {"Mixtral", "GptOss", "DeepseekV3", "Qwen3Next"}

OURS = {"experts_implementation": "layerzero"}


@pytest.fixture(autouse=True)
def _untold() -> None:
    integration._told.clear()


def kernels(model: Any) -> list[str]:
    """What the experts of a model run."""
    return [row.kernel for row in lz.trace(model, mixtures.tokens()).rows if row.operation == "moe.experts"]


@pytest.mark.parametrize("name", mostly(mixtures.NAMES, UNLIKE))
def test_it_writes_the_same_tokens(name: str) -> None:
    stock, ours = mixtures.made(name), mixtures.made(name, **OURS)
    assert len(kernels(ours)) == len(mixtures.experts_of(ours))
    assert mixtures.written(ours) == mixtures.written(stock)


@pytest.mark.parametrize("name", mostly(mixtures.NAMES, UNLIKE))
def test_a_prompt_and_tokens_after_it_give_what_stock_gives(name: str) -> None:
    stock, ours = mixtures.made(name), mixtures.made(name, **OURS)
    scale = mixtures.logits(stock).abs().max()
    for run in (mixtures.logits, mixtures.in_two_parts):
        torch.testing.assert_close(run(ours) / scale, run(stock) / scale, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", mostly(mixtures.NAMES, UNLIKE))
def test_bfloat16_is_as_near_to_the_truth_as_stock(name: str) -> None:
    stock, ours = mixtures.made(name, torch.bfloat16), mixtures.made(name, torch.bfloat16, **OURS)
    mixtures.assert_as_near(mixtures.logits(ours), mixtures.logits(stock), mixtures.logits(mixtures.true(stock)))
    for one, other in zip(mixtures.experts_of(stock), mixtures.experts_of(ours), strict=True):
        with torch.no_grad():
            rows, ids, shares = calls_of(one, torch.bfloat16)
            truth = mixtures.true(one)(rows.double(), ids, shares.double())
            mixtures.assert_as_near(other(rows, ids, shares), one(rows, ids, shares), truth)


def calls_of(experts: Any, dtype: torch.dtype = torch.float32, rows: int = 33) -> list[torch.Tensor]:
    """Rows, ids and shares, the same each time."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(rows, 4, generator=generator).argsort(-1)[:, :2].contiguous()
    shares = torch.rand(rows, 2, generator=generator).to(dtype)
    return [torch.randn(rows, 64, generator=generator).to(dtype), ids, shares]


@pytest.mark.parametrize("name", mostly(mixtures.NAMES, UNLIKE))
def test_gradients_are_stocks(name: str) -> None:
    pair = mixtures.made(name), mixtures.made(name, **OURS)
    for model in pair:
        model(mixtures.tokens()).logits.float().square().mean().backward()
    wanted, got = ({key: each.grad for key, each in model.named_parameters()} for model in pair)
    for key, gradient in wanted.items():
        assert (gradient is None) == (got[key] is None), key
        if gradient is not None:
            torch.testing.assert_close(got[key], gradient, atol=1e-5, rtol=1e-3, msg=key)


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_it_compiles_as_one_graph(name: str) -> None:
    ours = mixtures.made(name, **OURS)
    wanted = mixtures.logits(ours)
    try:
        got = mixtures.logits(torch.compile(ours, fullgraph=True, backend="eager"))
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_it_is_switched_on_and_off_again() -> None:
    model = mixtures.made("Mixtral")
    before = mixtures.logits(model)
    assert kernels(model) == []
    model.set_experts_implementation("layerzero")
    assert len(kernels(model)) == 2
    model.set_experts_implementation("grouped_mm")
    assert kernels(model) == []
    assert torch.equal(mixtures.logits(model), before)


def test_nothing_of_it_lies_on_a_module_that_is_saved() -> None:
    model = mixtures.made("Mixtral", **OURS)
    before = {key for each in model.modules() for key in vars(each)}
    mixtures.logits(model)
    assert {key for each in model.modules() for key in vars(each)} == before
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(mixtures.logits(torch.load(file, weights_only=False)), mixtures.logits(model))


def stock_of(experts: Any, call: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = sys.modules["transformers.integrations.moe"].grouped_mm_experts_forward(experts, *call)
    return found


class Cut(torch.nn.Module):
    """An activation that looks like silu where values are small."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x.clamp(max=7.0))


def _parallel(experts: Any) -> None:
    experts._is_expert_parallel = True


def _cut(experts: Any) -> None:
    experts.act_fn = Cut()


def _quick(experts: Any) -> None:
    experts.act_fn = transformers.activations.ACT2FN["quick_gelu"]


def _own_gate(experts: Any) -> None:
    experts._apply_gate = lambda joined: joined.chunk(2, -1)[0].relu() * joined.chunk(2, -1)[1]


def _failing_gate(experts: Any) -> None:
    def gate(joined: torch.Tensor) -> torch.Tensor:
        if joined.shape[0] == 8:
            raise TypeError("only of my rows")
        return joined.chunk(2, -1)[0].sigmoid() * joined.chunk(2, -1)[1]

    experts._apply_gate = gate


def _normed(experts: Any) -> None:
    experts.has_post_expert_norm = True
    experts.post_expert_norm = torch.nn.LayerNorm(64)


def _gateless(experts: Any) -> None:
    experts.has_gate = False
    experts.up_proj = torch.nn.Parameter(experts.gate_up_proj[:, :32].detach().clone())


def _adapted(experts: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())


REFUSED = {
    _parallel: "divided among ranks",
    _cut: "its gate is none of silu",
    _quick: "its gate is none of silu",
    _own_gate: "its gate is none of silu",
    _failing_gate: r"its gate cannot be evaluated \(TypeError: only of my rows\)",
    _normed: "a norm follows each",
    _gateless: "have no gate",
    _adapted: r"computed anew for each call \(parametrizations\)",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda each: each.__name__)
def test_what_it_cannot_compute_is_told_and_left_to_transformers(change: Any) -> None:
    experts = mixtures.experts_of(mixtures.made("Mixtral", **OURS))[0]
    change(experts)
    call = calls_of(experts)
    with (
        torch.no_grad(),
        pytest.warns(LayerZeroWarning, match=f"MixtralExperts runs as 'grouped_mm': .*{REFUSED[change]}"),
    ):
        got = experts(*call)
    assert torch.equal(got, stock_of(experts, call))
    with warnings.catch_warnings():  # told once
        warnings.simplefilter("error")
        with torch.no_grad():
            experts(*call)


def test_experts_on_other_ranks_add_nothing() -> None:
    """Ids beyond the last one here, as Transformers marks what another rank computes."""
    experts = mixtures.experts_of(mixtures.made("Mixtral", **OURS))[0]
    experts._is_expert_parallel = True
    rows, ids, shares = calls_of(experts)
    away = ids == 3
    ids = ids.masked_fill(away, 4)
    with torch.no_grad(), pytest.warns(LayerZeroWarning, match="divided among ranks"):
        got = experts(rows, ids.clone(), shares.masked_fill(away, 0.0))
    plain = lz.moe_experts(rows, experts.gate_up_proj, experts.down_proj, ids.masked_fill(away, -1), shares)
    torch.testing.assert_close(got, plain)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_gates_are_told_by_their_values(activation: str) -> None:
    experts = mixtures.experts_of(mixtures.made("Mixtral", **OURS))[0]
    experts.act_fn = transformers.activations.ACT2FN[activation]
    call = calls_of(experts)
    with torch.no_grad():
        torch.testing.assert_close(experts(*call), stock_of(experts, call))


def test_the_numbers_of_a_gate_are_the_modules() -> None:
    experts = mixtures.experts_of(mixtures.made("GptOss", **OURS))[0]
    experts.alpha, experts.limit = 1.0, 0.5
    call = calls_of(experts)
    with torch.no_grad():
        torch.testing.assert_close(experts(*call), stock_of(experts, call))


@pytest.mark.parametrize("act", [torch.nn.GELU(), torch.nn.functional.gelu], ids=["module", "function"])
def test_a_gate_that_is_exchanged_later_counts(act: Any) -> None:
    stock, ours = mixtures.made("Mixtral"), mixtures.made("Mixtral", **OURS)
    mixtures.logits(ours)
    for each in (*mixtures.experts_of(stock), *mixtures.experts_of(ours)):
        del each.act_fn  # a module's place takes no function
        each.act_fn = act
    torch.testing.assert_close(mixtures.logits(ours), mixtures.logits(stock), atol=1e-4, rtol=1e-4)
    assert len(kernels(ours)) == len(mixtures.experts_of(ours))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, of forward-mode gradients
def test_autocast_and_transforms_run_as_stock() -> None:
    experts = mixtures.experts_of(mixtures.made("Mixtral", **OURS))[0]
    call = calls_of(experts)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(experts(*call), stock_of(experts, call))
    stock, ours = _both(experts, call)
    try:
        wanted = torch.func.grad(lambda rows: stock(rows).sum())(call[0])
    except RuntimeError as error:
        pytest.skip(f"stock has no such gradient with torch {torch.__version__}: {error}")
    assert torch.equal(torch.func.grad(lambda rows: ours(rows).sum())(call[0]), wanted)


def _both(experts: Any, call: list[torch.Tensor]) -> tuple[Any, Any]:
    function = sys.modules["transformers.integrations.moe"].grouped_mm_experts_forward
    return lambda rows: function(experts, rows, *call[1:]), lambda rows: experts(rows, *call[1:])


def test_rows_of_another_dtype_are_transformers_business() -> None:
    experts = mixtures.experts_of(mixtures.made("Mixtral", torch.bfloat16, **OURS))[0]
    call = calls_of(experts)
    with torch.no_grad(), pytest.warns(LayerZeroWarning, match="rows and weights differ in their dtypes"):
        got = experts(*call)
    assert torch.equal(got, stock_of(experts, call))


def test_a_model_without_experts_is_told_so_once() -> None:
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.warns(
        LayerZeroWarning, match="LlamaForCausalLM has no experts .* nothing of it is LayerZero's"
    ) as told:
        transformers.LlamaForCausalLM._from_config(config, **OURS)
    assert len(told) == 1


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "sonicmoe"])
def test_a_name_that_transformers_gives_a_meaning_is_refused(name: str) -> None:
    before = dict(transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS)
    with pytest.raises(ValueError, match="means nothing to Transformers"):
        lz.register_with_transformers(name)
    assert dict(transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS) == before


def test_transformers_without_the_interface_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    lz.register_with_transformers()
    assert not integration.is_reserved("grouped_mm", ())


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """New tensors lie on another device than random numbers are drawn on, as after set_default_device("cuda")."""
    with torch.device("meta"):
        yield


def test_a_gate_is_asked_whatever_device_new_tensors_are_on(elsewhere: None) -> None:
    with torch.device("cpu"):
        experts = mixtures.experts_of(mixtures.made("Mixtral", **OURS))[0]
    assert integration._gate_of(experts) == integration.Gate("silu")
