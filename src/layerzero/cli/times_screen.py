"""What ``layerzero perfdb show`` says where a line for each time would not fit on the screen: a line an operation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from layerzero.cli.rows import new_row, new_table
from layerzero.tuning.keeping.rows import Row

MOST_ROWS, FEW = 12, 2
"""Operations that have a row, and kernels that one names."""


def folded(rows: Sequence[Row], here: Sequence[bool]) -> Iterator[RenderableType]:
    """Of each operation how many calls have times, how many times those are, and which kernels are the quickest.

    Only times that count on this machine say who is quickest.
    """
    of: dict[str, list[tuple[Row, bool]]] = defaultdict(list)
    for row, counts in zip(rows, here, strict=True):
        of[row.facts.get("operation", "")].append((row, counts))
    table = new_table("operation", "calls", "times", "quickest", "latest", right=("calls", "times"))
    latest = sorted(of.items(), key=lambda each: max(row.written_at for row, _ in each[1]), reverse=True)
    for operation, found in latest[:MOST_ROWS]:
        calls = {(row.work.key, row.graph) for row, _ in found}
        when = max(row.written_at for row, _ in found)[:10]
        new_row(table, operation, str(len(calls)), str(len(found)), _quickest(found), when)
    yield table
    if len(of) > MOST_ROWS:
        yield Text(f"and {len(of) - MOST_ROWS} more operations", style="dim")
    yield Text("--operation NAME lists the times of one, --all each with its spread", style="dim")


def _quickest(found: Sequence[tuple[Row, bool]]) -> str:
    """Kernels that are the quickest of a call, and of how many."""
    best: dict[tuple[bytes, bool], Row] = {}
    for row, counts in found:
        call = row.work.key, row.graph
        if counts and (call not in best or row.median_us < best[call].median_us):
            best[call] = row
    won = Counter(row.kernel for row in best.values())
    names = ", ".join(f"{name} {count}" for name, count in won.most_common(FEW))
    more = f" and {len(won) - FEW} more" if len(won) > FEW else ""
    return f"{names}{more}" or "none that counts here"
