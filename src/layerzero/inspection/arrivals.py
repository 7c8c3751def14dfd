"""What ranks say of themselves when they come to an agreement, and what follows from it."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.errors import FrozenChoiceError
from layerzero.engine import probe
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Agreed
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import DECIDE_NOTHING
from layerzero.engine.settings_text import unusual
from layerzero.inspection.board import Board
from layerzero.inspection.known_classes import Known, marks_in, marks_of

PROTOCOL = 3
"""Of what ranks tell each other; the highest byte of their words."""


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says of itself when it comes.

    Attributes:
        word: hash of all that ranks need alike to choose alike, in one int64: equal ones need no further look.
        versions: of LayerZero, torch and the libraries, and a hash of the kernels that are registered.
        settings: those that decide something and are not at their defaults.
        device: hash of its processors and what they can do: ranks of one kind agree among themselves.
        named: the same for people.
        changed: whether it would choose anew, since times, settings or kernels changed, or new classes came.
        classes: a mark of each class that it knows (:func:`layerzero.inspection.known_classes.marks_of`).
        held: hash of what it holds by agreement; empty for nothing.
        failed: why it does not take part.
        words: what else it says, of which those that all say count; None for nothing.
    """

    word: int = 0
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}
    device: str = ""
    named: str = ""
    changed: bool = True
    classes: bytes = b""
    held: str = ""
    failed: str = ""
    words: list[str] | None = None


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank runs: its host, a hash of its processors, and the file of its times; a text of its own for none."""

    host: str
    device: str
    times: str


class Verdict(msgspec.Struct, frozen=True):
    """What follows from the arrivals.

    Attributes:
        kind: whether all hold what they held, choose anew, or run the fallback.
        groups: ranks that agree among themselves.
        told: a warning.
        words: what all ranks say.
        choose: what ranks that are not the first of their group choose for: classes that no lower one of it knows.
    """

    kind: Literal["same", "choose", "fallback"]
    groups: list[list[int]]
    told: list[str] = []
    words: list[str] = []
    choose: dict[int, bytes] = {}


def arrival(known: Known, *, changed: bool) -> Arrival:
    """What this rank says."""
    REGISTRY.ready()
    versions, settings, held = versions_here(), settings_here(), ENGINE.frozen
    devices = _devices()
    word = PROTOCOL << 56 | int(_digest([versions, settings])[:14], 16)
    agreed, named = "", "; ".join(name for name, _ in devices)
    if isinstance(held, Agreed) and not held.fallback:
        agreed = held.document.hash
    if changed or not isinstance(held, Agreed):
        marks = known.marks
    else:
        marks = held.marks = held.marks or marks_of(held.choices)
    return Arrival(word, versions, settings, _digest(devices), named, changed, marks, agreed)


def place_of(times: str) -> bytes:
    """What this rank says of where it runs."""
    return msgspec.json.encode(Place(platform.node(), _digest(_devices()), times))


def first_at(said: Sequence[bytes]) -> list[int]:
    """For each rank, the lowest that runs where it does. Raises: FrozenChoiceError where one says something else."""
    try:
        places = [msgspec.json.decode(each, type=Place) for each in said]
    except msgspec.MsgspecError as error:
        raise FrozenChoiceError("agree", [f"wanted all ranks in lz.tune with a budget, or none: {error}"]) from error
    return [places.index(each) for each in places]


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def _devices() -> list[tuple[str, list[str]]]:
    """The processors of this rank: the CPU, and the current device of those that torch has."""
    found = [Device.detect("cpu"), *([Device.detect("cuda")] if torch.cuda.is_available() else [])]
    return [(each.name, sorted(each.instruction_sets)) for each in found]


def versions_here() -> dict[str, str]:
    """What has to be the same where choices shall be alike: LayerZero, torch, libraries, registered kernels."""
    return _versions(ENGINE.epoch)


def settings_here() -> dict[str, str]:
    """The settings that decide something and are not at their defaults."""
    return {name: each for name, each in unusual(CONFIGURATION.policy).items() if name not in DECIDE_NOTHING}


@functools.lru_cache(maxsize=1)
def _versions(epoch: int) -> dict[str, str]:  # kernels and libraries that change start an epoch
    """What has to be the same on ranks that choose alike; LayerZero's by the part whose change may break."""
    from layerzero import __version__

    kernels, machine, cpu = REGISTRY.kernels(), probe.this_machine(), Device.detect("cpu")
    libraries = {each.backend.name: each.backend for each in kernels if each.backend.distribution}
    found = {name: machine.version(backend, cpu) for name, backend in libraries.items()}
    major, minor, *_ = __version__.split(".")
    declared = sorted(f"{each.id} {each.priority} {dict(each.priority_since)}" for each in kernels)
    return {
        "protocol": str(PROTOCOL),
        "layerzero": f"{major}.{minor}" if major == "0" else major,
        "torch": str(torch.__version__),
        **{name: version for name, version in sorted(found.items()) if version},
        "kernels": _digest(declared)[:12],
    }


