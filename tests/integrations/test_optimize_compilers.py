"""What libraries compile: encoders, in float32, and nothing that the numbers of a call decide."""

from __future__ import annotations

import pytest
import torch
from compiled_models import Library, Model
from torch import nn

import layerzero as lz
from layerzero.integrations.optimize.models import compiled_calls
from layerzero.integrations.optimize.models.compilers import COMPILERS, Compiler, Flat

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* runs its slow reference:layerzero.core.errors.LayerZeroFallbackWarning"),
    pytest.mark.usefixtures("unmeasured", "clock_of_runs"),
]


@pytest.mark.parametrize(
    "compiler",
    [pytest.param(each, marks=[] if each.needs else pytest.mark.slow) for each in COMPILERS],
    ids=lambda each: each.name,
)
def test_a_library_compiles_an_encoder(compiler: Compiler) -> None:
    transformers = pytest.importorskip("transformers", "5.4", reason="needs transformers >= 5.4")
    if compiler.missing:
        pytest.skip(f"needs {compiler.missing}")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=101)).eval()
    ids = torch.randint(3, 101, (2, 5))
    call = compiled_calls.Call((), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, inference=False)
    engine = compiled_calls._engine(call, model, compiler)
    assert not isinstance(engine, str), engine
    with torch.no_grad():
        ids, mask = torch.randint(3, 101, (2, 5)), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        got, wanted = engine([ids, mask]), model(input_ids=ids, attention_mask=mask)
    assert type(got) is type(wanted)
    torch.testing.assert_close(got.last_hidden_state, wanted.last_hidden_state, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.pooler_output, wanted.pooler_output, atol=1e-5, rtol=1e-4)


def test_float32_is_what_libraries_of_their_own_compile() -> None:
    flat = Flat(nn.Linear(4, 4).half(), lambda given: (given, {}), lambda result: [result])
    for each in COMPILERS[:2]:
        assert each.compile(flat, [torch.ones(1, 4)]) == "it compiles float32, and weights are float16"


class Branching(nn.Module):
    """What its numbers decide: a branch, and a number that is no tensor."""

    def __init__(self, *, branch=False, count=False):
        super().__init__()
        self.linear, self.branch, self.count = nn.Linear(8, 8), branch, count

    def forward(self, x):
        found = self.linear(x.float())
        if self.branch and x.abs().max() > 5:
            found = found.clamp(max=0.01)
        return {"found": found, "count": int((x > 0).sum()) if self.count else 0}


class Recorded:
    """A compiler that holds what one run decided, as a trace does."""

    name, text, least_s, each_s, missing = "onnxruntime", "recorded 1.0", 0.0, 0.0, ""

    def compile(self, flat, tensors):
        clamped = flat(*tensors)[0].max() <= 0.0100001
        linear = flat.module.linear

        def run(given):
            found = linear(given[0].float())
            return [found.clamp(max=0.01) if clamped else found]

        return run


@pytest.mark.parametrize(("change", "why"), [
    ({}, ""),
    ({"branch": True}, "its code reads numbers"),
    ({"count": True}, "it gives numbers that are no tensors and follow from the input's"),
])  # fmt: skip
def test_what_the_numbers_of_a_call_decide_is_not_compiled(change, why):
    module, x = Branching(**change).eval(), torch.randn(4, 8)
    x = x > 0 if change.get("count") else x  # what a mask decides is tried, what other numbers decide is left
    found = compiled_calls._engine(compiled_calls.Call((x,), {}, False), module, Recorded())
    assert (why in found) if why else found.error == 0.0


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, ids, mask):
        return self.linear(self.table(ids)) * mask[..., None]


class Plain(Recorded):
    def compile(self, flat, tensors):
        return lambda given: flat(*given)


def test_numbers_beyond_a_table_and_rows_that_hide_all_are_left_to_the_model():
    ids, mask = torch.randint(3, 9, (2, 4)), torch.ones(2, 4, dtype=torch.long)
    engine = compiled_calls._engine(compiled_calls.Call((ids, mask), {}, False), Table().eval(), Plain())
    assert engine.serves([ids + 11, mask])
    assert not engine.serves([ids + 14, mask])
    assert not engine.serves([ids - 9, mask])
    part, empty = mask.clone(), mask.clone()
    part[0, 2:], empty[0] = 0, 0
    assert engine.serves([ids, part])
    assert not engine.serves([ids, empty])
    assert not engine.serves([ids, mask * 2])


def test_a_model_with_a_sparse_buffer_is_left(monkeypatch):
    library = Library(0.1)
    monkeypatch.setattr(compiled_calls, "COMPILERS", (library.compiler,))
    model = Model().eval()
    model.register_buffer("heads", torch.ones(2, 3).to_sparse(), persistent=False)
    report = lz.optimize(model, torch.randn(2, 3, 8), isolate=False)
    assert "compiled: heads is sparse" in str(report)
    assert library.compiled == 0


def test_settings_reach_what_was_compiled_before():
    ids, mask = torch.randint(3, 9, (2, 4)), torch.ones(2, 4, dtype=torch.long)
    engine = compiled_calls._engine(compiled_calls.Call((ids, mask), {}, False), Table().eval(), Plain())
    with lz.disabled():
        assert not engine.serves([ids, mask])
    with lz.scope(deny=["onnxruntime"]):
        assert not engine.serves([ids, mask])
    assert engine.serves([ids, mask])


def test_an_operator_that_a_compiler_does_not_know_leaves_no_graph_on_the_screen(capfd):
    (compiler,) = (each for each in COMPILERS if each.name == "onnxruntime")
    if compiler.missing:
        pytest.skip(f"needs {compiler.missing}")

    class Unknown(nn.Linear):
        def forward(self, x):
            return torch.special.i0(super().forward(x))

    with pytest.raises(Exception, match="aten::i0"):
        compiled_calls._engine(compiled_calls.Call((torch.ones(4, 8),), {}, False), Unknown(8, 8).eval(), compiler)
    assert capfd.readouterr().out == ""
