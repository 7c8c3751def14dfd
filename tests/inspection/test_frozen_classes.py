"""What frozen choices hold: threads that choose at once, views, scopes, and classes without end."""

from __future__ import annotations

import threading

import pytest
import torch

import layerzero as lz
from frozen_norms import tuned
from layerzero.engine.dispatch import ENGINE

pytestmark = pytest.mark.usefixtures("path")


def test_the_hash_depends_on_choices_and_not_on_their_order(two_norms):
    x, w, v = torch.randn(4, 8), torch.randn(8), torch.randn(16)
    hashes = []
    for order in ((x, w), (torch.randn(4, 16), v)), ((torch.randn(4, 16), v), (x, w)):
        ENGINE.history.forget()
        ENGINE.bump()
        for call in order:
            lz.rms_norm(*call)
        hashes.append(lz.freeze().hash)
        lz.thaw()
    assert hashes[0] == hashes[1]
    lz.lock("rms_norm", "user.second")
    lz.rms_norm(x, w)
    assert lz.freeze().hash not in hashes


def test_choices_are_kept_once_by_threads_that_choose_at_once(two_norms):
    x, w = [torch.randn(4, hidden) for hidden in range(8, 24)], [torch.randn(hidden) for hidden in range(8, 24)]
    with pytest.warns(lz.LayerZeroWarning, match="freeze: wanted calls that were made or warmed up, got none"):
        lz.freeze()
    start = threading.Barrier(4)

    def call():
        start.wait()
        for each, weight in zip(x, w, strict=True):
            lz.rms_norm(each, weight)
            ENGINE.bump()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lz.frozen().choices) == len(lz.frozen().added) == 16
    assert {each.kernel for each in lz.frozen().choices.values()} == {"user.first"}


def test_freezing_and_thawing_beside_calls(two_norms):
    """Whatever a call meets, it gets a right result, and what is frozen at the end is what runs."""
    x, w = torch.randn(4, 8), torch.randn(8)
    wanted = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    rms, stop, wrong = lz.bind(lz.rms_norm, x, w), threading.Event(), []

    def call(way):
        while not stop.is_set():
            if not torch.equal(way(x, w), wanted):
                wrong.append(way)

    threads = [threading.Thread(target=call, args=(way,)) for way in (lz.rms_norm, rms, lz.rms_norm)]
    lz.rms_norm(x, w)
    for thread in threads:
        thread.start()
    for _ in range(40):
        lz.freeze()
        ENGINE.bump()
        lz.thaw()
    lz.freeze()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ENGINE.health.breakers() == {}
    lz.rms_norm(x, w)
    assert {each.kernel for each in lz.frozen().choices.values()} == {"user.first"}


def test_a_document_is_told_in_one_line(two_norms):
    lz.rms_norm(torch.randn(4, 8), torch.randn(8))
    document = lz.freeze()
    assert repr(document) == str(document)
    assert repr(document).startswith("<Frost of 1 choice on ")
    assert document.hash[:12] in repr(document)
    assert len(repr(document)) < 160


@pytest.fixture
def of_rows():
    """Which kernel ran; the better one takes no views, and nobody copies any."""
    ran = []

    def register(name, priority, limits):
        def kernel(input, weight, *, eps):
            ran.append((name, input.is_contiguous()))
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        lz.register_kernel("norm.rms", f"user.{name}", priority=priority, limits=limits)(kernel)

    register("dense", 100, [lz.limits.contiguous("input")])
    register("any", 99, [])
    lz.configure(strict_mode=True, fallback_enabled=False)
    return ran


def views():
    return {
        "dense": torch.randn(4, 8),
        "rows": torch.randn(8, 8)[::2],
        "strided": torch.randn(8, 4).t(),
        "expanded": torch.randn(1, 8).expand(4, 8),
    }


@pytest.mark.parametrize("first", ["dense", "rows"])
def test_calls_that_lie_in_other_ways_keep_kernels_of_their_own(of_rows, tmp_path, first):
    """No frozen kernel runs what it does not take, and none that ran before is refused for the choice of another."""
    calls, weight, file = views(), torch.randn(8), tmp_path / "frozen.json"
    for tensor in (calls[first], *calls.values()):
        lz.rms_norm(tensor, weight)
    document = lz.freeze()
    document.write(file)
    kernels = {name.partition("input:")[2]: each.kernel for name, each in document.choices.items()}
    assert kernels == {"": "user.dense", "rows": "user.any", "strided": "user.any", "expanded": "user.any"}
    for frozen_here in (True, False):
        if not frozen_here:
            lz.thaw()
            lz.freeze(file)
        ENGINE.bump()
        of_rows.clear()
        for name in (*reversed(calls), *calls):
            lz.rms_norm(calls[name], weight)
        assert {(name, dense) for name, dense in of_rows} == {("dense", True), ("any", False)}
        assert (lz.frozen().departures, lz.frozen().added) == ({}, ())


