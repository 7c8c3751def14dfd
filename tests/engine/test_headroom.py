"""A limit on memory that no kernel keeps: what needs least runs, and a warning names the memory."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import layerzero as lz
from layerzero.core.errors import NoKernelFoundError
from layerzero.core.kernel import Backend
from layerzero.core.reasons import ReasonCode
from layerzero.core.system import resources
from layerzero.core.system.memory import FREE
from layerzero.engine import headroom
from layerzero.engine.failures import out_of_memory
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.tuning.measurement.jobs import jobs_of_cases

MATH = "torch.sdpa.math"
OTHERS = ["onnxruntime", "zentorch", "flex_attention", "inductor"]


def biased(seq=64, heads=4):
    """A call with a learned bias, which torch's fused kernel on a CPU does not differentiate: 8 bytes a score."""
    query = torch.randn(1, seq, heads, 16)
    return {
        "query": query, "key": query, "value": query, "layout": "BSHD", "causal": False,
        "attn_mask": torch.zeros(1, 1, seq, seq, requires_grad=True),
    }  # fmt: skip


def test_what_needs_least_runs_where_no_kernel_keeps_the_limit():
    with lz.scope(memory_headroom_mb=0, deny=OTHERS):
        report = lz.explain("attention", **biased())
        refused = report.reasons("reference.attention.standard.prefill")
    assert report.kernel_id == MATH
    assert report.chosen.adaptations[-1] == headroom.BEYOND
    assert [reason.code for reason in refused] == [ReasonCode.MEMORY_HEADROOM_EXCEEDED]


def test_a_call_chooses_what_the_question_says_and_warns_of_memory(monkeypatch):
    monkeypatch.setattr(resources, "available_bytes", lambda: 3.0 * 2**30)
    FREE.forget()
    arguments = biased(seq=300, heads=3)
    wanted = lz.attention(**arguments)
    with lz.scope(memory_headroom_mb=1, deny=OTHERS), pytest.warns(lz.LayerZeroPerformanceWarning) as told:
        got = lz.attention(**arguments)
    text = str(told[0].message)
    assert f"runs {MATH}, which takes 2 MiB besides its results; memory_headroom_mb allows 1 MiB" in text
    assert "3072 MiB are free. Every other kernel that may run takes as much or more" in text
    assert "A smaller batch takes less" in text
    torch.testing.assert_close(got, wanted)


def test_torchs_own_signature_keeps_torchs_kernel():
    given = biased(seq=300, heads=3)
    query = given["query"].transpose(1, 2)
    with lz.scope(memory_headroom_mb=1, deny=OTHERS), pytest.warns(lz.LayerZeroPerformanceWarning, match=MATH):
        got = lz.scaled_dot_product_attention(query, query, query, attn_mask=given["attn_mask"])
    torch.testing.assert_close(got, torch.nn.functional.scaled_dot_product_attention(query, query, query))


def test_it_is_said_once():
    with lz.scope(memory_headroom_mb=0, deny=OTHERS), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seq in (64, 65, 64):
            lz.attention(**biased(seq))
    assert [each.category for each in told] == [lz.LayerZeroPerformanceWarning]


def test_a_kernel_that_keeps_the_limit_comes_before_one_that_does_not():
    query = torch.randn(1, 300, 4, 16)
    with lz.scope(memory_headroom_mb=0, deny=OTHERS):
        report = lz.explain("attention", query, query, query, layout="BSHD")
    assert report.kernel_id == "torch.sdpa.cpu_flash"
    assert report.reasons(MATH)


def test_the_limit_is_a_bound_where_nothing_may_take_another_ones_place():
    with lz.scope(memory_headroom_mb=0, deny=OTHERS, fallback_enabled=False):
        with pytest.raises(NoKernelFoundError) as raised:
            lz.attention(**biased())
    assert "memory_headroom_mb" in str(raised.value)


def test_what_is_refused_for_more_than_memory_stays_refused():
    with lz.scope(memory_headroom_mb=0, deny=[*OTHERS, MATH]):
        assert lz.explain("attention", **biased()).kernel_id == "reference.attention.standard.prefill"


def test_a_locked_kernel_runs_beyond_the_limit():
    with lz.scope(memory_headroom_mb=0, locks={"attention.standard.prefill": MATH}):
        report = lz.explain("attention", **biased())
    assert report.kernel_id == MATH
    assert report.locked


def test_a_lock_that_lets_selection_go_on_lifts_no_limit_where_another_kernel_keeps_it():
    query = torch.randn(1, 300, 4, 16)
    lock = {"attention.standard.prefill": {"kernel": MATH, "otherwise": "select"}}
    with lz.scope(memory_headroom_mb=0, deny=OTHERS, locks=lock):
        assert lz.explain("attention", query, query, query, layout="BSHD").kernel_id == "torch.sdpa.cpu_flash"
        assert lz.explain("attention", **biased()).kernel_id == MATH


