"""Times that ship with the package: what was measured on a device of this name, where the user has measured nothing.

A table is JSON under ``priors/``, one or more a device. It is matched more loosely than measured times are: layouts and
row strides do not count, and neither do the driver and minor versions; so it decides less. A CPU's counts in full for
the number of threads and the instruction sets that it was measured with, since kernels gain differently from both.

Times travel, for less again. Where no family of a table is about a call, the nearest one of the same function is, whose
fixed sizes (a head's features) are at most twice or half as large: kernels round them up, so the next larger comes
first. A GPU without a table has those of another one of its compute capability, and a CPU those of the nearest one with
the same unit for products (:func:`layerzero.core.cpu_features.unit`). Only times of one table are compared, so that
their order alone counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

import msgspec
import torch
from packaging.version import InvalidVersion, Version

from layerzero.core import cpu_features
from layerzero.core.device import Device, capability_hash
from layerzero.core.evidence import HOST_MARGIN, Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.known_devices import KNOWN_DEVICES
from layerzero.core.ledger import Libraries
from layerzero.engine import probe
from layerzero.engine.judgements import EpochValues
from layerzero.tuning.prediction.fitting import fit
from layerzero.tuning.prediction.predict import Model, Point, meaning_of, predict, waits
from layerzero.tuning.storage.rows import axes_of, is_plain, work_of
from layerzero.tuning.storage.tables import UNUSUAL, Family, Table, read_table, slug, told_apart

FOLDER = Path(__file__).parents[1] / "priors"

CONFIDENCE = 0.7
"""What a time of another machine of the same name counts; of another driver and minor version, too."""

ELSEWHERE = 0.7
"""What a table of another device of the same compute capability counts, in units of one of this device."""

OTHER_THREADS = 0.7
"""What one counts in addition, which was measured with another number of threads."""

NEIGHBOUR = 0.8
"""What a family counts whose fixed sizes are others."""

MAX_APART = 1.0
"""Doublings of all fixed sizes together, beyond which a family is no neighbour; half of that below the call's."""

_ALIKE = frozenset({"float16", "bfloat16"})
"""The same units multiply both, at the same rate, on every NVIDIA GPU that multiplies the second."""

NOISE = 0.05
"""Relative difference below which two of them do not count."""


class Learnt:
    """A family that was asked about: its exact times, and a model of each kernel's."""

    def __init__(self, family: Family) -> None:
        self.exact: dict[str, dict[tuple[tuple[str, int], ...], tuple[float, float | None]]] = {}
        points: dict[str, list[Point]] = {}
        meaning = meaning_of(axes_of(family.facts))
        for case in family.cases:
            for kernel_id, time_us in case.times_us.items():
                device_us = case.device_us.get(kernel_id)
                self.exact.setdefault(kernel_id, {})[tuple(sorted(case.sizes.items()))] = time_us, device_us
                host_us = time_us / HOST_MARGIN if waits(device_us, time_us / HOST_MARGIN) else None
                points.setdefault(kernel_id, []).append(Point(case.sizes, time_us, device_us, host_us, meaning))
        self.models: dict[str, Model | None] = {name: fit(found) for name, found in points.items()}

    def evidence(self, kernel_id: str, sizes: Mapping[str, int], resolution_us: float, worth: float) -> Evidence | None:
        """The time of a kernel at these sizes; ``worth`` is the confidence in one that was measured."""
        exact = self.exact.get(kernel_id, {}).get(tuple(sorted(sizes.items())))
        if exact is not None:
            time_us, device_us = exact
            noise = max(NOISE, resolution_us / 2 / time_us)
            return Evidence(time_us, Provenance.PRIOR, worth, noise, device_us=device_us)
        model = self.models.get(kernel_id)
        found = None if model is None else predict(model, sizes)
        if found is None:
            return None
        worth, device_us = worth * found.confidence, found.device_us
        return Evidence(found.time_us, Provenance.PRIOR, worth, NOISE, device_us=device_us, fitted=True)


