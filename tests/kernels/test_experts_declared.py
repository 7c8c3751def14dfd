"""vLLM's experts for CUDA: what each is offered, and that its operators are called as they read numbers."""

from __future__ import annotations

import types

import pytest
import torch
import weight_operators as operators
from weight_operators import BF16, F16, LIBRARIES

import layerzero as lz
from layerzero.backends import grouped_weights, shape_cache
from layerzero.backends.torch import moe as of_torch
from layerzero.backends.vllm import experts as of_vllm
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.reasons import ReasonCode
from layerzero.engine.legality import limit_findings
from layerzero.engine.registry import REGISTRY
from layerzero.ops.moe.experts import EXPERTS, gated
from layerzero.ops.moe.quantized import QUANTIZED

COUNT, HIDDEN, INNER = 5, 192, 128
WRONG, DTYPE = ReasonCode.CONSTRAINT_FAILED, ReasonCode.DTYPE_UNSUPPORTED


class Operator(types.SimpleNamespace):
    """An operator with the parameters that its library gives it."""

    def __init__(self, meaning, names):
        schema = types.SimpleNamespace(arguments=[types.SimpleNamespace(name=name) for name in names.split()])
        super().__init__(default=types.SimpleNamespace(_schema=schema))
        self.default = type("Called", (), {"_schema": schema, "__call__": lambda _, *given: meaning(*given)})()


