"""Whole models by compilers under ``lz.optimize(model, inputs)``: where they win, and only while nothing changed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compiled_models import CLOCK, Library, Model, second
from torch import Tensor, nn

import layerzero as lz
from counting import events
from layerzero.engine import accelerator
from layerzero.integrations.optimize.models import compiled_calls
from layerzero.integrations.optimize.models.compiled import Bound, Compiled
from layerzero.integrations.optimize.swaps.stamp import Stamp
from layerzero.integrations.optimize.times import timing
from layerzero.ops.linear import glance

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
    pytest.mark.usefixtures("unmeasured", "clock_of_runs"),
]


def optimized(
    monkeypatch: pytest.MonkeyPatch, library: Library, call: dict[str, Any] | None = None, **more: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model().eval()
    monkeypatch.setattr(compiled_calls, "COMPILERS", (library.compiler,))
    report = lz.optimize(model, {"x": torch.randn(2, 3, 8)} if call is None else call, isolate=False, **more)
    return model, report


def kinds(report: Any) -> set[str]:
    return {each.kind for each in report.replaced}


def told(report: Any) -> str:
    return "; ".join(each.why for each in report.left)


def test_what_is_faster_runs_for_its_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(0.1)
    model, report = optimized(monkeypatch, library)
    assert kinds(report) == {"compiled"}
    assert "compiled: +900.0% for the whole model, kept" in str(report)
    assert report.timed.speedup == pytest.approx(10.0)
    stock, before = Model().eval(), library.calls
    stock.load_state_dict(model.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        got, wanted = model(x=x), stock(x=x)
        assert library.calls == before + 1
        for other in ({"x": torch.randn(2, 4, 8)}, {"x": x, "twice": True}, {"x": x.double().float()[:, :2]}):
            torch.testing.assert_close(model(**other)["rows"], stock(**other)["rows"])
    assert list(got) == list(wanted)
    assert got["none"] is None
    assert torch.equal(got["rows"], wanted["rows"])
    assert torch.equal(got["sum"], wanted["sum"])
    assert library.calls == before + 1
    report.undo()
    with torch.no_grad():
        model(x=x)
    assert library.calls == before + 1
    assert "forward" not in vars(model)


def test_how_far_compiled_calls_are_is_told_of_the_models_output(monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = optimized(monkeypatch, Library(0.1, lambda _, found: [each * (1 + 1e-5) for each in found]))
    assert kinds(report) == {"compiled"}
    assert "the model's output differs by 1e-05 of its largest value" in str(report)


def test_shapes_of_one_run_are_decided_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(0.1)
    torch.manual_seed(0)
    model = Model().eval()
    monkeypatch.setattr(compiled_calls, "COMPILERS", (library.compiler,))
    few, many = torch.randn(1, 8), torch.randn(64, 8)

    def slower(seconds: float, tensors: Sequence[Tensor], found: Any) -> Any:
        CLOCK.now += seconds * (tensors[0].shape[0] == 64)
        return found

    library.spoil = lambda tensors, found: slower(5.0, tensors, found)
    report = lz.optimize(model, lambda: [model(x=few), model(x=few), model(x=many)], isolate=False, budget_s=1e4)
    assert library.compiled == 2
    state = vars(model)["_layerzero"]
    assert isinstance(state, Compiled)
    assert len(state.engines) == 1
    assert "of the time on this call's shapes" in told(report)
    assert "times as fast" in str(report)


def test_a_shape_that_no_library_takes_stays_and_the_others_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(0.1)
    torch.manual_seed(0)
    model = Model().eval()

    def small(module: nn.Module, example: Sequence[Tensor]) -> Any:
        return library(module, example) if example[0].shape[0] == 1 else "too many rows"

    monkeypatch.setattr(compiled_calls, "COMPILERS", (dataclasses.replace(library.compiler, compile=small),))
    few, many = torch.randn(1, 8), torch.randn(64, 8)
    with torch.no_grad():
        wanted = model(x=many)
        report = lz.optimize(model, lambda: [model(x=few), model(x=few), model(x=many)], isolate=False, budget_s=1e4)
        assert len(vars(model)["_layerzero"].engines) == 1
        assert "too many rows" in told(report)
        assert torch.equal(model(x=many)["rows"], wanted["rows"])


class Block(nn.Module):
    """A model that is a block by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.register_buffer("unused", torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        second()
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("seconds", [0.1, 0.499])
def test_other_shapes_run_what_the_module_ran_before(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    library, blocks, mlp = Library(seconds), [], lz.mlp

    def counted(*given: Any, **named: Any) -> Any:
        CLOCK.now += 0.5
        blocks.append(given[0].shape)
        return mlp(*given, **named)

    monkeypatch.setattr(lz, "mlp", counted)
    monkeypatch.setattr(compiled_calls, "COMPILERS", (library.compiler,))
    model, x, other = Block().eval(), torch.randn(2, 8), torch.randn(3, 8)
    with torch.no_grad():
        wanted = model(x), model(other)
        report = lz.optimize(model, x, isolate=False)
        assert kinds(report) == ({"block", "compiled"} if seconds == 0.1 else {"block"})
        compiled = [each.swap.state for each in report.replaced if each.kind == "compiled"]
        assert [each.bytes for each in compiled] == [4 * (2 * 8 * 16 + 24 + 1000)] * len(compiled)
        assert ("MB of copies of weights in compiled calls" in str(report)) == bool(compiled)
        library.calls, blocks[:] = 0, []
        torch.testing.assert_close(model(x), wanted[0])
        assert (library.calls, len(blocks)) == ((1, 0) if seconds == 0.1 else (0, 1))
        library.calls, blocks[:] = 0, []
        torch.testing.assert_close(model(other), wanted[1])
        torch.testing.assert_close(copy.deepcopy(model)(x), wanted[0])
        assert blocks == [other.shape, x.shape]
        assert library.calls == 0
        report.undo()
        torch.testing.assert_close(model(x), wanted[0])
    assert len(blocks) == 2
    assert not {"forward", "_layerzero", "__deepcopy__"} & vars(model).keys()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda _, found: [each * 1.001 for each in found], "it was off by 0.001"),
        (lambda given, found: found if given[0].mean() > 0 else [each + 1 for each in found], "it was off by"),
        (lambda _, found: found[:1], "it gave 1 tensors, the model 2"),
        (lambda _, found: [each.double() for each in found], "it was off by"),
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_gives_other_values_is_left_with_the_reason(monkeypatch: pytest.MonkeyPatch, spoil: Any, why: str) -> None:
    x = torch.full((2, 8), -0.05)  # 0.7 x + 0.1 has another sign
    for call in ({"x": x}, {"x": -x - 1.0}):
        model, report = optimized(monkeypatch, Library(0.1, spoil), call)
        if "compiled" not in kinds(report):
            break
    assert "compiled" not in kinds(report)
    assert f"compiled by torch.inductor: {why}" in told(report)
    assert "forward" not in vars(model)


class Writing(Model):
    """Does more than it returns."""

    does: Callable[[Any, Tensor], Any]

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        second()
        self.does(x)
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (lambda _, x: x.clamp_(-9, 9), "it writes into its input"),
        (lambda model, x: model.shift.add_(x.mean()), "it writes into its input, its buffers"),
        (lambda model, x: setattr(model, "last", x), "its buffers or its attributes"),
        (lambda _, x: float(x.max()) > 1e9, "its code reads numbers"),
    ],
    ids=["input", "buffer", "attribute", "branch"],
)
def test_a_model_that_does_more_than_it_returns_is_left(monkeypatch: pytest.MonkeyPatch, does: Any, why: str) -> None:
    monkeypatch.setattr(Writing, "does", does, raising=False)
    monkeypatch.setattr(compiled_calls, "COMPILERS", (Library(0.1).compiler,))
    model = Writing().eval()
    report = lz.optimize(model, torch.randn(2, 3, 8), isolate=False)
    assert why in told(report)
    assert not model.shift.requires_grad


