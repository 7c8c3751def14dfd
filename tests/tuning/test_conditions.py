"""Conditions are buckets of what can be read, and measurements name them."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.prediction.fitting import Time, weighed
from layerzero.tuning.storage import environment as conditions
from layerzero.tuning.storage.environment import of_nvml
from layerzero.tuning.storage.store import TimeStore
from others import OTHERS


class NvmlError(Exception):
    pass


def nvml(*, degrees=45, used=10, now=1900, reasons=0, missing=()):
    """NVML with one device in a given state."""

    def answer(name, value):
        def tell(*_):
            if name in missing:
                raise NvmlError("not supported")
            return value

        return tell

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetHandleByUUID=answer("handle", object()),
        nvmlDeviceGetTemperature=answer("temperature", degrees),
        nvmlDeviceGetMemoryInfo=answer("memory", SimpleNamespace(used=used, total=100)),
        nvmlDeviceGetClockInfo=answer("power", now),
        nvmlDeviceGetMaxClockInfo=answer("power", 1980),
        nvmlDeviceGetCurrentClocksThrottleReasons=answer("power", reasons),
    )


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ({}, "memory=low,power=boost,temperature=cold"),
        ({"degrees": 50}, "memory=low,power=boost,temperature=warm"),
        ({"degrees": 69}, "memory=low,power=boost,temperature=warm"),
        ({"degrees": 70}, "memory=low,power=boost,temperature=hot"),
        ({"used": 50}, "memory=medium,power=boost,temperature=cold"),
        ({"used": 80}, "memory=high,power=boost,temperature=cold"),
        ({"now": 1500}, "memory=low,power=nominal,temperature=cold"),
        ({"reasons": 0x20}, "memory=low,power=throttled,temperature=cold"),
        ({"reasons": 0x4}, "memory=low,power=boost,temperature=cold"),
        ({"missing": ("power",)}, "memory=low,temperature=cold"),
        ({"missing": ("handle",)}, ""),
    ],
)
def test_a_gpus_condition_is_what_nvml_tells(state, wanted):
    assert conditions.text(of_nvml(nvml(**state), "GPU-1")) == wanted


@pytest.mark.parametrize(("load", "wanted"), [(0.5, "low"), (4.0, "medium"), (7.9, "medium"), (8.0, "high")])
def test_a_cpus_condition_is_its_load_and_clock(monkeypatch, tmp_path, load, wanted):
    monkeypatch.setattr(conditions.os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(conditions.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(conditions, "_CLOCK", tmp_path)
    assert conditions.condition(torch.device("cpu")) == f"load={wanted}"
    (tmp_path / "scaling_cur_freq").write_text("1000\n")
    (tmp_path / "cpuinfo_max_freq").write_text("3000\n")
    assert conditions.condition(torch.device("cpu")) == f"load={wanted},power=nominal"


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_without_nvml_and_on_amds_gpus_torch_tells_the_memory_alone(monkeypatch, cuda):
    monkeypatch.setattr(conditions, "_nvml", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((90, 40, 10)[index], 100))
    found = [conditions.condition(torch.device("cuda", index)) for index in range(3)]
    assert found == ["memory=low", "memory=medium", "memory=high"]

    for error in (RuntimeError("no device"), AssertionError("Torch not compiled with CUDA enabled")):

        def lost(index, error=error):
            raise error

        monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
        assert conditions.condition(torch.device("cuda", 0)) == ""


def test_a_contest_records_the_condition_that_it_ran_under(monkeypatch):
    from layerzero.testing import random_call
    from layerzero.tuning.measurement import contest

    monkeypatch.setattr(conditions, "condition", lambda device: f"planted={device.type}")
    found = contest.contest(random_call(0, 3, function="rms_norm", dtype=torch.float32), leave_out=OTHERS)
    times: list[Measurement] = list(found.times.values())
    assert times
    assert {each.condition for each in times} == {"planted=cpu"}


def taken(kernel, condition, median_us):
    return Time(kernel, b"", condition, "", median_us, 0.01, 20, 0.01, "2026-11-22T00:00:00.000Z", "")


def test_times_of_the_present_condition_decide_where_several_kernels_have_them():
    times = [taken("one", "load=low", 10.0), taken("two", "load=low", 30.0)]
    times += [taken("one", "load=high", 90.0), taken("two", "load=high", 20.0), taken("three", "load=high", 25.0)]
    low = weighed(times, present=lambda: "load=low")
    assert (low["one"].time_us, low["two"].time_us) == (10.0, 30.0)
    assert low["three"].confidence < low["one"].confidence, "of another condition"
    for other in ("load=high", "load=medium", ""):
        assert weighed(times, present=lambda state=other: state)["two"].time_us == 20.0
    assert weighed(times[:2], present=pytest.fail)["one"].time_us == 10.0  # one condition: nobody looks


def test_a_time_of_another_condition_is_moved_by_what_kernels_with_both_took():
    hot, cold = "temperature=hot", "temperature=cold"
    times = [taken("one", cold, 10.0), taken("two", cold, 20.0), taken("three", cold, 12.0)]
    times += [taken("one", hot, 12.0), taken("two", hot, 24.0)]  # by the factor 1.2
    found = weighed(times, present=lambda: hot)
    assert found["three"].cost_us == pytest.approx(14.4)
    assert found["three"].time_us == 12.0, "as it was measured"
    assert found["three"].confidence < found["one"].confidence
    others = [msgspec.structs.replace(each, kernel=f"other {each.kernel}") for each in times[3:]]
    alone = weighed([times[0], *others], present=lambda: hot)
    assert alone["one"].cost_us == 10.0, "no kernel tells"


def test_what_moves_a_time_is_measured_alike_and_by_the_same_machine():
    hot, cold = "temperature=hot", "temperature=cold"
    times = [taken("one", cold, 60.0), taken("two", cold, 70.0), taken("three", cold, 65.0)]
    apart = [msgspec.structs.replace(taken(each.kernel, hot, each.median_us), device_us=10.0) for each in times[:2]]
    found = weighed([*times, *apart], present=lambda: hot)
    assert found["three"].cost_us == 65.0, "a part of a time is not compared with the whole of another"
    elsewhere = [msgspec.structs.replace(each, source="another") for each in (apart[0], taken("two", hot, 700.0))]
    found = weighed([*times, *elsewhere], present=lambda: hot)
    assert [found[name].cost_us for name in ("one", "two", "three")] == [60.0, 70.0, 65.0]


def test_the_present_condition_is_read_at_most_twice_a_minute(monkeypatch):
    states = iter(["load=low", "load=high"])
    monkeypatch.setattr(conditions, "condition", lambda _: next(states))
    monkeypatch.setattr(conditions, "_LATELY", {})
    now = {"s": 100.0}
    monkeypatch.setattr(conditions.time, "monotonic", lambda: now["s"])
    assert [conditions.lately("cpu", 0) for _ in range(3)] == ["load=low"] * 3
    now["s"] += conditions.LATELY_S + 1
    assert conditions.lately("cpu", 0) == "load=high"


def test_each_device_has_its_own_present_condition(monkeypatch):
    monkeypatch.setattr(conditions, "condition", lambda device: f"memory of {device}")
    monkeypatch.setattr(conditions, "_LATELY", {})
    assert [conditions.lately("cuda", index) for index in (0, 1, 0)] == [
        "memory of cuda:0", "memory of cuda:1", "memory of cuda:0",
    ]  # fmt: skip


def test_choices_ask_for_the_present_condition(monkeypatch, tmp_path):
    lz.configure(**{"perfdb.path": str(tmp_path / "times.sqlite3")})
    facts = lz.facts("rms_norm", torch.randn(4, 64), torch.randn(64))
    one, two = (REGISTRY.kernel(name) for name in ("torch.rms_norm", "reference.norm.rms"))
    times = TimeStore()
    for state, us in (("load=low", (10.0, 30.0)), ("load=high", (90.0, 20.0))):
        for kernel, median in zip((one, two), us, strict=True):
            times.record(kernel, facts, Measurement(median, median, 0.0, 20, condition=state))
    for state, quicker in (("load=low", one), ("load=high", two)):
        monkeypatch.setattr(conditions, "lately", lambda kind, index, state=state: state if kind == "cpu" else "")
        found = times.evidence((one, two), facts)
        assert min(found, key=lambda kernel: found[kernel].time_us) == quicker.id
