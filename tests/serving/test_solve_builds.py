"""What a plan builds for calls within its buckets that are not as large as their ends."""

from __future__ import annotations

import warnings

import pytest

import layerzero as lz
from layerzero.engine.jit import BUILT
from layerzero.serving import solve as solving
from layerzero.serving.background_builds import BUILDS
from solved_models import model, own, run, solve


@pytest.mark.parametrize("seq_len", [[16, 32], [1, 32]])
def test_variants_for_sizes_within_a_bucket_are_built(seq_len, monkeypatch):
    """As Triton compiles another one for sizes that are no multiple of 16: on an H100 such calls left their plan."""
    measured = solving.tune_calls
    monkeypatch.setattr(solving, "tune_calls", lambda calls, **more: measured([], **more))
    key = {"build_key": lambda facts: facts.size("rows") % 16 == 0}
    ran = own("jit", jit=True, limits=[lz.limits.dim("rows", min=16)], **key)
    asked = model(layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = solve(asked, buckets={"seq_len": seq_len, "batch": [1, 4]}, budget_s=None)
    assert "user.jit" in {each.kernel for each in plan.choices.values()}
    lz.freeze(plan)
    built = []
    monkeypatch.setattr(BUILT, "add", lambda *each: built.append(each))
    monkeypatch.setattr(BUILDS, "add", lambda *each: built.append(each))
    ran.clear()
    for seq_len, batch in ((32, 4), (31, 3), (17, 1), (16, 1), (7, 3)):
        run(asked, seq_len, batch)
    assert ran
    assert not lz.frozen().departures
    assert not lz.frozen().plan.misses
    assert not built
