"""What torch's own function would run is the champion of calls of which nothing is known."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.core.evidence import Evidence, Measurement, Provenance
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY

X, W = torch.randn(4, 32), torch.randn(32)
LIBRARIES = {"torch": "2.11.0", "flash-attn": "2.8.3", "flash-attn-3": "3.0.0"}
BACKEND = lz.Backend(name="fast", summary="a library that says of itself that it is fast")


def norm(input, weight, *, eps=1e-6):
    return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)


@pytest.fixture
def library():
    """A kernel of a library, with the highest priority there is."""
    kernel = lz.Kernel(
        id="fast.rms_norm",
        operations=("norm.rms",),
        backend=BACKEND,
        load=lambda _: norm,
        accepts=("eps",),
        priority=100,
    )
    REGISTRY.register_kernels([kernel])  # as a backend that ships is
    yield kernel
    lz.unregister_kernel(kernel.id)


def chosen(**settings):
    with lz.scope(**settings):
        return lz.explain("rms_norm", X, W)


def timed(kernel_id, us):
    facts = lz.explain("rms_norm", X, W).facts
    ENGINE.ledger.record_time(REGISTRY.kernel(kernel_id), facts, Measurement(us, us, 0.01, 20))


def attention(device, seq=512, kv=None, **more):
    query = torch.empty(2, seq, 8, 128, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, kv or seq, 8, 128, dtype=torch.bfloat16, device="meta")
    return lz.explain("attention", query, key, key, layout="BSHD", device=device, libraries=LIBRARIES, **more)


@pytest.mark.usefixtures("library")
def test_a_priority_alone_does_not_replace_what_torch_runs():
    report = chosen()
    assert report.kernel_id == "torch.rms_norm"
    assert any("unmeasured: stock" in note and "layerzero tune" in note for note in report.notes)
    assert chosen(unmeasured="priority").kernel_id == "fast.rms_norm"
    assert not any("unmeasured: stock" in note for note in chosen(unmeasured="priority").notes)


@pytest.mark.usefixtures("library")
def test_what_the_user_asks_for_does():
    assert chosen(prefer_sources=["fast"]).kernel_id == "fast.rms_norm"
    assert chosen(locks={"norm.rms": "fast.rms_norm"}).kernel_id == "fast.rms_norm"
    assert chosen(rules=[{"match": {"hidden": "<64"}, "prefer": "fast"}]).kernel_id == "fast.rms_norm"
    assert chosen(deny=["torch"]).kernel_id == "fast.rms_norm"


@pytest.mark.parametrize(("priority", "wins"), [(90, True), (5, False)])
def test_a_kernel_that_a_program_registers_has_its_priority(priority, wins):
    lz.register_kernel("norm.rms", "user.norm", priority=priority)(norm)
    try:
        assert (chosen().kernel_id == "user.norm") is wins
    finally:
        lz.unregister_kernel("user.norm")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("stock_us", "other_us", "winner"), [
    (10.0, 5.0, "fast.rms_norm"),
    (10.0, 9.0, "fast.rms_norm"),
    (10.0, 9.99, "torch.rms_norm"),  # within the noise
    (10.0, 20.0, "torch.rms_norm"),
])  # fmt: skip
def test_measured_times_decide(stock_us, other_us, winner):
    timed("torch.rms_norm", stock_us)
    timed("fast.rms_norm", other_us)
    assert chosen().kernel_id == winner


_CUDNN = torch.backends.cudnn.version()
_FIRST = "torch.sdpa.cudnn" if _CUDNN is None or _CUDNN > 91500 else "torch.sdpa.flash"  # torch's own rule


@pytest.mark.parametrize(("device", "stock"), [
    ("H100", _FIRST),
    ("B200", _FIRST),
    ("A100", "torch.sdpa.flash"),
    ("L40S", "torch.sdpa.flash"),
    ("T4", "torch.sdpa.math"),  # bfloat16
])  # fmt: skip
def test_torch_has_an_order_of_its_own_on_each_device(device, stock):
    assert attention(device).kernel_id == stock


def test_torch_may_be_told_to_ask_cudnn_last(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert attention("H100").kernel_id == "torch.sdpa.flash"


def test_what_torch_has_no_function_for_has_no_champion():
    query = torch.empty(2, 512, 8, 128, dtype=torch.bfloat16, device="meta")
    more = {"layout": "BSHD", "device": "H100", "libraries": LIBRARIES}
    with lz.scope(require_vetting=False):
        assert lz.explain("attention", query, query, query, return_lse=True, **more).kernel_id == "flash_attn.v3"


def test_no_kernel_without_a_time_comes_between_a_time_and_torchs_own(library):
    timed("torch.rms_norm", 10.0)
    report = chosen()
    assert report.kernel_id == "torch.rms_norm"
    held_back = next(each for each in report.candidates if each.kernel.id == library.id)
    assert {term.name: term.points for term in held_back.terms} == {"priority": 100, "stock": -100.0}


@pytest.mark.usefixtures("library")
def test_torchs_own_is_replaced_where_the_user_avoids_it():
    assert chosen(avoid_sources=["torch"]).kernel_id == "fast.rms_norm"


@pytest.mark.parametrize(("confidence", "other_us", "winner"), [
    (0.5, 9.4, "torch.rms_norm"),
    (0.5, 9.0, "fast.rms_norm"),
    (0.7, 9.9, "torch.rms_norm"),
    (0.7, 9.8, "torch.rms_norm"),
    (0.7, 9.6, "fast.rms_norm"),
])  # fmt: skip
def test_the_more_doubtful_times_are_the_more_must_be_gained(library, monkeypatch, confidence, other_us, winner):
    def evidence(_, kernels, facts):
        times = {"torch.rms_norm": 10.0, library.id: other_us}
        return {name: Evidence(us, Provenance.PRIOR, confidence, 0.01) for name, us in times.items()}

    monkeypatch.setattr(type(ENGINE.ledger), "evidence", evidence)
    monkeypatch.setattr(type(ENGINE.ledger), "untimed", lambda *_: False)
    assert chosen().kernel_id == winner


@pytest.mark.parametrize("confidence", [0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02, 0.05, 0.1])
def test_a_larger_gain_never_brings_torchs_own_back(library, monkeypatch, confidence, noise):
    """Margin and noise are one doubt: with both, gains of 2 to 4 % won and such of 5 % lost."""
    times = {library.id: 10.0}

    def evidence(*_):
        return {name: Evidence(us, Provenance.PRIOR, confidence, noise) for name, us in times.items()}

    monkeypatch.setattr(type(ENGINE.ledger), "evidence", evidence)
    monkeypatch.setattr(type(ENGINE.ledger), "untimed", lambda *_: False)
    won = []
    for step in range(60):
        times["torch.rms_norm"] = 10.0 * 1.005**step
        won.append(chosen().kernel_id == library.id)
    assert won == sorted(won)
    assert won[-1]


@pytest.mark.parametrize("priority", [20, 100])
@pytest.mark.parametrize(("provenance", "noise", "winner"), [
    ("measured", 0.3, "fast.rms_norm"),  # 6.4 / 1.3 is more than 1.5 * 2.5 * 1.3, and less than 2 * 2.5 * 1.3
    ("measured", 0.9, "torch.rms_norm"),
    ("predicted", 0.3, "torch.rms_norm"),  # how far it may be off is no noise of its own
])  # fmt: skip
def test_no_doubt_keeps_what_was_surely_slower(monkeypatch, priority, provenance, noise, winner):
    kernel = lz.Kernel(
        id="fast.rms_norm", operations=("norm.rms",), backend=BACKEND, load=lambda _: norm, accepts=("eps",),
        priority=priority,
    )  # fmt: skip
    REGISTRY.register_kernels([kernel])

    def evidence(_, kernels, facts):
        times = {"torch.rms_norm": 6.4, kernel.id: 2.5}
        return {name: Evidence(us, Provenance(provenance), 0.02, noise) for name, us in times.items()}

    monkeypatch.setattr(type(ENGINE.ledger), "evidence", evidence)
    monkeypatch.setattr(type(ENGINE.ledger), "untimed", lambda *_: False)
    try:
        assert chosen().kernel_id == winner
    finally:
        lz.unregister_kernel(kernel.id)


@pytest.mark.usefixtures("library")
def test_a_call_gets_what_the_question_says_where_a_program_has_a_kernel_of_its_own():
    ran = []

    @lz.register_kernel("norm.rms", "mine.rms_norm", priority=50)
    def mine(input, weight, *, eps=1e-6):
        ran.append("mine")
        return norm(input, weight, eps=eps)

    assert chosen().kernel_id == "mine.rms_norm"
    lz.rms_norm(X, W)
    assert ran == ["mine"]


def test_torchs_first_kernel_does_not_decode_where_it_plans_every_number_of_keys():
    query = torch.empty(2, 1, 8, 128, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 777, 8, 128, dtype=torch.bfloat16, device="meta")
    report = lz.explain("attention", query, key, key, layout="BSHD", device="H200", libraries={"torch": "2.11.0"})
    assert report.kernel_id == "torch.sdpa.flash"
