"""What only a GPU shows of captures that fail, of hosts that are ahead, and of caches that grow in place."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import layerzero as lz
from layerzero.core.graph_capture import capturing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # libraries warn of each other when they are imported
]


def test_a_capture_that_is_lost_leaves_stream_pool_and_generator():
    pool, x = torch.cuda.graph_pool_handle(), torch.ones(1024, device="cuda")
    assert (replayed(lambda: x * 2) == 2).all()  # the first capture of a thread makes libraries ready
    before, held = torch.cuda.current_stream(), torch.cuda.memory_reserved()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="captur"), capturing(torch.cuda.CUDAGraph(), pool=pool):
            kept = [torch.rand(2**20, device="cuda")]
            torch.cuda.synchronize()  # what no capture allows
        del kept  # of whose segment of 20 MB the pool would keep hold
        assert torch.cuda.current_stream() == before
    assert torch.rand(2, device="cuda").isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, pool=pool):
        y = x * 2 + torch.rand(1024, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    assert ((y >= 2) & (y < 3)).all()
    del graph, y
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held + 2**22


@pytest.mark.parametrize("fresh", [False, True], ids=["one step", "a step each"])
@pytest.mark.parametrize(
    "kernel", ["flashinfer.fa2.paged_tokens", "flashinfer.fa3.paged_tokens", "flashinfer.paged_decode"]
)
def test_a_host_that_is_steps_ahead_changes_no_plan(kernel, fresh):
    """The device sleeps while the host plans: each plan is read as it was written."""
    page, blocks, batch, decode = 16, 64, 8, kernel.endswith("decode")
    torch.manual_seed(0)
    keys, values = (torch.randn(batch * blocks, page, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    query = torch.randn(batch, 8, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    rounds = [torch.randint(1, page * blocks, (batch,), dtype=torch.int32) for _ in range(6)]
    on_device, starts_there = [each.cuda() for each in rounds], starts.cuda()
    known = {each.id for each in lz.list_kernels()}
    assert kernel in known

    def run(ahead):
        lens, step, found = on_device[0].clone(), None, []
        for host, there in zip(rounds, on_device, strict=True):
            torch.cuda._sleep(20_000_000) if ahead else torch.cuda.synchronize()
            lens.copy_(there)
            given = (host,) if decode else (host, starts)
            if step is None or fresh:
                named = {} if decode else {"cu_seqlens_q": starts_there}
                step = lz.StepMetadata(table, lens, host=given, **named)
            else:
                step.advance(host=given)
            if decode:
                found.append(lz.paged_attention(query.unsqueeze(1), keys, values, table, lens, step=step))
            else:
                found.append(lz.paged_attention(query, keys, values, table, lens, cu_seqlens_q=starts_there, step=step))
        torch.cuda.synchronize()
        return found

    with lz.scope(locks={"paged_attention": kernel}, allow_jit_compile=True):
        try:
            expected = run(ahead=False)
        except lz.NoKernelFoundError as error:
            pytest.skip(str(error)[:200])
        got = run(ahead=True)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_a_cache_grows_in_place_and_gives_stocks_logits(monkeypatch):
    transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
    from layerzero.integrations.optimize.attention import dynamic_cache

    monkeypatch.setattr(dynamic_cache, "FROM_BYTES", 0)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().cuda().to(torch.bfloat16)
    ids = torch.randint(1, 512, (3, 200), generator=torch.Generator().manual_seed(1)).cuda()

    def logits():
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
            found = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(40, 200)]
        return found, cache

    expected, theirs = logits()
    lz.optimize(model)
    got, cache = logits()
    for mine, other in zip(got, expected, strict=True):  # three layers' bfloat16: 0.0502 on an H200, 2026-11-24
        assert (mine.float() - other.float()).abs().max() <= 0.1 * other.float().abs().max()
    assert dynamic_cache._ROOMS[cache.layers[0]]._at_once is not None, "it was asked whether one launch does it"
    for mine, other in zip(cache.layers, theirs.layers, strict=True):
        assert (mine.keys.float() - other.keys.float()).abs().max() <= 0.05 * other.keys.float().abs().max()


def test_a_kernel_that_has_nothing_on_the_step_leaves_the_capture_to_the_one_that_ran():
    """What is quickest in a graph need not have run before it."""
    page, blocks, batch = 16, 64, 8
    torch.manual_seed(0)
    keys, values = (torch.randn(batch * blocks, page, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
    query = torch.randn(batch, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.randint(1, page * blocks, (batch,), dtype=torch.int32)
    step = lz.StepMetadata(table, lens.cuda(), host=(lens,), capturable=True, max_context_len=page * blocks)
    given = (query, keys, values, table, step.context_lens)

    def run():
        return lz.paged_attention(*given, step=step, max_context_len=page * blocks)

    try:
        with lz.scope(locks={"paged_attention": "vllm.flash_attn.v3.paged"}):
            expected = run()
    except lz.NoKernelFoundError as error:
        pytest.skip(str(error)[:200])
    graph = torch.cuda.CUDAGraph()
    with lz.scope(prefer_sources=["flashinfer"]), capturing(graph):
        wanted = lz.which("paged_attention", *given, step=step, max_context_len=page * blocks)["kernel_id"]
        got = run()
    graph.replay()
    torch.cuda.synchronize()
    if not str(wanted).startswith("flashinfer"):
        pytest.skip(f"{wanted} would be captured: no module of FlashInfer is built")
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_lengths_that_outgrow_a_captured_bound_are_told_of_before_a_replay():
    page, batch = 16, 4
    keys, values = (torch.randn(batch * 8, page, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.arange(batch * 8, device="cuda").int().view(batch, 8)
    query = torch.randn(batch, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((batch,), 30, dtype=torch.int32, device="cuda")
    step = lz.StepMetadata(table, lens, capturable=True, max_context_len=32)
    with lz.scope(locks={"paged_attention": "vllm.flash_attn.v3.paged"}):
        try:
            lz.paged_attention(query, keys, values, table, lens, step=step)
        except lz.NoKernelFoundError as error:
            pytest.skip(str(error)[:200])
        with capturing(torch.cuda.CUDAGraph()):
            lz.paged_attention(query, keys, values, table, lens, step=step)
    again = "make a new StepMetadata with a larger max_context_len and capture again"
    with pytest.raises(lz.InvalidCallError, match=f"max_context_len: wanted at most 32, .*got 48; {again}"):
        step.advance(max_context_len=48)
    on_host = torch.full((batch,), 33, dtype=torch.int32)
    with pytest.raises(lz.InvalidCallError, match=f"context_lens: .*, got 33; {again}"):
        step.advance(host=(on_host,))
    lens += 3
    with pytest.raises(lz.InvalidCallError, match=f"got 4 beyond it, now or in an earlier step; {again}"):
        step.advance()  # the device answers now, or by the next one
        torch.cuda.synchronize()
        step.advance()


def waits(input, weight, *, eps):
    torch.cuda.synchronize()
    return torch.rms_norm(input, weight.shape, weight, eps)


def replayed(run):
    """Capture a call on the current stream's successor, and replay it."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        result = run()
    graph.replay()
    torch.cuda.synchronize()
    return result


