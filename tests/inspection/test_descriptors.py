"""Capability descriptors: what is refused, that they narrow kernels without code, and that nothing is lost in JSON."""

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
from drawing import at_once, examples
from layerzero.core import capability, limit_kinds
from layerzero.core.descriptor import decode, sha256
from layerzero.core.limit_kinds import Limit, OfTensors
from layerzero.core.limits import KINDS, is_data, limit_data, limit_of
from layerzero.engine import legality
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.descriptors import DESCRIPTORS, by_backend, exported
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SquareCausal
from layerzero.testing.generate import FUNCTIONS, random_call
from tools import pages_descriptors

CPU_FLASH = "torch.sdpa.cpu_flash"
DECLARED = [kernel for kernels in by_backend().values() for kernel in kernels]


def described(kernel_id, /, **changes):
    """A descriptor of one kernel as it is declared, with changes to its entry."""
    kernel = REGISTRY.kernel(kernel_id).declared
    data = exported(kernel.backend, [kernel])
    data["ops"][kernel.operations[0]][0] |= changes
    return data


def entry_in(data):
    return next(each for entries in data["ops"].values() for each in entries if isinstance(each, dict))


def qkv(head_dim=64, seq=8, **kind):
    return [torch.randn(1, seq, 4, head_dim, **kind) for _ in range(3)]


def chosen(*tensors, **call):
    return lz.which("attention", *tensors, layout="BSHD", **call)["kernel_id"]


def reasons(kernel_id, *tensors, **call):
    with lz.scope(require_vetting=False):
        return lz.explain("attention", *tensors, layout="BSHD", **call).reasons(kernel_id)


# what is refused


def without(field):
    def change(data):
        del entry_in(data)[field]

    return change


def having(**changes):
    return lambda data: entry_in(data).update(changes)


def top(**changes):
    return lambda data: data.update(changes)


def renamed_operation(data):
    data["ops"]["attention.gqa.prefil"] = data["ops"].pop("attention.gqa.prefill")


def twice_in_one(data):
    data["ops"]["attention.gqa.prefill"].append(CPU_FLASH)


def twice_in_two(data):
    data["ops"]["attention.gqa.prefill"] = [copy.deepcopy(entry_in(data))]


def only_named(data):
    data["ops"] = {"attention.gqa.prefill": [CPU_FLASH]}


def misspelt(data):
    data["ops"] = {"attention.gqa.prefill": [entry_in(data) | {"kernel_id": "torch.sdpa.cpu_flesh"}]}


def further(limit):
    return lambda data: entry_in(data)["limits"].append(limit)