class Drawing(Library):
    def __call__(self, module: nn.Module, example: Sequence[Tensor]) -> Any:
        torch.rand(3)
        return super().__call__(module, example)


def test_a_compiler_that_draws_leaves_the_callers_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    after = []
    for library in (Library(0.1), Drawing(0.1)):
        optimized(monkeypatch, library)
        after.append(torch.rand(1))
    assert after[0] == after[1]


class Unlicensed(Library):
    def __call__(self, module: nn.Module, example: Sequence[Tensor]) -> Any:
        raise SystemExit("no licence")


def test_a_compiler_that_ends_the_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SystemExit: no licence" in told(optimized(monkeypatch, Unlicensed(0.1))[1])


def test_what_is_slower_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, report = optimized(monkeypatch, Library(1.5))
    assert kinds(report) == set()
    assert "it takes 1.50 of the time on this call's shapes" in told(report)
    assert "forward" not in vars(model)


def test_limits_and_settings_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(0.1)
    _, report = optimized(monkeypatch, library, memory_limit=100)
    assert "for which memory_limit leaves no room" in told(report)
    _, report = optimized(monkeypatch, library, budget_s=19.0)
    assert "no time was left for it (budget_s)" in told(report)
    assert "compiling by torch.inductor, which may take half of the time: about 20 s" in str(report)
    lz.configure(avoid=["torch.inductor"])
    _, report = optimized(monkeypatch, library)
    lz.configure(avoid=[])
    assert library.compiled == 0
    assert "torch.inductor" not in told(report)
    model = Model().eval()
    assert library.compiled == 0
    assert "compiled" not in kinds(lz.optimize(model))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model.inner.weight.mul_(0.5),
    "by data": lambda model: model.inner.weight.data.mul_(0.5),
    "buffer by data": lambda model: model.shift.data.mul_(0.5),
    "loaded": lambda model: model.load_state_dict(Model().state_dict()),
    "exchanged": lambda model: setattr(model.inner, "weight", nn.Parameter(torch.randn(8, 8))),
    "to": lambda model: model.to(torch.float64).to(torch.float32),
    "attribute": lambda model: setattr(model, "scale", 0.5),
    "train": lambda model: model.train(),
    "hook": lambda model: model.inner.register_forward_hook(lambda *_: None),
    "threads": lambda _: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_the_call_to_the_models_own_code(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    library, threads = Library(0.1), torch.get_num_threads()
    model, report = optimized(monkeypatch, library)
    x, before = torch.randn(2, 3, 8), library.calls
    stock = Model().eval()
    stock.load_state_dict(model.state_dict())
    try:
        with torch.no_grad():
            torch.manual_seed(1)
            CHANGES[change](model)
            torch.manual_seed(1)
            CHANGES[change](stock)
            torch.testing.assert_close(model(x=x)["rows"], stock(x=x)["rows"])
    finally:
        torch.set_num_threads(threads)
    assert library.calls == before
    report.undo()


def watched(module: nn.Module) -> Compiled:
    state = Compiled(module)
    state.stamp = Stamp(module)
    return state


@pytest.mark.skipif(accelerator.HOT is None, reason=accelerator.ABSENT)
def test_a_call_asks_little_of_each_weight() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)]).eval()
    state, rows = watched(model), [torch.ones(1, 16)]
    with torch.no_grad():
        assert state.serves(rows)
        assert len(events(lambda: state.serves(rows))) < 4 * 80


