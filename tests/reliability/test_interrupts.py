"""Ctrl-C leaves nothing half done: what is loaded, registered or in force is whole or not there."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys

import pytest
import torch

import layerzero as lz
from layerzero import backends
from layerzero.engine import cache, config, scopes
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY, Registry


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_load_is_made_again(monkeypatch, interruption):
    registry = Registry(entry_points=False)
    builtin = backends.builtin_kernels

    def interrupted():
        yield from itertools.islice(builtin(), 5)
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(backends, "builtin_kernels", interrupted)
        with pytest.raises(interruption):
            registry.kernels()
    ours = {each.id for each in REGISTRY.kernels() if each.backend.origin == "builtin" and not each.is_reference}
    assert {each.id for each in registry.kernels() if not each.is_reference} == ours  # tests add operations


@pytest.mark.parametrize("moment", range(4))
def test_an_interrupted_registration_is_whole_or_not_there(monkeypatch, moment):
    steps = iter(range(moment))

    def interrupted(*_):
        if next(steps, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(REGISTRY, "_listeners", [*REGISTRY._listeners, interrupted])
    for number in range(2):
        try:
            lz.register_kernel("norm.rms", f"user.k{number}")(lambda input, weight, eps: input)
            lz.unregister_kernel(f"user.k{number}")
        except KeyboardInterrupt:
            pass
    monkeypatch.undo()
    for kernel in [each for each in lz.list_kernels("norm.rms") if each.source == "user"]:
        lz.unregister_kernel(kernel.id)
    assert not [each for each in lz.list_kernels() if each.source == "user"]
    lz.rms_norm(torch.randn(4, 8), torch.randn(8))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_plan_is_kept_when_its_first_run_was_accepted(interruption):
    ran = []

    def wrong_once_interrupted(input, weight, *, eps=1e-6):
        ran.append(1)
        if len(ran) == 1:
            raise interruption
        return input[:0]  # of a shape that the first check finds

    lz.register_kernel("norm.rms", "user.odd", priority=100)(wrong_once_interrupted)
    call = torch.randn(4, 8), torch.randn(8)
    with pytest.raises(interruption):
        lz.rms_norm(*call)
    with pytest.warns(lz.LayerZeroFallbackWarning, match="WrongResultError"):
        result = lz.rms_norm(*call)
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(call[0], (8,), call[1], 1e-6))


def test_nobody_finds_a_plan_that_is_in_its_first_run():
    found = []

    def looks(input, weight, *, eps=1e-6):
        found.append([plan.kernel_id for _, plan in CALLS["rms_norm"].dispatcher.cache.plans()])
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", "user.looks", priority=100)(looks)
    call = torch.randn(4, 8), torch.randn(8)
    for _ in range(2):
        lz.rms_norm(*call)
    assert found == [[], ["user.looks"]]


SIGNALS_ARE_SEEN = ("CALL", "RESUME", "JUMP_BACKWARD")
"""Instructions behind which Python runs handlers of signals."""


@functools.cache
def moments(code):
    """Offsets of instructions before which an interrupt may come."""
    before = itertools.pairwise(dis.get_instructions(code))
    return {
        each.offset
        for last, each in before
        if last.opname.startswith(SIGNALS_ARE_SEEN) and "INTRINSIC" not in last.opname
    }


@contextlib.contextmanager
def interrupted(file, number):
    """Ctrl-C at the moment of this number in a file, if there are so many."""
    left = [number]

    def trace(frame, event, _):
        if frame.f_code.co_filename != file or frame.f_code.co_name == "__del__":  # Python swallows those
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in moments(frame.f_code):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 gives no opcodes to frames of later calls otherwise
    sys.settrace(trace)
    try:
        yield lambda: left[0] < 0
    finally:
        sys.settrace(None)


def test_an_interrupt_leaves_a_scope_entered_or_not():
    call, kernel = (torch.randn(4, 8), torch.randn(8)), "torch.rms_norm"
    before = lz.which("rms_norm", *call)["kernel_id"]
    other = "reference" if before == kernel else kernel
    with lz.scope(debug=False):
        pass  # what is read once is read
    for number in itertools.count():
        came = []
        with lz.scope(debug=True):
            outside = config.SCOPES.layers()
            with contextlib.suppress(KeyboardInterrupt), interrupted(scopes.__file__, number) as struck:
                came.append(struck)
                with lz.scope(prefer_sources=[other]), lz.deterministic():
                    pass
            assert config.SCOPES.layers() == outside, number
            assert config.SCOPES.active == 1, number
        assert (config.SCOPES.active, config.SCOPES.layers()) == (0, ()), number
        if not came[0]():
            break
    assert number > 50
    assert lz.which("rms_norm", *call)["kernel_id"] == before


def test_an_interrupted_choice_leaves_nobody_waiting():
    class Known(dict):
        def __setitem__(self, key, flight):
            super().__setitem__(key, flight)
            begun.append(flight)

    begun, flights = [], cache.Flights()
    flights._flights = Known()
    for number in itertools.count():
        with contextlib.suppress(KeyboardInterrupt), interrupted(cache.__file__, number) as struck:
            flights.shared("key", lambda: "plan")
        assert not flights._flights, number
        assert not any(each.landed.locked() for each in begun), number
        if not struck():
            break
    assert 1 < len(begun) <= number, "interrupts came before a flight began, and while one was under way"


def test_a_scope_is_entered_once_and_decorates_as_often_as_wanted():
    block = lz.scope(debug=True)
    with block, pytest.raises(RuntimeError, match="entered already"):
        block.__enter__()
    with block:
        assert config.SCOPES.active == 1
    seen = []

    @lz.scope(debug=True)
    def inside(deep):
        seen.append(len(config.SCOPES.layers()))
        if deep:
            inside(False)

    inside(True)
    inside(False)
    assert seen == [1, 2, 1]
    assert config.SCOPES.active == 0
