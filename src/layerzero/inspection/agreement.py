"""``lz.agree``: all ranks of a job hold the same kernels, so that none computes, or waits, otherwise than the others.

Choices follow from facts, settings and measured times; ranks whose machines measured differently choose differently.
Sums are then rounded otherwise on one of them, and a kernel that is built on one rank is waited for by all. The ranks
agree where the program says so, and nowhere else: a call never waits for other ranks. What they say goes through the
group's store (:mod:`layerzero.inspection.board`), which names a rank that does not come, where a collective would hang.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import msgspec

from layerzero.core.arguments import told
from layerzero.core.errors import FrozenChoiceError, LayerZeroWarning, PolicyError
from layerzero.core.system import warn
from layerzero.core.system.memory import uncollected
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.frozen_choices import Agreed, FrozenChoice, ranks_choose
from layerzero.inspection import arrivals
from layerzero.inspection.board import Board, world
from layerzero.inspection.freeze import Frost, document, hold, tell_if_short

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank answers to the second and the third question.

    Attributes:
        document: what it chooses, of classes that no lower rank knows; as MessagePack, read in half of JSON's time.
        unable: what it cannot run of what was chosen.
        failed: its error, which all ranks raise.
    """

    document: bytes = b""
    unable: arrivals.Unable = {}
    failed: str = ""


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

    Of a class that several ranks have called, the lowest rank's kernel counts. With ``distributed_selection:
    rank0_broadcast`` rank 0's classes alone count. From then on new times change nothing until ranks agree again. A
    class that is not among them is chosen for by priority and id, which is the same on all ranks, among kernels that
    need no build and no vetting. A collective may be compiled in the call. Each agreement asks about classes that were
    met since, and about all where times, settings or kernels changed. Ranks with other processors agree among
    themselves, and a warning names the groups. The plans of scopes stay what they are; no other rank has their
    settings.

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
    return _agreed(Board.of(group, timeout_s))


