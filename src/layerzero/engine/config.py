"""Where settings come from: defaults, YAML, environment, ``lz.configure``, scopes.

Later wins, and each effective value knows its origin.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from layerzero.core.errors import PolicyError
from layerzero.core.system import forking, memory
from layerzero.engine.policy import Policy, narrowest_last, parse_policy
from layerzero.engine.scopes import Scopes
from layerzero.engine.settings import ALIASES, DECIDE_NOTHING, ENVIRONMENT, PREFIX, SETTINGS, checked, nearest

_FLAGS = {"DISABLED": ("enabled", False), "VERBOSE": ("log_selections", True)}
_LISTS = {"PREFER": "prefer_sources", "AVOID": "avoid_sources", "ALLOW": "allow", "DENY": "deny"}
_PATHS = {"DESCRIPTORS": "descriptors"}
_HUB = {f"HUB_{name}": f"hub.{name.lower()}" for name in ("ENABLED", "FOLDER", "LOCKFILE", "ALLOW")}
_ELSEWHERE = frozenset({"CACHE_DIR", "CONFIG", "NATIVE", "VLLM_OPERATORS"})
"""Variables with a meaning of their own: where files are kept, the configuration file, whether C finds plans, and which
layers of vLLM are replaced before LayerZero is imported there."""

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})

_MAX_POLICIES = 256


class Configuration:
    """The layers of settings of this process and the policies that follow from them.

    Attributes:
        policy: the policy of code outside every scope.
        forced: what an operator forced from outside, above all that the program sets.
    """

    policy: Policy

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._lock = forking.rlock()
        self._environment = os.environ if environment is None else environment
        self._file: tuple[str, dict[str, Any]] = ("file", {})
        self._configured: dict[str, Any] = {}
        self.forced: dict[str, Any] = {}
        self._environment_values: dict[str, Any] | None = None
        self._interned: dict[Policy, Policy] = {}
        self._layers_of: WeakKeyDictionary[Policy, tuple[Mapping[str, Any], ...]] = WeakKeyDictionary()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change of the process-wide settings."""
        self._listeners.append(listener)

    def __getattr__(self, name: str) -> Any:
        """Make :attr:`policy` when it is first read; from then on it is a plain attribute, which misses read."""
        if name != "policy":
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return self._rebuild()

    def _rebuild(self) -> Policy:
        with self._lock:
            self.policy = self.effective()
            return self.policy

    def layers(self) -> list[tuple[str, dict[str, Any]]]:
        """Origin and values of each layer, weakest first. Reads the environment and its file once."""
        with self._lock:
            if self._environment_values is None:
                self._read_environment()
            defaults = {name: setting.default for name, setting in SETTINGS.items()}
            assert self._environment_values is not None
            return [
                ("default", defaults),
                self._file,
                (ENVIRONMENT, self._environment_values),
                ("configure", self._configured),
            ]

    def effective(self, *scopes: Mapping[str, Any]) -> Policy:
        """Merge all layers and the given scopes into one interned policy."""
        merged = {name: value for name, (value, _) in self.effective_with_origin(*scopes).items()}
        policy = parse_policy(merged)
        with self._lock:
            if len(self._interned) >= _MAX_POLICIES and policy not in self._interned:
                self._interned.clear()  # scopes with ever new settings: equal policies are made again, nothing breaks
            policy = self._interned.setdefault(policy, policy)
            if scopes:
                self._layers_of[policy] = scopes
            return policy

    def layers_of(self, policy: Policy) -> tuple[Mapping[str, Any], ...]:
        """The settings of the scopes that made a policy, outermost first; none of the process-wide one."""
        return self._layers_of.get(policy, ())

    def effective_with_origin(self, *scopes: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Every setting's effective value and where it comes from; what adds up comes from several places."""
        merged: dict[str, tuple[Any, str]] = {}
        above = [*(("scope", dict(scope)) for scope in scopes), ("forced", self.forced)]
        for origin, values in [*self.layers(), *above]:
            for name, value in values.items():
                if name == "locks" and name in merged:  # locks add up; the same operation is overridden
                    earlier = {key: lock for key, lock in merged[name][0].items() if key not in value}
                    before = merged[name][1] if earlier else ""
                    later = value if origin == "configure" else narrowest_last(value)  # lz.lock: calls have an order
                    merged[name] = ({**earlier, **later}, _joined(before, origin) if value else merged[name][1])
                elif name in _LISTS.values() and origin == "scope":  # a scope adds to what holds outside it
                    before = merged[name][1] if merged[name][0] else ""
                    merged[name] = ([*merged[name][0], *value], _joined(before, origin))
                else:
                    merged[name] = (value, origin)
        return merged

    def said_by(self, key: str, name: str, *scopes: Mapping[str, Any]) -> str:
        """What gave a setting the name that it has in it, for messages: a file and its key, a variable, a call."""
        for origin, values in reversed([*self.layers(), *(("scope", dict(scope)) for scope in scopes)]):
            if key not in values or (key != "rules" and name not in values[key]):
                continue
            if origin != "environment":
                return f"{origin}: {key}"
            variables = [each for each in self._environment if each.startswith(PREFIX)]
            settings = ((each, environment_settings({each: self._environment[each]})) for each in variables)
            return f"environment: {next((each for each, has in settings if name in has.get(key, ())), key)}"
        return key

    def configure(self, **values: Any) -> None:
        """Set process-wide values; None resets a key that has no None of its own."""
        given = {name: value for name, value in values.items() if value is not None or name == "layout"}
        reset = {ALIASES.get(name, name) for name in values if name not in given}
        settings = checked(given, "configure")
        for name in sorted(reset - set(SETTINGS)):
            raise PolicyError(f"configure: unknown key {name!r}{nearest(name, SETTINGS)}")
        if "locks" in settings:
            settings["locks"] = narrowest_last(settings["locks"])
        with self._lock:
            self._set({k: v for k, v in (self._configured | settings).items() if k not in reset})

    def _set(self, configured: dict[str, Any]) -> None:
        before, self._configured = self._configured, configured
        self._changed(lambda: setattr(self, "_configured", before))

    def force(self, **values: Any) -> None:
        """Let values hold above all that is configured and all scopes, until others are forced, or none."""
        settings = checked(values, "forced")
        with self._lock:
            before, self.forced = self.forced, settings
            self._changed(lambda: setattr(self, "forced", before))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a YAML file in place of the one loaded before.

        Raises: PolicyError naming file, key, wanted and got.
        """
        values = read_yaml(path)
        with self._lock:
            before = self._file
            self._file = (str(path), values)
            self._changed(lambda: setattr(self, "_file", before))

    def reset(self) -> None:
        """Forget the file and everything configured, and read the environment anew."""
        with self._lock:
            self._file, self._configured, self._environment_values = ("file", {}), {}, None
            self.forced = {}
            self._changed(lambda: None)

    def lock(self, operation: str, kernel: str, otherwise: str = "error") -> None:
        """Bind an operation to a kernel, above all that was locked before."""
        with self._lock:
            locks = dict(self._configured.get("locks", {}))
            locks.pop(operation, None)  # the latest lock comes last
            self._set(self._configured | {"locks": locks | {operation: {"kernel": kernel, "otherwise": otherwise}}})

    def unlock(self, operation: str) -> None:
        """Remove a lock that ``lock`` made.

        Raises: PolicyError if there is none, naming where the operation is locked instead.
        """
        with self._lock:
            locks = dict(self._configured.get("locks", {}))
            if operation not in locks:
                _, origin = self.effective_with_origin()["locks"]
                held = ", ".join(locks) or f"none by lz.lock (locks in force come from: {origin})"
                raise PolicyError(f"unlock: {operation!r} is not locked; locked: {held}{nearest(operation, locks)}")
            del locks[operation]
            self._set(self._configured | {"locks": locks})

    def _changed(self, undo: Callable[[], None]) -> None:
        try:
            self._rebuild()
        except PolicyError:
            undo()
            raise
        for listener in self._listeners:
            listener()

    def _read_environment(self) -> None:
        config = self._environment.get(f"{PREFIX}CONFIG")
        if config and not self._file[1]:
            try:
                self._file = (config, read_yaml(config))
            except PolicyError as error:
                raise PolicyError(*(f"{PREFIX}CONFIG: {problem}" for problem in error.problems)) from error
        self._environment_values = _checked_variables(self._environment)


def _joined(before: str, origin: str) -> str:
    """Where a setting comes from to which two places gave something."""
    if not before:
        return origin
    return before if origin in before.split(", ")[-1:] else f"{before}, {origin}"


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a YAML file. Raises: PolicyError with everything that is wrong with its keys and values."""
    return checked(plain_yaml(path), str(path))


def plain_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises: PolicyError for what is no such file."""
    import yaml  # most processes read no file

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            """Read a mapping. Raises: YAMLError for a key that comes twice: the first one would be dropped."""
            node, keys = super().compose_mapping_node(anchor), set[object]()
            for key, _ in node.value:
                if (key.tag, str(key.value)) in keys and key.tag != "tag:yaml.org,2002:merge":
                    got = f"{self.construct_object(key, deep=True)!r} twice; keep one of them"
                    raise yaml.composer.ComposerError(None, None, f"wanted every key once, got {got}", key.start_mark)
                keys.add((key.tag, str(key.value)))
            return node

    try:
        values = Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise PolicyError(f"{path}: wanted a file of settings, got: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no UTF-8, a date that is none, endless nesting
        raise PolicyError(f"{path}: not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise PolicyError(f"{path}: wanted keys and values, got {type(values).__name__}")
    return values


def environment_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Translate ``LAYERZERO_*`` variables into settings.

    Raises: PolicyError for a variable that means nothing, naming the nearest one.
    """
    values: dict[str, Any] = {}
    for variable in sorted(each for each in environment if each.startswith(PREFIX)):
        text, name = environment[variable], variable.removeprefix(PREFIX)
        if name in _ELSEWHERE:
            continue
        if name in _FLAGS:
            key, when_set = _FLAGS[name]
            values[key] = when_set if _boolean(variable, text) else not when_set
        elif name in _LISTS:
            values[_LISTS[name]] = [item.strip() for item in text.split(",") if item.strip()]
        elif name == "PLUGINS":
            names = [item.strip() for item in text.split(",") if item.strip()]
            values["plugins"] = names[0] if names in (["all"], ["none"]) else names or "none"
        elif name in _HUB:
            kind = SETTINGS[_HUB[name]].kind
            items = [item.strip() for item in text.split(",") if item.strip()]
            values[_HUB[name]] = items if kind == list[str] else _scalar(variable, text, kind) if text else None
        elif name in _PATHS:
            values[_PATHS[name]] = [item for item in text.split(os.pathsep) if item]
        elif name == "LOCK":
            values.setdefault("locks", {}).update(_locks(variable, text))
        elif name.startswith("LOCK_"):
            values.setdefault("locks", {})[name.removeprefix("LOCK_").lower()] = text
        else:
            key = name.lower()
            if key not in SETTINGS:
                raise PolicyError(f"environment: {variable} means nothing{nearest(variable, known_variables())}")
            values[key] = _scalar(variable, text, SETTINGS[key].kind)
    return values


def _checked_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """What all variables set. Raises: PolicyError that names the variable, in place of the key that it sets."""
    values, first = environment_settings(environment), dict[str, tuple[str, Any]]()
    for variable in sorted(each for each in environment if each.startswith(PREFIX)):
        for name, value in environment_settings({variable: environment[variable]}).items():
            other, before = first.setdefault(name, (variable, value))
            if name != "locks" and other != variable and before != value:
                got = f"got {before!r} and {value!r}; unset one"
                raise PolicyError(f"environment: {other} and {variable}: wanted one value of {name}, {got}")
            try:
                checked({name: value}, "")
            except PolicyError as error:
                said = str(error).removeprefix(f": {name}: ")
                raise PolicyError(f"environment: {variable}: {said}") from None
    return checked(values, ENVIRONMENT)


def known_variables() -> list[str]:
    """Every environment variable that LayerZero reads, except ``LAYERZERO_LOCK_<OPERATION>``."""
    settings = [
        name.upper() for name, setting in SETTINGS.items() if setting.kind in (bool, int, float, str, str | None)
    ]
    return [
        PREFIX + name
        for name in (*settings, *_FLAGS, *_LISTS, *_PATHS, *_HUB, "PLUGINS", "LOCK", *sorted(_ELSEWHERE))
        if "." not in name
    ]


def _boolean(variable: str, text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise PolicyError(f"environment: {variable}: wanted 1 or 0, got {text!r}")


def _locks(variable: str, text: str) -> dict[str, str]:
    locks = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        operation, equals, kernel = item.partition("=")
        if not equals or not kernel:
            raise PolicyError(f"environment: {variable}: wanted operation=kernel, got {item!r}")
        locks[operation.strip()] = kernel.strip()
    return locks


def _scalar(variable: str, text: str, kind: Any) -> Any:
    if kind is bool:
        return _boolean(variable, text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "an integer" if kind is int else "a number"
            raise PolicyError(f"environment: {variable}: wanted {wanted}, got {text!r}") from None
    if kind in (str, str | None):
        return text
    raise PolicyError(f"environment: {variable}: set this key in a file or with lz.configure, got {text!r}")


CONFIGURATION = Configuration()
"""The settings of this process."""

SCOPES = Scopes(CONFIGURATION)
"""The scopes of this process."""


def current_policy() -> Policy:
    """The policy that holds here and now."""
    return SCOPES.policy() if SCOPES.active else CONFIGURATION.policy


def told_of(policy: Policy) -> str:
    """As JSON, the settings that decide something and are not at their defaults, locks and rules, behind its hash."""
    deciding = {name: each for name, each in unusual(policy).items() if name not in DECIDE_NOTHING}
    text = msgspec.json.encode(deciding, order="deterministic")
    return f"{hashlib.sha256(text).hexdigest()[:12]} {text.decode()}"


def unusual(policy: Policy) -> dict[str, str]:
    """The settings that are not at their defaults, locks and rules, as text."""
    values = {key: repr(value) for key, value in policy.values if not _is_default(key, value)}
    return values | {name: repr(each) for name, each in (("locks", policy.locks), ("rules", policy.rules)) if each}


def _is_default(key: str, value: object) -> bool:
    if key not in SETTINGS:
        return False
    default = SETTINGS[key].default
    return value == (tuple(default) if isinstance(default, (list, dict)) else default)


def unlike(wanted: str, here: str) -> list[str]:
    """Which settings differ, by what :func:`told_of` said of them."""
    (first, _, theirs), (second, _, mine) = wanted.partition(" "), here.partition(" ")
    if first == second:
        return []
    try:
        known, ours = (msgspec.json.decode(each, type=dict[str, str]) for each in (theirs, mine))
    except msgspec.MsgspecError as error:
        return [f"settings: wanted {here}, got {wanted!r}: {error}"]
    keys = [key for key in sorted({*known, *ours}) if known.get(key) != ours.get(key)]
    default = "its default"
    found = [f"settings: {key}: wanted {known.get(key, default)}, got {ours.get(key, default)}" for key in keys]
    return found or [f"settings: wanted {first}, got {second}; defaults differ"]


def digest_of(policy: Policy) -> str:
    """A short hash of effective settings, locks and rules."""
    return hashlib.sha256(repr((policy.values, policy.locks, policy.rules)).encode()).hexdigest()[:12]


memory.wanted = lambda: bool(current_policy()["memory.large_pages"])
