"""Choices that do not change any more: which kernel each class of calls has, and what is done where it cannot run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from layerzero.core.dtypes import dtype_name
from layerzero.core.eager_state import STATE_FACTS
from layerzero.core.errors import NoKernelFoundError, stays
from layerzero.core.evidence import live_sizes, looseness
from layerzero.core.facts import Facts, plain
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Candidate, Plan, Report
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import forking
from layerzero.engine import legality
from layerzero.engine.config import CONFIGURATION, digest_of
from layerzero.engine.jit import compiles_in_call
from layerzero.engine.policy import Policy

if TYPE_CHECKING:
    from layerzero.engine.bucket_table import BucketTable

MAX_CALLS, MAX_CLASSES = 4096, 2048
"""Calls that are remembered. Of more, one of each class stays, and classes that were met longest ago are dropped."""


class Past(NamedTuple):
    """A call that was chosen for: its facts, and the settings of the scopes that held, outermost first."""

    facts: Facts
    layers: tuple[Mapping[str, Any], ...]

    @property
    def policy(self) -> Policy:
        """What the settings are now where the call was made."""
        return CONFIGURATION.effective(*self.layers) if self.layers else CONFIGURATION.policy


class History:
    """The calls of this process, one for each key that was chosen for; bounded.

    Attributes:
        dropped: how many classes were dropped because there were too many.
    """

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._calls: dict[tuple[str, Hashable, Policy | None], Past] = {}
        self.dropped = 0

    def add(self, function: str, key: Hashable, facts: Facts, policy: Policy) -> None:
        """Remember a call of a function; ``policy`` is what it was chosen under."""
        name: tuple[str, Hashable, Policy | None] = function, key, None
        layers: tuple[Mapping[str, Any], ...] = ()
        if policy is not CONFIGURATION.policy:
            name, layers = (function, key, policy), CONFIGURATION.layers_of(policy)
        past = Past(facts, layers)
        with self._lock:
            self._calls.pop(name, None)  # the latest are last
            self._calls[name] = past
            if len(self._calls) > MAX_CALLS:
                self._thin()

    def _thin(self) -> None:
        """Keep the latest call of each class: decoding meets a new size at every step, and few new classes."""
        latest = {class_name(past.facts, past.policy): name for name, past in self._calls.items()}
        chosen = set(latest.values())
        kept = [name for name in self._calls if name in chosen]
        self.dropped += max(0, len(kept) - MAX_CLASSES)
        self._calls = {name: self._calls[name] for name in kept[-MAX_CLASSES:]}

    def calls(self) -> Sequence[Past]:
        """The calls, those that were chosen for longest ago first."""
        with self._lock:
            return tuple(self._calls.values())

    def forget(self, function: str | None = None) -> None:
        """Forget the calls of a function that is taken back, or all of them."""
        with self._lock:
            kept = {} if function is None else {name: each for name, each in self._calls.items() if name[0] != function}
            self._calls = kept
            self.dropped = 0 if function is None else self.dropped


STATE = ("deterministic", "capturing", "autocast", *STATE_FACTS)
"""Facts that a recipe does not have."""


class FrozenChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One class of calls: its kernel, the library with its version, and a call of it.

    ``state`` has the eager state that the call's recipe does not; ``scoped`` marks a choice made under other settings
    than those of the process, which no other process can repeat; ``why`` says which kernel lost to one that was chosen
    for its neighbours.
    """

    kernel: str
    library: str
    version: str
    call: CallRecipe
    state: dict[str, bool | str | list[str]]
    scoped: bool = False
    why: str = ""


class Departure(msgspec.Struct, frozen=True):
    """A class whose kernel could not run: what ran in its place, and why."""

    kernel: str
    ran: str
    reason: str


