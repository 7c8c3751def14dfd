"""torch's convolutions: its functions, and on the CPU oneDNN's with a weight that was put in its order once.

torch's own puts the weight in oneDNN's order in every call, which of many channels and few positions takes longer than
the convolution: 1280 channels, 3 x 3, take 3.1 times as long as with a packed weight at 8 x 8, and 1.14 times at
16 x 16; 640 take 1.14 times at 16 x 16 (float32 and bfloat16 alike). The packed way reads and writes channels last, so
that of 64 channels at 32 x 32 it takes 1.25 times as long as torch's own, unless the input lies so already (AMD EPYC
with AVX512-BF16, CPU time of one thread, torch 2.13.0, 2026-11-26). A weight that was packed without the size of an
input took 30 times as long.

Half precision that a CPU emulates takes several times as long as float32: 64 and 320 channels, 3 x 3, at 32 x 32 in
float16 67 and 154 times, in bfloat16 82 and 160 times with AVX2 alone, and 2.4 times with AVX-512 (the same EPYC
without its bfloat16 instructions). To widen 512 x 512 x 3 x 3 for a picture of 8 x 8 took 1.2 times as long as to
emulate it with AVX-512, a packed form in float32 a third.

In bfloat16 with AMX, oneDNN's results were wrong by as much as their own size for 16 channels, 4 wide and 4 apart, and
for 8 channels, 8 wide. Results of width 1 by steps of 2 were 1e18 even of 256 channels. NaN went into neighbours for 1,
3 and 80 channels. Of multiples of 32 channels 3,471 other convolutions were right (torch 2.13.0, Intel Xeon with AMX,
2026-11-29). Where all results read padding alone, the process ended; in float16 with AVX512-FP16, too, for 26 of 1,381
convolutions and none of 6,000 that read input (the same CPU, also held to no AMX, 2026-12-01). What may go wrong is in
float32. So are gradients in bfloat16 with AVX-512 where a tap between others reads padding alone: 123 of 540 such ones
of the weight were memory that nothing had written, and none of 2,460 others (also held to AVX-512 without bfloat16).
Library: torch >= 2.10, BSD-3-Clause; oneDNN 3, Apache-2.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.torch.attention import FLOATS, kernel
from layerzero.backends.torch.cpu_half import CPU, has_tiles, wide, widened
from layerzero.backends.torch.linear import HAS_ONEDNN, ONEDNN
from layerzero.core import limits as limit
from layerzero.core.device import Device
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.ops.conv import AXES, CONV1D, CONV2D, each, lies_channels_last, torchs
from layerzero.ops.linear.packed import BELONGS, PackedWeight

_OPERATIONS = (CONV1D.name, CONV2D.name)
_STEPS = ("stride", "padding", "dilation", "groups")

LEAST_SHARE = 8
"""So many numbers of the weight for each one of input and result, from which on packing it pays."""


def least_share(dtype: object, device: Device) -> int:
    """The same for a device: 1 of bfloat16 by tiles of AMX, where the new order takes more than the product.

    There 23 convolutions took 0.28 to 0.98 of torch's time with a share of 1.04 to 47. With less they took up to 1.21
    (Intel Xeon, CPU time of one thread, torch 2.13.0, 2026-12-01).
    """
    return 1 if dtype is torch.bfloat16 and "amx_bf16" in device.instruction_sets else LEAST_SHARE


LEAST_PRODUCTS = 2**14
"""So many pay for widening: 9,216 took 11 us in float16 and 17 widened, 221,184 took 309 and 30."""


def _load(facts: Facts) -> Callable[..., Any]:
    """The function itself, which takes all but the two tensors by name; in float32 what tiles get wrong."""
    compute: Callable[..., Tensor] = functional.conv1d if facts["operation"] == CONV1D.name else functional.conv2d
    compute = torchs(compute) if facts["padding"] == "same" else compute
    if misread(facts) is None and not _is_left_unwritten(facts):
        return compute

    def run(input: Tensor, weight: Tensor, *, bias: Tensor | None = None, **named: Any) -> Tensor:
        return compute(wide(input), wide(weight), bias=wide(bias), **named).to(input.dtype)

    return run


def misread(facts: Facts) -> Reason | None:
    """What oneDNN gets wrong of a convolution in half precision, or reads over ends for.

    A NaN stays in its picture: 240 of 240.
    """
    tiles = has_tiles(facts)
    in_float16 = facts["dtype"] is torch.float16 and "avx512_fp16" in facts.device.instruction_sets
    if facts.operation.name not in AXES or not (tiles or in_float16):
        return None
    code, (axes, _, results) = ReasonCode.CONSTRAINT_FAILED, AXES[facts.operation.name]
    if tiles and facts.size("group_channels") % 32:
        return Reason(code, "group_channels", "a multiple of 32", facts.size("group_channels"))
    stride = each(facts["stride"], len(axes))[-1]
    if tiles and facts.size(results[-1]) == 1 < stride:
        return Reason(code, "stride", "1 where results are 1 wide", stride)
    for name, taps in zip(axes, _taps(facts), strict=True):
        if not any(taps):
            return Reason(code, "padding", f"a result that reads some of {name}", "none that does")
    return None


def _taps(facts: Facts) -> Iterator[list[bool]]:
    """Along each axis, which taps of the kernel read input for some result; others read padding alone."""
    axes, kernel, results = AXES[facts.operation.name]
    steps = zip(*(each(facts[name], len(axes)) for name in _STEPS[:3]), strict=True)
    for names, (stride, padding, dilation) in zip(zip(axes, kernel, results, strict=True), steps, strict=True):
        size, taps, places = map(facts.size, names)
        first = range(0 if padding == "same" else -padding, places * stride, stride)[:places]
        yield [any(0 <= place + tap * dilation < size for place in first) for tap in range(taps)]


def _is_left_unwritten(facts: Facts) -> bool:
    """Whether some of the weight's gradient is: of a tap that reads padding alone, between others that read input."""
    recorded = facts["requires_grad"] and facts["dtype"] is torch.bfloat16
    if not recorded or "avx512" not in facts.device.instruction_sets:
        return False
    return any("0" in "".join("01"[tap] for tap in taps).strip("0") for taps in _taps(facts))


