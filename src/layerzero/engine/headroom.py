"""Memory: how much a kernel may take besides its results, what runs where all take more, and ``lz.defragment``.

Two bounds hold: what policy allows a kernel (``memory_headroom_mb``), and what the device had when it was read last
(:mod:`layerzero.core.system.memory`). A reading is no older than ``memory.max_age_s`` when a choice is made; no
hit reads anything. Plans are chosen anew where a new reading refuses what an earlier one let run, or the other way
round.

A limit on memory must not make a call take more of it: a reference is no cheaper than what it stands in for. A T5
encoder in training (4 x 2100 tokens, 8 heads) took 20.9 s a step in the reference, which no limit had checked, where
the kernel that was refused for 1077 MiB took 13.3 (AMD EPYC, torch 2.13, 2026-11-24).

``lz.defragment`` gives back what torch's allocator keeps in pieces, while a device is idle.

Without it the allocator does so amid a request, once no piece is large enough: that waits for the device, 10 to 100 ms.
Nothing in this package calls it: only a server knows when no request waits.
"""

from __future__ import annotations

import gc
import math
import re
import traceback
from typing import NamedTuple

import msgspec
import torch

from layerzero.core.device import Device, device_here
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import class_text
from layerzero.core.plan import Adaptation, Candidate, outdate
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system.memory import FREE, Reading, mib
from layerzero.core.system.memory import UNKNOWN as UNREAD
from layerzero.engine import health
from layerzero.engine.config import CONFIGURATION, current_policy
from layerzero.engine.policy import Lock, Policy, bound_by
from layerzero.engine.reference import dtype_of, leading
from layerzero.engine.services import SERVICES

SETTING = "memory_headroom_mb"

BEYOND = Adaptation(
    "beyond", SETTING, "take more memory than is allowed: every other kernel that may run takes as much or more"
)
"""What a plan does where memory alone keeps every kernel from a call."""


class Need(NamedTuple):
    """What a kernel needs for a call besides its results, and how that is known."""

    bytes: int
    origin: str

    @property
    def known(self) -> bool:
        """Whether anything says how much it is; what nothing tells of is to be a few MB."""
        return self.origin != UNKNOWN

    def __str__(self) -> str:
        return f"{mib(self.bytes)} ({self.origin})" if self.known else UNKNOWN


DECLARED, UNKNOWN = "declared", "unknown"

RAN_OUT: dict[tuple[str, str], int] = {}
"""By kernel and class, the bytes that a kernel needs at least, since memory ran out where less was free.

Where it is empty, nothing is known of a CPU's kernel that declares nothing, and a miss is spared the question."""


def need_of(kernel: Kernel, facts: Facts) -> Need:
    """What a kernel says, else what was measured for such calls, but at least what it lacked in this process.

    Where ranks are to run the same kernels, what one of them lacked decides nothing. Raises: what its declaration does.
    """
    if kernel.workspace_bytes is not None:
        need = Need(int(kernel.workspace_bytes(facts)), DECLARED)
    else:
        measured = SERVICES.workspace(kernel, facts)
        need = Need(0, UNKNOWN) if measured is None else Need(measured.bytes, f"measured {measured.date}")
    if RAN_OUT and _apart(current_policy()):
        asked = RAN_OUT.get((kernel.id, class_text(facts)), 0)
        if asked > need.bytes:
            return Need(asked, "at least, since memory ran out")
    return need


def _apart(policy: Policy) -> bool:
    """Whether this process chooses for itself, so that what it has free decides."""
    return bool(policy["distributed_selection"] == "independent")


class Room(NamedTuple):
    """What a kernel may take besides its results, and what bounds it."""

    bytes: float
    setting: str
    told: str


def room_for(facts: Facts, policy: Policy) -> Room:
    """The smaller one of what policy allows and what is free.

    Workspace and results, times the factor, must be free, and the workspace takes at most a share of the largest block.
    Where ranks are to run the same kernels, what one of them has free decides nothing.
    """
    allowed = policy.memory_headroom_mb * 2**20
    told = Room(allowed, SETTING, mib(allowed))
    reading = _reading(facts, policy)
    return told if reading is UNREAD else min(told, _of_reading(reading, facts, policy), key=lambda each: each.bytes)


def _reading(facts: Facts, policy: Policy) -> Reading:
    """The last reading of a call's device, or a new one; UNREAD where nothing tells or it decides nothing."""
    if not _apart(policy):
        return UNREAD
    found = FREE.of(facts.device, None if facts["capturing"] else policy["memory.max_age_s"])
    return UNREAD if found.free == math.inf else found


def _of_reading(reading: Reading, facts: Facts, policy: Policy) -> Room:
    factor, share, results = policy["memory.safety_factor"], policy["memory.block_share"], result_bytes(facts)
    most = max(0.0, min(reading.free / factor - results, share * reading.largest))
    why = (
        f"{mib(most)}: {mib(reading.free)} are free, {mib(results)} of them for results, the largest block has "
        f"{mib(reading.largest)}; safety factor {factor:g}, share of a block {share:g}, read "
        f"{FREE.age_s(reading):.0f} s ago"
    )
    return Room(most, "free memory", why)


