"""Devices that a choice can be explained for without having one: ``Device.named("H100")``.

Compute capabilities and architectures follow the vendors' tables: NVIDIA's list of CUDA GPUs, LLVM's of AMD's
processors, Intel's and AMD's of the instruction sets of their CPUs. Of several sizes of memory the usual one is named.
"""

from __future__ import annotations

import re

from layerzero.core.device import GPU_GRID, Device, apple, cuda_dtypes, cuda_instruction_sets, rocm_dtypes


def _nvidia(name: str, sm: tuple[int, int], gib: int) -> Device:
    return Device(
        platform="cuda",
        name=name,
        vendor="nvidia",
        sm=sm,
        instruction_sets=cuda_instruction_sets(sm),
        dtypes=cuda_dtypes(sm),
        total_bytes=gib * 2**30,
        max_grid=GPU_GRID,
        runtime="13.0",
    )


def _amd(name: str, architecture: str, gib: int) -> Device:
    return Device(
        platform="rocm",
        name=name,
        vendor="amd",
        architecture=architecture,
        dtypes=rocm_dtypes(architecture),
        total_bytes=gib * 2**30,
        max_grid=GPU_GRID,
        runtime="6.4",
    )


def _intel(name: str, gib: int) -> Device:
    dtypes = frozenset({"float32", "float16", "bfloat16"})
    return Device(platform="xpu", name=name, vendor="intel", dtypes=dtypes, total_bytes=gib * 2**30)


def _gaudi(name: str, gib: int) -> Device:
    dtypes = frozenset({"float32", "bfloat16"})
    return Device(platform="hpu", name=name, vendor="habana", dtypes=dtypes, total_bytes=gib * 2**30)


def _cpu(name: str, vendor: str, features: str, machine: str = "x86_64") -> Device:
    return Device(
        platform="cpu",
        name=name,
        vendor=vendor,
        architecture=machine,
        instruction_sets=frozenset(features.split()),
        dtypes=frozenset({"float32", "float64", "bfloat16", "float16"}),
    )


_VNNI = "avx2 avx512 avx512_vnni"
_BF16 = f"{_VNNI} avx512_bf16"
_AMX = f"{_BF16} avx512_fp16 avx_vnni amx_bf16 amx_int8"
_ARM = "neon sve arm_bf16 arm_fp16"

