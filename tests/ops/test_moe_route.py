"""The choice of experts: what models' own routers choose, ties, groups, and what is refused."""

from __future__ import annotations

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings
from packaging.version import Version

import layerzero as lz
from drawing import at_once, examples
from layerzero.engine.functions import CALLS


def spread(tokens, experts, dtype=torch.float32):
    """Logits that are all apart."""
    rows = [torch.randperm(experts) for _ in range(tokens)]
    return (torch.stack(rows).float() / experts * 8 - 4).to(dtype)


def sorted_by_place(weights, places):
    order = places.long().argsort(-1)
    return weights.gather(-1, order), places.long().gather(-1, order)


GIVES_ALL = {"qwen3_moe": "5.8", "mixtral": "5.8", "deepseek_v3": "5.15"}
"""Versions of Transformers whose routers were seen to give logits, weights and places; 5.4 and 5.12 give less."""


def router_of(name, **values):
    """A router of Transformers whose logits are its input, and what it gives."""
    transformers = pytest.importorskip("transformers")
    if Version(transformers.__version__) < Version(GIVES_ALL.get(name[0], "5")):
        pytest.skip(f"{name[1]} of transformers {transformers.__version__} gives something else")
    module = __import__(f"transformers.models.{name[0]}.modeling_{name[0]}", fromlist=[name[1]])
    config = getattr(transformers, name[2])(**values)
    return getattr(module, name[1])(config).eval()


@pytest.mark.parametrize("normed", [True, False])
def test_it_chooses_as_qwen3(normed):
    size = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 16, "norm_topk_prob": normed}
    router = router_of(("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig"), **size)
    router.weight.data = torch.eye(16)
    logits, weights, places = router(spread(9, 16))
    got = lz.moe_route(logits, 4, renormalize=normed)
    torch.testing.assert_close(got[0], weights.detach())
    assert got[1].tolist() == places.tolist()


def test_it_chooses_as_mixtral():
    size = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 8}
    router = router_of(("mixtral", "MixtralTopKRouter", "MixtralConfig"), **size)
    router.weight.data = torch.eye(8)
    logits, weights, places = router(spread(9, 8))
    got = lz.moe_route(logits, 2)
    torch.testing.assert_close(got[0], weights.detach())
    assert got[1].tolist() == places.tolist()


def test_it_chooses_as_gpt_oss_whose_softmax_is_of_the_chosen():
    size = {"num_local_experts": 8, "num_experts_per_tok": 4, "hidden_size": 8}
    router = router_of(("gpt_oss", "GptOssTopKRouter", "GptOssConfig"), **size)
    router.weight.data, router.bias.data = torch.eye(8), torch.zeros(8)
    logits, weights, places = router(spread(9, 8))
    got = lz.moe_route(logits, 4)
    torch.testing.assert_close(got[0], weights.detach())
    assert got[1].tolist() == places.tolist()


@pytest.mark.parametrize("normed", [True, False])
def test_it_chooses_as_deepseek_v3(normed):
    size = {"n_routed_experts": 32, "num_experts_per_tok": 4, "hidden_size": 32, "n_group": 4, "topk_group": 2}
    router = router_of(
        ("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config"),
        **size,
        norm_topk_prob=normed,
        routed_scaling_factor=2.5,
    )
    router.weight.data = torch.eye(32)
    bias = router.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.3, 32))
    logits, weights, places = router(spread(9, 32))
    given = {"scoring": "sigmoid", "bias": bias, "expert_groups": 4, "top_groups": 2, "scale": 2.5}
    got = sorted_by_place(*lz.moe_route(logits, 4, renormalize=normed, **given))
    want = sorted_by_place(weights.detach(), places)
    torch.testing.assert_close(got[0], want[0])
    assert got[1].tolist() == want[1].tolist()


def test_it_chooses_as_deepseek_v4():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("needs a transformers that has DeepSeek-V4")
    size = {"num_local_experts": 16, "num_experts_per_tok": 4, "hidden_size": 16, "routed_scaling_factor": 1.5}
    router = router_of(("deepseek_v4", "DeepseekV4TopKRouter", "DeepseekV4Config"), **size)
    router.weight.data = torch.eye(16)
    bias = router.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.3, 16))
    logits, weights, places = router(spread(9, 16))
    got = sorted_by_place(*lz.moe_route(logits, 4, scoring="sqrt_softplus", bias=bias, scale=1.5))
    want = sorted_by_place(weights.detach(), places)
    torch.testing.assert_close(got[0], want[0])
    assert got[1].tolist() == want[1].tolist()


def test_llama_4_weighs_the_rows_of_its_one_expert():
    size = {"num_local_experts": 4, "num_experts_per_tok": 1, "hidden_size": 16, "intermediate_size": 8}
    mixture = router_of(("llama4", "Llama4TextMoe", "Llama4TextConfig"), **size)
    with torch.no_grad():
        for each in mixture.parameters():
            each.copy_(torch.randn(each.shape) / 4)
        rows = torch.randn(9, 16)
        weights, places = lz.moe_route(mixture.router(rows)[1], 1, scoring="sigmoid", renormalize=False)
        of_experts = mixture.experts.gate_up_proj.mT, mixture.experts.down_proj.mT
        got = lz.moe_experts(rows * weights, *of_experts, places, torch.ones_like(weights))
        torch.testing.assert_close(got + mixture.shared_expert(rows), mixture(rows)[0].view_as(rows))


