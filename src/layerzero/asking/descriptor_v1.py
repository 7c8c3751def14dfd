"""Descriptors of schema version 1.0 as today's: flags for attention variants become operations and arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from layerzero.core.descriptor import VERSION, Descriptor, Descriptor1, Entry, Entry1
from layerzero.core.limit import Limit
from layerzero.core.limit_data import limit_data
from layerzero.core.limit_kinds import Equal, OneOf
from layerzero.core.operation import Operation
from layerzero.ops import OPERATION_ALIASES
from layerzero.ops.attention.limits import SquareCausal

_SHARED = tuple(field.name for field in msgspec.structs.fields(Entry1) if field.name in Entry.__struct_fields__)


def translated(old: Descriptor1, known: Mapping[str, Operation]) -> tuple[Descriptor, list[str]]:
    """The same in today's terms, and what is wrong with it.

    ``attention.causal`` and ``attention.full`` are prefill with that value of ``causal``. ``supports_gqa`` adds the
    operation with grouped heads. What version 1.0 has no word for is not allowed: other value dims, a causal mask over
    unequal lengths, a scale. ``fuses_ops`` and ``transform_cost_hint`` change nothing: a fused operation is an
    operation of its own here, and costs of adaptations are not declared.
    """
    ops: dict[str, list[Entry | str]] = {}
    problems: list[str] = []
    for name, entries in old.ops.items():
        implied = OPERATION_ALIASES.get(name, ((), {}))[1]
        for index, entry in enumerate(entries):
            operations = _operations(name, entry, known)
            if entry.supports_gqa and len(operations) == 1 and not known[operations[0]].sibling:
                problems.append(f"ops.{name}[{index}].supports_gqa: wanted false, since {name} has no heads, got true")
            if not entry.supports_gqa and known.get(name) and known[name].sibling:
                problems.append(f"ops.{name}[{index}].supports_gqa: wanted true under {name}, got false")
            ops.setdefault(operations[0], []).append(_entry(entry, known.get(operations[0]), implied))
            for operation in operations[1:]:
                ops.setdefault(operation, []).append(entry.kernel_id)
    return (
        Descriptor(
            schema_version=VERSION,
            backend=old.backend,
            backend_version=old.backend_version,
            platforms=[old.platform],
            ops=ops,
        ),
        problems,
    )


def _operations(name: str, entry: Entry1, known: Mapping[str, Operation]) -> Sequence[str]:
    """The operation, and also the one with grouped heads if the kernel has them."""
    if name in OPERATION_ALIASES:
        name = OPERATION_ALIASES[name][0][0]
    if name not in known:
        return [name]  # the reader of the translation says that there is none
    grouped = [each.name for each in known.values() if each.sibling == name] if entry.supports_gqa else []
    return [name, *grouped]


def _entry(old: Entry1, operation: Operation | None, implied: Mapping[str, object]) -> Entry:
    shared: dict[str, Any] = {name: getattr(old, name) for name in _SHARED}
    facts = operation.facts if operation else frozenset()
    limits: list[Limit] = [OneOf(fact, (value,)) for fact, value in implied.items()]
    limits += [Equal("value_dim", "head_dim")] if {"value_dim", "head_dim"} <= facts else []
    limits += [SquareCausal()] if {"causal", "seq_q", "seq_k"} <= facts else []
    accepts = ["attn_mask"] * old.supports_attn_mask + ["dropout_p"] * old.supports_dropout
    return Entry(**shared, limits=[limit_data(each) for each in limits], accepts=accepts)
