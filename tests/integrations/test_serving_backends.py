"""vLLM's and SGLang's attention backends: interfaces as the frameworks have them, and forward passes over pages."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
import types
from enum import Enum
from pathlib import Path

import pytest
import torch

from layerzero.ops.attention.reference import attention_reference

PAGE = 16
pytestmark = pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # a softcap on a CPU


def of_vllm():
    """vLLM's package folder, without importing it."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


VLLM = of_vllm()
needs_vllm = pytest.mark.skipif(VLLM is None, reason="wanted vllm's interface files, got no package vllm")


def module(monkeypatch, name, **members):
    """A module that stands for one which needs what is not installed."""
    made = types.ModuleType(name)
    vars(made).update(members)
    made.__path__ = []
    monkeypatch.setitem(sys.modules, name, made)
    return made


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


SGLANG = {
    "init_forward_metadata": ("self", "forward_batch"),
    "get_cuda_graph_seq_len_fill_value": ("self",),
    "support_triton": ("self",),
    "forward_extend": ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "**kwargs"),
    "forward_decode": ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "**kwargs"),
}
"""Of sglang 0.5.23, srt/layers/attention/base_attn_backend.py: what its runner calls."""


@pytest.fixture
def sglang(monkeypatch):
    """The integration on top of modules that have the names of sglang 0.5.23."""
    for name in ("", ".srt", ".srt.layers", ".srt.layers.attention", ".srt.mem_cache", ".srt.arg_groups"):
        module(monkeypatch, f"sglang{name}")

    class AttentionBackend:
        pass

    registered = {}
    choices = []
    module(monkeypatch, "sglang.srt.layers.attention.base_attn_backend", AttentionBackend=AttentionBackend)
    module(
        monkeypatch,
        "sglang.srt.layers.attention.attention_registry",
        ATTENTION_BACKENDS=registered,
        register_attention_backend=lambda name: lambda made: registered.setdefault(name, made),
    )
    module(monkeypatch, "sglang.srt.arg_groups.choices", add_attention_backend_choices=choices.extend)
    pools = module(monkeypatch, "sglang.srt.mem_cache.memory_pool", KVWriteLoc=lambda slots: ("at", slots))
    sys.modules["sglang.srt.mem_cache"].memory_pool = pools
    monkeypatch.delitem(sys.modules, "layerzero.integrations.sglang", raising=False)
    made = importlib.import_module("layerzero.integrations.sglang")
    made.tested = registered, choices
    yield made
    sys.modules.pop("layerzero.integrations.sglang", None)


STEPS = [((17, 33, 1), (1, 1, 1)), ((17, 40, 6), (1, 8, 6)), ((20, 5), (20, 3))]
"""Lengths and new tokens of each sequence: decodes, a mixed step, prefills one of which is a chunk."""


