"""Call the fastest kernel that is valid here: ``import layerzero as lz``; ``lz.attention(q, k, v)``.

Importing loads no kernel library, initialises no device and patches nothing; it does not even import torch. Names are
resolved on first use and then live in this module's globals, so that ``lz.attention`` costs one dictionary read.
``torch.ops.layerzero.attention`` is there as soon as torch and this package are imported, in whatever order, and is
defined when it is first used, see :mod:`layerzero.engine.namespace`.
"""

from __future__ import annotations

import importlib
from typing import Any

from layerzero.core import INSTALLERS as _INSTALLERS
from layerzero.core.import_hook import when_imported as _when_imported

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "layerzero.inspection.answers": ("explain", "facts", "list_kernels", "list_operations", "validate", "which"),
    "layerzero.inspection.bind": ("bind",),
    "layerzero.inspection.diagnosis": ("doctor",),
    "layerzero.inspection.freeze": ("freeze", "frozen", "thaw"),
    "layerzero.inspection.control": (
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
    "layerzero.inspection.descriptors": (
        "descriptor",
        "kernels_from_descriptor",
        "load_descriptor",
        "unload_descriptor",
    ),
    "layerzero.inspection.trace": ("trace",),
    "layerzero.inspection.agreement": ("agree",),
    "layerzero.serving.dry_run": ("dry_run",),
    "layerzero.serving.exporters": (
        "JsonFormatter",
        "register_with_logging",
        "register_with_opentelemetry",
        "register_with_prometheus",
    ),
    "layerzero.serving.metrics": ("Metrics", "metrics"),
    "layerzero.engine.events": ("Event", "Listener", "on_event"),
    "layerzero.engine.headroom": ("Defragmented", "defragment"),
    "layerzero.serving.probes": ("HealthServer", "Probes", "serve_health"),
    "layerzero.serving.readiness": ("JitStatus", "Readiness", "jit_status", "readiness_check"),
    "layerzero.serving.solve": ("solve",),
    "layerzero.serving.speculation": (
        "AdaptiveSpeculation",
        "Eagle3Config",
        "EagleConfig",
        "MedusaConfig",
        "NGramConfig",
        "SpeculativeConfig",
    ),
    "layerzero.serving.speculative_pairs": ("SpeculativePair", "SpeculativePairs", "speculative_pair"),
    "layerzero.serving.warmup": ("warmup",),
    "layerzero.engine.functions": ("register_function",),
    "layerzero.engine.probe": ("Machine",),
    "layerzero.tuning.verification.rehearsal": ("confirm_suspects",),
    "layerzero.tuning.measurement.workload": ("record",),
    "layerzero.tuning.measurement.tune": ("tune",),
    "layerzero.tuning.measurement.online": ("sampled",),
    "layerzero.tuning.verification.vetting": ("vet",),
    "layerzero.integrations.diffusers": ("register_with_diffusers",),
    "layerzero.integrations.optimize": ("Optimized", "generate_step", "optimize"),
    "layerzero.integrations.tokenizers": ("tune_tokenizer",),
    "layerzero.integrations.torch": ("scaled_dot_product_attention",),
    "layerzero.integrations.transformers": ("register_with_transformers",),
    "layerzero.core.graph_capture": ("capturing",),
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
        "LayerZeroPerformanceWarning",
        "LayerZeroWarning",
        "NoCompatibleKernelPairError",
        "NoKernelFoundError",
        "PolicyError",
        "RegistrationError",
        "UnknownOperationError",
        "VersionMismatchError",
    ),
}
_MODULES = {"judges": "layerzero.core.judges", "limits": "layerzero.core.limits", "testing": "layerzero.testing"}
_ALIASES = {  # the specification's longer names
    "DeviceSpec": "Device",
    "ExecutionPlan": "Plan",
    "compile": "solve",
    "KernelSpec": "Kernel",
    "SelectionContext": "Facts",
    "SelectionContextBuilder": "FactsBuilder",
    "SelectionReport": "Report",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def _offered() -> list[str]:
    """Every public name: what stands above, and what the families in ``ops/`` offer."""
    ops = _ops()
    return sorted([*_HOME, *ops.EXPORTS, *ops.FUNCTIONS, *ops.PLAIN_FUNCTIONS, *_MODULES, *_ALIASES, "__version__"])


def _ops() -> Any:
    """The families; what they declare takes most of the time that this package takes to load."""
    with importlib.import_module("layerzero.core.graph_capture").held_off():
        return importlib.import_module("layerzero.ops")


def _of_families(name: str) -> Any:
    """A public function or an export of a family, or of a plugin that policy lets in. Raises: AttributeError."""
    ops = _ops()
    if name in ops.EXPORTS:
        return getattr(importlib.import_module(ops.EXPORTS[name]), name)
    if name in ops.PLAIN_FUNCTIONS:
        return importlib.import_module("layerzero.engine.plain").PLAIN_CALLS[name][1]
    if name in ops.FUNCTIONS or importlib.import_module("layerzero._assembly").brings_function(name):
        with importlib.import_module("layerzero.core.graph_capture").held_off():
            return importlib.import_module("layerzero.engine.functions").CALLS[name].fast
    raise AttributeError(f"module 'layerzero' has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    value: Any
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _ALIASES:
        value = __getattr__(_ALIASES[name])
    elif name == "__all__":
        value = _offered()
    elif name.startswith("_"):
        raise AttributeError(f"module 'layerzero' has no attribute {name!r}")
    else:
        name = _ops().current_name(name)  # a former name is not kept in globals, so that every use warns
        value = _of_families(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return _offered()


_INSTALLERS.append(lambda services: importlib.import_module("layerzero._assembly").install(services))
_when_imported("torch", lambda: importlib.import_module("layerzero.engine.namespace").install())