WRONG = {
    "R232 an unknown version": (top(schema_version="3.0"), "schema_version: wanted '2.0' or '1.0', got '3.0'"),
    "R232 no version": (lambda data: data.pop("schema_version"), "schema_version: wanted '2.0' or '1.0', got nothing"),
    "R230 no backend": (lambda data: data.pop("backend"), "backend: wanted a value, got nothing"),
    "R230 no operations": (top(ops={}), "ops: wanted operations with lists of kernels, got {}"),
    "R230 no kernels": (top(ops={"norm.rms": []}), "ops.norm.rms: wanted a list of kernels, got []"),
    "R230 an unknown field": (top(bakend="torch"), "wanted a known field, got 'bakend'; did you mean"),
    "R231 an unknown field": (having(max_headdim=3), "got 'max_headdim'; did you mean 'max_head_dim'"),
    "R231 a text for a number": (having(max_head_dim="32"), "max_head_dim: wanted `int | null`, got '32'"),
    "R231 a number for a flag": (having(deterministic=1), "deterministic: wanted `bool`, got 1"),
    "R233 one kernel twice": (twice_in_one, f"wanted the entry of every kernel once, got '{CPU_FLASH}' twice"),
    "R233 two entries": (twice_in_two, f"wanted the entry of every kernel once, got '{CPU_FLASH}' twice"),
    "R234 no dtypes": (without("dtypes"), "dtypes: wanted a value, got nothing"),
    "R234 empty dtypes": (having(dtypes=[]), "dtypes: wanted one or more, got []"),
    "R234 no layouts": (without("requires_layouts"), "requires_layouts: wanted a value, got nothing"),
    "R234 empty layouts": (having(requires_layouts=[], produces_layout=None), "wanted BSHD or BHSD for attention"),
    "R235 no bound": (without("max_head_dim"), "max_head_dim: wanted a number, or null for no bound, got nothing"),
    "R235 no sequence bound": (without("max_seq_len"), "max_seq_len: wanted a number, or null for no bound"),
    "R236 crossed bounds": (having(min_head_dim=64, max_head_dim=32), "min_head_dim: wanted at most max_head_dim, 32"),
    "R236 an id without an entry": (only_named, f"wanted an entry of '{CPU_FLASH}' somewhere, got its id alone"),
    "R236 results elsewhere": (having(produces_layout="BSHD"), "produces_layout: wanted BHSD, as the inputs have it"),
    "R236 another layout": (
        having(requires_layouts=["BSHD"], produces_layout="BSHD"),
        "requires_layouts: wanted BHSD, the layout of its code, got ['BSHD']",
    ),
    "R236 an unknown dtype": (having(dtypes=["float17"]), "dtypes: unknown dtype 'float17'; did you mean 'float16'"),
    "R236 no common dtype": (having(dtypes=["int8"]), "dtypes: wanted some of float32, float64, float16, bfloat16"),
    "R236 dtypes twice": (further({"kind": "dtype", "names": ["float32"]}), "in the field `dtypes` alone, got them"),
    "R236 an unknown limit": (further({"kind": "dimm"}), "limits[9]: wanted a kind of aligned, arch"),
    "R236 a limit without bounds": (further({"kind": "dim", "name": "seq_k"}), "dim: wanted a bound, got none"),
    "R236 a limit's crossed bounds": (
        further({"kind": "dim", "name": "seq_k", "min": 4, "max": 2}),
        "dim: wanted a min of at most max, got min 4 and max 2",
    ),
    "R236 a limit's unknown field": (
        further({"kind": "dim", "name": "seq_k", "maximum": 2}),
        "dim has no maximum; wanted name, min, max, multiple, one_of",
    ),
    "R236 a multiple of nothing": (
        further({"kind": "dim", "name": "seq_k", "multiple": 0}),
        "dim: multiple: wanted at least 1, got 0",
    ),
    "R236 an unknown fact": (further({"kind": "one_of", "fact": "seqk", "values": [1]}), "have no fact 'seqk'"),
    "R236 code it does not have": (
        further({"kind": "code", "text": "scale != 3"}),
        "wanted code that torch.sdpa.cpu_flash has (float64: a float64 mask; causal: scale > 0), got 'scale != 3'",
    ),
    "R236 an unknown argument": (having(accepts=["scal"]), "got 'scal'; did you mean 'scale'"),
    "R236 an unknown operation": (renamed_operation, "'attention.gqa.prefil'; did you mean 'attention.gqa.prefill'"),
    "R236 an unknown platform": (top(platforms=["cpu", "tpu"]), "wanted cpu, cuda, rocm, hpu, xpu, mps, got 'tpu'"),
    "R236 no common platform": (top(platforms=["rocm"]), "platforms: wanted some of cpu, got ['rocm']"),
    "R236 an unreadable requirement": (top(requires=["torch 2"]), "requires: wanted name>=version, got 'torch 2'"),
    "R236 an unreadable version": (
        top(backend="flash_attn", backend_version="two"),
        "backend_version: wanted a version or a range such as '>=2.5,<3', got 'two'",
    ),
    "R236 a version nobody has": (top(backend_version="2.5"), "wanted null, since torch has no version of its own"),
    "R236 another library": (top(backend="zentorch"), f"got {CPU_FLASH}, which belongs to torch"),
    "R236 another package": (top(distributions=["torch"]), "distributions: wanted [], the library of"),
    "R236 names of other code": (having(renames={"scale": "s"}), "renames: wanted {}, what the code says"),
    "R236 a rename that no call can have": (
        having(renames={"scale": "__debug__"}),
        "renames: wanted a name that a Python call can have, got '__debug__'",
    ),
    "R236 a rename that is a keyword": (having(renames={"scale": "class"}), "can have, got 'class'"),
    "R236 an alias that turns text round": (
        having(aliases=["torch.\u202ehsalf"]),
        "aliases: wanted letters of ASCII, digits and _ . - + : /, got 'torch.\\u202ehsalf'",
    ),
    "R236 an id that turns text round": (
        having(kernel_id="torch.\u202ehsalf"),
        "kernel_id: wanted letters of ASCII, digits and _ . - + : /, got 'torch.\\u202ehsalf'",
    ),
    "R236 an unknown kernel": (misspelt, "unknown kernel 'torch.sdpa.cpu_flesh'"),
    "R240 a generation of no cuda kernel": (having(gpu_generation=["hopper"]), "does not run on cuda, got ['hopper']"),
    "R242 a flag of version 1.0": (having(supports_gqa=True), "supports_gqa: belongs to schema_version '1.0'"),
}  # fmt: skip