KNOWN_DEVICES: dict[str, Device] = {
    "T4": _nvidia("Tesla T4", (7, 5), 16),
    "RTX 2080 Ti": _nvidia("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11),
    "A100": _nvidia("NVIDIA A100-SXM4-80GB", (8, 0), 80),
    "A10": _nvidia("NVIDIA A10", (8, 6), 24),
    "A40": _nvidia("NVIDIA A40", (8, 6), 48),
    "RTX A6000": _nvidia("NVIDIA RTX A6000", (8, 6), 48),
    "RTX 3060": _nvidia("NVIDIA GeForce RTX 3060", (8, 6), 12),
    "RTX 3070": _nvidia("NVIDIA GeForce RTX 3070", (8, 6), 8),
    "RTX 3080": _nvidia("NVIDIA GeForce RTX 3080", (8, 6), 10),
    "RTX 3090": _nvidia("NVIDIA GeForce RTX 3090", (8, 6), 24),
    "Orin": _nvidia("Orin", (8, 7), 64),
    "L4": _nvidia("NVIDIA L4", (8, 9), 24),
    "L40S": _nvidia("NVIDIA L40S", (8, 9), 48),
    "RTX 4060": _nvidia("NVIDIA GeForce RTX 4060", (8, 9), 8),
    "RTX 4070": _nvidia("NVIDIA GeForce RTX 4070", (8, 9), 12),
    "RTX 4080": _nvidia("NVIDIA GeForce RTX 4080", (8, 9), 16),
    "RTX 4090": _nvidia("NVIDIA GeForce RTX 4090", (8, 9), 24),
    "RTX 6000 Ada": _nvidia("NVIDIA RTX 6000 Ada Generation", (8, 9), 48),
    "H100": _nvidia("NVIDIA H100 80GB HBM3", (9, 0), 80),
    "H800": _nvidia("NVIDIA H800", (9, 0), 80),
    "H20": _nvidia("NVIDIA H20", (9, 0), 96),
    "H200": _nvidia("NVIDIA H200", (9, 0), 141),
    "GH200": _nvidia("NVIDIA GH200 480GB", (9, 0), 96),
    "B200": _nvidia("NVIDIA B200", (10, 0), 180),
    "GB200": _nvidia("NVIDIA GB200", (10, 0), 186),
    "B300": _nvidia("NVIDIA B300 SXM6 AC", (10, 3), 268),
    "GB300": _nvidia("NVIDIA GB300", (10, 3), 278),
    "Thor": _nvidia("NVIDIA Thor", (11, 0), 128),
    "RTX 5060": _nvidia("NVIDIA GeForce RTX 5060", (12, 0), 8),
    "RTX 5060 Ti": _nvidia("NVIDIA GeForce RTX 5060 Ti", (12, 0), 16),
    "RTX 5070": _nvidia("NVIDIA GeForce RTX 5070", (12, 0), 12),
    "RTX 5080": _nvidia("NVIDIA GeForce RTX 5080", (12, 0), 16),
    "RTX 5090": _nvidia("NVIDIA GeForce RTX 5090", (12, 0), 32),
    "RTX PRO 6000": _nvidia("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 96),
    "DGX Spark": _nvidia("NVIDIA GB10", (12, 1), 128),
    "MI210": _amd("AMD Instinct MI210", "gfx90a", 64),
    "MI250X": _amd("AMD Instinct MI250X", "gfx90a", 64),
    "MI300X": _amd("AMD Instinct MI300X", "gfx942", 192),
    "MI325X": _amd("AMD Instinct MI325X", "gfx942", 256),
    "MI355X": _amd("AMD Instinct MI355X", "gfx950", 288),
    # announced: LLVM names gfx1250 and no product of it
    "MI455X": _amd("AMD Instinct MI455X", "gfx1250", 432),
    "RX 7900 XTX": _amd("AMD Radeon RX 7900 XTX", "gfx1100", 24),
    "RX 9070 XT": _amd("AMD Radeon RX 9070 XT", "gfx1201", 16),
    "Gaudi": _gaudi("Gaudi 3", 128),
    "Gaudi 2": _gaudi("Gaudi 2", 96),
    "Arc": _intel("Intel Arc B580", 12),
    "Arc A770": _intel("Intel Arc A770", 16),
    "Max 1550": _intel("Intel Data Center GPU Max 1550", 64),
    "M1": apple("Apple M1", 16),
    "M2 Max": apple("Apple M2 Max", 32),
    "M3 Max": apple("Apple M3 Max", 64),
    "M4 Pro": apple("Apple M4 Pro", 48),
    "CPU": _cpu("x86-64 with AVX-512", "intel", "avx2 avx512"),
    "Laptop": _cpu("x86-64 with AVX2", "intel", "avx2"),
    "Skylake": _cpu("Xeon Skylake", "intel", "avx2 avx512"),
    "Ice Lake": _cpu("Xeon Ice Lake", "intel", _VNNI),
    "Sapphire Rapids": _cpu("Xeon Sapphire Rapids", "intel", _AMX),
    "Granite Rapids": _cpu("Xeon Granite Rapids", "intel", f"{_AMX} amx_fp16"),
    "Milan": _cpu("EPYC Milan (Zen 3)", "amd", "avx2"),
    "Genoa": _cpu("EPYC Genoa (Zen 4)", "amd", _BF16),
    "Turin": _cpu("EPYC Turin (Zen 5)", "amd", f"{_BF16} avx_vnni"),
    "Grace": _cpu("NVIDIA Grace", "arm", _ARM, "aarch64"),
}
"""By the name that people use."""

FAMILIES = {
    "MI200": "MI250X",
    "MI300": "MI300X",
    "MI350": "MI355X",
    "MI400": "MI455X",
    "RDNA3": "RX 7900 XTX",
    "RDNA4": "RX 9070 XT",
    "EPYC": "Genoa",
    "Xeon": "Sapphire Rapids",
    "MPS": "M3 Max",
    "ROCm": "MI300X",
    "XPU": "Max 1550",
    "HPU": "Gaudi",
}
"""A family's name, and which of it is meant where no more is said."""


_XEON = "xeon(?:(?:platinum|gold|silver|bronze)"
CPU_MODELS = {
    "Skylake": rf"{_XEON}\d1\d\d|processor\(skylake)",
    "Ice Lake": rf"{_XEON}\d3\d\d(?!h)|processor\(icelake)",  # those with H are Cooper Lake
    "Sapphire Rapids": rf"{_XEON}\d4\d\d|processor\(sapphirerapids)",
    "Granite Rapids": r"xeon(?:6[579]\d\dp|processor\(graniterapids)",
    "Milan": r"epyc(?:7\w\w3|milan)",
    "Genoa": r"epyc(?:[489]\w\w4|genoa)",
    "Turin": r"epyc(?:[49]\w\w5|turin)",
}
"""How a CPU's own name begins, as Linux and QEMU write it: ``AMD EPYC 9654 96-Core Processor`` is a Genoa."""


def _plainly(text: str) -> str:
    return re.sub(r"^(nvidia|amd|intel) |\(r\)|\(tm\)|[ -]", "", text.lower().replace("intel(r)", "intel"))


def named(name: str) -> Device:
    """The device of a name, a driver's or a CPU's own name, or a family's. Raises: KeyError naming the known ones."""
    given = _plainly(name)
    for known, device in KNOWN_DEVICES.items():
        if given in (_plainly(known), _plainly(device.name)):
            return device
    for family, known in FAMILIES.items():
        if given == _plainly(family):
            return KNOWN_DEVICES[known]
    for known, model in CPU_MODELS.items():
        if re.match(model, given):
            return KNOWN_DEVICES[known]
    raise KeyError(f"unknown device {name!r}; known: {', '.join([*KNOWN_DEVICES, *FAMILIES])}")
