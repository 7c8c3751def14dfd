"""A process that waits for the machine is told from one that is stuck in itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerzero.testing import children
from layerzero.testing.children import Waits


@pytest.mark.parametrize(
    ("before", "now", "seconds", "said"),
    [
        (Waits(), Waits(), 120.0, ""),
        (Waits({7: 5.0}), Waits({7: 95.0}), 120.0, "it waited for a core for 90 s of 120"),
        (Waits({7: 5.0}), Waits({7: 35.0}), 120.0, ""),
        (Waits({7: 0.0}), Waits({7: 0.0, **dict.fromkeys(range(8, 20), 10.0)}), 120.0, ""),
        (Waits({7: 0.0}, 0, {7: 0.0}), Waits({7: 90.0}, 0, {7: 40.0, 8: 41.0}), 120.0, ""),
        (Waits(faults=900), Waits(faults=5900), 120.0, "read its memory back from a disk 5000 times"),
        (Waits(faults=900), Waits(faults=1000), 120.0, ""),
        (Waits({7: 0.0}), Waits({7: 0.9}), 0.9, ""),
    ],
)
def test_what_kept_it_is_said(before, now, seconds, said):
    found = now.since(before, seconds)
    assert (said in found) if said else not found


def test_the_system_tells_of_this_process_and_of_none_that_ended():
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("wanted /proc/self/schedstat, got none")
    assert os.getpid() in children.waits(os.getpid()).queued_s
    assert children.waits(2**22 + 1) == Waits()


def test_the_name_of_a_program_may_hold_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "_PROC", tmp_path)
    thread = tmp_path / "5" / "task" / "6"
    thread.mkdir(parents=True)
    (tmp_path / "5" / "stat").write_text(f"5 (a ) b) {' '.join(['R', *map(str, range(4, 53))])}")
    (thread / "schedstat").write_text("100 2500000000 3")
    assert children.waits(5) == Waits({6: 2.5}, 12, {6: 1e-7})