def result_bytes(facts: Facts) -> int:
    """Bytes of a call's results, as far as the sizes of its tensors tell."""
    if facts.result_bytes is None:
        facts.result_bytes = _result_bytes(facts)
    return facts.result_bytes


def _result_bytes(facts: Facts) -> int:
    schema, found = facts.operation.schema, 0
    for output in schema.results(facts):
        axes = output.axes_in(facts.layout, schema.canonical)
        named = axes[1:] if axes[:1] == ("...",) else axes
        sizes = [*leading(facts, axes), *(int(each) if each.isdigit() else facts.get(each) for each in named)]
        if axes and all(isinstance(each, int) for each in sizes):
            found += math.prod(sizes) * dtype_of(output, facts).itemsize
    return found


def reasons(kernel: Kernel, facts: Facts, policy: Policy) -> list[Reason]:
    """Whether what the kernel needs besides its results is more than policy allows, or than is free.

    Nothing of it keeps a kernel from a collective: other ranks, with other memory, run it.
    """
    if facts.operation.is_collective:
        return []
    try:
        need = need_of(kernel, facts)
    except Exception as error:  # noqa: BLE001  # as with limits: it refuses its kernel and nothing else
        health.let_pass(error)
        got = f"{type(error).__name__}: {error}"
        return [Reason(ReasonCode.CONSTRAINT_FAILED, "workspace_bytes", "a number", got)]
    if need.bytes <= 0:
        return []
    reading = _reading(facts, policy)
    if need.bytes <= policy.memory_headroom_mb * 2**20 and (reading is UNREAD or _had(reading, facts, policy, need)):
        return []
    room = room_for(facts, policy)
    return [Reason(ReasonCode.MEMORY_HEADROOM_EXCEEDED, room.setting, room.told, str(need))]


def is_known(kernel: Kernel, facts: Facts) -> bool:
    """Whether anything tells what a kernel needs."""
    try:
        return need_of(kernel, facts).known
    except Exception as error:  # noqa: BLE001  # it refuses its kernel and nothing else
        health.let_pass(error)
        return False


def told_need(kernel: Kernel, facts: Facts) -> str:
    """What explain says of a kernel's need."""
    return str(need_of(kernel, facts)) if is_known(kernel, facts) else UNKNOWN


def fits(kernel: Kernel, facts: Facts, policy: Policy) -> bool:
    """Whether a kernel may take what it needs."""
    return not reasons(kernel, facts, policy)


def last_resort(judged: list[Candidate], facts: Facts, policy: Policy, lock: Lock | None) -> list[Candidate]:
    """Where nothing is legal, make legal what memory alone keeps from the call and what takes least of it.

    Without ``fallback_enabled`` the limit is a bound, and nothing runs beyond it.
    """
    if not policy.fallback_enabled:
        return judged
    named = bound_by(lock, judged)
    if any(each.legal for each in named):
        return judged
    needs = {each.kernel.id: need_of(each.kernel, facts).bytes for each in named if lacks_memory_alone(each)}
    least = min(needs.values(), default=0)
    return [_beyond(each) if needs.get(each.kernel.id) == least else each for each in judged]


def lacks_memory_alone(candidate: Candidate) -> bool:
    """Whether a kernel is refused for the memory that it takes, and for nothing else."""
    codes = {reason.code for reason in candidate.reasons}
    return codes == {ReasonCode.MEMORY_HEADROOM_EXCEEDED}


def _beyond(candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, reasons=(), adaptations=(*candidate.adaptations, BEYOND))


# new readings


class _Judged:
    """What was judged under the readings of a device, so that a new one tells whether any of it ends otherwise.

    Attributes:
        had: the most that was demanded and there, of all that is free and of the largest block.
        lacked: demands that were not met; the least of many.
    """

    MOST = 64

    def __init__(self) -> None:
        self.had = (0.0, 0.0)
        self.lacked: set[tuple[float, float]] = set()

    def add(self, demand: tuple[float, float], reading: Reading) -> bool:
        """Remember a demand; whether the last reading met it."""
        if _meets(reading, demand):
            self.had = max(self.had[0], demand[0]), max(self.had[1], demand[1])
            return True
        if len(self.lacked) < self.MOST or demand < max(self.lacked):
            self.lacked = {*sorted(self.lacked)[: self.MOST - 1], demand}
        return False

    def ends_otherwise(self, reading: Reading) -> bool:
        """Whether a reading lacks what was there, or has what was not."""
        return not _meets(reading, self.had) or any(_meets(reading, each) for each in self.lacked)


def _meets(reading: Reading, demand: tuple[float, float]) -> bool:
    return demand[0] <= reading.free and demand[1] <= reading.largest


_JUDGED: dict[str, _Judged] = {}
"""By the name and index of a device."""


