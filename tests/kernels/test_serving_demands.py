"""What libraries for serving demand of a call beside its shapes, met before they are called."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch

from layerzero.backends.flashinfer import cascade
from layerzero.backends.flashinfer.varlen import STEPPED
from layerzero.backends.torch import cuda_attention
from layerzero.backends.torch.varlen import longest_queries
from layerzero.backends.vllm import varlen
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.registry import REGISTRY
from layerzero.testing import artefacts
from layerzero.testing.sizes import CheckSetting

NAME = "attention.gqa.decode.paged"


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shared", [("key", "value"), ("key",), ()], ids=["both", "keys", "none"])
def test_beside_a_mask_heads_of_keys_and_values_are_not_both_one_memory(monkeypatch, masked, shared):
    seen = []

    def operator(query, key, value, mask, *_, **__):
        seen.append((key, value, mask))
        return (query,)

    monkeypatch.setattr(cuda_attention, "sdpa_operator", lambda _: operator)
    torch.manual_seed(0)
    query, given = torch.randn(2, 3, 65, 8), {name: torch.randn(2, 3, 40, 8) for name in ("key", "value")}
    for name in shared:
        given[name] = given[name][:, :1].expand(-1, 3, -1, -1)
    mask = torch.randn(65, 40) if masked else None
    cuda_attention._load_cuda_efficient({"requires_grad": False})(query, given["key"], given["value"], attn_mask=mask)
    ((key, value, _),) = seen
    assert torch.equal(key, given["key"])
    assert value is given["value"]
    assert (key is given["key"]) is not (masked and len(shared) == 2)
    assert (key.stride(1) == value.stride(1) == 0) is (len(shared) == 2 and not masked)


@pytest.mark.parametrize(
    ("promised", "tokens", "sequences", "wanted"),
    [(None, 1, 3, 2), (1, 2, 3, 2), (1, 3, 3, 1), (None, 1, 1, 1), (None, 7, 3, 7), (4, 7, 3, 4), (4, 3, 3, 3)],
)
def test_one_query_a_sequence_is_only_said_where_each_has_one(monkeypatch, promised, tokens, sequences, wanted):
    assert longest_queries(promised, tokens, sequences) == wanted
    told = []

    def varlen_fwd(*given):
        told.append(given[10])
        return given[0], torch.zeros(4, tokens)

    operator = types.SimpleNamespace(varlen_fwd=types.SimpleNamespace(default=varlen_fwd))
    monkeypatch.setattr(varlen, "operators", lambda *_: operator)
    query, key = torch.randn(tokens, 4, 16), torch.randn(5, 2, 16)
    starts = torch.arange(sequences + 1).clamp(max=tokens).int()
    starts[-1] = tokens
    facts = FactsBuilder(REGISTRY.operation("attention.gqa.prefill.ragged")).build(
        query, key, key, starts, starts.clamp(max=5), device=Device.named("A100")
    )
    varlen.load_ragged(facts, varlen.forward_of_v2)(query, key, key, starts, starts.clamp(max=5), max_seqlen_q=promised)
    assert told == [wanted]


@pytest.mark.parametrize(("width", "most"), [(64, 128), (128, 64), (256, 32)])
def test_flashinfer_merges_as_many_heads_as_a_block_has_threads_for(width, most):
    (kernel,) = [each for each in cascade.KERNELS if each.id == "flashinfer.merge_states"]
    for heads, wanted in ((most, []), (most + 1, ["heads"])):
        state = torch.empty(3, heads, width, dtype=torch.bfloat16), torch.empty(heads, 3)
        facts = FactsBuilder(REGISTRY.operation("attention.merge_states")).build(
            *state, *state, device=Device.named("H100")
        )
        assert [each.reason.fact for limit in kernel.limits for each in limit.check(facts)] == wanted


def test_a_kernel_that_wants_a_handle_is_built_with_one():
    plain = REGISTRY.kernel("torch.paged_gather")

    def load(facts):
        attend = plain.load(facts)
        return lambda *tensors, step, **arguments: attend(*tensors, **arguments)

    kernel = replace(
        plain, id="invented.stepped", load=load, accepts=(*plain.accepts, "step"), limits=(*plain.limits, *STEPPED),
        jit=True, build_key=lambda _: "one", graph_safe=False, stock=False,
    )  # fmt: skip
    setting = CheckSetting(REGISTRY.operation(NAME), torch.float32, "cpu", "NHD")
    outcome = artefacts.built(kernel, setting, lambda _: None)
    assert (outcome.status, outcome.message) == ("passed", "built")
