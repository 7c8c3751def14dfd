"""Rotations in processors of diffusers: proved against the processors' own functions, and given back."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz

pytest.importorskip("diffusers")

from diffusers.models.embeddings import apply_rotary_emb
from test_diffusers import MODELS, flux, randn, run, sd3, unet, wan

from layerzero.engine.dispatch import ENGINE
from layerzero.integrations import diffusers_rotary as formulas
from layerzero.integrations import diffusers_rotary as rotary


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    torch.manual_seed(0)


def rotations(model: Any, call: dict[str, Any]) -> int:
    """How many calls of lz.rope_ a run makes."""
    names: list[str] = []
    watch = lambda function, plan: names.append(function.name)
    ENGINE.watch(watch)
    try:
        run(model, call)
    finally:
        ENGINE.unwatch(watch)
    return names.count("rope_")


HEADS = torch.zeros(1, 64, 2, 32)
ROTATES = lz.which(
    "rope_", HEADS, HEADS.clone(), *torch.zeros(2, 64, 16), torch.arange(64), interleaved=True, layout="BSHD"
)


def wan_function() -> Any:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    found = rotary.function_of(WanAttnProcessor)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("make", "rotated"), [(flux, 6), (wan, 4)])
def test_queries_and_keys_are_rotated_by_lz_rope_and_given_back(make: Any, rotated: int) -> None:
    model, call = make()
    model.eval()
    wanted = run(model, call)
    before = [each.processor for each in model.modules() if hasattr(each, "processor")]
    globals_before = {kind: dict(kind.__call__.__globals__) for kind in map(type, before)}
    report = lz.optimize(model)
    (told,) = (each for each in report.replaced if each.kind == "rotation")
    assert told.calls == "lz.rope_"
    assert told.error is not None
    assert told.error < 1e-6
    assert rotations(model, call) == rotated
    torch.testing.assert_close(run(model, call), wanted, atol=2e-5, rtol=1e-4)
    assert rotations(copy.deepcopy(model), call) == rotated
    other, _ = make()
    assert rotations(other.eval(), call) == 0  # nothing of the process was patched
    assert all(kind.__call__.__globals__ == known for kind, known in globals_before.items())
    report.undo()
    after = [each.processor for each in model.modules() if hasattr(each, "processor")]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert rotations(model, call) == 0
    assert torch.equal(run(model, call), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unbind", [-1, -2])
@pytest.mark.parametrize("sequence_dim", [1, 2])
def test_it_computes_what_the_imported_function_does(dtype: torch.dtype, unbind: int, sequence_dim: int) -> None:
    angles, x = torch.randn(6, 8), torch.randn(2, 6, 3, 16).to(dtype)
    x = x if sequence_dim == 1 else x.transpose(1, 2)
    repeat = (lambda each: each.repeat_interleave(2, -1)) if unbind == -1 else (lambda each: each.repeat(1, 2))
    table = repeat(angles.cos()), repeat(angles.sin())
    named = {"use_real_unbind_dim": unbind, "sequence_dim": sequence_dim}
    kept = x.clone()
    ours = formulas._of_pair(formulas.never)  # which raises where ours does not compute it
    got = ours(x, table, **named)
    assert got.dtype is dtype
    torch.testing.assert_close(got, apply_rotary_emb(x, table, **named))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_a_function_within_a_processor_does(dtype: torch.dtype) -> None:
    """Also where cosines and sines of a pair differ: that function reads one column of each."""
    x = torch.randn(2, 6, 3, 16).to(dtype)
    cos, sin = torch.randn(1, 6, 1, 16), torch.randn(1, 6, 1, 16)
    got = formulas._of_columns(formulas.never)(x, cos, sin)
    torch.testing.assert_close(got, wan_function()(x, cos, sin))


@pytest.mark.skipif(
    not str(ROTATES["kernel_id"]).startswith("vllm.cpu"),
    reason="torch's own rotation makes 60 calls: a chunk of rows at a time",
)
def test_it_makes_fewer_calls_and_less_memory_than_torch_in_bfloat16() -> None:
    """17 calls of torch in place of 38 in float32, 20 in place of 47 in bfloat16 (torch 2.13)."""
    x, angles = torch.randn(1, 64, 4, 32, dtype=torch.bfloat16), torch.randn(64, 16)
    table = tuple(each.repeat_interleave(2, -1) for each in (angles.cos(), angles.sin()))
    columns = [each.view(1, 64, 1, 32) for each in table]
    function = wan_function()
    of_pair, of_columns = formulas._of_pair(formulas.never), formulas._of_columns(formulas.never)
    for original, ours in (
        (lambda: apply_rotary_emb(x, table, sequence_dim=1), lambda: of_pair(x, table, sequence_dim=1)),
        (lambda: function(x, *columns), lambda: of_columns(x, *columns)),
    ):
        counts = []
        for act in (original, ours):
            with torch.no_grad():
                act()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                    act()
            counts.append(sum(each.count for each in seen.key_averages() if each.key.startswith("aten::")))
        assert counts[1] < counts[0], counts


def test_a_table_whose_pairs_differ_goes_to_the_original() -> None:
    x, cos, sin = torch.randn(1, 6, 2, 16), torch.randn(6, 16), torch.randn(6, 16)
    ours = formulas._of_pair(apply_rotary_emb)
    for _ in range(2):
        assert torch.equal(ours(x, (cos, sin), sequence_dim=1), apply_rotary_emb(x, (cos, sin), sequence_dim=1))


def test_a_table_that_is_written_into_is_read_anew() -> None:
    x, cos, sin = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 1, 16), torch.randn(1, 6, 1, 16)
    ours = formulas._of_columns(formulas.never)
    ours(x, cos, sin)
    cos.mul_(0.5)
    torch.testing.assert_close(ours(x, cos, sin), wan_function()(x, cos, sin))


def test_tables_whose_changes_nobody_counts_on_a_gpu_are_told() -> None:
    table: Any = SimpleNamespace(is_inference=lambda: True, is_cuda=True)
    with pytest.warns(lz.LayerZeroWarning, match=r"torch\.inference_mode; run .* torch\.no_grad"):
        assert formulas._table(table, table, True, twice=True) is None


def test_tables_in_inference_mode_may_be_used_again() -> None:
    with torch.inference_mode():
        x, cos, sin = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 1, 16), torch.randn(1, 6, 1, 16)
        ours = formulas._of_columns(formulas.never)
        ours(x, cos, sin)
        cos.mul_(0.5)
        torch.testing.assert_close(ours(x, cos, sin), wan_function()(x, cos, sin))


@pytest.mark.parametrize("case", ["gradients", "autocast", "one head", "float64", "complex"])
def test_what_is_not_ours_goes_to_the_original(case: str) -> None:
    x = torch.randn(1, 6, 1 if case == "one head" else 2, 16, requires_grad=case == "gradients")
    table: Any = (torch.randn(6, 16), torch.randn(6, 16))
    named: dict[str, Any] = {"sequence_dim": 1}
    if case == "float64":
        x = x.double()
    if case == "complex":
        table, named = torch.polar(torch.ones(6, 8), torch.randn(6, 8))[None], {"use_real": False}
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        got, wanted = (each(x, table, **named) for each in (formulas._of_pair(apply_rotary_emb), apply_rotary_emb))
    assert torch.equal(got, wanted)
    assert got.requires_grad == wanted.requires_grad


def _reversed(x: torch.Tensor, freqs_cis: Any, *, sequence_dim: int = 2, use_real_unbind_dim: int = -1) -> Any:
    """A rotation the other way round."""
    cos, sin = freqs_cis
    return apply_rotary_emb(x, (cos, -sin), True, use_real_unbind_dim, sequence_dim)


def _half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Only the first half of a head is rotated."""
    return torch.cat((wan_function()(x, cos, sin)[..., :8], x[..., 8:]), -1)