def test_a_view_that_nobody_saw_gets_the_frozen_kernel_of_dense_tensors_only_if_it_takes_it(of_rows):
    calls, weight = views(), torch.randn(8)
    lz.rms_norm(calls["dense"], weight)
    lz.freeze()
    ENGINE.bump()
    assert "not seen before" in lz.explain("rms_norm", calls["rows"], weight).notes[-1]
    lz.rms_norm(calls["rows"], weight)
    lz.thaw()
    ENGINE.history.forget()
    lz.lock("rms_norm", "user.any")
    lz.rms_norm(calls["dense"], weight)
    lz.freeze()
    lz.unlock("rms_norm")
    ENGINE.bump()
    assert lz.explain("rms_norm", calls["dense"], weight).kernel_id == "user.any"
    assert (
        lz.explain("rms_norm", calls["rows"], weight).notes[-1] == "frozen: user.any, for dense tensors of this class"
    )
    lz.rms_norm(calls["rows"], weight)
    assert of_rows == [("dense", True), ("any", False), ("any", True), ("any", False)]
    assert len(lz.frozen().added) == 1


def dropped(monkeypatch):
    from layerzero.engine import frozen_choices

    monkeypatch.setattr(frozen_choices, "MAX_CALLS", 8)
    monkeypatch.setattr(frozen_choices, "MAX_CLASSES", 4)


@pytest.mark.parametrize("what", ["lock", "configure", "winner", "tune", "no cache"])
def test_what_was_called_is_held_whatever_began_an_epoch_since(two_norms, what):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.configure(**{"cache.enabled": False}) if what == "no cache" else None
    lz.rms_norm(x, w)
    if what == "lock":
        lz.lock("mlp.linear", "torch.linear")
    elif what == "configure":
        lz.configure(memory_headroom_mb=99)
    elif what == "winner":
        ENGINE.new_winner()
    elif what == "tune":
        assert tuned(x, w, "user.second", 1.0)
    held = [each.kernel for each in lz.freeze().choices.values()]
    assert held == ["user.second" if what == "tune" else "user.first"]
    lz.rms_norm(x, w)
    assert two_norms[-1] == held[0].removeprefix("user.")
    assert (lz.frozen().added, lz.frozen().departures) == ((), {})


def test_what_a_scope_called_is_held_under_what_its_settings_are_now(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    with lz.scope(avoid_sources=["user.first"]):
        lz.rms_norm(x, w)
    lz.configure(memory_headroom_mb=99)
    (choice,) = lz.freeze().choices.values()
    assert (choice.kernel, choice.scoped) == ("user.second", True)
    with lz.scope(avoid_sources=["user.first"]):
        lz.rms_norm(x, w)
    assert (lz.frozen().added, lz.frozen().departures) == ((), {})


def test_what_was_warmed_up_is_held(two_norms):
    lz.configure(deny=["inductor"])  # which compiles for 15 s here
    lz.warmup("norm.rms", shapes=[(4, 8), (4, 16)])
    document = lz.freeze()
    assert [each.kernel for each in document.choices.values()] == ["user.first"] * 2
    lz.rms_norm(torch.randn(4, 16), torch.randn(16))
    assert lz.frozen().added == ()


def test_new_sizes_of_few_classes_drop_none_and_too_many_classes_are_told(two_norms, monkeypatch):
    dropped(monkeypatch)
    lz.configure(**{"cache.enabled": False})  # each size is a call of its own
    for rows in range(33, 50):
        lz.rms_norm(torch.randn(rows, 8), torch.randn(8))
    assert len(lz.freeze().choices) == 1
    lz.thaw()
    for hidden in range(9, 24):
        lz.rms_norm(torch.randn(2, hidden), torch.randn(hidden))
    with pytest.warns(lz.LayerZeroWarning, match="freeze: wanted at most 4 classes of calls, got"):
        lz.freeze()


def test_calls_of_a_function_that_is_taken_back_are_forgotten(two_norms):
    lz.rms_norm(torch.randn(4, 8), torch.randn(8))
    assert len(ENGINE.history.calls()) == 1
    ENGINE.history.forget("layer_norm")
    assert len(ENGINE.history.calls()) == 1
    ENGINE.history.forget("rms_norm")
    assert ENGINE.history.calls() == ()