def align(ids, count, block, places, owners, total, of_map):
    """As csrc/moe/moe_align_sum_kernels.cu: what a map leaves out counts for nothing."""
    places.fill_(ids.numel())
    owners.zero_()
    at = 0
    for expert in range(count):
        mine = [place for place, each in enumerate(ids.flatten().tolist()) if of_map[each] == expert]
        padded = -(-len(mine) // block) * block
        assert at + padded <= len(places)
        places[at : at + len(mine)] = torch.tensor(mine, dtype=torch.int32)
        owners[at // block : (at + padded) // block] = expert
        at += padded
    total[0] = at


def marlin_moe(
    a, c, words, bias, scale, a_scale, second, zero, index, order, locks, places, owners, total, shares, *rest
):
    block, top_k, by_shares, kind, m, n, k, full, atomic, wide, of_zeros, *tiles = rest
    assert (a_scale, index, order, full, atomic, wide, of_zeros) == (None, None, None, True, False, True, False)
    assert tiles == [-1, -1, -1]
    assert c.shape == (m * top_k, n)
    assert a.shape == (m, k)
    assert n % 128 == 0
    assert locks.numel() == 4 * 132
    for start in range(0, int(total), block):
        expert = int(owners[start // block])
        mine = [place for place in places[start : start + block].tolist() if place < m * top_k]
        one = [None if each is None else each[expert] for each in (words, scale, zero)]
        rows = a[[place // top_k for place in mine]]
        of_second = None if second is None else second[expert].reshape(1)
        given = (None, one[0], None, one[1], None, of_second, one[2], None, None, torch.zeros(1), kind, len(mine), n, k)
        made = operators.marlin_gemm(rows, *given, True, False, True, False).float()
        if bias is not None:
            made += bias[expert][[operators.marlin_place(output, 1) for output in range(n)]].float()
        if by_shares:
            made *= shares.flatten()[mine].unsqueeze(1)
        c[mine] = made.to(c.dtype)


def permute(rows, ids, numbers, of_map, count, local, top_k, permuted, starts, places, order):
    """As moe_permute_unpermute_op.cu: experts that a map leaves out lie behind all others."""
    known = torch.where(of_map[ids.long()] < 0, count, of_map[ids.long()]).flatten()
    by_expert = known.argsort(stable=True)
    order.copy_(by_expert)
    permuted.copy_(rows[by_expert // top_k])
    starts.copy_(torch.searchsorted(known[by_expert], torch.arange(local + 1)))
    places.view(-1)[by_expert] = torch.arange(ids.numel(), dtype=torch.int32)


def unpermute(made, shares, places, starts, top_k, output):
    there = places < starts[-1]
    each = torch.where(there.unsqueeze(1), made[places.long()].float(), 0.0).view(*shares.shape, -1)
    output.copy_((each * shares.unsqueeze(-1)).sum(1))


GEMM = (
    "a c_or_none b_q_weight b_bias_or_none b_scales a_scales global_scale b_zeros_or_none g_idx_or_none perm_or_none "
    "workspace sorted_token_ids expert_ids num_tokens_past_padded topk_weights moe_block_size top_k mul_topk_weights "
    "b_type_id size_m size_n size_k is_full_k use_atomic_add use_fp32_reduce is_zp_float thread_k thread_n "
    "blocks_per_sm"
)
ALIGN = "topk_ids num_experts block_size sorted_token_ids experts_ids num_tokens_post_pad maybe_expert_map"
PERMUTE = (
    "input topk_ids token_expert_indices expert_map n_expert n_local_expert topk permuted_input "
    "expert_first_token_offset inv_permuted_idx permuted_idx"
)


@pytest.fixture
def library(monkeypatch):
    def gate(output, joined):
        output.copy_(gated(joined.float(), "silu"))

    known = types.SimpleNamespace(
        moe_wna16_marlin_gemm=Operator(marlin_moe, GEMM),
        moe_align_block_size=Operator(align, ALIGN),
        moe_permute=Operator(permute, PERMUTE),
        moe_unpermute=Operator(unpermute, "a b c d e f"),
        silu_and_mul=Operator(gate, "a b"),
    )
    monkeypatch.setattr(of_vllm, "operators", lambda *_: known)
    monkeypatch.setattr(of_vllm, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(of_vllm, "_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(grouped_weights.Locks, "now", lambda self: self._captured)


FORMATS = {
    "vllm.marlin_experts": (
        "compressed-tensors:bits=4,group=32",
        "gptq:bits=4,group=64,zeros=stored",
        "awq:bits=4,zeros=stored",
    ),
    "vllm.marlin_experts_int8": ("compressed-tensors:bits=8",),
    "vllm.marlin_experts_fp8": ("fp8", "fp8:rows=0"),
    "vllm.marlin_experts_mx": ("mxfp4",),
    "vllm.marlin_experts_nvfp4": ("nvfp4", "nvfp4:over"),
}
RAN = {"vllm.marlin_experts", "vllm.marlin_experts_int8"}
"""What passed conformance on a GPU."""


def call(text, dtype, tokens, **more):
    """A call with two experts a token, of which one is elsewhere, and what it is by the reference."""
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    weights = [draw(COUNT, 2 * INNER, HIDDEN) / 14, draw(COUNT, HIDDEN, INNER) / 11]
    if text is not None:
        weights = [lz.quantize_weight(each, text) for each in weights]
    else:
        weights = [each.to(dtype) for each in weights]
    ids = torch.rand(tokens, COUNT, generator=generator).argsort(-1)[:, :2].int()
    ids[0, 1] = -1
    given = {"input": draw(tokens, HIDDEN).to(dtype), "expert_ids": ids, "expert_weights": draw(tokens, 2).softmax(-1)}
    given |= dict(zip(("gate_up_weight", "down_weight"), weights, strict=True))
    biases = {"gate_up_bias": draw(COUNT, 2 * INNER).to(dtype), "down_bias": draw(COUNT, HIDDEN).to(dtype)}
    return given | (biases if more.pop("biased", False) else {}) | more


def made(kernel, given):
    """What a kernel gives for a call on an H100, as its plan would call it; None where it does not take it."""
    plain = dict(given)
    for name in ("gate_up_weight", "down_weight"):
        if isinstance(given[name], lz.QuantizedWeight):
            plain |= {
                key: each for key, each in given[name].arguments_of("moe_experts", name, {}).items() if each is not None
            }
    declared = REGISTRY.kernel(kernel)
    operation = QUANTIZED if "gate_up_format" in plain else EXPERTS
    facts = FactsBuilder(operation).of_valid({**operation.schema.neutral, **plain}, device=Device.named("H100"))
    if any(limit_findings(declared, facts)):
        return None
    plain = {**{name: value for name, value in operation.schema.neutral.items() if value is not None}, **plain}
    required = [plain.pop(each.name) for each in operation.schema.required]
    return declared.load(facts)(*required, **{name: each for name, each in plain.items() if name in declared.accepts})


@pytest.mark.parametrize("kernel", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_marlin_is_called_as_it_reads_numbers(library, kernel, tokens):
    for text in FORMATS[kernel]:
        for dtype in (F16, BF16):
            given = call(text, dtype, tokens, biased=tokens == 7)
            got = made(kernel, given)
            if got is None:
                assert (text, dtype) == ("mxfp4", F16) or (text.startswith("nvfp4") and "down_bias" in given)
                continue
            exact = lz.moe_experts(
                **{
                    name: each.double() if torch.is_tensor(each) and each.is_floating_point() else each
                    for name, each in given.items()
                }
            )
            assert (got.dtype, got.shape) == (dtype, exact.shape)
            torch.testing.assert_close(got.double(), exact, rtol=0.0, atol=0.06 if dtype is BF16 else 0.01)


def test_products_of_a_device_are_launched_one_after_the_other(library, monkeypatch):
    """Each sets its kernel's shared memory and launches it, without the GIL."""
    launching, cpu = {}, ("vllm.marlin_experts", None)
    monkeypatch.setattr(shape_cache, "_LAUNCHING", launching)
    held = []
    known = of_vllm.operators()
    product = known.moe_wna16_marlin_gemm.default

    def watched(*given):
        held.append(launching[cpu].locked())
        product(*given)

    monkeypatch.setattr(known, "moe_wna16_marlin_gemm", Operator(watched, GEMM))
    made("vllm.marlin_experts", call("compressed-tensors:bits=4,group=32", BF16, 1))
    made("vllm.marlin_experts_fp8", call("fp8", BF16, 1))
    assert held == [True] * 4
    assert list(launching) == [cpu]
    assert not launching[cpu].locked()


def test_what_experts_are_looked_up_in_is_there_before_another_stream_reads_it(library, monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    waited = []
    stream = types.SimpleNamespace(synchronize=lambda: waited.append("made"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(of_torch, "_counted", {})
    numbers = torch.zeros(3, dtype=torch.int32).as_subclass(OnGpu)
    assert of_torch._numbers(5, numbers) is of_torch._numbers(5, numbers)
    assert waited == ["made"]
    made("vllm.marlin_experts", call("compressed-tensors:bits=4,group=32", BF16, 1))
    assert of_vllm.MAPS.has(COUNT, torch.device("cpu"))
    assert of_vllm.ORDERS.has(torch.device("cpu"))


@pytest.mark.parametrize("tokens", [1, 30])
def test_torchs_grouped_products_get_what_was_permuted(library, tokens):
    given = call(None, BF16, tokens)
    got, exact = made("vllm.experts_grouped", given), lz.moe_experts(**given)
    torch.testing.assert_close(got, exact, rtol=0.0, atol=0.03)


@pytest.mark.parametrize("kernel", [each for each in FORMATS if each not in RAN])
def test_what_never_ran_proves_itself_first(kernel):
    assert REGISTRY.kernel(kernel).untried


@pytest.mark.parametrize(
    ("kernel", "text", "dtype", "wanted"),
    [
        ("vllm.marlin_experts", "mxfp4", BF16, {WRONG}),
        ("vllm.marlin_experts_mx", "mxfp4", F16, {DTYPE}),
        ("vllm.marlin_experts_mx", "nvfp4", BF16, {WRONG}),
        ("vllm.marlin_experts_mx", "mxfp4:rotation=32", BF16, {ReasonCode.QUANT_FORMAT_UNSUPPORTED}),
        ("vllm.marlin_experts_nvfp4", "nvfp4:rotation=16", BF16, {ReasonCode.QUANT_FORMAT_UNSUPPORTED}),
        ("vllm.marlin_experts_fp8", "fp8:group=32,rows=4", BF16, {WRONG}),
        ("vllm.marlin_experts_int8", "compressed-tensors:bits=4,group=32", BF16, {WRONG}),
        ("vllm.marlin_experts", "gptq:bits=4,group=32,zeros=stored,permuted=True", BF16, {WRONG}),
    ],
)
def test_each_kernel_says_what_it_is_not_for(kernel, text, dtype, wanted):
    if "permuted" in text:
        of = lz.WeightFormat.of(text)
        from layerzero.ops.quantize.schemes import scheme_of

        given = call(None, dtype, 3)
        for name in ("gate_up_weight", "down_weight"):
            shape = given[name].shape
            each = [
                lz.QuantizedWeight(of, shape[1:], *scheme_of(of).random(of, *shape[1:], None)) for _ in range(COUNT)
            ]
            given[name] = lz.QuantizedWeight.stack(each)
    else:
        given = call(text, dtype, 3)
    report = lz.explain("moe_experts", **given, device="H100", libraries=LIBRARIES)
    assert {reason.code for reason in report.reasons(kernel)} - {ReasonCode.NOT_VETTED} == wanted
