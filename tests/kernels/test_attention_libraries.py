"""The callables of attention libraries, with stand-ins that record or compute what the library would be given."""

from __future__ import annotations

import math
import stat
import sys
import threading
import types
import weakref

import pytest
import torch
from dense_calls import compare, facts_of, tensors
from operator_schemas import FA2_SCHEMA, FA3_SCHEMA, Operator

from layerzero.backends import shape_cache, xformers
from layerzero.backends.flash_attn import attention as flash_attn
from layerzero.backends.flash_attn import cute as flash_attn_cute
from layerzero.backends.flashinfer import varlen
from layerzero.backends.shape_cache import Prepared
from layerzero.backends.torch.attention import sdpa_operator
from layerzero.backends.vllm import flash_attn as vllm_flash_attn
from layerzero.backends.vllm import paged as vllm_paged
from layerzero.core.fact_reads import EVERYTHING, reads_of
from layerzero.core.reasons import ReasonCode
from layerzero.ops.attention.reference import attention_reference, with_lse
from layerzero.ops.cascade import merge_attention_states


def meaning(given, names):
    """The reference on what an operator was given; anything it was given that the reference has no word for fails."""
    query, key, value = (given.pop(name) for name in names[:3])
    window = given.pop("window_size_left"), given.pop("window_size_right")
    lengths, softcap = given.pop(names[3]), given.pop("softcap")
    output, lse = attention_reference(
        query,
        key,
        value,
        causal=given.pop("is_causal"),
        scale=given.pop("softmax_scale"),
        window=None if window == (-1, -1) else window,
        softcap=softcap or None,
        kv_lens=lengths,
        sinks=given.pop("s_aux", None),
        alibi_slopes=given.pop("alibi_slopes", None),
        return_lse=True,
    )
    assert set(given.values()) <= {None, False, True}  # nothing but switches is left
    return output, lse.masked_fill(lse == -torch.inf, torch.inf)


CALLS = [
    {"causal": True},
    {"causal": True, "scale": 0.3, "softcap": 5.0, "return_lse": True},
    {"window": (2, 1), "return_lse": True},
    {"causal": True, "window": (3, -1)},
]


@pytest.mark.parametrize(
    "call", [*CALLS, {"sinks": torch.tensor([0.1, -0.2, 0.3, 0.4]).bfloat16(), "return_lse": True}]
)
def test_vllm_v3_gives_its_operator_each_argument_in_its_place(monkeypatch, call):
    operator = Operator(FA3_SCHEMA, lambda given: [*meaning(given, ("q", "k", "v", "seqused_k")), None, None])
    monkeypatch.setattr(vllm_flash_attn, "operators", lambda *_: types.SimpleNamespace(fwd=operator))
    tables = Prepared(lambda _, batch, number: vllm_flash_attn._table("cpu", batch, number), 8)
    monkeypatch.setattr(vllm_flash_attn, "TABLES", tables)
    check_library(vllm_flash_attn._load_v3, call)


@pytest.mark.parametrize(
    "call", [*CALLS, {"alibi_slopes": torch.rand(4)}, {"kv_lens": torch.tensor([4, 9]), "causal": True}]
)
def test_vllm_v2_gives_its_operator_each_argument_in_its_place(monkeypatch, call):
    operator = Operator(FA2_SCHEMA, lambda given: list(meaning(given, ("q", "kcache", "vcache", "seqlens_k"))))
    monkeypatch.setattr(vllm_flash_attn, "operators", lambda *_: types.SimpleNamespace(fwd_kvcache=operator))
    check_library(vllm_flash_attn._load_v2, call)


def test_version_3_sums_sinks_alone_where_a_whole_tile_of_queries_sees_no_key():
    """As kernels leave them: -inf of a tile without keys, +inf of a sum beyond what exp can hold."""
    output, sinks = torch.randn(2, 5, 3, 8), torch.tensor([0.5, -2.0, 1.0]).bfloat16()
    lse = torch.randn(2, 3, 5)
    given = lse.clone()
    given[:, :, 0], given[0, 1, 1] = -torch.inf, torch.inf
    lse[:, :, 0], lse[0, 1, 1] = sinks.float(), -2.0
    assert torch.equal(with_lse(output, given, sinks)[1], lse)
    by_token = with_lse(output[0], given[0], sinks)[1]
    assert torch.equal(by_token, lse[0])
    lse[:, :, 0], lse[0, 1, 1] = -torch.inf, -torch.inf
    assert torch.equal(with_lse(output, given)[1], lse)


