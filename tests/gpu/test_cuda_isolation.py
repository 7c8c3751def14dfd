"""Kernels in a process of their own on an NVIDIA GPU: by CUDA IPC and by copies, their errors and ends, what they cost.

One process serves nearly all of it, since it takes seconds to start. Which way serves here and the cost are printed.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

import layerzero as lz
from layerzero.core.errors import IsolatedKernelError, LayerZeroFallbackWarning
from layerzero.core.reasons import ReasonCode
from layerzero.engine import isolation
from layerzero.engine.dispatch import ENGINE
from layerzero.serving.isolation import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SERVING = Path(__file__).parents[1] / "serving"
APART = {"backend_isolation": "subprocess", "isolate": ["apart"]}
FIRST = {"prefer_sources": ["apart"], "unmeasured": "priority"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CUDA = torch.device("cuda", 0)


@pytest.fixture(name="module", autouse=True)
def _module(monkeypatch):
    monkeypatch.syspath_prepend(str(SERVING))
    sys.modules.pop("isolated_kernels", None)
    module = importlib.import_module("isolated_kernels")
    lz.configure(**APART)
    yield module
    for library in kernels.LIBRARIES.values():
        library.worker.worked()
        library.worker._rests_until = 0.0


@pytest.fixture(scope="module", autouse=True)
def _ends():
    yield
    kernels.end_all()
    kernels.LIBRARIES.clear()


def rows(first=0.5, dtype=torch.float32, count=64):
    made = torch.linspace(-1.0, 1.0, count * 64, device="cuda").view(count, 64).to(dtype)
    made[0, 0] = first
    return made


def weight(dtype=torch.float32):
    return torch.linspace(0.5, 1.5, 64, device="cuda").to(dtype)


def isolated(module, name, function, *given, **named):
    """A kernel in its process, for such a call."""
    (kernel,) = [each for each in module.KERNELS if each.id == name]
    return kernels.IsolatedKernel(kernel, lz.explain(function, *given, **named).facts)


def library():
    return kernels.LIBRARIES["apart",]


@pytest.fixture(name="say")
def _say(capsys):
    """Print a line that pytest does not keep."""

    def say(line):
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return say


@pytest.fixture(name="apart")
def _apart(module):
    return isolated(module, "apart.rms", "rms_norm", rows(), weight())


@pytest.fixture(name="way", params=["CUDA IPC", "copies"])
def _way(request, apart):
    """Either way to the process; what is told where CUDA IPC does not serve on this machine."""
    apart(rows(), weight(), eps=1e-5)
    gpu = library()._gpus[CUDA]
    before = gpu.reason
    if request.param == "copies":
        gpu.reason = "a test wants it"
    elif gpu.reason:
        pytest.skip(gpu.reason)
    yield request.param
    gpu.reason = before


def test_which_way_serves_here(apart, say):
    apart(rows(), weight(), eps=1e-5)
    known = isolation.COSTS["apart", "cuda:0"]
    say(f"this GPU{known.way}: + {known.fixed_us:.0f} us a call and {known.mib_us:.1f} us a MiB, as measured")
    report = lz.explain("rms_norm", rows(), weight(), 1e-5)
    (candidate,) = [each for each in report.candidates if each.kernel.id == "apart.rms"]
    assert "isolation" in {term.name for term in candidate.terms}
    assert any(known.way in line for line in lz.doctor().processes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_metadata(module, apart, way, dtype):
    whole = rows(dtype=dtype, count=32).view(4, 8, 64)
    for x in (whole, whole[1:3, 2], whole.transpose(0, 1), whole[2:2], whole[:1].expand(5, 8, 64)):
        given = x, weight(dtype)
        for _ in range(3):
            result, expected = apart(*given, eps=1e-5), rms_norm(x, (64,), given[1], 1e-5)
            assert (result.dtype, result.shape, result.device) == (dtype, x.shape, CUDA)
            assert result.stride() == expected.stride()
            assert torch.equal(result, expected)
    turned = rows(module.TURNS, dtype)
    result = apart(turned, weight(dtype), eps=1e-5)
    assert result.stride() == (1, 64)
    assert torch.equal(result, rms_norm(turned, (64,), weight(dtype), 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensors_in_one_memory(module, way, dtype):
    packed = torch.linspace(-1, 1, 2 * 96 * 3 * 4 * 64, device="cuda").to(dtype).view(2, 96, 3, 4, 64)
    q, k, v = (each.transpose(1, 2) for each in packed.unbind(2))
    attention = isolated(module, "apart.attention", "attention", q, k, v, causal=True, layout="BHSD")
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, causal=True), expected)


def test_what_is_written_into(module, way):
    x, residual = rows(), torch.ones(64, 64, device="cuda")
    adds = isolated(module, "apart.add_rms", "add_residual_rms_norm_", x, residual, weight(), 1e-5)
    result = adds(x, residual, weight(), eps=1e-5)
    assert torch.equal(residual, x + 1)
    assert torch.equal(result, rms_norm(residual, (64,), weight(), 1e-5))
    before = residual.clone()
    with pytest.raises(IsolatedKernelError, match="ValueError: a number that this library does not like") as caught:
        adds(rows(module.RAISES), residual, weight(), eps=1e-5)
    assert "in act" in caught.value.__notes__[0]
    assert torch.equal(residual, before)


def test_a_call_sees_what_its_stream_wrote_and_others_see_its_result(apart, way):
    side, x = torch.cuda.Stream(), rows()
    side.wait_stream(torch.cuda.current_stream())
    for number in range(1, 5):
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * 10**7)  # about 10 ms: a call that does not wait reads older numbers
            x[0] = number
            mine = apart(x, weight(), eps=1e-5)
        other = apart(rows(number / 8), weight(), eps=1e-5)
        side.synchronize()
        assert torch.equal(mine, rms_norm(x, (64,), weight(), 1e-5))
        assert torch.equal(other, rms_norm(rows(number / 8), (64,), weight(), 1e-5))


def test_large_calls_between_small_ones(apart, way):
    for count in (1, 1 << 16, 7, 1 << 17, 1 << 16):
        x = rows(count=count)
        assert torch.equal(apart(x, weight(), eps=1e-5), rms_norm(x, (64,), weight(), 1e-5))


@pytest.mark.parametrize("memory", ["a pool", "DLPack"])
def test_memory_of_other_allocators(apart, way, memory):
    pool = torch.cuda.MemPool()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # one that ends after a lost capture ends the process
    with torch.cuda.use_mem_pool(pool):
        x = rows()
    if memory == "DLPack":
        x = torch.from_dlpack(x)[3:]
    assert torch.equal(apart(x, weight(), eps=1e-5), rms_norm(x, (64,), weight(), 1e-5))


def test_a_capture_is_refused_by_name(apart):
    x, ones = rows(), weight()
    apart(x, ones, eps=1e-5)
    graph, codes = torch.cuda.CUDAGraph(), set()
    with torch.cuda.graph(graph):
        kept = x + 1
        with pytest.raises(IsolatedKernelError, match="wanted no capture of a CUDA graph"):
            apart(x, ones, eps=1e-5)
        with lz.scope(**FIRST):
            codes |= {each.code for each in lz.explain("rms_norm", x, ones, 1e-5).reasons("apart.rms")}
    graph.replay()
    assert torch.equal(kept, x + 1)
    assert ReasonCode.ISOLATION_UNSUPPORTED in codes
    assert torch.equal(apart(x, ones, eps=1e-5), rms_norm(x, (64,), ones, 1e-5))


@pytest.mark.parametrize(
    ("what", "words"),
    [("CRASHES", r"(ended with SIGSEGV|closed its end), in apart\.rms"), ("LOSES", "CUDA error: device-side assert")],
)
def test_an_end_costs_one_call_and_no_memory(module, apart, what, words):
    kept = apart(rows(), weight(), eps=1e-5)
    pid, gpu = library().worker.pid, library()._gpus[CUDA]
    opened, free = dict(gpu.opened), torch.cuda.memory_reserved()
    x = rows(getattr(module, what))
    with lz.scope(**FIRST), pytest.warns(LayerZeroFallbackWarning, match=words):
        result = lz.rms_norm(x, weight(), 1e-5)
    torch.testing.assert_close(result, rms_norm(x, (64,), weight(), 1e-5))
    torch.cuda.synchronize()  # this process's context lives
    assert lz.doctor().health["apart.rms in norm.rms"].failures == 1
    ENGINE.health.reset()
    for _ in range(50):
        assert torch.equal(apart(rows(), weight(), eps=1e-5), kept)
    assert library().worker.pid != pid
    assert gpu.opened == opened, "the new process opens the same memory"
    assert torch.cuda.memory_reserved() <= free + 2**22
    library().worker._rests_until = 0.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_each_gpu_has_buffers_of_its_own(module):
    for index in (0, 1, 0):
        x, ones = rows().to(f"cuda:{index}"), weight().to(f"cuda:{index}")
        result = isolated(module, "apart.rms", "rms_norm", x, ones)(x, ones, eps=1e-5)
        assert result.device == x.device
        assert torch.equal(result, rms_norm(x, (64,), ones, 1e-5))


ALONE = """
import torch, isolated_kernels
import layerzero as lz
from layerzero.serving.isolation import kernels
lz.configure(backend_isolation="subprocess", isolate=["apart"])
x, weight = torch.linspace(-1, 1, 1 << 20, device="cuda").view(-1, 64), torch.ones(64, device="cuda")
apart = kernels.IsolatedKernel(isolated_kernels.KERNELS[0], lz.explain("rms_norm", x, weight).facts)
for _ in range(3):
    assert torch.equal(apart(x, weight, eps=1e-5), torch.nn.functional.rms_norm(x, (64,), weight, 1e-5))
