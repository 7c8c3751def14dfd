"""How many threads a computation should have: by affinity, hardware threads of a core, and a container's quota."""

from __future__ import annotations

import math

import pytest

from layerzero.core.system import resources


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four cores with two hardware threads each, and a quota as given."""

    def made(quota=math.inf, cpus=8):
        for number in range(8):
            folder = tmp_path / f"cpu{number}" / "topology"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
        monkeypatch.setattr(resources, "cpu_quota", lambda: quota)
        monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)
        return tmp_path

    return made


@pytest.mark.parametrize(("count", "quota", "cpus", "words"), [
    (4, math.inf, 8, ""),
    (8, math.inf, 8, "8 threads on 4 cores; set OMP_NUM_THREADS=4"),
    (3, math.inf, 8, ""),
    (1, math.inf, 8, "1 thread of 4 cores; set OMP_NUM_THREADS=4"),
    (1, 0.5, 8, ""),
    (4, 2.0, 8, "a quota gives this process 2 CPUs; set OMP_NUM_THREADS=2"),
    (2, 1.5, 8, ""),
    (4, math.inf, 2, "4 threads on 2 cores; set OMP_NUM_THREADS=2"),
])  # fmt: skip
def test_advice_names_the_number_to_set(count, quota, cpus, words, machine):
    advice = resources.thread_advice(count, machine(quota, cpus))
    assert (words in advice) if words else advice == ""


def test_where_the_system_tells_no_cores_each_cpu_is_one(machine, tmp_path):
    machine()
    assert resources.thread_advice(8, tmp_path / "absent") == ""


@pytest.mark.parametrize(("files", "quota"), [
    ({"cpu.max": "150000 100000"}, 1.5),
    ({"cpu.max": "max 100000"}, math.inf),
    ({"cpu.max": "nonsense"}, math.inf),
    ({}, math.inf),
])  # fmt: skip
def test_a_quota_of_the_second_version(files, quota, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(resources, "_OWN", tmp_path / "own")
    monkeypatch.setattr(resources, "_TOP", tmp_path)
    assert resources.cpu_quota() == quota


@pytest.mark.parametrize(("quota_us", "quota"), [("200000", 2.0), ("-1", math.inf)])
def test_a_quota_of_the_first_version(quota_us, quota, tmp_path, monkeypatch):
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text(quota_us)
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / "own").write_text("3:cpu,cpuacct:/job\n")
    monkeypatch.setattr(resources, "_OWN", tmp_path / "own")
    monkeypatch.setattr(resources, "_TOP", tmp_path)
    assert resources.cpu_quota() == quota