def test_a_kernel_that_waits_loses_its_capture_and_nothing_else():
    lz.register_kernel("norm.rms", "user.waits", platform="cuda", graph_safe=True)(waits)
    x, weight = torch.randn(8, 64, device="cuda"), torch.ones(64, device="cuda")
    expected, before = torch.rms_norm(x, (64,), weight), torch.cuda.current_stream()
    with lz.scope(locks={"norm.rms": "user.waits"}):
        torch.testing.assert_close(lz.rms_norm(x, weight), expected)
        with pytest.raises((lz.KernelExecutionError, RuntimeError), match="captur"):
            replayed(lambda: lz.rms_norm(x, weight))
    assert torch.cuda.current_stream() == before
    torch.testing.assert_close(lz.rms_norm(x, weight), expected)
    torch.testing.assert_close(replayed(lambda: lz.rms_norm(x, weight)), expected)


@pytest.mark.parametrize("begin", [capturing, torch.cuda.graph], ids=["lz", "torch"])
def test_every_capture_asks_for_the_verdict(begin, tmp_path, monkeypatch):
    """Also one that torch begins, as torch.compile and vLLM do, and of a call that ran before."""
    from layerzero.engine.dispatch import ENGINE
    from layerzero.engine.registry import REGISTRY
    from layerzero.tuning.storage.files import FileLedger
    from layerzero.tuning.storage.store import StoreLedger

    ENGINE.ledger = StoreLedger(FileLedger(tmp_path))
    x, weight = torch.randn(8, 64, device="cuda"), torch.ones(64, device="cuda")
    kernel, facts = REGISTRY.kernel("torch.rms_norm"), lz.facts("rms_norm", x, weight)

    def run():
        return (x + 1).new_ones(()) * lz.rms_norm(x, weight)  # a capture of nothing would be told

    expected = run()
    ENGINE.ledger.record_capture(kernel, facts, "it waits")
    ENGINE.bump()
    with lz.scope(locks={"norm.rms": kernel.id}):
        run()
        with pytest.raises(lz.CudaGraphUnsafeError, match="it waits"), begin(torch.cuda.CUDAGraph()):
            run()
    torch.testing.assert_close(run(), expected)
    ENGINE.ledger.record_capture(kernel, facts, "")
    ENGINE.bump()
    with lz.scope(locks={"norm.rms": kernel.id}, graph_strict_mode=True):
        run()
        graph = torch.cuda.CUDAGraph()
        with begin(graph):
            result = run()
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(result, torch.rms_norm(x, (64,), weight))
        other = torch.randn(8, 128, device="cuda")
        lz.rms_norm(other, weight.repeat(2))
        with (
            pytest.raises(lz.CudaGraphUnsafeError, match=r"layerzero vet norm\.rms --graph"),
            begin(torch.cuda.CUDAGraph()),
        ):
            lz.rms_norm(other + 1, weight.repeat(2))


