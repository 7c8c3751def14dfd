"""Kernels of torch for devices that are not here: the same callables, run on a CPU's tensors."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends.torch import varlen
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.testing import expected, random_call
from layerzero.testing.compare import copied, problems
from layerzero.tuning.measurement.jobs import jobs_of_cases

TORCH = {"torch": "2.13.0"}


def on(device, function, *args, **arguments):
    return lz.explain(function, *args, device=device, libraries=TORCH, **arguments)


def loaded(report):
    return report.chosen.kernel.load(report.facts.seen_in(report.chosen.kernel.layout))


def reference(*tensors, **arguments):
    with lz.scope(locks={"attention.*": "reference.*"}):
        return lz.attention(*tensors, layout="BHSD", **arguments)


@at_once("device", ["MI300X", "Arc", "Gaudi"])
@at_once("kv_heads", [8, 2])
@at_once("masked", ["causal", "float", "none"])
def test_attention_is_torchs_function(device, kv_heads, masked):
    query, (key, value) = torch.randn(2, 8, 40, 32), (torch.randn(2, kv_heads, 40, 32) for _ in range(2))
    more = {"causal": masked == "causal"}
    if masked == "float":
        more["attn_mask"] = torch.zeros(2, 1, 40, 40).masked_fill(torch.rand(2, 1, 40, 40) > 0.7, -math.inf)
        more["attn_mask"][1, :, 3] = -math.inf
    report = on(device, "attention", query, key, value, layout="BHSD", **more)
    assert report.kernel_id == "torch.sdpa.function"
    assert report.chosen.kernel.is_stock(report.facts)
    torch.testing.assert_close(
        loaded(report)(query, key, value, **more), reference(query, key, value, **more), rtol=1e-5, atol=1e-5
    )


def test_a_lock_on_torchs_attention_means_it_where_its_kernels_are_not_listed():
    query = torch.empty(1, 40, 8, 32, dtype=torch.bfloat16, device="meta")
    with lz.scope(locks={"attention.*": "torch.sdpa"}):
        assert on("MI300X", "attention", query, query, query, layout="BSHD").kernel_id == "torch.sdpa.function"


@pytest.mark.parametrize("device", ["MI300X", "Arc", "Gaudi", "T4"])
def test_softcap_and_sinks_run_no_reference_there(device):
    query = torch.empty(1, 40, 8, 32, device="meta")
    sinks = torch.empty(8, device="meta")
    for more in ({"softcap": 30.0}, {"sinks": sinks}):
        assert on(device, "attention", query, query, query, layout="BSHD", **more).kernel_id == "torch.cuda.scored"


EACH = [
    ("torch.ragged_sdpa", "torch.ragged_each"),
    ("torch.paged_sdpa", "torch.paged_each"),
    ("torch.quantized_sdpa", "torch.quantized_each"),
]


@pytest.mark.parametrize(("here", "there"), EACH)
def test_sequences_one_after_the_other_are_calls_of_torchs_function(here, there, monkeypatch):
    """What a GPU runs for each sequence, in place of the operator that the same code runs for each on a CPU."""
    REGISTRY.ready()
    operations = REGISTRY.kernel(there).operations
    function = function_of(operations[0]).name
    monkeypatch.setattr(varlen, "sdpa_operator", lambda _: varlen._function)
    accepts = REGISTRY.kernel(there).accepts
    ran = 0
    cases = [job.make("cpu") for job in jobs_of_cases(operations, ["float32"]) if elements(job) < 2**18]
    for call in [*(random_call(11, number, function=function) for number in range(60)), *cases]:
        report = lz.explain(function, **call.arguments)
        if report.operation not in operations:
            continue
        given = {
            name
            for name in ("sinks", "alibi_slopes", "return_lse")
            if report.facts.get(name) not in (None, "none", False)
        }
        if report.reasons(here) or given - set(accepts):
            continue
        truth, arguments = expected(call), copied(call.arguments)
        with lz.scope(locks={report.operation: here}):
            got = getattr(lz, function)(**arguments)
        assert problems(got, arguments, truth) == [], call
        ran += 1
    assert ran


def elements(job):
    return max(math.prod(each.shape) for each in job.facts("cpu").tensors.values())


@at_once("device", ["MI300X", "Arc", "Gaudi", "T4"])
@at_once("there", [there for _, there in EACH])
def test_they_run_where_no_kernel_of_torch_takes_starts(device, there):
    REGISTRY.ready()
    kernel = REGISTRY.kernel(there)
    for job in jobs_of_cases(kernel.operations, ["bfloat16"]):
        assert (
            lz.explain(job.facts("cpu").on(lz.Device.named(device), capturing=False), libraries=TORCH).kernel_id
            == there
        )


def test_a_sequence_without_keys_gives_values_width(monkeypatch):
    monkeypatch.setattr(varlen, "sdpa_operator", lambda _: varlen._function)
    query, key, value = torch.randn(5, 4, 16), torch.randn(3, 4, 16), torch.randn(3, 4, 8)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 0, 3], dtype=torch.int32)
    slices = [(query[:2], key[:0], value[:0], None), (query[2:], key, value, None)]
    found = varlen.attend_each(slices, query, causal=False, scale=None, window=None, return_lse=False)
    with lz.scope(locks={"attention.*": "reference.*"}):
        torch.testing.assert_close(found, lz.ragged_attention(query, key, value, *starts, causal=False))