def _had(reading: Reading, facts: Facts, policy: Policy, need: Need) -> bool:
    """Whether a reading has what a workspace demands; it is remembered for the next reading."""
    whole = (need.bytes + result_bytes(facts)) * policy["memory.safety_factor"]
    demand = whole, need.bytes / policy["memory.block_share"]
    name = f"{facts.device.name}:{facts.device.index}"
    judged = _JUDGED.get(name) or _JUDGED.setdefault(name, _Judged())
    return judged.add(demand, reading)


def _renewed(device: Device, reading: Reading) -> None:
    """Have calls choose anew where a reading would have ended any choice otherwise."""
    judged = _JUDGED.get(f"{device.name}:{device.index}")
    if judged is not None and judged.ends_otherwise(reading):
        _JUDGED.pop(f"{device.name}:{device.index}", None)
        outdate()


FREE.changed = _renewed


def forget() -> None:
    """Judge as if nothing had been read, and no memory had run out."""
    for kept in (RAN_OUT, _JUDGED):
        kept.clear()
    FREE.forget()


_WANTED = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)|you tried to allocate (\d+) (bytes)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def ran_out(kernel: Kernel, facts: Facts, policy: Policy, error: Exception) -> bool:
    """Read the device anew once memory did not suffice for a kernel, which needs more than is there: it is noted.

    A kernel that wants more than its results, by the words of torch's allocator, needs so much.
    Returns: whether another kernel may do with less: the results fit.
    """
    traceback.clear_frames(error.__traceback__)  # they hold what the kernel made on the way
    if gc.isenabled():  # it is off during a capture; an earlier error may hold the tensors of its call
        gc.collect()
    reading = FREE.of(facts.device, None) if facts["capturing"] else FREE.renewed(facts.device)
    results, found, room = result_bytes(facts), _WANTED.search(str(error)), room_for(facts, policy)
    wanted = 0 if found is None else int(float(found[1] or found[3]) * _UNITS[found[2] or found[4]])
    wanted = wanted if wanted > results else 0
    if room.setting != SETTING:
        wanted = max(wanted, int(room.bytes) + 1)
    if wanted > need_of(kernel, facts).bytes and _apart(policy):
        RAN_OUT[kernel.id, class_text(facts)] = wanted
        outdate()
    return results <= reading.free


def says_how_much(error: Exception) -> bool:
    """Whether torch's allocator refused a request, and not a driver or a library."""
    return _WANTED.search(str(error)) is not None


class Defragmented(msgspec.Struct, frozen=True):
    """What :func:`defragment` did.

    Attributes:
        device: as torch names it.
        given_back_bytes: what other requests can get at once now.
        before, after: the fragmentation, 0 to 1.
        left: why nothing was done; empty where something was.
    """

    device: str
    given_back_bytes: int = 0
    before: float = 0.0
    after: float = 0.0
    left: str = ""

    def __str__(self) -> str:
        if self.left:
            return f"{self.device}: nothing is done: {self.left}"
        done = f"{self.device}: {mib(self.given_back_bytes)} given back"
        return f"{done}, fragmentation {self.before:.2f} before and {self.after:.2f} after"


def defragment(device: str | torch.device | None = None) -> Defragmented:
    """Give back what torch's allocator keeps and does not use, if it is fragmented and the device is idle.

    Call it where a server waits for requests; it takes 10 to 100 ms, and is never called by this package. It does
    nothing below the setting ``memory.fragmentation``, while a CUDA graph is captured, or while the device works. Work
    is what runs on the current stream or the default one, or still reads memory on another.

    Args:
        device: which; the current CUDA device if there is one in use, else the CPU, whose memory lies anywhere.
    Returns: what was done, or why nothing was.
    Raises: ValueError for what names no device, and for one that is not here.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    found = Device.detect(device_here(device or ("cuda" if used else "cpu")))
    name = f"{found.torch_type}:{found.index}"
    if found.torch_type != "cuda" or not used:
        return Defragmented(name, left="torch keeps no memory of it")
    with torch.cuda.device(found.index):
        if busy := _busy(found.index):
            return Defragmented(name, left=busy)
        before = FREE.renewed(found)
        most = CONFIGURATION.policy["memory.fragmentation"]
        if math.isinf(before.free) or before.fragmentation <= most:
            told = f"fragmentation is {before.fragmentation:.2f}, memory.fragmentation allows {most:g}"
            return Defragmented(name, before=before.fragmentation, after=before.fragmentation, left=told)
        kept = torch.cuda.memory_reserved(found.index)
        torch.cuda.empty_cache()
        after = FREE.renewed(found)
        given_back = kept - torch.cuda.memory_reserved(found.index)
        return Defragmented(name, given_back, before.fragmentation, after.fragmentation)


def _busy(index: int) -> str:
    """What the device does now; empty if nothing is known."""
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if not torch.cuda.current_stream(index).query() or not torch.cuda.default_stream(index).query():
        return "a stream has work that is not done"
    told = torch.cuda.memory_stats(index)
    if told.get("active_bytes.all.current", 0) > told.get("allocated_bytes.all.current", 0):
        return "another stream still reads freed memory"
    return ""
