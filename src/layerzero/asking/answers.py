"""Questions about a selection: which kernel, why, which others, is this one valid, what is installed."""

from __future__ import annotations

import importlib
import platform
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import torch

from layerzero.asking import compatibility
from layerzero.asking.descriptors import DESCRIPTORS
from layerzero.asking.examples import awaits_vetting, example_calls
from layerzero.core.device import Device
from layerzero.core.errors import InvalidCallError, LayerZeroLayoutWarning
from layerzero.core.facts import CallState, Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.ledger import Suspect
from layerzero.core.operation import Operation, Routed
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine import accelerator, legality, probe, score
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.dispatch import ENGINE, Dispatcher
from layerzero.engine.functions import CALLS
from layerzero.engine.health import Counts
from layerzero.engine.pick import NO_TIMES, pick
from layerzero.engine.policy import covers
from layerzero.engine.probe import Machine
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import nearest
from layerzero.ops import FUNCTIONS, OPERATION_ALIASES, function_of


def explain(
    operation: str | Facts,
    *args: Any,
    device: Device | str | None = None,
    libraries: Mapping[str, str] | None = None,
    capturing: bool = False,
    **kwargs: Any,
) -> Report:
    """Tell which kernel a call gets and why: every candidate, its score term by term, every reason. Nothing runs.

    Args:
        operation: a function (``attention``), an operation, or an alias (``attention.causal``); or the facts of a call
            made by :func:`facts`.
        args, kwargs: the function's arguments. Tensors on ``meta`` will do.
        device: ask about another device, by name (``"H100"``) or description.
        libraries: ask about other installed libraries: distribution name to version.
        capturing: ask as if a CUDA graph were being captured.
    Raises: InvalidCallError for a call that means nothing; KeyError for an unknown operation or device.
    """
    machine = Machine(described(device) if isinstance(device, str) else device, libraries)
    policy = current_policy()
    if isinstance(operation, Facts):
        if args or kwargs:
            raise InvalidCallError("explain", ["facts stand for a whole call: wanted no further arguments, got some"])
        asked = operation.on(machine.device or operation.device, capturing=capturing or bool(operation["capturing"]))
        return _explain_facts(asked, machine if device or libraries is not None else probe.this_machine())
    dispatcher, arguments, wanted = question(operation, args, kwargs)
    call_state = None
    if capturing or device is not None:
        call_state = _state(arguments, policy, dispatcher, capturing)
    with _quiet_layouts():
        report, _ = dispatcher.explain(
            arguments,
            policy,
            machine=machine if device or libraries is not None else None,
            call_state=call_state,
        )
    check_operation(wanted, report)
    return report


def described(name: str) -> Device:
    """A device by name: ``cpu``, ``cuda``, ``cuda:1`` are this machine's, ``H100`` and the like need not be here."""
    return Device.detect(name) if name.partition(":")[0] in ("cpu", "cuda") else Device.named(name)


def which(operation: str | Facts, *args: Any, **kwargs: Any) -> dict[str, object]:
    """Tell which kernel a call gets: ``{"kernel_id", "score", "operation"}``. Takes what explain takes."""
    report = explain(operation, *args, **kwargs)
    return {
        "kernel_id": report.kernel_id,
        "score": round(report.chosen.score, 3) if report.chosen else None,
        "operation": report.operation,
    }


def validate(kernel_id: str, *args: Any, **kwargs: Any) -> tuple[bool, tuple[Reason, ...]]:
    """Tell whether one kernel may run a call: ``(valid, reasons)``. Takes what explain takes.

    A call that means nothing gives its code as a reason where the catalogue has one, else InvalidCallError is raised.
    Raises: KeyError for an unknown kernel.
    """
    kernel = REGISTRY.kernel(kernel_id)
    function = _function_of(kernel)
    try:
        report = explain(function, *args, **kwargs)
    except InvalidCallError as error:
        if error.code is None:
            raise
        return False, (Reason(error.code, function, "a call that means something", str(error)),)
    try:
        reasons = report.reasons(kernel.id)
    except KeyError:
        reasons = (_wrong_operation(kernel, report),)
    return not reasons, reasons


