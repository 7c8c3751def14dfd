"""What bounds a process's memory from outside, and how it bounds itself for a while."""

from __future__ import annotations

import math
import subprocess
import sys
import threading

import pytest

from layerzero.core.system import resources
from layerzero.core.system.resources import Kills


@pytest.fixture
def group(monkeypatch, tmp_path):
    """Writes the files of this process's groups, by their place below the top."""

    def write(own: str, **files: str) -> None:
        (tmp_path / "cgroup").write_text(own)
        for name, text in files.items():
            place = tmp_path / "top" / name.replace("__", "/").replace("--", ".")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)

    monkeypatch.setattr(resources, "_TOP", tmp_path / "top")
    monkeypatch.setattr(resources, "_OWN", tmp_path / "cgroup")
    return write


def of_2(folder: str, bound: str, use: int = 0, idle: int = 0) -> dict[str, str]:
    lead = f"{folder}__" if folder else ""
    stat = f"anon 5\ninactive_file {idle}\n"
    return {f"{lead}memory--max": bound, f"{lead}memory--current": str(use), f"{lead}memory--stat": stat}


def test_a_process_has_what_the_narrowest_of_its_groups_leaves(group):
    group("0::/slice/job\n", **of_2("slice", "1000", 300), **of_2("slice__job", "max"))
    assert resources.group_bytes() == 700
    group("0::/slice/job\n", **of_2("slice__job", "500", 200))
    assert resources.group_bytes() == 300


def test_files_that_nobody_uses_are_free(group):
    group("0::/\n", **of_2("", "1000", 990, 600))
    assert resources.group_bytes() == 610


def test_more_in_use_than_the_bound_leaves_nothing(group):
    group("0::/\n", **of_2("", "1000", 1200))
    assert resources.group_bytes() == 0


def test_version_1_and_a_container_whose_folder_is_the_top(group):
    files = {
        "memory__memory--limit_in_bytes": "1000",
        "memory__memory--usage_in_bytes": "900",
        "memory__memory--stat": "total_inactive_file 50\n",
        "memory__memory--oom_control": "under_oom 0\noom_kill 7\n",
    }
    group("4:memory:/somewhere/else\n3:cpuset:/\n0::/\n", **files)
    assert resources.group_bytes() == 150
    assert resources.kills().count == 7


def test_without_groups_nothing_is_bounded(group):
    group("of another kind:::\n")
    assert resources.group_bytes() == math.inf
    assert resources.kills() == Kills()


def test_kills_are_those_of_the_nearest_group_and_count_beside_its_own_alone(group):
    group("0::/job\n", **{"memory--events": "oom_kill 9\n", "job__memory--events": "low 0\noom_kill 2\n"})
    before = resources.kills()
    assert before.count == 2
    group("0::/job\n", **{"job__memory--events": "oom_kill 5\n"})
    assert resources.kills().since(before) == 3
    group("0::/\n")
    assert resources.kills().count == 9
    assert resources.kills().since(before) == 0, "another group's count"
    assert before.since(Kills(5, before.group)) == 0, "one that began anew"


linux = pytest.mark.skipif(sys.platform != "linux", reason="bounds of Linux")


@linux
def test_bounds_that_overlap_in_threads_end_with_the_last():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with resources.bounded(2**33):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with resources.bounded(2**33):
        thread.start()
        entered.wait()
        inside = resource.getrlimit(resource.RLIMIT_AS)
    assert inside != before
    assert resource.getrlimit(resource.RLIMIT_AS) == inside, "the other is still in it"
    leave.set()
    thread.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@linux
def test_a_child_started_within_a_bound_does_not_keep_it():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with resources.bounded(2**33):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        kept = resource.prlimit(child.pid, resource.RLIMIT_AS)
        resources.lift(child.pid)
        lifted = resource.prlimit(child.pid, resource.RLIMIT_AS)
    child.communicate(b"\n")
    assert kept != before
    assert lifted == before
    resources.lift(child.pid)


def test_no_bound_is_no_bound():
    with resources.bounded(math.inf):
        pass
    resources.lift(0)
