"""Training on a GPU: gradients of learned biases, beside rows of padding, of grouped experts and ragged sequences."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.backends.torch.attention import levelled
from layerzero.backends.torch.cuda_attention import padded_mask

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

EFFICIENT = {"attention.*": "torch.sdpa.efficient"}
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def near(got, wanted, dtype):
    """Largest distance in units of the largest value."""
    distance = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert distance < TOLERANCE[dtype], float(distance)


def attention(query, key, value, bias):
    """Attention by definition. Shapes as (B, H, S, D), and a bias that is added to the scores."""
    return torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias, -1) @ value


def both(compute, tensors, dtype):
    """Results and gradients of a computation, and those of the definition in float64."""
    found = []
    for run, wide in ((compute, False), (attention, True)):
        given = [each.detach().to(torch.float64 if wide else dtype).requires_grad_() for each in tensors]
        output = run(*given)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).cuda()
        output.backward(weights.to(output.dtype))
        found.append((output.detach(), *(each.grad for each in given)))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [(1, 1), (1, 4), (2, 4), (2, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (37, 37), (50, 77), (1, 33)])
def test_a_learned_bias_gets_its_gradient_from_the_memory_efficient_kernel(dtype, bias, queries, keys):
    torch.manual_seed(0)
    sizes = ((2, 4, queries, 32), (2, 4, keys, 32), (2, 4, keys, 32), (*bias, queries, keys))
    tensors = [torch.randn(each, device="cuda").to(dtype) for each in sizes]

    def ours(query, key, value, bias):
        with lz.scope(locks=EFFICIENT):
            return lz.attention(query, key, value, attn_mask=bias, layout="BHSD", causal=False)

    got, truth = both(ours, tensors, dtype)
    for found, wanted in zip(got, truth, strict=True):
        near(found, wanted, dtype)


def test_a_learned_bias_chooses_it():
    query = torch.randn(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(1, 8, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    report = lz.explain("scaled_dot_product_attention", query, query, query, attn_mask=bias)
    assert report.reasons("torch.sdpa.efficient") == ()
    assert report.kernel_id != "torch.sdpa.math"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_padding_get_shares_that_add_up_to_one_in_the_backward(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 48, 32, device="cuda").to(dtype) for _ in range(3)]
    mask = torch.zeros(2, 1, 48, 48, device="cuda", dtype=dtype)
    mask[1, ..., :48, :] = torch.where(torch.arange(48, device="cuda").view(-1, 1) < 9, torch.finfo(dtype).min, 0.0)

    def ours(query, key, value):
        with lz.scope(locks=EFFICIENT):
            return lz.attention(query, key, value, attn_mask=mask, layout="BHSD", causal=False)

    def definition(query, key, value):
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        hidden = (mask.double().amax(-1, keepdim=True) < -1e6).expand_as(scores[..., :1])
        return torch.softmax(torch.where(hidden, scores.detach(), scores) + mask.double(), -1) @ value

    found = []
    for run, wide in ((ours, dtype), (definition, torch.float64)):
        given = [each.detach().to(wide).requires_grad_() for each in tensors]
        output = run(*given)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).cuda()
        output.backward(weights.to(output.dtype))
        found.append((output.detach(), *(each.grad for each in given)))
    for got, wanted in zip(*found, strict=True):
        near(got, wanted, dtype)


def test_a_mask_that_was_levelled_has_the_rows_that_the_kernel_demands():
    query, key = torch.randn(2, 4, 5, 32, device="cuda"), torch.randn(2, 4, 13, 32, device="cuda")
    bias = torch.randn(1, 4, 5, 13, device="cuda", requires_grad=True)
    mask = padded_mask(levelled(query, bias)[1], query, key)
    assert mask.shape == (2, 4, 5, 13)
    assert all(stride % 4 == 0 for stride in mask.stride()[:-1])
    assert mask.data_ptr() % 16 == 0
    mask.sum().backward()
    assert bias.grad is not None


@pytest.mark.parametrize("elsewhere", [False, True])
def test_grouped_experts_get_the_gradients_of_the_loop(elsewhere):
    torch.manual_seed(0)
    tokens, experts, top_k, hidden, inner = 40, 8, 2, 64, 96
    rows = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    down = torch.randn(experts, hidden, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
    ids = torch.rand(tokens, experts, device="cuda").argsort(-1)[:, :top_k]
    if elsewhere:
        ids[::3, 0] = -1
    shares = torch.rand(tokens, top_k, device="cuda", dtype=torch.bfloat16)
    assert lz.explain("moe_experts", rows, gate_up, down, ids, shares).kernel_id == "torch.experts_grouped"
    found = []
    for kernel in ("torch.experts_grouped", "torch.experts_each"):
        given = [each.clone().requires_grad_() for each in (rows, gate_up, down, shares)]
        with lz.scope(locks={"moe.experts": kernel}):
            output = lz.moe_experts(*given[:3], ids, given[3])
        output.float().square().sum().backward()
        found.append([output.detach(), *(each.grad for each in given)])
    for got, wanted in zip(*found, strict=True):
        near(got, wanted.double(), torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_ragged_sequences_have_gradients(dtype, window):
    torch.manual_seed(0)
    lengths = [5, 1, 0, 30]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    tensors = [torch.randn(sum(lengths), heads, 32, device="cuda") for heads in (4, 2, 2)]
    found = []
    for kernel, wide in (("torch.ragged_each", dtype), ("reference.*", torch.float64)):
        given = [each.detach().to(wide).requires_grad_() for each in tensors]
        with lz.scope(locks={"attention.*": kernel}):
            output = lz.ragged_attention(*given, starts, starts, causal=True, window=window)
        output.double().square().sum().backward()
        found.append([output.detach(), *(each.grad for each in given)])
    for got, wanted in zip(*found, strict=True):
        near(got, wanted.double(), dtype)
