"""What was found out about kernels on one machine, for others of its kind: verdicts, proofs of captures, workspaces.

They are lines of an exported file, behind its times. Each is sealed, and says for which library, torch, device and
capability it holds: one that does not fit is left, and the first difference is named. What was found here stays.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from layerzero.core.device import Device, devices_here
from layerzero.core.ledger import Ledger
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.files import FileLedger, versions_of
from layerzero.tuning.storage.records import CAPTURE, VERDICT, WORKSPACE, Name, Record, Versions, slug_of
from layerzero.tuning.storage.rows import Row
from layerzero.tuning.storage.store import StoreLedger

KINDS = (VERDICT, CAPTURE, WORKSPACE)


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of one of :data:`KINDS`."""

    kind: str
    record: Record

    @property
    def name(self) -> Name:
        """What its file is called."""
        return Name(slug_of(self.record.kernel), self.record.key, self.kind)


def _files(ledger: Ledger) -> FileLedger | None:
    markers = ledger.markers if isinstance(ledger, StoreLedger) else ledger
    return markers if isinstance(markers, FileLedger) else None


def found_here(ledger: Ledger) -> list[Finding]:
    """All that lies in this machine's folder, whatever it holds for."""
    files = _files(ledger)
    if files is None:
        return []
    files.notes()  # lists the folder anew
    return [Finding(name.kind, record) for name, record in files.files.all(*KINDS)]


def matching(found: Iterable[Finding], *, kernel: str, operation: str, here: bool) -> Iterator[Finding]:
    """Those by glob of kernel and operation; with ``here`` those alone that hold on this machine as it is now."""
    devices = devices_here()
    for each in found:
        of = each.record.what.split(" ", 1)[0]  # a class of calls names its operation first
        if (
            fnmatch.fnmatchcase(each.record.kernel, kernel)
            and fnmatch.fnmatchcase(of, operation)
            and not (here and unlike(each.record, devices))
        ):
            yield each


def sealed(finding: Finding) -> Finding:
    """The finding with its checksum, for a file."""
    return Finding(finding.kind, msgspec.json.decode(finding.record.sealed(), type=Record))


def check(finding: Finding) -> None:
    """Refuse one that was changed, or is of no kind. Raises: ValueError with wanted and got."""
    if finding.kind not in KINDS:
        raise ValueError(f"kind: wanted {' or '.join(KINDS)}, got {finding.kind!r}")
    if sealed(finding).record.check != finding.record.check:
        raise ValueError(f"{finding.record.kernel}: its checksum does not hold")


def unlike(record: Record, devices: Iterable[Device]) -> str:
    """The first thing in which a record differs from this machine; empty where it holds here."""
    try:
        kernel = REGISTRY.kernel(record.kernel)
    except KeyError:
        return f"{record.kernel}: wanted a kernel that is registered here"
    several = [versions_of(kernel, device) for device in devices]
    here = next((each for each in several if each.device == record.versions.device), several[-1])
    for name in Versions.__struct_fields__[::-1]:  # the capability and the device tell more than versions
        wanted, got = getattr(here, name), getattr(record.versions, name)
        if wanted != got:
            return f"{name}: wanted {wanted or 'none'}, got {got or 'none'}"
    return ""


def take(ledger: Ledger, found: Iterable[Finding], *, dry_run: bool = False) -> tuple[int, Counter[str]]:
    """Keep what holds here and says something new; how many, and how many were left, by the difference."""
    left: Counter[str] = Counter()
    files, taken, devices = _files(ledger), 0, devices_here()
    if files is None:
        return 0, Counter({"no folder is kept on disk": len(list(found))})
    known = {each.name for each in found_here(ledger)}
    for each in found:
        why = unlike(each.record, devices) or ("it was found here already" if each.name in known else "")
        left[why] += bool(why)
        if not why:
            taken += 1
            if not dry_run:
                files.files.put(each.record, each.kind)
    return taken, +left


def differences(here: Iterable[Row], there: Iterable[Row], most: int) -> tuple[Counter[str], list[str]]:
    """How two sets of times differ: counts, and a line for each kernel and work of both, farthest apart first."""
    own, other = _latest(here), _latest(there)
    both = sorted(own.keys() & other.keys(), key=lambda each: -_apart(own[each], other[each]))
    lines = [
        f"{each[0]} {own[each].facts.get('operation')}: {own[each].median_us:.1f} us here, "
        f"{other[each].median_us:.1f} us there"
        for each in itertools.islice(both, most)
    ]
    counts = {"in both": len(both), "here alone": len(own) - len(both), "there alone": len(other) - len(both)}
    return Counter(counts), lines


def _latest(rows: Iterable[Row]) -> Mapping[tuple[str, bytes, bool], Row]:
    found: dict[tuple[str, bytes, bool], Row] = {}
    for row in sorted(rows, key=lambda each: each.written_at):
        found[row.kernel, row.work.key, row.graph] = row
    return found


def _apart(one: Row, other: Row) -> float:
    return max(one.median_us, other.median_us) / min(one.median_us, other.median_us)