@pytest.mark.parametrize("native", [True, False])
def test_one_number_written_past_torchs_count_is_seen_in_time_and_stays_seen(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    if not native:
        monkeypatch.setattr(glance, "IN_C", {})
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).eval()
    state, rows = watched(model), [torch.ones(1, 100)]
    with torch.no_grad():
        for _ in range(glance.LOOKS + 5):
            assert state.serves(rows)
        model[1].weight.data[61, 7] += 1.0
        served = [state.serves(rows) for _ in range(glance.LOOKS + 5)]
    assert served.index(False) <= glance.LOOKS
    assert not any(served[glance.LOOKS :])


@pytest.mark.parametrize("rows", [[[1, 2], [0, 3]], [[1] * 300, [0] * 299 + [3]]], ids=["few", "many"])
def test_numbers_beyond_what_was_compared_are_not_served(rows: list[list[int]]) -> None:
    ids = torch.tensor(rows)
    assert Bound(0, 3, full_rows=True).holds(ids)
    assert not Bound(0, 2).holds(ids)
    assert not Bound(1, 3).holds(ids)
    ids[1] = 0
    assert Bound(0, 3).holds(ids)
    assert not Bound(0, 3, full_rows=True).holds(ids)
    assert Bound(0, 1, full_rows=True).holds(ids[:1].bool())
    assert not Bound(0, 1, full_rows=True).holds(ids.bool())


@pytest.mark.parametrize("what", ["gradients", "weights", "autocast", "copy", "positional"])
def test_other_calls_are_the_models_own(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    library = Library(0.1)
    model, _ = optimized(monkeypatch, library)
    x, before = torch.randn(2, 3, 8), library.calls
    if what == "weights":
        assert model(x=x)["rows"].requires_grad
    elif what == "gradients":
        for each in model.parameters():
            each.requires_grad_(False)
        x.requires_grad_()
        assert model(x=x)["rows"].requires_grad
    elif what == "autocast":
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(x=x)
    elif what == "copy":
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.inner.weight.zero_()
            assert not twin(x=x)["rows"].equal(model(x=x)["rows"])
            before += 1
    else:
        with torch.no_grad():
            model(x)
    assert library.calls == before


def test_a_library_that_raises_later_is_told_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(0.1)
    model, _ = optimized(monkeypatch, library)
    x = torch.randn(2, 3, 8)
    library.spoil = lambda *_: 1 / 0
    with torch.no_grad():
        with pytest.warns(lz.LayerZeroWarning, match=r"raised ZeroDivisionError: division by zero; the model's own"):
            found = model(x=x)
        assert torch.equal(model(x=x)["rows"], found["rows"])


def test_calls_with_caches_are_told() -> None:
    transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=101)).eval()
    library, ids = Library(0.1), torch.randint(3, 101, (1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_calls, "COMPILERS", (library.compiler,))
        patch.setattr(timing, "WALL", time.perf_counter)
        report = lz.optimize(model, lambda: model.generate(ids, max_new_tokens=3, do_sample=False), isolate=False)
    assert library.compiled == 0
    assert "it is called with DynamicCache, and only tensors and plain values are compiled" in told(report)