@at_once("case", WRONG)
def test_a_wrong_descriptor_is_refused_and_changes_nothing(case):
    change, message = WRONG[case]
    data = described(CPU_FLASH)
    change(data)
    with pytest.raises(lz.DescriptorError) as caught:
        lz.load_descriptor(data)
    assert message in str(caught.value)
    assert lz.doctor().descriptors == ()
    assert REGISTRY.kernel(CPU_FLASH).revision is None


def test_every_problem_is_told_at_once():
    data = described(CPU_FLASH, dtypes=["float17"], min_head_dim=9, max_head_dim=8, accepts=["scal"])
    data |= {"platforms": ["tpu"]}
    with pytest.raises(lz.DescriptorError) as caught:
        lz.load_descriptor(data)
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not valid JSON"),
    ('{"backend": "a", "backend": "b"}', "wanted every key once, got 'backend' twice"),
    ("[]", "wanted an object with schema_version, backend and ops, got []"),
    (None, "wanted a JSON file, got No such file or directory"),
])  # fmt: skip
def test_a_file_that_is_no_descriptor(tmp_path, text, message):
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(lz.DescriptorError, match=re.escape(message)):
        lz.load_descriptor(file)


def test_a_reference_takes_everything_and_a_dict_must_be_json():
    data = described(CPU_FLASH)
    data["ops"] = {"attention.gqa.prefill": [entry_in(data) | {"kernel_id": "reference.attention.gqa.prefill"}]}
    with pytest.raises(lz.DescriptorError, match="got a reference, which takes everything"):
        lz.load_descriptor(data)
    with pytest.raises(lz.DescriptorError, match="wanted values that JSON has"):
        lz.load_descriptor(described(CPU_FLASH, dtypes=[torch.float32]))


# narrowing


def test_it_changes_selection_without_code_and_is_undone():
    tensors = qkv()
    assert chosen(*tensors) == CPU_FLASH
    loaded = lz.load_descriptor(described(CPU_FLASH, max_head_dim=32))
    (reason,) = reasons(CPU_FLASH, *tensors)
    assert reason.code is lz.ReasonCode.HEAD_DIM_TOO_LARGE
    assert loaded.name in reason.message
    assert loaded.sha256[:12] in reason.message
    assert chosen(*tensors) == "torch.sdpa.math"
    assert chosen(*qkv(32)) == CPU_FLASH
    torch.testing.assert_close(
        lz.attention(*tensors, layout="BSHD"),
        torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in tensors), is_causal=True
        ).transpose(1, 2),
    )
    assert lz.doctor().descriptors == (loaded.to_dict(),)
    lz.unload_descriptor(loaded)
    assert chosen(*tensors) == CPU_FLASH
    assert lz.doctor().descriptors == ()
    with pytest.raises(KeyError, match="no descriptor"):
        lz.unload_descriptor(loaded)


def test_kept_plans_are_dropped_by_another_hash_only():
    tensors, cache = qkv(), CALLS["attention"].dispatcher.cache

    def kept():
        return {plan.kernel_id for plan in cache.table(lz.engine.config.current_policy()).values()}

    lz.attention(*tensors, layout="BSHD")
    assert kept() == {CPU_FLASH}
    loaded = lz.load_descriptor(described(CPU_FLASH, max_head_dim=32))
    assert kept() == set()
    lz.attention(*tensors, layout="BSHD")
    lz.attention(*tensors, layout="BSHD")
    assert kept() == {"torch.sdpa.math"}
    epoch = cache.epoch
    assert lz.load_descriptor(described(CPU_FLASH, max_head_dim=32)) == loaded
    assert cache.epoch == epoch
    lz.load_descriptor(described(CPU_FLASH, max_head_dim=16))
    assert cache.epoch > epoch
    assert kept() == set()


def test_the_registry_holds_the_narrowed_limits():
    lz.load_descriptor(
        described("torch.sdpa.cudnn", max_head_dim=64, dtypes=["bfloat16"], min_sm=90, deterministic=True)
    )
    before, kernel = REGISTRY.kernel("torch.sdpa.cudnn").declared, REGISTRY.kernel("torch.sdpa.cudnn")
    assert kernel in REGISTRY.candidates("attention.gqa.decode")
    assert limit_kinds.Dim("head_dim", max=64, multiple=8) in kernel.limits
    assert limit_kinds.Dtype(("bfloat16",)) in kernel.limits
    assert limit_kinds.Arch(min=(9, 0)) in kernel.limits
    assert len(kernel.limits) == len(before.limits)  # bounds on one thing are one limit
    assert not kernel.deterministic  # its code is not


