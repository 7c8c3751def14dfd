"""Weights as files hold them, number by number, from the bits of Python integers."""

import numpy as np

AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def options(text):
    scheme, _, rest = text.partition(":")
    found = {"kind": "", "bits": 0, "group": 0, "rows": 1, "zeros": "none"}
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


def numbers(c):
    """The weight (N, K) of a call."""
    scheme, of = options(c["weight_format"])
    columns = c["input"].shape[-1]
    return READERS[scheme](c, scheme, of, columns)


READERS = dict.fromkeys(("gptq", "awq", "compressed-tensors"), grouped)


def product(c):
    output = c["input"] @ numbers(c).T
    return (output if c.get("bias") is None else output + c["bias"],)


ORACLES = {f"mlp.linear.quant.{name}": product for name in ("group",)}