def _wrong_operation(kernel: Kernel, report: Report) -> Reason:
    operation = report.facts.operation
    if operation.unlike_sibling is not None and operation.sibling in kernel.operations:
        return operation.unlike_sibling(report.facts)
    return Reason(ReasonCode.CONSTRAINT_FAILED, "operation", " or ".join(kernel.operations), operation.name)


def list_kernels(operation: str = "*") -> list[Kernel]:
    """List the kernels of an operation, function, alias or glob, by priority.

    Raises: KeyError naming the nearest operation.
    """
    return REGISTRY.kernels(operation)


def list_operations() -> list[Operation]:
    """List every operation."""
    return sorted(REGISTRY.operations().values(), key=lambda operation: operation.name)


def facts(operation: str, *args: Any, device: Device | str | None = None, **kwargs: Any) -> Facts:
    """Name everything about a call; explain and which accept the result in place of tensors."""
    return explain(operation, *args, device=device, **kwargs).facts


def _explain_facts(call: Facts, machine: Machine) -> Report:
    policy = current_policy()
    kernels = REGISTRY.candidates(call.operation.name)
    judged = legality.judge(kernels, call, policy, machine, ENGINE.health, ENGINE.ledger)
    frozen = ENGINE.frozen
    ranked = score.rank(judged, call, policy, ENGINE.ledger if frozen is None else NO_TIMES)
    report = pick(ranked, Routed(call.operation, {}, call.layout), call, policy, REGISTRY.lock_for(policy, call))
    return report if frozen is None else frozen.held(report, policy)


def _state(arguments: Mapping[str, Any], policy: Any, dispatcher: Dispatcher, capturing: bool) -> CallState:
    from layerzero.engine.state import call_state

    state = call_state(dispatcher.tensors(arguments), policy, dispatcher.function.state)
    return msgspec.structs.replace(state, capturing=capturing)


def question(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Dispatcher, dict[str, Any], str]:
    """The dispatcher, bound arguments and wanted operation of a question."""
    operation = name
    if name in OPERATION_ALIASES:
        operations, implied = OPERATION_ALIASES[name]
        operation, kwargs = operations[0], {**implied, **kwargs}
    function = FUNCTIONS.get(name) or function_of(operation)
    if function is None:
        known = [*FUNCTIONS, *REGISTRY.operations(), *OPERATION_ALIASES]
        raise KeyError(f"unknown operation {name!r}{nearest(name, known)}")
    call = CALLS[function.name]
    return call.dispatcher, call.function.bind(args, kwargs), name


def check_operation(wanted: str, report: Report) -> None:
    """Raise InvalidCallError where a call is not one of the operation that its question named."""
    if wanted not in FUNCTIONS and not covers(wanted, report.facts):
        problem = f"these arguments are a call of {report.operation}, wanted {wanted}"
        raise InvalidCallError(wanted, [problem])


def _function_of(kernel: Kernel) -> str:
    for operation in kernel.operations:
        function = function_of(operation)
        if function is not None:
            return function.name
    raise KeyError(f"{kernel.id} belongs to no public function; its operations: {', '.join(kernel.operations)}")


