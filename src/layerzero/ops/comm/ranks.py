"""The ranks of a process group as a collective sees them: how many, what moves their bytes, and how alike they are.

Every rank must run the same kernel of a collective, so that what a kernel is chosen by is the same on all of them. What
one rank cannot see alone (hosts, versions, devices, which GPUs reach each other) ranks tell each other through the
group's store, once for each group and kind of device, at its first collective. No later call waits for the host.

What collectives are made of: sums in a fixed order, and torch's own functions with a result of their own.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.plan import outdate
from layerzero.core.system import forking
from layerzero.ops.declaration import wide
from layerzero.ops.norm.declare import rms_norm

__all__ = ["PEERS", "ProcessGroup", "Ranks", "facts_of_group", "kind_of_group", "problem_of", "ranks_of"]

distributed: Any = torch.distributed
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
else:
    ProcessGroup = getattr(distributed, "ProcessGroup", None)

UNLIKE, APART, HOST, PEERS = "unlike", "apart", "host", "peers"
"""How near ranks are: of other versions or devices, on several hosts, on one, GPUs that reach each other's memory."""

_PAUSE_S = 0.002
_LOCK = forking.rlock()
_NONE: Any = lambda: None  # noqa: E731  # a weak reference to nothing
_DESTROYED = "group: wanted a group of torch.distributed, got one that was destroyed"


class Ranks:
    """The ranks that a collective runs over: those of a group of ``torch.distributed``, or this process alone.

        lz.all_reduce(x, group=lz.Ranks.alone())  # a copy of x: for code that also runs without torch.distributed

    Attributes:
        group: the process group, which this does not keep alive; None for a process alone.
        size: how many they are.
        rank: this one's place among them.
    """

    def __init__(self, group: Any, size: int, rank: int) -> None:
        self._group = _NONE if group is None else ref(group)
        self.size, self.rank = size, rank
        self._kinds: dict[str, str] = {}
        self._mark = os.urandom(8).hex()
        self._generation = "" if rank else self._mark

    @property
    def group(self) -> Any:
        """The process group, None for a process alone. Raises: InvalidCallError for one that is gone."""
        found = self._group()
        if found is None and self._group is not _NONE:
            raise InvalidCallError("collective", [_DESTROYED])
        return found

    @staticmethod
    def alone() -> Ranks:
        """This process alone: sums are copies, and torch.distributed may be absent."""
        return _ALONE

    def transport(self, device: str) -> str:
        """What moves bytes of a kind of device: ``nccl``, ``gloo``; ``none`` for a process alone, empty for nothing."""
        group = self.group
        if group is None:
            return "none"
        try:
            return str(group._get_backend(torch.device(device)).name())
        except (RuntimeError, ValueError):
            return ""

    def kind(self, device: str) -> str:
        """What a choice sees of them: their number, the transport and how near they are, in three words."""
        found = self._kinds.get(device)
        if found is None:  # two threads may ask at once, and get the same
            transport = self.transport(device)
            near = self._near(device) if transport and self.size > 1 else HOST
            found = self._kinds[device] = f"{self.size} {transport or 'nothing'} {near}"
        return found

    def _near(self, device: str) -> str:
        """How near all ranks are, as all of them say; waits for the others, once."""
        from layerzero import __version__

        index = torch.cuda.current_device() if device == "cuda" else 0
        about = torch.cuda.get_device_properties(index) if device == "cuda" else None
        same = [__version__, str(torch.__version__)]
        same += [] if about is None else [about.name, str(about.multi_processor_count)]
        said = [*same, platform.node(), "" if about is None else str(getattr(about, "uuid", ""))]
        all_said = self._told(f"{device}/about", said)
        if any(each[: len(same)] != same for each in all_said):
            return UNLIKE
        if len({each[-2] for each in all_said}) > 1:
            return APART
        here = self._told(f"{device}/reach", [str(about is not None and _reaches(index, [e[-1] for e in all_said]))])
        return PEERS if all(each == ["True"] for each in here) else HOST

    def _told(self, name: str, said: list[str]) -> list[list[str]]:
        """What all ranks say, this one among them. Raises: InvalidCallError that names those that do not come.

        A store may outlive a group and serve the next one, so that rank 0's mark is in all keys. The others get it as
        the answer to their own marks, which no group before them had.
        """
        store = distributed.PrefixStore("layerzero/collectives", self.group.get_group_store())
        if not self._generation:
            store.set(f"asked/{self.rank}", self._mark)
            self._wait(store, {0: f"answered/{self._mark}"})
            self._generation = store.get(f"answered/{self._mark}").decode()
        keys = {each: f"{self._generation}/{name}/{each}" for each in range(self.size)}
        store.set(keys[self.rank], msgspec.json.encode(said).decode())
        self._wait(store, keys)
        return [msgspec.json.decode(store.get(key), type=list[str]) for key in keys.values()]

    def _wait(self, store: Any, keys: dict[int, str]) -> None:
        """Wait for what ranks write under these keys; rank 0 answers the others meanwhile."""
        until, answered = time.monotonic() + store.timeout.total_seconds(), set[str]()
        while absent := [each for each, key in keys.items() if not store.check([key])]:
            for each in absent if self.rank == 0 else ():
                mark = store.get(f"asked/{each}").decode() if store.check([f"asked/{each}"]) else ""
                if mark and mark not in answered:
                    store.set(f"answered/{mark}", self._generation)
                    answered.add(mark)
            if time.monotonic() > until:
                late = ", ".join(map(str, absent))
                wanted = f"wanted all {self.size} ranks within {store.timeout.total_seconds():g} s"
                problem = f"group: {wanted} at its first collective, got none from {late} (of the group)"
                raise InvalidCallError("collective", [problem])
            time.sleep(_PAUSE_S)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.size}>"


