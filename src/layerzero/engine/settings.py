"""Every setting: its type, default and meaning, in one table that validation, documentation and the CLI share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from layerzero.core import cpu_features, device
from layerzero.core.arguments import told
from layerzero.core.errors import PolicyError, did_you_mean
from layerzero.engine import probe
from layerzero.ops import FORMER_NAMES, FUNCTIONS
from layerzero.ops.quantize.conversion import PRIORITIES, profiled

PREFIX, ENVIRONMENT = "LAYERZERO_", "environment"

_ASKING = [
    function
    for function in FUNCTIONS.values()
    if any(each.name == "layout" and each.default is None for each in function.parameters)
]
_LAYOUTS = tuple(dict.fromkeys(layout for function in _ASKING for layout in function.operations[0].layouts))
"""Layouts of the functions whose calls need not name one."""

_OF_ASKING = " or ".join(function.name for function in _ASKING)


def _path(text: str) -> None:
    if "\0" in text:
        raise PolicyError(f"wanted the path of a file, got {text!r}, which has a NUL")


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration.

    Attributes:
        kind: its type, checked strictly.
        default: its value where it is not set.
        meaning: one line for the documentation.
        choices: allowed values, any of the type if empty.
        words: allowed texts of a key that is a list otherwise.
        most: the largest value of a number, if it has one.
        least: the smallest one.
        above: a number that a value must be more than, if there is one.
        scoped: whether a ``with`` block may set it; what changes the kernels themselves holds for the process.
        at_start: whether only its environment variable sets it, read once: it holds from the start of the process.
        fits: raises PolicyError for a value that does not fit this machine.
    """

    kind: Any
    default: Any
    meaning: str
    choices: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()
    scoped: bool = True
    at_start: bool = False
    fits: Callable[[Any], object] | None = None
    most: float | None = None
    least: float = 0
    above: float | None = None


