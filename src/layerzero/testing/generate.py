"""Random valid calls: (seed, number) always gives the same one, on every machine.

Sizes, arguments and memory layouts come from one stream of random numbers and data from another, so that the same call
can be drawn again with other data: it must then reuse the plan of the first.

Data is about unit normal, what tolerances are meant for. What no finite precision can answer is not drawn: rows of a
layer norm whose variance is nearly zero, mask rows in which every score drowns in a huge finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.dtypes import dtype_name
from layerzero.core.operation import Case, Operation
from layerzero.ops import function_of
from layerzero.ops.attention import layout as layouts
from layerzero.ops.attention.draw import attention
from layerzero.ops.draw import Draw
from layerzero.ops.norm.draw import add_rms_norm, layer_norm, rms_norm
from layerzero.ops.paged.draw import append_paged_kv, paged_attention
from layerzero.ops.paged.step import StepMetadata

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_WEIGHTS = (4, 3, 3, 1)


@dataclass(frozen=True, slots=True, repr=False)
class RandomCall:
    """One call of a public function.

    Attributes:
        function: its name, ``attention``.
        arguments: what the caller passes, by name; what is left out has its default.
        name: where it comes from, ``seed 3, call 17``.
    """

    function: str
    arguments: Mapping[str, Any]
    name: str = ""

    def __post_init__(self) -> None:
        """Give a call whose tables were copied or moved a step of its own: a step belongs to its very tensors."""
        step, tables = (
            self.arguments.get("step"),
            [self.arguments.get(name) for name in ("block_tables", "context_lens")],
        )
        if not isinstance(step, StepMetadata) or step.kind_for(*tables) != "foreign":  # type: ignore[arg-type]
            return
        own = StepMetadata(*tables, max_context_len=step.max_context_len, capturable=step.capturable)  # type: ignore[arg-type]
        object.__setattr__(self, "arguments", {**self.arguments, "step": own})

    @property
    def text(self) -> str:
        """The call in one line: shapes, strides that are not contiguous, dtypes, and every other argument."""
        return f"{self.function}({', '.join(f'{name}={_shown(value)}' for name, value in self.arguments.items())})"

    def __repr__(self) -> str:
        return f"<{self.name or 'a call'}: {self.text}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002  # the protocol of IPython
        """Show the same in IPython and in hypothesis, which would print every element otherwise."""
        printer.text(repr(self))


def _shown(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    strides = "" if value.is_contiguous() else f" strides {value.stride()}"
    offset = f" offset {value.storage_offset()}" if value.storage_offset() else ""
    return f"{dtype_name(value.dtype)}{tuple(value.shape)}{strides}{offset}"


_FUNCTIONS: dict[str, Callable[[Draw, torch.dtype], dict[str, Any]]] = {
    "attention": attention,
    "paged_attention": paged_attention,
    "append_paged_kv": append_paged_kv,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "add_rms_norm": add_rms_norm,
}
FUNCTIONS = tuple(_FUNCTIONS)
"""The public functions that calls are drawn of; a test compares them with the library's."""


def random_call(
    seed: int,
    number: int,
    *,
    function: str | None = None,
    dtype: torch.dtype | None = None,
    data: int = 0,
    device: torch.device | str = "cpu",
) -> RandomCall:
    """Draw call ``number`` of a seed.

    Args:
        function: draw a call of this one; half of all calls are attention otherwise.
        dtype: use this dtype instead of drawing one.
        data: another number gives the same call with other data.
        device: where the tensors lie; the values are the same everywhere.
    """
    draw = Draw(f"{seed}:{number}", data, device)
    drawn = draw.of(tuple(_FUNCTIONS), (6, 2, 1, 2, 2, 2))
    drawn_dtype = draw.of(DTYPES, _DTYPE_WEIGHTS)
    function, dtype = function or drawn, dtype or drawn_dtype
    arguments = _FUNCTIONS[function](draw, dtype)
    return RandomCall(function, arguments, f"seed {seed}, call {number}")


def case_call(
    operation: Operation,
    case: Case,
    dtype: torch.dtype,
    *,
    layout: str | None = None,
    device: torch.device | str = "cpu",
) -> RandomCall:
    """The call that one of an operation's own cases describes, with random data."""
    draw, sizes = Draw(f"{operation.name}:{case.name}", 0, device), case.sizes
    function = function_of(operation.name)
    assert function is not None, f"{operation.name} has no public function"
    if operation.examples is not None:
        made = operation.examples(case, dtype, torch.device(device), draw.data)
        if layout not in (None, operation.layouts[0]):
            moving = [schema.name for schema in operation.schema.inputs if schema.has_layout]
            made |= {name: made[name].transpose(1, 2).contiguous() for name in moving}
        given = {"layout": layout or operation.layouts[0]} if operation.layouts else {}
        return RandomCall(function.name, {**made, **case.params, **given}, f"{operation.name} {case.name}")
    if operation.layouts:
        layout = layout or operation.layouts[0]
        query = draw.normal((sizes["batch"], sizes["seq_q"], sizes["heads"], sizes["head_dim"]), dtype)
        key = draw.normal((sizes["batch"], sizes["seq_k"], sizes["kv_heads"], sizes["head_dim"]), dtype)
        value = draw.normal((sizes["batch"], sizes["seq_k"], sizes["kv_heads"], sizes["value_dim"]), dtype)
        tensors = [
            tensor if layout == layouts.CANONICAL else tensor.transpose(1, 2).contiguous()
            for tensor in (query, key, value)
        ]
        arguments = dict(zip(("query", "key", "value"), tensors, strict=True)) | dict(case.params) | {"layout": layout}
        return RandomCall(function.name, arguments, f"{operation.name} {case.name}")
    shape, weight = (sizes["rows"], sizes["hidden"]), draw.normal((sizes["hidden"],), dtype)
    arguments = {"input": draw.normal(shape, dtype), "weight": weight, **case.params}
    if operation.name == "norm.layer":
        arguments |= {"normalized_shape": (sizes["hidden"],), "bias": draw.normal((sizes["hidden"],), dtype)}
    if operation.name == "norm.add_rms":
        arguments["residual"] = draw.normal(shape, dtype)
    return RandomCall(function.name, arguments, f"{operation.name} {case.name}")
