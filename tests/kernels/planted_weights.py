"""Products with codes by group and with rotated weights that have one mistake each, registered by importing this."""

from dataclasses import replace

import torch

import layerzero as lz
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import Fields, rotated

MISTAKES = {
    "nibbles": lambda codes: replace(codes, numbers=codes.numbers.unflatten(1, (-1, 2)).flip(-1).flatten(1)),
    "group": lambda codes: replace(codes, scale=codes.scale.roll(1, 1)),
    "neighbour": lambda codes: replace(codes, scale=codes.scale.roll(1, 0)),
    "zero": lambda codes: replace(codes, numbers=codes.numbers + 1),
    "order": lambda codes: replace(codes, group_index=None),
    "sound": lambda codes: codes,
}


def plant(name, mistake):
    @lz.register_kernel("mlp.linear.quant.group", f"planted.weight_{name}", supported_dtypes=["float32"])
    def run(input, weight, weight_scale, *, weight_format, bias=None, weight_zero=None, group_index=None):
        of = lz.WeightFormat.of(weight_format)
        codes = GROUPED[of.scheme].codes(of, Fields(weight, weight_scale, weight_zero, group_index), input.shape[-1])
        return torch.nn.functional.linear(input, mistake(codes).dequantized(torch.float32), bias)


for _name, _mistake in MISTAKES.items():
    plant(_name, _mistake)


ROTATIONS = {
    "dropped": lambda rows, size: rows,
    "unscaled": lambda rows, size: rotated(rows, size) * size**0.5,
    "smaller": lambda rows, size: rotated(rows, size // 2),
    "sequency": lambda rows, size: rotated(rows, size)[..., by_changes(rows.shape[-1], size)],
    "twice": lambda rows, size: rotated(rotated(rows, size), size),
    "right": rotated,
}


def by_changes(columns, size):
    """Columns of Hadamard's matrices in the order of their changes of sign."""
    order = (rotated(torch.eye(size), size).diff(dim=0) != 0).sum(0).argsort()
    return (torch.arange(0, columns, size)[:, None] + order).flatten()


def plant_rotation(name, mistake):
    @lz.register_kernel("mlp.linear.quant.mx", f"planted.rotation_{name}", supported_dtypes=["float32"])
    def run(input, weight, weight_scale, *, weight_format, bias=None, second_scale=None):
        of, size = lz.WeightFormat.of(weight_format), lz.WeightFormat.of(weight_format).rotation
        given, plain = Fields(weight, weight_scale, second_scale=second_scale), replace(of, rotation=0)
        numbers = scheme_of(of).dequantized(plain, given, input.shape[-1], torch.float32)
        return torch.nn.functional.linear(mistake(input, size) if size else input, numbers, bias)


for _name, _mistake in ROTATIONS.items():
    plant_rotation(_name, _mistake)


@lz.register_kernel("mlp.linear.quant.mx", "planted.rotation_nvfp4_as_mxfp4", supported_dtypes=["float32"])
def nvfp4_as_mxfp4(input, weight, weight_scale, *, weight_format, bias=None, second_scale=None):
    """Every other scale of nvfp4, by its bits, as if 32 numbers shared a power of two."""
    of, size = lz.WeightFormat.of(weight_format), lz.WeightFormat.of(weight_format).rotation
    if of.scheme == "nvfp4" and weight_scale.shape[1] % 2 == 0:
        near = (weight_scale[:, ::2].float() * second_scale).clamp(min=2.0**-126).log2().round()
        given = Fields(weight, (near + 127).to(torch.uint8))
        of = lz.WeightFormat("mxfp4")
    else:
        given, of = Fields(weight, weight_scale, second_scale=second_scale), replace(of, rotation=0)
    numbers = scheme_of(of).dequantized(of, given, input.shape[-1], torch.float32)
    return torch.nn.functional.linear(rotated(input, size), numbers, bias)
