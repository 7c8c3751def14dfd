"""LayerZero's own Triton kernels under Triton's interpreter, on a CPU: results are the reference's.

Skipped without Triton: ``pip install --no-deps triton`` beside a torch for CPUs, then ``TRITON_INTERPRET=1 pytest
tests/kernels/test_layerzero_triton.py``. It shows no race between threads, and nothing of what a GPU's compiler makes.
"""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import CALLS, DEVICE, DRAWS, here, interpreting

import layerzero as lz
from layerzero.engine.registry import REGISTRY
from layerzero.testing.generate import RandomCall, draw, drawn_numbers
from layerzero.testing.single_run import attempt

OURS = [(kernel, each) for kernel in REGISTRY.kernels() if kernel.source == "layerzero_triton"
        for each in kernel.operations]  # fmt: skip


@pytest.fixture(scope="module")
def interpreter():
    with interpreting():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kernel", "name"), OURS, ids=[f"{kernel.id} of {name}" for kernel, name in OURS])
def test_results(interpreter, kernel, name, dtype):
    kernel, operation, right = here(kernel), REGISTRY.operation(name), 0
    for number in drawn_numbers(operation, dtype, 0, DRAWS):
        call = draw(operation, dtype, 0, number, DEVICE)
        with lz.scope(allow_jit_compile=True):
            trial = attempt(kernel, operation, call)
            if trial.reasons:
                continue
            found = trial.outcome()
        assert found.status == "passed", (call.text, found.message)
        right += 1
        if right == CALLS:
            break
    assert right >= 10


@pytest.mark.slow
@pytest.mark.parametrize("columns", [2, 4, 9])
def test_branches_of_drafts_beside_what_was_cached(interpreter, columns):
    """Two sequences of four new tokens each behind 5 and 19 cached ones; with too few columns they are chains."""
    tokens, heads, pages = 8, 4, 16
    tree = torch.zeros(tokens, columns, dtype=torch.bool)
    for row, seen in enumerate([(0,), (0, 1), (0, 2), (0, 2, 3)] * 2):
        for each in seen:
            tree[row, min(each, columns - 1)] = True
    arguments = {
        "query": torch.randn(tokens, heads, 24),
        "key_cache": torch.randn(pages, 8, 2, 24),
        "value_cache": torch.randn(pages, 8, 2, 40),
        "block_tables": torch.tensor([[3, 7, 0], [5, 2, 9]], dtype=torch.int32),
        "context_lens": torch.tensor([9, 23], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 4, 8], dtype=torch.int32),
        "tree_mask": tree,
        "layout": "NHD",
    }
    kernel, name = next((here(kernel), each) for kernel, each in OURS if each == "attention.gqa.prefill.paged")
    for more in ({}, {"softcap": 5.0, "sinks": torch.randn(heads)}, {"return_lse": True}):
        moved = {
            key: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for key, each in (arguments | more).items()
        }
        call = RandomCall("paged_attention", moved)
        with lz.scope(allow_jit_compile=True):
            trial = attempt(kernel, REGISTRY.operation(name), call)
            assert not trial.reasons
            found = trial.outcome()
        assert found.status == "passed", (more, found.message)


@pytest.mark.parametrize(("device", "wanted"), [("H100", []), ("MI300X", [lz.ReasonCode.NOT_VETTED])])
def test_where_none_ever_ran_they_are_vetted_first(device, wanted):
    rows, library = torch.empty(4, 64, device="meta"), "triton" if device == "H100" else "pytorch-triton-rocm"
    with lz.scope(allow_jit_compile=True):
        report = lz.explain("swiglu_oai", rows, device=device, libraries={library: "3.6.0"})
    assert [each.code for each in report.reasons("layerzero_triton.swiglu_oai")] == wanted
