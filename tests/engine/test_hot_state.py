"""The hit path while the process changes: modes, interrupts, threads, forks, replaced tables, and torch.compile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from planted_calls import both, copied, native_only, plans

import layerzero as lz
from drawing import examples
from layerzero.core.kernel import Kernel
from layerzero.engine.cache import Flights
from layerzero.engine.call_source import coarse_key
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.function_kernels import USER_BACKEND
from paths import IN_C


@both
def test_deterministic_mode_and_autocast_are_seen_when_warm(norm_twice):
    x, w = torch.randn(4, 8), torch.randn(8)
    for _ in range(2):
        lz.rms_norm(x, w)
    norm_twice.clear()
    torch.use_deterministic_algorithms(True)
    try:
        lz.rms_norm(x, w)
        lz.rms_norm(x, w)
        assert norm_twice == []  # it is not deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lz.rms_norm(x, w).dtype == torch.float32
    lz.rms_norm(x, w)
    assert norm_twice == ["user.first", "user.first"]


@both
def test_tensors_without_memory_are_not_read(norm_twice):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    gone = torch.randn(4, 8)
    gone.untyped_storage().resize_(0)
    lz.rms_norm(torch._efficientzerotensor((4, 8)), w)
    functional = torch._to_functional_tensor(x)
    torch._mirror_autograd_meta_to(x, functional)
    for _ in range(2):
        torch.testing.assert_close(lz.rms_norm(x, w), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))


@both
def test_an_interrupt_is_no_failure(norm_twice):
    def interrupted(input, weight, *, eps=1e-6):
        if input[0, 0] == 2:
            raise KeyboardInterrupt
        if input[0, 0] == 3:
            raise ValueError("planted")
        return input

    lz.register_kernel("norm.layer", "user.layer", priority=100)(lambda input: input)
    lz.unregister_kernel("user.first")
    lz.register_kernel("norm.rms", "user.interrupted", priority=100)(interrupted)
    w = torch.ones(3)
    for _ in range(2):
        lz.rms_norm(torch.ones(2, 3), w)
    with pytest.raises(KeyboardInterrupt):
        lz.rms_norm(torch.full((2, 3), 2.0), w)
    assert ENGINE.health.breakers() == {}
    with lz.scope(fallback_enabled=False), pytest.raises(lz.KernelExecutionError) as caught:
        lz.rms_norm(torch.full((2, 3), 3.0), w)
    assert str(caught.value.__cause__) == "planted"
    ENGINE.health.reset()
    for _ in range(2):
        lz.rms_norm(torch.ones(2, 3), w)
    with lz.scope(locks={"rms_norm": "user.interrupted"}), pytest.raises(lz.KernelExecutionError) as caught:
        lz.rms_norm(torch.full((2, 3), 3.0), w)
    assert str(caught.value.__cause__) == "planted"


# Sharing, waiting, leaking


def test_one_thread_chooses_and_the_others_get_what_it_got():
    flights, started, go, calls = Flights(), threading.Event(), threading.Event(), []

    def choose():
        calls.append(threading.get_ident())
        started.set()
        go.wait()
        if fails:
            raise lz.PolicyError("planted")
        return "plan"

    for fails in (False, True):
        calls.clear()
        started.clear()
        go.clear()
        results = []

        def ask():
            try:
                results.append(flights.shared("key", choose))
            except lz.PolicyError as error:
                results.append(str(error))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        threads[0].start()
        started.wait()
        for thread in threads[1:]:
            thread.start()
        go.set()
        for thread in threads:
            thread.join()
        assert results == (["planted"] if fails else ["plan"]) * 6
        assert len(calls) <= 6
        assert not flights._flights


def test_a_chooser_that_asks_again_does_not_wait_for_itself():
    flights = Flights()
    assert flights.shared("key", lambda: flights.shared("key", lambda: "inner")) == "inner"
    flights._flights["key"] = object()  # as of a thread that a fork left behind
    flights.forget()
    assert flights.shared("key", lambda: "again") == "again"


def test_a_fork_in_the_middle_of_a_choice_leaves_a_child_that_chooses():
    script = """
import os, threading, torch, layerzero as lz
from layerzero.engine.cache import FLIGHTS
started, go = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: FLIGHTS.shared("key", lambda: (started.set(), go.wait())))
thread.start(); started.wait()
child = os.fork()
if child == 0:
    FLIGHTS.shared("key", lambda: "plan")
    os._exit(0)