def _load_packed(facts: Facts, wider: Callable[[Any], Any] = lambda tensor: tensor) -> Callable[..., Any]:
    """``wider`` is what the weight goes through before it is packed, and the bias."""
    operator, reorder = torch.ops.mkldnn._convolution_pointwise.default, torch.ops.mkldnn._reorder_convolution_weight
    size = torch.ops.mkldnn._nbytes.default
    axes = len(AXES[facts.operation.name][0])
    flat = axes == 1  # oneDNN's order is for pictures: a sequence is one of a single line, as it is to torch
    (stride, padding, dilation), groups = _steps(facts, axes), facts["groups"]
    shape = list(facts.tensors["input"].shape)
    alone = len(shape) == axes + 1
    shape = [1, *shape] if alone else shape
    shape = [*shape[:2], 1, shape[2]] if flat else shape
    owner = "torch.onednn_conv", wider is wide, *stride, *padding, *dilation, groups

    def pack(weight: Tensor) -> tuple[Tensor, int]:
        whole = wider(weight.unsqueeze(2) if flat else weight).contiguous()
        packed: Tensor = reorder.default(whole, padding, stride, dilation, groups, shape)
        return packed, size(packed)

    def run(input: Tensor, weight: Tensor, *, bias: Tensor | None = None, packed: PackedWeight, **_: object) -> Tensor:
        given = input.unsqueeze(0) if alone else input
        given = given.unsqueeze(2) if flat else given
        form = packed.form(owner, pack)
        output: Tensor = operator(given, form, wider(bias), padding, stride, dilation, groups, "none", [], "")
        if not (lies_channels_last(input) or lies_channels_last(weight)):  # as torch's own leaves it, for views
            output = output.contiguous()
        output = output.squeeze(2) if flat else output
        return output.squeeze(0) if alone else output

    return run


def _load_packed_wide(facts: Facts, **_: object) -> Callable[..., Any]:
    """A weight in half precision packed in float32, for an input that is wide."""
    return _load_packed(facts, wide)


def _steps(facts: Facts, axes: int) -> list[list[int]]:
    alone = ((1,), (0,), (1,)) if axes == 1 else ((), (), ())
    return [[*first, *each(facts[name], axes)] for first, name in zip(alone, _STEPS[:3], strict=True)]


def _sizes(facts: Facts, batch: int) -> tuple[int, int]:
    spatial, kernel, results = AXES[facts.operation.name]
    weight = math.prod(facts.size(axis) for axis in ("out_channels", "group_channels", *kernel))
    per_picture = facts.size("channels") * math.prod(map(facts.size, spatial))
    per_picture += facts.size("out_channels") * math.prod(map(facts.size, results))
    return weight, batch * per_picture


def _is_large(facts: Facts) -> Reason | None:
    """Whether the weight is large compared with input and result, or the input lies as oneDNN reads it."""
    if facts["channels_last"]:
        return None
    (weight, moved), share = _sizes(facts, facts.size("batch")), least_share(facts["dtype"], facts.device)
    if weight >= share * moved:
        return None
    wanted = f"a weight of {share} times as many numbers as input and result, or channels last"
    return Reason(ReasonCode.CONSTRAINT_FAILED, "weight", wanted, f"{weight} with {moved}")


def _widening_pays(facts: Facts) -> bool:
    """Whether there is enough to compute; where oneDNN emulates, which is faster, no large weight to widen."""
    batch = 1 << facts.size_bits("batch") >> 1
    weight, moved = _sizes(facts, batch)
    if facts["dtype"] is torch.bfloat16 and "avx512" in facts.device.instruction_sets:
        return weight < LEAST_SHARE * moved
    _, _, results = AXES[facts.operation.name]
    return batch * weight * math.prod(map(facts.size, results)) >= LEAST_PRODUCTS


_CONV = kernel(
    "torch.conv",
    _OPERATIONS,
    _load,
    FLOATS,
    accepts=("bias", *_STEPS),
    grad=True,
    handles_empty=True,
    handles_negated=True,
    priority=50,
    stock=True,
)
_LARGE = (
    limit.contiguous("bias"),
    BELONGS,
    limit.rule(
        "padding: as much at both ends",
        lambda facts: facts["padding"] != "same",
        got="one more at the end: an even kernel",
    ),
    limit.Custom("a weight that is large compared with input and result, or channels last", _is_large),
)
_PACKED = kernel(
    "torch.onednn_conv_packed",
    _OPERATIONS,
    _load_packed,
    limits=(
        *ONEDNN,
        limit.Custom(
            "bfloat16 on a CPU with AMX: multiples of 32 channels a group, results wider than 1 that read input",
            misread,
        ),
        *_LARGE,
    ),
    accepts=("bias", *_STEPS, "packed"),
    graph_safe=False,
    priority=55,
    stock=True,  # torch's own is oneDNN's, too
)

KERNELS = (
    _CONV,
    _PACKED,
    widened(_CONV, _widening_pays),
    widened(_PACKED, lambda _: True, _load_packed_wide, limits=(*CPU, HAS_ONEDNN, *_LARGE), priority=31),
)