def test_scores_of_nan_have_a_log_sum_of_nan_and_values_of_nan_do_not():
    """Kernels give either infinity, or the sum of other parts; one column of values leaves what is summed alone."""
    output, lse = torch.randn(2, 5, 3, 8), torch.randn(2, 3, 5)
    output[0, 1, 2], output[1, 4, 0, 0], output[1, 4, 1, 7] = torch.nan, torch.nan, torch.nan
    for left in (-torch.inf, torch.inf, 0.5):
        given, wanted = lse.clone(), lse.clone()
        given[0, 2, 1], wanted[0, 2, 1] = left, torch.nan
        assert torch.equal(with_lse(output, given)[1].nan_to_num(9.0), wanted.nan_to_num(9.0))
        natural = varlen.natural(output[0], given[0].t() / math.log(2.0))[1]
        torch.testing.assert_close(natural, wanted[0], equal_nan=True)
    one = torch.full((1, 1, 1, 1), torch.nan)
    assert with_lse(one, torch.zeros(1, 1, 1))[1].isnan().all(), "one column is the first and the last"


def test_vllms_merge_keeps_nan_next_to_a_part_without_keys(monkeypatch):
    """Its kernel takes the larger of both as fmax does, and the first part where that is infinite."""

    def merged(output, lse, output_a, lse_a, output_b, lse_b, tokens, scale):
        most = torch.fmax(lse_a, lse_b)
        shares = (lse_a - most).exp(), (lse_b - most).exp()
        parts = [(each / sum(shares)).t().unsqueeze(-1) for each in shares]
        first = most.isinf().t().unsqueeze(-1)
        output.copy_(torch.where(first, output_a, parts[0] * output_a + parts[1] * output_b))
        lse.copy_(torch.where(most.isinf(), most, sum(shares).log() + most))

    operator = types.SimpleNamespace(merge_attn_states=types.SimpleNamespace(default=merged))
    monkeypatch.setattr(vllm_paged, "operators", lambda *_: operator)
    run = vllm_paged._load_merge(None)
    sums = torch.tensor([-torch.inf, torch.nan, 0.5])
    lse_a, lse_b = (each.contiguous() for each in torch.meshgrid(sums, sums, indexing="ij"))
    parts = []
    for lse in (lse_a, lse_b):
        of_rows = lse.t().unsqueeze(-1)
        parts.append(
            torch.randn(3, 3, 8).masked_fill(of_rows == -torch.inf, 0.0).masked_fill(of_rows.isnan(), torch.nan)
        )
    wanted = merge_attention_states(parts[0], lse_a, parts[1], lse_b)
    for left, right in zip(run(parts[0], lse_a, parts[1], lse_b), wanted, strict=True):
        torch.testing.assert_close(left, right, equal_nan=True)


def check_library(load, call):
    query, key, value = tensors()
    got = load(facts_of(query, key, value, **call))(query, key, value, **call)
    compare(got, attention_reference(query, key, value, **call))


def package_forward(*, compiles):
    """A function as the package has it: it finds its compiled functions through its own name."""
    namespace = {"compiles": compiles}
    source = """
def _flash_attn_fwd(q, k, v, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
                    window_size_right=None, learnable_sink=None, num_splits=1, *, return_lse=False, out=None, lse=None):
    key = (causal, return_lse)
    if key not in _flash_attn_fwd.compile_cache:
        _flash_attn_fwd.compile_cache[key] = compiles(key)
    arguments = [q, k, v, out, lse, softmax_scale, None, None, None, None, None, window_size_left, window_size_right]
    _flash_attn_fwd.compile_cache[key](*arguments, learnable_sink, None, (None, None), None, None)
    return out, lse, None, None, None
"""
    exec(source, namespace)
    namespace["_flash_attn_fwd"].compile_cache = {}
    return namespace["_flash_attn_fwd"]


