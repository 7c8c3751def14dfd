"""``lz.agree``: all ranks of a job hold the same kernels, so that none computes, or waits, otherwise than the others.

Choices follow from facts, settings and measured times; ranks whose machines measured differently choose differently.
Sums are then rounded otherwise on one of them, and a kernel that is built on one rank is waited for by all. The ranks
exchange what they chose once, where the caller says. Nothing is asked of others while a call is made: a collective
that only some ranks enter would never end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from layerzero.asking.freeze import Frost, adopt, freeze, frozen, snapshot, thaw
from layerzero.core.errors import FrozenChoiceError, PolicyError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def agree(group: ProcessGroup | None = None) -> Frost:
    """Let all ranks of a group keep the same kernel for each class of calls, until each of them calls ``lz.thaw()``.

        lz.warmup(model, inputs)  # or one step: what ranks have called is what they agree on
        lz.agree()  # on every rank, at the same place of the program

    Of a class that several ranks have called, the lowest rank's kernel counts. From then on choices are frozen as by
    :func:`lz.freeze`: new times change nothing, and a class that nobody has called is chosen for by priority and id,
    which is the same on all ranks. It is a collective of the group: one exchange of what was chosen, and one of whether
    all of that can run. The plans of scopes stay what they are; no other rank can be asked about their settings.

    Args:
        group: whose ranks agree; the default group if None. Without torch.distributed, or before it was initialised,
            this process is the only rank.
    Returns: the document that all ranks hold; its hash is the same everywhere.
    Raises: PolicyError if choices are frozen already on any rank, and on a rank that is not in the group;
        FrozenChoiceError on every rank, naming the ranks by their numbers in the default group, where versions, devices
        or settings differ or a kernel cannot run on one of them. Nothing is frozen then.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return freeze()
    already = frozen() is not None
    told = _gathered(b"" if already else _tried(lambda: msgspec.json.encode(snapshot())), group)
    failed = [f"rank {_global(rank, group)}: {each[0]}" for rank, each in enumerate(told) if isinstance(each, list)]
    if failed:
        raise FrozenChoiceError("agree", failed)
    if not all(told):
        ranks = "rank " + ", ".join(str(_global(rank, group)) for rank, each in enumerate(told) if not each)
        raise PolicyError(f"agree: choices are frozen already on {ranks}; wanted lz.thaw() there first")
    shared = merged([msgspec.json.decode(each, type=Frost) for each in told])
    problems = _tried(lambda: adopt(shared))
    found = _gathered(problems, group)
    if any(found):
        if not problems:
            thaw()
        raise FrozenChoiceError(
            "agree", [f"rank {_global(rank, group)}: {each}" for rank, own in enumerate(found) for each in own]
        )
    return shared


def merged(documents: Sequence[Frost]) -> Frost:
    """The choices of all ranks in one document: of each class the lowest rank's."""
    choices = {
        name: choice for each in reversed(documents) for name, choice in each.choices.items() if not choice.scoped
    }
    return msgspec.structs.replace(documents[0], choices=choices).sealed()


def _tried(run: Callable[[], Any]) -> Any:
    """What this rank tells; its error as a problem, since the others wait for what it tells."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001  # raised on every rank, with this one's number
        return [f"{type(error).__name__}: {error}"]


def _gathered(value: Any, group: ProcessGroup | None) -> list[Any]:
    size = torch.distributed.get_world_size(group)
    if size < 0:
        raise PolicyError("agree: wanted a rank of the group, got one outside; call it on those of the group")
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def _global(rank: int, group: ProcessGroup | None) -> int:
    """The number in the default group of a rank that a group counts."""
    return rank if group is None else torch.distributed.get_global_rank(group, rank)
