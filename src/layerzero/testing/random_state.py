"""Random numbers of checks: from a state of their own, so that a check is the same again and a caller's is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from layerzero.core.distribution import Distribution
from layerzero.core.operation import Operation, OpKind


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
