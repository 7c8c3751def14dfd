"""``lz.agree``: all ranks of a job hold the same kernels, so that none computes, or waits, otherwise than the others.

Choices follow from facts, settings and measured times; ranks whose machines measured differently choose differently.
Sums are then rounded otherwise on one of them, and a kernel that is built on one rank is waited for by all. The ranks
exchange what they chose once, where the caller says. A call itself never waits for other ranks: a collective that only
some ranks enter would never end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from layerzero.asking.freeze import Frost, adopt, freeze, frozen, snapshot, tell_if_short, thaw
from layerzero.core.errors import FrozenChoiceError, PolicyError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def agree(group: ProcessGroup | None = None) -> Frost:
    """Let all ranks of a group keep the same kernel for each class of calls, until each of them calls ``lz.thaw()``.

        lz.warmup(model, inputs)  # or one step: what ranks have called or warmed up is what they agree on lz.agree()  #
        on every rank, at the same place of the program

    Of a class that several ranks have called, the lowest rank's kernel counts. From then on choices are frozen as by
    :func:`lz.freeze`: new times change nothing, and a class that was never called is chosen for by priority and id,
    which is the same on all ranks. It is a collective of the group: one exchange of what was chosen, and one of whether
    all of that can run. Where no rank has called anything, a warning says so. The plans of scopes stay what they are;
    no other rank has their settings.

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
    shared = merged(_documents(told, group))
    problems = _tried(lambda: adopt(shared))
    found = _gathered(problems, group)
    if any(found):
        if not problems:
            thaw()
        raise FrozenChoiceError(
            "agree", [f"rank {_global(rank, group)}: {each}" for rank, own in enumerate(found) for each in own]
        )
    tell_if_short("agree", shared.choices)
    return shared


def _documents(told: Sequence[Any], group: ProcessGroup | None) -> list[Frost]:
    """What the ranks chose. Raises: FrozenChoiceError for what this version cannot read, on every rank alike."""
    found, problems = [], []
    for rank, each in enumerate(told):
        try:
            found.append(msgspec.json.decode(each, type=Frost))
        except msgspec.MsgspecError as error:
            problems.append(f"rank {_global(rank, group)}: wanted a document of this version, got {error}")
    if problems:
        raise FrozenChoiceError("agree", problems)
    return found


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


def _gathered(value: bytes | list[str], group: ProcessGroup | None) -> list[bytes | list[str]]:
    """What each rank tells, as bytes in tensors: an exchange of objects would unpickle what another process sent."""
    size = torch.distributed.get_world_size(group)
    if size < 0:
        raise PolicyError("agree: wanted a rank of the group, got one outside; call it on those of the group")
    device = _exchanged_on(group)
    own = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    torch.distributed.all_gather(lengths, torch.tensor([len(own)], device=device), group=group)
    counts = [int(each) for each in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(own)] = own.to(device)
    found = [torch.empty_like(padded) for _ in range(size)]
    torch.distributed.all_gather(found, padded, group=group)
    texts = [bytes(each[:count].tolist()) for each, count in zip(found, counts, strict=True)]
    return [msgspec.msgpack.decode(each, type=bytes | list[str]) for each in texts]


def _exchanged_on(group: ProcessGroup | None) -> torch.device:
    """Where a group exchanges tensors: on the CPU if it can, else on the current device of the kind that it has."""
    pairs = str(torch.distributed.get_backend_config(group)).split(",")  # "cpu:gloo,cuda:nccl"
    kinds = [pair.partition(":")[0] for pair in pairs]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _global(rank: int, group: ProcessGroup | None) -> int:
    """The number in the default group of a rank that a group counts."""
    return rank if group is None else torch.distributed.get_global_rank(group, rank)
