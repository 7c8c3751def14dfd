"""Which kernel each layer of a model runs: seen on first calls and on hits, by module, and nothing is left behind."""

from __future__ import annotations

import json
import threading
import warnings
from contextvars import Context

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.pick import PLACE
from layerzero.inspection.trace import calls_told, ranges


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return lz.rms_norm(x, self.weight)


class Attention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (4, 8))
        return lz.attention(q, q, q, causal=True, layout="BSHD").flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attend, self.out = Norm(), Attention(), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.out(self.attend(self.norm(x)))


class Model(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x, *, twice=False):
        for layer in self.layers:
            x = layer(x)
        return lz.rms_norm(lz.rms_norm(x, x[0, 0]), x[0, 0]) if twice else x

    def generate(self, x, steps):
        for _ in range(steps):
            x = self(x)
        return lz.layer_norm(x, (32,))


X = torch.randn(2, 5, 32)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("grad", [True, False])
def test_each_layer_has_its_rows_also_where_calls_are_hits(grad):
    model = Model()
    with torch.set_grad_enabled(grad):
        for _ in range(3):  # hits from the second on
            model(X)
        found = lz.trace(model, X)
        kernel = lz.which("rms_norm", X, model.layers[0].norm.weight)["kernel_id"]
    names = [(row.layer, row.module, row.function, row.operation, row.calls) for row in found.rows]
    assert names == [
        line
        for number in range(3)
        for line in (
            (f"layers.{number}.norm", "Norm", "rms_norm", "norm.rms", 1),
            (f"layers.{number}.attend", "Attention", "attention", "attention.standard.prefill", 1),
        )
    ]
    assert found.rows[0].kernel == kernel
    assert found.rows[0].shapes["input"] == (2, 5, 32)
    assert found.rows[0].why
    assert found.others == {"Linear": 3}
    assert found.elsewhere == 0
    model(X)  # nothing is left behind
    assert not ENGINE.watchers
    assert PLACE.get() == ""
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_it_reads_as_a_table_by_layer_and_as_plain_values():
    found = lz.trace(Model(), X, twice=True)
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "calls", "operation", "kernel", "why"]
    assert [line.split()[:4] for line in lines[2:5]] == [
        ["layers.0-2.norm", "Norm", "1", "norm.rms"],
        ["layers.0-2.attend", "Attention", "1", "attention.standard.prefill"],
        ["(model)", "Model", "2", "norm.rms"],
    ]
    assert lines[5] == "modules that made no call of LayerZero: 3 Linear"
    values = json.loads(json.dumps(found.as_dict()))
    assert [row["layer"] for row in values["layers"]][-2:] == ["layers.2.attend", ""]
    assert str(lz.trace(nn.Linear(2, 2), torch.ones(1, 2))).startswith("no call of LayerZero was made")
    assert ranges([5, 0, 1, 2, 9, 10]) == "0-2,5,9-10"


def test_a_layer_that_runs_something_else_has_a_line_of_its_own():
    model = Model()

    class Locked(Norm):
        def forward(self, x):
            with lz.scope(locks={"norm.rms": "reference.norm.rms"}):
                return super().forward(x)

    model.layers[1].norm = Locked()
    text = str(lz.trace(model, X))
    assert "layers.0,2.norm Norm" in text
    assert "lock norm.rms = reference.norm.rms" in next(line for line in text.splitlines() if "Locked" in line)


def test_a_method_of_a_model_is_followed_and_calls_are_counted():
    found = lz.trace(Model(1).generate, X, steps=4)
    assert [(row.layer, row.operation, row.calls) for row in found.rows] == [
        ("layers.0.norm", "norm.rms", 4),
        ("layers.0.attend", "attention.standard.prefill", 4),
        ("", "norm.layer", 1),
    ]
    with pytest.raises(TypeError, match=r"wanted a torch.nn.Module or a method of one, got function"):
        lz.trace(lambda: None)


def test_a_kernel_that_fails_is_not_what_ran(recwarn):
    def fails(input, weight, eps):
        raise ValueError("no")

    lz.register_kernel("norm.rms", "mine.fails", priority=100)(fails)
    with lz.prefer("mine.fails"):
        found = lz.trace(Norm(), X)
    (row,) = found.rows
    assert row.kernel != "mine.fails"


