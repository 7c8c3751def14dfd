"""One page from what ``gpu.sh`` left in a folder: python benchmarks/gpu_report.py results > DEVICE.md."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def conformance(folder: Path) -> list[str]:
    """A row for each kernel, then everything that is wrong, then limits that could be wider."""
    rows = ["| kernel | passed | refused | wrong | died or hung | not tried |", "|---|---|---|---|---|---|"]
    problems, strict, absent = [], [], []
    for file in sorted(folder.glob("conformance-*.json")):
        text = file.read_text()
        if not text.strip():
            problems.append(f"- {file.name}: no report; it did not end in time")
            continue
        for kernel in json.loads(text)["kernels"]:
            name = kernel["id"]
            if kernel["refused"]:
                absent.append(f"- `{name}`: {kernel['refused']}")
                continue
            counts = Counter(each["status"] for each in kernel["results"])
            dead = counts["died"] + counts["hung"]
            cells = [counts["passed"], counts["refused"], counts["wrong"], dead, counts["not tried"]]
            rows.append(f"| `{name}` | " + " | ".join(map(str, cells)) + " |")
            for each in kernel["results"]:
                line = f"- `{name}` {each['operation']}, {each['check']}: {each['status']}: {each['message']}"
                if each["status"] in ("wrong", "died", "hung"):
                    problems.append(line[:600])
                elif each["status"] == "too strict":
                    strict.append(line[:300])
    lines = ["## Conformance", "", *rows]
    for title, found in (("Wrong", problems), ("Limits that the library does not need", strict), ("Refused", absent)):
        lines += ["", f"### {title}", "", *(dict.fromkeys(found) or ["none"])]
    return lines


def times(folder: Path) -> list[str]:
    """What ``gpu.py`` found."""
    page = folder / "judge.md"
    return ["", "## Choices and times", "", page.read_text().strip()] if page.exists() else []


def main() -> None:
    """Write the page to stdout."""
    folder = Path(sys.argv[1])
    print("\n".join([*conformance(folder), *times(folder)]))


if __name__ == "__main__":
    main()