def _reaches(index: int, uuids: list[str]) -> bool:
    """Whether a GPU reads the memory of all others of these; those that this process cannot see it does not."""
    visible = {str(torch.cuda.get_device_properties(each).uuid): each for each in range(torch.cuda.device_count())}
    places = [visible.get(each) for each in uuids]
    if None in places or len(set(places)) < len(places):
        return False
    return all(each == index or torch.cuda.can_device_access_peer(index, each) for each in places)


_ALONE = Ranks(None, 1, 0)
_KNOWN: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
_DEFAULT: list[Any] = [_NONE]
"""The default group that plans were made for: no key tells it, so that another one has them made anew."""


def problem_of(group: Any) -> str:
    """Why a collective cannot run over a group; empty where it can."""
    if type(group) is Ranks:
        return ""
    if not distributed.is_available():
        return "group: wanted torch with torch.distributed, got one that was built without"
    if group is None and not distributed.is_initialized():
        why = "wanted torch.distributed.init_process_group before, got none"
        return f"group: {why}; group=lz.Ranks.alone() is for one process"
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        return "group: this rank is outside of it; call it on those of the group"
    if group is not None and not isinstance(group, ProcessGroup):
        return "group: torch.distributed.new_group makes one"
    if group is not None and group not in distributed.distributed_c10d._world.pg_map:
        return _DESTROYED
    return ""


def _kept(group: Any) -> Ranks | None:
    """The ranks of a group that was met before and still is; of the default group for None."""
    world = distributed.distributed_c10d._world
    found = world.default_pg if group is None else group
    if group is None and found is not _DEFAULT[0]():
        return None
    known = _KNOWN.get(found) if isinstance(found, ProcessGroup) else None
    return known if known is not None and found in world.pg_map else None


def ranks_of(group: Any) -> Ranks:
    """The ranks of a group; of the default group for None. Raises: InvalidCallError for one that is not there."""
    if type(group) is Ranks:
        return group
    known = _kept(group) if distributed.is_available() else None
    if known is not None:
        return known
    problem = problem_of(group)
    if problem:
        raise InvalidCallError("collective", [problem])
    found = distributed.distributed_c10d._world.default_pg if group is None else group
    with _LOCK:
        known = _KNOWN.get(found)
        if known is None:
            known = _KNOWN[found] = Ranks(found, found.size(), found.rank())
        if group is None and found is not _DEFAULT[0]():
            before, _DEFAULT[0] = _DEFAULT[0], ref(found)
            if before is not _NONE:
                outdate()
    return known


def kind_of_group(group: Any, input: Any) -> str:
    """What a choice sees of the group of a call; ``absent`` for one that the route refuses."""
    ranks = group if type(group) is Ranks else _kept(group) if distributed.is_available() else None
    if ranks is None and problem_of(group):
        return "absent"
    return (ranks or ranks_of(group)).kind(input.device.type if isinstance(input, Tensor) else "cpu")


