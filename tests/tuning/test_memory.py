"""What does not fit into a CPU's memory is left out with a reason, before the system ends the process for it."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import layerzero as lz
from layerzero.core.system import resources
from layerzero.engine.failures import out_of_memory
from layerzero.inspection.answers import facts as facts_of
from layerzero.ops import OPERATIONS
from layerzero.tuning.measurement import tune_run
from layerzero.tuning.measurement.jobs import Job
from layerzero.tuning.storage import environment
from layerzero.tuning.verification import child
from others import OTHERS


def norm(rows: int, **on):
    where = "meta" if on else "cpu"
    return facts_of("rms_norm", torch.empty(rows, 64, device=where), torch.empty(64, device=where), **on)


def test_what_a_call_needs_grows_with_its_elements():
    one, two = (environment.needed_bytes(norm(rows)) for rows in (100, 200))
    assert two - one == 100 * 64 * (4 + environment.WIDE_BYTES)


def test_scores_that_a_reference_makes_at_once_count():
    (_, sparse) = OPERATIONS["attention.sparse.block"].cases
    assert environment.needed_bytes(Job("attention.sparse.block", sparse, "float32").facts("cpu")) > 17e9
    decode = next(each for each in OPERATIONS["attention.gqa.decode"].cases if each.name == "llama3_8b_b64")
    assert environment.needed_bytes(Job("attention.gqa.decode", decode, "float32").facts("cpu")) < 5e9, "done in parts"


def test_a_call_that_does_not_fit_is_left_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(environment, "available_bytes", lambda: 2.0 * environment.needed_bytes(norm(8)))
    made, asked = [], []
    make = Job.make
    monkeypatch.setattr(Job, "make", lambda self, device: (made.append(self.case.sizes["rows"]), make(self, device))[1])
    monkeypatch.setattr(
        tune_run, "rehearse", lambda pairs, **_: asked.extend(facts["rows"] for _, facts in pairs) or ()
    )
    found = lz.tune("rms_norm", shapes=[(8, 64), (9, 64)], dtype="float32", leave_out=OTHERS, samples=3)
    assert set(made) == {8}
    assert set(asked) <= {8}
    (why,) = found.skipped.values()
    assert why.startswith(
        "too little memory: it needs about 0.0 GB with its values in float64, and of 0.0 free ones 50%"
    )


def test_other_devices_say_so_themselves(monkeypatch):
    monkeypatch.setattr(environment, "available_bytes", lambda: 0.0)
    assert environment.too_large(norm(8))
    assert environment.too_large(norm(8, device="H200")) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="bounds of Linux")
def test_a_reference_that_takes_more_than_its_share_fails_and_leaves_the_bound_as_it_was(monkeypatch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(environment, "available_bytes", lambda: 2.0 * 2**28)
    call = Job("norm.rms", OPERATIONS["norm.rms"].cases[0], "float32").make("cpu")
    facts = facts_of(call.function, **call.arguments)
    assert child.truth_of(call, facts).whole is not None
    monkeypatch.setattr(child, "expected", lambda _: torch.empty(2**30, dtype=torch.uint8))
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        child.truth_of(call, facts)
    assert out_of_memory(caught.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_what_is_available_is_the_least_of_machine_and_group(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable:       3 kB\n")
    monkeypatch.setattr(resources, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(resources, "group_bytes", lambda: math.inf)
    assert resources.available_bytes() == 3072.0
    monkeypatch.setattr(resources, "group_bytes", lambda: 100.0)
    assert resources.available_bytes() == 100.0
    (tmp_path / "meminfo").write_text("of another kind\n")
    monkeypatch.setattr(resources, "group_bytes", lambda: math.inf)
    assert resources.available_bytes() == math.inf


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", True),
        ("std::bad_alloc", True),
        ("terminate called\n  what():  std::bad_alloc", True),
        ("kernel caught std::bad_alloc while resizing to 18446744073709551615", False),
        ("error: expected ';' before throw std::bad_alloc()", False),
    ],
)
def test_a_message_that_only_mentions_an_allocation_is_no_want_of_memory(text, short):
    assert out_of_memory(RuntimeError(text)) is short