@settings(max_examples=examples(40), deadline=None)
@given(
    tokens=some.integers(1, 9),
    top_k=some.integers(1, 8),
    scoring=some.sampled_from(["softmax", "sigmoid", "sqrt_softplus"]),
)
def test_each_expert_is_named_once_the_best_first_and_weights_add_up(tokens, top_k, scoring):
    weights, places = lz.moe_route(torch.randn(tokens, 8), top_k, scoring=scoring, scale=2.0)
    assert all(len(set(row)) == top_k and set(row) <= set(range(8)) for row in places.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.full((tokens,), 2.0))
    assert (weights.diff(dim=-1) <= 0).all()


@settings(max_examples=examples(40), deadline=None)
@given(shift=some.floats(-20, 20))
def test_a_softmax_does_not_see_what_all_logits_have_in_common(shift):
    logits = spread(5, 16)
    torch.testing.assert_close(lz.moe_route(logits + shift, 4), lz.moe_route(logits, 4), rtol=1e-4, atol=1e-5)


def test_a_bias_chooses_and_does_not_weigh():
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 5.0, 0.0])
    weights, places = lz.moe_route(logits, 1, bias=bias, renormalize=False)
    assert places.item() == 2
    assert weights.item() == 0.25


def test_what_is_masked_is_not_chosen_while_there_is_another():
    logits = torch.randn(5, 8)
    logits[:, ::2] = -torch.inf
    assert (lz.moe_route(logits, 4)[1] % 2 == 1).all()


def test_a_row_with_nan_still_names_experts_that_exist():
    logits = torch.randn(3, 8)
    logits[1, 4] = torch.nan
    places = lz.moe_route(logits, 3)[1]
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in places.tolist())


def test_results_are_float32_and_int32_whatever_the_logits_are():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        weights, places = lz.moe_route(spread(3, 8, dtype), 2)
        assert (weights.dtype, places.dtype) == (torch.float32, torch.int32)


def test_few_choices_serve_every_number_of_tokens():
    cache = CALLS["moe_route"].dispatcher.cache
    lz.configure()  # a new epoch: nothing is kept
    before = cache.size()
    for tokens in range(1, 201):
        lz.moe_route(torch.randn(tokens, 8), 2)
    assert cache.size() - before <= 9


def test_gradients_reach_the_logits():
    logits = torch.randn(3, 8, requires_grad=True)
    lz.moe_route(logits, 2, scoring="sigmoid")[0][:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0


@at_once(
    "given, told",
    [
        ({"top_k": 0}, "top_k: wanted 1 to the 8 experts of logits, got 0"),
        ({"top_k": 9}, "top_k: wanted 1 to the 8 experts of logits, got 9"),
        ({"scoring": "relu"}, "scoring: wanted one of softmax, sigmoid, sqrt_softplus, got 'relu'"),
        ({"scale": float("nan")}, "scale: wanted a finite number, got nan"),
        ({"expert_groups": 2}, "top_groups: wanted a number with expert_groups, got None: pass both or neither"),
        ({"top_groups": 2}, "expert_groups: wanted a number with top_groups, got None: pass both or neither"),
        ({"expert_groups": 3, "top_groups": 1}, "expert_groups: wanted a divisor of the 8 experts"),
        ({"expert_groups": 8, "top_groups": 8}, "that leaves a group two or more, got 8"),
        ({"expert_groups": 4, "top_groups": 5}, "top_groups: wanted 1 to the 4 of expert_groups, got 5"),
        ({"expert_groups": 4, "top_groups": 1, "top_k": 3}, "top_k: wanted at most the 2 experts of 1 groups, got 3"),
        ({"bias": torch.zeros(7)}, "bias: wanted experts 8 as in logits, got 7"),
        ({"bias": torch.zeros(8, dtype=torch.int32)}, "bias: wanted dtype"),
    ],
)
def test_what_means_nothing_is_refused(given, told):
    with pytest.raises(lz.InvalidCallError, match=told):
        lz.moe_route(torch.randn(3, 8), **{"top_k": 2, **given})


def test_logits_off_a_boundary_are_copied_where_their_rows_are_read_by_vectors():
    libraries, numbers = {"torch": "2.11.0+cu130", "vllm": "0.20.0"}, torch.randn(400)
    copied = {}
    with lz.scope(require_vetting=False):
        for start, experts in ((0, 64), (3, 64), (1, 33), (1, 2), (2, 2)):
            logits = numbers[start : start + 4 * experts].view(4, experts)
            report = lz.explain("moe_route", logits, 2, device="H100", libraries=libraries)
            (judged,) = [each for each in report.candidates if each.kernel.id == "vllm.topk_softmax"]
            assert not judged.reasons
            copied[start, experts] = [each.text for each in judged.adaptations]
    text = ["copy logits into contiguous memory"]
    assert copied == {(0, 64): [], (3, 64): text, (1, 33): [], (1, 2): text, (2, 2): []}


def test_a_kernel_that_was_right_on_a_gpu_runs_there_without_vetting():
    logits = torch.empty(5, 128, dtype=torch.bfloat16, device="meta")
    libraries = {"torch": "2.11.0+cu130", "vllm": "0.20.0"}
    report = lz.explain("moe_route", logits, 8, device="H100", libraries=libraries)
    assert not report.reasons("vllm.topk_softmax")