def test_what_it_does_not_say_it_does_not_allow():
    data = described(CPU_FLASH)
    for field in ("grad", "deterministic", "handles_empty", "handles_negated", "accepts", "folds"):
        del entry_in(data)[field]
    del data["ops"]["attention.gqa.prefill"]
    lz.load_descriptor(data)
    code = lz.ReasonCode
    assert {each.code for each in reasons(CPU_FLASH, *qkv(requires_grad=True), causal=False)} == {code.GRAD_UNSUPPORTED}
    assert reasons(CPU_FLASH, *qkv(), causal=False) == ()
    causal, *_ = reasons(CPU_FLASH, *qkv(), causal=True)
    assert (causal.fact, causal.code) == ("causal", code.CONSTRAINT_FAILED)
    query, key, value = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16)
    (grouped,) = reasons(CPU_FLASH, query, key, value, causal=False)
    assert grouped.fact == "operation"
    assert "Said by the descriptor" in grouped.message


def test_only_what_the_descriptor_adds_is_said_by_it():
    lz.load_descriptor(described("torch.sdpa.cudnn", max_head_dim=64))
    tensors = [torch.empty(1, 8, 4, size, dtype=torch.bfloat16, device="meta") for size in (128, 128, 128)]
    (narrowed,) = reasons("torch.sdpa.cudnn", *tensors, device="H100")
    assert "Said by" in narrowed.message
    wide = [torch.empty(1, 8, 4, size, dtype=torch.bfloat16, device="meta") for size in (264, 264, 264)]
    told = reasons("torch.sdpa.cudnn", *wide, device="H100")
    assert not any("Said by" in each.message for each in told)  # its own declaration refuses it, too


def test_several_descriptors_add_up():
    lz.load_descriptor(described(CPU_FLASH, max_head_dim=32))
    second = lz.load_descriptor(described(CPU_FLASH, max_seq_len=16))
    assert [each.fact for each in reasons(CPU_FLASH, *qkv(64, 32), causal=False)] == ["head_dim", "seq_q", "seq_k"]
    assert [str(each.code) for each in reasons(CPU_FLASH, *qkv(32, 32))] == ["SEQ_TOO_LONG"] * 2
    assert second.name in reasons(CPU_FLASH, *qkv(32, 32))[0].message
    assert len(lz.doctor().descriptors) == 2


def test_replacing_extends_bounds_but_neither_code_nor_dtypes():
    wide = [torch.empty(1, 8, 4, 512, dtype=torch.bfloat16, device="meta")] * 3
    assert "HEAD_DIM_TOO_LARGE" in [str(each.code) for each in reasons("torch.sdpa.cudnn", *wide, device="H100")]
    data = described("torch.sdpa.cudnn", mode="replace", max_head_dim=1024, limits=[], dtypes=["bfloat16", "float32"])
    lz.load_descriptor(data)
    code_limit = reasons("torch.sdpa.cudnn", *wide, device="B200")
    assert not code_limit  # sm 10.0, forward only: its code allows what it allowed
    recorded = [torch.empty(1, 8, 4, 512, dtype=torch.bfloat16, device="meta", requires_grad=True)] * 3
    assert "HEAD_DIM_TOO_LARGE" in [str(each.code) for each in reasons("torch.sdpa.cudnn", *recorded, device="H100")]
    floats = [torch.empty(1, 8, 4, 64, device="meta")] * 3
    assert [str(each.code) for each in reasons("torch.sdpa.cudnn", *floats, device="H100")] == ["DTYPE_UNSUPPORTED"]
    assert "PLATFORM_MISMATCH" in [str(each.code) for each in reasons("torch.sdpa.cudnn", *qkv())]


def test_a_version_and_requirements_are_enforced():
    data = described("flash_attn.v3") | {"backend_version": "3.0.0", "requires": ["cuda>=12.3", "nvidia-cutlass>=4"]}
    lz.load_descriptor(data)
    call = {"device": "H100", "libraries": {"flash-attn-3": "3.0.1", "nvidia-cutlass": "4.1"}}
    tensors = [torch.empty(1, 8, 4, 64, dtype=torch.bfloat16, device="meta")] * 3
    (version,) = reasons("flash_attn.v3", *tensors, **call)
    assert version.code is lz.ReasonCode.VERSION_UNSUPPORTED
    assert "Said by the descriptor" in version.message
    call["libraries"] = {"flash-attn-3": "3.0.0", "nvidia-cutlass": "3.9"}
    (cutlass,) = reasons("flash_attn.v3", *tensors, **call)
    assert (cutlass.fact, cutlass.wanted) == ("nvidia-cutlass", ">=4")
    call["libraries"]["nvidia-cutlass"] = "4.1"
    assert reasons("flash_attn.v3", *tensors, **call) == ()


