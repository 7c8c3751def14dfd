"""Debug mode on an NVIDIA GPU: one read of the device a call, and none in a capture."""

from __future__ import annotations

import warnings

import pytest
import torch

import layerzero as lz
from layerzero.core import indices
from layerzero.ops import OPERATIONS, function_of
from layerzero.ops.calls import accepted, arguments_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NAMES = (
    *("kv.append.paged", "kv.append.contiguous", "kv.rope_append.paged", "kv.copy_blocks", "posenc.rope"),
    *("attention.gqa.decode.paged", "attention.gqa.mixed.paged", "attention.gqa.prefill.ragged"),
)


@pytest.fixture
def looks(monkeypatch):
    """How often each look at the values of a call made the host wait for the device."""
    found, look = [], indices.problems

    def watched(*given):
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                return look(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found.append(len([each for each in told if "synchronizing" in str(each.message)]))

    monkeypatch.setattr(indices, "problems", watched)
    return found


def call_of(name):
    operation, function = OPERATIONS[name], function_of(name)
    case = min(operation.cases, key=lambda each: sum(each.sizes.values()))
    return function, accepted(function, arguments_of(operation, case, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_reads_the_device_once(name, looks):
    function, arguments = call_of(name)
    with lz.scope(debug=True):
        getattr(lz, function.name)(**arguments)
        for tensor in OPERATIONS[name].schema.indexed:
            if arguments.get(tensor.name) is not None:
                broken = arguments[tensor.name].clone()
                broken.view(-1)[-1] = -9
                with pytest.raises(lz.InvalidCallError, match=rf"{tensor.name}.*-9"):
                    getattr(lz, function.name)(**arguments | {tensor.name: broken})
    assert set(looks) == {1}


def test_a_capture_looks_at_nothing(looks):
    _, arguments = call_of("kv.append.paged")
    with lz.scope(debug=True):
        lz.append_paged_kv_(**arguments)
        looks.clear()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            lz.append_paged_kv_(**arguments)
    assert looks == []