def arrived(board: Board, said: Sequence[bytes]) -> Verdict:
    """Compare what ranks say of themselves. Raises: FrozenChoiceError for what keeps them from agreeing."""
    ranks = board.ranks
    arrivals: list[Arrival] = []
    problems: list[str] = []
    for rank, text in zip(ranks, said, strict=True):
        try:
            arrivals.append(msgspec.json.decode(text, type=Arrival))
        except msgspec.MsgspecError as error:
            problems.append(f"rank {rank}: wanted what this version says of itself, got {error}")
    problems += [f"rank {rank}: {each.failed}" for rank, each in zip(ranks, arrivals, strict=False) if each.failed]
    said_too = [set(each.words) for each in arrivals if each.words is not None]
    if not problems and 0 < len(said_too) < len(ranks):
        where = ", ".join(str(rank) for rank, each in zip(ranks, arrivals, strict=True) if each.words is not None)
        problems.append(f"wanted all ranks in lz.optimize, or none, got rank{'s' * (len(said_too) > 1)} {where} alone")
    if problems:
        raise FrozenChoiceError("agree", problems)
    common, first = sorted(set.intersection(*said_too)) if said_too else [], arrivals[0]
    others: list[str] = []
    if min(each.word for each in arrivals) != max(each.word for each in arrivals):
        for rank, each in zip(ranks, arrivals, strict=True):
            problems += _unlike(f"rank {rank}: settings: ", first.settings, each.settings, "its default")
            others += _unlike(f"rank {rank}: ", first.versions, each.versions, "none")
    on_mismatch = CONFIGURATION.policy["on_version_mismatch"]
    if problems or (others and on_mismatch == "error"):
        raise FrozenChoiceError("agree", [*problems, *others])
    if others and on_mismatch == "fallback":
        return Verdict("fallback", [], [*others, "all ranks run torch's own kernels and the references"], common)
    kinds: dict[tuple[str, int], list[int]] = defaultdict(list)
    for place, each in enumerate(arrivals):
        kinds[each.device, each.word].append(place)
    groups = list(kinds.values())
    alike = all(arrivals[each].held == arrivals[group[0]].held for group in groups for each in group)
    if alike and not any(each.changed for each in arrivals):
        return Verdict("same", groups, others, common)
    if len(groups) > 1:
        others.append("ranks agree within their kind: " + "; ".join(_kind(board, arrivals, group) for group in groups))
    return Verdict("choose", groups, others, common, _choosing(arrivals, groups))


def _choosing(arrivals: Sequence[Arrival], groups: Sequence[Sequence[int]]) -> dict[int, bytes]:
    """Whose choice counts, where not the first rank's of a group: so that each class is chosen for once."""
    found: dict[int, bytes] = {}
    for first, *others in groups if CONFIGURATION.policy["distributed_selection"] != "rank0_broadcast" else ():
        known = set(marks_in(arrivals[first].classes))
        for each in others:
            new = [mark for mark in marks_in(arrivals[each].classes) if mark not in known]
            known.update(new)
            if new:
                found[each] = b"".join(new)
    return found


def _kind(board: Board, arrivals: Sequence[Arrival], group: Sequence[int]) -> str:
    return f"{', '.join(str(board.ranks[each]) for each in group)} ({arrivals[group[0]].named})"


def _unlike(place: str, wanted: Mapping[str, str], here: Mapping[str, str], absent: str) -> list[str]:
    return [
        f"{place}{name}: wanted {wanted.get(name, absent)} as on the first rank, got {here.get(name, absent)}"
        for name in {**wanted, **here}
        if wanted.get(name) != here.get(name)
    ]
