"""``benchmarks/against_release.py``: what it reads of both commands, and what it calls moved or gone."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def against(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import against_release

    return against_release


def line(name, us, **more):
    return {"name": name, "chosen": False, "median_us": us, "device_us": None, "against_torch": None} | more


def test_a_case_is_the_chosen_kernel_as_a_multiple_of_torchs_own(against):
    kernels = [line("torch's own function", 10.0, against_torch=1.0), line("a", 5.0, chosen=True, against_torch=2.0)]
    alone = [line("b", 7.0, chosen=True), line("a", None)]
    calls = [("norm.rms", "norm.rms decode float32", kernels), ("kv.append", "kv.append decode float32", alone)]
    answer = {"calls": [{"operation": o, "name": n, "kernels": k} for o, n, k in calls]}
    wanted = {("norm.rms", "decode float32"): (5.0, 0.5), ("kv.append", "decode float32"): (7.0, 7.0)}
    assert against.of_bench(answer) == wanted


def test_only_what_every_pair_shows_has_moved(against):
    def times(slower, noisy, same):
        return {("op", "slower"): (slower, slower), ("op", "noisy"): (noisy, noisy), ("op", "same"): (same, same)}

    before = times(10.0, 10.0, 10.0) | {("op", "gone"): (1.0, 1.0)}
    pairs = [(before, times(12.0, 20.0, 10.1)), (before, times(11.0, 9.0, 9.9)), (before, times(13.0, 20.0, 10.0))]
    rows = against.compared(pairs)
    assert {row.case[1]: row.moved for row in rows} == {"slower": True, "noisy": False, "same": False}
    text = against.page(rows, "Before and after.", 3)
    assert "3 cases, 3 pairs: 1 slower, 0 faster" in text
    assert "| op | slower | 10.00 | 12.00 | 1.20 | 8% |" in text
    assert against.gone(pairs) == [("op", "gone")]
    assert "only the release has them (1):\n\n- op: gone\n" in against.page(rows, "", 3, against.gone(pairs))
    assert "Gone" not in text
    assert not any(row.moved for row in against.compared(pairs[:1]))  # one pair tells nothing of noise


def test_what_a_call_costs_is_a_case_of_its_own(against):
    answer = {"over_ns": {"lz.attention": 200.0, "a peer": 900.0}, "miss_us": {"native": 300.0}}
    cost = against.COST
    assert against.of_overhead(answer) == {(cost, "lz.attention"): (0.2, 0.2), (cost, "a miss, native"): (300.0, 300.0)}