SETTINGS: dict[str, Setting] = {
    "version": Setting(int, 1, "version of this file format", (1,)),
    "enabled": Setting(bool, True, "false: only torch's own kernels and the references run"),
    "fallback_enabled": Setting(bool, True, "false: the slow reference is refused and a failing kernel raises"),
    "log_selections": Setting(
        bool, False, "say every new choice: log it at INFO, or, without a handler for that, on the error stream"
    ),
    "strict_mode": Setting(bool, False, "refuse adaptations that move data"),
    "allow_adaptation": Setting(bool, True, "allow copies and operations' own adaptations where a kernel needs them"),
    "allow_jit_compile": Setting(bool, False, "allow kernels to compile during a call"),
    "jit": Setting(
        str,
        "background",
        "what a call would choose if it were built is built in the background, inline (in the call), or never",
        ("background", "inline", "never"),
    ),
    "deterministic": Setting(bool, False, "choose only kernels that give the same bits each time"),
    "batch_invariant": Setting(
        bool, False, "choose only kernels that give a row the same bits alone and in every batch, by priority"
    ),
    "require_tp_invariant": Setting(
        bool, False, "choose only kernels whose results have the same bits for every number of ranks, by priority"
    ),
    "max_error": Setting(
        float,
        0.0,
        "where times decide, refuse kernels with a larger measured error, relative to the reference. Torch's own is "
        "never refused; where it may run, kernels of unknown error are. 0 refuses none",
    ),
    "require_vetting": Setting(bool, True, "refuse plugin kernels that were not vetted on this machine"),
    "graph_strict_mode": Setting(
        bool,
        False,
        "in the capture of a CUDA graph, refuse kernels whose captures were not proved here. `layerzero vet --graph` "
        "proves them, and so does lz.warmup where this is set",
    ),
    "vet_in_background": Setting(
        bool, False, "vet, in a child process, what a call would have liked to choose; the next choice may take it"
    ),
    "sampling_rate": Setting(
        float,
        0.0,
        "share of calls that are timed, to tell where the database has aged; 0.01 is plenty",
        most=1.0,
        scoped=False,
    ),
    "telemetry_sampling_rate": Setting(
        float,
        1.0,
        "share of choices that listeners (`lz.on_event`, OpenTelemetry, JSON lines) get; failures, fallbacks, "
        "departures and builds they get all, and counters count all",
        most=1.0,
        scoped=False,
    ),
    "debug": Setting(
        bool,
        False,
        "check places, counts and promises on any device before a call, by one read, and synchronise after it, so that "
        "errors surface where they arise. Captures skip this",
    ),
    "layout": Setting(str | None, None, f"layout where a call of {_OF_ASKING} names none", (None, *_LAYOUTS)),
    "memory_headroom_mb": Setting(
        int,
        1024,
        "largest workspace of a kernel in MiB. Where all need more, the one that needs least runs with a warning, "
        "unless fallback_enabled is false",
    ),
    "memory.safety_factor": Setting(
        float, 1.2, "a kernel's workspace and results must be free so many times when a call is chosen for", least=1.0
    ),
    "memory.block_share": Setting(
        float, 0.8, "the share of the largest free block that a workspace may take", most=1.0, above=0.0
    ),
    "memory.max_age_s": Setting(float, 60.0, "how old a reading of free memory may be in a choice; hits read nothing"),
    "memory.fragmentation": Setting(
        float,
        0.5,
        "share of a device's free memory out of reach of one request, above which it is reported and lz.defragment() "
        "gives the allocator's cache back",
        most=1.0,
    ),
    "memory.large_pages": Setting(
        bool,
        True,
        "on a CPU, weights that lz.optimize finds and packed forms get pages of 2 MiB from Linux, which are faster to "
        "stream. The system takes 1 to 4 s for a GB",
    ),
    "prefer_sources": Setting(list[str], [], "libraries or kernel globs that earn 20 points"),
    "avoid_sources": Setting(list[str], [], "libraries or kernel globs that lose 50 points"),
    "allow": Setting(list[str], [], "if not empty: only these libraries or kernel globs, and the reference"),
    "deny": Setting(list[str], [], "libraries or kernel globs that never run"),
    "plugins": Setting(
        list[str] | str,
        "all",
        "plugins (entry points) that may be imported: all, none, or their names",
        words=("all", "none"),
        scoped=False,
    ),
    "hub.enabled": Setting(
        bool, False, "find kernels of the Hugging Face hub on this disk; nothing is downloaded", scoped=False
    ),
    "hub.folder": Setting(
        str | None, None, "where they are looked for; the cache that `kernels download` fills", scoped=False, fits=_path
    ),
    "hub.lockfile": Setting(
        str | None, None, "pins them by commit and hash: what `layerzero hub --lock` wrote", scoped=False, fits=_path
    ),
    "hub.allow": Setting(
        list[str], ["kernels-community/*"], "repositories of the hub that may be imported: names or globs", scoped=False
    ),
    "locks": Setting(dict[str, Any], {}, "operation to kernel: skips scoring, never legality"),
    "unmeasured": Setting(
        str,
        "stock",
        "the choice where nothing was measured: what torch's own function runs (stock), or the static order (priority)",
        ("stock", "priority"),
    ),
    "rules": Setting(list[dict[str, Any]], [], "preferences that hold where facts match"),
    "descriptors": Setting(list[str], [], "JSON files of capability descriptors that narrow kernels", scoped=False),
    "cpu_features": Setting(
        str | None,
        None,
        "features of this CPU that kernels may count on, as `avx2` or `avx512,avx_vnni`; the others count as absent "
        "(see below)",
        scoped=False,
        at_start=True,
        fits=lambda text: cpu_features.limited(device.cpu_of_this_machine().instruction_sets, text),
    ),
    "gpu_generations": Setting(
        str | None,
        None,
        "names and tensor core generations of NVIDIA's compute capabilities, besides the known ones: "
        "`rubin=13.0-13.9:6`",
        scoped=False,
        at_start=True,
        fits=lambda text: device.generations_of(text or ""),
    ),
    "quant.fallback": Setting(
        str,
        "requested",
        "weights that lz.optimize gives another format, where no fast kernel takes theirs: none, those that you ask "
        "for, or also those that a model holds quantised, which lose again",
        ("never", "requested", "held"),
    ),
    "quant.priority": Setting(
        str, "balanced", "what lz.optimize prefers among formats of weights (docs/quantizing.md)", PRIORITIES
    ),
    "quant.profile": Setting(
        dict[str, Any], {}, "format to what a model loses in it, as `mxfp4: 0.05`: counts before ranks", fits=profiled
    ),
    "cache.enabled": Setting(bool, True, "keep plans; false chooses anew on each call"),
    "cache.max_size": Setting(int, 10_000, "plans kept for each policy"),
    "builds.max_waiting": Setting(
        int, 1000, "calls that wait for builds in the background; of more the oldest are dropped", least=1, scoped=False
    ),
    "manifest.stale_days": Setting(
        float, 7.0, "age from which a recorded workload is used with a warning: programs change", scoped=False
    ),
    "explain_enabled": Setting(bool, True, "explanations are always there and cost calls nothing", (True,)),
    "plan_mode": Setting(
        bool, False, "lz.solve chooses kernels of calls that follow each other together, by runs of the model"
    ),
    "backend_isolation": Setting(
        str,
        "in_process",
        "process of the kernels that `isolate` names: this one, a child of each library, or a container of its image",
        ("in_process", "subprocess", "container"),
    ),
    "isolate": Setting(
        list[str], [], "libraries or kernel globs that run in processes of their own, where backend_isolation says so"
    ),
    "isolation.pythons": Setting(
        dict[str, Any],
        {},
        "library to the interpreter of an environment of its own, which has LayerZero, too; it is isolated by that, "
        "whatever backend_isolation is",
        fits=probe.pythons,
    ),
    "backend_containers": Setting(
        dict[str, Any],
        {},
        "library to its container, `{image: name:tag, memory: 8g}`, where backend_isolation is container",
        fits=probe.containers,
    ),
    "isolation.timeout_s": Setting(
        float, 60.0, "how long a call may take in a process of its own before that process is killed", above=0.0
    ),
    "isolation.memory_mb": Setting(
        int, 1024, "most memory, in MiB, that one such process shares with this one; it is taken as it is used", least=1
    ),
    "perfdb.enabled": Setting(bool, True, "read and keep measured times on disk", scoped=False),
    "perfdb.path": Setting(
        str | None, None, "file of the measured times; perfdb.sqlite in the cache folder", scoped=False, fits=_path
    ),
    "auto_tune_on_warmup": Setting(bool, False, "lz.warmup also measures what it builds, as lz.tune does"),
    "tune_samples": Setting(int, 20, "samples that lz.tune takes of each kernel", least=3),
    "distributed_selection": Setting(
        str,
        "independent",
        "how ranks of torch.distributed choose. With agree, the lowest rank's kernels count where lz.warmup, lz.tune "
        "and lz.optimize end. With rank0_broadcast, rank 0's choices alone count",
        ("independent", "agree", "rank0_broadcast"),
        scoped=False,
    ),
    "on_version_mismatch": Setting(
        str,
        "error",
        "what ranks with other versions or kernels do: raise, run torch's own kernels and references (fallback), or "
        "agree among those of one version (best_effort)",
        ("error", "fallback", "best_effort"),
        scoped=False,
    ),
}

