"""Which compiled modules FlashInfer needs for a call, and which of them a package brought along.

A module is compiled for dtype, head dims, whether there is a window, and whether there is a softcap; one for a single
sequence and one for batches. flashinfer-jit-cache, where its version is FlashInfer's own, brings those for batches,
which then serve single sequences, too. (flashinfer-cubin holds kernels of other backends than those declared here.)

What an earlier process compiled lies in FlashInfer's own cache, by version and architectures, and counts as built: the
library finds it there by the same name, and asks ninja whether it still holds. A cache that was wiped is seen, since
each choice looks for the file, and so is a build that was cut off. Paths and names are those of FlashInfer 0.7.2
and 0.7.4 (``jit/env.py``, ``jit/attention/modules.py``).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from layerzero.core.facts import Facts

_ARCH = re.compile(r"(?:sm)?(\d+)(\d)([af]?)")
"""An architecture as packages (``sm90a``) and paths (``90a``) name it."""

NO_POSITIONS = 0
"""FlashInfer's PosEncodingMode.NONE."""


class Variant(NamedTuple):
    """What a call needs of a module besides shapes."""

    causal: bool
    left: int
    softcap: float
    scale: float

    @staticmethod
    def of(facts: Facts) -> Variant:
        """Read it from the facts of a call whose limits hold: a window is (left, 0) or (left, -1), or S_q is 1."""
        window: Any = facts["window"]
        scale: Any = facts["scale"]
        softcap: Any = facts["softcap"]
        left, right = window or (-1, -1)
        causal = facts.get("causal") is True or (right == 0 and facts.get("seq_q") != 1)
        return Variant(causal, left, softcap or 0.0, facts.size("head_dim") ** -0.5 if scale is None else scale)


def compiled_for(facts: Facts) -> tuple[Any, ...]:
    """The arguments that name a module, in the library's order, less index dtype and the precision of scores."""
    variant, dtype, cache = Variant.of(facts), facts["dtype"], facts.tensors.get("key_cache")
    dtypes = dtype, dtype if cache is None else cache.dtype, dtype
    dims = facts.size("head_dim"), facts.size("value_dim")
    return (*dtypes, *dims, NO_POSITIONS, variant.left >= 0, variant.softcap > 0)


