"""Weights as files hold them, number by number, from the bits of Python integers."""

import numpy as np
import torch

from oracles.quantize import of_six_bits

AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def options(text):
    scheme, _, rest = text.partition(":")
    found = {"kind": "", "bits": 0, "group": 0, "rows": 1, "zeros": "none", "rotation": 0}
    for each in filter(None, rest.split(",")):
        name, known, value = each.partition("=")
        found[name if known else "kind"] = (int(value) if value.isdigit() else value) if known else name
    return scheme, found


def stream(words, bits, count):
    """The first numbers of a line of 32-bit words, read from its lowest bit on."""
    whole = sum((int(each) & 0xFFFFFFFF) << 32 * place for place, each in enumerate(words))
    return np.array([whole >> place * bits & (1 << bits) - 1 for place in range(count)], dtype=np.float64)


def streams(lines, bits, count):
    return np.array([stream(line, bits, count) for line in lines]).reshape(len(lines), count)


def eights(codes):
    """AWQ: number 8 * i + j of a row stands at place AWQ[j] of word i."""
    return np.array([[row[k - k % 8 + AWQ[k % 8]] for k in range(len(row))] for row in codes])


def grouped(c, scheme, of, columns):
    data, scale, zero, bits = c["weight"], c["weight_scale"], c.get("weight_zero"), of["bits"]
    half = 1 << bits - 1
    if scheme == "compressed-tensors":
        codes = streams(data, bits, columns)
        if of["zeros"] == "signed":
            zero = zero.astype(np.float64) + half
        elif zero is not None:
            zero = streams(zero.T, bits, len(data)).T
    elif scheme == "gptq":
        codes, scale, zero = streams(data.T, bits, columns), scale.T, streams(zero, bits, data.shape[1]).T
        if of["zeros"] == "minus_one":
            zero = (zero + 1) % (1 << bits)
    else:
        rows = data.shape[1] * 8
        codes, scale, zero = eights(streams(data, bits, rows)).T, scale.T, eights(streams(zero, bits, rows)).T
    index = c.get("group_index")
    place = np.arange(columns) // (of["group"] or columns) if index is None else index
    return (codes - (half if zero is None else zero[:, place])) * scale[:, place]


def marlin(c, scheme, of, columns):
    """A word for each thread of four warps, of two outputs eight apart and four inputs each."""
    words, scale = np.asarray(c["weight"]).astype(np.uint32), np.float64(c["weight_scale"])
    rows, groups = words.shape[1] // 2, len(scale)
    codes = np.empty((rows, columns))
    for tile, line in enumerate(words):
        for number, word in enumerate(line):
            of_64, thread, warp = number // 128, number % 128 // 4, number % 4
            for place, value in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                row = 64 * of_64 + 16 * warp + thread // 4 + 8 * (value // 4)
                codes[row, 16 * tile + 2 * (thread % 4) + (0, 1, 8, 9)[value % 4]] = int(word) >> 4 * place & 15
    places = [n // 64 * 64 + n % 8 * 8 + n % 64 // 8 for n in range(rows)]
    if groups == 1:
        places = [n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2 for n in range(rows)]
    return (codes - 8) * scale[:, places].T[:, np.arange(columns) // (of["group"] or columns)]


def numbers(c):
    """The weight (N, K) of a call."""
    return turned(stored(c), options(c["weight_format"])[1]["rotation"])


def stored(c):
    """The same as it was quantised: of a rotated one, the rotated numbers."""
    scheme, of = options(c["weight_format"])
    columns = c["input"].shape[-1]
    return READERS[scheme](c, scheme, of, columns)


def blocks(c, scheme, of, columns):
    numbers, scale = np.float64(c["weight"]), np.float64(c["weight_scale"])
    if scale.ndim == 0:
        return numbers * scale
    rows, places = np.arange(len(numbers)) // of["rows"], np.arange(columns) // (of["group"] or columns)
    return numbers * scale[rows][:, places]


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = tuple(each / 12 for each in (0, 0.0625, 8, 12, 4, 6, 2, 3))
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
TABLES = {"nf4": NF4, "fp4": (*FP4, *(-each for each in FP4))}


def halves(data, low_first):
    parts = (data & 15, data >> 4) if low_first else (data >> 4, data & 15)
    return np.stack(parts, -1).reshape(*data.shape[:-1], -1)


def micro(c, scheme, of, columns):
    data, scale = c["weight"], c["weight_scale"]
    if scale.dtype == np.uint8:
        scale = 2.0 ** (np.float64(scale) - 127)
    if scheme.startswith("mxfp6"):
        return of_six_bits(data, scheme) * np.repeat(scale, columns // scale.shape[1], 1)
    numbers = data if scheme == "mxfp8" else np.array((*E2M1, *(-each for each in E2M1)))[halves(data, True)]
    if scheme == "nvfp4":
        scale = scale / c["second_scale"] if of["kind"] == "over" else scale * c["second_scale"]
    return numbers * np.repeat(scale, columns // scale.shape[1], 1)


def turned(numbers, size):
    """Hadamard's transform of each ``size`` columns, by the parity of the bits that two places share."""
    if not size:
        return numbers
    matrix = np.array([[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)])
    parts = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // size, size)
    return (np.einsum("...j,jk->...k", parts, matrix) / np.sqrt(size)).reshape(numbers.shape)


def codebook(c, scheme, of, columns):
    numbers = np.array(TABLES[scheme])[halves(c["weight"].reshape(-1), False)]
    return (numbers * np.repeat(c["weight_scale"], of["group"])[: len(numbers)]).reshape(-1, columns)


def gguf(c, scheme, of, columns):
    """The bytes are proved against the digests of gguf's own numbers; see tests/ops/test_weight_libraries.py."""
    from layerzero.ops.quantize.gguf import dequantized

    return dequantized(torch.from_numpy(c["weight"]), of["kind"], torch.float64).numpy()


READERS = {
    **dict.fromkeys(("gptq", "awq", "compressed-tensors"), grouped),
    "marlin": marlin,
    "fp8": blocks,
    **dict.fromkeys(("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "nvfp4"), micro),
    **dict.fromkeys(("nf4", "fp4"), codebook),
    "gguf": gguf,
}


def product(c):
    rows = turned(c["input"], options(c["weight_format"])[1]["rotation"])
    output = rows @ stored(c).T
    return (output if c.get("bias") is None else output + c["bias"],)


ORACLES = {
    f"mlp.linear.quant.{name}": product
    for name in ("group", "group.int8", "block", "mx", "codebook", "gguf", "gguf.int8")
}
