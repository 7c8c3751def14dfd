"""What the ranks of a group write for each other: in the group's store, so that nothing hangs and no collective runs.

A collective that one rank does not enter never ends, names no rank, and leaves a group of gloo broken. Here each rank
writes what it has to say and counts itself; the last one decides for all, by one compare-and-set. A rank whose time is
up tries to decide that nothing is agreed. Whichever comes first holds for all, late ranks included.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed

from layerzero.core.errors import FrozenChoiceError, PolicyError, VersionMismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Store = Any  # the stubs of torch lack clone, timeout and multi_get

distributed: Any = torch.distributed
"""Its stubs lack stores."""

STAGES = ("arrive", "choose", "able")
"""The questions of one agreement, in order."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02
"""Between two looks at the store. Waiting in the store would hold its lock, which a watchdog of NCCL needs, too."""

CLOCK = time.monotonic

_OPEN: WeakKeyDictionary[object, Store] = WeakKeyDictionary()
"""A connection for each group: with a new one each time, torch 2.13's TCPStore stood still for 5 s at every 13th."""


def world() -> object | None:
    """The default group; None before it was initialised."""
    return distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None


class Decided(msgspec.Struct, frozen=True, omit_defaults=True):
    """What holds for all ranks: an answer, or why there is none; ``versions`` where only those keep it away."""

    answer: msgspec.Raw = msgspec.Raw(b"null")
    problems: list[str] = []
    versions: bool = False


Decide = Callable[[Sequence[bytes]], object]
"""Makes of what all ranks said, by their numbers in the group, the answer to all; an error reaches all."""


