"""``lz.agree``: all ranks of a job hold the same kernels, so that none computes, or waits, otherwise than the others.

Choices follow from facts, settings and measured times; ranks whose machines measured differently choose differently.
Sums are then rounded otherwise on one of them, and a kernel that is built on one rank is waited for by all. The ranks
agree where the program says so, and nowhere else: a call never waits for other ranks. What they say goes through the
group's store (:mod:`layerzero.asking.board`), which names a rank that does not come, where a collective would hang.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import msgspec
import torch

from layerzero.asking.board import Board, world
from layerzero.asking.freeze import Frost, difference, hold, proposed, tell_if_short
from layerzero.core.arguments import told
from layerzero.core.device import Device
from layerzero.core.errors import FrozenChoiceError, LayerZeroWarning, PolicyError
from layerzero.engine import probe
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Agreed, ranks_choose, unusual
from layerzero.engine.registry import REGISTRY
from layerzero.engine.settings import DECIDE_NOTHING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Params = ParamSpec("Params")
Result = TypeVar("Result")

Unable = dict[str, tuple[str, str]]
"""Of classes whose kernel a rank cannot run: the kernel, and why."""

PROTOCOL = 2
"""Of what ranks tell each other; the highest byte of their words."""


class Arrival(msgspec.Struct, frozen=True):
    """What a rank says of itself when it comes.

    Attributes:
        word: hash of all that ranks need alike to choose alike, in one int64: equal ones need no further look.
        versions: of LayerZero, torch and the libraries, and a hash of the kernels that are registered.
        settings: those that decide something and are not at their defaults.
        device: hash of its processors and what they can do: ranks of one kind agree among themselves.
        named: the same for people.
        choices: hash of what it would choose.
        held: hash of what it holds by agreement; empty for nothing.
        failed: why it does not take part.
        words: what else it says, of which those that all say count; None for nothing.
    """

    word: int = 0
    versions: dict[str, str] = {}
    settings: dict[str, str] = {}
    device: str = ""
    named: str = ""
    choices: str = ""
    held: str = ""
    failed: str = ""
    words: list[str] | None = None


class Verdict(msgspec.Struct, frozen=True):
    """What follows from the arrivals: ``kind``, groups that agree among themselves, a warning, and common words."""

    kind: Literal["same", "choose", "fallback"]
    groups: list[list[int]]
    told: list[str] = []
    words: list[str] = []


_CALLS: WeakKeyDictionary[object, int] = WeakKeyDictionary()
"""How often this process called ``agree`` with ``every``, by group: one that is made anew counts anew on all ranks."""


@overload
def agree(group: ProcessGroup | None = None, *, timeout_s: float | None = None) -> Frost: ...
@overload
def agree(group: ProcessGroup | None = None, *, every: int, timeout_s: float | None = None) -> Frost | None: ...
def agree(
    group: ProcessGroup | None = None, *, every: int | None = None, timeout_s: float | None = None
) -> Frost | None:
    """Let all ranks of a group keep the same kernel for each class of calls, until they agree again or thaw.

        lz.warmup(model, inputs)  # or one step: what ranks have called or warmed up is what they agree on
        lz.agree()  # on every rank, at the same place of the program

        for batch in batches:
            lz.agree(every=1000)  # the 1000th, 2000th, ... call of each rank is an agreement
            model(batch)

    Of a class that several ranks have called, the lowest rank's kernel counts, or, where ``distributed_selection`` is
    ``rank0_broadcast``, its classes alone. From then on new times change nothing until ranks agree again, and a class
    that is not among them is chosen for by priority and id, among kernels that need no build and no vetting, which is
    the same on all ranks. Each agreement asks about classes that were met since, and about all where times, settings or
    kernels changed. Ranks with other processors agree among themselves, and a warning names the groups. The plans of
    scopes stay what they are; no other rank has their settings.

    No collective runs: ranks write into the group's store, and the last that comes decides. A rank that is missing when
    the time is up is named on all others, and nothing changes on any. An agreement has at most three questions.

    Args:
        group: whose ranks agree; the default group if None. Without torch.distributed, or before it was initialised,
            this process is the only rank.
        every: agree at each such call alone; calls are counted, never times. Other calls return None.
        timeout_s: how long each question waits for other ranks; if None, the time that
            ``init_process_group(timeout=...)`` set, for other groups, too.
    Returns: the document that all ranks with such processors hold; its hash is the same on them.
    Raises: PolicyError on a rank that is not in the group, and for a group that was destroyed; FrozenChoiceError on
        every rank, naming ranks by their numbers in the default group, where one did not come, failed or holds what
        ``lz.freeze`` froze, where versions, kernels or settings differ (``on_version_mismatch``), and where a kernel
        cannot run on one of them. What was agreed on before holds then, or nothing.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise PolicyError(f"agree: timeout_s: wanted seconds above 0, got {told(timeout_s)}")
    if every is not None:
        if type(every) is not int or every < 1:
            raise PolicyError(f"agree: every: wanted a number of calls of at least 1, got {told(every)}")
        place = world() if group is None else group
        place = place if hasattr(place, "group_name") else Board  # alone, or no group, which Board.of refuses
        _CALLS[place] = _CALLS.get(place, 0) + 1
        if _CALLS[place] % every:
            return None
    return _agreed(Board.of(group, timeout_s))[0]