@contextmanager
def _quiet_layouts() -> Iterator[None]:
    """A question is no call: the report's note says that the layout was assumed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LayerZeroLayoutWarning)
        yield


@dataclass(frozen=True, slots=True)
class LibraryFinding:
    """One library as doctor sees it: name, version if installed, why it is not used, if so, how well it is known."""

    name: str
    summary: str
    version: str | None
    kernels: int
    reason: Reason | None
    status: compatibility.Status | None = None

    @property
    def known(self) -> str:
        """What is known of the version, to be put behind another word."""
        return f", {self.status}" if self.status is not None else ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What doctor found.

    Attributes:
        versions: of python, torch, layerzero and the system.
        devices: devices that torch sees here.
        libraries: every library that LayerZero knows.
        resting: kernels that failed and rest, with the error.
        health: failures and fallbacks of each kernel that failed in this process.
        failures: errors of this process and of earlier ones, the latest of each kernel.
        suspects: kernels that may have killed a process, and those that a child process found guilty.
        plugin_errors: plugins that failed to load, or were left out, and why.
        descriptors: capability descriptors in force, as ``LoadedDescriptor.to_dict`` gives them.
        issues: what to do, most important first.
    """

    versions: dict[str, str]
    devices: tuple[Device, ...]
    libraries: tuple[LibraryFinding, ...]
    resting: dict[str, str]
    plugin_errors: dict[str, str]
    descriptors: tuple[dict[str, object], ...]
    issues: tuple[str, ...]
    health: dict[str, Counts] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    suspects: tuple[Suspect, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "versions": self.versions,
            "devices": [{"platform": d.platform, "name": d.name, "sm": d.sm_number} for d in self.devices],
            "libraries": [
                {
                    "name": each.name,
                    "version": each.version,
                    "kernels": each.kernels,
                    "status": each.status and str(each.status),
                    "usable": each.reason is None,
                    "reason": str(each.reason.code) if each.reason else None,
                    "message": each.reason.message if each.reason else None,
                }
                for each in self.libraries
            ],
            "resting": self.resting,
            "health": {name: asdict(counts) for name, counts in self.health.items()},
            "failures": self.failures,
            "suspects": [suspect.to_dict() for suspect in self.suspects],
            "plugin_errors": self.plugin_errors,
            "descriptors": list(self.descriptors),
            "issues": list(self.issues),
        }

    def health_lines(self) -> list[str]:
        """What failed, a line for each kernel and operation."""
        lines = [
            f"{name}: {counts.failures} failures in this process, {counts.fallbacks} times another kernel ran instead"
            for name, counts in self.health.items()
        ]
        earlier = [name for name in self.failures if name not in self.health]
        return lines + [f"{name}: failed in an earlier process, last: {self.failures[name]}" for name in earlier]

    def __str__(self) -> str:
        lines = [", ".join(f"{name} {version}" for name, version in self.versions.items())]
        lines += [f"device {device.platform}:{device.index} {device.name}" for device in self.devices]
        for library in self.libraries:
            state = f"usable{library.known}" if library.reason is None else str(library.reason)
            lines.append(f"  {library.name} {library.version or ''}: {state}")
        lines += [f"  resting: {kernel}: {error}" for kernel, error in self.resting.items()]
        lines += [f"  {line}" for line in self.health_lines()]
        lines += [f"  plugin {name}: {error}" for name, error in self.plugin_errors.items()]
        lines += [f"  descriptor {each['name']} (sha256 {each['sha256']})" for each in self.descriptors]
        lines += [f"issue: {issue}" for issue in self.issues] or ["no issues found"]
        return "\n".join(lines)