@dataclass
class Board:
    """The store of a group, at one agreement.

    Attributes:
        ranks: the numbers in the default group of the group's ranks.
        rank: this one's, in the group.
        timeout_s: seconds that a rank waits for the others at each question, and for the store at each of its answers.
        store: the group's; None for a process that is alone.
        number: of the agreement, as the store counts those that this rank came to: a rank whose process was started
            anew, and one that made its group anew, count as the others do.
    """

    ranks: Sequence[int] = (0,)
    rank: int = 0
    timeout_s: float = 0.0
    store: Store | None = None
    number: int = 0
    group: ProcessGroup | None = None

    @staticmethod
    def of(group: ProcessGroup | None, timeout_s: float | None) -> Board:
        """Open the next agreement of a group; that of a process without torch.distributed needs no store.

        Raises: PolicyError on a rank outside of the group, and for one that was destroyed; FrozenChoiceError where
            the store is gone.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            if group is not None:
                raise PolicyError("agree: wanted a group of torch.distributed, got one that was destroyed")
            return Board()
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise PolicyError("agree: wanted a rank of the group, got one outside; call it on those of the group")
        found = distributed.group.WORLD if group is None else group
        assert found is not None
        try:
            ranks = distributed.get_process_group_ranks(found)
        except (KeyError, ValueError) as error:
            raise PolicyError("agree: wanted a group of torch.distributed, got one that was destroyed") from error
        if len(ranks) == 1:
            return Board(ranks)
        board = Board(ranks, ranks.index(distributed.get_rank()))
        store: Store = found.get_group_store()
        board.group, board.store, board.timeout_s = found, store, timeout_s or store.timeout.total_seconds()
        try:
            board.number = board._connected().add(f"number/{board.rank}", 1)  # counts, whatever happens to this one
        except RuntimeError as error:
            _OPEN.pop(found, None)  # a late answer would be taken for that to the next question
            raise board._unreachable(error) from error
        return board

    def _connected(self, *, anew: bool = False) -> Store:
        """The store by a connection of its own, since others of the process use the group's; one is kept.

        ``anew`` for one that was late, which would take the answer to its last question for that to the next.
        """
        assert self.store is not None
        lowest = self.store
        while isinstance(lowest, distributed.PrefixStore):
            lowest = lowest.underlying_store
        if not isinstance(
            lowest, distributed.TCPStore
        ):  # no connection; a FileStore counts what is made and ends early
            return distributed.PrefixStore("layerzero", self.store)
        store = None if anew else _OPEN.get(self.group)
        if store is None:
            store = _OPEN[self.group] = self.store.clone()
        store.set_timeout(dt.timedelta(seconds=self.timeout_s))
        return distributed.PrefixStore("layerzero", store)

    def settle(self, stage: str, said: bytes, decide: Decide) -> bytes:
        """Tell the others, and get what was decided for all: by the last that came, or by one whose time was up.

        Raises: FrozenChoiceError, with the same lines on each rank, where nothing was decided; where the store is gone.
        """
        if self.store is None:
            found = _decided([said], decide)
        else:
            try:
                text = self._settled(said, stage, decide)
            except RuntimeError as error:  # of the store: the process that holds it ended, or was stopped
                text = self._asked_again(stage, error)
            found = msgspec.json.decode(text, type=Decided)
        if found.problems:
            raise (VersionMismatchError if found.versions else FrozenChoiceError)("agree", found.problems)
        return bytes(found.answer)

    def leave(self, said: bytes, decide: Decide) -> None:
        """Tell the others that this rank does not take part; they need not wait for it."""
        try:
            if self.store is not None:
                self._told(self._connected(), STAGES[0], said, decide, CLOCK())
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def _settled(self, said: bytes, stage: str, decide: Decide) -> bytes:
        began, pause = CLOCK(), SHORTEST_PAUSE_S
        store = self._connected()
        found = self._told(store, stage, said, decide, began)
        if found is not None:
            return found
        while not store.check([self._key(stage, "decided")]):
            if CLOCK() - began > self.timeout_s:
                return self._put(store, stage, Decided(problems=[self._missing(store, stage)]))
            time.sleep(pause)
            pause = min(pause * 1.2, LONGEST_PAUSE_S)
        return bytes(store.get(self._key(stage, "decided")))

    def _asked_again(self, stage: str, error: RuntimeError) -> bytes:
        """What was decided, for a rank that the store did not answer; nothing, where it is the first to say so."""
        problem = self._unreachable(error)
        try:
            return self._put(self._connected(anew=True), stage, Decided(problems=list(problem.problems)))
        except RuntimeError:
            raise problem from error

    def _told(self, store: Store, stage: str, said: bytes, decide: Decide, began: float) -> bytes | None:
        """Say it, and decide where all others came before."""
        store.set(self._key(stage, self.rank), said)
        came = store.add(self._key(stage, "came"), 1)
        if came < len(self.ranks):
            return None
        if came > len(self.ranks):
            why = f"rank {self.ranks[self.rank]} comes to agreement {self.number} of the group, which all had left"
            return msgspec.json.encode(Decided(problems=[f"{why}: it was started again alone"]))
        store.set(self._key(stage, "decider"), str(self.ranks[self.rank]))  # to be named if it ends here
        decided = _decided(store.multi_get([self._key(stage, each) for each in range(len(self.ranks))]), decide)
        if CLOCK() - began > self.timeout_s:  # stopped in between: the others may have ended with an error
            decided = Decided(problems=[f"rank {self.ranks[self.rank]} was stopped for {self.timeout_s:g} s"])
        found = self._put(store, stage, decided)
        if stage == STAGES[0]:
            self._clean(store)
        return found

    def _put(self, store: Store, stage: str, decided: Decided) -> bytes:
        text = msgspec.json.encode(decided).decode()
        return bytes(store.compare_set(self._key(stage, "decided"), "", text))

    def _missing(self, store: Store, stage: str) -> str:
        absent = [each for rank, each in enumerate(self.ranks) if not store.check([self._key(stage, rank)])]
        if not absent:
            last = self._key(stage, "decider")
            named = f"rank {store.get(last).decode()}" if store.check([last]) else "the last one"
            return f"all ranks came within {self.timeout_s:g} s, and {named} ended or stopped before it decided"
        named = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        what = "did not come" if stage == STAGES[0] else "came and did not go on"
        return (
            f"{named} {what} within {self.timeout_s:g} s: ended, stopped, slow, or the program does not call "
            "lz.agree, lz.warmup, lz.tune and lz.optimize equally often on all ranks, with one distributed_selection"
        )

    def _clean(self, store: Store) -> None:
        """Take away the agreement before: each rank that came to this one has left it."""
        last = Board(self.ranks, number=self.number - 1)
        for stage in STAGES:
            for name in ("came", "decider", "decided", *range(len(self.ranks))):
                store.delete_key(last._key(stage, name))

    def _key(self, stage: str, name: object) -> str:
        return f"{self.number}/{stage}/{name}"

    def _unreachable(self, error: Exception) -> FrozenChoiceError:
        """The error where the store does not answer: what the others decided meanwhile, this rank cannot know."""
        said = str(error).partition("\n")[0]
        why = (
            f"rank {self.ranks[self.rank]}: wanted the group's store, which rank 0 or torchrun's agent holds, to "
            f"answer within {self.timeout_s:g} s; that process ended or is stopped ({type(error).__name__}: {said})"
        )
        return FrozenChoiceError("agree", [why])


def _decided(said: Sequence[bytes], decide: Decide) -> Decided:
    try:
        return Decided(msgspec.Raw(msgspec.json.encode(decide(said))))
    except FrozenChoiceError as error:
        return Decided(problems=list(error.problems), versions=isinstance(error, VersionMismatchError))
    except Exception as error:  # noqa: BLE001  # the others wait for it
        return Decided(problems=[f"deciding failed: {type(error).__name__}: {error}"])
