"""Call the fastest kernel that is valid here: ``import layerzero as lz``; ``lz.attention(q, k, v)``.

Importing loads no kernel library, initialises no device and patches nothing. Names are resolved on first use and then
live in this module's globals, so that ``lz.attention`` costs one dictionary read.
"""

from __future__ import annotations

import importlib
from typing import Any

from layerzero.core.collecting import held_off as _held_off

with _held_off():
    from layerzero.engine import operators as _operators
    from layerzero.ops import EXPORTS as _EXPORTS
    from layerzero.ops import FUNCTIONS as _FUNCTIONS
    from layerzero.ops import PLAIN_FUNCTIONS as _PLAIN_FUNCTIONS
    from layerzero.ops import current_name as _current_name

    _operators.register_all()  # so that torch.ops.layerzero.* exists, in torch.compile and in exported programs too

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "layerzero.asking.answers": (
        "explain",
        "facts",
        "list_kernels",
        "list_operations",
        "validate",
        "which",
    ),
    "layerzero.asking.bind": ("bind",),
    "layerzero.asking.diagnosis": ("doctor",),
    "layerzero.asking.freeze": ("freeze", "frozen", "thaw"),
    "layerzero.asking.control": (
        "avoid",
        "configure",
        "deterministic",
        "disabled",
        "load_config",
        "lock",
        "prefer",
        "register_backend",
        "register_kernel",
        "register_operation",
        "scope",
        "unlock",
        "unregister_kernel",
        "unregister_operation",
    ),
    "layerzero.asking.descriptors": (
        "descriptor",
        "kernels_from_descriptor",
        "load_descriptor",
        "unload_descriptor",
    ),
    "layerzero.asking.trace": ("trace",),
    "layerzero.serving.agreement": ("agree",),
    "layerzero.serving.jit_status": ("JitStatus", "jit_status"),
    "layerzero.serving.readiness": ("Readiness", "readiness_check"),
    "layerzero.serving.warmup": ("warmup",),
    "layerzero.engine.functions": ("register_function",),
    "layerzero.engine.probe": ("Machine",),
    "layerzero.tuning.proving.confirm": ("confirm_suspects",),
    "layerzero.tuning.measuring.record": ("record",),
    "layerzero.tuning.measuring.tune": ("tune",),
    "layerzero.tuning.measuring.online": ("sampled",),
    "layerzero.tuning.proving.vetting": ("vet",),
    "layerzero.integrations.diffusers": ("register_with_diffusers",),
    "layerzero.integrations.optimize": ("Optimized", "generate_step", "optimize"),
    "layerzero.integrations.tokenizers": ("tune_tokenizer",),
    "layerzero.integrations.torch": ("scaled_dot_product_attention",),
    "layerzero.integrations.transformers": ("register_with_transformers",),
    "layerzero.core.capturing": ("capturing",),
    "layerzero.core.device": ("Device",),
    "layerzero.core.facts": ("Facts", "FactsBuilder"),
    "layerzero.core.handle": ("Handle",),
    "layerzero.core.kernel": ("Backend", "Kernel", "Release"),
    "layerzero.core.operation": ("Case", "Function", "OpKind", "Operation", "Routed", "Tolerance"),
    "layerzero.core.arguments": ("Axis", "Param", "Role", "SizeCodes", "TensorSchema"),
    "layerzero.core.schema": ("OperationSchema",),
    "layerzero.core.plan": ("Plan", "Report"),
    "layerzero.core.reasons": ("Reason", "ReasonCode"),
    "layerzero.core.errors": (
        "CudaGraphUnsafeError",
        "DescriptorError",
        "FrozenChoiceError",
        "InvalidCallError",
        "KernelExecutionError",
        "LayerZeroError",
        "LayerZeroFallbackWarning",
        "LayerZeroLayoutWarning",
        "LayerZeroPerformanceWarning",
        "LayerZeroWarning",
        "NoKernelFoundError",
        "PolicyError",
        "RegistrationError",
    ),
}
_MODULES = {"judges": "layerzero.core.judges", "limits": "layerzero.core.limits", "testing": "layerzero.testing"}
_ALIASES = {  # the specification's longer names
    "DeviceSpec": "Device",
    "ExecutionPlan": "Plan",
    "KernelSpec": "Kernel",
    "SelectionContext": "Facts",
    "SelectionContextBuilder": "FactsBuilder",
    "SelectionReport": "Report",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names} | _EXPORTS

__all__ = sorted([*_HOME, *_FUNCTIONS, *_PLAIN_FUNCTIONS, *_MODULES, *_ALIASES, "__version__"])  # noqa: PLE0605  # a list of str


def __getattr__(name: str) -> Any:
    name = _current_name(name)  # a former name is not kept in globals, so that every use warns
    if name in _FUNCTIONS:
        with _held_off():
            value = importlib.import_module("layerzero.engine.functions").CALLS[name].fast
    elif name in _PLAIN_FUNCTIONS:
        value = importlib.import_module("layerzero.engine.plain").PLAIN_CALLS[name][1]
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _ALIASES:
        value = __getattr__(_ALIASES[name])
    elif not name.startswith("_") and importlib.import_module("layerzero._assembly").brings_function(name):
        value = importlib.import_module("layerzero.engine.functions").CALLS[name].fast
    else:
        raise AttributeError(f"module 'layerzero' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