class Priors:
    """The tables of one device, or of its kind, read when it is first needed: its own first."""

    def __init__(self, device: Device, folder: Path) -> None:
        of_cpu = device.platform == "cpu"  # of other devices threads and capability follow from the name
        self._threads, capability = (torch.get_num_threads(), capability_hash(device)) if of_cpu else (0, "")
        self.problems: list[str] = []
        self._families: dict[tuple[frozenset[tuple[str, str]], bool], tuple[Table, Family]] = {}
        self._nearest: dict[tuple[frozenset[tuple[str, str]], bool], list[tuple[float, Table, Family]]] = {}
        self._learnt: dict[int, Learnt] = {}
        self._bounds: EpochValues[list[list[tuple[str, float, float]]]] = EpochValues()
        own = [each for each in self._read(folder.glob(f"{slug(device.name)}*.json")) if each.device == device.name]
        own = [each for each in own if (each.threads, each.capability) == (self._threads, capability)]
        self._own = {id(each) for each in own}
        if device.platform == "cpu":
            akin = self._read(self._nearest_cpu(folder, device, (device.name, self._threads, capability)))
        else:
            akin = iter(_akin(self._read(folder.glob("*.json")), device))
        self.tables = (*own, *akin)
        for table in self.tables:  # what its own tables lack, its kin's have
            for family in table.families:
                for graph in (False, True) if family.graph is None else (family.graph,):
                    self._families.setdefault((frozenset(family.facts.items()), graph), (table, family))
        for (told, _), (table, family) in list(self._families.items()):  # a replay waits for no host
            if any(case.device_us for case in family.cases):
                self._families.setdefault((told, True), (table, family))

    def __bool__(self) -> bool:
        return bool(self._families)

    def evidence(
        self, kernels: Sequence[Kernel], facts: Facts, libraries: Libraries | None = None
    ) -> dict[str, Evidence]:
        """Times of kernels whose library has the major version that was measured, of these or those here."""
        libraries = libraries or probe.this_machine()
        work = work_of(facts)
        told = dict(work.facts)
        if told["row_alignment"] != "16" or not is_plain(told["memory"]):
            return {}
        key = told_apart(told), bool(facts["capturing"])
        near = self._nearest.get(key)
        if near is None:
            near = self._nearest[key] = self._neighbours(*key)
        sizes: dict[str, int] = {}
        for worth, table, family in near:
            sizes = sizes or work.sizes
            learnt = self._learnt.get(id(family))
            if learnt is None:
                learnt = self._learnt[id(family)] = Learnt(family)
            found = {}
            for kernel in kernels:
                if kernel.id in learnt.exact and _same_major(kernel, table, facts.device, libraries):
                    evidence = learnt.evidence(kernel.id, sizes, table.resolution_us, worth)
                    if evidence is not None and key[1] and family.graph is False:
                        evidence = _of_device(evidence)
                    if evidence is not None:
                        found[kernel.id] = evidence
            if found:
                return found
        return {}

    def lack(self, facts: Facts) -> bool:
        """Whether nothing is known of such calls, however their tensors lie; every miss reads it."""
        if not self._families:
            return True
        told = [type(each) is int or (each,) for each in map(facts.__getitem__, facts.operation.derived)]
        kind = facts.operation.name, facts.sizeless(), *told  # what follows from tensors is no size everywhere
        for bounds in self._bounds.get(kind, lambda: self._bounds_of(facts)):
            for name, least, most in bounds:
                if not least <= facts[name] <= most:  # type: ignore[operator]  # a size
                    break
            else:
                return False
        return True

    def _bounds_of(self, facts: Facts) -> list[list[tuple[str, float, float]]]:
        """Between which sizes a call that is like this one in all else is a neighbour of each family."""
        told = dict(told_apart(dict(work_of(facts).facts)))
        told.pop(UNUSUAL, None)
        sizes = [name for name, text in told.items() if text.isdigit() and type(facts[name]) is int]
        found = []
        for family, _ in self._families:
            other = {name: value for name, value in family if name != UNUSUAL}
            if other.keys() == told.keys() and all(other[name].isdigit() for name in sizes):
                theirs = {name: int(other[name]) for name in sizes}
                if _apart({**told, **{name: other[name] for name in sizes}}, other) <= MAX_APART:
                    bounds = [(name, size / 2**MAX_APART, size * 2 ** (MAX_APART / 2)) for name, size in theirs.items()]
                    found.append(bounds)
        return found

    def _nearest_cpu(self, folder: Path, device: Device, own: tuple[str, int, str]) -> list[Path]:
        """The files of the nearest other CPU with this one's unit for products, by what they begin with."""
        have, wanted = device.instruction_sets, cpu_features.unit(device.instruction_sets)
        near: list[tuple[tuple[int, float, str], Path]] = []
        for file in sorted(folder.glob(f"*{_OF_CPU}*.json")):
            try:
                about = msgspec.json.decode(file.read_bytes(), type=_About)
            except (OSError, msgspec.DecodeError) as error:
                self.problems.append(f"{file}: no priors: {error}")
                continue
            sets = about.instruction_sets
            if (about.device, about.threads, about.capability) == own or not sets or cpu_features.unit(sets) != wanted:
                continue
            doublings = abs(math.log2(max(about.threads, 1) / max(self._threads, 1)))
            near.append(((len(have.symmetric_difference(sets)), doublings, about.capability), file))
        return [file for away, file in near if away == min(near)[0]]

    def _read(self, files: Iterable[Path]) -> Iterator[Table]:
        for file in sorted(files):
            try:
                yield read_table(file)
            except (OSError, ValueError) as error:
                problem = f"{file}: no priors: {error}"
                if problem not in self.problems:  # a device without a table of its own reads all of them
                    self.problems.append(problem)

    def _neighbours(self, key: frozenset[tuple[str, str]], graph: bool) -> list[tuple[float, Table, Family]]:
        """The family of a call, or else those around it, nearest first, with what each counts."""
        if (key, graph) in self._families:
            table, family = self._families[key, graph]
            return [(self._worth(table), table, family)]
        found: list[tuple[float, Table, Family]] = []
        for (other, of_graph), (table, family) in self._families.items():
            away = _apart(dict(key), dict(other)) if of_graph == graph else math.inf
            if away <= MAX_APART:
                found.append((away, table, family))
        near = sorted(found, key=itemgetter(0))
        return [(self._worth(table) * NEIGHBOUR, table, family) for _, table, family in near]

    def _worth(self, table: Table) -> float:
        if id(table) in self._own:
            return CONFIDENCE
        return CONFIDENCE * ELSEWHERE * (1.0 if table.threads == self._threads else OTHER_THREADS)


