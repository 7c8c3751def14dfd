"""The last resort where a launch grid is too small: run the batch in chunks and put the results together.

Only where no kernel but the reference is legal as the call is; another kernel, however slow, is always preferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from layerzero.core.fact_reads import watch
from layerzero.core.facts import Facts, TensorFacts
from layerzero.core.kernel import Kernel
from layerzero.core.limit_kinds import Finding
from layerzero.core.limits import LAUNCH_CODES, Grid
from layerzero.core.plan import Adaptation, Candidate
from layerzero.core.reasons import ReasonCode
from layerzero.core.schema import OperationSchema
from layerzero.engine.policy import Lock, Policy, bound_by

_ROUND = 16
"""Chunks start at multiples of this many sequences, so that a one-dimensional tensor's slices stay aligned."""

Judge = Callable[[Kernel, Facts], list[Finding]]


def last_resort(
    judged: list[Candidate], facts: Facts, policy: Policy, lock: Lock | None, findings: Judge
) -> list[Candidate]:
    """Make kernels legal that only their launch grid refuses, if nothing but the reference is legal otherwise.

    ``findings`` lists what a kernel's limits say about facts; the chunks' facts must satisfy every one of them.
    """
    if policy.strict_mode or not policy.allow_adaptation or facts.operation.schema.mutated:
        return judged
    named = bound_by(lock, judged)
    if any(each.legal and not each.kernel.is_reference for each in named):
        return judged
    return [_split(each, facts, findings) if each in named else each for each in judged]


def _split(candidate: Candidate, facts: Facts, findings: Judge) -> Candidate:
    if candidate.legal or any(reason.code not in LAUNCH_CODES for reason in candidate.reasons):
        return candidate
    size = chunk(candidate.kernel, facts)
    if size == 0:
        return candidate
    axis = cut_axis(facts.operation.schema)
    for rows in sizes(facts.size(axis), size):
        seen = of_batch(facts, rows).seen_in(candidate.kernel.layout)
        if any(finding.reason.code in LAUNCH_CODES for finding in findings(candidate.kernel, seen)):
            return candidate
    text = f"run the {axis} of {facts.size(axis)} in chunks of {size}"
    adaptations = (*candidate.adaptations, Adaptation("split", axis, text))
    return msgspec.structs.replace(candidate, reasons=(), adaptations=adaptations)


def one_by_one(judged: list[Candidate], facts: Facts, lock: Lock | None, findings: Judge) -> list[Candidate]:
    """The same where only batch invariance refuses them: each entry of the batch alone gives the bits of any batch.

    Not where the call names how much of a row counts: it is padded to the longest of the others.
    """
    schema, axis = facts.operation.schema, cut_axis(facts.operation.schema)
    padded = any(schema.tensor(name).counts for name in facts.tensors)
    named = bound_by(lock, judged)
    if padded or schema.mutated or any(each.legal for each in named):
        return judged
    allowed = LAUNCH_CODES | {ReasonCode.BATCH_INVARIANCE_REQUIRED}
    alone = Adaptation("apart", axis, f"run each of {facts.size(axis) if axis else 0} {axis or 'entries'} alone")

    def may(each: Candidate) -> bool:
        kernel = each.kernel
        if kernel.jit or {reason.code for reason in each.reasons} - allowed or not _cuts(kernel, facts):
            return False
        return not any(found.repair is None for found in findings(kernel, of_batch(facts, 1).seen_in(kernel.layout)))

    return [
        msgspec.structs.replace(each, reasons=(), adaptations=(*each.adaptations, alone))
        if each in named and may(each)
        else each
        for each in judged
    ]


def cut_axis(schema: OperationSchema) -> str:
    """The axis along which a call may run in chunks; empty where there is none."""
    return next((each.name for each in schema.axes if each.apart and not each.leading), "")


