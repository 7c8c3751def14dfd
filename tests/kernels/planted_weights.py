"""Products with codes by group that have one mistake each, registered by importing this module."""

from dataclasses import replace

import torch

import layerzero as lz
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.weight_format import Fields

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
