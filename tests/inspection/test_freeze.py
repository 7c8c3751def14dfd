"""Frozen choices: what stays, what still holds above them, and that another process proves it would choose the same."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import layerzero as lz
from frozen_norms import tuned
from layerzero.engine import plan_source
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.inspection import freeze
from paths import IN_C

pytestmark = pytest.mark.usefixtures("path")


def test_new_times_change_nothing_until_it_thaws(two_norms):
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
    assert two_norms == ["first"] * 3
    report = lz.explain("rms_norm", x, w)
    assert report.kernel_id == "user.first"
    assert "frozen: user.first" in report.notes
    assert lz.explain(report.facts).kernel_id == "user.first"
    assert "frozen for 1 classes" in str(lz.doctor())
    lz.thaw()
    lz.rms_norm(x, w)
    assert two_norms[-1] == "second"


def test_a_kernel_that_is_registered_while_choices_freeze_is_no_departure(two_norms, monkeypatch):
    """A thread registers it, and makes a choice with it, after the choices were read and before they hold."""
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.unregister_kernel("user.first")
    lz.rms_norm(x, w)
    past, build = freeze._choices_now(), plan_source.build
    lz.register_kernel("norm.rms", "user.third", priority=100)(lambda input, weight, *, eps=1e-6: input)
    monkeypatch.setattr(freeze, "_choices_now", lambda: past)

    def while_it_freezes(function, chosen, *rest):
        if lz.frozen() is None and chosen.kernel.id == "user.third":
            lz.freeze()
        return build(function, chosen, *rest)

    monkeypatch.setattr(plan_source, "build", while_it_freezes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lz.rms_norm(x, w)
    assert two_norms == ["second"] * 2
    assert lz.frozen().departures == {}


def test_an_empty_call_says_nothing_of_calls_with_a_row():
    """The reference computed it, and was frozen for the step of one token that came after it."""
    w = torch.randn(8)
    for before in (False, True):
        rows = [torch.randn(count, 8) for count in (0, 1)]
        for each in rows if before else ():
            lz.rms_norm(each, w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lz.LayerZeroWarning)  # nothing was called yet
            lz.freeze()
        lz.rms_norm(rows[0], w)
        assert not lz.explain("rms_norm", rows[1], w).chosen.kernel.is_reference
        lz.thaw()


def test_another_size_of_the_class_has_its_kernel_and_a_new_class_is_listed(two_norms):
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
    assert two_norms == ["first", "first", "first"]  # by priority: times decide nothing
    (added,) = lz.frozen().added
    assert "hidden=16" in added
    assert lz.frozen().choices[added].kernel == "user.first"
    document = lz.thaw()
    assert added in document.choices


def test_choices_of_scopes_are_frozen_too_and_marked(two_norms):
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
    assert two_norms == ["first"] * 3
    assert lz.frozen().added == ()


def test_a_manifest_leaves_choices_of_scopes_out(two_norms, tmp_path):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    with lz.scope(memory_headroom_mb=77):
        lz.rms_norm(x, w)
    lz.freeze().write(tmp_path / "choices.json")
    lz.thaw()
    lz.freeze(tmp_path / "choices.json")
    assert [each.scoped for each in lz.frozen().choices.values()] == [False]


def test_denials_locks_and_scopes_hold_above(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    lz.rms_norm(x, w)
    lz.freeze()
    with lz.scope(avoid_sources=["user.first"]):
        lz.rms_norm(x, w)
    lz.lock("rms_norm", "user.second")
    lz.rms_norm(x, w)
    lz.unlock("rms_norm")
    assert two_norms == ["first", "second", "second"]
    assert lz.frozen().departures == {}
    lz.configure(deny=["user.first"])
    with pytest.warns(lz.LayerZeroFallbackWarning, match=r"user\.first is frozen for norm\.rms .*user\.second runs"):
        lz.rms_norm(x, w)
    (departure,) = lz.frozen().departures.values()
    assert (departure.kernel, departure.ran) == ("user.first", "user.second")
    assert "POLICY_DENIED" in departure.reason
    lz.configure(deny=None)
    lz.rms_norm(x, w)
    assert two_norms[3:] == ["second", "first"]


def test_a_frozen_kernel_that_fails_falls_back_visibly_or_raises(two_norms):
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
    assert two_norms[-1] == "first"


def test_a_bound_callable_keeps_to_it(two_norms):
    x, w = torch.randn(4, 8), torch.randn(8)
    rms = lz.bind(lz.rms_norm, x, w)
    rms(x, w)
    lz.freeze()
    tuned(x, w, "user.second", 1.0)
    ENGINE.bump()
    rms(x, w)
    assert two_norms == ["first", "first"]
    lz.thaw()
    rms(x, w)
    assert two_norms == ["first", "first", "second"]


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
from layerzero.core.ledger import Ledger
from layerzero.engine.dispatch import ENGINE
ENGINE.ledger = Ledger()  # as in this process: times ship for some machines
print(lz.freeze({str(tmp_path / "frozen.json")!r}).hash)
"""
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True
    ).stdout
    assert shown.strip() == document.hash


def test_a_process_that_would_choose_otherwise_refuses(two_norms, tmp_path):
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


def test_damaged_documents_are_refused(two_norms, tmp_path):
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
