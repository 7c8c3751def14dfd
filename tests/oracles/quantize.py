"""Numbers in narrow formats, by lists of all the numbers that a format has: the nearest one, of two the even one."""

from __future__ import annotations

import numpy as np


def _grid(exponent_bits, mantissa_bits, bias, largest):
    """The numbers from 0 on of a floating format, by their codes."""
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        lead = 1.0 if exponent else 0.0
        found.append((lead + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    return np.array([each for each in found if each <= largest])


GRIDS = {"fp8_e4m3": _grid(4, 3, 7, 448.0), "fp8_e5m2": _grid(5, 2, 15, 57344.0), "fp4": _grid(2, 1, 1, 6.0)}
GRIDS |= {"mxfp6_e2m3": _grid(2, 3, 1, 7.5), "mxfp6_e3m2": _grid(3, 2, 3, 28.0)}


def _codes(numbers, grid):
    """Places of the nearest numbers in a grid; between two it is the even place."""
    size = np.minimum(np.nan_to_num(np.abs(numbers), nan=0.0, posinf=grid[-1]), grid[-1])
    above = np.minimum(np.searchsorted(grid, size), len(grid) - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = grid[above] - size, size - grid[below]
    even = np.where(above % 2 == 0, above, below)
    return np.where(to_above == to_below, even, np.where(to_above < to_below, above, below))


def nearest(numbers, name):
    if name == "int8":
        return np.clip(np.rint(np.nan_to_num(numbers, nan=0.0)), -128, 127).astype(np.int8)
    grid = GRIDS[name]
    return np.where(np.isnan(numbers), np.nan, np.copysign(grid[_codes(numbers, grid)], numbers))


def bytes_of(numbers):
    codes = _codes(numbers, GRIDS["fp4"]) + 8 * (numbers < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def numbers_of(narrow):
    grid = np.concatenate((GRIDS["fp4"], -GRIDS["fp4"]))
    return grid[np.stack((narrow % 16, narrow // 16), -1).reshape(*narrow.shape[:-1], 2 * narrow.shape[-1])]


def six_bits(numbers, name):
    """Bytes of a stream of bits, the lowest first."""
    codes = _codes(numbers, GRIDS[name]) + 32 * (numbers < 0)
    bits = (codes[..., None] >> np.arange(6) & 1).reshape(*codes.shape[:-1], -1, 8)
    return (bits << np.arange(8)).sum(-1).astype(np.uint8)


def of_six_bits(narrow, name):
    grid = np.concatenate((GRIDS[name], -GRIDS[name]))
    bits = (narrow[..., None] >> np.arange(8) & 1).reshape(*narrow.shape[:-1], -1, 6)
    return grid[(bits << np.arange(6)).sum(-1)]


def _repeated(scale, shape):
    """A scale for every number: of the tensor, the row, the column or the block that it lies in."""
    if scale.ndim == len(shape) and scale.ndim and scale.shape[-1] not in (1, shape[-1]):
        return np.repeat(scale, shape[-1] // scale.shape[-1], -1)
    return np.broadcast_to(scale, shape)


def computed(x, name, per="tensor", block_size=None):
    size = np.where(np.isnan(x), 0.0, np.abs(x))
    if per == "tensor":
        most = size.max(initial=0.0)
    else:
        length = block_size or x.shape[-1]
        most = size.reshape(*x.shape[:-1], x.shape[-1] // length, length).max(-1)
    largest = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[name]
    scale = np.asarray(most / largest, np.float32)
    if name == "int8":
        return np.where(scale == 0, np.float32(1), scale)
    return np.maximum(scale, np.float32(1 / (512 * largest)))


def _scaled(c, name):
    x, scale = c["input"], c.get("scale")
    scale = computed(x, name, c["per"], c["block_size"]) if scale is None else scale
    return nearest(x / _repeated(np.float64(scale), x.shape), name), scale


def _blocks(x, size):
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return blocks, np.abs(blocks).max(-1)


def _mx(c, name):
    blocks, most = _blocks(c["input"], 32)
    exponent = np.floor(np.log2(np.where((most > 0) & np.isfinite(most), most, 1.0)))
    exponent = exponent - {"mxfp8_e4m3": 8, "mxfp8_e5m2": 15, "mxfp4": 2, "mxfp6_e2m3": 2, "mxfp6_e3m2": 4}[name]
    scale = 2.0 ** np.clip(np.where(most > 0, exponent, -127), -127, 127)
    scale = np.where(np.isfinite(most), scale, np.nan)
    quotients = (blocks / scale[..., None]).reshape(c["input"].shape)
    if name.startswith("mxfp6"):
        return six_bits(quotients, name), scale
    return (bytes_of(quotients) if name == "mxfp4" else nearest(quotients, name[2:])), scale


def _nv(c):
    blocks, most = _blocks(c["input"], 16)
    whole = c.get("tensor_scale")
    whole = np.float32(1) if whole is None else np.float32(whole).reshape(())
    made = most.astype(np.float32) * np.float32(1 / 6) / whole
    scale = np.where(np.isfinite(most), nearest(np.float64(made), "fp8_e4m3"), np.nan)
    divisor = scale * np.float64(whole)
    divisor[divisor == 0] = np.inf
    return bytes_of((blocks / divisor[..., None]).reshape(c["input"].shape)), scale


def _back(c, name):
    narrow, scale = c["quantized"], c["scale"]
    x = of_six_bits(narrow, name) if name.startswith("mxfp6") else narrow
    x = numbers_of(narrow) if name.endswith("fp4") else np.float64(x)
    whole = c.get("tensor_scale")
    factor = scale if whole is None else scale * whole.reshape(())
    return (x * _repeated(factor, x.shape),)


_NAMES = ("int8", "fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4")


def _of(name):
    if name == "nvfp4":
        return _nv
    formula = _mx if name.startswith("mx") else _scaled
    return lambda c: formula(c, name)


ORACLES = {
    **{f"quantize.{name}": _of(name) for name in _NAMES},
    **{f"dequantize.{name}": lambda c, name=name: _back(c, name) for name in _NAMES},
}
