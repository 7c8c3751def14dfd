"""What a call should give, and what is wrong with a result.

The operation's own reference in float64, on the very values that the kernel got, is the truth; the operation's judges
say how a result may differ from it (:mod:`layerzero.core.judge`). Shapes, dtypes and devices are always those of the
truth, and what the call does not write into stays as it was, byte by byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from layerzero.core.arguments import Param, TensorSchema
from layerzero.core.dtypes import dtype_name
from layerzero.core.handle import FOREIGN
from layerzero.core.judge import Elementwise, Given, Judge, Property, apart
from layerzero.core.judges import Distribution
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation, OpKind, Routed, Tolerance
from layerzero.core.system import forking
from layerzero.engine.config import current_policy
from layerzero.engine.functions import CALLS
from layerzero.engine.pick import require
from layerzero.engine.reference import as_tuple, fake_call, moved, reference_call
from layerzero.testing.generate import RandomCall


@contextmanager
def seeded(seed: int, device: torch.device | str) -> Iterator[None]:
    """Seed torch's own generators of the CPU and of a device; afterwards they are where they were."""
    device = torch.device(device)
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


_CONVOLVING = forking.rlock()


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Convolve float32 in float32 on a GPU; torch takes TF32 by default, which is 1e-3 off (H200, 2026-11-26).

    The setting is the process's own. Two threads that set and restored it in turn would leave it set, and torch exports
    no program from then on: one of them compares at a time.
    """
    with _CONVOLVING:
        before = torch._C._get_fp32_precision_getter("cuda", "conv")
        torch._C._set_fp32_precision_setter("cuda", "conv", "ieee")
        try:
            yield
        finally:
            torch._C._set_fp32_precision_setter("cuda", "conv", before)


def random_arguments(operation: Operation, arguments: Mapping[str, object]) -> list[str]:
    """The parameters that make the results of a call random: those at another value than their neutral one."""
    params = [each for each in operation.schema.params if each.random]
    return [each.name for each in params if arguments.get(each.name, each.neutral) != each.neutral]


def draws(operation: Operation) -> list[str]:
    """The results of an operation that are draws of a distribution."""
    return [name for name, judge in operation.judges.items() if isinstance(judge, Distribution)]


def is_random(operation: Operation, arguments: Mapping[str, object]) -> bool:
    """Whether two right results of a call may differ."""
    by_kind = operation.kind is OpKind.SAMPLING or bool(draws(operation))
    return by_kind or bool(random_arguments(operation, arguments))


GUARD_BYTES = 512
"""What is watched on either side of a tensor that is written into; keeps its address aligned as it was."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The truth about one call.

    Attributes:
        operation: the operation that the call is routed to.
        names: those of its results.
        results: what it returns, in float64 where it is floating, in the caller's layout.
        dtypes: dtypes that the results must have.
        mutated: what the arguments that it writes into hold afterwards.
        judges: by the name of a result or written argument, its judge, and what that judge knows of the call.
        dtype: that of the call.
        computed: what kernels compute it in: another where a plan casts.
        random: whether two right results may differ.
        loose: whether an argument makes random what judges would compare: then only shapes and dtypes are, and the
            operation's properties say the rest.
    """

    operation: str
    names: tuple[str, ...]
    results: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    mutated: Mapping[str, Tensor]
    judges: Mapping[str, tuple[Judge, Given]]
    dtype: torch.dtype
    computed: torch.dtype
    random: bool = False
    loose: bool = False

    @property
    def tolerance(self) -> Tolerance:
        """How far the first result that is judged by its distance may be. Raises: ValueError where none is."""
        for judge, given in self.judges.values():
            if isinstance(judge, Elementwise):
                return judge.allowed(given)
        raise ValueError(f"{self.operation}: wanted a result that is judged by its distance, got {list(self.judges)}")

    def problem(self, name: str, got: Any, want: Tensor, dtype: torch.dtype) -> str:
        """Say in one line what is wrong with a result or a written argument; empty if nothing is."""
        problem = kind_problem(got, want, dtype)
        judge, given = self.judges[name]
        if problem or (self.loose and not isinstance(judge, (Distribution, Property))):
            return problem
        return judge.problem(got, want, given)


def expected(call: RandomCall) -> Expected:
    """Evaluate a call in float64 by its operation's reference; a caller's random state is left as it is.

    Raises: InvalidCallError if the call means nothing; ValueError where reference and fake function contradict each
        other.
    """
    routed = route(call)
    operation, dtype = routed.operation, call_dtype(routed)
    wide = _wide(routed)
    known = canonical(wide)
    judges = {name: (judge, Given(dtype, judge.basis(known))) for name, judge in operation.judges.items()}
    chance = is_random(operation, routed.arguments)
    first = routed.arguments[operation.schema.inputs[0].name]
    assert isinstance(first, Tensor)
    with torch.no_grad(), seeded(0, first.device) if chance else nullcontext():
        results = as_tuple(reference_call(wide))
    outputs = operation.schema.results(routed.arguments)
    dtypes = tuple(each.dtype for each in fakes(routed))
    if not len(results) == len(outputs) == len(dtypes):
        counts = f"{len(results)} of its reference, {len(dtypes)} of its fake function, {len(outputs)} in its schema"
        raise ValueError(f"{operation.name}: wanted as many results from each, got {counts}")
    exact = dtype is torch.float32 and not chance and not operation.schema.mutated
    for place, output in enumerate(outputs):
        judge, given = judges[output.name]
        moved = functools.partial(_moved, routed, place) if exact else None
        judges[output.name] = judge, replace(given, canonical=_to_canonical(routed, output), moved=moved)
    for name in operation.schema.mutated:
        judge, given = judges[name]
        judges[name] = judge, replace(given, canonical=_to_canonical(routed, operation.schema.tensor(name)))
    return Expected(
        operation.name,
        tuple(output.name for output in outputs),
        results,
        dtypes,
        {name: wide.arguments[name] for name in operation.schema.mutated},  # type: ignore[misc]  # tensors, all
        judges,
        dtype,
        computed_dtype(routed),
        chance,
        bool(random_arguments(operation, routed.arguments)),
    )


STEP = 2.0**-23
"""A step of float32: that between 1 and the next number."""


def _moved(routed: Routed, place: int) -> Tensor:
    """How far a result moves where rows of what the call brings are a step of float32 off, each to its own side.

    A score of 100 is known to 1e-5 in float32, whatever computes it. Of two rows that move to one side the difference
    stays: in eight draws that is so once in 128.
    """
    wide, draw = _wide(routed), torch.Generator().manual_seed(0)
    truth = as_tuple(reference_call(wide))[place]
    moved = torch.zeros_like(truth)
    for _ in range(8):
        stepped = {name: _stepped(value, draw) for name, value in wide.arguments.items()}
        other = as_tuple(reference_call(replace(wide, arguments=stepped)))[place]
        moved = torch.maximum(moved, (other - truth).abs().nan_to_num(0.0, 0.0, 0.0))
    return moved


def _stepped(value: Any, draw: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    rows = value.shape[:-1] + (1,) * (value.ndim > 0)
    sides = torch.randint(0, 2, rows, generator=draw).to(value.device) * 2.0 - 1.0
    return value * (1.0 + sides * STEP)


def _wide(routed: Routed) -> Routed:
    """The same call in float64, on copies."""
    arguments = {name: widened(value) for name, value in routed.arguments.items()}
    given = {**arguments, "layout": routed.layout}
    return replace(routed, arguments=arguments | _handles(routed.operation.schema.params, given))


def _handles(params: Iterable[Param | None], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Handles that results depend on, made again of tensors that are copies of those that they were made of."""
    return {
        each.name: each.make(arguments, False)
        for each in params
        if each is not None and each.changes_result and each.make is not None
        if arguments.get(each.name) is not None and each.kind_of(arguments[each.name], arguments) == FOREIGN
    }