def doctor(*, load: bool = False) -> Diagnosis:
    """Diagnose this machine: devices, libraries and why each unusable one is unusable, kernels that rest, issues.

    Args:
        load: also load every usable library's kernels, so that a broken installation shows now and not in a call.
    """
    devices = [Device.detect("cpu")]
    if torch.cuda.is_available():
        devices += [Device.detect(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    best = devices[-1]
    if load:
        _load_everything(best)
    libraries = []
    for backend in REGISTRY.backends():
        if backend.name in ("reference", "user"):
            continue
        device = next((each for each in reversed(devices) if each.platform in backend.platforms), best)
        state = probe.this_machine().state(backend, device)
        reason = state.reason
        if device.platform not in backend.platforms:  # whatever else is wrong with it does not matter here
            reason = Reason(ReasonCode.PLATFORM_MISMATCH, "platform", " or ".join(backend.platforms), device.platform)
        kernels = [kernel for kernel in REGISTRY.kernels() if kernel.backend == backend]
        name = backend.name if backend.distributions in ((), ("",)) else f"{backend.name} ({backend.distributions[0]})"
        known = compatibility.status(backend, state.version) if state.version else None
        known = compatibility.Status.UNVETTED if reason is None and awaits_vetting(kernels, device) else known
        libraries.append(LibraryFinding(name, backend.summary, state.version or None, len(kernels), reason, known))
    health, ledger = ENGINE.health, ENGINE.ledger
    resting = {f"{kernel} in {operation}": b.error for (kernel, operation), b in health.breakers().items()}
    resting |= health.disabled()
    suspects, failed = ledger.suspects(), dict(REGISTRY.plugins.told() if REGISTRY.plugins else {})
    return Diagnosis(
        versions=_versions(),
        devices=tuple(devices),
        libraries=tuple(libraries),
        resting=resting,
        plugin_errors=failed,
        descriptors=tuple(each.to_dict() for each in DESCRIPTORS.in_force()),
        issues=(
            *_issues(libraries, devices, resting),
            *REGISTRY.names.problems(CONFIGURATION.policy),
            *(f"plugin {name} was not loaded: {error}; mend or uninstall it" for name, error in failed.items()),
            *compatibility.conflicts(REGISTRY.backends()),
            *_accused(suspects),
            *ledger.notes(),
        ),
        health={f"{kernel} in {operation}": counts for (kernel, operation), counts in health.counts().items()},
        failures={f"{kernel} in {operation}": e[-1] for (kernel, operation), e in ledger.failures().items()},
        suspects=suspects,
    )


def _versions() -> dict[str, str]:
    from layerzero import __version__

    return {
        "layerzero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "hit path": f"Python ({accelerator.ABSENT})" if accelerator.HOT is None else f"C, {accelerator.HOT.reader()}",
        "choices": "free" if ENGINE.frozen is None else f"frozen for {len(ENGINE.frozen.choices)} classes of calls",
    } | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _issues(libraries: list[LibraryFinding], devices: list[Device], resting: dict[str, str]) -> Iterator[str]:
    for library in libraries:
        if library.reason is None:
            continue
        if library.reason.code in (ReasonCode.BACKEND_IMPORT_FAILED, ReasonCode.VERSION_UNSUPPORTED):
            yield f"{library.name}: {library.reason.message}"
    yield from (f"{kernel} failed and rests: {error}" for kernel, error in resting.items())
    usable = [library for library in libraries if library.reason is None and not library.name.startswith("torch")]
    if not usable:
        more = "pip install layerzero[cpu]" if devices[-1].platform == "cpu" else "pip install flash-attn"
        yield f"only torch's own kernels are usable on {devices[-1].name}; `{more}` adds others"
    if not CONFIGURATION.policy.enabled:
        yield "LayerZero is disabled (enabled: false); only torch's own kernels run"


def _import(backend: Backend) -> None:
    if backend.import_name:
        try:
            importlib.import_module(backend.import_name)
        except Exception as error:  # noqa: BLE001  # any failure to load is what this looks for
            probe.mark_broken(backend, error)


def _accused(suspects: Iterable[Suspect]) -> Iterator[str]:
    for suspect in suspects:
        if suspect.verdict is None:
            yield f"{suspect}; it is refused until `layerzero doctor --confirm` has run it in a child process"
        else:
            way_out = "until its version changes, or `layerzero doctor --confirm --again` clears it"
            yield f"{suspect}; it is refused {way_out}"


def _load_everything(device: Device) -> None:
    """Load one kernel of every usable library on small calls; what fails is marked broken."""
    machine = probe.this_machine()
    for kernel in REGISTRY.kernels():
        if machine.state(kernel.backend, device).reason is not None:
            continue
        if kernel.jit:  # compiling takes long; importing shows what is broken
            _import(kernel.backend)
            continue
        for call in example_calls(kernel, device):
            try:
                kernel.load(call)
            except Exception as error:  # noqa: BLE001  # any failure to load is what this looks for
                probe.mark_broken(kernel.backend, error)
            break
