"""What one rank brings to an agreement: the classes of calls that it knows, its choices, and what it cannot run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from layerzero.core.facts import Facts
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import FrozenChoice, choice_of, class_name
from layerzero.inspection.freeze import Frost, alone, difference, document, judged, version_of

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