def test_a_child_proves_captures_of_torchs_own_kernels():
    found = lz.vet("norm.rms", kernels=["torch.rms_norm"], shapes=[(8, 64)], dtype="float16", graph=True, again=True)
    assert [str(each.verdict) for each in found] == ["passed"], found


FIRST_CALLS = """
import torch, layerzero as lz
a, b, image, filters = (torch.ones(shape, device="cuda") for shape in ((32, 32), (32, 32), (1, 1, 8, 8), (1, 1, 3, 3)))
graph = torch.cuda.CUDAGraph()
with lz.capturing(graph):
    product, convolved = a @ b, torch.conv2d(image, filters)
graph.replay()
torch.cuda.synchronize()
print(product.sum().item(), convolved.sum().item())
"""


def test_a_process_whose_first_product_and_convolution_are_captured():
    said = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=False, timeout=120)
    assert said.stdout.split() == ["32768.0", "324.0"], said.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_on_the_other_gpu_is_an_error_that_names_both():
    near, far = (torch.randn(8, 64, device=f"cuda:{index}") for index in (0, 1))
    weights = {each: torch.ones(64, device=each.device) for each in (near, far)}
    both = "on cuda:0, where a graph is captured, got some on cuda:1"
    with pytest.raises(lz.InvalidCallError, match=both), capturing(torch.cuda.CUDAGraph()):
        lz.rms_norm(near, weights[near])
        lz.rms_norm(far, weights[far])
    torch.testing.assert_close(replayed(lambda: lz.rms_norm(near, weights[near])), lz.rms_norm(near, weights[near]))
    lz.rms_norm(far, weights[far])  # kept: a hit asks nothing, and the end of the capture tells
    with pytest.warns(lz.LayerZeroWarning, match="a graph of cuda:0 was captured, .* on cuda:1"):
        replayed(lambda: (lz.rms_norm(near, weights[near]), lz.rms_norm(far, weights[far]))[0])