print(kernels.LIBRARIES["apart",]._gpus[x.device].way)
"""


def test_other_allocators_serve_by_what_they_can(say):
    path = os.pathsep.join([str(SERVING), *filter(None, sys.path)])
    running = {
        setting: subprocess.Popen(
            [sys.executable, "-c", ALONE],
            env={**os.environ, "PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": setting},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for setting in ("backend:cudaMallocAsync", "expandable_segments:True")
    }
    said = {setting: each.communicate() for setting, each in running.items()}
    for setting, each in running.items():
        say(f"{setting}{said[setting][0].strip()}")
        assert each.returncode == 0, said[setting][1]
        assert "Producer process has been terminated" not in said[setting][1]
    assert "the allocator cudaMallocAsync of torch gives no handles" in said["backend:cudaMallocAsync"][0]


@pytest.mark.parametrize("mib", [1, 64])
def test_what_a_call_costs(apart, way, mib, say):
    """Calls of the kernel that gives back what it got: two crossings, and nothing computed."""
    x, took, called = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda"), [], library()._call
    for _ in range(60):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = called(0, "the cost of a call", (x,), {}, frozenset(), 60.0, CUDA)
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e6)
    assert result.shape == (1, mib << 20)
    say(f"{mib} MiB by {way}: + {statistics.median(took):.0f} us a call, at least {min(took):.0f}")


def test_results_outlive_the_process(apart):
    x = rows(count=1 << 17)
    result, expected = apart(x, weight(), eps=1e-5), rms_norm(x, (64,), weight(), 1e-5)
    held = torch.cuda.memory_allocated()
    kernels.end_all()
    assert torch.equal(result, expected)
    assert torch.cuda.memory_allocated() <= held - x.nbytes, "a buffer had room for all rows, and is freed"
