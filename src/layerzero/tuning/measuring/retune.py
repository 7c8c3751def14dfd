"""Which command measures a call anew: one whose jobs have the work of that call, or else a recording of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerzero.core.dtypes import dtype_name
from layerzero.core.evidence import call_work
from layerzero.core.facts import Facts
from layerzero.ops import OPERATION_ALIASES
from layerzero.tuning.measuring.jobs import Job, jobs_of_cases, jobs_of_shape

RECORDED = '`with lz.record("calls.json"): …` around it, then `layerzero tune --manifest calls.json --again`'


def command_for(facts: Facts) -> str:
    """What to run so that this call, and nothing else's evidence in its place, is measured again."""
    wanted, device = call_work(facts), facts.device.torch_type
    for words, jobs in _ways(facts):
        if any(call_work(job.facts(device)) == wanted for job in jobs):
            line = f"layerzero tune {words} --dtype {dtype_name(facts['dtype'])}"  # type: ignore[arg-type]
            if facts.layout not in (None, *facts.operation.layouts[:1]):
                line += f" --layout {facts.layout}"
            if device == "cpu" and torch.cuda.is_available():
                line += " --device cpu"
            line += " --graph" if facts["capturing"] else ""
            return f"`{line} --again`"
    return RECORDED


def _ways(facts: Facts) -> Iterator[tuple[str, list[Job]]]:
    """Arguments of the command that may mean the call, with the jobs of its operation that they stand for."""
    operation, dtype = facts.operation, dtype_name(facts["dtype"])  # type: ignore[arg-type]
    shapes = [each.shape for each in facts.tensors.values()]
    aliases = [(name, implied) for name, (names, implied) in OPERATION_ALIASES.items() if operation.name in names]
    for name, implied in [(operation.name, {}), *aliases]:
        for count in (1, 2):
            text = ":".join("x".join(map(str, each)) for each in shapes[:count])
            try:
                jobs = jobs_of_shape([operation.name], shapes[:count], dtype, implied, facts.layout)
            except ValueError:  # calls that no shape says
                continue
            yield f"{name} --shapes {text}", jobs
    yield f"{operation.name} --cases", list(jobs_of_cases([operation.name], [dtype], facts.layout))
