"""The effective settings as documents and other ranks get them: those that are not at their defaults, and a hash."""

from __future__ import annotations

import hashlib

import msgspec

from layerzero.engine.policy import Policy
from layerzero.engine.settings import DECIDE_NOTHING, SETTINGS


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
    return value == (tuple(default) if isinstance(default, list) else default)


def unlike(wanted: str, here: str) -> list[str]:
    """Which settings differ, by what :func:`told_of` said of them, or the hash alone in documents of before."""
    (first, _, theirs), (second, _, mine) = wanted.partition(" "), here.partition(" ")
    if first == second:
        return []
    try:
        known, ours = (msgspec.json.decode(each, type=dict[str, str]) for each in (theirs, mine))
    except msgspec.MsgspecError:
        return [f"settings: wanted {first}, got {second}; that document does not say which they were"]
    keys = [key for key in sorted({*known, *ours}) if known.get(key) != ours.get(key)]
    default = "its default"
    found = [f"settings: {key}: wanted {known.get(key, default)}, got {ours.get(key, default)}" for key in keys]
    return found or [f"settings: wanted {first}, got {second}; defaults differ"]


def digest_of(policy: Policy) -> str:
    """A short hash of effective settings, locks and rules."""
    return hashlib.sha256(repr((policy.values, policy.locks, policy.rules)).encode()).hexdigest()[:12]