def canonical(routed: Routed) -> dict[str, Any]:
    """The arguments of a call with every tensor in the layout of the schema."""
    schema = routed.operation.schema
    seen = {
        tensor.name: moved(routed.arguments.get(tensor.name), tensor, routed.layout, schema.canonical)
        for tensor in schema.inputs
    }
    return {**routed.arguments, **seen}


def _to_canonical(routed: Routed, tensor: TensorSchema) -> Callable[[Tensor], Tensor]:
    layout, target = routed.layout, routed.operation.schema.canonical
    return lambda value: moved(value, tensor, layout, target)


def fakes(routed: Routed) -> tuple[Tensor, ...]:
    """Results without memory: the shapes and dtypes that the fake function gives."""
    empty = {
        name: torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
        for name, value in routed.arguments.items()
    }
    return as_tuple(fake_call(replace(routed, arguments=empty)))


def for_kernel(truth: Expected, kernel: Kernel) -> Expected:
    """The same truth with the kernel's own tolerance, where it has one that is wider."""
    own = kernel.tolerance.get(dtype_name(truth.computed))
    if own is None:
        return truth
    judges = {name: (judge, replace(given, wider=own)) for name, (judge, given) in truth.judges.items()}
    return replace(truth, judges=judges)


def _chosen(call: RandomCall) -> Kernel:
    ours, policy = CALLS[call.function], current_policy()
    report, _ = ours.dispatcher.explain(dict(ours.function.bind((), call.arguments)), policy, complete=False)
    return require(report).kernel