def _of_device(evidence: Evidence) -> Evidence | None:
    """What a replay takes of an eager time: the device's part, if that is known."""
    if evidence.device_us is None:
        return None
    return msgspec.structs.replace(evidence, cost_us=evidence.device_us, device_us=None)


_OF_CPU = "_????????_"
"""What the names of CPUs' tables have: the beginning of the hash of what the CPU can do."""


class _About(msgspec.Struct):
    """What a CPU's table begins with. Reading all tables whole takes 40 ms, this 1 (Zen 4, 2026-11-26)."""

    device: str
    threads: int = 0
    capability: str = ""
    instruction_sets: tuple[str, ...] = ()


def _akin(tables: Iterable[Table], device: Device) -> list[Table]:
    """The tables of the first other device of the same compute capability."""
    if device.sm is None:
        return []
    names = {each.name for each in KNOWN_DEVICES.values() if each.sm == device.sm} - {device.name}
    akin = [table for table in tables if table.device in names]
    return [table for table in akin if table.device == akin[0].device]


def _apart(asked: Mapping[str, str], other: Mapping[str, str]) -> float:
    """Doublings between the fixed sizes of two families of one function; infinite where anything else differs."""
    if asked.keys() != other.keys():
        return math.inf
    away = 0.0
    for name, value in asked.items():
        if value == other[name]:
            continue
        if name == "operation" and axes_of(asked) == axes_of(other):
            continue
        if name == "dtype" and {value, other[name]} == _ALIKE:
            continue
        if not (value.isdigit() and other[name].isdigit() and int(value) and int(other[name])):
            return math.inf
        doublings = math.log2(int(other[name]) / int(value))
        away = max(away, doublings if doublings > 0 else -2 * doublings)
    return away


_LOADED: dict[tuple[str | Device, int], Priors] = {}


def priors_of(device: Device) -> Priors:
    """The tables of a device, of a CPU as many threads as torch's operators use now."""
    about = (device, torch.get_num_threads()) if device.platform == "cpu" else (device.name, 0)
    found = _LOADED.get(about)
    if found is None:
        found = _LOADED[about] = Priors(device, FOLDER)
    return found


def problems() -> list[str]:
    """What is wrong with the tables that were read."""
    return [problem for priors in list(_LOADED.values()) for problem in priors.problems]


def _same_major(kernel: Kernel, table: Table, device: Device, libraries: Libraries) -> bool:
    """Whether a library's version is close enough; a call about one that is not there counts it."""
    then = table.versions.get(kernel.id)
    if then is None:
        return False
    version = libraries.version(kernel.backend, device)
    if version is None:
        return True
    if not then:
        then, version = table.torch, libraries.torch
    return _major(then) == _major(version)


@functools.cache
def _major(version: str) -> tuple[int, ...]:
    """What a library promises to keep: the first number, and the second below 1.0."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return ()
    return release[:2] if release[0] == 0 else release[:1]
