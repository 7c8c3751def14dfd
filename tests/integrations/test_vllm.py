"""vLLM's attention backend: its interface as the framework has it, forward passes over pages, and refusals."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import types
from enum import Enum
from pathlib import Path

import pytest
import torch
from engine_steps import PAGE, STEPS, Sequences, module

pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # a softcap on a CPU


def of_vllm():
    """vLLM's package folder, without importing it."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


VLLM = of_vllm()
needs_vllm = pytest.mark.skipif(VLLM is None, reason="wanted vllm's interface files, got no package vllm")


def sourced(monkeypatch, name, path):
    """The framework's own file under its own name, alone."""
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, made)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def vllm(monkeypatch):
    """The integration on top of vLLM's own interface file; what that imports of the rest of vLLM are names here."""
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends", "vllm.model_executor"):
        module(monkeypatch, name)
    quantisation = "vllm.model_executor.layers.quantization.utils.quant_utils"
    kinds = dict.fromkeys(
        ("kFp8Dynamic64Sym", "kFp8Dynamic128Sym", "kFp8StaticTensorSym", "kNvfp4Dynamic", "kFp8StaticTokenSym")
    )
    module(monkeypatch, quantisation, **kinds)
    module(monkeypatch, "vllm.v1.kv_cache_interface", KVCacheLayout=Enum("KVCacheLayout", []), get_kv_quant_mode=None)
    alone = types.SimpleNamespace(world_size=1, rank_in_group=0)
    groups = {"get_dcp_world_size_and_rank": lambda _: (1, 0), "get_pcp_group": lambda: alone}
    module(monkeypatch, "vllm.config", get_current_vllm_config_or_none=lambda: None)
    module(monkeypatch, "vllm.distributed")
    module(monkeypatch, "vllm.distributed.parallel_state", **groups)
    sourced(monkeypatch, "vllm.v1.attention.backend", VLLM / "v1/attention/backend.py")
    monkeypatch.delitem(sys.modules, "layerzero.integrations.vllm", raising=False)
    made = importlib.import_module("layerzero.integrations.vllm")
    yield made
    sys.modules.pop("layerzero.integrations.vllm", None)


@needs_vllm
def test_vllm_has_the_interface_that_the_classes_were_written_against(vllm):
    """Every method that vLLM makes abstract is there, and takes its arguments by the same names."""
    source = ast.parse((VLLM / "v1/attention/backend.py").read_text())
    pairs = {
        "AttentionBackend": vllm.LayerZeroAttentionBackend,
        "AttentionMetadataBuilder": vllm.LayerZeroMetadataBuilder,
        "AttentionImpl": vllm.LayerZeroAttentionImpl,
    }
    checked = []
    for node in source.body:
        own = pairs.get(getattr(node, "name", ""))
        for method in node.body if own is not None else ():
            abstract = any(
                getattr(each, "id", "") == "abstractmethod" for each in getattr(method, "decorator_list", ())
            )
            if abstract:
                wanted = [each.arg for each in method.args.args]
                got = list(inspect.signature(getattr(own, method.name)).parameters)
                assert got[: len(wanted)] == wanted, f"{own.__name__}.{method.name}"
                checked.append(method.name)
    assert {"get_name", "get_impl_cls", "get_builder_cls", "build", "forward", "__init__"} <= set(checked)


def metadata_of(vllm, made):
    """What vLLM's runner tells every builder of a step."""
    common = types.SimpleNamespace(
        num_actual_tokens=len(made.query),
        block_table_tensor=made.tables,
        seq_lens=made.lens,
        query_start_loc=made.starts,
        query_start_loc_cpu=made.starts,
        max_seq_len=int(made.lens.max()),
        slot_mapping=torch.cat(
            [each[len(each) - count :] for each, count in zip(made.slots(), made.counts, strict=True)]
        ),
        causal=True,
    )
    builder = vllm.LayerZeroAttentionBackend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    return builder.build(0, common)


@needs_vllm
@pytest.mark.parametrize("shape", ["stacked", "heads first", "tokens first"])
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "mixed", "prefills"])
def test_a_step_of_vllm_writes_its_tokens_and_attends_over_the_pages(vllm, step, shape):
    made = Sequences(*step)
    if shape == "stacked":
        cache = torch.zeros(vllm.LayerZeroAttentionBackend.get_kv_cache_shape(made.pages, PAGE, 2, 16))
    elif shape == "heads first":
        cache = torch.zeros(made.pages, 2, PAGE, 32)
    else:
        cache = torch.zeros(made.pages, PAGE, 2, 32).transpose(1, 2)
    impl = vllm.LayerZeroAttentionBackend.get_impl_cls()(4, 16, 0.2, 2, sliding_window=8, logits_soft_cap=30.0)
    keys, values = impl.caches(cache)
    flat = [torch.zeros(made.pages * PAGE, 2, 16) for _ in range(2)]
    made.fill(*flat)
    for view, filled in zip((keys, values), flat, strict=True):
        view.copy_(filled.view(made.pages, PAGE, 2, 16))
    padded = [
        torch.cat((each, torch.zeros(3, *each.shape[1:])))
        for each in (made.query, made.new(made.keys), made.new(made.values))
    ]
    output = torch.full((len(padded[0]), 4 * 16), -7.0)
    result = impl.forward(None, *padded, cache, metadata_of(vllm, made), output)
    assert result is output
    tokens = len(made.query)
    wanted = made.wanted(scale=0.2, window=(7, 0), softcap=30.0)
    torch.testing.assert_close(output[:tokens], wanted.flatten(1), rtol=1e-5, atol=1e-5)
    assert (output[tokens:] == -7.0).all()
    slots = torch.cat(list(made.slots()))
    torch.testing.assert_close(keys.reshape(-1, 2, 16)[slots], torch.cat(made.keys))
    torch.testing.assert_close(values.reshape(-1, 2, 16)[slots], torch.cat(made.values))


@needs_vllm
def test_encoders_attend_without_a_cache_and_the_rest_is_refused(vllm):
    made = Sequences((5, 3), (5, 3))
    impl = vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, attn_type="encoder_only")
    output = torch.zeros(8, 4, 16)
    impl.forward(None, made.query, made.new(made.keys), made.new(made.values), None, metadata_of(vllm, made), output)
    torch.testing.assert_close(output, made.wanted(causal=False, scale=0.25), rtol=1e-5, atol=1e-5)
    windowed = vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, sliding_window=3, attn_type="encoder_only")
    assert windowed.window == (2, 2), "to both sides, as vLLM's own backends have it"
    assert impl.forward(None, *[made.query] * 3, None, None, output).abs().max() == 0
    for wrong in ({"alibi_slopes": [0.5]}, {"attn_type": "encoder_decoder"}, {"kv_cache_dtype": "fp8"}, {"sinks": 1}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(wrong))}: wanted"):
            vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, **wrong)


@needs_vllm
def test_vllm_registers_it_as_custom(vllm, monkeypatch):
    taken = []
    member = types.SimpleNamespace(is_overridden=lambda: bool(taken), get_path=lambda: taken[-1])
    module(
        monkeypatch,
        "vllm.v1.attention.backends.registry",
        AttentionBackendEnum=types.SimpleNamespace(CUSTOM=member),
        register_backend=lambda _, path: taken.append(path),
    )
    vllm.register()
    vllm.register()
    assert set(taken) == {"layerzero.integrations.vllm.LayerZeroAttentionBackend"}
    taken.append("another.Backend")
    with pytest.raises(RuntimeError, match=r"CUSTOM: wanted a backend that nobody registered, got another\.Backend"):
        vllm.register()
