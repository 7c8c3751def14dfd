"""How the CUDA libraries of norms, rotations and appends are called, by stand-ins that do what their sources say."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from layerzero.backends.flashinfer import rope as flashinfer
from layerzero.backends.vllm import paged, rope
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.ops.rope.declare import cos_sin

HEADS, KV_HEADS, WIDTH = 4, 2, 64


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def tensors(lead):
    torch.manual_seed(len(lead))
    query, key, value = (torch.randn(*lead, each, WIDTH) for each in (HEADS, KV_HEADS, KV_HEADS))
    weights = {name: torch.randn(WIDTH) * 0.2 + 1 for name in ("q_weight", "k_weight")}
    cos, sin = cos_sin(40, WIDTH // 2, torch.device("cpu"))
    return query, key, value, weights, cos, sin, torch.randint(0, 40, lead)


def facts_of(name, arguments, layout=None):
    operation = OPERATIONS[name]
    given = {**operation.schema.neutral, **arguments}
    return operation, FactsBuilder(operation).of_valid(given, device=Device.named("H200"), layout=layout)


def _turn(pairs, table, places, *, interleaved):
    """Rotate the first two of four tensors into the others, or over themselves."""
    query, key, query_out, key_out = pairs
    results = OPERATIONS["posenc.rope"].reference(
        query, key, *table.chunk(2, -1), positions=places, interleaved=interleaved
    )
    query_out.copy_(results[0])
    key_out.copy_(results[1])


@pytest.fixture
def as_flashinfer(monkeypatch):
    def rotate(query, key, query_out, key_out, table, places, interleaved):
        assert all(each.ndim == 3 for each in (query, key, query_out, key_out))
        _turn((query, key, query_out, key_out), table, places, interleaved=interleaved)

    def norm(extra):
        def run(output, rows, weight, eps, overlap):
            assert rows.ndim == output.ndim == 2
            assert rows.is_contiguous()
            assert overlap is True
            output.copy_(torch.nn.functional.rms_norm(rows, weight.shape, weight + extra, eps))

        return run

    modules = {
        "flashinfer.rope": {"apply_rope_pos_ids_cos_sin_cache": rotate},
        "flashinfer.norm": {"rmsnorm": norm(0), "gemma_rmsnorm": norm(1)},
    }
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    for name, functions in modules.items():
        module = types.ModuleType(name)
        made = types.SimpleNamespace(**functions)
        setattr(module, f"get_{name.split('.')[1]}_module", lambda made=made: made)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("as_flashinfer")
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
def test_flashinfers_norm_and_rotation_of_queries_and_keys(lead, plus_one):
    query, key, _, weights, cos, sin, positions = tensors(lead)
    arguments = {"query": query, "key": key, **weights, "cos": cos, "sin": sin, "plus_one": plus_one}
    operation, facts = facts_of("posenc.qk_norm_rope", arguments | {"positions": positions}, "BSHD")
    given = query, key, *weights.values(), cos, sin
    before = query.clone()
    got = flashinfer._load_normed(facts)(*given, positions=positions, eps=1e-5, plus_one=plus_one)
    close(got, operation.reference(*given, positions=positions, eps=1e-5, plus_one=plus_one))
    assert torch.equal(query, before)


@pytest.mark.usefixtures("as_flashinfer")
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("lead", [(5,), (2, 3)], ids=str)
def test_flashinfers_norm_and_rotation_of_a_joined_product(lead, normed):
    query, key, value, weights, cos, sin, positions = tensors(lead)
    qkv = torch.cat((query, key, value), -2).flatten(-2)
    named = {"heads": HEADS, "kv_heads": KV_HEADS, "positions": positions, **(weights if normed else {})}
    operation, facts = facts_of("posenc.split_qkv_norm_rope", {"qkv": qkv, "cos": cos, "sin": sin, **named})
    before = qkv.clone()
    got = flashinfer._load_split(facts)(qkv, cos, sin, **named, eps=1e-6, plus_one=False)
    close(got, operation.reference(qkv, cos, sin, **named))
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("interleaved", [False, True])
def test_vllms_rotation_and_append(monkeypatch, interleaved):
    def rotate(places, query, key, width, table, half_split):
        assert places.dtype is torch.int64
        _turn((query, key, query, key), table, places, interleaved=not half_split)

    def append(key, value, key_cache, value_cache, slots, kind, one, other):
        assert key.is_contiguous()
        assert kind == "auto"
        OPERATIONS["kv.append.paged"].reference(key, value, key_cache, value_cache, slots)

    functions = {"rotary_embedding": rotate, "reshape_and_cache_flash": append}
    library = types.SimpleNamespace(**{name: types.SimpleNamespace(default=each) for name, each in functions.items()})
    for module in (rope, paged):
        monkeypatch.setattr(module, "operators", lambda *_: library)
    monkeypatch.setattr(paged, "SCALES", types.SimpleNamespace(get=lambda *_, capturing: None))
    query, key, value, _, cos, sin, positions = tensors((5,))
    caches = [torch.randn(3, 8, KV_HEADS, WIDTH) for _ in range(2)]
    slots = torch.tensor([3, -1, 17, 0, 23])
    names = ("query", "key", "value", "cos", "sin", "key_cache", "value_cache", "positions", "slot_mapping")
    given = (query, key, value, cos, sin, *caches, positions.int(), slots)
    arguments = dict(zip(names, given, strict=True)) | {"interleaved": interleaved}
    operation, facts = facts_of("kv.rope_append.paged", arguments, "NHD")
    copies = [each.clone() for each in caches]
    wanted = operation.reference(query, key, value, cos, sin, *copies, positions, slots, interleaved=interleaved)
    before = query.clone(), key.clone()
    close(
        [REGISTRY.kernel("vllm.rope_append").load(facts)(*given, interleaved=interleaved), *caches], [wanted, *copies]
    )
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])
