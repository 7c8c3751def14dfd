"""``python -m tools matrix RUN...``: take runs of ``layerzero conformance --json`` into the page of compatibility.

A file for each device and torch keeps what the latest run showed of each kernel that could run there. A kernel that no
run had since keeps its result and the date of that.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from layerzero.core.reasons import ReasonCode
from layerzero.core.system.disk import write_whole
from layerzero.engine.registry import REGISTRY
from layerzero.testing.report import BAD, EVERY_CHECK

CHECKOUT = Path(__file__).parents[1]
FOLDER = Path("docs/compatibility")
COMMAND = "layerzero conformance --json > RUN"
_ELSEWHERE = (ReasonCode.NOT_INSTALLED, ReasonCode.PLATFORM_MISMATCH)
"""How refusals begin that say nothing of a kernel: its library is not here, or made for other hardware."""

Row = dict[str, Any]


def answer(root: Path, runs: Iterable[Path]) -> tuple[int, list[str]]:
    """Take runs into the rows of a checkout.

    Returns: the exit code, 1 where a kernel is wrong or one that passed does so no more; and what to say.
    Raises: ValueError for a file that is no run, or a run of some operations of a kernel only.
    """
    code, lines = False, []
    for path in runs:
        row = reduced(path)
        place = root / FOLDER / f"{_name(row['machine'])}.json"
        kept = json.loads(place.read_text()) if place.is_file() else {"kernels": {}}
        found = [*_drift(kept["kernels"], row["kernels"]), *_wrong(row["kernels"])]
        lines += [*found, *_to_declare(row)]
        counts = Counter(each["status"] for each in row["kernels"].values())
        row["kernels"] = dict(sorted((kept["kernels"] | row["kernels"]).items()))
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, (json.dumps(row, indent=1) + "\n").encode())
        code |= bool(found) or "passed" not in counts
        lines.append(f"{place.name}: {', '.join(f'{count} {status}' for status, count in sorted(counts.items()))}")
    return int(code), [*lines, "next step: `python -m tools docs` writes the page"]


def reduced(path: Path) -> Row:
    """Keep of a run what the page needs: its machine, and a status for each kernel that could run there."""
    try:
        run = json.loads(path.read_text())
        machine, kernels = run["machine"], run["kernels"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: wanted a run of `{COMMAND}`, got none") from None
    found = {}
    for each in kernels:
        status = _status(each)
        absent = each["package"] and " " not in each["package"]  # no version of it is installed
        elsewhere = absent or status.get("why", "").lstrip("[").startswith(_ELSEWHERE)
        if each["library"] == "reference" or (status["status"] == "refused" and elsewhere):
            continue
        left = set(REGISTRY.kernel(each["id"]).operations) - set(each["operations"])
        if left:
            raise ValueError(
                f"{path}: wanted every operation of {each['id']}, got none of {', '.join(sorted(left))}; leave "
                "--operation out"
            )
        found[each["id"]] = status | {"library": each["library"], "package": each["package"], "date": machine["date"]}
    return {"machine": machine, "kernels": found}


def _status(kernel: Mapping[str, Any]) -> Row:
    """``passed`` where something passed and nothing is wrong, ``wrong``, or ``refused`` with the reason."""
    bad = next((each for each in kernel["results"] if each["status"] in BAD or each["check"] == EVERY_CHECK), None)
    if bad is not None:
        return {"status": "wrong", "why": f"{bad['operation']}, {bad['check']}: {bad['status']}: {bad['message']}"}
    if passed := kernel["counts"].get("passed", 0):
        return {"status": "passed", "checks": passed}
    messages = (each["message"] for each in kernel["results"])
    return {"status": "refused", "why": kernel["refused"] or next(messages, "it has no check here")}


def _name(machine: Mapping[str, Any]) -> str:
    """The file of a device and torch; CPUs of one name differ by their instructions."""
    more = machine["instructions"] if machine["platform"] == "cpu" else []
    parts = [machine["platform"], machine["device"], *more, "torch", machine["torch"].partition("+")[0]]
    return re.sub(r"[^a-z0-9._]+", "-", " ".join(parts).lower())


def _drift(before: Mapping[str, Row], after: Mapping[str, Row]) -> Iterator[str]:
    for kernel, each in after.items():
        old = before.get(kernel)
        if old is not None and old["status"] == "passed" and each["status"] == "refused":
            yield f"drift: {kernel} passed with {old['package'] or 'this torch'}, and is refused: {each['why']}"


def _wrong(kernels: Mapping[str, Row]) -> Iterator[str]:
    for kernel, each in kernels.items():
        if each["status"] == "wrong":
            yield f"wrong: {kernel} with {each['package'] or 'this torch'}: {each['why']}"


def _to_declare(row: Row) -> Iterator[str]:
    """Versions that passed and that their declaration does not call tested."""
    told: dict[str, None] = {}
    for kernel, each in row["kernels"].items():
        backend = REGISTRY.kernel(kernel).backend
        version = (each["package"].partition(" ")[2] or row["machine"]["torch"]).partition("+")[0]
        alone = all(other["status"] != "wrong" for other in row["kernels"].values() if other["library"] == backend.name)
        if backend.origin == "builtin" and each["status"] == "passed" and alone and version not in backend.tested:
            told[f"{backend.name}: {version} passed and is not among `tested` of its declaration"] = None
    yield from told


def cells(root: Path) -> Iterator[list[object]]:
    """The page's rows: a library at a version on a device with a torch."""
    for path in sorted((root / FOLDER).glob("*.json")):
        row = json.loads(path.read_text())
        machine = row["machine"]
        more = ", ".join(filter(None, [machine["runtime"], machine["driver"] and f"driver {machine['driver']}"]))
        device = f"{machine['device']} ({more or ', '.join(machine['instructions'])})"
        by_library: dict[tuple[str, str, str], dict[str, list[str]]] = {}
        for kernel, each in row["kernels"].items():
            found = by_library.setdefault((each["library"], each["package"], each["date"]), {})
            found.setdefault(each["status"], []).append(f"`{kernel}`")
        for (library, package, date), found in sorted(by_library.items()):
            counts = [len(found.get("passed", [])), ", ".join(found.get("wrong", [])), len(found.get("refused", []))]
            yield [library, package or "comes with torch", machine["torch"], device, *counts, date]
