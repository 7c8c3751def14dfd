"""What an operation need not say: facts, shapes, stock, work, checks and random calls that follow from the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.core.arguments import Axis, Param, Role
from layerzero.core.facts import FactsBuilder
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.known_devices import KNOWN_DEVICES
from layerzero.core.operation import Tolerance, Work
from layerzero.engine import failures
from layerzero.engine.reference import fake_call, reference_call
from layerzero.ops import OPERATIONS
from layerzero.ops.calls import accepted, arguments_of, facts_of, function_for, routed
from layerzero.ops.declaration import NDIM, cases, function, moved, operation, same_shape, tensor
from layerzero.testing.generate import random_call

_ROWS = Axis("rows", scales=True, live=True, apart=True, leading=True)
_FEATURES = Axis("features", scales=True)
_TOLERANCE = {torch.float32: Tolerance(1e-6, 1e-6)}


def lengthen(input: Tensor, bias: Tensor | None = None, times: int = 2) -> tuple[Tensor, Tensor]:
    """Repeat each row's numbers, and say which of them were negative.

    Shapes: input (*, D), bias (D,) → (*, times D), (*, D)
    """
    whole = input if bias is None else input + bias
    return whole.repeat((1,) * (input.ndim - 1) + (times,)), input < 0


def _declared(**more):
    return operation(
        "example.lengthen",
        "Rows repeated",
        lengthen,
        inputs=("input: ... features", tensor("bias: features", required=False)),
        outputs=("whole: ... longer", tensor("negative: ... features", frozenset({torch.bool}))),
        params=(Param("times", int, 2, example=3),),
        axes=(_ROWS, _FEATURES, NDIM),
        cases=cases("rows features | times", {"small": (6, 8, 3), "wide": (2, 64, 2)}),
        derive=lambda arguments, sizes: {"longer": sizes["features"] * arguments["times"]},
        derived_from={"longer": ("features",)},
        tolerance=_TOLERANCE,
        tolerance_reason="one sum",
        **more,
    )


def test_a_table_of_cases_names_sizes_and_parameters():
    small, wide = cases("rows features | times", {"small": (6, 8, 3), "wide": (2, 64, 2)}, {"flag": True}, ("bias",))
    assert small == lz.Case("small", {"rows": 6, "features": 8}, {"flag": True, "times": 3}, ("bias",))
    assert wide.params["times"] == 2


def test_leading_axes_become_a_fact_and_their_number_another():
    declared = _declared()
    assert declared.derived == ("rows", "input_ndim", "longer")
    assert declared.derived_from == {"rows": ("...",), "input_ndim": (), "longer": ("features",)}
    found = declared.derive({"input": torch.empty(2, 3, 8), "times": 5}, {"features": 8})
    assert found == {"rows": 6, "input_ndim": 3, "longer": 40}


def test_the_reference_gives_the_shapes_of_compiled_code():
    """On the device of the call, dense, with nothing computed and nothing written."""
    declared = _declared()
    values = {"input": torch.randn(3, 4, 8).transpose(0, 1), "bias": None, "times": 3}
    whole, negative = fake_call(lz.Routed(declared, values))
    assert (whole.shape, whole.dtype, whole.device.type) == ((4, 3, 24), torch.float32, "cpu")
    assert (negative.shape, negative.dtype) == ((4, 3, 8), torch.bool)
    assert whole.is_contiguous()


def test_shapes_are_asked_for_without_writing():
    def fill(output: Tensor) -> None:
        output.fill_(1.0)

    declared = operation(
        "example.fill",
        "Ones",
        fill,
        inputs=(tensor("output: ... features", mutated=True),),
        axes=(_ROWS, _FEATURES),
        cases=cases("rows features", {"small": (3, 4)}),
        tolerance=_TOLERANCE,
        tolerance_reason="none",
    )
    output = torch.zeros(3, 4, requires_grad=True)
    assert fake_call(lz.Routed(declared, {"output": output})) is None
    assert not bool(output.any())


def test_every_tensor_counts_once_as_work():
    declared = _declared()
    lz.register_operation(declared)
    try:
        lz.register_function(function("lengthen", declared))
        facts = facts_of(declared, declared.cases[0], torch.float32, KNOWN_DEVICES["CPU"])
        assert declared.work(facts) == Work(0.0, 4.0 * 6 * 8 + 4.0 * 6 * 24 + 6 * 8)
        assert moved("rows features", 2, 3)(facts) == Work(3.0 * 48, 2 * 48 * 4.0)
    finally:
        lz.unregister_operation(declared.name)


def test_the_reference_is_the_stock_unless_torch_has_another_way():
    x = torch.randn(2, 8)
    assert torch.equal(_declared().stock(x, times=3)()[0], lengthen(x, times=3)[0])
    assert _declared(expression=lambda input, bias=None, times=2: "torch's").stock(x)() == "torch's"
    assert _declared(stock=None).stock is None
    both = _declared(expression=lengthen, stock=lambda *_, **__: None)
    assert (both.expression, both.stock(x)) == (lengthen, None), "what is timed declines, what is a kernel stays"


@pytest.mark.filterwarnings("ignore::layerzero.core.errors.LayerZeroFallbackWarning")  # it has no kernel yet
def test_a_function_is_called_checked_compiled_and_drawn():
    """Nothing but the declaration gives lz.NAME, its docstring, its operator, its errors and random calls."""
    declared = _declared()
    lz.register_operation(declared)
    try:
        call = lz.register_function(function("lengthen", declared))
        x = torch.randn(2, 3, 8)
        assert torch.equal(call(x, times=3)[0], lengthen(x, times=3)[0])
        assert "Repeat each row's numbers" in call.__doc__
        torch.library.opcheck(torch.ops.layerzero.lengthen.default, (x, None, 3))
        with pytest.raises(lz.InvalidCallError, match="input: wanted a tensor, got int"):
            call(3)
        drawn = random_call(0, 1, function="lengthen")
        assert drawn.arguments["input"].shape[-1] > 0
    finally:
        lz.unregister_operation(declared.name)


def _either(arguments):
    return _SCALED if arguments["scale"] is not None else _PLAIN


def add_(total: Tensor, input: Tensor, scale: float | None = None) -> None:
    """Add in place. Shapes: total and input (*, D), the same."""
    total.add_(input, alpha=1 if scale is None else scale)


_PLAIN, _SCALED = (
    operation(
        f"example.add{ending}",
        "Added in place",
        add_,
        inputs=(tensor("total: ... features", mutated=True), "input: ... features"),
        params=params,
        axes=(_ROWS, _FEATURES),
        cases=cases("rows features", {"small": (3, 4)}, {each.name: each.example for each in params}),
        tolerance=_TOLERANCE,
        tolerance_reason="one sum",
    )
    for ending, params in (("", ()), (".scaled", (Param("scale", float, None, Role.PASSED, example=0.5),)))
)
_ADD = function(
    "add_",
    _PLAIN,
    _SCALED,
    choose=_either,
    values=lambda arguments: ["scale: wanted another"] if arguments.get("scale") == 7 else [],
    fits=same_shape("input", "total"),
)


def _problems(**arguments):
    with pytest.raises(lz.InvalidCallError) as raised:
        _ADD.route({"scale": None, **arguments}, None)
    return str(raised.value)


def test_a_route_chooses_among_operations_and_drops_nothing_that_was_given():
    total, input = torch.zeros(2, 3), torch.ones(2, 3)
    plain = _ADD.route({"total": total, "input": input, "scale": None}, None)
    assert plain.operation is _PLAIN
    assert "scale" not in plain.arguments
    assert _ADD.route({"total": total, "input": input, "scale": 0.5}, None).operation is _SCALED
    wrong = function("add_", _PLAIN, _SCALED, choose=lambda arguments: _PLAIN)
    with pytest.raises(lz.InvalidCallError, match="unknown argument 'scale'"):
        wrong.route({"total": total, "input": input, "scale": 0.5}, None)


def test_a_route_tells_values_with_the_schemas_findings_and_shapes_behind_them():
    total = torch.zeros(2, 3)
    both = _problems(total=total, input=torch.ones(2, 3, dtype=torch.int64), scale=7)
    assert "input: wanted dtype" in both
    assert "scale: wanted another" in both
    assert "input: wanted shape (2, 3) like total, got (1, 3)" in _problems(total=total, input=torch.ones(1, 3))
    assert "memory that it shares with input" in _problems(total=total, input=total)
    assert "an expanded view" in _problems(total=torch.zeros(1, 3).expand(2, 3), input=torch.ones(2, 3))


@pytest.mark.parametrize("name", [name for name, each in OPERATIONS.items() if each.fake is None])
def test_no_eager_call_asks_the_reference_for_shapes(name, monkeypatch):
    """A first result is checked against the schema: running the reference on meta would make a miss dearer."""
    monkeypatch.setattr(failures, "fake_call", lambda _: pytest.fail("the shapes came from the reference"))
    declared = OPERATIONS[name]
    case = min(declared.cases, key=lambda each: sum(each.sizes.values()))
    called = function_for(declared)
    found = routed(called, accepted(called, arguments_of(declared, case, declared.dtypes[0])))
    facts = FactsBuilder(declared).of_valid(found.arguments, device=KNOWN_DEVICES["CPU"], layout=found.layout)
    first = SimpleNamespace(report=SimpleNamespace(facts=facts), gives=None)
    assert failures.wrong_result(first, reference_call(found), found.arguments) is None


def test_torchs_expression_is_a_kernel():
    """With every argument of the operations, and no gradients where something is written into."""
    torchs = Backend("torchs", "Expressions")
    kernel = Kernel.of_expression(_declared(), id="torchs.lengthen", backend=torchs, priority=7)
    assert kernel.operations == ("example.lengthen",)
    assert kernel.accepts == ("bias", "times")
    assert (kernel.grad, kernel.priority) == (True, 7)
    assert kernel.load(None) is lengthen
    both = Kernel.of_expression(_PLAIN, _SCALED, id="torchs.add", backend=torchs, accepts=("scale",))
    assert (both.grad, both.accepts) == (False, ("scale",))
    assert both.load({"operation": "example.add.scaled"}) is add_
    own = Kernel.of_expression(_PLAIN, id="torchs.own", backend=torchs, load=lambda facts: torch.Tensor.add_)
    assert own.load(None) is torch.Tensor.add_
