"""Kernels that run in a process of their own: which, what keeps a call from it, and what a call costs more.

Two libraries that cannot share a process, or one that ends it, run in a child each. Its tensors lie in memory that
both processes share; :mod:`layerzero.serving.isolation` has the processes. What cannot cross is refused here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from layerzero.core.device import Device
from layerzero.core.eager_state import EAGER_STATE
from layerzero.core.evidence import Evidence
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import home_of
from layerzero.core.plan import Term
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import log
from layerzero.engine import headroom, probe
from layerzero.engine.policy import Policy, names_any
from layerzero.engine.probe import Machine
from layerzero.engine.services import SERVICES

APART = "runs in a process of its own"
"""How the note of an isolated kernel begins."""


class CallCost(NamedTuple):
    """What a call takes longer in a process of its own, as measured when that process began.

    Attributes:
        fixed_us: two messages and what Python does around them.
        mib_us: copying a MiB to the other process, or a MiB of results back.
        pid: the process it was measured with; 0 before there is one.
        way: how tensors of a GPU reach it; empty for those of the CPU.
    """

    fixed_us: float
    mib_us: float
    pid: int = 0
    way: str = ""

    def us(self, moved_bytes: int) -> float:
        """The cost of a call that moves so many bytes, results included."""
        return self.fixed_us + self.mib_us * moved_bytes / 2**20


ISOLATION_POINTS = -15.0
"""What it costs a kernel of which no time is known: a copy to the process, one back, and the messages."""

NO_MORE: Mapping[str, float] = MappingProxyType({})
"""What kernels cost more where none runs in a process of its own."""

BEFORE_MEASURED, ON_A_GPU = CallCost(30.0, 30.0), CallCost(100.0, 1.0)
"""Guesses that count until a process of the library is measured."""

COSTS: dict[tuple[str, ...], CallCost] = {}
"""By the key of a process, with the name of the GPU where it is one, as it was measured."""


def device_name(device: Device) -> str:
    """Torch's name of a GPU; empty for the CPU."""
    return "" if device.platform == "cpu" else f"{device.torch_type}:{device.index}"


def cost_key(process: tuple[str, ...], name: str) -> tuple[str, ...]:
    """What the cost of calls is kept by, from the key of a process and what :func:`device_name` gives."""
    return (*process, name) if name else process


def isolated(kernel: Kernel, policy: Policy) -> bool:
    """Whether policy has a kernel run in a process of its own; a reference never does."""
    if not policy.isolating or kernel.is_reference:
        return False
    if kernel.source in environments(policy):
        return True
    return policy.backend_isolation != "in_process" and names_any(policy.isolate, kernel)


@functools.lru_cache(64)
def environments(policy: Policy) -> Mapping[str, tuple[str, ...]]:
    """By library, the command of the interpreter that it runs in, where that is not this process's."""
    found: dict[str, tuple[str, ...]] = {name: (path,) for name, path in policy["isolation.pythons"]}
    if policy.backend_isolation == "container":
        given = probe.containers(dict(policy["backend_containers"]))
        found |= {name: tuple(each.command()) for name, each in given.items()}
    return found


def command(kernel: Kernel, policy: Policy) -> tuple[str, ...]:
    """The command of the interpreter that a kernel's process runs; empty for this one's."""
    return environments(policy).get(kernel.source, ())


def key(kernel: Kernel, policy: Policy) -> tuple[str, ...]:
    """Which process a kernel runs in: its library, and the command of its interpreter."""
    return kernel.source, *command(kernel, policy)


def machine(kernel: Kernel, policy: Policy, here: Machine) -> Machine:
    """This machine, with the packages of the environment that a kernel's library runs in."""
    found = command(kernel, policy)
    return here if not found or here.asked is not None else _machine_of(found)


@functools.cache
def _machine_of(command: tuple[str, ...]) -> Machine:
    """What an environment has, looked up once, also where that fails: each look-up may take a minute."""
    try:
        return Machine(libraries=probe.packages(command))
    except OSError as error:
        log.warning("an environment of its own: %s; its libraries count as absent until a restart", error)
        return Machine(libraries={})


def elsewhere(kernel: Kernel) -> Kernel:
    """The same kernel, with a load that has it loaded in a process of its own."""
    return dataclasses.replace(kernel, load=functools.partial(SERVICES.isolate, kernel))