def test_generations_are_compute_capabilities():
    def arch(**said):
        with_bounds = described("torch.sdpa.flash", **said)
        loaded = lz.load_descriptor(with_bounds)
        (found,) = [each for each in REGISTRY.kernel("torch.sdpa.flash").limits if isinstance(each, limit_kinds.Arch)]
        lz.unload_descriptor(loaded)
        return found

    assert arch(gpu_generation=["hopper", "ada"]) == limit_kinds.Arch((8, 9), (9, 9))
    assert arch(gpu_generation=["rubin"], min_sm=130, max_sm=139) == limit_kinds.Arch((13, 0), (13, 9))
    for wrong in (["ampere", "hopper"], ["rubin"], ["rubin", "hopper"], []):
        with pytest.raises(lz.DescriptorError, match="gpu_generation: wanted"):
            arch(gpu_generation=wrong, max_sm=None)
    with pytest.raises(lz.DescriptorError, match="min_sm: wanted a compute capability as 80, or null"):
        data = described("torch.sdpa.flash")
        del entry_in(data)["min_sm"]
        lz.load_descriptor(data)
    assert entry_in(lz.descriptor("flash-attn-3"))["gpu_generation"] == ["hopper"]


# kernels that come and go


def test_a_kernel_that_is_registered_again_is_narrowed_again():
    def register():
        @lz.register_kernel("norm.rms", "mine.rms_norm", supported_dtypes=["float32"], priority=100)
        def mine(input, weight):
            return input

    register()
    data = lz.descriptor("user")
    entry_in(data)["limits"].append({"kind": "dim", "name": "hidden", "max": 8})
    lz.load_descriptor(data)
    call = torch.randn(2, 16), torch.randn(16)
    assert [each.fact for each in lz.explain("rms_norm", *call).reasons("mine.rms_norm")] == ["hidden"]
    lz.unregister_kernel("mine.rms_norm")
    lz.rms_norm(*call)  # the descriptor of a kernel that went speaks of nothing
    register()
    assert [each.fact for each in lz.explain("rms_norm", *call).reasons("mine.rms_norm")] == ["hidden"]


# where they come from


@pytest.fixture
def narrow_file(tmp_path):
    file = tmp_path / "narrow.json"
    file.write_text(json.dumps(described(CPU_FLASH, max_head_dim=32)))
    return file


def test_the_setting_takes_effect_and_is_undone(narrow_file, tmp_path):
    tensors = qkv()
    lz.configure(descriptors=[str(narrow_file)])
    assert chosen(*tensors) == "torch.sdpa.math"
    assert str(narrow_file) in reasons(CPU_FLASH, *tensors)[0].message
    lz.configure(descriptors=None)
    assert chosen(*tensors) == CPU_FLASH
    settings_file = tmp_path / "layerzero.yaml"
    settings_file.write_text(f"descriptors: [{narrow_file}]\n")
    lz.load_config(settings_file)
    assert chosen(*tensors) == "torch.sdpa.math"
    narrow_file.write_text(json.dumps(described(CPU_FLASH, max_head_dim=64)))
    lz.load_config(settings_file)  # reads it anew
    assert chosen(*tensors) == CPU_FLASH


def test_a_wrong_file_is_refused_by_the_setting(tmp_path):
    with pytest.raises(lz.DescriptorError, match="No such file"):
        lz.configure(descriptors=[str(tmp_path / "nowhere.json")])
    settings_file = tmp_path / "layerzero.yaml"
    settings_file.write_text(f"descriptors: [{tmp_path / 'nowhere.json'}]\n")
    with pytest.raises(lz.DescriptorError, match="No such file"):
        lz.load_config(settings_file)
    assert chosen(*qkv()) == CPU_FLASH
    with pytest.raises(lz.PolicyError, match="descriptors holds for the whole process"):
        with lz.scope(descriptors=[]):
            pass


def test_a_wrong_file_of_the_environment_stops_every_call(narrow_file, monkeypatch):
    monkeypatch.setenv("LAYERZERO_DESCRIPTORS", str(narrow_file))
    good = narrow_file.read_text()
    narrow_file.write_text("{}")
    lz.engine.config.CONFIGURATION.reset()
    for _ in range(2):
        with pytest.raises(lz.DescriptorError, match="schema_version: wanted"):
            lz.attention(*qkv(), layout="BSHD")
    narrow_file.write_text(good)
    assert chosen(*qkv()) == "torch.sdpa.math"


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
