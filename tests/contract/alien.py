"""An operation that nothing in LayerZero knows: invented names, two results, an index, a passed scalar, a handle.

Registered as a third party does it, by public names alone; children import this module to know it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import layerzero as lz

C = lz.ReasonCode
INDEX = frozenset({torch.int32, torch.int64})
FLOATING = frozenset({torch.float64, torch.float32, torch.bfloat16})


class Crest(lz.Handle):
    """Keeps what a kernel makes of a pool once: here its negation."""

    def __init__(self, bar: Tensor) -> None:
        super().__init__((bar,), "crested")


class Negated:
    def __init__(self, crest: Crest) -> None:
        (self.bar,) = crest._tensors
        self.update(crest)

    def update(self, handle: Crest) -> None:
        self.values = -self.bar


def reference(foo, bar, pick, *, sharp=False, tilt=None):
    """``foo * (1 + tilt) ± bar[pick]`` and the largest magnitude of each row."""
    wide = torch.promote_types(foo.dtype, torch.float32)
    taken = bar.to(wide)[pick.long()]
    mixed = foo.to(wide) * (1.0 + (tilt or 0.0)) + (-taken if sharp else taken)
    return mixed.to(foo.dtype), mixed.abs().amax(-1).float()


def fake(foo, bar, pick, **_):
    return torch.empty_like(foo, memory_format=torch.contiguous_format), foo.new_empty(pick.shape, dtype=torch.float32)


BLEND = lz.Operation(
    schema=lz.OperationSchema(
        "zork.blend",
        inputs=(
            lz.TensorSchema("foo", ("...", "qux"), FLOATING),
            lz.TensorSchema("bar", ("pool", "qux"), FLOATING),
            lz.TensorSchema("pick", ("...",), INDEX, same_dtype=False, indexes=("pool",)),
        ),
        outputs=(
            lz.TensorSchema("mixed", ("...", "qux")),
            lz.TensorSchema("peak", ("...",), frozenset({torch.float32})),
        ),
        params=(
            lz.Param("sharp", bool, False, example=True),
            lz.Param("tilt", float, None, lz.Role.PASSED, least=-4.0, most=4.0, example=0.75),
            lz.Param("crest", Crest, None, lz.Role.HANDLE, made_of=("bar",), make=lambda given, _: Crest(given["bar"])),
        ),
        axes=(
            lz.Axis("blips", scales=True, live=True, apart=True, leading=True),
            lz.Axis("pool", scales=True, codes=lz.SizeCodes(too_large=C.SEQ_TOO_LONG)),
            lz.Axis("qux", codes=lz.SizeCodes(C.HEAD_DIM_INVALID, uneven=C.HEAD_DIM_ALIGNMENT)),
        ),
    ),
    summary="Blend rows with picked ones of a pool",
    reference=reference,
    fake=fake,
    cases=(
        lz.Case("tiny", {"blips": 3, "qux": 16, "pool": 5}),
        lz.Case("some", {"blips": 33, "qux": 64, "pool": 7}, {"sharp": True}),
    ),
    tolerance={
        torch.float64: lz.Tolerance(1e-6, 1e-6),
        torch.float32: lz.Tolerance(1e-5, 1e-5),
        torch.bfloat16: lz.Tolerance(2e-2, 2e-2),
    },
    tolerance_reason="one product and one sum",
    derive=lambda arguments, values: {"blips": arguments["pick"].numel()},
    derived=("blips",),
    derived_from={"blips": ("...",)},
)  # fmt: skip


def zork_blend(
    foo: Tensor,
    bar: Tensor,
    pick: Tensor,
    *,
    sharp: bool = False,
    tilt: float | None = None,
    crest: Crest | None = None,
) -> tuple[Tensor, Tensor]:
    """Blend rows of foo with the rows of bar that pick names.

    Shapes: foo (*, Q), bar (P, Q), pick (*) → (*, Q), (*)
    """


def route(arguments, default_layout):
    problems = BLEND.schema.validate(**arguments)
    if not problems and arguments["foo"].shape[:-1] != arguments["pick"].shape:
        problems.append(
            f"pick: wanted shape {tuple(arguments['foo'].shape[:-1])}, got {tuple(arguments['pick'].shape)}"
        )
    if not problems and arguments["crest"] is not None:
        kind = arguments["crest"].kind_for(arguments["bar"])
        problems += [] if kind == "crested" else [f"crest: wanted that of this bar, got a {kind} one"]
    if problems:
        raise lz.InvalidCallError("zork_blend", problems)
    from layerzero.core.operation import Routed

    return Routed(BLEND, arguments, varies=("...",))


lz.register_operation(BLEND)
FUNCTION = lz.Function("zork_blend", zork_blend, route, (BLEND,))
blend = lz.register_function(FUNCTION)
RAN: list[str] = []


@lz.register_kernel("zork.blend", kernel_id="mine.blend", priority=60)
def fast_blend(foo, bar, pick, *, sharp, tilt=None, crest=None):
    RAN.append("mine.blend" if crest is None else "mine.blend with a crest")
    taken = bar[pick.long()]
    if sharp:
        taken = -taken if crest is None else crest.slot("mine.blend", Negated).values[pick.long()]
    wide = torch.promote_types(foo.dtype, torch.float32)
    mixed = foo.to(wide) * (1.0 + (tilt or 0.0)) + taken.to(wide)
    return mixed.to(foo.dtype), mixed.abs().amax(-1).float()
