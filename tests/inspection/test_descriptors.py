"""Capability descriptors: what is refused, that they narrow kernels without code, and that nothing is lost in JSON."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch

import layerzero as lz
import layerzero.core
from described_kernels import CPU_FLASH, described, entry_in, qkv, reasons
from drawing import at_once
from layerzero.core import limit_kinds
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY


def chosen(*tensors, **call):
    return lz.which("attention", *tensors, layout="BSHD", **call)["kernel_id"]


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
        "has (mask_dtype: float64 like the query's; scale: above 0 with causal), got 'scale != 3'",
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
        with pytest.raises(lz.DescriptorError, match=r"environment: LAYERZERO_DESCRIPTORS: .*schema_version: wanted"):
            lz.attention(*qkv(), layout="BSHD")
    narrow_file.write_text(good)
    assert chosen(*qkv()) == "torch.sdpa.math"