def test_an_error_of_the_model_leaves_nothing_behind():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Norm()

        def forward(self, x):
            self.inner(x)
            raise LookupError("mine")

    model = Broken()
    with pytest.raises(LookupError, match="mine"):
        lz.trace(model, X)
    assert not ENGINE.watchers
    assert PLACE.get() == ""
    assert not model._forward_hooks
    assert not model.inner._forward_hooks


def test_a_module_that_swallows_an_error_of_another_goes_on_as_itself():
    class Raises(nn.Module):
        def forward(self, x):
            raise LookupError

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Raises())

        def forward(self, x):
            try:
                self.inner(x)
            except LookupError:
                return lz.rms_norm(x, x[0, 0])

    (row,) = lz.trace(nn.Sequential(Tries()), X).rows
    assert (row.layer, row.module) == ("0", "Tries")


def test_calls_of_other_threads_are_counted_but_belong_to_no_layer():
    class Threads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()

        def forward(self, x):
            thread = threading.Thread(target=self.norm, args=(x,))
            Context().run(thread.start)  # without a GIL it inherits the layer
            thread.join()
            return self.norm(x)

    found = lz.trace(Threads(), X)
    assert [(row.layer, row.calls) for row in found.rows] == [("norm", 1)]
    assert found.elsewhere == 1
    assert "1 calls were made by other threads" in str(found)


def test_a_compiled_model_is_followed_layer_by_layer():
    model = Model(1)
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    assert [row.layer for row in lz.trace(compiled, X).rows] == ["layers.0.norm", "layers.0.attend"]


def test_choices_are_told_with_their_layer(capsys):
    with lz.scope(log_selections=True):
        lz.trace(Model(1), X)
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" in ")[2] for line in told] == ["layers.0.norm", "layers.0.attend"]


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_model_without_memory_is_followed_and_its_calls_can_be_recorded(kind):
    """What does not fit here can be planned for: each row says what would run, and on what it was judged."""
    from contextlib import nullcontext

    from torch._subclasses.fake_tensor import FakeTensorMode

    real = lz.trace(Model(1), X)
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        model, x = Model(1), torch.randn(2, 5, 32)
    mode = x.fake_mode if kind == "fake" else nullcontext()
    with mode, lz.record() as recording:
        found = lz.trace(model, x)
    assert [row.operation for row in found.rows] == [row.operation for row in real.rows]
    assert all("shapes only: judged as on " in row.why for row in found.rows)
    assert recording.calls == 2
    recorded = {each.call.operation: each.call for each in recording.manifest().calls}
    assert recorded["norm.rms"].tensors["input"].shape == (2, 5, 32)
    assert recorded["norm.rms"].device in ("cpu", "cuda:0")
    if kind == "fake" or not torch.cuda.is_available():
        assert [row.kernel for row in found.rows] == [row.kernel for row in real.rows]


def test_what_torch_compiles_is_recorded_once():
    """A trace of shapes is no call: the compiled code makes it, once."""
    model = torch.compile(Attention(), backend="aot_eager")
    with torch.no_grad(), lz.record() as recording:
        model(X)
        model(X)
    assert recording.calls == 2


def test_shapes_that_nobody_watches_cost_no_choice(monkeypatch):
    from layerzero.engine.dispatch import Dispatcher

    def choose(*_, **__):
        raise AssertionError("nothing was to be chosen")

    monkeypatch.setattr(Dispatcher, "explain", choose)
    assert lz.rms_norm(X.to("meta"), torch.ones(32, device="meta")).shape == X.shape


def test_a_module_that_takes_no_hook_leaves_compiled_code_as_it_was(monkeypatch):
    model = Model()
    monkeypatch.setattr(model, "register_forward_hook", None)
    with pytest.raises(TypeError, match="not callable"):
        lz.trace(model, X)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_try_warns_of_no_slow_reference_and_the_call_that_comes_to_stay_does():
    call, more = [torch.randn(1, 3, 2, width) for width in (8, 8, 4)], {"sinks": torch.zeros(2), "layout": "BSHD"}
    if not lz.which("attention", *call, **more)["kernel_id"].startswith("reference."):
        pytest.skip("wanted a call that the reference alone computes")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with calls_told(lambda *_: None, tried=True):
            lz.attention(*call, **more)
    with pytest.warns(lz.LayerZeroFallbackWarning, match="runs its slow reference"):
        lz.attention(*call, **more)