@functools.cache
def _shipped() -> frozenset[tuple[str, str]]:
    """Modules and architectures (``sm90a``) that a matching flashinfer-jit-cache brings."""
    try:
        library, cache = (importlib.metadata.version(name) for name in ("flashinfer-python", "flashinfer-jit-cache"))
    except importlib.metadata.PackageNotFoundError:
        return frozenset()
    unchecked = bool(os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"))
    if not unchecked and cache.split("+")[0] != library:  # FlashInfer ignores it, too
        return frozenset()
    import flashinfer_jit_cache  # a list of files: nothing is loaded

    providers = flashinfer_jit_cache.get_jit_cache_providers()
    return frozenset(
        (module, arch)
        for each in providers
        if unchecked or each.version == flashinfer_jit_cache.__version__  # a wheel of each architecture has its own
        for module in each.modules
        for arch in each.cuda_architectures
    )


def is_shipped(module: str, facts: Facts) -> bool:
    """Whether a package brought this module for the call's device."""
    sm = facts.device.sm
    return sm is not None and any(name == module and _runs_on(arch, sm) for name, arch in _shipped())


def _runs_on(arch: str, sm: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on a device: ``sm80`` on 8.6 and 8.9, too, ``sm90a`` on 9.0 alone.

    Nothing that is named otherwise does.
    """
    named = _ARCH.fullmatch(arch)
    if named is None:
        return False
    major, minor = int(named[1]), int(named[2])
    return (major, minor) == sm if named[3] == "a" else major == sm[0] and minor <= sm[1]


def is_built(module: str | None, facts: Facts) -> bool:
    """Whether nothing is left to compile of a module: a package brought it, or an earlier process compiled it here.

    None stands for a dtype that no module is made for.
    """
    if module is None:
        return False
    if is_shipped(module, facts):
        return True
    if os.environ.get("FLASHINFER_DISABLE_JIT"):  # it would load nothing that was compiled here
        return False
    return any(_is_whole(folder / module / f"{module}.so") for folder in _folders(facts.device.sm))


def of_modules(*names: str) -> dict[str, Any]:
    """Fields of a kernel whose modules hold every dtype and size."""
    return {
        "build_key": lambda facts: (facts.device.sm, *names),
        "prebuilt": lambda facts: all(is_built(each, facts) for each in names),
    }


def _is_whole(library: Path) -> bool:
    """Whether a module was once linked to its end: ninja writes down what it made, after it made it.

    A first build that was killed leaves part of a library behind, which ninja makes again, and the next call would wait
    a minute for that.
    """
    log = library.with_name(".ninja_log")
    try:
        stat = log.stat()
    except OSError:
        return False
    return library.is_file() and _names(log, stat.st_mtime_ns, stat.st_size, library.name)


@functools.lru_cache(maxsize=256)
def _names(log: Path, _changed_ns: int, _bytes: int, name: str) -> bool:
    """Whether one of the log's lines (start, end, time, output, command's hash) is of an output of this name."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(len(fields := line.split("\t")) > 3 and Path(fields[3]).name == name for line in lines)


def _folders(sm: tuple[int, int] | None) -> list[Path]:
    """Where FlashInfer keeps what it compiled for a device, or for those that its environment variable names."""
    release = version()
    if sm is None or release is None:
        return []
    loaded: Any = sys.modules.get("flashinfer.jit.env")  # it looked once, for all devices that are visible
    if loaded is not None:
        folder = Path(loaded.FLASHINFER_JIT_DIR)
        if any(_runs_on(each, sm) for each in folder.parent.name.split("_") if each):
            return [folder]
    named = os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    names = _joined(named) if named else [f"{sm[0]}{sm[1]}{suffix}" for suffix in ("a", "", "f")]
    home = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    return [home / ".cache" / "flashinfer" / release / name / "cached_ops" for name in names]


def _joined(named: str) -> list[str]:
    """What ``9.0 10.0a`` becomes in a path: sorted, without points, joined; with the suffix that it has or gets.

    Of 12.0 that depends on nvcc: ``f`` from 12.9 on.
    """
    found = []
    for twelve in ("0f", "0a"):
        targets = set()
        for major, minor in (each.split(".") for each in named.split()):
            own = {9: f"{minor}a", 12: twelve if minor == "0" else f"{minor}a"}
            bare = minor if int(major) < 9 else own.get(int(major), f"{minor}a")
            targets.add((int(major), minor if minor[-1].isalpha() else bare))
        found.append("_".join(f"{major}{minor}" for major, minor in sorted(targets)))
    return list(dict.fromkeys(found))


@functools.cache
def version() -> str | None:
    """FlashInfer's version."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None


SHORT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_SUFFIX = {"fa2": "_kv_stride_equal", "fa3": "_sm90"}


_INDEX = "_dtype_idx_i32"


def _named(kind: str, facts: Facts, index: str = "") -> str | None:
    """The name of a module for a call, up to what each kind has at its end; None for a dtype that none is made for."""
    dtype, held, _, head_dim, value_dim, _, windowed, capped = compiled_for(facts)
    return _spelled(kind, (dtype, held), (head_dim, value_dim), windowed=windowed, capped=capped, index=index)


def _spelled(
    kind: str, dtypes: tuple[Any, Any], dims: tuple[int, int], *, windowed: bool, capped: bool, index: str = ""
) -> str | None:
    dtype, held = dtypes
    if dtype not in SHORT or held not in SHORT:
        return None
    short = SHORT[dtype]
    return (
        f"{kind}_with_kv_cache_dtype_q_{short}_dtype_kv_{SHORT[held]}_dtype_o_{short}{index}_head_dim_qk_{dims[0]}"
        f"_head_dim_vo_{dims[1]}_posenc_{NO_POSITIONS}_use_swa_{windowed}_use_logits_cap_{capped}"
    )


def _for_batches(backend: str, facts: Facts) -> str | None:
    name = _named("batch_prefill", facts, _INDEX)
    return None if name is None else f"{name}_f16qk_False{_SUFFIX[backend]}"


def _for_one(backend: str, facts: Facts) -> str | None:
    if backend == "decode":
        return _named("single_decode", facts)
    name = _named("single_prefill", facts)
    return None if name is None else f"{name}_f16qk_False{'_sm90' if backend == 'fa3' else ''}"


def shipped_for_batches(backend: str, facts: Facts) -> bool:
    """Whether the module for batches came with a package."""
    name = _for_batches(backend, facts) if _shipped() else None
    return name is not None and is_shipped(name, facts)


def planned(backend: str, facts: Facts) -> bool:
    """Whether a call takes the module for batches, which needs a plan."""
    return facts.size("batch") > 1 or shipped_for_batches(backend, facts)


def prebuilt(backend: str) -> Callable[[Facts], bool]:
    """Whether a call compiles nothing: its module is there, and the one that packs masks if it has one."""

    def check(facts: Facts) -> bool:
        masked = facts["attn_mask"] != "none"
        alone = backend == "decode" or not planned(backend, facts)
        name = _for_one(backend, facts) if alone else _for_batches(backend, facts)
        return is_built(name, facts) and (not masked or is_built("quantization", facts))

    return check


def batches_prebuilt(backend: str) -> Callable[[Facts], bool]:
    """Whether a call for batches of unlike lengths compiles nothing."""
    return lambda facts: is_built(_for_batches(backend, facts), facts)


def decode_prebuilt(tensor_cores: bool) -> Callable[[Facts], bool]:
    """Whether decoding over pages compiles nothing: tensor cores take the module for batches of several queries."""
    if tensor_cores:
        return batches_prebuilt("fa2")
    return lambda facts: is_built(_named("batch_decode", facts, _INDEX), facts)


def pod_prebuilt(facts: Facts) -> bool:
    """Whether prefill on decode compiles nothing: its own module, and that of its plans."""
    dtype, held, _, head_dim, _, _, windowed, _ = compiled_for(facts)
    if dtype not in SHORT or held not in SHORT:
        return False
    short = SHORT[dtype]
    halves = (f"posenc_{half}_{NO_POSITIONS}_use_swa_{half}_{windowed}_use_logits_cap_{half}_False" for half in "pd")
    name = (
        f"batch_pod_with_kv_cache_dtype_q_{short}_dtype_kv_{SHORT[held]}_dtype_o_{short}_head_dim_{head_dim}"
        f"_{'_'.join(halves)}{_INDEX}_f16qk_False"
    )
    return is_built(name, facts) and batches_prebuilt("fa2")(facts)


def blocks_prebuilt(tiles: Callable[[Facts], bool]) -> Callable[[Facts], bool]:
    """Whether attention to blocks compiles nothing: on Hopper the library takes FlashAttention 3's module for tiles.

    Args:
        tiles: whether a call fills tiles of queries; one that does not takes the module for decoding.
    """

    def check(facts: Facts) -> bool:
        dims = facts.size("head_dim"), facts.size("value_dim")
        kind = "batch_prefill" if tiles(facts) else "batch_decode"
        name = _spelled(kind, (facts["dtype"], facts["dtype"]), dims, windowed=False, capped=False, index=_INDEX)
        backend = "fa3" if facts.device.sm == (9, 0) else "fa2"
        end = f"_f16qk_False{_SUFFIX[backend]}" if tiles(facts) else ""
        return name is not None and is_built(name + end, facts)

    return check


def batches_key(backend: str) -> Callable[[Facts], Hashable]:
    """What must have been built for it: the module for batches, without one that packs masks."""
    return lambda facts: (backend, False, facts.device.sm, "none", compiled_for(facts))


def decode_key(tensor_cores: bool) -> Callable[[Facts], Hashable]:
    """What must have been built for decoding over pages; tensor cores take the module for batches."""
    return batches_key("fa2" if tensor_cores else "decode")


def build_key(backend: str) -> Callable[[Facts], Hashable]:
    """What must have been built for a call; packing a mask is a module of its own."""

    def key(facts: Facts) -> Hashable:
        alone = backend == "decode" or not planned(backend, facts)
        return backend, alone, facts.device.sm, facts["attn_mask"], compiled_for(facts)

    return key
