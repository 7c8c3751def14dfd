"""Calls of an operation from its cases."""

from __future__ import annotations

import math

import torch

from layerzero.core.operation import Case, Operation


def case_of(operation: Operation, shape: tuple[int, ...]) -> Case | None:
    """A case from the shape of the first tensor; None if the operation cannot have it."""
    if operation.examples is not None:  # one shape does not say it all: only its cases can be built
        return None
    if operation.layouts:
        if len(shape) != 4:
            return None
        batch, seq, heads, head_dim = shape
        if operation.sibling or (seq == 1) != operation.name.endswith("decode"):
            return None
        sizes = {"batch": batch, "seq_q": seq, "seq_k": seq, "heads": heads, "kv_heads": heads}
        return Case("given", sizes | {"head_dim": head_dim, "value_dim": head_dim})
    return Case("given", {"rows": math.prod(shape[:-1]), "hidden": shape[-1]})


def case_tensors(
    operation: Operation, case: Case, dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Random tensors of a case, the required ones and, for norms, weight and bias; in the first of its layouts."""
    if operation.examples is not None:
        return operation.examples(case, dtype, torch.device(device), None)
    sizes = dict(case.sizes) | {"last": case.sizes.get("hidden", 0)}
    tensors = {}
    for schema in operation.schema.inputs:
        if schema.shape_vars and schema.shape_vars[0] == "...":
            shape: tuple[int, ...] = (sizes["rows"], *(sizes[axis] for axis in schema.shape_vars[1:]))
        elif schema.required:
            shape = tuple(sizes[axis] for axis in schema.shape_vars)
        elif schema.name in ("weight", "bias"):
            shape = (sizes["hidden"],)
        else:
            continue
        tensors[schema.name] = torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
    return tensors


def derived(operation: Operation, case: Case) -> dict[str, object]:
    """Parameters that follow from a case's sizes."""
    return {"normalized_shape": (case.sizes["hidden"],)} if "normalized_shape" in operation.schema.chosen else {}
