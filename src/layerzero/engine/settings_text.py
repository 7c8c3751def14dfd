"""The effective settings as documents and other ranks get them: those that are not at their defaults, and a hash."""

from __future__ import annotations

import hashlib

import msgspec

from layerzero.engine.policy import Policy
from layerzero.engine.settings import SETTINGS


def told_of(policy: Policy) -> str:
    """The hash of effective settings and, as JSON, those that are not at their defaults, locks and rules."""
    return f"{digest_of(policy)} {msgspec.json.encode(unusual(policy), order='deterministic').decode()}"


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
