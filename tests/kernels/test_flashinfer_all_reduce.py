"""FlashInfer's sum over ranks, by what its function is called with."""

from __future__ import annotations

import functools
import gc
import os
import sys
import types

import pytest
import torch

import layerzero as lz
from layerzero.backends.flashinfer import rows
from layerzero.backends.torch import collectives


def test_flashinfers_sum_gets_what_its_function_takes(monkeypatch):
    """Stands in for the library on a CPU: the parameters are those of 0.7.2's function, in its order."""
    calls, ended = [], []

    def fusion(
        allreduce_in, world_size, world_rank, token_num, hidden_dim, workspace_ptrs, launch_with_pdl, use_oneshot,
        trigger_completion_at_end, fp32_acc, pattern_code, allreduce_out, residual_in, residual_out, norm_out,
        quant_out, scale_out, rms_gamma, rms_eps, scale_factor, layout_code,
        block_quant_group_size=None, weight_bias=None,
    ):  # fmt: skip
        calls.append((world_size, world_rank, token_num, hidden_dim, pattern_code, rms_eps))
        if pattern_code == 0:
            allreduce_out.copy_(allreduce_in)
        else:
            residual_out.copy_(allreduce_in + residual_in)
            norm_out.copy_(torch.rms_norm(residual_out, rms_gamma.shape, rms_gamma, rms_eps))

    def create(rank, size, tokens, hidden, group):
        assert os.environ[collectives.NO_MULTICAST] == "1"
        return [[1], [2], [3]], torch.tensor([size, tokens * hidden])

    def deprecated(*_given, **_named):
        pytest.fail("the wrapper warns of another name")

    class Group:
        pass

    library = types.ModuleType("flashinfer.comm.trtllm_ar")
    library.get_trtllm_comm_module = lambda: types.SimpleNamespace(trtllm_allreduce_fusion=fusion)
    library.trtllm_create_ipc_workspace_for_all_reduce_fusion = functools.wraps(create)(deprecated)
    library.trtllm_destroy_ipc_workspace_for_all_reduce_fusion = ended.append
    comm = types.ModuleType("flashinfer.comm")
    comm.trtllm_ar = library
    for module in (types.ModuleType("flashinfer"), comm, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    group = Group()
    ranks, x, weight = lz.Ranks(group, 2, 1), torch.randn(4, 1024), torch.rand(1024)
    assert torch.equal(rows._load_all_reduce({})(x.T.contiguous().T, group=ranks), x)
    fused = rows._load_all_reduce_add_rms_norm(types.SimpleNamespace(size=lambda name: 1024))
    normed, total = fused(x, x, weight, eps=0.5, group=ranks)
    assert torch.equal(total, x + x)
    torch.testing.assert_close(normed, torch.rms_norm(x + x, (1024,), weight, 0.5))
    assert calls == [(2, 1, 4, 1024, 0, None), (2, 1, 4, 1024, 1, 0.5)]
    del group
    gc.collect()
    assert ended == [[[1], [2], [3]]]
    assert not rows._WORKSPACES, "it goes with the group"
