"""What a rank brings to an agreement: what it says of itself, the classes of calls that it knows, and its choices."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from layerzero.core.device import Device
from layerzero.core.errors import FrozenChoiceError, VersionMismatchError
from layerzero.core.facts import Facts
from layerzero.engine import probe
from layerzero.engine.config import CONFIGURATION, unusual
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Agreed, FrozenChoice, choice_of, class_name
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import DECIDE_NOTHING
from layerzero.inspection.board import Board
from layerzero.inspection.freeze import Frost, alone, difference, document, judged, version_of
from layerzero.inspection.plan_document import digest

PROTOCOL = 4
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
        classes: a mark of each class that it knows (:func:`layerzero.inspection.arrivals.marks_of`).
        held: hash of what it holds by agreement; empty for nothing.
        failed: why it does not take part.
        words: what else it says, of which those that all say count; None for nothing.
        document: what the first rank chooses, so that others need not wait for it again; as MessagePack.
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
    document: bytes = b""


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
        document: what all hold, where the first rank chose for all of them.
    """

    kind: Literal["same", "choose", "fallback"]
    groups: list[list[int]]
    told: list[str] = []
    words: list[str] = []
    choose: dict[int, bytes] = {}
    document: bytes = b""


def arrival(known: Known, *, changed: bool) -> Arrival:
    """What this rank says."""
    REGISTRY.ready()
    versions, settings, held = versions_here(), settings_here(), ENGINE.frozen
    devices = _devices()
    word = PROTOCOL << 56 | int(digest([versions, settings])[:14], 16)
    agreed, named = "", "; ".join(name for name, _ in devices)
    if isinstance(held, Agreed) and not held.fallback:
        agreed = held.document.hash
    if changed or not isinstance(held, Agreed):
        marks = known.marks
    else:
        marks = held.marks = held.marks or marks_of(held.choices)
    return Arrival(word, versions, settings, digest(devices), named, changed, marks, agreed)


def place_of(times: str) -> bytes:
    """What this rank says of where it runs."""
    return msgspec.json.encode(Place(platform.node(), digest(_devices()), times))


def first_at(said: Sequence[bytes]) -> list[int]:
    """For each rank, the lowest that runs where it does. Raises: FrozenChoiceError where one says something else."""
    try:
        places = [msgspec.json.decode(each, type=Place) for each in said]
    except msgspec.MsgspecError as error:
        raise FrozenChoiceError("agree", [f"wanted all ranks in lz.tune with a budget, or none: {error}"]) from error
    return [places.index(each) for each in places]


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
    backends = dict.fromkeys(each.backend for each in kernels if each.backend.distribution)
    told = sorted((each.name, version) for each in backends if (version := machine.version(each, cpu)))
    found = dict(told)  # builds of one name exclude each other: vLLM's for CPUs and GPUs
    major, minor, *_ = __version__.split(".")
    declared = sorted(f"{each.id} {each.priority} {dict(each.priority_since)}" for each in kernels)
    return {
        "protocol": str(PROTOCOL),
        "layerzero": f"{major}.{minor}" if major == "0" else major,
        "torch": str(torch.__version__),
        **found,
        "kernels": digest(declared)[:12],
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
        raise (FrozenChoiceError if problems else VersionMismatchError)("agree", [*problems, *others])
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
    choosing = _choosing(arrivals, groups)
    whole = b"" if choosing or len(groups) > 1 else first.document
    return Verdict("choose", groups, others, common, choosing, whole)


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


Unable = dict[str, tuple[str, str]]
"""Of classes whose kernel a rank cannot run: the kernel, and why."""

MARK_BYTES = 8
"""Of a hash of a class's name: two of 2,048 names are the same once in 10^13 agreements."""


def marks_in(packed: bytes) -> list[bytes]:
    """The marks of classes, unpacked."""
    return [packed[place : place + MARK_BYTES] for place in range(0, len(packed), MARK_BYTES)]


def marks_of(names: Iterable[str]) -> bytes:
    """The marks of classes, packed and sorted."""
    return b"".join(sorted(map(_mark, names)))


def _mark(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=MARK_BYTES).digest()


class Known:
    """The classes that this process knows: those that it holds, and those of its calls.

    Calls in scopes are left out: no other process has their settings.

    Attributes:
        held: choices that stay what they are.
    """

    def __init__(self, *, anew: bool) -> None:
        """Look at what is held; ``anew`` lets nothing of it stay that was called."""
        self.held = {} if ENGINE.frozen is None else dict(ENGINE.frozen.choices)
        self._anew = anew

    @functools.cached_property
    def calls(self) -> dict[str, Facts]:
        """A call of each class that was called, by the class's name."""
        found: dict[str, Facts] = {}
        for past in ENGINE.history.calls():
            if not past.layers:
                found.setdefault(class_name(past.facts, CONFIGURATION.policy), past.facts)
        return found

    @functools.cached_property
    def open(self) -> frozenset[str]:
        """The names of classes that are to be chosen for."""
        return frozenset(self.calls if self._anew else self.calls.keys() - self.held.keys())

    @property
    def marks(self) -> bytes:
        """A hash of each class's name, one behind the other: ranks compare what they know by it."""
        return marks_of({**self.held, **self.calls})

    def proposed(self, marks: frozenset[bytes] | None = None) -> Frost:
        """What this process would choose by itself, as if nothing were agreed; of the marked classes alone."""

        def asked(name: str) -> bool:
            return marks is None or _mark(name) in marks

        found = {name: each for name, each in self.held.items() if name not in self.open and asked(name)}
        for name in filter(asked, self.open):
            chosen = alone(self.calls[name]).chosen
            if chosen is not None:
                found[name] = choice_of(chosen.kernel, self.calls[name], CONFIGURATION.policy)
        return document(found)

    def unable(self, shared: Mapping[str, FrozenChoice], own: Mapping[str, FrozenChoice]) -> Unable:
        """The classes whose kernel cannot run here, and why; of those that this process did not choose itself."""
        found, versions = Unable(), {each: version_of(each) for each in {each.kernel for each in shared.values()}}
        for name, choice in shared.items():
            mine = own.get(name) or (None if name in self.open else self.held.get(name))
            if mine is not None and (mine.kernel, mine.version) == (choice.kernel, choice.version):
                continue
            runs_here = versions[choice.kernel] == choice.version and self._runs(name, choice.kernel)
            if not runs_here and (why := difference(choice, may_differ=True)):
                found[name] = choice.kernel, why
        return found

    def _runs(self, name: str, kernel: str) -> bool:
        """Whether a kernel may run this process's own call of a class; False where it has none."""
        facts = self.calls.get(name)
        if facts is None or facts.operation.plain is not None:
            return False
        return any(each.legal for each in judged(facts, kernel)[0])


def merged(documents: Sequence[bytes]) -> bytes:
    """The choices of all ranks in one document: of each class the lowest rank's; packed as those are."""
    told = [each for each in documents if each]
    if len(told) == 1:
        return told[0]
    found = [msgspec.msgpack.decode(each, type=Frost) for each in told]
    choices = {name: choice for each in reversed(found) for name, choice in each.choices.items()}
    return msgspec.msgpack.encode(msgspec.structs.replace(found[0], choices=choices).sealed())
