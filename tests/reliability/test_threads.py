"""What a plan depends on beside its arguments: threads, and the device of a proof, a build or a failure."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.engine.health import Health
from layerzero.engine.jit import Built
from layerzero.engine.registry import REGISTRY
from layerzero.tuning.storage.files import FileLedger


@pytest.fixture
def threads(one_thread):
    """Two threads, and as many as before afterwards."""
    torch.set_num_threads(2)


@pytest.fixture
def loads():
    """The numbers of threads that a kernel was made for, in order."""
    seen = []

    def load(facts):
        seen.append(torch.get_num_threads())
        return lambda input, weight: torch.nn.functional.rms_norm(input, weight.shape, weight, 1e-6)

    backend = lz.Backend(name="counting", summary="")
    lz.register_backend(
        [lz.Kernel(id="counting.rms", operations=("norm.rms",), backend=backend, load=load, priority=100)]
    )
    return seen


@pytest.mark.usefixtures("path", "threads")
def test_a_plan_is_for_one_number_of_threads(loads):
    call = torch.randn(4, 8), torch.randn(8)
    for count in (2, 2, 1, 1, 2, 1):
        torch.set_num_threads(count)
        lz.rms_norm(*call)
    assert loads == [2, 1]


@pytest.mark.usefixtures("path", "threads")
def test_what_is_bound_for_two_threads_is_chosen_for_anew_with_one(loads):
    call = torch.randn(4, 8), torch.randn(8)
    bound = lz.bind(lz.rms_norm, *call)
    bound(*call)
    bound(*call)
    torch.set_num_threads(1)
    torch.testing.assert_close(bound(*call), lz.rms_norm(*call))
    assert loads == [2, 1]
    torch.set_num_threads(2)
    bound(*call)
    assert loads == [2, 1]
    with pytest.raises(lz.InvalidCallError, match="shape: wanted"):
        bound(torch.randn(5, 8), call[1])


H100, A100 = lz.Device.named("H100"), lz.Device.named("A100")


def of_device(device):
    query = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16, device="meta")
    return lz.facts("attention", query, query, query, layout="BSHD", device=device)


def test_a_failure_on_one_kind_of_device_says_nothing_about_another():
    kernel, now = REGISTRY.kernel("torch.sdpa.math"), [0.0]
    health = Health(lambda: None, clock=lambda: now[0])
    health.failed(kernel, "x", RuntimeError("a"), device=H100.name)
    assert health.reasons(kernel, "x", H100.name)
    assert not health.reasons(kernel, "x", A100.name)
    health.failed(kernel, "y", RuntimeError("b"))
    assert health.reasons(kernel, "y", H100.name)
    assert set(health.breakers()) == {(kernel.id, "x"), (kernel.id, "y")}
    now[0] = 1e6
    health.worked(kernel, "x", H100.name)
    assert set(health.breakers()) == {(kernel.id, "y")}
    health.reset()


def test_a_build_for_one_kind_of_device_is_none_for_another():
    kernel = lz.Kernel(id="a.b", operations=("norm.rms",), backend=lz.Backend("a", ""), load=id, jit=True)
    built = Built()
    built.add(kernel, of_device(H100))
    assert built.ready(kernel, of_device(H100))
    assert not built.ready(kernel, of_device(A100))


def test_a_proof_on_one_kind_of_device_is_none_for_another(tmp_path):
    kernel, ledger = REGISTRY.kernel("flash_attn.v2"), FileLedger(tmp_path)
    ledger.accept(ledger.begin(kernel, of_device(H100)))
    assert not ledger.unproved(kernel, of_device(H100))
    assert ledger.unproved(kernel, of_device(A100))
