"""Proofs for operations without tensors: what works on a form of its own shows in a child that it is the same.

lz.vet("tokenize", params={"tokenizer_id": "model/tokenizer.json"})
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerzero.core.errors import InvalidCallError
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Case, Operation, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.engine import legality, probe
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import plain_facts
from layerzero.engine.policy import names_kernel
from layerzero.engine.registry import REGISTRY

Pair = tuple[Kernel, Facts]

_ABSENT = frozenset({ReasonCode.NOT_INSTALLED, ReasonCode.BACKEND_IMPORT_FAILED, ReasonCode.PLATFORM_MISMATCH})


def plain_operations(pattern: str) -> list[Operation]:
    """Operations without tensors that a name, function or glob covers. Raises: KeyError for one that covers nothing."""
    found = [REGISTRY.operation(name) for name in REGISTRY.operations_named(pattern)]
    return [each for each in found if each.plain is not None]


def facts_of_case(operation: Operation, case: Case, params: Mapping[str, Any]) -> Facts:
    """The facts of one of its cases, with the place where another process finds what they name.

    Raises: InvalidCallError where ``params`` do not name it.
    """
    assert operation.plain is not None
    try:
        arguments = operation.plain.draw(case, params)
    except KeyError as error:
        wanted = f"params={{{error.args[0]!r}: ...}}, on the command line --param {error.args[0]}=..."
        raise InvalidCallError(operation.name, [f"wanted {wanted}, got {dict(params)}"]) from None
    return plain_facts(Routed(operation, {**operation.plain.portable(arguments)}))


def pairs(
    pattern: str, params: Mapping[str, Any], named: Sequence[str] | None = None, *, again: bool = False
) -> Iterator[Pair]:
    """Kernels that are installed, take what ``params`` name, and have to prove themselves for it."""
    machine = probe.this_machine()
    for operation in plain_operations(pattern):
        facts = facts_of_case(operation, operation.cases[0], params)
        for kernel in REGISTRY.candidates(operation.name):
            if not kernel.needs_proof(facts) or (named and not any(names_kernel(each, kernel) for each in named)):
                continue
            if not again and ENGINE.ledger.judgement(kernel, facts) is not None:
                continue
            library = legality.library_reason(kernel, facts, machine, None)
            absent = library is not None and library.code in _ABSENT
            if not absent and not legality.limit_findings(kernel, facts) and not _denied(kernel, facts):
                yield kernel, facts


def _denied(kernel: Kernel, facts: Facts) -> bool:
    return bool(legality.policy_reasons(kernel, facts, current_policy()))