def put_in_its_package(monkeypatch, forward):
    interface = types.SimpleNamespace(_flash_attn_fwd=forward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def test_flash_attention_4_is_called_through_its_package_once(monkeypatch):
    compiled, given = [], []

    def compiles(key):
        compiled.append(key)

        def function(q, k, v, out, lse, scale, *rest):
            given.append((scale, rest))
            sink = rest[7]
            result = attention_reference(q, k, v, causal=key[0], scale=scale, sinks=sink, return_lse=True)
            out.copy_(result[0])
            if lse is not None:  # as Softmax.finalize in flash_attn/cute/softmax.py has it
                lse.copy_(result[1].nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf))

        return function

    forward = package_forward(compiles=compiles)
    put_in_its_package(monkeypatch, forward)
    call = {"causal": True, "scale": 0.5, "return_lse": True}
    query, key, value = tensors()
    run = flash_attn_cute._load(facts_of(query, key, value, sinks=torch.zeros(4), **call))
    for sink in (torch.rand(4), torch.nn.Parameter(torch.rand(4))):
        query, key, value = (torch.randn_like(tensor) for tensor in (query, key, value))
        query[0, 2, 1, 3] = torch.nan
        got = run(query, key, value, sinks=sink, **call)
        wanted = attention_reference(query, key, value, sinks=sink.detach(), **call)
        torch.testing.assert_close(got[0], wanted[0], atol=1e-5, rtol=1e-5, equal_nan=True)
        torch.testing.assert_close(got[1], wanted[1], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert compiled == [(True, True)]
    assert list(forward.compile_cache) == [(True, True)], "the package keeps what was compiled"
    assert [(scale, [each for each in rest if each is not None]) for scale, rest in given] == [
        (0.5, [rest[7], (None, None)]) for _, rest in given
    ]


def test_flash_attention_4_asks_its_package_again_for_another_length(monkeypatch):
    asked = []

    def compiles(key):
        def function(q, k, v, out, lse, *rest):
            out.copy_(attention_reference(q, k, v))

        return function

    forward = package_forward(compiles=compiles)

    recording = flash_attn_cute._recording

    def recorded(given):
        run, recorder = recording(given)
        return lambda *tensors, **named: (asked.append(tensors[1].shape[1]), run(*tensors, **named))[1], recorder

    monkeypatch.setattr(flash_attn_cute, "_recording", recorded)
    put_in_its_package(monkeypatch, forward)
    facts = facts_of(*tensors(1, 9), operation="attention.gqa.decode")
    run = flash_attn_cute._load(facts)
    for seq_k in (9, 9, 10, 10, 10, 9):
        query, key, value = tensors(1, seq_k)
        torch.testing.assert_close(run(query, key, value), attention_reference(query, key, value))
    assert asked == [9, 10, 9]
    kept = weakref.ref(key)
    del query, key, value
    assert kept() is None, "a caller's tensors are its own"
    reads = reads_of(flash_attn_cute._load, facts) | reads_of(flash_attn_cute._build_key, facts)
    assert not {EVERYTHING, "seq_k", "key.shape", "key.strides"} & reads, reads


def test_flash_attention_4_refuses_a_package_that_calls_otherwise(monkeypatch):
    def compiles(key):
        return lambda *_: None

    forward = package_forward(compiles=compiles)
    original = forward.compile_cache
    recording, recorder = flash_attn_cute._recording(forward)
    recording(*tensors(), out=torch.empty(0))
    assert recorder.function is original[False, False]
    assert recorder.arguments[5:] == (None,) * 10 + ((None, None), None, None)


def test_flash_attention_4_keeps_what_it_compiled_for_other_processes(monkeypatch, tmp_path):
    class OnDisk(dict):
        def __init__(self, place):
            super().__init__()
            self.place = place

    def forward():
        return package_forward(compiles=lambda key: lambda *_: None)

    utils = types.SimpleNamespace(JITPersistentCache=OnDisk, _compute_source_fingerprint=lambda: "abc")
    package = types.ModuleType("flash_attn.cute")
    package.cache_utils = utils
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(flash_attn, "_CACHES", {})
    first, second = forward(), forward()
    for each in (first, second):
        flash_attn.kept(each)(*tensors(), out=torch.empty(0))
        assert each.compile_cache == {}, "the package's own is left alone"
    (cache,) = flash_attn._CACHES.values()
    assert list(cache) == [(False, False)]
    assert cache.place == flash_attn.cache_folder() / "abc" / "fwd"
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    own = forward()
    own.compile_cache = OnDisk("the user's")
    flash_attn.kept(own)(*tensors(), out=torch.empty(0))
    assert list(own.compile_cache) == [(False, False)], "a package that keeps it itself does"


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "/there"}, "/there"),
        ({"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}, "/tmp/somebody/flash_attention_cute_dsl_cache"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/flash_attention_cute_dsl_cache"),
    ],
)
def test_where_flash_attention_4_keeps_it(monkeypatch, environment, wanted):
    for name in ("CACHE_DIR", "CACHE_ENABLED"):
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shape_cache, "getuser", lambda: "somebody")
    monkeypatch.setattr(shape_cache.tempfile, "gettempdir", lambda: "/tmp")
    assert str(flash_attn.cache_folder()) == wanted


