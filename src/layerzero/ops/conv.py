"""Convolutions: conv.conv1d and conv.conv2d, as torch's functions of these names.

In a call, what is equal along both axes is one number, and padding is numbers wherever both ends get the same: kernels
see ``'same'`` only where the kernel is of even length, and the end gets one zero more than the beginning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, told
from layerzero.core.operation import Case, Operation, Random, Work
from layerzero.ops.declaration import cases, function, operation, tensor, wide
from layerzero.ops.draw import Draw
from layerzero.ops.linear.declare import TOLERANCE, TOLERANCE_REASON, deviation, judged_by_products
from layerzero.ops.linear.packed import PackedWeight, packed_param, packed_problems


def torchs(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of torch's functions with the arguments of ours.

    An even kernel's padding is written out as torch's function does it, which would warn that it has to.
    """

    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        **_: object,  # a packed weight changes no result
    ) -> Tensor:
        if padding == "same":
            axes = weight.ndim - 2
            ends = zip(each(dilation, axes), weight.shape[2:], strict=True)
            both = [(step * (size - 1) // 2, (step * (size - 1) + 1) // 2) for step, size in ends]
            input, padding = functional.pad(input, [end for pair in reversed(both) for end in pair]), 0
        return compute(input, weight, bias, stride, padding, dilation, groups)

    return run


def _wide(compute: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Any, *steps: object) -> Tensor:
    dtype = wide(input.dtype)
    wider = None if bias is None else bias.to(dtype)
    return torchs(compute)(input.to(dtype), weight.to(dtype), wider, *steps).to(input.dtype)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    packed: PackedWeight | None = None,
) -> Tensor:
    """Convolve sequences with a weight, as ``torch.nn.functional.conv1d``.

    Shapes: input (N, C, L) or (C, L), weight (O, C / groups, K), bias (O,) → (N, O, L') or (O, L')
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Units: stride, padding and dilation in positions.
    Args:
        padding: zeros at both ends, ``"valid"`` for none, or ``"same"`` for as many results as positions.
        groups: parts of the channels that are convolved apart; ``groups == C`` is depthwise.
        packed: the :class:`layerzero.PackedWeight` of this weight, as of :func:`layerzero.linear`.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for groups that do not divide the channels,
        for a stride or dilation below 1, a negative padding, and a kernel longer than the padded input.
    """
    return _wide(functional.conv1d, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    packed: PackedWeight | None = None,
) -> Tensor:
    """Convolve pictures with a weight, as ``torch.nn.functional.conv2d``.

    Shapes: input (N, C, H, W) or (C, H, W), weight (O, C / groups, K_h, K_w), bias (O,) → (N, O, H', W') or (O, H', W')
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Units: stride, padding and dilation in positions, one number or (of height, of width).
    Args:
        padding: zeros at both ends of each axis, ``"valid"`` for none, or ``"same"`` for as many results as positions.
        groups: parts of the channels that are convolved apart; ``groups == C`` is depthwise.
        packed: the :class:`layerzero.PackedWeight` of this weight, as of :func:`layerzero.linear`.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for groups that do not divide the channels,
        for a stride or dilation below 1, a negative padding, and a kernel larger than the padded input.
    """
    return _wide(functional.conv2d, input, weight, bias, stride, padding, dilation, groups)


def each(value: Any, axes: int) -> tuple[Any, ...]:
    """A stride, padding or dilation of each axis."""
    return tuple(value) * (axes if len(value) == 1 else 1) if isinstance(value, (tuple, list)) else (value,) * axes


def _value_problems(axes: int, arguments: dict[str, Any]) -> list[str]:
    found = []
    for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = arguments[name]
        if type(value) not in (int, tuple, str) or (name == "padding" and value in ("same", "valid")):
            continue  # the schema says what is wrong, or nothing is
        numbers = value if isinstance(value, tuple) else (value,)
        fits = len(numbers) in {1, axes}
        if not fits or not all(type(number) is int and least <= number < 2**31 for number in numbers):
            form = f" or {axes} of them" if axes > 1 else ""
            words = ", 'same' or 'valid'" if name == "padding" else ""
            found.append(f"{name}: wanted a whole number from {least}{form}{words}, got {told(value)}")
    if type(arguments["groups"]) is int and arguments["groups"] < 1:
        found.append(f"groups: wanted a whole number from 1, got {told(arguments['groups'])}")
    stride = arguments["stride"]
    same = arguments["padding"] == "same" and isinstance(stride, (int, tuple, list))
    if same and not found and any(number != 1 for number in each(stride, axes)):
        found.append(f"stride: wanted 1 with padding='same', got {told(stride)}")
    return found + packed_problems(arguments)


def padded(arguments: Mapping[str, Any], spatial: tuple[int, ...]) -> list[int]:
    """How many zeros each axis gets at both ends together; ``spatial`` are the kernel's sizes."""
    axes, padding = len(spatial), arguments["padding"]
    if padding == "same":
        dilation = each(arguments["dilation"], axes)
        return [step * (size - 1) for step, size in zip(dilation, spatial, strict=True)]
    return [0] * axes if padding == "valid" else [2 * number for number in each(padding, axes)]


def _lengths(arguments: Mapping[str, Any], axes: int) -> list[int]:
    spatial = tuple(arguments["weight"].shape[2:])
    steps, strides = each(arguments["dilation"], axes), each(arguments["stride"], axes)
    sizes = zip(arguments["input"].shape[-axes:], padded(arguments, spatial), steps, strides, spatial, strict=True)
    return [(size + more - step * (kernel - 1) - 1) // stride + 1 for size, more, step, stride, kernel in sizes]


def _with_tuples(made: Operation, arguments: dict[str, Any]) -> Operation:
    """The operation of a call; lists, which torch takes as well, are tuples from here on."""
    arguments |= {name: tuple(value) for name, value in arguments.items() if isinstance(value, list)}
    return made


def _fit_problems(axes: int, arguments: dict[str, Any]) -> list[str]:
    shape, weight, groups = tuple(arguments["input"].shape), tuple(arguments["weight"].shape), arguments["groups"]
    found = []
    if len(shape) > axes + 2:
        found.append(f"input: wanted {axes + 1} or {axes + 2} axes, got shape {shape}")
    if weight[1] * groups != shape[-axes - 1]:
        wanted = f"{weight[1]} x {groups} channels, as weight {weight} and groups={groups} have"
        found.append(f"input: wanted {wanted}, got {shape[-axes - 1]} in shape {shape}")
    if weight[0] % groups:
        found.append(f"groups: wanted a divisor of the weight's {weight[0]} outputs, got {groups}")
    if 0 in weight or 0 in shape[-axes - 1 :]:
        found.append(f"input, weight: wanted channels and positions, got shapes {shape} and {weight}")
    if not found and min(_lengths(arguments, axes)) < 1:
        more = padded(arguments, weight[2:])
        room = tuple(size + extra for size, extra in zip(shape[-axes:], more, strict=True))
        steps = each(arguments["dilation"], axes)
        got = tuple(step * (size - 1) + 1 for step, size in zip(steps, weight[2:], strict=True))
        found.append(f"weight: wanted a kernel within the padded input {room}, got {got}, dilation included")
    return found


def _canonical(axes: int, arguments: dict[str, Any]) -> None:
    ends = padded(arguments, tuple(arguments["weight"].shape[2:]))
    if arguments["padding"] != "same" or not any(number % 2 for number in ends):
        arguments["padding"] = tuple(number // 2 for number in ends)
    for name in ("stride", "padding", "dilation"):
        values = each(arguments[name], axes)
        arguments[name] = values[0] if len(set(values)) == 1 else values


def lies_channels_last(tensor: Tensor) -> bool:
    """Whether a picture lies with its channels last, and not in the usual order as well."""
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


AXES: dict[str, tuple[tuple[str, ...], ...]] = {}
"""By operation, the names of the axes of the input, the kernel and the result that are no channels."""


def _operation(reference: Callable[..., Tensor], spatial: tuple[str, ...], rows: dict[str, Any]) -> Operation:
    axes, name = len(spatial), reference.__name__
    kernel, results = (tuple(axis.replace("in_", before) for axis in spatial) for before in ("kernel_", "out_"))
    AXES[f"conv.{name}"] = spatial, kernel, results

    def derive(arguments: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, object]:
        lengths = dict(zip(results, _lengths(arguments, axes), strict=True))
        depthwise = arguments["groups"] == sizes["channels"] == sizes["out_channels"]
        return {**lengths, "depthwise": depthwise, "channels_last": lies_channels_last(arguments["input"])}

    def work(facts: Mapping[str, Any]) -> Work:
        """A multiplication and an addition for each result and number of a filter; every tensor once."""
        outputs = facts["batch"] * facts["out_channels"] * math.prod(facts[axis] for axis in results)
        filter_ = facts["group_channels"] * math.prod(facts[axis] for axis in kernel)
        inputs = facts["batch"] * facts["channels"] * math.prod(facts[axis] for axis in spatial)
        moved = inputs + facts["out_channels"] * filter_ + outputs
        return Work(2.0 * outputs * filter_, float(moved * facts["dtype"].itemsize))

    def weight(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
        shape = tuple(case.sizes[axis] for axis in ("out_channels", "group_channels", *kernel))
        where = device if generator is None else generator.device
        made = torch.randn(shape, generator=generator, device=where, dtype=torch.float32)
        return {"weight": made.mul_(deviation(math.prod(shape[1:]))).to(device, dtype)}

    columns = ("batch", "channels", *spatial, "out_channels", "group_channels", *kernel)
    return operation(
        f"conv.{name}",
        f"Convolution of {'sequences' if axes == 1 else 'pictures'} with a weight, in groups, with bias",
        reference,
        inputs=(
            tensor(f"input: ... channels {' '.join(spatial)}"),
            tensor(f"weight: out_channels group_channels {' '.join(kernel)}", resident=True),
            tensor("bias: out_channels", required=False),
        ),
        outputs=(f"output: ... out_channels {' '.join(results)}",),
        params=(
            Param("stride", (int, tuple), 1, example=2),
            Param("padding", (int, tuple, str), 0, example=1),
            Param("dilation", (int, tuple), 1, example=2),
            Param("groups", int, 1),
            packed_param(),
        ),
        axes=(
            Axis("batch", scales=True, live=True, apart=True, leading=True),
            *(Axis(axis, scales=True) for axis in (*spatial, "channels", "out_channels", "group_channels", *results)),
        ),
        cases=tuple(
            cases(" ".join(columns), {label: sizes}, params, given)[0] for label, (sizes, params, given) in rows.items()
        ),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        judge=judged_by_products(reference, TOLERANCE, TOLERANCE_REASON),
        derive=derive,
        derived_from={
            **dict.fromkeys(results, (*spatial, *kernel)),
            "depthwise": ("channels", "out_channels"),
            "channels_last": ("channels", *spatial),
        },
        examples=weight,
        work=work,
        expression=torchs(getattr(functional, name)),
    )


_BIAS = ("bias",)
CONV1D = _operation(
    conv1d,
    ("in_length",),
    {
        "small": ((2, 6, 33, 8, 3, 3), {"padding": 1, "groups": 2}, _BIAS),
        "small_strided": ((2, 6, 33, 8, 6, 5), {"stride": 2, "dilation": 2}, ()),
        "whisper_base_stem": ((1, 80, 3000, 512, 80, 3), {"padding": 1}, _BIAS),
        "wav2vec2_layer": ((1, 512, 799, 512, 512, 3), {"stride": 2}, ()),
    },
)
CONV2D = _operation(
    conv2d,
    ("in_height", "in_width"),
    {
        "small": ((2, 6, 9, 12, 8, 3, 3, 3), {"padding": 1, "groups": 2}, _BIAS),
        "small_strided": ((2, 6, 17, 12, 8, 6, 5, 3), {"stride": (2, 1), "dilation": (1, 2)}, ()),
        "vit_b16_patches": ((1, 3, 224, 224, 768, 3, 16, 16), {"stride": 16}, _BIAS),
        "unet_first": ((1, 4, 64, 64, 320, 4, 3, 3), {"padding": 1}, _BIAS),
        "unet_wide": ((1, 320, 16, 16, 320, 320, 3, 3), {"padding": 1}, _BIAS),
        "unet_deep": ((1, 640, 8, 8, 640, 640, 3, 3), {"padding": 1}, _BIAS),
        "depthwise": ((1, 128, 28, 28, 128, 1, 3, 3), {"padding": 1, "groups": 128}, _BIAS),
    },
)


def _draw(axes: int, draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: groups, depthwise, even kernels, steps of one axis alone; with and without a batch."""
    groups = draw.of((1, 2, 3, 8), (6, 2, 1, 1))
    channels, outputs = (groups * draw.of((1, 2, 5, 16, 48)) for _ in range(2))
    kernel = tuple(draw.of((1, 2, 3, 4, 7)) for _ in range(axes))
    dilation = draw.of((1, 1, 2, tuple(range(1, axes + 1))))
    reach = [step * (size - 1) for size, step in zip(kernel, each(dilation, axes), strict=True)]
    spatial = [draw.of((1, 2, 7, 16)) + more for more in reach]
    shape = (*draw.of(((), (1,), (3,), (0,)), (20, 40, 40, 1)), channels, *spatial)
    weight = draw.normal((outputs, channels // groups, *kernel), torch.float32)
    weight = weight.mul_(deviation(weight[0].numel())).to(dtype)
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal(shape, dtype)),
        "weight": draw.laid_out(weight, expand=False),
        "groups": groups,
        "dilation": dilation,
        "padding": draw.of(("same", "valid", 0, 1, tuple(range(axes)))),
    }
    if arguments["padding"] != "same" and draw.chance(0.5):
        arguments["stride"] = draw.of((2, 3, tuple(range(1, axes + 1))))
    arguments |= draw.maybe(0.6, bias=lambda: draw.laid_out(draw.normal((outputs,), dtype)))
    draw.poison(arguments, ("input",))
    arguments |= draw.maybe(0.4, packed=lambda: PackedWeight(arguments["weight"]))
    return arguments


OPERATIONS = (CONV1D, CONV2D)
FUNCTIONS = tuple(
    function(
        *(made.reference.__name__, made),
        choose=functools.partial(_with_tuples, made),
        values=functools.partial(_value_problems, axes),
        fits=functools.partial(_fit_problems, axes),
        canonical=functools.partial(_canonical, axes),
        draw=functools.partial(_draw, axes),
        weight=1,
    )
    for axes, made in ((1, CONV1D), (2, CONV2D))
)
