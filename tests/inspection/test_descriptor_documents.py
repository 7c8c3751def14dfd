"""Descriptors of version 1.0, kernels that are built from data, laws of the way there and back, and exports."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pkgutil
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
import layerzero.core
from described_kernels import CPU_FLASH, described, entry_in, qkv, reasons
from drawing import at_once, examples
from layerzero.core import capability, limit_kinds
from layerzero.core.descriptor import decode, sha256
from layerzero.core.limit_kinds import Limit, OfTensors
from layerzero.core.limits import KINDS, is_data, limit_data, limit_of
from layerzero.engine import legality
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.descriptors import DESCRIPTORS, by_backend, exported
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SquareCausal
from layerzero.testing.generate import FUNCTIONS, random_call
from tools import pages_descriptors

DECLARED = [kernel for kernels in by_backend().values() for kernel in kernels]


# version 1.0


def version_1(**changes):
    entry = {
        "kernel_id": "flash_attn.v2.causal",
        "min_sm": 80,
        "max_sm": None,
        "dtypes": ["float16", "bfloat16"],
        "min_head_dim": 32,
        "max_head_dim": 256,
        "head_dim_multiple": 8,
        "max_seq_len": None,
        "supports_gqa": True,
        "supports_attn_mask": False,
        "supports_dropout": False,
        "requires_layouts": ["BSHD"],
        "produces_layout": "BSHD",
        "requires_last_dim_stride1": True,
        "is_cuda_graph_safe": True,
        "deterministic": False,
        "fuses_ops": ["posenc.rope"],
        "transform_cost_hint": 0,
    } | changes
    return {
        "schema_version": "1.0",
        "backend": "flash_attn",
        "backend_version": "2.8.3",
        "platform": "cuda",
        "ops": {"attention.causal": [entry]},
    }


def load_nothing(facts):
    return lambda query, key, value: query


@pytest.mark.parametrize("gqa", [True, False])
def test_version_1_becomes_operations(gqa):
    (kernel,) = lz.kernels_from_descriptor(version_1(supports_gqa=gqa), {"flash_attn.v2.causal": load_nothing})
    grouped = ("attention.standard.prefill", "attention.gqa.prefill")
    assert kernel.operations == (grouped if gqa else grouped[:1])
    assert kernel.implies == ("causal",)
    assert kernel.accepts == ()
    assert kernel.backend.versions == "==2.8.3"
    assert kernel.graph_safe
    assert not kernel.deterministic
    assert not kernel.grad
    assert set(kernel.limits) == {
        limit_kinds.Dtype(("float16", "bfloat16")),
        limit_kinds.Arch(min=(8, 0)),
        limit_kinds.Dim("head_dim", min=32, max=256, multiple=8),
        limit_kinds.LastStrideOne(("query", "key", "value")),
        limit_kinds.OneOf("causal", (True,)),
        limit_kinds.Equal("value_dim", "head_dim"),
        SquareCausal(),
    }


def test_version_1_flags_are_arguments():
    data = version_1(supports_attn_mask=True, supports_dropout=True)
    (kernel,) = lz.kernels_from_descriptor(data, {"flash_attn.v2.causal": load_nothing})
    assert kernel.accepts == ("attn_mask", "dropout_p")


def test_version_1_narrows():
    lz.load_descriptor(version_1(kernel_id="flash_attn.v2"))
    libraries = {"flash-attn": "2.8.3"}

    def refused(*sizes, **call):
        query = torch.empty(1, 8, 4, sizes[0], dtype=torch.bfloat16, device="meta")
        return [
            each.fact
            for each in reasons("flash_attn.v2", query, query, query, device="A100", libraries=libraries, **call)
        ]

    assert refused(64) == []
    assert refused(16) == ["head_dim"]
    assert refused(64, causal=False) == ["causal"]
    assert refused(64, scale=0.5) == ["scale"]


@pytest.mark.parametrize(("data", "message"), [
    (version_1(supports_gqas=True), "got 'supports_gqas'; did you mean 'supports_gqa'"),
    (version_1(max_head_dim="all"), "max_head_dim: wanted `int | null`, got 'all'"),
    ({key: value for key, value in version_1().items() if key != "backend_version"}, "backend_version: wanted a value"),
    (version_1() | {"ops": {"attention.gqa.prefill": version_1(supports_gqa=False)["ops"]["attention.causal"]}},
     "supports_gqa: wanted true under attention.gqa.prefill, got false"),
    (version_1() | {"ops": {"norm.rms": version_1()["ops"]["attention.causal"]}},
     "supports_gqa: wanted false, since norm.rms has no heads"),
    (version_1() | {"ops": version_1()["ops"] | {"attention.full": version_1()["ops"]["attention.causal"]}},
     "wanted the entry of every kernel once"),
])  # fmt: skip
def test_version_1_is_read_strictly(data, message):
    with pytest.raises(lz.DescriptorError, match=re.escape(message)):
        lz.kernels_from_descriptor(data, {"flash_attn.v2.causal": load_nothing})


# built from data


def load_rms(facts):
    return lambda input, weight, *, eps: torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


def rms_descriptor(**changes):
    entry = {"kernel_id": "data.rms", "dtypes": ["float32"], "requires_layouts": [], "accepts": ["eps"], "priority": 99}
    entry |= {"requires_last_dim_stride1": False, "limits": [{"kind": "dim", "name": "hidden", "max": 64}]}
    return {
        "schema_version": "2.0",
        "backend": "data",
        "backend_version": None,
        "platforms": ["cpu"],
        "ops": {"norm.rms": [entry | changes]},
    }


def test_kernels_are_built_from_data_and_run(tmp_path):
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps(rms_descriptor()))
    lz.register_backend(lz.kernels_from_descriptor(file, {"data.rms": load_rms}))
    x, w = torch.randn(4, 32), torch.randn(32)
    assert lz.which("rms_norm", x, w)["kernel_id"] == "data.rms"
    torch.testing.assert_close(lz.rms_norm(x, w), torch.nn.functional.rms_norm(x, (32,), w, 1e-6))
    (reason,) = lz.explain("rms_norm", torch.randn(4, 65), torch.randn(65)).reasons("data.rms")
    assert (reason.fact, reason.wanted) == ("hidden", "at most 64")
    codes = {each.code for each in lz.explain("rms_norm", x.requires_grad_(), w).reasons("data.rms")}
    assert codes == {lz.ReasonCode.GRAD_UNSUPPORTED}


@pytest.mark.parametrize(("changes", "loads", "message"), [
    ({}, {}, "data.rms: wanted its load function, got none"),
    ({}, {"data.rms": load_rms, "data.rsm": load_rms}, "loads: wanted data.rms, got 'data.rsm'"),
    ({"mode": "replace"}, {"data.rms": load_rms}, "mode: wanted none, since there is no kernel yet"),
    ({"limits": [{"kind": "code", "text": "x"}]}, {"data.rms": load_rms}, "limits: wanted data alone"),
    ({"max_head_dim": 3}, {"data.rms": load_rms}, "wanted nothing, since norm.rms has no head_dim, got 3"),
])  # fmt: skip
def test_what_data_cannot_build(changes, loads, message):
    with pytest.raises(lz.DescriptorError, match=re.escape(message)):
        lz.kernels_from_descriptor(rms_descriptor(**changes), loads)


# laws


@at_once("kernel", list({kernel.source: kernel for kernel in DECLARED}.values()))
def test_a_kernel_of_each_library_survives_the_round_trip(kernel):
    survives(kernel)


@pytest.mark.slow
@at_once("kernel", DECLARED)
def test_a_kernel_survives_the_round_trip(kernel):
    survives(kernel)


def survives(kernel):
    data = json.loads(json.dumps(exported(kernel.backend, [kernel])))
    loaded = lz.load_descriptor(data)
    assert loaded.kernels == (kernel.id,)
    revised = REGISTRY.kernel(kernel.id)
    assert revised.revision is not None
    assert dataclasses.replace(revised, revision=None) == kernel


@at_once("kernel", DECLARED)
def test_a_kernel_without_code_limits_is_its_data(kernel):
    data = exported(kernel.backend, [kernel])
    if capability.code_texts(kernel):
        with pytest.raises(lz.DescriptorError, match="wanted data alone"):
            lz.kernels_from_descriptor(data, {kernel.id: kernel.load})
        return
    (built,) = lz.kernels_from_descriptor(data, {kernel.id: kernel.load})
    assert set(built.limits) == set(kernel.limits)
    kept = (
        "id",
        "operations",
        "layout",
        "accepts",
        "implies",
        "renames",
        "folds",
        "grad",
        "deterministic",
        "graph_safe",
    )
    for field in (*kept, "jit", "handles_empty", "handles_negated", "priority", "aliases", "load"):
        assert getattr(built, field) == getattr(kernel, field), field
    assert built.backend.versions == kernel.backend.versions


def test_operations_without_tensors_have_no_dtypes():
    kernel = next(each for each in DECLARED if not REGISTRY.operations()[each.operations[0]].schema.inputs)
    data = exported(kernel.backend, [kernel])
    (entry,) = data["ops"][kernel.operations[0]]
    assert entry["dtypes"] == []
    entry["dtypes"] = ["float32"]
    with pytest.raises(lz.DescriptorError, match="dtypes: wanted none, since its operations have no tensors"):
        lz.load_descriptor(data)


DEVICES = [lz.Device.named(name) for name in ("CPU", "A100", "H100", "B200", "MI300X")]


@pytest.fixture
def read_back():
    """Every declaration, written as a descriptor and loaded again."""
    loaded = [lz.load_descriptor(exported(backend, kernels)) for backend, kernels in by_backend().items()]
    yield
    for each in loaded:
        lz.unload_descriptor(each)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.sampled_from(sorted(FUNCTIONS)), st.sampled_from(DEVICES), st.booleans())
def test_the_round_trip_judges_every_call_alike(read_back, number, function, device, capturing):
    call = random_call(5, number, function=function)
    facts = lz.facts(function, **call.arguments).on(device, capturing=capturing)
    for kernel in [each for each in DECLARED if facts["operation"] in each.operations]:
        revised = REGISTRY.kernel(kernel.id)
        assert revised is not kernel
        wanted = legality.limit_findings(kernel, facts.seen_in(kernel.layout))
        assert legality.limit_findings(revised, facts.seen_in(revised.layout)) == wanted


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_a_narrowed_kernel_never_takes_more(data):
    number = data.draw(st.integers(0, 10_000))
    kernel = data.draw(st.sampled_from([each for each in DECLARED if each.operations[0] in attention.ALL]))
    changes = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "max_head_dim": st.integers(1, 600),
                "head_dim_multiple": st.integers(1, 9),
                "max_seq_len": st.integers(1, 64),
                "dtypes": st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=1, unique=True),
                "accepts": st.lists(st.sampled_from(["causal", "scale", "attn_mask", "window"]), unique=True),
                "grad": st.booleans(),
                "handles_empty": st.booleans(),
                "limits": st.just([]),
            },
        )
    )
    call = random_call(6, number, function="attention")
    facts = lz.facts("attention", **call.arguments)
    try:
        loaded = lz.load_descriptor(described(kernel.id, **changes))
    except lz.DescriptorError as error:
        refused = ("dtypes: wanted some of", "min_head_dim: wanted at most", "accepts: wanted an argument of")
        assert any(text in str(error) for text in refused)  # noqa: PT017
        return
    try:
        revised = REGISTRY.kernel(kernel.id)
        before = {
            (each.reason.code, each.reason.fact)
            for each in legality.limit_findings(kernel, facts.seen_in(kernel.layout))
        }
        after = {
            (each.reason.code, each.reason.fact)
            for each in legality.limit_findings(revised, facts.seen_in(revised.layout))
        }
        facts_refused = {fact for _, fact in after}
        assert {fact for _, fact in before} <= facts_refused
    finally:
        lz.unload_descriptor(loaded)


def test_limits_are_data():
    limits = {each for kernel in DECLARED for each in kernel.limits if is_data(each)}
    assert [each for each in limits if limit_of(json.loads(json.dumps(limit_data(each)))) != each] == []


def test_every_kind_of_limit_of_the_core_has_a_line_in_the_table():
    names = [each.name for each in pkgutil.iter_modules(layerzero.core.__path__) if each.name.startswith("limit_")]
    homes = [f"layerzero.core.{name}" for name in names]
    values = [value for home in homes for value in vars(importlib.import_module(home)).values()]
    own = {value for value in values if isinstance(value, type) and issubclass(value, Limit)}
    assert own - {Limit, OfTensors, limit_kinds.Custom} == {each for each in KINDS.values() if each.__module__ in homes}


def test_a_familys_own_kinds_of_limits_are_data_and_public():
    assert KINDS["square_causal"] is SquareCausal is lz.limits.SquareCausal
    with pytest.raises(AttributeError, match="'SquareCasual'"):
        lz.limits.SquareCasual  # noqa: B018


@given(st.randoms(use_true_random=False))
def test_the_hash_does_not_see_the_order_of_keys(stream: random.Random):
    def shuffled(value):
        if isinstance(value, dict):
            items = list(value.items())
            stream.shuffle(items)
            return {key: shuffled(inner) for key, inner in items}
        return [shuffled(each) for each in value] if isinstance(value, list) else value

    data = described(CPU_FLASH)
    assert sha256(shuffled(data)) == sha256(data)
    entry_in(changed := copy.deepcopy(data))["max_head_dim"] = 31
    assert sha256(changed) != sha256(data)


# export and documentation


def test_a_library_is_named_by_name_or_package():
    assert lz.descriptor("zentorch")["distributions"] == ["zentorch"]
    assert lz.descriptor("flash-attn")["backend_version"] == REGISTRY.kernel("flash_attn.v2").backend.versions
    with pytest.raises(KeyError, match="is several libraries; name one by its package: flash-attn or "):
        lz.descriptor("flash_attn")
    with pytest.raises(KeyError, match="no library 'zentorc' has kernels; did you mean 'zentorch'"):
        lz.descriptor("zentorc")
    assert decode(lz.descriptor("torch"))[1] == []


def test_export_tells_what_is_declared_not_what_is_loaded():
    before = lz.descriptor("torch")
    lz.load_descriptor(described(CPU_FLASH, max_head_dim=32))
    assert lz.descriptor("torch") == before


def test_the_example_of_the_documentation_narrows():
    page = (Path(__file__).parents[2] / "docs" / "descriptors.md").read_text()
    data = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert data == pages_descriptors.example()
    lz.load_descriptor(data)
    assert [str(each.code) for each in reasons(CPU_FLASH, *qkv())] == ["HEAD_DIM_TOO_LARGE"]
    assert ENGINE.registry.kernel(CPU_FLASH).revision is not None
    assert len(DESCRIPTORS.in_force()) == 1


def test_a_reference_takes_everything_and_a_dict_must_be_json():
    data = described(CPU_FLASH)
    data["ops"] = {"attention.gqa.prefill": [entry_in(data) | {"kernel_id": "reference.attention.gqa.prefill"}]}
    with pytest.raises(lz.DescriptorError, match="got a reference, which takes everything"):
        lz.load_descriptor(data)
    with pytest.raises(lz.DescriptorError, match="wanted values that JSON has"):
        lz.load_descriptor(described(CPU_FLASH, dtypes=[torch.float32]))
