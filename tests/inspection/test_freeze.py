"""Frozen choices: what stays, what still holds above them, and that another process proves it would choose the same."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from paths import IN_C

pytestmark = pytest.mark.usefixtures("path", "thawed")


@pytest.fixture
def thawed():
    yield
    ENGINE.frozen = None
    ENGINE.bump()


@pytest.fixture
def norm():
    """Which kernel ran; two are there, and the second is as good but for its priority."""
    ran = []

    def register(name, priority):
        def kernel(input, weight, *, eps=1e-6):
            ran.append(name)
            if input.numel() and input.flatten()[0] == 666:
                raise ValueError("planted")
            return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

        lz.register_kernel("norm.rms", f"user.{name}", priority=priority)(kernel)

    register("second", 99)
    register("first", 100)
    return ran


def tuned(x, w, kernel_id, time_us):
    """Times as a tuning window writes them."""
    from layerzero.tuning.measurement.comparison import record_times

    times = {REGISTRY.kernel(kernel_id): measured(time_us), REGISTRY.kernel("user.first"): measured(50.0)}
    return record_times(lz.facts("rms_norm", x, w), times)


def measured(time_us):
    return Measurement(median_us=time_us, p95_us=time_us, variance_us2=0.0, samples=30)


def test_new_times_change_nothing_until_it_thaws(norm):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    document = lz.freeze()
    assert [each.kernel for each in document.choices.values()] == ["user.first"]
    (name,) = document.choices
    assert name.startswith("norm.rms float32 ")
    assert {"rows<8", "hidden=8"} <= set(name.split())
    epoch = CALLS["rms_norm"].dispatcher.cache.epoch
    assert tuned(x, w, "user.second", 1.0)
    assert CALLS["rms_norm"].dispatcher.cache.epoch == epoch
    ENGINE.bump()  # whatever else asks for a choice gets the same
    for _ in range(2):
        lz.rms_norm(x, w)
    assert norm == ["first"] * 3
    report = lz.explain("rms_norm", x, w)
    assert report.kernel_id == "user.first"
    assert "frozen: user.first" in report.notes
    assert lz.explain(report.facts).kernel_id == "user.first"
    assert "frozen for 1 classes" in str(lz.doctor())
    lz.thaw()
    lz.rms_norm(x, w)
    assert norm[-1] == "second"


def test_another_size_of_the_class_has_its_kernel_and_a_new_class_is_listed(norm):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    lz.freeze()
    other = torch.randn(7, 8)
    tuned(other, w, "user.second", 1.0)
    lz.rms_norm(other, w)
    assert lz.frozen().added == ()
    wide, v = torch.randn(4, 16), torch.randn(16)
    tuned(wide, v, "user.second", 1.0)
    assert any("not seen before" in note for note in lz.explain("rms_norm", wide, v).notes)
    lz.rms_norm(wide, v)
    assert norm == ["first", "first", "first"]  # by priority: times decide nothing
    (added,) = lz.frozen().added
    assert "hidden=16" in added
    assert lz.frozen().choices[added].kernel == "user.first"
    document = lz.thaw()
    assert added in document.choices


def test_choices_of_scopes_are_frozen_too_and_marked(norm):
    x, w = torch.randn(4, 8), torch.randn(8)
    settings = {"memory_headroom_mb": 77}
    lz.rms_norm(x, w)
    with lz.scope(**settings):
        lz.rms_norm(x, w)
    document = lz.freeze()
    assert sorted((each.kernel, each.scoped) for each in document.choices.values()) == [
        ("user.first", False), ("user.first", True),
    ]  # fmt: skip
    tuned(x, w, "user.second", 1.0)
    ENGINE.bump()
    with lz.scope(**settings):
        lz.rms_norm(x, w)
        assert "frozen: user.first" in lz.explain("rms_norm", x, w).notes
    assert norm == ["first"] * 3
    assert lz.frozen().added == ()


def test_a_manifest_leaves_choices_of_scopes_out(norm, tmp_path):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    with lz.scope(memory_headroom_mb=77):
        lz.rms_norm(x, w)
    lz.freeze().write(tmp_path / "choices.json")
    lz.thaw()
    lz.freeze(tmp_path / "choices.json")
    assert [each.scoped for each in lz.frozen().choices.values()] == [False]


def test_denials_locks_and_scopes_hold_above(norm):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    lz.freeze()
    with lz.scope(avoid_sources=["user.first"]):
        lz.rms_norm(x, w)
    lz.lock("rms_norm", "user.second")
    lz.rms_norm(x, w)
    lz.unlock("rms_norm")
    assert norm == ["first", "second", "second"]
    assert lz.frozen().departures == {}
    lz.configure(deny=["user.first"])
    with pytest.warns(lz.LayerZeroFallbackWarning, match=r"user\.first is frozen for norm\.rms .*user\.second runs"):
        lz.rms_norm(x, w)
    (departure,) = lz.frozen().departures.values()
    assert (departure.kernel, departure.ran) == ("user.first", "user.second")
    assert "POLICY_DENIED" in departure.reason
    lz.configure(deny=None)
    lz.rms_norm(x, w)
    assert norm[3:] == ["second", "first"]


def test_a_frozen_kernel_that_fails_falls_back_visibly_or_raises(norm):
    x, w, bad = torch.randn(4, 8), torch.randn(8), torch.full((4, 8), 666.0)
    lz.rms_norm(x, w)
    lz.freeze()
    lz.unregister_kernel("user.second")
    with pytest.warns(lz.LayerZeroFallbackWarning) as told:
        lz.rms_norm(bad, w)
    texts = [str(each.message) for each in told]
    assert any("user.first failed" in text for text in texts)
    assert any("is frozen for" in text for text in texts)
    lz.configure(fallback_enabled=False)
    with pytest.raises(lz.NoKernelFoundError, match=r"user\.first is frozen for this class; lz\.thaw"):
        lz.rms_norm(x, w)
    lz.configure(fallback_enabled=None)
    ENGINE.health.reset()
    lz.rms_norm(x, w)
    assert norm[-1] == "first"


def test_a_bound_callable_keeps_to_it(norm):
    x, w = torch.randn(4, 8), torch.randn(8)
    rms = lz.bind(lz.rms_norm, x, w)
    rms(x, w)
    lz.freeze()
    tuned(x, w, "user.second", 1.0)
    ENGINE.bump()
    rms(x, w)
    assert norm == ["first", "first"]
    lz.thaw()
    rms(x, w)
    assert norm == ["first", "first", "second"]


@IN_C
def test_a_document_goes_to_another_process_and_back(tmp_path):
    q, x, w = torch.randn(2, 8, 4, 16), torch.randn(4, 8), torch.randn(8)
    lz.attention(q, q, q, layout="BSHD")
    lz.attention(q, q[:, :1], q[:, :1], layout="BHSD", causal=False)
    lz.rms_norm(x, w)
    lz.layer_norm(x, (8,), w)
    document = lz.freeze()
    assert len(document.choices) == 4, "\n".join(document.choices)
    document.write(tmp_path / "frozen.json")
    lz.thaw()
    again = lz.freeze(tmp_path / "frozen.json")
    assert again == document
    assert lz.frozen().added == ()
    lz.rms_norm(x, w)
    assert lz.frozen().added == ()
    lz.thaw()
    script = f"""
