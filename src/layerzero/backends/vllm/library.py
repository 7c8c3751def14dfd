"""vLLM's compiled operators on CUDA, loaded as libraries of an installed vllm, which is never imported.

``import vllm`` takes seconds and sets up logging, plugins and a platform. Each library is built for one torch.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Release


def _backend(summary: str, *flags: str) -> Backend:
    """One for each shared library: where one does not load, the others still may."""
    return Backend(
        name="vllm",
        summary=summary,
        import_name="vllm",
        distribution="vllm",
        versions="==0.20.*",
        tested=("0.20.0",),
        releases=(
            # Its libraries load and every operator used here has the parameters it had (torch 2.15 on a CPU,
            # 2026-11-23), but no GPU ran them.
            Release("==0.33.*", ("torch>=2.14,<2.15",), "pip install vllm==0.33.0", proven=False),
            Release("==0.20.*", ("torch>=2.11,<2.12",), "pip install vllm==0.20.0"),
        ),
        platforms=("cuda",),
        least_sm=(8, 0),
        homepage="https://github.com/vllm-project/vllm",
        flags=("graph_safe", "device_guard", *flags),
    )


STABLE = "_C_stable_libtorch"
"""The library that adds CUTLASS' products to ``torch.ops._C``, as a fragment next to what its owner registers."""

VLLM = _backend("The CUDA operators of the vLLM server", "deterministic")
VLLM_FLASH_ATTN_2 = _backend("FlashAttention 2 as vLLM ships it", "jit")
VLLM_FLASH_ATTN_3 = _backend("FlashAttention 3 as vLLM ships it")
VLLM_FLASH_MLA = _backend("FlashMLA as vLLM ships it")


def has_machine_code_of_v2(facts: Facts) -> bool:
    """Whether FlashAttention 2 came compiled for this device.

    The wheel holds machine code for sm_8x and PTX beyond it, which the driver compiles on first use: 58 s for one
    variant on an H200 (2026-11-21), kept in its cache for the next process.
    """
    return facts.device.sm is not None and facts.device.sm[0] == 8


@functools.cache
def driver_version() -> str:
    """That of the CUDA driver, since another one compiles PTX anew; empty where the system does not tell (Windows)."""
    try:
        return _DRIVER.read_text().strip()
    except OSError:
        return ""


_DRIVER = Path("/sys/module/nvidia/version")


def variant_of_v2(facts: Facts) -> Hashable:
    """Which instantiation of FlashAttention 2 a call takes, and whose compiler makes it of PTX."""
    window, long = facts["window"] is not None, facts.size("seq_q") > 1
    dims = -(-facts.size("head_dim") // 32)
    more = window, long, facts["softcap"] is not None
    return facts.device.sm, driver_version(), facts["dtype"], dims, facts.get("causal"), *more


def variant_of_tokens_v2(facts: Facts) -> Hashable:
    """The same of sequences of unlike lengths; slopes, and the pages that a table names, select code of their own."""
    window, softcap = facts["window"] is not None, facts["softcap"] is not None
    slopes, paged = facts.get("alibi_slopes", "none") != "none", "block_tables" in facts.tensors
    dims = -(-facts.size("head_dim") // 32)
    more = window, softcap, slopes, paged
    return facts.device.sm, driver_version(), facts["dtype"], dims, facts.get("causal", False), *more


_MARKS = {"_C": "_C::rms_norm", STABLE: "_C::cutlass_scaled_mm"}
"""An operator of each library that shares a name space: whether something owns it already, and on which devices."""


@functools.cache
def operators(library: str, namespace: str, owner: str = "") -> Any:
    """``torch.ops.<namespace>`` of a library, named by its path within the package.

    vLLM's build for CPUs owns ``torch.ops._C``, too. Loading a second owner ends the process from a static initialiser,
    so an owner is looked for first. Raises: ImportError if the library is absent, or the name space another one's.
    """
    mark = _MARKS.get(owner or namespace)
    if mark is None or not torch._C._dispatch_has_kernel(mark):
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ImportError("vllm is not installed")
        beside = Path(spec.origin).parent
        # vLLM 0.33 has everything in libraries of torch's stable interface, under the same operators' names
        stable = beside / library.replace("_C.abi3.so", f"{STABLE}.abi3.so")
        path = next((each for each in (beside / library, stable) if each.exists()), None)
        if path is None:
            raise ImportError(f"wanted {library} next to {spec.origin}, got none: a vllm without CUDA kernels")
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    if mark is not None and not torch._C._dispatch_has_kernel_for_dispatch_key(mark, "CUDA"):
        raise ImportError(f"{mark} is another library's, without CUDA kernels (vLLM's for CPUs); a process holds one")
    return getattr(torch.ops, namespace)