class Sequences:
    """Keys and values of every sequence as a list of tokens, and their places in a cache."""

    def __init__(self, lens, counts, heads=4, kv_heads=2, dim=16):
        torch.manual_seed(0)
        self.lens, self.counts = torch.tensor(lens, dtype=torch.int32), counts
        self.starts = torch.tensor([sum(counts[:each]) for each in range(len(counts) + 1)], dtype=torch.int32)
        self.query = torch.randn(sum(counts), heads, dim)
        self.keys, self.values = ([torch.randn(length, kv_heads, dim) for length in lens] for _ in range(2))
        blocks = -(-max(lens) // PAGE)
        self.tables = torch.randperm(len(lens) * blocks + 2)[: len(lens) * blocks].view(len(lens), blocks).int()
        self.pages = len(lens) * blocks + 2

    def slots(self):
        """Where each sequence's tokens lie."""
        for table, length in zip(self.tables, self.lens.tolist(), strict=True):
            places = torch.arange(length)
            yield table[places // PAGE].long() * PAGE + places % PAGE

    def new(self, of):
        """This step's tokens, one sequence after the other."""
        return torch.cat([each[len(each) - count :] for each, count in zip(of, self.counts, strict=True)])

    def wanted(self, **scores):
        found = []
        for row, count in enumerate(self.counts):
            query = self.query[self.starts[row] : self.starts[row] + count]
            dense = (each.unsqueeze(0) for each in (query, self.keys[row], self.values[row]))
            found.append(attention_reference(*dense, **{"causal": True, **scores})[0])
        return torch.cat(found)

    def fill(self, keys, values):
        """Write what was there before this step into (slots, K, D)."""
        for row, slots in enumerate(self.slots()):
            before = slots[: len(slots) - self.counts[row]]
            keys[before], values[before] = self.keys[row][: len(before)], self.values[row][: len(before)]


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


def test_sglang_calls_what_is_there(sglang):
    backend = sglang.LayerZeroAttnBackend
    for name, wanted in SGLANG.items():
        parameters = inspect.signature(getattr(backend, name)).parameters.values()
        got = ["**kwargs" if each.kind is each.VAR_KEYWORD else each.name for each in parameters]
        assert tuple(got) == wanted, name
    sglang.register()
    registered, choices = sglang.tested
    assert registered == {"layerzero": backend}
    assert choices == ["layerzero"]


def mode_of(kind):
    """SGLang's forward mode: what it is asked for here."""
    names = ("decode", "idle", "dllm_extend")
    return types.SimpleNamespace(**{f"is_{name}": functools.partial(kind.__eq__, name) for name in names})


def test_what_sglang_computes_otherwise_is_refused_before_a_forward_pass(sglang):
    runner = types.SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None, page_size=1)
    backend = sglang.LayerZeroAttnBackend(runner)
    for kind, spec_info in (("decode", object()), ("extend", object()), ("dllm_extend", None)):
        batch = types.SimpleNamespace(forward_mode=mode_of(kind), spec_info=spec_info)
        with pytest.raises(NotImplementedError, match="wanted a prefill or a decode, got drafts or blocks"):
            backend.init_forward_metadata(batch)
    backend.init_forward_metadata(types.SimpleNamespace(forward_mode=mode_of("idle"), spec_info=None))
    assert backend.step is None


class Pool:
    """SGLang's pool of one layer: tokens by index."""

    def __init__(self, tokens):
        self.keys, self.values = torch.zeros(2, tokens, 2, 16)

    def set_kv_buffer(self, layer, location, keys, values):
        name, slots = location
        assert name == "at"
        self.keys[slots], self.values[slots] = keys.view(-1, 2, 16), values.view(-1, 2, 16)

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values


@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("step", STEPS, ids=["decodes", "mixed", "prefills"])
def test_a_step_of_sglang_writes_its_tokens_and_attends_over_the_pool(sglang, step, page_size):
    made = Sequences(*step)
    pool = Pool(made.pages * PAGE)
    made.fill(pool.keys, pool.values)
    rows = torch.full((len(made.counts) + 1, 64), 10**6)
    for row, slots in enumerate(made.slots()):
        rows[row + 1, : len(slots)] = slots
    runner = types.SimpleNamespace(
        req_to_token_pool=types.SimpleNamespace(req_to_token=rows), token_to_kv_pool=pool, page_size=page_size
    )
    decode = all(count == 1 for count in made.counts)
    batch = types.SimpleNamespace(
        seq_lens=made.lens.long(),
        seq_lens_cpu=made.lens.long(),
        req_pool_indices=torch.arange(len(made.counts)) + 1,
        forward_mode=mode_of("decode" if decode else "extend"),
        spec_info=None,
        extend_seq_lens_cpu=list(made.counts),
        out_cache_loc=torch.cat(
            [each[len(each) - count :] for each, count in zip(made.slots(), made.counts, strict=True)]
        ),
    )
    layer = types.SimpleNamespace(
        is_cross_attention=False,
        layer_id=0,
        attn_type="decoder",
        sliding_window_size=7,
        tp_q_head_num=4,
        qk_head_dim=16,
        scaling=0.2,
        logit_cap=30.0,
    )
    backend = sglang.LayerZeroAttnBackend(runner)
    forward = backend.forward_decode if decode else backend.forward_extend
    call = (made.query.flatten(1), made.new(made.keys), made.new(made.values), layer, batch)
    with pytest.raises(NotImplementedError, match="wanted init_forward_metadata before a forward pass"):
        forward(*call)
    backend.init_forward_metadata(batch)
    output = forward(*call)
    wanted = made.wanted(scale=0.2, window=(7, 0), softcap=30.0)
    torch.testing.assert_close(output, wanted.flatten(1), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="sinks: wanted None"):
        forward(*call, sinks=torch.zeros(4))