class Frozen:
    """What is frozen in this process.

    Attributes:
        choices: by the name of the class; the ones made since are among them.
        added: names of the classes that were first seen while frozen: with the kernel of the same calls of dense
            tensors where that may run, else chosen without times, by priority and id.
        departures: classes whose kernel was refused or failed, by name, the latest of each.
        agreed: whether ranks agreed on it, see :class:`Agreed`.
        plan: the buckets, where the choices are those of a plan: it says for which calls they hold.
        solved: what the plan's document says of model, machine and grid.
    """

    agreed = False
    refused: frozenset[str] = frozenset()
    __reduce_ex__ = stays("lz.frozen", "set of choices", "write() what lz.freeze returned, and freeze that file there")

    def __init__(
        self, choices: Mapping[str, FrozenChoice], plan: BucketTable | None = None, solved: Any = None
    ) -> None:
        self._lock = forking.lock()
        self.choices = dict(choices)
        self.plan, self.solved = plan, solved
        self.added: tuple[str, ...] = ()
        self.departures: dict[str, Departure] = {}

    def decides(self, judged: Sequence[Candidate], facts: Facts, policy: Policy) -> bool:
        """Whether times decide nothing: always, but for calls that a plan has no kernel for."""
        if self.plan is None:
            return True
        legal = {each.kernel.id for each in judged if each.legal}
        return any(each.choice.kernel in legal for each in self.plan.rows(facts, policy))

    def held(self, report: Report, policy: Policy) -> Report:
        """The report with the frozen kernel as its choice.

        A lock stays above it. Where the kernel is refused, the next one by priority is taken, or, without
        ``fallback_enabled``, none.
        """
        if report.locked:
            return report
        if report.facts.operation.is_collective:  # whatever no choice holds is the same on all ranks
            report = _alike(report, policy, self.refused)
        if self.plan is not None:
            return self.plan.held(report, policy)
        choice = self.choices.get(class_name(report.facts, policy))
        if choice is None:
            dense = self.choices.get(class_name(report.facts, policy, dense=True))
            found = None if dense is None else candidate_of(report, dense)
            if found is not None and found.legal and found.kernel.id not in self.refused:
                return noted(with_choice(report, found), f"frozen: {found.kernel.id}, for dense tensors of this class")
            return self._new(report, policy)
        found = candidate_of(report, choice)
        if found is not None and found.legal:
            return noted(with_choice(report, found), f"frozen: {choice.kernel}")
        report = noted(report, f"frozen: {choice.kernel} cannot run: {why_not(found)}")
        return report if policy.fallback_enabled else msgspec.structs.replace(report, chosen=None)

    def chose(self, plan: Plan, policy: Policy) -> str | None:
        """Keep what a class got first; return what to tell if it departs from what is frozen."""
        report, name = plan.report, class_name(plan.report.facts, policy)
        with self._lock:
            choice = self.choices.get(name)
            if self.plan is not None:
                rows = self.plan.rows(report.facts, policy)
                if not rows:
                    return None if report.locked else self.plan.missed(report.facts, policy)
                choice = next((each.choice for each in rows if each.choice.kernel == plan.kernel.id), rows[0].choice)
            if choice is None:
                self._keep(name, choice_of(plan.kernel, report.facts, policy))
                return None
            if choice.kernel == plan.kernel.id or report.locked or report.facts.empty:
                return None
            found = candidate_of(report, choice)
            known = self.departures.get(name)
            self.departures[name] = Departure(choice.kernel, plan.kernel.id, why_not(found))
        if known is not None and known.ran == plan.kernel.id:
            return None
        why = why_not(found)
        return f"{choice.kernel} is frozen for {name} and cannot run ({why}); {plan.kernel.id} runs in its place"

    def _new(self, report: Report, _policy: Policy) -> Report:
        return noted(report, "frozen: this class was not seen before; chosen by priority, without times")

    def _keep(self, name: str, choice: FrozenChoice) -> None:
        self.choices[name] = choice
        self.added = (*self.added, name)

    def refuse(self, report: Report, policy: Policy) -> None:
        """Raise for what a strict plan misses, and where a frozen kernel cannot run and nothing may in its place."""
        if self.plan is not None:
            self.plan.refuse(report, policy)
        choice = self.choices.get(class_name(report.facts, policy))
        if choice is not None and report.chosen is None and not policy.fallback_enabled:
            hint = f"{choice.kernel} is frozen for this class; lz.thaw() lets selection go on"
            raise NoKernelFoundError(report.operation, report.failures, hint)


class Agreed(Frozen):
    """What ranks agreed on, until they agree again.

    A class that is not among it is chosen for by each rank from the facts of each call alone (:func:`by_priority`):
    what was called first, tuned or built on one rank decides nothing.

    Attributes:
        document: what all ranks of this hardware hold.
        marks: of its classes, packed, once ranks met again.
        stamp: of the process when they agreed; while it is the same, this process would choose as it did then.
        fallback: whether versions differ, so that all ranks run torch's own kernels and the references.
        refused: kernels that a rank could not run for a class: no rank takes them for a class that was not agreed on.
        mixed: whether calls of one new class got several kernels.
    """

    agreed = True

    def __init__(self, choices: Mapping[str, FrozenChoice], document: Any = None, *, fallback: bool = False) -> None:
        super().__init__(choices)
        self.document, self.fallback, self.mixed = document, fallback, False
        self.stamp: object = None
        self.marks = b""
        self._met: dict[str, str] = {}

    def held(self, report: Report, policy: Policy) -> Report:
        """As of frozen choices; torch's own function, or the reference, where versions differ."""
        if report.locked:
            return report
        if self.fallback:
            return _own_of_torch(report)
        return super().held(report, policy)

    def _new(self, report: Report, policy: Policy) -> Report:
        return by_priority(report, policy, self.refused)

    def _keep(self, name: str, choice: FrozenChoice) -> None:
        if name not in self._met:
            self._met[name] = choice.kernel
            self.added = (*self.added, name)
        self.mixed |= self._met[name] != choice.kernel

    def would_change(self, other: Agreed) -> bool:
        """Whether a plan of this process may be another under what is held next."""
        if self.mixed or self.refused != other.refused or not self.choices.keys() <= other.choices.keys():
            return True
        held = {name: each.kernel for name, each in self.choices.items()} | self._met
        return any(name in other.choices and other.choices[name].kernel != each for name, each in held.items())