DECIDE_NOTHING = frozenset({
    *("log_selections", "explain_enabled", "sampling_rate", "vet_in_background", "tune_samples", "auto_tune_on_warmup"),
    *("plan_mode", "cache.enabled", "cache.max_size", "perfdb.enabled", "perfdb.path", "telemetry_sampling_rate"),
    *("isolation.timeout_s", "builds.max_waiting", "manifest.stale_days"),
    *("memory.safety_factor", "memory.block_share", "memory.max_age_s", "memory.fragmentation", "memory.large_pages"),
})  # fmt: skip
"""Settings that ranks which agree may have otherwise than the others: what they choose among is the same.

What one of them has free decides nothing then.
"""

ALIASES = {
    "isolation_mode": "backend_isolation",
    "avoid": "avoid_sources",
    "prefer": "prefer_sources",
    "distributed.selection_mode": "distributed_selection",
    "distributed.on_version_mismatch": "on_version_mismatch",
    "perfdb.auto_tune": "auto_tune_on_warmup",
    "perfdb.tune_samples": "tune_samples",
}
"""Other spellings that are accepted for a key."""

_VALUES = {("distributed_selection", "broadcast"): "rank0_broadcast"}
"""The same of values."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Name the closest known word, as the end of an error message; empty if nothing is close."""
    known = list(known)
    if FORMER_NAMES.get(word) in known:
        return f"; it is {FORMER_NAMES[word]!r} now"
    return did_you_mean(word, known)


