"""A decode step over a paged cache on a GPU: captured, replayed with other lengths, tables and ids, planned once."""

from __future__ import annotations

import functools

import pytest
import torch

import layerzero as lz
from layerzero.backends.vllm.library import operators
from layerzero.testing import fuzz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # libraries warn of each other when they are imported
]

PAGE, BLOCKS, HEADS, KV_HEADS, DIM = 16, 8, 8, 2, 128
KERNELS = [
    "torch.paged_gather",
    "flashinfer.paged_decode",
    "flashinfer.paged_decode_tensor_cores",
    "vllm.flash_attn.v2.paged",
    "vllm.flash_attn.v3.paged",
]

OPERATIONS = {"torch.paged_each": "attention.gqa.prefill.paged", "torch.ragged_each": "attention.gqa.prefill.ragged"}

LIBRARIES = {
    f"vllm.flash_attn.v{n}.paged": (f"vllm_flash_attn/_vllm_fa{n}_C.abi3.so", f"_vllm_fa{n}_C") for n in (2, 3)
}
"""What vLLM ships apart from its package: a build may have one and not the other."""


def missing(kernel):
    """Why the library behind a kernel does not load; empty where it does, or where there is none."""
    try:
        operators(*LIBRARIES[kernel]) if kernel in LIBRARIES else None
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def usable(kernel):
    found = {each.id: each for each in lz.list_kernels()}.get(kernel)
    if found is None:
        pytest.skip(f"{kernel} is not declared")
    reason = lz.engine.probe.this_machine().state(found.backend, lz.Device.detect("cuda")).reason
    if reason is not None:
        pytest.skip(str(reason))
    if problem := missing(kernel):
        pytest.skip(problem)
    return kernel