@pytest.mark.parametrize("function", [_reversed, _half, lambda x, freqs: x * 1.0, lambda *_: None])
def test_a_function_that_rotates_otherwise_is_refused_with_a_reason(function: Any) -> None:
    found = formulas.proved(function, 2, 16, torch.float32, torch.device("cpu"))
    assert isinstance(found, str)
    assert found.startswith("it is no rotation that lz.rope_ knows")


def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulas.lz, "rope_", lambda query, key, *_, **__: query.zero_())
    model, call = flux()
    model.eval()
    wanted = run(model, call)
    report = lz.optimize(model)
    assert all(each.kind != "rotation" for each in report.replaced)
    assert any(
        "rotations of 3 attentions: it is no rotation that lz.rope_ knows (off by" in each.why for each in report.left
    )
    torch.testing.assert_close(run(model, call), wanted, atol=2e-5, rtol=1e-4)


def test_models_without_rotations_are_left_alone() -> None:
    for make in (sd3, unet):
        model, _ = make()
        found = rotary.RotationOf("", model.eval())
        assert (len(found), found.left) == (0, {})
    assert set(MODELS) >= {flux, wan}


def test_saved_models_load_as_stock_and_a_chosen_processor_stays() -> None:
    model, call = flux()
    model.eval()
    wanted = run(model, call)
    report = lz.optimize(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert rotations(loaded, call) == 0
    torch.testing.assert_close(run(loaded, call), wanted, atol=2e-5, rtol=1e-4)
    chosen = type(model.transformer_blocks[0].attn.processor.__class__())()
    model.transformer_blocks[0].attn.processor = chosen
    report.undo()
    assert model.transformer_blocks[0].attn.processor is chosen
    assert rotations(model, call) == 0


@pytest.mark.slow
def test_backends_are_set_on_both_and_compilers_see_the_original() -> None:
    model, call = flux()
    model.eval()
    wanted = run(model, call)
    report = lz.optimize(model)
    try:
        got = run(torch.compile(model, fullgraph=True, backend="eager"), call)
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    model.set_attention_backend("native")
    assert rotations(model, call) == 6
    report.undo()
    model.reset_attention_backend()
    assert torch.equal(run(model, call), wanted)


def test_a_rotation_has_one_class_however_often_models_are_looked_at() -> None:
    first, second = ({type(each._twin) for each in rotary.RotationOf("", flux()[0])._exchanges} for _ in range(2))
    assert first
    assert first == second


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_inputs_time_rotations_as_a_kind_of_their_own() -> None:
    model, _ = flux()
    call = {"hidden_states": randn(1, 16, 4), "encoder_hidden_states": randn(1, 5, 32)}
    _, whole = flux()
    report = lz.optimize(model.eval(), whole | call, rounds=1, isolate=False)
    assert report.timed is not None
    assert "rotation" in report.timed.gains
    report.undo()