def agreeing(run: Callable[Params, Result]) -> Callable[Params, Result]:
    """Let ranks agree where a function ends, if the setting says so; where it fails, the others get its error."""

    @functools.wraps(run)
    def running(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not ranks_choose(CONFIGURATION.policy):
            return run(*args, **kwargs)
        budget_s = kwargs.get("budget_s")
        longer_s = float(budget_s) if isinstance(budget_s, (int, float)) else 0.0  # one rank may measure for others
        return agreed_where_ends(run.__name__, functools.partial(run, *args, **kwargs), longer_s=longer_s)

    return running


def is_first(times: Path | None) -> bool:
    """Whether no lower rank has this one's host, processors and file of times; all ranks ask together.

    Raises: FrozenChoiceError as :func:`agree` does.
    """
    board = Board.of(None, None)
    said = arrivals.place_of(f"of rank {board.rank}" if times is None else str(times))
    found = msgspec.json.decode(board.settle("arrive", said, arrivals.first_at), type=list[int])
    return found[board.rank] == board.rank


def agreed_where_ends(
    name: str,
    run: Callable[[], Result],
    words: Callable[[Result], Collection[str]] | None = None,
    settle: Callable[[Result, frozenset[str]], None] | None = None,
    longer_s: float = 0.0,
) -> Result:
    """Let ranks agree once where a function ends, or where it raises: then the others get its error.

    One agreement whatever happens, so that ranks count alike.

    Args:
        name: of the function, for the others.
        words: what this rank says, of what the function returned.
        settle: gets what the function returned and those words that all ranks say, before anything is held; all ranks
            get its error, too.
        longer_s: how long the others may work where this rank does not.
    Returns: what the function returned.
    """
    try:
        found = run()
        said = None if words is None else sorted(words(found))
    except BaseException as error:
        why = arrivals.Arrival(failed=f"{name}: {type(error).__name__}: {error}")
        try:
            board = Board.of(None, None)
            board.leave(msgspec.json.encode(why), functools.partial(arrivals.arrived, board))
        except FrozenChoiceError as gone:
            error.add_note(f"the other ranks could not be told: {gone}")
        raise
    board = Board.of(None, None)
    board.timeout_s += longer_s
    _agreed(board, said, None if settle is None else functools.partial(settle, found), name)
    return found


def _agreed(
    board: Board,
    words: list[str] | None = None,
    settle: Callable[[frozenset[str]], None] | None = None,
    name: str = "agree",
) -> Frost:
    """What all ranks hold from now on."""
    stamp, held, known, first = (ENGINE.epoch, ENGINE.winners), ENGINE.frozen, None, None
    try:
        anew = _chooses_anew(stamp)
        known = arrivals.Known(anew=anew)
        changed = anew or bool(held and held.added)
        came = msgspec.structs.replace(arrivals.arrival(known, changed=changed), words=words)
        if changed and not board.rank:  # it chooses for all classes that it knows, whatever the others say
            first = _proposed(known)
            came = msgspec.structs.replace(came, document=msgspec.msgpack.encode(first) if first else b"")
    except Exception as error:  # noqa: BLE001  # raised on every rank
        came = arrivals.Arrival(failed=f"{type(error).__name__}: {error}")
    said = board.settle("arrive", msgspec.json.encode(came), functools.partial(arrivals.arrived, board))
    verdict = msgspec.json.decode(said, type=arrivals.Verdict)
    assert known is not None  # else that raised on all
    if verdict.told:
        warn(f"agree: {'; '.join(verdict.told)}", LayerZeroWarning, stacklevel=3)
    same = held if isinstance(held, Agreed) and verdict.kind == "same" else None
    shared: Frost = document({})
    own: Mapping[str, FrozenChoice] = {}
    if verdict.kind == "choose":
        shared, own = _chosen(board, verdict, known, first)

    def answer(mine: arrivals.Known = known) -> Answer:
        if settle is not None:
            settle(frozenset(verdict.words))
        return Answer(unable=mine.unable(shared.choices, own))

    left_out: dict[str, list[str]] | None = {}
    if same is None or settle is not None:
        able = functools.partial(_able, board, fallback=verdict.kind == "fallback")
        said = _answered(board, "able", name, answer, able)
        left_out = msgspec.json.decode(said, type=dict[str, list[str]] | None)
    if same is not None:
        same.stamp = stamp
        agreed: Frost = same.document
        return agreed
    if left_out or left_out is None:
        kept = (
            {}
            if left_out is None
            else {name: each for name, each in shared.choices.items() if each.kernel not in left_out.get(name, ())}
        )
        shared = msgspec.structs.replace(shared, choices=kept).sealed()
    found = Agreed(shared.choices, shared, fallback=left_out is None)
    found.refused = frozenset(kernel for each in (left_out or {}).values() for kernel in each)
    if not found.fallback:
        tell_if_short("agree", shared.choices)
    hold(found)
    found.stamp = (ENGINE.epoch, stamp[1])
    return shared


def _chooses_anew(stamp: object) -> bool:
    """Whether anything happened since what this rank holds was agreed on. Raises: PolicyError after lz.freeze."""
    held = ENGINE.frozen
    if held is not None and not held.agreed:
        raise PolicyError("choices are frozen already; wanted lz.thaw() there first")
    return not isinstance(held, Agreed) or held.stamp != stamp or held.fallback


def _proposed(known: arrivals.Known) -> Frost | None:
    """What this process chooses; None where that fails: then its answer to the second question has the error."""
    with uncollected(), contextlib.suppress(Exception):
        return known.proposed()
    return None


def _chosen(
    board: Board, verdict: arrivals.Verdict, known: arrivals.Known, first: Frost | None
) -> tuple[Frost, Mapping[str, FrozenChoice]]:
    """What the ranks of this one's group choose, each class by one of them; and what this one chose of it.

    ``first`` is what this rank chose as it came, if it is the first of all.
    """
    own = [] if first is None else [first]
    if verdict.document:
        return msgspec.msgpack.decode(verdict.document, type=Frost), own[0].choices if own else {}
    place = next(place for place, group in enumerate(verdict.groups) if board.rank in group)
    leads = board.rank == verdict.groups[place][0]
    marks = None if leads else frozenset(arrivals.marks_in(verdict.choose.get(board.rank, b"")))

    def choose() -> Answer:
        if not leads and not marks:
            return Answer()
        if not own:
            own.append(known.proposed(marks))
        return Answer(msgspec.msgpack.encode(own[0]))

    said = _answered(board, "choose", "choosing", choose, functools.partial(_merged, verdict.groups))
    shared = msgspec.msgpack.decode(msgspec.json.decode(said, type=list[bytes])[place], type=Frost)
    return shared, own[0].choices if own else {}


def _answered(
    board: Board, stage: str, what: str, make: Callable[[], Answer], decide: Callable[[Sequence[Answer]], object]
) -> bytes:
    """Make an answer, tell it, and get what was decided; where making it fails on one rank, all raise."""
    answer, raised = Answer(), None
    try:
        with uncollected():  # all ranks wait
            answer = make()
    except BaseException as error:  # noqa: BLE001  # the others wait for this one's answer
        answer, raised = Answer(failed=f"{what}: {type(error).__name__}: {error}"), error
    try:
        return board.settle(stage, msgspec.json.encode(answer), functools.partial(_heard, board, decide))
    except FrozenChoiceError as refused:
        if raised is None:
            raise
        raise raised from refused


def _heard(board: Board, decide: Callable[[Sequence[Answer]], object], said: Sequence[bytes]) -> object:
    answers = [msgspec.json.decode(each, type=Answer) for each in said]
    failed = [f"rank {rank}: {each.failed}" for rank, each in zip(board.ranks, answers, strict=True) if each.failed]
    if failed:
        raise FrozenChoiceError("agree", failed)
    return decide(answers)


def _merged(groups: Sequence[Sequence[int]], answers: Sequence[Answer]) -> list[bytes]:
    """The choices of each group in one document."""
    return [arrivals.merged([answers[each].document for each in group]) for group in groups]


def _able(board: Board, answers: Sequence[Answer], *, fallback: bool) -> dict[str, list[str]] | None:
    """The classes that are left out, with their kernels that a rank cannot run, or None: all run the fallback.

    Raises: FrozenChoiceError where neither is wanted.
    """
    problems = [
        f"rank {rank}: {name}: {why}"
        for rank, each in zip(board.ranks, answers, strict=True)
        for name, (_, why) in each.unable.items()
    ]
    on_mismatch = CONFIGURATION.policy["on_version_mismatch"]
    if problems and on_mismatch == "error":
        raise FrozenChoiceError("agree", problems)
    if fallback or (problems and on_mismatch == "fallback"):
        return None
    left_out: dict[str, list[str]] = defaultdict(list)
    for each in answers:
        for name, (kernel, _) in each.unable.items():
            left_out[name].append(kernel)
    return left_out