def agreeing(run: Callable[Params, Result]) -> Callable[Params, Result]:
    """Let ranks agree where a function ends, if the setting says so; where it fails, the others get its error."""

    @functools.wraps(run)
    def running(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not ranks_choose(CONFIGURATION.policy):
            return run(*args, **kwargs)
        return agreed_where_ends(run.__name__, functools.partial(run, *args, **kwargs))[0]

    return running


def agreed_where_ends(
    name: str, run: Callable[[], Result], words: Callable[[Result], Collection[str]] | None = None
) -> tuple[Result, frozenset[str]]:
    """Let ranks agree once where a function ends, or where it raises: then the others get its error.

    One agreement whatever happens, so that ranks count alike.

    Args:
        name: of the function, for the others.
        words: what this rank says, of what the function returned.
    Returns: what the function returned, and those words that all ranks say.
    """
    try:
        found = run()
        said = None if words is None else sorted(words(found))
    except BaseException as error:
        why = Arrival(failed=f"{name}: {type(error).__name__}: {error}")
        try:
            board = Board.of(None, None)
            board.leave(msgspec.json.encode(why), functools.partial(_arrived, board))
        except FrozenChoiceError as gone:
            error.add_note(f"the other ranks could not be told: {gone}")
        raise
    return found, frozenset(_agreed(Board.of(None, None), said)[1])


def _agreed(board: Board, words: list[str] | None = None) -> tuple[Frost, list[str]]:
    """What all ranks hold from now on, and the words that all say."""
    stamp = (ENGINE.epoch, ENGINE.winners)
    held = ENGINE.frozen
    own: Frost | None = None
    try:
        own = _own(stamp)
        arrival = msgspec.structs.replace(_arrival(own), words=words)
    except Exception as error:  # noqa: BLE001  # raised on every rank
        arrival = Arrival(failed=f"{type(error).__name__}: {error}")
    said = board.settle("arrive", msgspec.json.encode(arrival), functools.partial(_arrived, board))
    verdict = msgspec.json.decode(said, type=Verdict)
    assert own is not None  # else that raised on all
    if verdict.told:
        warnings.warn(f"agree: {'; '.join(verdict.told)}", LayerZeroWarning, stacklevel=3)
    if verdict.kind == "same" and isinstance(held, Agreed):
        held.stamp = stamp
        return own, verdict.words
    shared, unable = own, Unable()
    if verdict.kind == "choose":
        mine = next(place for place, group in enumerate(verdict.groups) if board.rank in group)
        merge = functools.partial(_merged, verdict.groups, CONFIGURATION.policy["distributed_selection"])
        said = board.settle("choose", msgspec.json.encode(own), merge)
        shared = msgspec.json.decode(said, type=list[Frost])[mine]
        unable = _tried(lambda: _unable(shared, own))
    able = functools.partial(_able, board, fallback=verdict.kind == "fallback")
    said = board.settle("able", msgspec.json.encode(unable), able)
    left_out = msgspec.json.decode(said, type=dict[str, list[str]] | None)
    kept = {}
    if left_out is not None:
        kept = {name: each for name, each in shared.choices.items() if each.kernel not in left_out.get(name, ())}
    shared = msgspec.structs.replace(shared, choices=kept).sealed()
    found = Agreed(kept, shared, fallback=left_out is None)
    found.refused = frozenset(kernel for each in (left_out or {}).values() for kernel in each)
    if not found.fallback:
        tell_if_short("agree", kept)
    hold(found)
    found.stamp = (ENGINE.epoch, stamp[1])
    return shared, verdict.words


def _tried(run: Callable[[], Unable]) -> Unable:
    """What this rank tells; its error as a problem, since the others wait for what it tells."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001  # raised on every rank, with this one's number
        return {"looking at the choices": ("", f"{type(error).__name__}: {error}")}


def _own(stamp: object) -> Frost:
    """What this rank would choose: what it holds where nothing happened since. Raises: PolicyError after lz.freeze."""
    held = ENGINE.frozen
    if held is not None and not held.agreed:
        raise PolicyError("choices are frozen already; wanted lz.thaw() there first")
    if isinstance(held, Agreed) and held.stamp == stamp and not held.fallback:
        document: Frost = held.document
        return proposed(anew=False) if held.added else document
    return proposed(anew=True)


def _arrival(own: Frost) -> Arrival:
    REGISTRY.ready()
    versions, held = _versions(ENGINE.epoch), ENGINE.frozen
    settings = {name: each for name, each in unusual(CONFIGURATION.policy).items() if name not in DECIDE_NOTHING}
    devices = _devices()
    word = PROTOCOL << 56 | int(_digest([versions, settings])[:14], 16)
    agreed = held.document.hash if isinstance(held, Agreed) and not held.fallback else ""
    return Arrival(word, versions, settings, _digest(devices), own.device, own.hash, agreed)


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def _devices() -> list[tuple[str, list[str]]]:
    """The processors of this rank: the CPU, and the current device of those that torch has."""
    found = [Device.detect("cpu"), *([Device.detect("cuda")] if torch.cuda.is_available() else [])]
    return [(each.name, sorted(each.instruction_sets)) for each in found]


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


def _arrived(board: Board, said: Sequence[bytes]) -> Verdict:
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
    same = all(
        arrivals[each].choices == arrivals[each].held == arrivals[group[0]].held for group in groups for each in group
    )
    if len(groups) > 1 and not same:
        others.append("ranks agree within their kind: " + "; ".join(_kind(board, arrivals, group) for group in groups))
    return Verdict("same" if same else "choose", groups, others, common)


def _kind(board: Board, arrivals: Sequence[Arrival], group: Sequence[int]) -> str:
    return f"{', '.join(str(board.ranks[each]) for each in group)} ({arrivals[group[0]].named})"


def _unlike(place: str, wanted: Mapping[str, str], here: Mapping[str, str], absent: str) -> list[str]:
    return [
        f"{place}{name}: wanted {wanted.get(name, absent)} as on the first rank, got {here.get(name, absent)}"
        for name in {**wanted, **here}
        if wanted.get(name) != here.get(name)
    ]


def _merged(groups: Sequence[Sequence[int]], mode: str, said: Sequence[bytes]) -> list[Frost]:
    """The choices of each group in one document: of each class the lowest rank's."""
    found = []
    for group in groups:
        documents = [msgspec.json.decode(said[each], type=Frost) for each in group]
        found.append(merged(documents[:1] if mode == "rank0_broadcast" else documents))
    return found


def merged(documents: Sequence[Frost]) -> Frost:
    """The choices of all ranks in one document: of each class the lowest rank's."""
    choices = {
        name: choice for each in reversed(documents) for name, choice in each.choices.items() if not choice.scoped
    }
    return msgspec.structs.replace(documents[0], choices=choices).sealed()


def _unable(shared: Frost, own: Frost) -> Unable:
    """The classes whose kernel cannot run here, and why; a kernel that this rank would choose itself can."""
    found = {}
    for name, choice in shared.choices.items():
        mine = own.choices.get(name)
        same = mine is not None and (mine.kernel, mine.version) == (choice.kernel, choice.version)
        if not same and (why := difference(choice, may_differ=True)):
            found[name] = choice.kernel, why
    return found


def _able(board: Board, said: Sequence[bytes], *, fallback: bool) -> dict[str, list[str]] | None:
    """The classes that are left out, with their kernels that a rank cannot run, or None: all run the fallback.

    Raises: FrozenChoiceError where neither is wanted.
    """
    found = [msgspec.json.decode(each, type=Unable) for each in said]
    problems = [
        f"rank {rank}: {name}: {why}"
        for rank, each in zip(board.ranks, found, strict=True)
        for name, (_, why) in each.items()
    ]
    on_mismatch = CONFIGURATION.policy["on_version_mismatch"]
    if problems and on_mismatch == "error":
        raise FrozenChoiceError("agree", problems)
    if fallback or (problems and on_mismatch == "fallback"):
        return None
    left_out: dict[str, list[str]] = defaultdict(list)
    for each in found:
        for name, (kernel, _) in each.items():
            left_out[name].append(kernel)
    return left_out