def facts_of_group(arguments: Any, values: Any) -> dict[str, object]:
    """How many ranks, what moves their bytes and how near they are: facts of every collective's call."""
    said = str(values["group"])
    if said == "none":  # the default group, which no key tells
        device = "cuda" if values["platform"] in ("cuda", "rocm") else str(values["platform"])
        said = "1 none host" if problem_of(None) else ranks_of(None).kind(device)
    size, transport, near = said.split() if said != "absent" else ("1", "none", HOST)
    return {"rank_count": int(size), "transport": transport, "group_reach": near}


DENSE = torch.contiguous_format
_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(distributed, "all_gather_into_tensor", None)
_scatter: Any = getattr(distributed, "reduce_scatter_single", getattr(distributed, "reduce_scatter_tensor", None))
"""torch 2.13 has new names, and warns of the old ones."""

REDUCTIONS = ("sum", "max", "min")


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add parts up in the order of a tree: neighbours first, then neighbours of these sums.

    The order is that of the kernel ``layerzero.tree_all_reduce``. Where each rank adds up its own 1, 2, 4, ... parts
    so, an equal number on each, and that kernel adds the ranks' sums, the bits are those of all parts on one rank.

    Shapes: each (*), the same → (*)
    Dtype: any, the same for all; each sum is rounded to it.
    Raises: InvalidCallError for no part.
    """
    if not parts:
        raise InvalidCallError("tree_sum", [f"parts: wanted at least one tensor, got {told(list(parts))}"])
    level = list(parts)
    while len(level) > 1:
        pairs = [level[place] + level[place + 1] for place in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def along(input: Tensor, dim: int) -> Tensor:
    """A tensor with an axis in front, dense."""
    return input.movedim(dim, 0).contiguous() if input.ndim > 1 else input.contiguous()


def back(output: Tensor, dim: int) -> Tensor:
    """The first axis where it was, dense."""
    return output.movedim(0, dim).contiguous() if output.ndim > 1 else output


def gathered(input: Tensor, group: Any) -> Tensor:
    """What all ranks have, one after the other along a new first axis."""
    ranks = ranks_of(group)
    if ranks.group is None:
        return input.unsqueeze(0).clone(memory_format=DENSE)
    dense = input.contiguous()
    output = dense.new_empty((ranks.size * dense.numel(),))
    _gather(output, dense.view(-1), group=ranks.group)
    return output.view(ranks.size, *input.shape)


def reduced(input: Tensor, op: str, group: Any) -> Tensor:
    """The sum, or the largest or smallest of each element, in float32 or wider, in the order of the ranks.

    Whole numbers are added up as they are.
    """
    parts = gathered(input, group)
    if op != "sum":
        return parts.amax(0) if op == "max" else parts.amin(0)
    total = parts[0].to(wide(input.dtype) if input.is_floating_point() else input.dtype)
    for part in parts[1:]:
        total = total + part
    return total.to(input.dtype)


def torch_all_reduce(input: Tensor, reduce_op: str = "sum", group: Any = None) -> Tensor:
    """``torch.distributed.all_reduce`` of a copy."""
    ranks, output = ranks_of(group), input.clone(memory_format=DENSE)
    if ranks.group is not None:
        distributed.all_reduce(output, _op(reduce_op), group=ranks.group)
    return output


def then_norm(reduce: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A sum over ranks, a new tensor, with a residual added and its norm behind it: torch's, but of float64."""

    def run(
        input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, group: Any = None
    ) -> tuple[Tensor, Tensor]:
        total = reduce(input, group=group).add_(residual)
        if total.dtype is torch.float64:
            # torch's, on a GPU, makes NaN of a row with an infinity (H200, torch 2.11, 2026-11-27)
            return rms_norm(total, weight, eps), total
        return functional.rms_norm(total, weight.shape, weight, eps), total

    return run


def torch_reduce_scatter(input: Tensor, scatter_dim: int = 0, reduce_op: str = "sum", group: Any = None) -> Tensor:
    """``torch.distributed.reduce_scatter_single``, along any axis."""
    ranks = ranks_of(group)
    if ranks.group is None:
        return input.clone(memory_format=DENSE)
    parts = along(input, scatter_dim)
    output = parts.new_empty((parts.shape[0] // ranks.size, *parts.shape[1:]))
    _scatter(output, parts, _op(reduce_op), group=ranks.group)
    return back(output, scatter_dim)


def _op(name: str) -> Any:
    return getattr(distributed.ReduceOp, name.upper())