BACKEND = Backend(name="frugal", summary="needs half of what torch's plain kernel needs", origin="entry_point")


def test_of_several_the_one_that_needs_least_runs_and_nothing_is_built_on_the_way():
    def kernel(name, share, **more):
        return lz.Kernel(
            id=f"frugal.{name}", operations=("attention.standard.prefill",), backend=BACKEND,
            load=lambda _: lambda query, *_, **__: query.clone(), accepts=("attn_mask",), layout="BSHD", grad=True,
            workspace_bytes=lambda facts: int(facts.size("seq_q") * facts.size("seq_k") * share), priority=5, **more,
        )  # fmt: skip

    kernels = [kernel("half", 4 * 4), kernel("unbuilt", 4, jit=True)]
    REGISTRY.register_kernels(kernels)
    try:
        with lz.scope(memory_headroom_mb=0, deny=OTHERS, require_vetting=False, jit="never"):
            report = lz.explain("attention", **biased())
            assert report.kernel_id == "frugal.half"
            codes = {reason.code for reason in report.reasons("frugal.unbuilt")}
            assert codes == {ReasonCode.MEMORY_HEADROOM_EXCEEDED, ReasonCode.JIT_DISABLED}
            with pytest.warns(lz.LayerZeroPerformanceWarning, match=re.escape("frugal.half")):
                lz.attention(**biased())
    finally:
        for each in kernels:
            lz.unregister_kernel(each.id)


def needed(kernel, facts):
    return kernel.workspace_bytes(facts) if kernel.workspace_bytes else 0


def test_the_warning_of_a_reference_names_memory_where_memory_decided():
    """What the reference takes is less than the limit, and what is refused for memory alone is told first."""
    operation = OPERATIONS["attention.standard.prefill"]
    reference = REGISTRY.kernel("reference.attention.standard.prefill")
    facts = lz.explain("attention", **biased(seq=300)).facts
    assert needed(reference, facts) == 3 * 4 * operation.scratch(facts.sizes())
    huge = lz.Kernel(
        id="frugal.huge", operations=("attention.standard.prefill",), backend=BACKEND, accepts=("attn_mask",),
        load=lambda _: None, layout="BSHD", grad=True, workspace_bytes=lambda facts: 2**40, priority=5,
    )  # fmt: skip
    REGISTRY.register_kernels([huge])
    try:
        with lz.scope(deny=[*OTHERS, MATH]), pytest.warns(lz.LayerZeroFallbackWarning, match="memory_headroom_mb"):
            lz.attention(**biased(seq=300))
    finally:
        lz.unregister_kernel(huge.id)


def test_no_reference_needs_less_than_what_memory_keeps_from_a_named_case():
    names = [each.name for each in OPERATIONS.values() if each.scratch is not None]
    for job in jobs_of_cases(names, ["bfloat16"]):
        facts = job.facts("cpu")
        kernels = REGISTRY.candidates(job.operation)
        least = needed(next(each for each in kernels if each.is_reference), facts)
        limit = 1024 * 2**20
        beyond = [each.id for each in kernels if each.source == "torch" and least <= limit < needed(each, facts)]
        assert beyond == [], job.name


def test_every_reference_with_scratch_tells_its_workspace():
    for operation in OPERATIONS.values():
        reference = REGISTRY.kernel(f"reference.{operation.name}") if operation.has_fallback else None
        if reference is not None:
            assert (reference.workspace_bytes is None) == (operation.scratch is None), operation.name


@pytest.mark.parametrize("text", [
    "CUDA error: out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB", "HIP out of memory. Tried",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA driver error: out of memory",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "XPU out of memory. Tried to allocate", "hipErrorOutOfMemory",
    "cudaErrorMemoryAllocation: out of memory",
])  # fmt: skip
def test_words_of_drivers_and_their_libraries_mean_that_memory_ran_out(text):
    assert out_of_memory(RuntimeError(text))


def test_running_out_of_memory_by_a_librarys_word_never_runs_another_kernel():
    @lz.register_kernel("norm.rms", "mine.rms_norm", priority=90)
    def mine(input, weight, *, eps=1e-6):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    try:
        with lz.scope(prefer_sources=["user"]), pytest.raises(RuntimeError, match="ALLOC_FAILED"):
            lz.rms_norm(torch.randn(2, 8), torch.ones(8))
        with lz.scope(prefer_sources=["user"]):  # its breaker stays closed
            assert lz.explain("rms_norm", torch.randn(2, 8), torch.ones(8)).kernel_id == "mine.rms_norm"
    finally:
        lz.unregister_kernel("mine.rms_norm")