def test_what_is_prepared_outlives_the_limit_once_a_capture_used_it():
    made = Prepared(lambda number: [number], 2)
    first = made.get(1, capturing=False)
    assert made.get(1, capturing=True) is first
    for number in (2, 3, 4):
        made.get(number, capturing=False)
    assert made.get(1, capturing=False) is first
    assert not made.has(2), "the oldest went"
    with pytest.raises(RuntimeError, match="before the CUDA graph capture"):
        made.get(9, capturing=True)
    check = made.before_capture("a plan", lambda facts: (facts["batch"],)).check_facts
    capturing = {"capturing": True}
    assert check({**capturing, "batch": 1}) is None
    assert check({**capturing, "batch": 9}).code is ReasonCode.CUDA_GRAPH_UNSAFE
    assert check({"capturing": False, "batch": 9}) is None


def test_what_is_prepared_is_there_before_another_stream_reads_it(monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    waited = []
    stream = types.SimpleNamespace(synchronize=lambda: waited.append("made"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    prepared = Prepared(lambda: torch.zeros(1).as_subclass(OnDevice), 2)
    assert prepared.get(capturing=False) is prepared.get(capturing=False)
    assert waited == ["made"]


def test_nobody_waits_for_what_is_prepared_while_a_device_makes_it(monkeypatch):
    """Two threads with a GPU each: what one waits for may be an exchange with the other."""

    class OnDevice(torch.Tensor):
        is_cuda = True

    def beside():
        if not made:
            other = threading.Thread(target=lambda: made.append(prepared.get(capturing=False)), daemon=True)
            made.append(other)
            other.start()
            other.join(10.0)
            assert not other.is_alive()

    made = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: types.SimpleNamespace(synchronize=beside))
    prepared = Prepared(lambda: torch.zeros(1).as_subclass(OnDevice), 1)
    assert prepared.get(capturing=False) is made[1]
    assert prepared.get(capturing=False) is made[1]


def test_xformers_whose_operators_do_not_load_says_what_they_were_built_for(monkeypatch):
    error = ImportError("cannot load")
    error.build_info = types.SimpleNamespace(torch_version="2.10.0+cu128", cuda_version=1208)
    broken = types.ModuleType("xformers")
    broken._cpp_lib = types.SimpleNamespace(_cpp_library_load_exception=error)
    monkeypatch.setitem(sys.modules, "xformers", broken)
    with pytest.raises(ImportError, match=r"built for torch 2.10.0\+cu128, CUDA 1208; here is torch"):
        xformers._operators()


def test_xformers_beside_flash_attention_4_says_so(monkeypatch):
    whole = types.ModuleType("xformers")
    whole._cpp_lib = types.SimpleNamespace(_cpp_library_load_exception=None)
    monkeypatch.setitem(sys.modules, "xformers", whole)
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    with pytest.raises(ImportError, match=r"xformers.ops does not import: .* \(flash-attn-4"):
        xformers._operators()


@pytest.mark.parametrize("name", ["flash_attention_for_cpu", "attention_math"])
def test_torchs_operators_are_the_same_where_no_binding_is_generated_for_them(name, monkeypatch):
    tensors = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    bound = sdpa_operator(name)
    monkeypatch.delattr(torch, f"_scaled_dot_product_{name}")
    plain = sdpa_operator(name)
    assert plain is getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    assert plain is not bound
    assert torch.equal(bound(*tensors)[0], plain(*tensors)[0])


@pytest.mark.parametrize("masked", [True, False])
def test_xformers_gets_keys_of_their_own_for_heads_of_one_memory_beside_a_mask(monkeypatch, masked):
    seen = {}

    def forward(query, key, value, **given):
        seen.update(given, key=key, value=value)
        return query

    bias = types.SimpleNamespace(LowerTriangularFromBottomRightMask=lambda: "causal")
    fmha = types.SimpleNamespace(memory_efficient_attention_forward=forward, attn_bias=bias)
    monkeypatch.setattr(xformers, "_operators", lambda: fmha)
    run = xformers._load(None)
    query, one = torch.randn(1, 65, 2, 8), torch.randn(1, 70, 1, 8)
    shared = one.expand(1, 70, 2, 8)
    run(query, shared, shared, attn_mask=torch.zeros(1, 1, 65, 70) if masked else None)
    assert torch.equal(seen["key"], shared)
    assert (seen["key"].stride(2) == 0) is not masked
    assert seen["key"].stride(-1) == 1