def chunk(kernel: Kernel, facts: Facts) -> int:
    """How many sequences the kernel may launch at once; 0 where the batch cannot be cut."""
    axis = cut_axis(facts.operation.schema)
    if not _cuts(kernel, facts):
        return 0
    size = min((limit.safe_size(axis, facts) for limit in kernel.limits if isinstance(limit, Grid)), default=0)
    return size - size % _ROUND if size > _ROUND else size


def _cuts(kernel: Kernel, facts: Facts) -> bool:
    """Whether a call can be cut along its batch, for this kernel."""
    schema = facts.operation.schema
    if any(name in kernel.accepts and facts[name] != "none" for name in schema.handles):
        return False  # what it planned for the whole batch does not fit a part
    cut = [tensor for tensor in schema.inputs if tensor.name in facts.tensors]
    axis = cut_axis(schema)
    unknown = [each for each in cut if not each.shape_vars and not each.broadcast]
    return bool(axis) and not unknown and all(output.shape_vars[:1] == (axis,) for output in schema.outputs)


def sizes(batch: int, size: int) -> tuple[int, ...]:
    """The different chunk sizes: the full one, and what is left."""
    return tuple(dict.fromkeys(each for each in (size, batch % size) if each))


def of_batch(facts: Facts, rows: int) -> Facts:
    """The facts of so many sequences of a call."""
    cut = {name: _cut(facts, name, tensor, rows) for name, tensor in facts.tensors.items()}
    return facts.of_sizes({cut_axis(facts.operation.schema): rows}, cut)


def _cut(facts: Facts, name: str, tensor: TensorFacts, rows: int) -> TensorFacts:
    schema = facts.operation.schema.tensor(name)
    if name not in split_tensors(facts) or tensor.shape[0] == 1 or len(tensor.shape) < len(schema.broadcast):
        return tensor
    return msgspec.structs.replace(tensor, shape=(rows, *tensor.shape[1:]))


def split_tensors(facts: Facts) -> frozenset[str]:
    """Tensors whose first axis is the one to cut along; that of what broadcasts may be, which its size tells."""
    inputs, axis = facts.operation.schema.inputs, cut_axis(facts.operation.schema)
    return frozenset(each.name for each in inputs if axis in (each.shape_vars[:1] or each.broadcast[:1]))


def load(kernel: Kernel, facts: Facts, size: int) -> Callable[[int], Callable[..., Any]]:
    """Load the kernel for each chunk size; what it returns answers which callable runs so many sequences."""
    seen = facts.seen_in(kernel.layout)
    every = sizes(facts.size(cut_axis(facts.operation.schema)), size)
    loaded = {rows: watch(kernel.load, of_batch(seen, rows), f"{kernel.id}: load")[0] for rows in every}
    return loaded.__getitem__


def in_chunks(batch: int, size: int, call: Callable[[int, slice], Any]) -> Any:
    """Call with the number of sequences and their place for every chunk; concatenate what comes back on axis 0."""
    places = [slice(start, min(start + size, batch)) for start in range(0, batch, size)]
    parts = [call(place.stop - place.start, place) for place in places]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))
    return torch.cat(parts)


def rows_of(tensor: torch.Tensor, place: slice) -> torch.Tensor:
    """The chunk's rows of a tensor that may be broadcast over the batch."""
    return tensor if tensor.shape[0] == 1 else tensor[place]


def calling(arguments: Sequence[str], tensors: frozenset[str], batch: int, size: int) -> str:
    """The statement that runs a kernel in chunks; ``arguments`` as they are written in its call."""
    written = []
    for argument in arguments:
        name, equals, value = argument.rpartition("=")
        written.append(f"{name}{equals}rows_of({value}, place)" if value in tensors else argument)
    return f"output = in_chunks({batch}, {size}, lambda rows, place: kernel(rows)({', '.join(written)}))"


NAMES: dict[str, Any] = {"in_chunks": in_chunks, "rows_of": rows_of}
"""What a plan's text needs to run in chunks."""
