"""Attention's reference against formulas written another way: loops over single elements, and torch's own functions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional

from drawing import at_once
from layerzero.core.operation import Routed
from layerzero.engine.reference import fake_call, reference_call
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention import layout as layouts
from layerzero.ops.attention.reference import attention_bias, attention_reference

INF = math.inf


def tensors(batch=2, seq_q=3, seq_k=5, heads=4, kv_heads=2, head_dim=6, value_dim=None, dtype=torch.float64):
    torch.manual_seed(seq_q * 100 + seq_k)
    return (
        torch.randn(batch, seq_q, heads, head_dim).to(dtype),
        torch.randn(batch, seq_k, kv_heads, head_dim).to(dtype),
        torch.randn(batch, seq_k, kv_heads, value_dim or head_dim).to(dtype),
    )


def by_hand(
    q, k, v, causal=False, scale=None, attn_mask=None, window=None, softcap=None, sinks=None, alibi=None, kv_lens=None
):
    """One element at a time, from the words of the public docstring."""
    batch, seq_q, heads, head_dim = q.shape
    seq_k, group = k.shape[1], heads // k.shape[2]
    output = torch.zeros(batch, seq_q, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), -INF, dtype=torch.float64)
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, seq_q, seq_k)
    for b, h, i in itertools.product(range(batch), range(heads), range(seq_q)):
        length = seq_k if kv_lens is None else int(kv_lens[b])
        position = i + length - seq_q
        weights = {}
        for j in range(length):
            score = float(q[b, i, h] @ k[b, j, h // group]) * (head_dim**-0.5 if scale is None else scale)
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            if alibi is not None:
                score -= float(alibi[b, h] if alibi.ndim == 2 else alibi[h]) * abs(position - j)
            if mask is not None and mask.dtype is not torch.bool:
                score += float(mask[b, h, i, j])
            seen = not (causal and j > position)
            seen &= window is None or window[0] < 0 or j >= position - window[0]
            seen &= window is None or window[1] < 0 or j <= position + window[1]
            seen &= mask is None or mask.dtype is not torch.bool or bool(mask[b, h, i, j])
            if seen and score > -INF:
                weights[j] = math.exp(score)
        total = sum(weights.values()) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
        if total:
            lse[b, h, i] = math.log(total)
        for j, weight in weights.items():
            output[b, i, h] += weight / total * v[b, j, h // group]
    return output, lse


def agree(q, k, v, **arguments):
    named = {("alibi_slopes" if name == "alibi" else name): value for name, value in arguments.items()}
    got, got_lse = attention_reference(q, k, v, return_lse=True, **named)
    want, want_lse = by_hand(q, k, v, **arguments)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got_lse, want_lse.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attention_reference(q, k, v, **named), got)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
ARGUMENTS = {
    "nothing": {},
    "causal": {"causal": True},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 0.8, "scale": 2.0},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 4.0, 0.0])},
    "alibi": {"alibi": SLOPES},
    "alibi of each batch entry": {"alibi": torch.stack((SLOPES, SLOPES.flip(0)))},
    "lengths": {"kv_lens": torch.tensor([3, 5])},
    "a length of zero": {"kv_lens": torch.tensor([0, 4], dtype=torch.int32)},
    "window": {"window": (1, 0)},
    "window, open to the left": {"window": (-1, 1)},
    "window, open to the right": {"window": (0, -1)},
    "everything by position": {"causal": True, "window": (2, 5), "alibi": SLOPES, "kv_lens": torch.tensor([4, 2])},
    "everything": {
        "causal": True,
        "window": (2, -1),
        "alibi": SLOPES,
        "kv_lens": torch.tensor([5, 3]),
        "softcap": 1.5,
        "sinks": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "scale": 0.9,
    },
}


@at_once("seq_q", [1, 3, 5, 7])
@at_once("name", ARGUMENTS)
def test_agrees_with_loops(name, seq_q):
    agree(*tensors(seq_q=seq_q), **ARGUMENTS[name])


MASKS = [shape for ndim in range(5) for shape in itertools.product(*((1, size) for size in (2, 4, 3, 5)[4 - ndim :]))]


@pytest.mark.parametrize("shape", dict.fromkeys(MASKS), ids=str)
def test_masks_of_every_broadcast_shape(shape):
    torch.manual_seed(len(shape))
    visible = torch.rand(shape) < 0.6
    agree(*tensors(), attn_mask=visible)
    numbers = torch.randn(shape, dtype=torch.float64)
    agree(*tensors(), attn_mask=numbers)
    agree(*tensors(), attn_mask=numbers.masked_fill(~visible, -INF), window=(3, 1), softcap=2.0)


@at_once("dtype", [torch.float32, torch.float64])
@at_once("kv_heads", [4, 2, 1])
@at_once("arguments", [{}, {"causal": True}, {"scale": 0.3}])
def test_agrees_with_torch(dtype, kv_heads, arguments):
    q, k, v = tensors(seq_q=5, kv_heads=kv_heads, dtype=dtype)
    want = functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (q, k, v)),
        is_causal=arguments.get("causal", False),
        scale=arguments.get("scale"),
        enable_gqa=kv_heads != 4,
    )
    torch.testing.assert_close(attention_reference(q, k, v, **arguments).transpose(1, 2), want)


def seen(seq_q, seq_k, **arguments):
    """Which key each query sees: equal scores, and values that tell the keys apart."""
    q, k = torch.zeros(1, seq_q, 1, 1), torch.zeros(1, seq_k, 1, 1)
    v = torch.eye(seq_k).view(1, seq_k, 1, seq_k)
    return [
        "".join("x" if weight else "." for weight in row) for row in attention_reference(q, k, v, **arguments)[0, :, 0]
    ]


@at_once(
    "sizes, arguments, rows",
    [
        ((3, 3), {"causal": True}, ["x..", "xx.", "xxx"]),
        ((2, 4), {"causal": True}, ["xxx.", "xxxx"]),  # bottom-right: the last query is at the last key
        ((4, 2), {"causal": True}, ["..", "..", "x.", "xx"]),
        ((1, 4), {"causal": True}, ["xxxx"]),
        ((4, 4), {"window": (1, 1)}, ["xx..", "xxx.", ".xxx", "..xx"]),  # itself is not counted
        ((4, 4), {"window": (0, 0)}, ["x...", ".x..", "..x.", "...x"]),
        ((4, 4), {"window": (1, 1), "causal": True}, ["x...", "xx..", ".xx.", "..xx"]),
        ((4, 4), {"window": (-1, 1)}, ["xx..", "xxx.", "xxxx", "xxxx"]),
        ((4, 4), {"window": (1, -1)}, ["xxxx", "xxxx", ".xxx", "..xx"]),
        ((2, 4), {"window": (1, 0)}, [".xx.", "..xx"]),
        ((1, 4), {"window": (2, -1)}, [".xxx"]),
        ((2, 4), {"causal": True, "kv_lens": torch.tensor([3])}, ["xx..", "xxx."]),
        ((2, 4), {"window": (0, 0), "kv_lens": torch.tensor([3])}, [".x..", "..x."]),
        ((2, 4), {"kv_lens": torch.tensor([0])}, ["....", "...."]),
    ],
)
def test_which_keys_are_seen(sizes, arguments, rows):
    assert seen(*sizes, **arguments) == rows


def test_causal_with_a_cache_is_the_end_of_the_whole():
    q, k, v = tensors(seq_q=6, seq_k=6)
    whole = attention_reference(q, k, v, causal=True, window=(3, -1), alibi_slopes=SLOPES)
    for new in (1, 2, 5):
        part = attention_reference(q[:, -new:], k, v, causal=True, window=(3, -1), alibi_slopes=SLOPES)
        torch.testing.assert_close(part, whole[:, -new:])


def test_lengths_are_what_shorter_tensors_say():
    q, k, v = tensors(batch=3, seq_q=2)
    lengths = (5, 2, 4)
    got = attention_reference(q, k, v, causal=True, kv_lens=torch.tensor(lengths), alibi_slopes=SLOPES)
    for entry, length in enumerate(lengths):
        alone = tuple(tensor[entry : entry + 1, : None if tensor is q else length] for tensor in (q, k, v))
        torch.testing.assert_close(
            got[entry : entry + 1], attention_reference(*alone, causal=True, alibi_slopes=SLOPES)
        )


@at_once("garbage", [math.nan, INF, -INF])
@at_once("arguments", [{}, {"causal": True}, {"sinks": torch.zeros(4)}, {"softcap": 1.0}])
def test_what_lies_beyond_a_length_is_not_read(garbage, arguments):
    q, k, v = tensors()
    lengths = torch.tensor([2, 4])
    want = attention_reference(q, k, v, kv_lens=lengths, return_lse=True, **arguments)
    beyond = (torch.arange(5) >= lengths.view(-1, 1)).view(2, 5, 1, 1)
    k, v = (tensor.masked_fill(beyond, garbage).requires_grad_() for tensor in (k, v))
    got = attention_reference(q, k, v, kv_lens=lengths, return_lse=True, **arguments)
    torch.testing.assert_close(got, want)
    got[0].sum().backward()
    assert not k.grad.isnan().any()
    assert not v.grad.masked_select(beyond).any()


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask": torch.zeros(2, 1, 3, 5, dtype=torch.bool)},
        {"attn_mask": torch.full((3, 5), -INF, dtype=torch.float64)},
        {"kv_lens": torch.zeros(2, dtype=torch.int64)},
    ],
    ids=["bool", "float", "lengths"],
)
def test_a_query_that_sees_nothing_gives_zero(arguments):
    q, k, v = tensors()
    q.requires_grad_()
    output, lse = attention_reference(q, k, v, return_lse=True, **arguments)
    assert not output.any()
    assert (lse == -INF).all()
    output.sum().backward()
    assert not q.grad.isnan().any()
    sinks = torch.arange(4.0)
    output, lse = attention_reference(q, k, v, return_lse=True, sinks=sinks, **arguments)
    assert not output.any()  # a sink takes the weight and has no value
    torch.testing.assert_close(lse, sinks.view(1, 4, 1).expand(2, 4, 3))


def test_a_sink_is_a_key_without_a_value():
    q, k, v = tensors(heads=2, kv_heads=2)
    sinks = torch.tensor([0.7, -1.3], dtype=torch.float64)
    q[..., 0] = sinks * q.shape[-1] ** 0.5  # no key but the added one looks at the first component
    k[..., 0] = 0.0
    sink = torch.zeros_like(k[:, :1])
    sink[..., 0] = 1.0
    longer = attention_reference(q, torch.cat((k, sink), 1), torch.cat((v, torch.zeros_like(v[:, :1])), 1))
    torch.testing.assert_close(attention_reference(q, k, v, sinks=sinks), longer)


def test_softcap_comes_before_masks():
    q, k, v = tensors(seq_q=5, heads=2, kv_heads=2)
    mask = torch.randn(5, 5, dtype=torch.float64) * 10
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = (2.0 * torch.tanh(scores / 2.0) + mask).softmax(-1)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    torch.testing.assert_close(attention_reference(q, k, v, attn_mask=mask, softcap=2.0), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_results_and_of_the_computation(dtype):
    q, k, v = tensors(dtype=dtype, value_dim=3)
    output, lse = attention_reference(q, k, v, return_lse=True, sinks=torch.zeros(4, dtype=dtype))
    assert output.dtype is dtype
    assert lse.dtype is torch.float32
    exact = attention_reference(q.double(), k.double(), v.double(), sinks=torch.zeros(4))
    tolerance = attention.TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), exact, rtol=tolerance.rtol, atol=tolerance.atol)


def test_dropout_keeps_the_mean():
    torch.manual_seed(0)
    q, k, v = tensors(batch=1, seq_q=2, heads=1, kv_heads=1, value_dim=1)
    want = attention_reference(q, k, v)
    drawn = torch.stack([attention_reference(q, k, v, dropout_p=0.3) for _ in range(4000)])
    assert drawn.std(0).min() > 0.01
    torch.testing.assert_close(drawn.mean(0), want, rtol=0.1, atol=0.05)


SIZES = {
    "small": {},
    "no batch": {"batch": 0},
    "no queries": {"seq_q": 0},
    "no keys": {"seq_k": 0},
    "decode": {"seq_q": 1},
}


@at_once("sizes", SIZES)
@at_once("layout", layouts.LAYOUTS)
@at_once("return_lse", [False, True])
@at_once("operation", attention.OPERATIONS)
def test_shapes_alone_are_the_real_shapes(operation, return_lse, layout, sizes):
    q, k, v = tensors(value_dim=3, dtype=torch.bfloat16, **SIZES[sizes])
    if layout == "BHSD":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    schema = operation.schema
    arguments = {**schema.neutral, "return_lse": return_lse, "query": q, "key": k, "value": v}
    real = reference_call(Routed(operation, arguments, layout))
    on_meta = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    for fake in (fake_call(Routed(operation, arguments, layout)), fake_call(Routed(operation, on_meta, layout))):
        pairs = zip(fake, real, strict=True) if return_lse else [(fake, real)]
        for mine, theirs in pairs:
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("sizes", ["no batch", "no queries", "no keys"])
def test_empty_tensors(sizes):
    q, k, v = tensors(**SIZES[sizes])
    output, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    assert output.shape == q.shape
    assert not output.any()
    assert (lse == -INF).all()


def test_the_bias_says_all_that_a_mask_can_say():
    q, k, v = tensors()
    arguments = {
        "causal": True,
        "window": (2, -1),
        "alibi_slopes": SLOPES,
        "kv_lens": torch.tensor([5, 3]),
        "attn_mask": torch.randn(4, 1, 5).double(),
    }
    bias = attention_bias(q, k, **arguments)
    torch.testing.assert_close(attention_reference(q, k, v, attn_mask=bias), attention_reference(q, k, v, **arguments))
    assert attention_bias(q, k) is None


def test_the_bias_is_as_exact_as_its_parts():
    q, k, _ = tensors(dtype=torch.bfloat16)
    assert attention_bias(q, k, causal=True).dtype is torch.bfloat16
    assert attention_bias(q, k, attn_mask=torch.ones(3, 5, dtype=torch.bool)).dtype is torch.bfloat16
    assert attention_bias(q, k, attn_mask=torch.zeros(3, 5), causal=True).dtype is torch.float32
    assert attention_bias(q, k, alibi_slopes=SLOPES.bfloat16()).dtype is torch.float32
