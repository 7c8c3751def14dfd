"""Random calls of every function against numpy, which shares no line with the references; and that it would notice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drawing import at_once, examples
from layerzero.ops import FUNCTIONS, OPERATIONS
from layerzero.ops.paged.draw import fill
from layerzero.testing import compare, fuzz
from layerzero.testing.generate import random_call

pytest.importorskip("numpy")

from oracles import ORACLES, truth  # it imports numpy

TIGHT = 1e-6
"""References compute in float64 where they are asked to, but for what they round on purpose."""


def test_every_operation_is_written_twice():
    assert sorted(ORACLES) == sorted(OPERATIONS)


@at_once("name", FUNCTIONS)
def test_references_say_what_numpy_says(name):
    """In float64 both are far nearer than any tolerance."""
    for number in range(examples(24)):
        call = random_call(5, number, function=name, dtype=torch.float64)
        own, told = compare.expected(call), truth(call)
        if own.random:
            assert compare.problems(own.results, {}, told) == [] or own.loose, call.text
            continue
        pairs = [
            *zip(own.results, told.results, strict=True),
            *((own.mutated[each], told.mutated[each]) for each in own.mutated),
        ]
        for one, other in pairs:
            near = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0  # what was asked for in less has less
            near = max(TIGHT, near)
            torch.testing.assert_close(one.double(), other.double(), rtol=near, atol=near, equal_nan=True)


def test_random_calls_are_right():
    report = fuzz.run(examples(300), 11, truth=truth)
    assert report.ok, str(report)
    assert report.comparisons > report.calls


def test_a_reference_that_is_wrong_is_noticed(monkeypatch):
    """What compares kernels with references alone takes a wrong reference for the truth."""
    silu = OPERATIONS["activation.silu"]
    wrong = replace(silu, reference=lambda input: silu.reference(input) * 1.5)  # torch's name
    call = random_call(1, 2, function="silu", dtype=torch.float32)
    told = compare.problems(wrong.reference(call.arguments["input"]), {}, truth(call))
    assert "too far" in told[0]


def test_numbers_of_a_shared_page_are_the_last_sequences():
    """torch writes numbers for one place in any order, so that a call that was drawn again had others."""
    numbers = []

    def normal(shape, dtype):
        numbers.append(torch.randn(shape).to(dtype))
        return numbers[-1]

    caches = [torch.zeros(8, 32, 4, 64) for _ in range(2)]
    table = torch.arange(8).expand(16, 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # one writes in order
    try:
        fill(SimpleNamespace(device="cpu", normal=normal), caches, table, torch.full((16,), 256), torch.float32)
    finally:
        torch.set_num_threads(threads)
    for cache, each in zip(caches, numbers, strict=True):
        assert torch.equal(cache.flatten(0, 1), each[-256:])