go.set(); thread.join()
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def invalidate(hits, threads=4):
    """Hits in several threads while another one empties the tables; how many were wrong, and how many there were."""
    wrong, counts, stop = [], [], threading.Event()
    x, w = [torch.full((rows, 4), float(rows)) for rows in range(1, 9)], torch.ones(4)

    def hit():
        done = 0
        for _ in range(hits // threads // 8):
            for rows, tensor in enumerate(x, 1):
                result = lz.rms_norm(tensor, w)
                if result is not tensor or result.shape[0] != rows:
                    wrong.append(result)
            done += 8
        counts.append(done)

    def change():
        while not stop.is_set():
            ENGINE.bump()
            lz.rms_norm(x[0], w)
            plans().clear()
            stop.wait(0.002)

    changer = threading.Thread(target=change)
    callers = [threading.Thread(target=hit) for _ in range(threads)]
    for thread in (changer, *callers):
        thread.start()
    for thread in callers:
        thread.join()
    stop.set()
    changer.join()
    return wrong, sum(counts)


def register_identity():
    def load(facts):
        rows = facts.size("rows")

        def kernel(input, weight, *, eps):
            assert input.shape[0] == rows  # a plan of another size, or a plan that was freed, would say so
            return input

        return kernel

    declared = {"operations": ("norm.rms",), "backend": USER_BACKEND, "accepts": ("eps",), "priority": 100}
    lz.register_backend([Kernel(id="user.identity", load=load, **declared)])


@IN_C
def test_hits_are_right_while_tables_are_replaced(path):
    register_identity()
    wrong, count = invalidate(200_000 if path == "native" else 40_000)
    assert not wrong
    assert count
    assert ENGINE.health.breakers() == {}


@pytest.mark.stress
@native_only
def test_twenty_million_hits_are_right_while_tables_are_replaced():
    register_identity()
    wrong, count = invalidate(20_000_000)
    assert not wrong
    assert count == 20_000_000
    assert ENGINE.health.breakers() == {}


def resident_bytes():
    from pathlib import Path

    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@both
def test_nothing_leaks(path):
    lz.register_kernel("norm.rms", "user.identity", priority=100)(lambda input, weight, *, eps=1e-6: input)
    x, w, layout, number = torch.ones(3, 4), torch.ones(4), copied("BSHD"), 1234.5
    watched = (x, w, layout, number, None, True)
    q = torch.randn(1, 1, 2, 8)

    def work(times):
        for _ in range(times):
            lz.rms_norm(x, w, number)
        for _ in range(times // 1000):
            ENGINE.bump()
            for rows in (1, 2, 5, 9):
                lz.rms_norm(torch.ones(rows, 4), w)
            lz.attention(q, q, q, layout=layout)
            with pytest.raises(TypeError):
                lz.rms_norm(x)
            with pytest.raises(lz.InvalidCallError):
                lz.rms_norm(x, torch.ones(5))

    count = examples(400_000) if path == "native" else examples(40_000)
    work(2000)
    gc.collect()
    before, memory, plans_before = [sys.getrefcount(each) for each in watched], resident_bytes(), _plans_alive()
    work(count)
    gc.collect()
    after = [sys.getrefcount(each) for each in watched]
    # None and True belong to the whole process, where what other tests left goes meanwhile
    allowed = [200] * 4 + [count // 100] * 2
    assert all(abs(now - then) < most for now, then, most in zip(after, before, allowed, strict=True)), (before, after)
    assert resident_bytes() - memory < 24 * 2**20
    assert _plans_alive() <= plans_before + 4


def _plans_alive():
    from layerzero.core.plan import Plan

    return sum(type(each) is Plan for each in gc.get_objects())


@native_only
def test_an_index_forgets_what_its_table_forgets():
    lz.configure(**{"cache.max_size": 16})
    for hidden in range(1, 200):
        lz.rms_norm(torch.ones(2, hidden), torch.ones(hidden))
        assert len(plans().index) == len(plans()) <= 16


def test_a_coarse_key_has_classes_in_place_of_sizes():
    x = torch.empty(5, 9)
    exact = ((x.shape, x.stride(), x.dtype, x.device, 0), None, 1e-6, False)
    coarse, shapes, strides = coarse_key(exact, ("input", "residual"))
    assert coarse == ((x.dtype, x.device, 0, 3, 4, 2, 1), None, 1e-6, False)
    assert (shapes, strides) == ([(5, 9), ()], [(9, 1), ()])


@pytest.mark.slow
def test_the_python_path_serves_where_c_is_not_wanted_and_torch_was_looked_for_before_its_import():
    script = """
import importlib.util, layerzero as lz
importlib.util.find_spec("torch")
import torch
torch.ops.layerzero.attention
from layerzero.engine import accelerator
print(accelerator.ABSENT, lz.rms_norm)
"""
    environment = os.environ | {"LAYERZERO_NATIVE": "0"}
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment)
    assert shown.stdout.startswith("LAYERZERO_NATIVE is 0 <function rms_norm")


@pytest.mark.slow
def test_the_python_path_serves_where_the_system_has_no_more_threads():
    script = """
import threading, torch, layerzero as lz
def start(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = start
x = torch.randn(4, 8)
torch.testing.assert_close(lz.rms_norm(x, torch.ones(8)), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
from layerzero.engine import accelerator
print(accelerator.ABSENT)
"""
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("the system gave no thread")


# torch.compile


@IN_C
@both
@pytest.mark.parametrize(
    "first", ["import layerzero as lz; lz.rms_norm; import torch._dynamo", "import torch._dynamo, layerzero as lz"]
)
@pytest.mark.slow
def test_torch_compile_sees_one_operator_whenever_it_was_imported(first):
    script = f"""
{first}
import torch
x, w = torch.randn(4, 8), torch.randn(8)
def double(x):
    return lz.rms_norm(x, w) * 2
compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x), double(x))
compiled = torch.compile(lambda x: lz.rms_norm(input=x, weight=w), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(x), double(x) / 2)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


@both
def test_after_a_graph_break_the_engine_is_not_compiled():
    traced = []

    def kernel(input, weight, *, eps=1e-6):
        traced.append(torch.compiler.is_dynamo_compiling())
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    lz.register_kernel("norm.rms", "user.kernel", priority=100)(kernel)
    x, w = torch.randn(4, 8), torch.randn(8)

    def broken(x):
        torch._dynamo.graph_break()
        return lz.rms_norm(x, w) + 1

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(broken, backend="aot_eager")(x), broken(x))
    assert not any(traced)