def flatten(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Turn nested sections (``cache: {max_size: 1}``) into dotted keys.

    Raises: PolicyError for a section that is none, and for a key that comes twice, by whatever names.
    """
    flat: dict[str, Any] = {}
    sections = {key.split(".")[0] for key in (*SETTINGS, *ALIASES) if "." in key}
    for key, value in values.items():
        nested = key in sections and key not in SETTINGS
        if nested and not isinstance(value, Mapping):
            raise PolicyError(f"{origin}: {key}: wanted a section with keys, got {value!r}")
        for said, each in [(f"{key}.{inner}", each) for inner, each in value.items()] if nested else [(key, value)]:
            name = ALIASES.get(said, said)
            if name in flat:
                raise PolicyError(f"{origin}: {said}: wanted one value of {name}, got two; leave one out")
            flat[name] = each
    return flat


_WANTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list[str]: "a list of texts",
    list[str] | str: "a list of texts, or a text",
    list[dict[str, Any]]: "a list of rules",
    dict[str, Any]: "keys and values",
}
"""Types in words of a YAML file; others are texts."""

_ELSEWHERE: dict[object, str] = {
    "distributed.version_check_interval_s": "; lz.agree(every=n) compares versions at each n-th call.",
    "distributed.verify_selections": "; lz.agree() verifies that each rank can run what was chosen.",
    "rolling_update": "; `layerzero rolling-update --help` has these as options.",
}
"""What the specification has as keys and LayerZero elsewhere."""


def checked(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Flatten and check values against the table. Raises: PolicyError with each unknown key and each wrong value."""
    flat = flatten(values, origin)
    problems = []
    for name, value in flat.items():
        if name not in SETTINGS:
            hint = _ELSEWHERE.get(name) or nearest(str(name), SETTINGS)  # YAML reads 3 and true as no texts
            problems.append(f"{origin}: unknown key {name!r}{hint or '.'} See `layerzero config keys`.")
            continue
        given = list(value) if isinstance(value, tuple) else value
        given = _VALUES.get((name, given), given) if isinstance(given, str) else given
        try:
            flat[name] = msgspec.convert(given, SETTINGS[name].kind, strict=True)
        except msgspec.ValidationError:
            wanted = _WANTED.get(SETTINGS[name].kind, "a text")
            hint = f"; write [{value}]" if SETTINGS[name].kind == list[str] and isinstance(value, str) else ""
            problems.append(f"{origin}: {name}: wanted {wanted}, got {told(value)}{hint}")
            continue
        problem = _problem_of(SETTINGS[name], given)
        if SETTINGS[name].at_start and origin not in ("", ENVIRONMENT):
            problem = f"it holds from the start of the process: set {PREFIX}{name.upper()} before, got {told(value)}"
        if problem:
            problems.append(f"{origin}: {name}: {problem}")
    if problems:
        raise PolicyError(*problems)
    return flat


def _problem_of(setting: Setting, value: Any) -> str:
    """What is wrong with a value of the right type, with wanted and got; empty if nothing is."""
    if setting.choices and value not in setting.choices:
        return f"wanted {' or '.join(repr(choice) for choice in setting.choices)}, got {told(value)}"
    if setting.words and isinstance(value, str) and value not in setting.words:
        return f"wanted {' or '.join(map(repr, setting.words))} or a list of names, got {value!r}"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not value >= setting.least:
        return f"wanted a number of at least {setting.least:g}, got {told(value)}"
    if setting.above is not None and not value > setting.above:
        return f"wanted a number above {setting.above:g}, got {told(value)}"
    if setting.most is not None and value > setting.most:
        return f"wanted a number of at most {setting.most:g}, got {told(value)}"
    if setting.fits is not None and value is not None:
        try:
            setting.fits(value)
        except PolicyError as error:
            return str(error)
    return ""