def route(call: RandomCall) -> Routed:
    """The operation, canonical arguments and layout of a call, as the engine finds them."""
    function = CALLS[call.function].function
    return function.route(function.bind((), call.arguments), current_policy().layout)


def call_dtype(routed: Routed) -> torch.dtype:
    """The dtype of a call as the caller has it: of the tensor that its operation names for it, the first if none.

    What a plan casts is computed wider, and the result is rounded to that dtype.
    """
    return routed.casts[""][1] if "" in routed.casts else computed_dtype(routed)


def computed_dtype(routed: Routed) -> torch.dtype:
    """The dtype of the tensor that names a call's dtype, as kernels get it."""
    leading = routed.arguments[routed.operation.schema.dtype_tensor.name]
    assert isinstance(leading, Tensor)
    return leading.dtype


def flipped(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A tensor the other way round along some axes; torch flips no float8, so that its bytes are."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).flip(axes).view(tensor.dtype)
    return tensor.flip(axes)


def widened(value: Any) -> Any:
    """A float64 copy of a floating tensor; a copy of another tensor or of a generator; anything else as it is."""
    if not isinstance(value, Tensor):
        return value.clone_state() if isinstance(value, torch.Generator) else value
    return value.detach().to(torch.float64, copy=True) if value.is_floating_point() else value.detach().clone()


def difference(got: Any, want: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> str:
    """Say in one line how a result is not near what was wanted; empty if it is."""
    return kind_problem(got, want, dtype) or apart(got, want, tolerance)


def kind_problem(got: Any, want: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> str:
    """Say how a result is of another kind than what was wanted; ``device`` where that is none of ``want``."""
    if not isinstance(got, Tensor):
        return f"wanted a tensor, got {type(got).__name__}"
    device = device or want.device
    if got.shape == want.shape and got.dtype == dtype and got.device == device:
        return ""
    return f"wanted {dtype} {tuple(want.shape)} on {device}, got {got.dtype} {tuple(got.shape)} on {got.device}"


def check(call: RandomCall, run: Callable[..., Any] | None = None, truth: Expected | None = None) -> list[str]:
    """Run a call and list what is wrong with it: results, what it wrote into, what it should not have touched.

    Args:
        run: what to call with the arguments; the library's own function by default, whose kernel has its tolerance.
        truth: what :func:`expected` gave, if it is known.
    Mutated arguments are copied first, so that the call can be run again. What is random is drawn from a state of its
    own; the caller's stays as it was.
    """
    if truth is None:
        truth = expected(call) if run else for_kernel(expected(call), _chosen(call))
    arguments = {name: _guarded(value) if name in truth.mutated else value for name, value in call.arguments.items()}
    function = CALLS[call.function].function
    arguments |= _handles([function.param(name) for name in function.handles], arguments)
    before = {name: _memory(value).clone() for name, value in _tensors(arguments)}
    device = next((value.device for _, value in _tensors(arguments)), torch.device("cpu"))
    drawing = seeded(1, device) if truth.random else nullcontext()
    with drawing, exact_convolutions() if device.type == "cuda" else nullcontext():
        result = (run or CALLS[call.function].fast)(**arguments)
    found = problems(result, arguments, truth)
    for name, memory in before.items():
        after = _memory(arguments[name])
        if name in truth.mutated:
            around = _around(arguments[name])
            if not torch.equal(after[around], memory[around]):
                found.append(f"{name}: wanted what lies around it untouched, got other bytes there")
        elif not torch.equal(after, memory):
            found.append(f"{name}: wanted it untouched, got other bytes in its memory")
    return found


def _guarded(tensor: Tensor) -> Tensor:
    """A copy with bytes on either side that no kernel may write; read as floating numbers they are NaN."""
    memory = _memory(tensor)
    room = torch.full((memory.numel() + 2 * GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=tensor.device)
    room[GUARD_BYTES : GUARD_BYTES + memory.numel()] = memory
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    offset = tensor.storage_offset() + GUARD_BYTES // tensor.itemsize
    copy.set_(room.untyped_storage(), offset, tensor.shape, tensor.stride())
    return torch._neg_view(copy) if tensor.is_neg() else copy


def _around(tensor: Tensor) -> Tensor:
    """Which bytes of the memory that a tensor is a view of are none of its elements'."""
    size = tensor.itemsize
    around = torch.ones(_memory(tensor).numel() // size, dtype=torch.bool, device=tensor.device)
    around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return around.repeat_interleave(size)


def problems(result: Any, arguments: Mapping[str, Any], truth: Expected) -> list[str]:
    """List what is wrong with a result, and with the arguments that were written into."""
    results = as_tuple(result)
    if len(results) != len(truth.results):
        return [f"wanted {len(truth.results)} results, got {len(results)}"]
    found = []
    wanted = zip(truth.names, truth.results, truth.dtypes, strict=True)
    for index, (got, (name, want, dtype)) in enumerate(zip(results, wanted, strict=True)):
        found.append(_told(f"result {index}", truth.problem(name, got, want, dtype)))
    for name, want in truth.mutated.items():
        found.append(_told(name, truth.problem(name, arguments[name], want, arguments[name].dtype)))
    return [problem for problem in found if problem]


def _told(name: str, problem: str) -> str:
    return f"{name}: {problem}" if problem else ""


def _tensors(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in arguments.items() if isinstance(value, Tensor)]


def _memory(tensor: Tensor) -> Tensor:
    """Every byte of the memory that a tensor is a view of, what lies around it included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def copied(value: Any, memory: dict[int, UntypedStorage] | None = None) -> Any:
    """The same values in a copy of the whole memory, at the same strides and offset; a generator in the same state.

    Args:
        memory: copies by address, for tensors that lie in one memory to do so again: kernels read both parts of a
            latent cache through one pointer where they can.
    """
    if not isinstance(value, Tensor):
        return value.clone_state() if isinstance(value, torch.Generator) else value
    known, own = {} if memory is None else memory, value.untyped_storage()
    if own.data_ptr() not in known:
        known[own.data_ptr()] = _memory(value).clone().untyped_storage()
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    copy.set_(known[own.data_ptr()], value.storage_offset(), value.shape, value.stride())
    return torch._neg_view(copy) if value.is_neg() else copy
