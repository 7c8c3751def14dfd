"""What is said about a result that is not what was wanted."""

from __future__ import annotations

import math
import signal
import subprocess
import sys

import pytest
import torch

import layerzero as lz
from layerzero.core.operation import Tolerance
from layerzero.testing.compare import check, difference, expected
from layerzero.testing.generate import RandomCall

NARROW = Tolerance(1e-5, 1e-5)
HIDDEN = "the reference gives 0 or -inf for all of this row"


def told(got, want):
    return difference(got, want, torch.float32, NARROW)


def test_a_row_of_zeros_says_that_everything_is_hidden_there():
    want = torch.ones(2, 3, 4)
    want[1, 2] = 0.0
    got = want.clone()
    got[1, 2, 1] = -4.3
    assert "wanted 0, got -4.3" in told(got, want)
    assert HIDDEN in told(got, want)
    assert HIDDEN in told(torch.zeros(3), torch.tensor([0.0, -math.inf, 0.0]))


def test_a_zero_among_numbers_says_nothing_more():
    want = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    got = want.clone()
    got[0, 1] = 7.0
    assert "wanted 0, got 7" in told(got, want)
    assert HIDDEN not in told(got, want)
    assert HIDDEN not in told(torch.tensor(2.0), torch.tensor(1.0))


def test_a_call_is_judged_by_the_tolerance_of_the_kernel_that_it_gets():
    """Codes of a cache are rounded once more than the operation's tolerance knows."""

    def coarse(input, weight, *, eps=1e-6):
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps) * 1.004

    wide = {"float32": Tolerance(1e-2, 1e-2)}
    lz.register_kernel("norm.rms", "user.coarse", tolerance=wide, tolerance_reason="it adds up in bfloat16")(coarse)
    call = RandomCall("rms_norm", {"input": torch.rand(4, 64) + 1.0, "weight": torch.ones(64)})
    try:
        lz.lock("rms_norm", "user.coarse")
        assert check(call) == []
        assert check(call, truth=expected(call)) != []
    finally:
        lz.unlock("rms_norm")
        lz.unregister_kernel("user.coarse")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mprotect")
def test_a_read_behind_a_fenced_copy_ends_the_process():
    script = """
import ctypes, torch
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import duplicate
given = torch.arange(21.0).view(3, 7)
copy = duplicate(RandomCall("rms_norm", {"input": given[:, 1:], "weight": given[0, 1:]}), fenced=True).arguments
assert torch.equal(copy["input"], given[:, 1:]) and copy["weight"].data_ptr() == copy["input"].data_ptr()
start, size = copy["input"].data_ptr() - 4, given.nbytes
ctypes.string_at(start, size + 12)  # up to the next multiple of 16
print("no further", flush=True)
ctypes.string_at(start, size + 13)
print("further")
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (child.stdout, child.returncode) == ("no further\n", -signal.SIGSEGV), child.stderr


@pytest.mark.parametrize(("steps", "right"), [(6, True), (1000, False)])
def test_a_result_may_be_as_far_as_what_the_call_brings_is_known(steps, right):
    """Two scores of 40, each some steps of float32 to its own side: no kernel knows them to less than a few."""
    query, values = torch.full((1, 2, 1, 64), 5.0), torch.tensor([2.0, -2.0]).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    arguments = {"query": query, "key": torch.ones(1, 2, 1, 64), "value": values, "causal": False, "layout": "BSHD"}
    truth = expected(RandomCall("attention", arguments, "two equal scores"))
    off = steps * torch.finfo(torch.float32).eps
    scores = 40.0 * torch.tensor([1.0 + off, 1.0 - off], dtype=torch.float64)
    got = (scores.softmax(0) @ values[0, :, 0].double()).expand(1, 2, 1, 64).float()
    assert difference(got, truth.results[0], torch.float32, truth.tolerance), "else this call shows nothing"
    assert (truth.problem("output", got, truth.results[0], torch.float32) == "") is right