import layerzero as lz
from layerzero.core.ledger import MemoryLedger
from layerzero.engine.dispatch import ENGINE
ENGINE.ledger = MemoryLedger()  # as in this process: times ship for some machines
print(lz.freeze({str(tmp_path / "frozen.json")!r}).hash)
"""
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True
    ).stdout
    assert shown.strip() == document.hash


def test_a_process_that_would_choose_otherwise_refuses(norm, tmp_path):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    document = lz.freeze()
    path = tmp_path / "frozen.json"
    document.write(path)
    lz.thaw()
    tuned(x, w, "user.second", 1.0)
    with pytest.raises(lz.FrozenChoiceError, match=r"wanted user\.first, this process would choose user\.second"):
        lz.freeze(path)
    assert lz.frozen() is None
    lz.configure(deny=["user.first"])
    with pytest.raises(lz.FrozenChoiceError) as caught:
        lz.freeze(path)
    assert "settings: deny: wanted its default, got ('user.first',)" in caught.value.problems
    assert any("POLICY_DENIED" in problem for problem in caught.value.problems)
    lz.configure(deny=None)
    lz.unregister_kernel("user.first")
    with pytest.raises(lz.FrozenChoiceError, match="got not registered"):
        lz.freeze(document)


def test_damaged_documents_are_refused(norm, tmp_path):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    path = tmp_path / "frozen.json"
    lz.freeze().write(path)
    with pytest.raises(lz.PolicyError, match="frozen already"):
        lz.freeze()
    lz.thaw()
    with pytest.raises(lz.PolicyError, match="wanted frozen choices, got none"):
        lz.thaw()
    text = path.read_text()
    for damaged, problem in (
        (text.replace("user.first", "user.second"), "hash: wanted"),
        (text.replace('"format": 2', '"format": 1'), "format: wanted 2, got 1"),
        (text[:-20], "wanted frozen choices as JSON"),
        (text.replace('"torch"', '"touch"'), "wanted frozen choices as JSON"),
    ):
        assert damaged != text
        path.write_text(damaged)
        with pytest.raises(lz.FrozenChoiceError, match=problem):
            lz.freeze(path)
    with pytest.raises(lz.FrozenChoiceError, match="wanted frozen choices as JSON"):
        lz.freeze(tmp_path / "absent.json")


def test_the_hash_depends_on_choices_and_not_on_their_order(norm):
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


def test_choices_are_kept_once_by_threads_that_choose_at_once(norm):
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


def test_freezing_and_thawing_beside_calls(norm):
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


def test_a_document_is_told_in_one_line(norm):
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
def test_what_was_called_is_held_whatever_began_an_epoch_since(norm, what):
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
    assert norm[-1] == held[0].removeprefix("user.")
    assert (lz.frozen().added, lz.frozen().departures) == ((), {})


def test_what_a_scope_called_is_held_under_what_its_settings_are_now(norm):
    x, w = torch.randn(4, 8), torch.randn(8)
    with lz.scope(avoid_sources=["user.first"]):
        lz.rms_norm(x, w)
    lz.configure(memory_headroom_mb=99)
    (choice,) = lz.freeze().choices.values()
    assert (choice.kernel, choice.scoped) == ("user.second", True)
    with lz.scope(avoid_sources=["user.first"]):
        lz.rms_norm(x, w)
    assert (lz.frozen().added, lz.frozen().departures) == ((), {})


def test_what_was_warmed_up_is_held(norm):
    lz.configure(deny=["inductor"])  # which compiles for 15 s here
    lz.warmup("norm.rms", shapes=[(4, 8), (4, 16)])
    document = lz.freeze()
    assert [each.kernel for each in document.choices.values()] == ["user.first"] * 2
    lz.rms_norm(torch.randn(4, 16), torch.randn(16))
    assert lz.frozen().added == ()


def test_new_sizes_of_few_classes_drop_none_and_too_many_classes_are_told(norm, monkeypatch):
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


def test_calls_of_a_function_that_is_taken_back_are_forgotten(norm):
    lz.rms_norm(torch.randn(4, 8), torch.randn(8))
    assert len(ENGINE.history.calls()) == 1
    ENGINE.history.forget("layer_norm")
    assert len(ENGINE.history.calls()) == 1
    ENGINE.history.forget("rms_norm")
    assert ENGINE.history.calls() == ()