def moved_bytes(facts: Facts) -> int:
    """What a call copies from one process to the other: its tensors as they lie in memory, and its results."""
    spans = [span(each.shape, each.strides) * each.dtype.itemsize for each in facts.tensors.values()]
    return sum(spans) + headroom.result_bytes(facts)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a tensor, with what lies between; 0 of one without elements."""
    if 0 in shape:
        return 0
    return 1 + sum([(size - 1) * step for size, step in zip(shape, strides, strict=True)])


def reasons(kernel: Kernel, facts: Facts, policy: Policy) -> list[Reason]:
    """What keeps a call from a process of its own; empty where the kernel runs in this one."""
    if not isolated(kernel, policy):
        return []
    return [
        Reason(ReasonCode.ISOLATION_UNSUPPORTED, fact, wanted, got, hint)
        for fact, wanted, got, hint in _obstacles(kernel, facts, policy)
    ]


def _obstacles(kernel: Kernel, facts: Facts, policy: Policy) -> Iterator[tuple[str, object, object, str]]:
    """The fact, what is wanted, what is there, and the next step."""
    schema, leave = facts.operation.schema, "Leave the kernel out of `isolate` for such calls"
    if facts.device.platform not in ("cpu", "cuda"):
        yield "platform", "cpu or cuda", facts.device.platform, leave
    if facts.device.platform == "cuda" and len(command(kernel, policy)) > 1:
        yield "platform", "cpu, since a container gets no GPU", "cuda", "Name an interpreter in isolation.pythons"
    if facts.operation.plain is not None or facts.operation.is_collective:
        yield "operation", "one of tensors, of one rank", facts.operation.name, leave
    if facts["requires_grad"]:
        yield "requires_grad", False, True, "Call it under torch.no_grad(), or leave the kernel out of `isolate`"
    if facts["capturing"]:
        yield "capturing", False, True, leave
    if home_of(kernel) == "__main__":
        yield f"the module of {kernel.id}", "one that a process can import", "__main__", "Register it in a module"
    for name in schema.handles:
        if facts[name] != "none" and name in kernel.accepts:
            yield name, "none", facts[name], leave
    for tensor in schema.inputs:
        if tensor.resident and tensor.mutated and tensor.name in facts.tensors:
            yield tensor.name, "a tensor that may be copied", "a cache that stays in place", leave
    for name, fact in facts.tensors.items():
        if fact.negated:
            yield f"{name}.is_neg()", False, True, "Call resolve_neg() before"
    for name in _random(facts):
        yield name, "results that are not random, or a seed", facts[name], leave
    for state in EAGER_STATE.values():
        if facts.get(state.fact, state.neutral) != state.neutral:
            yield state.fact, state.neutral, facts[state.fact], leave
    room, needed = policy["isolation.memory_mb"] * 2**20, moved_bytes(facts)
    if needed > room:
        wanted, got = f"at most {room >> 20} MiB", f"{math.ceil(needed / 2**20)} MiB"
        yield "the call's tensors and results", wanted, got, "Raise isolation.memory_mb"
    unable = SERVICES.unable_to_isolate(kernel, policy)
    if unable is not None:
        yield unable


def _random(facts: Facts) -> Sequence[str]:
    """Arguments that make results random by this process's own generator, which another one does not have."""
    params = facts.operation.schema.params
    drawn = [each.name for each in params if each.random and facts[each.name] != each.neutral]
    seeds = [each.name for each in params if each.seeds]
    unseeded = seeds if seeds and all(facts[name] == "none" for name in seeds) else []
    return [*drawn, *unseeded[:1]]


def cost(kernel: Kernel, policy: Policy, device: Device) -> CallCost:
    """What a call of a kernel takes longer in a process of its own, as far as it is known."""
    name = device_name(device)
    return COSTS.get(cost_key(key(kernel, policy), name), ON_A_GPU if name else BEFORE_MEASURED)


def extra_us(kernels: Sequence[Kernel], facts: Facts, policy: Policy) -> Mapping[str, float]:
    """By id, what a call takes longer for those kernels that run in a process of their own."""
    apart = [each for each in kernels if isolated(each, policy)]
    if not apart:
        return NO_MORE
    moved = moved_bytes(facts)
    return {each.id: cost(each, policy, facts.device).us(moved) for each in apart}


def costing_more(evidence: Mapping[str, Evidence], extra_us: Mapping[str, float]) -> Mapping[str, Evidence]:
    """Evidence of kernels' own times, with costs that have what their processes add."""
    return {
        name: msgspec.structs.replace(each, cost_us=each.cost_us + extra_us[name]) if name in extra_us else each
        for name, each in evidence.items()
    }


def terms_apart(terms: Sequence[Term], found: Evidence | None, extra_us: float, points: float) -> list[Term]:
    """The terms of a kernel, of which one tells what its process costs; ``points`` is what twice the cost loses."""
    if found is None:
        return [*terms, Term("isolation", ISOLATION_POINTS)]
    lost = points * math.log2(found.cost_us / max(found.cost_us - extra_us, 0.1))
    return [Term("cost", terms[0].points + lost), *terms[1:], Term("isolation", -lost)]


def processes() -> list[str]:
    """The processes that libraries run in now, and what they add to a call, a line each."""
    return [
        f"{name[0]}: process {known.pid} of its own, + {known.fixed_us:.0f} us a call and {known.mib_us:.0f} us a MiB"
        f"{known.way}"
        for name, known in COSTS.items()
        if known.pid
    ]


def told(kernel: Kernel, facts: Facts, policy: Policy) -> str:
    """Where an isolated kernel runs, and what that costs a call."""
    known = cost(kernel, policy, facts.device)
    us = known.us(moved_bytes(facts))
    if not known.pid:
        return f"{APART}: about + {us:.0f} us a call"
    return f"{APART}, {known.pid}: + {us:.0f} us a call by what was measured as it began{known.way}"
