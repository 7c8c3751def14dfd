"""Norms, by their own references, and GELU by tanh, compiled ahead of time by torch's Inductor.

``torch.compile`` guards what it made: 20 us a call, and seconds of compiling inside one once a Parameter comes in place
of a tensor, two sizes stop being equal, or the thread count, grad mode or default dtype changes. Here one build serves
all calls of a class, and a call costs 3 us (1 x 4096 float32 on a Xeon, torch 2.13.0, 2026-11-21; torch's own rms_norm
10 us). Not on GPUs, nor with other versions of torch: with torch 2.11.0 on an H200 host (2026-11-21) artefacts were
seen to kill the process that loaded them.

GELU is one pass through an exponential: ``x / (1 + exp(-2 u))`` is ``x / 2 * (1 + tanh(u))``, and torch's loop spends
its time in tanh: 128 x 4096 in float32 took it 870 us, GELU by erf 290, SiLU by exp 220 (AMD EPYC with AVX512, one
thread, torch 2.13.0, 2026-11-23). One build a dtype serves every size, in two artefacts: below torch's grain in the
calling thread alone, above it in all. They take 270 us there, and 7.3 where torch takes 8.2, for 1 x 4096.
Library: torch 2.13, BSD-3-Clause.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.norm_limits import ElementsBelow
from layerzero.backends.shape_cache import GRAIN
from layerzero.backends.torch.aot_inductor import (
    VERSIONS,
    Loaded,
    Runner,
    compiled,
    kept_files,
    loaded,
    name_of,
    parts_of,
    sizes_between,
)
from layerzero.backends.torch.attention import FLOATS
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.core.operation import Operation
from layerzero.ops.norm import declare as norm

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it imports sympy: half a second of a first call

INDUCTOR = Backend(
    name="inductor",
    summary="Norms and GELU by tanh, compiled by torch's Inductor",
    distribution="torch",
    platforms=("cpu",),
    homepage="https://pytorch.org",
    flags=("deterministic", "jit"),
    **VERSIONS,
)

_NORMS: Loaded[list[tuple[int, Runner]]] = Loaded()
"""Of each class, the largest row length that an artefact serves, and the artefact, in rising order."""

_OPTIONS = {
    "cpp.dynamic_threads": True,  # otherwise the thread count at the time of compiling is compiled in
    "emulate_precision_casts": True,  # otherwise add_rms_norm normalises the sum as it was before rounding
}


class _Formula(torch.nn.Module):
    """A reference on flat tensors; eps is a tensor too, so that one build serves any."""

    def __init__(self, operation: Operation, extra: dict[str, object]) -> None:
        super().__init__()
        self.reference, self.extra = operation.reference, extra
        self.names = [each.name for each in operation.schema.inputs]

    def forward(self, eps: Tensor, *tensors: Tensor) -> Any:
        return self.reference(**dict(zip(self.names, tensors, strict=True)), eps=eps, **self.extra)


def _bound(facts: Facts, operation: Operation, axes: tuple[int, ...], **extra: object) -> tuple[Runner, Tensor, int]:
    """The artefact for a call, eps as its first argument (a plan has but one), and the length of a row.

    ``axes`` has 2 for each tensor of rows and 1 for each vector.
    """
    hidden, name = facts.size("hidden"), _name(operation, facts)
    build = functools.partial(_build, _Formula(operation, extra), facts, axes)
    parts = _NORMS.get(name, lambda: [(top, loaded(path)) for top, path in parts_of(name, build)])
    run = next(each for top, each in parts if hidden <= top)
    return run, torch.tensor(facts["eps"], dtype=torch.float64), hidden


def _least(facts: Facts) -> list[int]:
    """Rows and their length at the lower end of a class."""
    return [1 << (facts.size_bits(name) - 1) for name in ("rows", "hidden")]


def _build(formula: _Formula, facts: Facts, axes: tuple[int, ...]) -> list[tuple[int, Path]]:
    """Compile for rows and row lengths from the least ones up to their doubles, in as many artefacts as that takes."""
    parts: list[tuple[int, Path]] = []
    rows, start = _least(facts)
    high = 2 * start - 1
    while start <= high:
        dims = [sizes_between("rows", rows, 2 * rows - 1), sizes_between("hidden", start, high)]
        example = (rows * 3 // 2, start)  # sizes that differ: equal ones would be taken for one
        tensors = [torch.ones(example[2 - count :], dtype=facts.tensors["input"].dtype) for count in axes]
        dynamic = {"eps": None, "tensors": tuple(dict(enumerate(dims[2 - count :])) for count in axes)}
        arguments = (torch.zeros((), dtype=torch.float64), *tensors)
        bound = functools.partial(_longest_row, high)
        parts.append(compiled(formula, arguments, dynamic, facts, _OPTIONS, bound))
        start = parts[-1][0] + 1
    return parts


def _name(operation: Operation, facts: Facts) -> str:
    made_of = operation.name, facts["dtype"], facts.device.name, *_least(facts), tuple(sorted(_OPTIONS.items()))
    return name_of(made_of, __file__, str(norm.__file__))


def _longest_row(high: int, program: torch.export.ExportedProgram, guards: Sequence[Any], known: ShapeEnv) -> int:
    """The longest row that the guards allow: 4096 is such a bound."""
    given = next(node.meta["val"] for node in program.graph.nodes if node.name == "tensors_0")
    for guard in guards:
        row_length = str(given.shape[1].node._expr)  # its name: one size that is left stands in its place elsewhere
        if {str(symbol) for symbol in guard.expr.free_symbols} != {row_length} or guard.expr.rel_op not in ("<", "<="):
            raise RuntimeError(f"Inductor tied the kernel to {guard.expr}")
        (symbol,) = guard.expr.free_symbols
        high = min(high, int(known.var_to_range[symbol].upper))
    return high


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    run, epsilon, hidden = _bound(facts, norm.RMS, (2, 1))

    def rms_norm(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return run([epsilon, input.view(-1, hidden), weight])[0].view(input.shape)

    return rms_norm


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    run, epsilon, hidden = _bound(
        facts, norm.LAYER, (2, 1, 1), normalized_shape=(1,)
    )  # the shape's length alone counts
    # a class does not tell whether there are weight and bias, so its one build always has them
    dtype = facts.tensors["input"].dtype
    ones, zeros = (fill(hidden, dtype=dtype) for fill in (torch.ones, torch.zeros))

    def layer_norm(
        input: Tensor, *, weight: Tensor = ones, bias: Tensor = zeros, normalized_shape: tuple[int, ...], eps: float
    ) -> Tensor:
        return run([epsilon, input.view(-1, hidden), weight.view(hidden), bias.view(hidden)])[0].view(input.shape)

    return layer_norm


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    run, epsilon, hidden = _bound(facts, norm.ADD_RMS, (2, 2, 1))

    def add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = run([epsilon, input.view(-1, hidden), residual.view(-1, hidden), weight])[0]
        increment_version(residual)  # a backward pass that saved it must know
        return output.view(input.shape)

    return add_rms_norm


_LINEAR = 2.0 * math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715 * _LINEAR

_GELU_RANGES = ((8, GRAIN - 1, {"cpp.threads": 1}), (GRAIN, 2**31 - 1, {"cpp.dynamic_threads": True}))
"""Elements from and to, and how they are compiled; the size of the example decides whether there are threads at all."""

_GELUS: Loaded[list[Runner]] = Loaded()


class _Gelu(torch.nn.Module):
    """What torch.export takes in place of a function."""

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        return (wide / (1.0 + torch.exp(-wide * (_LINEAR + _CUBIC * wide * wide)))).to(rows.dtype)


def _load_gelu(facts: Facts) -> Callable[..., Any]:
    name = _gelu_name(facts)
    few, many = _GELUS.get(name, lambda: [loaded(path) for _, path in parts_of(name, lambda: _build_gelu(facts))])

    def run(input: Tensor, *, approximate: str) -> Tensor:
        return (few if input.numel() < GRAIN else many)([input.view(-1)])[0].view(input.shape)

    return run


def _build_gelu(facts: Facts) -> list[tuple[int, Path]]:
    parts = []
    for least, most, options in _GELU_RANGES:
        example = torch.ones(min(4 * least, most), dtype=facts.tensors["input"].dtype)
        dynamic = {"rows": {0: sizes_between("elements", least, most)}}
        parts.append(compiled(_Gelu(), (example,), dynamic, facts, options))
    return parts


def _gelu_name(facts: Facts) -> str:
    return name_of((facts.device.name, str(facts["dtype"]), "gelu"), __file__)


_LIMITS = (FLOATS, limit.contiguous("input", "residual", "weight", "bias"))

KERNELS = (
    *(
        INDUCTOR.kernel(
            f"inductor.{name}",
            operation.name,
            load,
            accepts=accepts,
            limits=_LIMITS,
            prebuilt=kept_files(functools.partial(_name, operation)),
            priority=30,
        )
        for name, operation, load, accepts in (
            ("rms_norm", norm.RMS, _load_rms_norm, ("eps",)),
            ("layer_norm", norm.LAYER, _load_layer_norm, ("normalized_shape", "weight", "bias", "eps")),
            ("add_rms_norm", norm.ADD_RMS, _load_add_rms_norm, ("eps",)),
        )
    ),
    INDUCTOR.kernel(
        "inductor.gelu_tanh",
        "activation.gelu",
        _load_gelu,
        limit.dtype("float32", "float16", "bfloat16"),
        limit.one_of("approximate", "tanh"),
        limit.dim("features", multiple=8),
        ElementsBelow(2**31, ("rows", "features"), f"It is built for {_GELU_RANGES[-1][1]} elements at most"),
        limit.contiguous("input"),
        accepts=("approximate",),
        build_key=lambda facts: facts["dtype"],
        prebuilt=kept_files(_gelu_name),
        priority=30,
    ),
)
