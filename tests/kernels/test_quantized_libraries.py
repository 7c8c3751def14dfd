"""Libraries over a cache of float8: what they are given in place of a cache of floats, and what they refuse."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends.flashinfer import modules
from layerzero.backends.flashinfer import quantized as flashinfer
from layerzero.backends.shape_cache import Prepared
from layerzero.backends.vllm import quantized as vllm
from layerzero.backends.vllm import varlen
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.registry import REGISTRY
from layerzero.ops.paged.quantized import DECODE, PREFILL

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BATCH, PAGE, HEADS, KV_HEADS, DIM = 3, 16, 4, 2, 64
ONE, HEAD, TOKEN = (), (KV_HEADS,), (2 * BATCH, PAGE, KV_HEADS)


def call(shape=HEAD, dtype=E4M3, tokens=None):
    """Tensors of a decode, or of as many tokens a sequence, and the step that they make."""
    torch.manual_seed(0)
    scales = [0.02 + 0.03 * torch.rand(shape) for _ in range(2)]
    codes = [(torch.randn(2 * BATCH, PAGE, KV_HEADS, DIM) / 0.04).to(dtype) for _ in range(2)]
    table, lens = torch.randperm(2 * BATCH).int().view(BATCH, 2), torch.tensor([20, 7, 32], dtype=torch.int32)
    if tokens is None:
        query, starts = torch.randn(BATCH, 1, HEADS, DIM).bfloat16(), []
    else:
        query = torch.randn(sum(tokens), HEADS, DIM).bfloat16()
        starts = [torch.tensor([0, *tokens]).cumsum(0, dtype=torch.int32)]
    return (query, *codes, table, lens, *starts, *scales)


def facts_of(tensors, device="H100", **arguments):
    operation = (DECODE if tensors[0].ndim == 4 else PREFILL).name
    device = Device.named(device)
    return FactsBuilder(REGISTRY.operation(operation)).build(*tensors, device=device, layout="NHD", **arguments)


def reference(tensors, **arguments):
    return (DECODE if tensors[0].ndim == 4 else PREFILL).reference(*tensors, **arguments)


class Wrapper:
    """Stands for FlashInfer's wrappers: attends over the pages that it was told of, log-sum-exps in base 2."""

    def __init__(self, *_, **__):
        self.told = {}

    def plan(self, *tensors, **arguments):
        self.told, self.rows = arguments, tensors[-3:]

    def run(self, query, caches, *, return_lse):
        assert query.dtype == self.told["q_data_type"] == torch.bfloat16
        assert caches[0].dtype == self.told["kv_data_type"]
        indptr, pages, last = self.rows
        starts = range(len(query) + 1) if len(indptr) == len(query) + 1 else self.starts
        outputs, sums = [], []
        for row in range(len(indptr) - 1):
            used = pages[indptr[row] : indptr[row + 1]].long()
            length = (len(used) - 1) * PAGE + int(last[row])
            keys, values = (cache.float()[used].flatten(0, 1)[:length].unsqueeze(0) for cache in caches)
            given = query[starts[row] : starts[row + 1]].float().unsqueeze(0)
            output, lse = lz.attention(given, keys, values, causal=True, return_lse=True, layout="BSHD")
            outputs.append(output[0])
            sums.append(lse[0].t())
        output = torch.cat(outputs).to(query.dtype)
        return (output, torch.cat(sums) / math.log(2)) if return_lse else output


@pytest.fixture
def flashinfer_is_there(monkeypatch):
    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(**dict.fromkeys(names, Wrapper)))


