"""What torch itself says against its attention kernels on a GPU; its checks are stood in for, since they need one."""

from __future__ import annotations

import warnings

import pytest
import torch

import layerzero as lz
from layerzero.backends.torch import cuda_attention
from layerzero.core.reasons import ReasonCode

SAID = {
    "flash": "Both fused kernels do not support non-null attn_mask. (Triggered internally at sdp_utils.cpp:262.)",
    "efficient": None,  # it takes the call
    "cudnn": "",  # it does not say why
}


@pytest.fixture
def asked(monkeypatch):
    """What torch was asked about, as if the tensors lay on the GPU in question."""
    seen = []

    def answer(said):
        def can_use(params, debug=False):
            assert debug
            seen.append(params)
            if said:
                warnings.warn(said, stacklevel=1)
            return said is None

        return can_use

    for name, said in SAID.items():
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", answer(said))
    monkeypatch.setattr(cuda_attention, "_all_here", lambda _: True)
    return seen


def explained(layout="BSHD", **named):
    query, key = torch.randn(1, 64, 8, 64).bfloat16(), torch.randn(1, 64, 2, 64).bfloat16()
    call = {"query": query, "key": key, "value": key, "layout": layout, **named}
    return cuda_attention.with_torchs_words(lz.explain(lz.attention, device="H100", **call), call)


def test_torchs_words_are_a_reason_of_a_refused_kernel(asked):
    report = explained(attn_mask=torch.ones(64, 64, dtype=torch.bool), causal=False)
    reason = report.reasons("torch.sdpa.flash")[-1]
    assert reason.code is ReasonCode.CONSTRAINT_FAILED
    assert reason.message == (
        "torch.backends.cuda.can_use_flash_attention must be True, is False. "
        "torch says: Both fused kernels do not support non-null attn_mask."
    )
    assert report.reasons("torch.sdpa.cudnn")[-1].hint == "torch does not say why"
    assert report.chosen is report.candidates[0]
    params = asked[0]
    assert (params.query.shape[1], params.key.shape[1]) == (8, 2), "as torch has them, heads before tokens"
    assert (params.attn_mask is not None, params.is_causal, params.enable_gqa) == (True, False, True)


def test_a_kernel_that_may_run_stays_legal_and_gets_a_note(asked):
    report = explained()
    assert report.reasons("torch.sdpa.flash") == ()
    assert any(note.startswith("torch.sdpa.flash may run where torch's function leaves it") for note in report.notes)
    assert not any("efficient" in note for note in report.notes)
    assert asked[0].is_causal


def test_what_torchs_check_raises_is_what_it_says(asked, monkeypatch):
    """Torch 2.11 raises so of a mask of one axis (H200, 2026-11-30)."""

    def can_use(params, debug=False):
        raise IndexError("Dimension out of range (expected to be in range of [-1, 0], but got -2)")

    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", can_use)
    report = explained(attn_mask=torch.ones(64, dtype=torch.bool), causal=False)
    assert "torch says: IndexError: Dimension out of range" in report.reasons("torch.sdpa.cudnn")[-1].hint


def test_torch_is_asked_about_tensors_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", pytest.fail)
    for report in (explained(), explained(causal=False)):
        assert not any("can_use" in reason.fact for reasons in report.failures.values() for reason in reasons)
