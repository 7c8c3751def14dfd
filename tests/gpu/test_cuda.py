"""Kernels on an NVIDIA GPU: random calls against float64, gradients, other streams, graph capture."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.testing import fuzz

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CALLS = 250
"""A thousand, by all that was installed, took minutes on a busy H200 host (2026-11-27); conformance draws more."""

CUDA_ATTENTION = ["torch.sdpa.flash", "torch.sdpa.efficient", "torch.sdpa.cudnn", "torch.sdpa.math"]


def qkv(dtype=torch.bfloat16, heads=(8, 2), seq=(64, 64), head_dim=64, grad=False):
    torch.manual_seed(0)
    query = torch.randn(2, seq[0], heads[0], head_dim, device="cuda").to(dtype)
    key, value = (torch.randn(2, seq[1], heads[1], head_dim, device="cuda").to(dtype) for _ in range(2))
    return tuple(tensor.requires_grad_(grad) for tensor in (query, key, value))


def reference(query, key, value, **arguments):
    from layerzero.ops.attention.reference import attention_reference

    return attention_reference(query, key, value, **arguments)


def run(kernel, *tensors, **arguments):
    with lz.scope(locks={"attention": kernel}):
        return lz.attention(*tensors, layout="BSHD", **arguments)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_calls_agree_with_float64(seed):
    report = fuzz.run(CALLS, seed, device="cuda")
    assert report.ok, "\n".join(str(failure) for failure in report.failures[:10])


def test_random_calls_reach_every_kernel_of_torch():
    report = fuzz.run(CALLS, 1, device="cuda", kernels=CUDA_ATTENTION, operations=["attention"])
    assert report.ok, "\n".join(str(failure) for failure in report.failures[:10])
    assert set(CUDA_ATTENTION) <= set(report.kernels)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["standard", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", CUDA_ATTENTION)
def test_gradients_are_the_references(kernel, dtype, heads):
    mine, theirs = qkv(dtype, heads, grad=True), qkv(torch.float64, heads, grad=True)
    with torch.no_grad():
        for exact, rounded in zip(theirs, mine, strict=True):
            exact.copy_(rounded)
    try:
        output = run(kernel, *mine, causal=True)
    except lz.NoKernelFoundError as refused:
        pytest.skip(str(refused.failures[kernel]))
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    (reference(*theirs, causal=True) * weights.double()).sum().backward()
    scale = 2e-2 if dtype is torch.bfloat16 else 2e-4
    for ours, exact in zip(mine, theirs, strict=True):
        torch.testing.assert_close(
            ours.grad.double(), exact.grad, rtol=scale, atol=scale * exact.grad.abs().max().item()
        )


@pytest.mark.parametrize("kernel", CUDA_ATTENTION)
def test_kernels_run_on_the_current_stream(kernel):
    tensors = qkv()
    wanted = reference(*tensors, causal=True)
    run(kernel, *tensors)
    stream = torch.cuda.Stream()
    late = torch.empty_like(tensors[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(tensors[0])
        result = run(kernel, late, *tensors[1:])
    stream.synchronize()
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", [*CUDA_ATTENTION, "reference.*"])
def test_a_captured_call_replays_with_new_values(kernel):
    tensors = qkv()
    x, w = torch.randn(8, 256, device="cuda"), torch.randn(256, device="cuda")
    residual = torch.zeros_like(x)
    with lz.scope(locks={"attention": kernel}), torch.no_grad():

        def step():
            return lz.attention(*tensors, layout="BSHD"), lz.rms_norm(x, w), lz.add_residual_rms_norm_(x, residual, w)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for tensor in (*tensors, x):
            tensor.normal_()
        residual.zero_()
        graph.replay()
        residual_after = residual.clone()
        wanted = (reference(*tensors, causal=True), torch.nn.functional.rms_norm(x, (256,), w, 1e-6))
        torch.testing.assert_close(captured[0], wanted[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(captured[1], wanted[1])
        torch.testing.assert_close(captured[2], wanted[1])
        torch.testing.assert_close(residual_after, x)


def test_a_kernel_that_is_not_graph_safe_is_left_out_of_a_capture():
    def unsafe(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", "user.unsafe", platform="cuda", priority=100)(unsafe)
    x, w = torch.randn(8, 256, device="cuda"), torch.randn(256, device="cuda")
    lz.configure(allow=["user", "torch"])
    assert lz.which("rms_norm", x, w)["kernel_id"] == "user.unsafe"
    assert lz.which("rms_norm", x, w, capturing=True)["kernel_id"] == "torch.rms_norm"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        lz.rms_norm(x, w)
        torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the kept plan guards itself
        result = lz.rms_norm(x, w)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, w.shape, w, 1e-6))


@pytest.mark.parametrize(("call", "fits"), [
    ({}, {"flash": True, "efficient": True}),
    ({"head_dim": 264}, {"flash": False, "efficient": True}),
    ({"head_dim": 320}, {"flash": False, "efficient": True}),
    ({"head_dim": 84}, {"flash": False, "efficient": False}),
    ({"masked": True}, {"flash": False, "efficient": True}),
    ({"dtype": torch.float32}, {"flash": False, "efficient": True}),
])  # fmt: skip
def test_limits_agree_with_torchs_own_check(call, fits):
    masked = "masked" in call
    sizes = {name: each for name, each in call.items() if name != "masked"}
    query, key, value = (tensor.transpose(1, 2) for tensor in qkv(heads=(8, 8), **sizes))
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device="cuda").tril() if masked else None
    params = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, not masked, False)
    answers = {
        "flash": torch.backends.cuda.can_use_flash_attention(params),
        "efficient": torch.backends.cuda.can_use_efficient_attention(params),
    }
    mine = {
        name: lz.validate(f"torch.sdpa.{name}", query, key, value, layout="BHSD", attn_mask=mask)[0] for name in answers
    }
    assert mine == fits
    for name, allowed in mine.items():
        assert not allowed or answers[name], f"torch refuses {name} for {call}"


def test_explain_asks_torch_about_its_own_kernels():
    query, key, value = qkv(heads=(8, 8))
    mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device="cuda").tril()
    report = lz.explain(lz.attention, query, key, value, layout="BSHD", attn_mask=mask, causal=False)
    assert report.reasons("torch.sdpa.flash")[-1].fact == "torch.backends.cuda.can_use_flash_attention"
    report = lz.explain(lz.attention, query[:, :3], key, value, layout="BSHD")  # causal, and fewer queries than keys
    assert report.reasons("torch.sdpa.flash") == ()
    assert any(note.startswith("torch.sdpa.flash may run where torch's function leaves it") for note in report.notes)


def test_the_device_is_described():
    device = lz.Device.detect("cuda")
    assert device.platform == "cuda"
    assert device.sm == torch.cuda.get_device_capability()
    assert device.total_bytes > 0
    assert lz.doctor().devices[-1].name == torch.cuda.get_device_name()


def test_debug_mode_synchronises_after_each_call():
    tensors = qkv()
    with lz.scope(debug=True):
        lz.attention(*tensors, layout="BSHD")
        from layerzero.engine.functions import CALLS

        table = CALLS["attention"].dispatcher.cache.table(lz.engine.config.current_policy())
        assert all("synchronize()" in plan.source for plan in table.values())


def test_the_mean_of_one_ignored_row_is_of_no_row():
    """torch gives 0 for logits of one axis here, and NaN for those of two and on a CPU (2.11)."""
    assert lz.cross_entropy(torch.randn(9, device="cuda"), torch.tensor(-100, device="cuda")).isnan()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FlashInfer's templates warn when they are compiled
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_sparse_blocks_of_few_queries(rows):
    """FlashInfer decodes with one query of each block (0.7.2): others go elsewhere."""
    tensors = [torch.randn(count, 1, 128, device="cuda", dtype=torch.bfloat16) for count in (12, 4, 4)]
    starts = torch.arange(12 // rows + 1, device="cuda").int()
    call = *tensors, starts, (starts[:-1] % 4).contiguous(), rows, 1
    with lz.scope(allow_jit_compile=True):
        got = lz.sparse_attention(*call)
        with lz.scope(locks={"attention.sparse.block": "reference.attention.sparse.block"}):
            torch.testing.assert_close(got, lz.sparse_attention(*call), rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # libraries warn of each other when they are imported
@pytest.mark.parametrize("window", [(1, -1), (4, 20), (-1, 20), (30, -1)])
def test_windows_without_a_causal_mask_of_more_queries_than_keys(window):
    """FlashAttention 2 takes the longest keys as the right side of a window that is open there."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(count, 2, 64, device="cuda", dtype=torch.float16) for count in (60, 30, 30))
    starts, key_starts = (torch.tensor(each, device="cuda").int() for each in ([0, 33, 60], [0, 19, 30]))
    call = query, key, value, starts, key_starts
    named = {"window": window, "causal": False}
    ragged = lz.ragged_attention, call, {**named, "max_seqlen_q": 33, "max_seqlen_k": 19}
    dense = lz.attention, [each.unsqueeze(0) for each in (query, key, value)], {**named, "layout": "BSHD"}
    for function, given, more in (ragged, dense):
        report = lz.explain(function.__name__, *given, **more)
        with lz.scope(locks={report.operation: f"reference.{report.operation}"}):
            wanted = function(*given, **more)
        for kernel in [each.kernel.id for each in report.candidates if each.legal and not each.kernel.jit]:
            with lz.scope(locks={report.operation: kernel}):
                torch.testing.assert_close(function(*given, **more), wanted, rtol=1e-2, atol=1e-2, msg=kernel)


def test_places_are_drawn_of_logits_that_want_a_gradient():
    logits = torch.randn(3, 100, device="cuda", requires_grad=True)
    heat = torch.rand(3, device="cuda") + 0.5
    assert lz.sample_minp(logits, 0.3, temperature_by_row=heat).shape == (3,)
    assert lz.sample_topk(logits, 5, temperature_by_row=heat).shape == (3,)
