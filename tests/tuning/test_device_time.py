"""What a device needs for a call, on a device whose clock stands still between calls."""

from __future__ import annotations

import pytest

from layerzero.tuning.measurement.clocks import FEWEST_CALLS, MOST_CALLS, copies_needed, device_times


class Fake:
    """A device on which a call takes what it says, and launching a graph what a host says."""

    def __init__(self):
        self.now, self.ran, self.graphs = 0.0, [], []

    def call(self, name, time_us):
        def run():
            self.ran.append(name)
            self.now += time_us

        return run

    def captured(self, calls):
        self.graphs.append(len(calls))

        def replay():
            for call in calls:
                call()

        return replay

    def elapsed_us(self, run, times):
        started = self.now
        for _ in range(times):
            run()
        return self.now - started


class Uncapturable(Fake):
    def captured(self, calls):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_a_time_is_that_of_one_call():
    fake = Fake()
    assert device_times({"": (fake.call("one", 3.5),)}, device=fake)[""].time_us == pytest.approx(3.5)


def test_calls_take_turns_through_copies_evenly():
    fake = Fake()
    copies = [fake.call(name, 20.0) for name in "abc"]
    found = device_times({"kernel": copies}, samples=1, device=fake)["kernel"]
    assert found.calls % 3 == 0
    assert found.copies == 3
    ran = fake.ran[FEWEST_CALLS:]  # those that said how long a call takes
    assert ran[:6] == list("abcabc")
    assert len({ran.count(name) for name in "abc"}) == 1


@pytest.mark.parametrize(("time_us", "calls"), [(0.5, MOST_CALLS), (40.0, 10), (5000.0, 4)])
def test_a_graph_holds_as_many_calls_as_fill_its_time(time_us, calls):
    fake = Fake()
    found = device_times({"kernel": [fake.call("", time_us)]}, samples=3, device=fake)["kernel"]
    assert (found.calls, len(found.samples)) == (calls, 3)
    assert fake.graphs == [4, calls], "a short graph says how long a call takes"


def test_what_cannot_be_captured_says_so_and_others_go_on():
    fake, never = Fake(), Uncapturable()
    assert device_times({"": (never.call("", 1.0),)}, device=never)[""].time_us is None

    class Half(Fake):
        def captured(self, calls):
            return Uncapturable.captured(self, calls) if calls[0] is bad else Fake.captured(self, calls)

    fake = Half()
    bad, good = fake.call("bad", 1.0), fake.call("good", 2.0)
    found = device_times({"bad": [bad], "good": [good]}, device=fake)
    assert found["bad"].time_us is None
    assert found["bad"].problem == "RuntimeError: operation not permitted when stream is capturing"
    assert (found["good"].time_us, found["good"].problem) == (pytest.approx(2.0), "")


def test_samples_are_taken_in_turns():
    fake = Fake()
    found = device_times({name: [fake.call(name, 100.0)] for name in "ab"}, samples=5, device=fake)
    ran = fake.ran[2 * FEWEST_CALLS :]
    turns = [ran[at] for at in range(0, len(ran), 2 * found["a"].calls)]
    assert all(sorted(turns[at : at + 2]) == ["a", "b"] for at in range(0, 10, 2))


@pytest.mark.parametrize(
    ("call_bytes", "wanted"),
    [(200e6, (1, True)), (30e6, (4, True)), (1.6e6, (63, True)), (1e5, (1, False)), (0.0, (1, False))],
)
def test_copies_reach_beyond_the_cache_or_the_cache_is_warm(call_bytes, wanted):
    assert copies_needed(call_bytes, 50_000_000) == wanted