def cache(batch, layers=1):
    torch.manual_seed(0)
    pages = batch * BLOCKS
    shape = (pages, PAGE, KV_HEADS, DIM)
    caches = [tuple(torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(layers)]
    tables = torch.randperm(pages, device="cuda").int().view(batch, BLOCKS)
    return caches, tables


def naive(query, keys, values, tables, lens):
    """Row after row in float64."""
    rows = []
    for sequence in range(len(lens)):
        length = int(lens[sequence])
        k, v = (c[tables[sequence].long()].flatten(0, 1)[:length].double() for c in (keys, values))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for each in (k, v))
        scores = query[sequence].transpose(0, 1).double() @ k.transpose(1, 2) * DIM**-0.5
        rows.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_step_replays_with_other_lengths_tables_and_ids(kernel):
    kernel, batch, layers = usable(kernel), 4, 2
    caches, tables = cache(batch, layers)
    lens = torch.tensor([1, 17, 40, 100], dtype=torch.int32, device="cuda")
    for keys, values in caches:
        keys.normal_()
        values.normal_()
    embedding = torch.randn(50, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([3, 1, 4, 1], device="cuda")
    step = lz.StepMetadata(tables, lens, capturable=True)

    def decode():
        hidden = embedding[ids]
        for keys, values in caches:
            new = hidden.view(batch, HEADS, DIM)[:, :KV_HEADS].contiguous()
            lz.append_paged_kv_(new, new * 0.5, keys, values, step.slot_mapping(PAGE))
            query = hidden.view(batch, 1, HEADS, DIM)
            hidden = lz.paged_attention(query, keys, values, tables, lens, step=step).view(batch, -1)
        return hidden

    with lz.scope(locks={"attention.paged": kernel}, allow_jit_compile=True), torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                decode()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decode()
        for turn in range(3):  # other sequences, lengths and tokens in the same buffers
            lens.copy_(torch.tensor([[2, 18, 41, 101], [128, 1, 5, 77], [16, 32, 64, 128]][turn]))
            tables.copy_(torch.randperm(tables.numel(), device="cuda").view_as(tables))
            ids.copy_(torch.randint(50, (batch,)))
            step.advance()
            before = [tuple(each.clone() for each in pair) for pair in caches]
            graph.replay()
            replayed = captured.clone()
            after = [tuple(each.clone() for each in pair) for pair in caches]
            for pair, kept in zip(caches, before, strict=True):
                for each, old in zip(pair, kept, strict=True):
                    each.copy_(old)
            eager = decode()
            torch.testing.assert_close(replayed, eager, rtol=1e-2, atol=1e-2)
            for pair, kept in zip(caches, after, strict=True):
                assert all(torch.equal(each, old) for each, old in zip(pair, kept, strict=True))
            query = torch.randn(batch, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            got = lz.paged_attention(query, *caches[0], tables, lens, step=step)
            torch.testing.assert_close(got.double(), naive(query, *caches[0], tables, lens), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", ["flashinfer.paged_decode", "flashinfer.paged_decode_tensor_cores"])
def test_32_layers_that_share_a_step_pay_for_flashinfers_plan_once(kernel, monkeypatch):
    usable(kernel)
    import flashinfer

    plans = []
    plan = flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan
    monkeypatch.setattr(
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        "plan",
        lambda *args, **kwargs: (plans.append(1), plan(*args, **kwargs))[1],
    )
    caches, tables = cache(2, layers=32)
    lens = torch.tensor([20, 128], dtype=torch.int32, device="cuda")
    step = lz.StepMetadata(tables, lens)
    query = torch.randn(2, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    with lz.scope(locks={"attention.paged": kernel}, allow_jit_compile=True), torch.no_grad():
        for _ in range(3):
            for keys, values in caches:
                lz.paged_attention(query, keys, values, tables, lens, step=step)
            step.advance()
        assert len(plans) == 1 + 3
        lz.paged_attention(query, *caches[0], tables, lens)
        lz.paged_attention(query, *caches[0], tables, lens)
    assert len(plans) == 4 + 2


def test_flashinfer_is_refused_in_a_capture_without_a_capturable_step():
    usable("flashinfer.paged_decode")
    caches, tables = cache(2)
    lens = torch.tensor([20, 128], dtype=torch.int32, device="cuda")
    query = torch.randn(2, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    call = (query, *caches[0], tables, lens)
    with lz.scope(allow_jit_compile=True):
        for step, refused in (
            (None, True),
            (lz.StepMetadata(tables, lens), True),
            (lz.StepMetadata(tables, lens, capturable=True), False),
        ):
            reasons = lz.explain("paged_attention", *call, step=step, capturing=True).reasons("flashinfer.paged_decode")
            assert [reason.code for reason in reasons] == (["CUDA_GRAPH_UNSAFE"] if refused else [])


@pytest.mark.parametrize("seed", [1, 2])
def test_random_paged_calls_agree_with_float64(seed):
    # Not what compiles: FlashInfer builds a module for every window and softcap, 13 to 67 s each on an H200.
    names = {*KERNELS, "vllm.append_paged", "torch.paged_append"}
    kernels = [each for each in lz.list_kernels() if each.id in names and not each.jit and not missing(each.id)]
    operations = sorted({name for each in kernels for name in each.operations})
    ids = [each.id for each in kernels]
    report = fuzz.run(200, seed, device="cuda", kernels=ids, operations=operations)
    assert report.ok, "\n".join(str(failure) for failure in report.failures[:10])
    assert report.comparisons > 50


def test_a_later_advance_tells_of_a_token_that_had_no_place():
    _, tables = cache(2)
    lens = torch.tensor([20, 128], dtype=torch.int32, device="cuda")  # 128: what a table holds
    step = lz.StepMetadata(tables, lens)
    step.slot_mapping(PAGE)
    lens += 1
    with pytest.raises(lz.InvalidCallError, match="got 1 tokens beyond their table"):
        step.advance()  # where the device has answered already
        torch.cuda.synchronize()
        step.advance()
    assert step.slot_mapping(PAGE).tolist()[1] == -1


@pytest.mark.parametrize("kernel", ["torch.paged_each", "torch.ragged_each"])
def test_queries_of_one_memory_beside_narrow_values(kernel):
    """cuDNN's attention gives its output the strides of queries: it refused them, and then ended the process."""
    query = torch.randn(1, 4, 128, device="cuda", dtype=torch.float16).expand(10, 4, 128)
    keys, values = (torch.randn(4, 16, 1, width, device="cuda", dtype=torch.float16) for width in (128, 32))
    starts, key_starts, lens = (torch.tensor(each, device="cuda").int() for each in ([0, 5, 10], [0, 30, 64], [30, 20]))
    if kernel == "torch.ragged_each":
        function, call = lz.ragged_attention, (query, keys.flatten(0, 1), values.flatten(0, 1), starts, key_starts)
    else:
        tables = torch.tensor([[3, 1], [2, 0]], device="cuda").int()
        function = functools.partial(lz.paged_attention, cu_seqlens_q=starts)
        call = query, keys, values, tables, lens
    operation = OPERATIONS[kernel]
    with lz.scope(locks={operation: f"reference.{operation}"}):
        wanted = function(*call)
    for _ in range(2):
        with lz.scope(locks={operation: kernel}):
            torch.testing.assert_close(function(*call), wanted, rtol=1e-2, atol=1e-2)
