"""Instruction sets of a CPU by the names that limits use, and a poorer CPU presented to this process on request.

``LAYERZERO_CPU_FEATURES`` takes features away from what was detected. It shows on a server what a laptop would get.
So does ``ONEDNN_MAX_CPU_ISA``: held to AVX2, oneDNN refused bfloat16 and gave wrong int8 products (torch 2.13, Zen 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from layerzero.core.errors import PolicyError, did_you_mean

VARIABLE = "LAYERZERO_CPU_FEATURES"

FLAGS = {  # /proc/cpuinfo spelling to the name that limits use
    "avx2": "avx2",
    "avx_vnni": "avx_vnni",  # tells Zen 5, with vectors of 512 bits, from Zen 4, which halves them: both are AMD EPYC
    "avx512f": "avx512",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
    "amx_fp16": "amx_fp16",
    "asimd": "neon",
    "sve": "sve",
    "bf16": "arm_bf16",
    "asimdhp": "arm_fp16",
}

_BELOW = {
    "avx_vnni": "avx2",
    "avx512": "avx2",
    "avx512_vnni": "avx512",
    "avx512_bf16": "avx512_vnni",
    "avx512_fp16": "avx512_vnni",
    "amx_bf16": "avx512_bf16",
    "amx_int8": "avx512_vnni",
    "amx_fp16": "amx_bf16",
    "sve": "neon",
    "arm_bf16": "neon",
    "arm_fp16": "neon",
}
"""What each feature stands on: no CPU has one without the other, so naming the higher one keeps both."""

_NONE = "none"


def wanted(text: str) -> frozenset[str]:
    """The features that a text keeps: names with commas between them, each with those below it; ``none`` keeps none.

    Raises: PolicyError for a name that is no feature, with the nearest.
    """
    names = [name for name in (part.strip().lower() for part in text.split(",")) if name]
    known = [*FLAGS.values(), _NONE]
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise PolicyError(f"wanted features of a CPU ({', '.join(known)}), got {unknown[0]!r}{hint}")
    kept: set[str] = set()
    for name in names:
        below: str | None = name
        while below is not None and below != _NONE:
            kept.add(below)
            below = _BELOW.get(below)
    return frozenset(kept)


def limited(have: Iterable[str], text: str) -> frozenset[str]:
    """What is left of a CPU's features where a text names those to keep; all of them where it is empty.

    Raises: PolicyError for an unknown name, and for a feature that the CPU lacks: nothing can be added.
    """
    all_of_it = frozenset(have)
    if not text.strip():
        return all_of_it
    kept = wanted(text)
    if lacking := sorted(kept - all_of_it):
        here = ", ".join(sorted(all_of_it)) or "none of the known ones"
        raise PolicyError(
            f"wanted {', '.join(lacking)}, which this CPU lacks; it has {here}. The variable only takes "
            "features away: name those to keep"
        )
    return kept


def unit(features: Iterable[str]) -> str:
    """What multiplies on a CPU with these features, which decides most of the relative speed of kernels."""
    have = frozenset(features)
    return next((name for name in _UNITS if name in have), _NONE)


_UNITS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "sve", "neon")


def torch_variables(kept: Iterable[str]) -> dict[str, str]:
    """The variables that hold torch's own kernels and oneDNN's to about the same features; read once by each of them.

    Source: ATen/native/DispatchStub.cpp, oneDNN's documentation of ``ONEDNN_MAX_CPU_ISA``.
    """
    features = frozenset(kept)
    beyond = [number for number, (_, lacking) in enumerate(_STEPS) if features.intersection(lacking)]
    (onednn, *_), _ = _STEPS[max(beyond, default=-1) + 1]
    aten = next((each for each in ("avx512", "avx2") if each in features), "default")
    return {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}


def left_by_onednn(have: Iterable[str], environment: Mapping[str, str]) -> frozenset[str]:
    """What a CPU's features are where oneDNN is held to some of them; a name that is not known takes none away."""
    held = (environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").strip().upper()
    step = next((number for number, (names, _) in enumerate(_STEPS) if held in names), len(_STEPS))
    return frozenset(have).difference(*(lacking for _, lacking in _STEPS[step:]))


_STEPS = (
    (("SSE41", "AVX"), ("avx2",)),
    (("AVX2",), ("avx_vnni",)),
    (("AVX2_VNNI", "AVX2_VNNI_2"), ("avx512",)),
    (("AVX512_CORE",), ("avx512_vnni",)),
    (("AVX512_CORE_VNNI",), ("avx512_bf16",)),
    (("AVX512_CORE_BF16",), ("avx512_fp16",)),
    (("AVX512_CORE_FP16", "AVX10_1_512"), ("amx_bf16", "amx_int8")),
    (("AVX512_CORE_AMX",), ("amx_fp16",)),
    (("AVX512_CORE_AMX_FP16",), ()),
)
"""oneDNN's names from the poorest on, each with the features that it is the first to lack: it lacks all behind, too."""