UNAGREED = Agreed({})
"""What ranks hold before they agree."""


def ranks_choose(policy: Policy) -> bool:
    """Whether choices are those of all ranks: by the setting, where torch.distributed has several."""
    distributed = torch.distributed
    return (
        policy["distributed_selection"] != "independent"
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def yet_to_agree(policy: Policy, *, together: bool = False) -> Frozen | None:
    """How ranks choose that have not agreed, or run a call ``together``; None where each chooses for itself."""
    return UNAGREED if together or ranks_choose(policy) else None


def by_priority(report: Report, policy: Policy, refused: frozenset[str] = frozenset()) -> Report:
    """The choice of every rank: by priority and id, of what no rank refused and needs no build and no verdict here."""
    note = "ranks have not agreed on this class: chosen by priority, without times, until they do"
    return noted(_alike(report, policy, refused), note)


def _alike(report: Report, policy: Policy, refused: frozenset[str]) -> Report:
    """The report with what all ranks choose by themselves; a collective may be compiled in the call, by all of them."""
    collective = report.facts.operation.is_collective

    def may(candidate: Candidate) -> bool:
        kernel = candidate.kernel
        built = not kernel.jit or (collective and compiles_in_call(kernel, report.facts, policy))
        return (
            candidate.legal
            and built
            and kernel.id not in refused
            and not legality.untrusted(kernel, report.facts.device)
        )

    if report.chosen is None or report.locked or may(report.chosen):
        return report
    return with_choice(report, next(filter(may, report.candidates), report.chosen))


def _own_of_torch(report: Report) -> Report:
    legal = [each for each in report.candidates if each.legal and not each.kernel.jit]
    stock = [each for each in legal if each.kernel.source == "torch" and each.kernel.is_stock(report.facts)]
    others = [each for kind in ("torch", "reference") for each in legal if each.kernel.source == kind]
    found = next(iter([*stock, *others]), report.chosen)
    note = "ranks have other versions: torch's own kernels and the references run (on_version_mismatch: fallback)"
    return noted(report if found is None else with_choice(report, found), note)


def candidate_of(report: Report, choice: FrozenChoice) -> Candidate | None:
    """What a report says of a frozen kernel; None where it is not registered."""
    return next((each for each in report.candidates if each.kernel.id == choice.kernel), None)


def with_choice(report: Report, chosen: Candidate) -> Report:
    """The report with another choice."""
    others = (each for each in report.candidates if each is not chosen)
    return msgspec.structs.replace(report, chosen=chosen, ranked=(chosen, *others))


def noted(report: Report, note: str) -> Report:
    """The report with one note more."""
    return msgspec.structs.replace(report, notes=(*report.notes, note))


def why_not(candidate: Candidate | None) -> str:
    """Why a frozen kernel cannot run."""
    if candidate is None:
        return "it is not registered here"
    return str(candidate.reasons[0]) if candidate.reasons else "it failed"


def choice_of(kernel: Kernel, facts: Facts, policy: Policy) -> FrozenChoice:
    """What a call chose, for a manifest."""
    state = {name: plain(facts[name]) for name in STATE}
    scoped = policy is not CONFIGURATION.policy
    return FrozenChoice(kernel.id, kernel.source, "", CallRecipe.of(facts), state, scoped)  # type: ignore[arg-type]


def class_name(facts: Facts, policy: Policy, *, dense: bool = False, sizes: str = "<") -> str:
    """The class of a call as text: every fact by value, but live sizes as powers of two and factors as given or not.

    The name says how a tensor lies that is not contiguous, as times do; ``dense`` names the same call without.
    ``sizes`` is ``"<="`` for the name of a plan's bucket, which ends at the call's own sizes, and empty for the kind of
    call, without them; a plan holds in captures, too, so that neither says whether there is one.
    """
    if sizes == "<":
        dense_name = facts.class_name = facts.class_name or _words(facts, sizes)
    else:
        dense_name = _words(facts, sizes)
    words = [dense_name, *([] if dense else looseness(facts))]
    if policy is not CONFIGURATION.policy:
        words.append(f"settings={digest_of(policy)}")
    return " ".join(words)


def _words(facts: Facts, sizes: str) -> str:
    """The class of a call, as if its tensors were dense and its settings those of the process."""
    live = live_sizes(facts)
    words = [str(facts["operation"]), dtype_name(facts["dtype"])]  # type: ignore[arg-type]
    words += [facts.layout] if facts.layout else []
    for name, value in sorted(facts.items()):
        neutral = STATE_FACTS[name].neutral if name in STATE_FACTS else None
        if name in ("operation", "dtype") or value is False or value in ("none", neutral):
            continue
        if name in live:
            words += {"<": [f"{name}<{1 << live[name].bit_length()}"], "<=": [f"{name}<={value}"]}.get(sizes, [])
        elif name == "capturing" and sizes != "<":
            continue
        elif type(value) is float:
            words.append(f"{name}={'0' if value == 0 else 'below 0' if value < 0 else 'given'}")
        elif value != frozenset():
            words.append(f"{name}={plain(value)}")
    return " ".join(words)
