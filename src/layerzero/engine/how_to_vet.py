"""The command that lets a kernel prove itself for the sizes of one call."""

from __future__ import annotations

from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import home_of

_SHORT_NDIM = 4
"""A class holds the number of axes as a power of two; a command's shapes make inputs with fewer than these."""


def how_to_vet(kernel: Kernel, facts: Facts) -> str:
    """What to type, for a reason's hint. Calls whose class no shapes can say are vetted from a recorded workload."""
    dtype: object = facts["dtype"]
    shapes = _shapes(facts)
    words = ["layerzero vet", f"--kernel {kernel.id}", f"--operation {facts.operation.name}"]
    words += [f"--shapes {shapes}", f"--dtype {dtype_name(dtype)}"] if shapes else ["--manifest FILE"]  # type: ignore[arg-type]
    words += ["--device cpu"] if facts.device.platform == "cpu" else []
    home = home_of(kernel)
    if kernel.backend.origin != "entry_point" and not home.startswith("layerzero."):
        words.append(f"--module {home}")
    origin = "or lz.warmup with these shapes" if shapes else "with a workload that lz.record wrote"
    return f"Vet it for these sizes: `{' '.join(words)}`, {origin}"


def _shapes(facts: Facts) -> str:
    """The call's shapes as the command takes them; empty where they would make a call of another class."""
    sizes, operation = facts.sizes(), facts.operation
    if operation.examples is not None:
        return ""
    if "rows" in sizes:
        plain = 1 < sizes["input_ndim"] < _SHORT_NDIM and sizes.get("last", sizes["hidden"]) == sizes["hidden"]
        return f"{sizes['rows']}x{sizes['hidden']}" if plain else ""
    if sizes["mask_ndim"] or sizes["value_dim"] != sizes["head_dim"]:
        return ""
    query, key = ["x".join(str(sizes[axis]) for axis in each.shape_vars) for each in operation.schema.inputs[:2]]
    return query if query == key else f"{query}:{key}"
