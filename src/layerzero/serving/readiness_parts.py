"""The parts of ``lz.readiness_check``, builds aside: each says in a line what it found, and the next step.

A part reads what is known already; nothing runs, is built or is written. :data:`PARTS` lists them: a further one is a
function from :class:`Looked` to a :class:`Part`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from layerzero.core.device import Device
from layerzero.core.errors import DescriptorError, PolicyError
from layerzero.core.plan import Report
from layerzero.core.system.memory import FREE, mib
from layerzero.engine import headroom
from layerzero.engine.config import CONFIGURATION
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.events import EVENTS
from layerzero.engine.frozen_choices import Agreed, ranks_choose
from layerzero.engine.proofs import capture_reasons
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.descriptors import DESCRIPTORS
from layerzero.inspection.diagnosis import conflicts, other_cudas
from layerzero.inspection.model_sets import OperationSupport, served
from layerzero.serving.metrics import metrics
from layerzero.tuning.storage.prior import problems as problems_of_tables
from layerzero.tuning.storage.store import StoreLedger

NAMED = 3
"""Findings of a part that its line names; it counts the others."""


class PartState(StrEnum):
    """How a part stands."""

    READY = "ready"
    DEGRADED = "degraded"
    """Calls are answered, slower or otherwise than they could be; traffic may come."""
    NOT_READY = "not ready"
    """Calls would raise or run out of memory; no traffic."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of readiness.

    Attributes:
        name: of the part.
        state: how it stands.
        text: what was found, in a line.
        step: what to do; empty where nothing has to be done.
    """

    name: str
    state: PartState
    text: str
    step: str = ""

    def to_dict(self) -> dict[str, str]:
        return {**asdict(self), "state": str(self.state)}

    def __str__(self) -> str:
        return f"{self.name}: {self.state}: {self.text}" + (f"; {self.step}" if self.step else "")


@dataclass(frozen=True, slots=True)
class Looked:
    """What the parts look at.

    Attributes:
        device: whose calls, as torch names it.
        calls: each call by name, with the report of what it would choose now.
        sets: names of the sets of operations that the deployment needs.
    """

    device: str
    calls: Sequence[tuple[str, Report]] = ()
    sets: Sequence[str] = ()


def _part(name: str, fine: str, found: Sequence[str], step: str, *, blocks: bool = False) -> Part:
    """The part of a list of findings; without any it is ready."""
    if not found:
        return Part(name, PartState.READY, fine)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    text = "; ".join(found[:NAMED]) + more
    return Part(name, PartState.NOT_READY if blocks else PartState.DEGRADED, text, step)


def settings(_: Looked) -> Part:
    """Whether settings can be read, and name kernels and operations that exist: every call raises otherwise."""
    try:
        policy = CONFIGURATION.policy
        wrong = list(REGISTRY.names.problems(policy))
    except PolicyError as error:
        wrong = list(error.problems)
    if wrong:
        return _part("settings", "", wrong, "`layerzero config show` tells where each comes from", blocks=True)
    changed = [key for key, (_, origin) in CONFIGURATION.effective_with_origin().items() if origin != "default"]
    if not policy.enabled:
        step = "set enabled: true, unless this is wanted"
        return _part("settings", "", ["enabled is false: only torch's own kernels run"], step)
    return _part("settings", f"{', '.join(changed) or 'nothing'} set, and valid", (), "")


def descriptors(_: Looked) -> Part:
    """Whether the files of the setting can be put in force: every call raises otherwise."""
    wrong: list[str] = []
    try:
        count = len(DESCRIPTORS.in_force())
    except (DescriptorError, PolicyError) as error:
        wrong.append(str(error).replace("\n", " "))
    step = "`layerzero descriptor check FILE` lists every problem"
    return _part("descriptors", f"{0 if wrong else count} in force", wrong, step, blocks=True)


def tables(looked: Looked) -> Part:
    """Whether every call finds a kernel, a faster one than the reference, and the shipped tables can be read."""
    none = [f"{name} finds no kernel" for name, report in looked.calls if report.chosen is None]
    if none:
        return _part("tables", "", none, "`layerzero explain` lists every reason", blocks=True)
    slow = [
        f"{name} runs the slow reference"
        for name, report in looked.calls
        if report.chosen is not None and report.chosen.kernel.is_reference and not report.facts.empty
    ]
    found = [*slow, *problems_of_tables()]
    return _part("tables", f"{len(looked.calls)} calls find a kernel", found, "`layerzero explain` lists every reason")


def memory(looked: Looked) -> Part:
    """Whether the workspaces of what calls choose fit into what is free."""
    needs = {
        name: headroom.need_of(report.chosen.kernel, report.facts).bytes
        for name, report in looked.calls
        if report.chosen is not None
    }
    policy, device = CONFIGURATION.policy, Device.detect(looked.device)
    found = FREE.of(device, policy["memory.max_age_s"])
    told, most = FREE.told(device, None), max(needs.values(), default=0)
    room = policy["memory.block_share"] * found.largest
    beyond = [f"{name} takes a workspace of {mib(need)}, {told}" for name, need in needs.items() if need > room]
    if beyond:
        step = "free memory, or make its batch smaller"
        return _part("headroom", "", beyond, step, blocks=True)
    if found.largest < policy.memory_headroom_mb * 2**20:
        short = [f"{told}, {headroom.SETTING} allows a kernel {policy.memory_headroom_mb} MiB"]
        return _part("headroom", "", short, f"free memory, or set {headroom.SETTING} lower")
    loose = [told] if found.fragmentation > policy["memory.fragmentation"] else []
    fine = f"{told}, workspaces of these calls take {mib(most)} at most"
    return _part("headroom", fine, loose, "call lz.defragment() while nothing runs")


def graphs(looked: Looked) -> Part:
    """Whether a capture may have what calls run, by verdicts, and where strict mode asks for them by their absence."""
    policy, found = CONFIGURATION.policy, []
    for name, report in looked.calls:
        if report.chosen is not None and report.facts.device.supports_graphs:
            kernel = report.chosen.kernel
            reasons = capture_reasons(kernel, report.facts, policy, ENGINE.ledger)
            found += [f"{name}: a capture refuses {kernel.id}: {each.got}" for each in reasons]
    return _part(
        "graphs", "no verdict keeps what calls run out of captures", found, "`layerzero vet --graph` proves captures"
    )


def database(_: Looked) -> Part:
    """Whether measured times and verdicts can be read and written."""
    ledger = ENGINE.ledger
    if not isinstance(ledger, StoreLedger) or ledger.times.database.path is None:
        fine = "times are kept in memory only"
    else:
        written = ledger.times.written_at_unix_s()
        fine = "no times on disk yet" if written is None else f"times last written {_ago(time.time() - written)} ago"
    return _part("database", fine, ledger.notes(), "`layerzero perfdb check` tells more; calls go on without")


def _ago(seconds: float) -> str:
    return f"{seconds / 3600:.0f} h" if seconds < 86400 else f"{seconds / 86400:.0f} days"


def health(_: Looked) -> Part:
    """Whether kernels rest, are suspected or banned, libraries are out of use, or the device is lost."""
    health, found = ENGINE.health, metrics()
    if health.context_lost:
        return _part("health", "", [health.context_lost], "restart the process", blocks=True)
    plugins = REGISTRY.plugins.told() if REGISTRY.plugins else {}
    bad = [
        *(f"{each} rests" for each in found.resting),
        *(f"{name} is out of use: {error}" for name, error in health.disabled().items()),
        *([f"{found.suspects} suspects"] if found.suspects else []),
        *([f"{found.bans} kernels and classes are banned on this machine"] if found.bans else []),
        *(f"plugin {name} was not loaded: {error}" for name, error in dict(plugins).items()),
    ]
    return _part("health", "no kernel rests, is suspected or banned", bad, "`layerzero doctor` tells why")


def libraries(_: Looked) -> Part:
    """Whether installed packages go together: none that harm each other, and one CUDA for all."""
    found = [*conflicts(REGISTRY.backends()), *other_cudas()]
    return _part(
        "libraries",
        "no packages that harm each other, and no second CUDA",
        found,
        "`layerzero doctor` lists all issues",
    )


def telemetry(_: Looked) -> Part:
    """Whether listeners take the events that are meant for them."""
    listeners = EVENTS.listeners()
    lost = [f"{each.name} was too slow for {each.dropped} events" for each in listeners if each.dropped]
    lost += [f"{each.name} raised {each.errors} times" for each in listeners if each.errors]
    fine = f"listeners: {len(listeners)}" if listeners else "no listener; lz.metrics() counts without one"
    return _part("telemetry", fine, lost, "look at what a listener waits for; the log has the first of each")


def frozen(_: Looked) -> Part:
    """Whether every frozen choice is kept."""
    held = ENGINE.frozen
    if held is None:
        return Part("frozen", PartState.READY, "nothing; choices follow measured times")
    left = [f"{name}: {each.ran} runs in place of {each.kernel}" for name, each in held.departures.items()]
    return _part("frozen", f"{len(held.choices)} classes keep their kernel", left, "lz.frozen().departures says why")


def ranks(_: Looked) -> Part:
    """Whether the ranks of a job agreed, where they are to run the same kernels."""
    held = ENGINE.frozen
    if isinstance(held, Agreed):
        differ = ["versions differ between ranks, so that all of them run torch's own kernels"] if held.fallback else []
        return _part("ranks", f"they agreed on {len(held.choices)} classes", differ, "install the same versions")
    alone = [] if not ranks_choose(CONFIGURATION.policy) else ["they have not agreed: priority chooses, without times"]
    return _part("ranks", "each chooses for itself", alone, "call lz.warmup or lz.agree() on every rank")


def sets(looked: Looked) -> Part:
    """Whether every operation of the requested sets finds a kernel, and a faster one than its reference."""
    findings = [(name, each) for name in looked.sets for each in served(name, Device.detect(looked.device))]
    none = [f"{name}: {each.operation} finds no kernel" for name, each in findings if not each.chosen]
    if none:
        return _part("sets", "", none, "`layerzero doctor --for SET` says what helps", blocks=True)
    slow = [
        f"{name}: {each.operation} has its slow reference alone"
        for name, each in findings
        if each.served is OperationSupport.REFERENCE
    ]
    fine = f"{len(findings)} operations of {', '.join(looked.sets)} find kernels" if looked.sets else "none was named"
    return _part("sets", fine, slow, "`layerzero doctor --for SET` says what helps")


BEFORE: tuple[Callable[[Looked], Part], ...] = (settings, descriptors)
"""What every call needs; where one of them is not ready, no call can be looked at."""

PARTS: tuple[Callable[[Looked], Part], ...] = (
    tables, memory, graphs, database, health, libraries, telemetry, frozen, ranks, sets,
)  # fmt: skip
"""The others, in the order in which they are shown."""
