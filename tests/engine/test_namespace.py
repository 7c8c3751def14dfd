"""``torch.ops.layerzero``: an operator is there when it is first asked for, however that is done."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from layerzero.engine import operators
from layerzero.ops import FUNCTIONS

EXPORTED = """
class Norm(torch.nn.Module):
    def forward(self, x, w):
        return torch.ops.layerzero.rms_norm(x, w)
"""
CALL = "x, w = torch.randn(2, 8), torch.ones(8); assert {}.shape == (2, 8)"


def run(*lines):
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.slow
def test_it_is_there_if_torch_is_imported_last():
    run("import layerzero, torch", CALL.format("torch.ops.layerzero.rms_norm(x, w)"))


def test_a_namespace_that_is_held_before_knows_what_is_asked_for_alone():
    run(
        "import torch; ops = torch.ops.layerzero",
        "import layerzero",
        "torch.ops.layerzero.attention_lse  # an operator of a function of another name",
        "from layerzero.engine import operators",
        "assert set(operators._LIBRARIES) == {'attention'}, operators._LIBRARIES",
        "assert not hasattr(torch.ops.layerzero, 'nothing')",
        "assert set(operators._LIBRARIES) == {'attention'}, operators._LIBRARIES",
        CALL.format("ops.rms_norm.default(x, w)"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("called", ["torch.ops.layerzero.rms_norm", "layerzero.rms_norm"])
def test_compiled_code_is_the_first_that_asks(called):
    compiled = f"torch.compile(lambda x, w: {called}(x, w), fullgraph=True, backend='aot_eager')(x, w)"
    run("import torch, layerzero", CALL.format(compiled))


@pytest.mark.slow
def test_a_program_that_was_saved_finds_it_in_a_new_process(tmp_path):
    saved = "torch.export.save(torch.export.export(Norm(), (torch.randn(2, 8), torch.ones(8))), {!r})"
    traced = "torch.jit.save(torch.jit.trace(Norm(), (torch.randn(2, 8), torch.ones(8))), {!r})"
    pickled = "pickle.dump(torch.fx.symbolic_trace(Norm()), open({!r}, 'wb'))"
    files = [str(tmp_path / name) for name in ("export.pt2", "script.pt", "graph.pickle")]
    lines = [each.format(file) for each, file in zip((saved, traced, pickled), files, strict=True)]
    run("import pickle, torch, layerzero", EXPORTED, *lines)
    run("import torch, layerzero", CALL.format(f"torch.export.load({files[0]!r}).module()(x, w)"))
    run("import pickle, torch, layerzero", CALL.format(f"pickle.load(open({files[2]!r}, 'rb'))(x, w)"))
    all_defined = "dir(torch.ops.layerzero)  # TorchScript asks C++ alone"
    run("import torch, layerzero", all_defined, CALL.format(f"torch.jit.load({files[1]!r})(x, w)"))


def test_every_operator_of_every_function_is_listed_and_defined():
    listed = set(dir(torch.ops.layerzero))
    for function in FUNCTIONS.values():
        assert listed.issuperset(function.torch_schemas)
    assert not operators._UNDEFINED
    assert torch.ops.layerzero.rms_norm.default._schema.name == "layerzero::rms_norm"


def test_one_that_is_interrupted_leaves_nothing_and_is_defined_by_the_next(monkeypatch):
    defined, function = operators._LIBRARIES, FUNCTIONS["rms_norm"]
    torch.ops.layerzero.rms_norm  # noqa: B018  # asked for
    defined.pop("rms_norm")._destroy()
    operators._UNDEFINED["rms_norm"] = function
    first = operators._fake

    def interrupted(*told):
        monkeypatch.setattr(operators, "_fake", first)
        raise KeyboardInterrupt

    monkeypatch.setattr(operators, "_fake", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch.ops.layerzero.rms_norm  # noqa: B018  # asked for
    assert torch.ops.layerzero.rms_norm(torch.randn(2, 8), torch.ones(8)).shape == (2, 8)


def test_threads_that_ask_at_once_get_the_same():
    torch.ops.layerzero.rms_norm  # noqa: B018  # asked for
    operators._LIBRARIES.pop("rms_norm")._destroy()
    operators._UNDEFINED["rms_norm"] = FUNCTIONS["rms_norm"]
    found, start = [], threading.Barrier(4)

    def ask():
        start.wait()
        found.append(torch.ops.layerzero.rms_norm)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({each._qualified_op_name for each in found}) == 1