@pytest.mark.parametrize("tokens", [None, (2, 1, 5)], ids=["decode", "tokens"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [ONE, (1,), HEAD], ids=str)
def test_flashinfer_has_scales_in_queries_and_outputs(flashinfer_is_there, monkeypatch, tokens, dtype, shape):
    tensors = call(shape, dtype, tokens)
    starts = None if tokens is None else tensors[5]
    monkeypatch.setattr(Wrapper, "starts", starts, raising=False)
    step = lz.StepMetadata(*tensors[3:5], cu_seqlens_q=starts, capturable=True)
    load = flashinfer._load_tokens if tokens else lambda facts: flashinfer._load_decode(facts, tensor_cores=True)
    given = {"return_lse": True, "step": step}
    output, lse = load(facts_of(tensors, **given))(*tensors, **given)
    wanted, sums = reference(tensors, return_lse=True)
    torch.testing.assert_close(output, wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, sums, rtol=0.02, atol=0.02)
    assert output.shape == wanted.shape


def test_flashinfer_compiles_another_module_for_each_dtype_of_the_cache():
    names = {modules._for_batches("fa2", facts_of(call(dtype=dtype, tokens=(2, 1, 5)))) for dtype in (E4M3, E5M2)}
    assert {name.split("_dtype_o")[0] for name in names} == {
        f"batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_{each}" for each in ("e4m3", "e5m2")
    }
    assert len({kernel.build_key(facts_of(call(dtype=each))) for each in (E4M3, E5M2) for kernel in DECODES}) == 4


DECODES = [kernel for kernel in flashinfer.KERNELS if kernel.operations == (DECODE.name,)]


class Forward:
    """Stands for FlashAttention 3's operator: attends to float8 with its scales, by queries in float8."""

    def __init__(self):
        self.default = self

    def __call__(self, *given):
        query, keys, values, starts = *given[:3], given[7]
        lens, table, descales, causal = given[11], given[14], given[20:23], given[24]
        assert len(given) == 37
        assert query.dtype == keys.dtype == values.dtype == E4M3
        assert all(tuple(each.shape) == (len(lens), KV_HEADS) for each in descales)
        owner = torch.repeat_interleave(torch.arange(len(lens)), starts.diff())
        wide = query.float().unflatten(1, (KV_HEADS, -1)) * descales[0][owner][:, :, None, None]
        assert all(torch.equal(each, each[:1].expand_as(each)) for each in descales[1:])
        scales = [each[0].contiguous() for each in descales[1:]]
        output, lse = PREFILL.reference(
            wide.flatten(1, 2), keys, values, table, lens, starts, *scales, causal=causal, return_lse=True
        )
        return output.bfloat16(), lse, None, None


@pytest.mark.parametrize("tokens", [None, (2, 1, 5)], ids=["decode", "tokens"])
@pytest.mark.parametrize("shape", [ONE, (1,), HEAD], ids=str)
def test_flash_attention_3_has_queries_in_float8_and_a_scale_for_each_head(monkeypatch, tokens, shape):
    monkeypatch.setattr(varlen, "operators", lambda *_: types.SimpleNamespace(fwd=Forward()))
    monkeypatch.setattr(vllm, "STARTS", Prepared(lambda _, batch: torch.arange(batch + 1, dtype=torch.int32), 8))
    tensors = call(shape, tokens=tokens)
    run = vllm._load(facts_of(tensors, narrow_query=True, return_lse=True))
    output, lse = run(*tensors, return_lse=True)
    wanted, sums = reference(tensors, return_lse=True)
    torch.testing.assert_close(output, wanted, rtol=0.125, atol=0.1)
    torch.testing.assert_close(lse, sums, rtol=0.125, atol=0.1)
    assert not torch.equal(output, wanted)  # three bits of mantissa are left of the queries


def test_queries_in_float8_are_as_exact_as_their_largest_and_nan_stays_with_its_token():
    query = torch.randn(5, HEADS, DIM) * torch.tensor([1.0, 1e-6, 0.0, 300.0, 1.0]).view(-1, 1, 1)
    query[4, 1, 3], query[4, 2, 5] = math.nan, math.inf
    for each in (True, False):
        codes, scale = vllm.in_float8(query.bfloat16(), KV_HEADS, each=each)
        assert scale.shape == ((5, KV_HEADS) if each else (KV_HEADS,))
        back = (codes.float().unflatten(1, (KV_HEADS, -1)) * scale[..., None, None]).flatten(1, 2)
        lost = query.isnan() | query.isinf()
        assert torch.equal(back.isnan(), lost)
        step = 0.07 * query.abs() + 0.002 * scale.repeat_interleave(2, -1).unsqueeze(-1)
        assert ((back - query).abs() <= step).masked_fill(lost, True).all()


def refused(kernel, facts):
    (found,) = [each for each in (*flashinfer.KERNELS, *vllm.KERNELS) if each.id == kernel]
    return {finding.reason.fact for each in found.limits for finding in each.check(facts) if not finding.repair}


OF_FLASHINFER = [kernel.id for kernel in flashinfer.KERNELS[:2]]


@at_once("kernel", [*OF_FLASHINFER, "vllm.flash_attn.v3.quantized"])
@at_once(
    "tensors, arguments, fact",
    [
        (call(), {}, None),
        (call(TOKEN), {}, "key_scale"),
        (call(dtype=torch.int8), {}, "cache_dtype"),
        (call(dtype=E5M2), {}, "cache_dtype"),
        (call(), {"narrow_query": False}, "narrow_query"),
    ],
)
def test_what_a_library_cannot_read_is_refused(kernel, tensors, arguments, fact):
    taken = kernel in OF_FLASHINFER and (fact == "narrow_query" or tensors[1].dtype == E5M2)
    facts = facts_of(tensors, **{"narrow_query": True, **arguments})
    assert refused(kernel, facts) - {"its tensor of starts"} == (set() if fact is None or taken else {fact})


def test_queries_are_narrowed_only_over_a_cache_of_float8():
    query, keys, values, table, lens, key_scale, value_scale = call()
    given = {"key_scale": key_scale, "value_scale": value_scale}
    exact = lz.paged_attention(query, keys, values, table, lens, **given)
    assert torch.equal(lz.paged_attention(query, keys, values, table, lens, narrow_query=True, **given), exact)
    wide = keys.bfloat16(), values.bfloat16()
    with pytest.raises(lz.InvalidCallError, match="narrow_query: wanted False over a cache of bfloat16"):
        lz.paged_attention(query, *wide, table, lens, narrow_query=True)
    with pytest.raises(lz.InvalidCallError, match="narrow_query: wanted bool"):
        lz.paged_attention(query, keys, values, table, lens, narrow_query=1, **given)


def test_the_append_divides_by_one_scale_a_tensor(monkeypatch):
    seen = []

    def reshape_and_cache_flash(key, value, keys, values, slots, form, key_scale, value_scale):
        assert key_scale.shape == value_scale.shape == (1,), "vLLM 0.20 refuses scales of two shapes"
        seen.append((keys.dtype, form, float(key_scale)))

    operator = types.SimpleNamespace(reshape_and_cache_flash=types.SimpleNamespace(default=reshape_and_cache_flash))
    monkeypatch.setattr(vllm, "operators", lambda *_: operator)
    (kernel,) = [each for each in vllm.KERNELS if each.id == "vllm.append_codes"]
    new, slots = [torch.randn(2, KV_HEADS, DIM) for _ in range(2)], torch.tensor([3, 40])
    for shape, form in (((), E4M3), ((1,), E5M2)):
        _, keys, values, *_, key_scale, value_scale = call(shape, form)
        key_scale = key_scale.view(1)
        tensors = (*new, keys, values, slots, key_scale, value_scale)
        facts = FactsBuilder(REGISTRY.operation("kv.append.quantized")).build(
            *tensors, device=Device.named("H100"), layout="NHD"
        )
        kernel.load(facts)(*tensors)
        assert refused("vllm.append_codes", facts) == set()
        assert seen[-1][2] == float(key_scale)
    assert [each[:2] for each in seen] == [(torch.uint8, "fp8_e4m3"), (torch.uint8, "fp8_e5m2")]
    facts = FactsBuilder(REGISTRY.operation("kv.append.quantized")).build(
        *new, keys, values, slots, *call(HEAD)[-2:], device=Device.named("H100"), layout="NHD"
    )
    assert refused("vllm.append_codes", facts) == {"key_scale"}


@pytest.mark.parametrize(("heads", "dim", "ends"), [(1, 16, False), (2, 16, True), (1, 32, True)])
def test_the_append_has_a_warp_for_heads_that_lie_apart(heads, dim, ends):
    new, slots, kernel = [torch.randn(1, heads, dim)] * 2, torch.tensor([3]), REGISTRY.kernel("vllm.append_paged")
    for apart, runs in ((dim, True), (dim + 8, ends)):
        caches = [torch.zeros(2, 16, heads, apart)[..., :dim] for _ in range(2)]
        facts = FactsBuilder(REGISTRY.operation("kv.append.paged")).build(
            *new, *caches, slots, device=Device.named("H100"), layout="NHD"
        )
        found = [str(finding.reason) for limit in kernel.limits for finding in limit.check(facts)]
        assert any("32 numbers" in each for each in found) is not runs
