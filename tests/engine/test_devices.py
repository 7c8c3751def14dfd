"""Selection on machines that are not here: the device and the installed libraries are passed in."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core import device as device_module
from layerzero.core.device import Device, cpu_of_this_machine, generation_of
from layerzero.core.known_devices import KNOWN_DEVICES
from layerzero.core.reasons import ReasonCode
from layerzero.engine.config import Configuration, current_policy
from layerzero.engine.probe import Machine
from layerzero.inspection.answers import explain_facts
from layerzero.ops import OPERATIONS
from layerzero.ops.calls import facts_of


@pytest.fixture(autouse=True)
def _static_order():
    """Priorities are what these tests are about: nothing is measured or vetted of machines that are not here."""
    with lz.scope(unmeasured="priority", require_vetting=False):
        yield


LIBRARIES = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0"}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def attention(device, dtype=torch.bfloat16, libraries=LIBRARIES, heads=(32, 8), seq=1024, head_dim=128, **call):
    query = torch.empty(2, seq, heads[0], head_dim, dtype=dtype, device="meta")
    key = torch.empty(2, seq, heads[1], head_dim, dtype=dtype, device="meta")
    return lz.explain("attention", query, key, key, layout="BSHD", device=device, libraries=libraries, **call)


def codes(report, kernel):
    return {reason.code for reason in report.reasons(kernel)}


def test_flash_attention_3_is_too_new_for_an_a100():
    report = attention("A100")
    assert ReasonCode.SM_TOO_OLD in codes(report, "flash_attn.v3")
    assert report.kernel_id == "flash_attn.v2"


def test_libraries_may_be_spelled_in_any_way_and_others_are_refused():
    assert attention("A100", libraries={"Flash_Attn": "2.8.3"}).kernel_id == "flash_attn.v2"
    for libraries, problem in (
        ({"flash_atn": "2"}, "libraries: no kernel needs a library 'flash_atn'; did you mean 'flash-attn'"),
        ({"flash_attn": "new"}, "libraries flash_attn: wanted a version like 3.0.0, got 'new'"),
        ({"flash_attn": None}, "libraries flash_attn: wanted a version like 3.0.0, got None"),
    ):
        with pytest.raises(ValueError, match=problem):
            attention("H100", libraries=libraries)


@pytest.mark.parametrize("device", ["H100", "H800", "H200"])
def test_flash_attention_3_is_chosen_on_hopper(device):
    report = attention(device)
    assert report.kernel_id == "flash_attn.v3"
    assert report.chosen.score == 100


def test_a_preferred_library_earns_twenty_points():
    with lz.prefer("flash_attn"):
        assert lz.which(attention("H100").facts, device="H100", libraries=LIBRARIES) == {
            "kernel_id": "flash_attn.v3",
            "score": 120,
            "operation": "attention.gqa.prefill",
        }


@pytest.mark.parametrize("device", ["B200", "RTX 5090", "RTX PRO 6000", "RTX 5060 Ti"])
def test_flash_attention_3_is_refused_on_blackwell(device):
    report = attention(device)
    assert ReasonCode.SM_TOO_NEW in codes(report, "flash_attn.v3")
    assert ReasonCode.INSTRUCTION_SET_MISMATCH in codes(report, "flash_attn.v3")
    chosen = "torch.sdpa.cudnn" if device == "B200" else "flash_attn.v2"  # which knows no unit of a B200
    assert report.kernel_id == chosen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", ["attention", "rms_norm", "layer_norm"])
def test_turing_never_gets_a_kernel_made_for_ampere(operation, dtype):
    if operation == "attention":
        report = attention("T4", dtype)
    else:
        x, w = torch.empty(8, 64, dtype=dtype, device="meta"), torch.empty(64, dtype=dtype, device="meta")
        shape = () if operation == "rms_norm" else (64,)
        report = lz.explain(operation, x, *shape, w, device="T4", libraries=LIBRARIES)
    for candidate in report.candidates:
        floors = [limit.min for limit in candidate.kernel.limits if hasattr(limit, "min") and hasattr(limit, "max")]
        arch_floors = [floor for floor in floors if isinstance(floor, tuple)]
        if any(floor > (7, 5) for floor in arch_floors):
            assert ReasonCode.SM_TOO_OLD in codes(report, candidate.kernel.id)


@at_once("dtype", DTYPES)
@at_once("device", ["MI300X", "MI210", "RX 7900 XTX", "Gaudi", "CPU"])
def test_other_platforms_never_get_cuda_kernels(device, dtype):
    report = attention(device, dtype)
    platform = Device.named(device).platform
    for candidate in report.candidates:
        only_cuda = candidate.kernel.backend.platforms == ("cuda",) or any(
            getattr(limit, "names", ()) == ("cuda",) for limit in candidate.kernel.limits
        )
        if only_cuda:
            assert not candidate.legal
            assert ReasonCode.PLATFORM_MISMATCH in codes(report, candidate.kernel.id)
    assert report.chosen is not None, f"torch serves {platform}"


@pytest.mark.parametrize(("device", "sm", "generation"), [
    ("T4", (7, 5), "turing"), ("A100", (8, 0), "ampere"), ("RTX 3080", (8, 6), "ampere"), ("L40S", (8, 9), "ada"),
    ("H100", (9, 0), "hopper"), ("B200", (10, 0), "blackwell"), ("RTX 5090", (12, 0), "blackwell"),
    ("MI300X", None, None), ("Gaudi", None, None), ("CPU", None, None),
])  # fmt: skip
def test_named_devices_resolve(device, sm, generation):
    described = Device.named(device)
    assert (described.sm, described.generation) == (sm, generation)


@at_once("name, wanted", [
    ("RTX 2080 Ti", (7, 5)), ("RTX 3060", (8, 6)), ("L4", (8, 9)), ("RTX 4090", (8, 9)), ("GH200", (9, 0)),
    ("GB200", (10, 0)), ("GB300", (10, 3)), ("RTX 5080", (12, 0)), ("GB10", (12, 1)),
    ("MI200", "gfx90a"), ("MI300", "gfx942"), ("MI355X", "gfx950"), ("MI400", "gfx1250"),
    ("RDNA3", "gfx1100"), ("RDNA4", "gfx1201"), ("EPYC", "x86_64"), ("Xeon", "x86_64"), ("Grace", "aarch64"),
    ("Gaudi 2", "habana"), ("gaudi-3", "habana"), ("Arc A770", "intel"),
    ("M3 Max", "apple"), ("MPS", "apple"), ("ROCm", "gfx942"), ("xpu", "intel"), ("hpu", "habana"),
])  # fmt: skip
def test_families_and_products_resolve(name, wanted):
    device = Device.named(name)
    assert (device.sm or device.architecture or device.vendor) == wanted


def test_fp4_and_fp8_follow_the_architecture():
    having = {name for name, device in KNOWN_DEVICES.items() if "mxfp4" in device.dtypes}
    assert {"B200", "RTX 5090", "MI355X", "MI455X"} <= having
    assert not having & {"H100", "L4", "MI300X", "RX 9070 XT", "CPU"}
    having = {name for name, device in KNOWN_DEVICES.items() if "float8_e4m3" in device.dtypes}
    assert {"L4", "H100", "B200", "MI355X", "RX 9070 XT"} <= having
    assert not having & {"A100", "T4", "MI300X"}, "gfx942 has e4m3fnuz, another format"


@pytest.mark.parametrize(("told", "wanted"), [
    ({"cpu_name": "AMD Ryzen 9", "avx512_f": True, "avx512_vnni": True}, ("amd", {"avx512", "avx512_vnni"})),
    ({"cpu_name": "Apple M2", "asimd": True, "fp16_arith": True, "bf16": True}, ("unknown", {"arm_fp16", "arm_bf16"})),
])  # fmt: skip
def test_without_files_of_linux_torch_tells_what_the_cpu_has(told, wanted, monkeypatch):
    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(pathlib.Path, "read_text", absent)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    found = cpu_of_this_machine.__wrapped__()
    assert (found.name, found.vendor) == (told["cpu_name"], wanted[0])
    assert found.instruction_sets >= wanted[1]


def test_a_gpu_of_apple_is_named_by_its_chip(monkeypatch):
    monkeypatch.setattr(
        device_module, "cpu_of_this_machine", lambda: dataclasses.replace(Device.named("CPU"), name="Apple M2")
    )
    found = device_module._detect.__wrapped__("mps", 0)
    assert (found.platform, found.name, found.vendor) == ("mps", "Apple M2", "apple")
    assert "float64" not in found.dtypes


UNLIKE = {
    (each.platform, each.sm, each.architecture, each.instruction_sets, each.dtypes): name
    for name, each in KNOWN_DEVICES.items()
}
"""A name for each kind of device that limits can tell apart."""


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLIKE.values())
def test_every_case_of_every_operation_has_a_legal_kernel_on_every_kind_of_device(name):
    device, without = KNOWN_DEVICES[name], []
    machine = Machine(device, {"torch": torch.__version__})
    for operation in OPERATIONS.values():
        for case in operation.cases:
            for dtype in operation.dtypes[:1]:
                facts = facts_of(operation, case, dtype, device)
                if explain_facts(facts, machine, current_policy()).kernel_id is None:
                    without.append(f"{operation.name} {case.name}")
    assert not without


def test_generations_follow_compute_capability():
    assert generation_of((7, 0)) is None
    assert [generation_of(sm) for sm in [(7, 5), (8, 8), (8, 9), (9, 0), (10, 3), (12, 1)]] == [
        "turing", "ampere", "ada", "hopper", "blackwell", "blackwell",
    ]  # fmt: skip


def test_a_generation_that_this_version_does_not_know_is_named_by_a_variable(monkeypatch):
    monkeypatch.setenv(device_module.GENERATIONS_VARIABLE, "rubin=13.0-13.9:6, hopper_next=9.1-9.9:5")
    device_module.generations.cache_clear()
    try:
        assert [generation_of(sm) for sm in [(12, 0), (13, 0), (9, 0), (9, 1)]] == [
            "blackwell", "rubin", "hopper", "hopper_next",
        ]  # fmt: skip
        assert dataclasses.replace(Device.named("RTX 5090"), sm=(13, 4)).tensor_core_generation == 6
    finally:
        device_module.generations.cache_clear()


@pytest.mark.parametrize(
    "text", ["rubin", "rubin=130-139:6", "rubin=13.0-13.9", "rubin=13.9-13.0:6", "Rubin=13.0-13.9:6"]
)
def test_what_is_no_generation_is_refused_with_an_example(text):
    variable = device_module.GENERATIONS_VARIABLE
    with pytest.raises(lz.PolicyError, match=f"{variable}.*wanted name=first-last.*rubin=13.0-13.9:6"):
        Configuration({variable: text}).effective()


def test_tcgen05_separates_data_centre_blackwell_from_the_others():
    assert "tcgen05.mma" in Device.named("B200").instruction_sets
    assert "tcgen05.mma" not in Device.named("RTX 5090").instruction_sets
    assert Device.named("RTX 5090").tensor_core_generation == 5


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(KeyError, match="H100"):
        lz.Device.named("H1000")


def test_versions_are_compared_as_numbers():
    newer = attention("A100", libraries={"flash-attn": "2.10.0"})
    assert newer.kernel_id == "flash_attn.v2"  # as text, 2.10 would be older than 2.5


@at_once("name", list(KNOWN_DEVICES))
def test_every_known_device_gets_attention_with_torch_alone(name):
    report = attention(name, libraries={})
    assert report.kernel_id is not None
    assert report.kernel_id.startswith(("torch.", "reference."))


def test_rules_match_compute_capability_and_length():
    rules = [
        {"match": {"sm": ">=90", "operation": "attention.*"}, "deny": "flash_attn.v3"},
        {"match": {"seq_len": ">16384"}, "prefer": "torch.sdpa.cudnn"},
    ]
    with lz.scope(rules=rules):
        assert attention("H100").kernel_id == "torch.sdpa.cudnn"
        assert attention("A100").kernel_id == "flash_attn.v2"
        long = attention("H100", seq=16385)
        assert {term.name for term in next(c for c in long.candidates if c.kernel.id == "torch.sdpa.cudnn").terms} == {
            "priority", "prefer",
        }  # fmt: skip
        at_limit = attention("H100", seq=16384)
        cudnn = next(c for c in at_limit.candidates if c.kernel.id == "torch.sdpa.cudnn")
        assert {term.name for term in cudnn.terms} == {"priority"}


@at_once("name", list(KNOWN_DEVICES))
def test_a_device_is_known_by_its_drivers_name(name):
    device = KNOWN_DEVICES[name]
    assert Device.named(device.name) is Device.named(name.lower()) is device


OTHERS = ["NVIDIA H100 NVL", "NVIDIA GeForce RTX 3080 Ti", "NVIDIA", "AMD EPYC 7742 64-Core Processor", ""]
OTHERS += ["Intel(R) Xeon(R) Platinum 8380H CPU @ 2.90GHz", "Intel(R) Xeon(R) Platinum 8280 CPU @ 2.70GHz"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("AMD EPYC 7763 64-Core Processor", "Milan"),
        ("AMD EPYC 7R13 Processor", "Milan"),
        ("AMD EPYC-Genoa Processor", "Genoa"),
        ("AMD EPYC 9654 96-Core Processor", "Genoa"),
        ("EPYC 9V74", "Genoa"),
        ("AMD EPYC 9755 128-Core Processor", "Turin"),
        ("AMD EPYC", "Genoa"),
        ("Intel(R) Xeon(R) Gold 6138 CPU @ 2.00GHz", "Skylake"),
        ("Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", "Ice Lake"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Sapphire Rapids"),
        ("Intel Xeon Processor (SapphireRapids)", "Sapphire Rapids"),
        ("Intel(R) Xeon(R) 6972P", "Granite Rapids"),
    ],
)
def test_a_cpu_is_known_by_what_it_calls_itself(name, known):
    assert Device.named(name) is KNOWN_DEVICES[known]


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_device_goes_by_a_known_ones_name(name):
    with pytest.raises(KeyError, match="unknown device"):
        Device.named(name)
