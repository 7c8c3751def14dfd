"""Lengths in place of masks, whatever lies beyond them: of padded keys, and of a list of caches."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from drawing import at_once
from layerzero.engine.dispatch import ENGINE
from layerzero.ops import OPERATION_ALIASES
from layerzero.ops.attention.reference import attention_reference


def padded(lens, queries, keys=40, heads=4, kv_heads=2, dim=16, dtype=torch.float64):
    torch.manual_seed(0)
    query = torch.randn(len(lens), queries, heads, dim, dtype=dtype)
    key, value = torch.randn(2, len(lens), keys, kv_heads, dim, dtype=dtype)
    for row, length in enumerate(lens):
        key[row, length:] = value[row, length:] = math.nan
    return query, key, value, torch.tensor(lens)


@at_once("queries", [1, 7])
@at_once("kv_heads", [2, 4])
@at_once("arguments", [{}, {"scale": 0.3}, {"window": (3, 2)}, {"causal": True}, {"causal": True, "window": (5, 0)}])
def test_lengths_are_what_calls_of_one_sequence_each_give(queries, kv_heads, arguments):
    query, key, value, lens = padded((40, 9, 0, 3), queries, kv_heads=kv_heads)
    arguments = {"causal": False} | arguments
    kernel = f"torch.{'decode' if queries == 1 else 'prefill'}_lengths_cpu"
    operation = f"attention.{'gqa' if kv_heads == 2 else 'standard'}.{'decode' if queries == 1 else 'prefill'}"
    with lz.scope(locks={operation: kernel}):
        output, lse = lz.attention(query, key, value, kv_lens=lens, layout="BSHD", return_lse=True, **arguments)
    for row, length in enumerate(lens.tolist()):
        one = (query[row : row + 1], key[row : row + 1, :length], value[row : row + 1, :length])
        wanted, sums = attention_reference(*one, return_lse=True, **arguments)
        torch.testing.assert_close(output[row], wanted[0])
        torch.testing.assert_close(lse[row], sums[0])


def test_cross_attention_goes_by_its_names():
    prefill, facts = OPERATION_ALIASES["attention.cross.prefill"]
    assert set(prefill) == {"attention.standard.prefill", "attention.gqa.prefill"}
    assert facts == {"causal": False}
    query, key, value, lens = padded((40, 9), 3)
    with lz.scope(deny=["torch.prefill_lengths_cpu"]):
        dense = lz.attention(query, key, value, causal=False, kv_lens=lens, layout="BSHD")
    with lz.scope(locks={"attention.cross.prefill": "torch.prefill_lengths_cpu"}):
        report = lz.explain("attention", query, key, value, causal=False, kv_lens=lens, layout="BSHD")
        assert "-> torch.prefill_lengths_cpu" in str(report).splitlines()[0]
        torch.testing.assert_close(lz.attention(query, key, value, causal=False, kv_lens=lens, layout="BSHD"), dense)


def listed(lens=(5, 0, 9), *, heads=4, dtype=torch.float32, held=None, layout="NHD", room=3):
    """Queries, a list of caches as long as each request and some more, NaN beyond the lengths, and these."""
    torch.manual_seed(0)
    query, caches = torch.randn(len(lens), 1, heads, 16).to(dtype), []
    for _ in range(2):
        each = [torch.full((length + room, 2, 16), math.nan, dtype=held or dtype) for length in lens]
        for cache, length in zip(each, lens, strict=True):
            cache[:length] = torch.randn(length, 2, 16)
        caches.append(each if layout == "NHD" else [cache.transpose(0, 1).contiguous() for cache in each])
    return query, lz.CacheList(*caches, layout), torch.tensor(lens, dtype=torch.int32)


def one_by_one(query, caches, lens, **named):
    """Each request alone, in float64: (B, 1, H, D) and (B, H, 1)."""
    found = []
    for row, (held, length) in enumerate(zip(caches.rows, lens.tolist(), strict=True)):
        keys, values = (each[None, :length].double() for each in held)
        found.append(attention_reference(query[row : row + 1].double(), keys, values, return_lse=True, **named))
    return torch.cat([output for output, _ in found]), torch.cat([lse for _, lse in found])


@pytest.mark.parametrize("named", [{}, {"window": (2, 0)}, {"scale": 0.1}])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [2, 4])
def test_a_list_of_caches_is_attended_to_as_each_alone(named, layout, heads):
    query, caches, lens = listed(heads=heads, layout=layout)
    wanted, wanted_lse = one_by_one(query, caches, lens, **named)
    for _ in range(2):  # chosen, then kept
        output, lse = lz.batched_attention(query, caches, kv_lens=lens, return_lse=True, **named)
        torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-5, atol=1e-5)


HELD = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("dtype", "held"), [*itertools.permutations(HELD, 2)])
def test_a_list_of_another_dtype_is_converted_by_a_kernel_that_says_so(dtype, held):
    query, caches, lens = listed(dtype=dtype, held=held)
    got = lz.batched_attention(query, caches, kv_lens=lens)
    assert got.dtype is dtype
    rounding = torch.finfo(dtype).eps if dtype.itemsize < 4 else 1e-5
    torch.testing.assert_close(got.double(), one_by_one(query, caches, lens)[0], rtol=rounding, atol=rounding)
    report = lz.explain(lz.batched_attention, query, caches, kv_lens=lens)
    assert report.chosen.kernel.id == "torch.batched_converted"
    assert report.facts["kv_cache_dtype"] == str(held).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_append_to_a_list_and_attend_without_another_choice(dtype):
    caches = lz.CacheList(*([torch.zeros(room, 2, 16, dtype=dtype) for room in (9, 12, 10)] for _ in range(2)))
    lens, wrote = torch.tensor([0, 3, 1], dtype=torch.int32), []
    misses = []
    for _ in range(6):
        key, value, query = torch.randn(3, 1, 2, 16), torch.randn(3, 1, 2, 16), torch.randn(3, 1, 4, 16)
        lz.append_kv_(key, value, caches, positions=lens[:, None])
        wrote.append((lens.clone(), key, value))
        lens += 1
        got = lz.batched_attention(query, caches, kv_lens=lens)
        wanted = one_by_one(query, caches, lens)[0]
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        misses.append(sum(cache.misses for cache in ENGINE.caches))
    assert misses[1:] == misses[1:2] * 5  # the first write notes the layout of the memory
    for places, key, value in wrote:
        for row, held in enumerate(caches.rows):
            for cache, new in zip(held, (key, value), strict=True):
                assert torch.equal(cache[places[row]], new[row, 0].to(dtype))
    assert all(not cache[int(length) :].any() for held, length in zip(caches.rows, lens, strict=True) for cache in held)


def test_rows_of_one_tensor_are_a_list_and_need_none():
    query, _, lens = listed()
    rows = torch.randn(2, 3, 12, 2, 16)
    caches = lz.CacheList.of_rows(*rows)
    wanted = one_by_one(query, caches, lens)[0].float()
    for given in ((rows[0], rows[1]), (caches,)):
        torch.testing.assert_close(lz.batched_attention(query, *given, kv_lens=lens), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.ops.layerzero.batched_attention(query, *rows, lens), wanted, rtol=1e-5, atol=1e-5)
    new = rows[:, :, :1].clone()

    def step(query, lens):
        lz.append_kv_(*new, caches, positions=torch.tensor([0]))
        return lz.batched_attention(query, caches, kv_lens=lens)

    traced = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(query, lens), wanted, rtol=1e-5, atol=1e-5)


def test_compiled_code_rounds_to_the_dtype_of_a_list():
    query, caches, lens = listed(dtype=torch.float32, held=torch.bfloat16)
    key, value = torch.randn(2, 3, 1, 2, 16)

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def step(query, key, value, lens):
        lz.append_kv_(key, value, caches, positions=lens[:, None])
        return lz.batched_attention(query, caches, kv_lens=lens + 1)

    got = step(query, key, value, lens)
    assert torch.equal(caches.rows[2][0][lens[2]], key[2, 0].bfloat16())
    torch.testing.assert_close(got.double(), one_by_one(query, caches, lens + 1)[0], rtol=1e-5, atol=1e-5)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass without behaviour."""


def test_a_list_passes_modes_transforms_and_subclasses():
    query, caches, lens = listed()
    key, value = torch.randn(2, 3, 1, 2, 16)
    with Watching():
        lz.append_kv_(key, value, caches, positions=lens[:, None])
        seen = lz.batched_attention(query, caches, kv_lens=lens + 1)
    assert torch.equal(caches.rows[2][0][lens[2]], key[2, 0])
    lens += 1
    wanted = one_by_one(query, caches, lens)[0].float()

    def attend(query):
        return lz.batched_attention(query, caches, kv_lens=lens)

    for got in (seen, torch.vmap(attend)(query[None])[0], attend(query.as_subclass(Own))):
        torch.testing.assert_close(torch.Tensor(got), wanted, rtol=1e-5, atol=1e-5)
    with FakeTensorMode():
        query, caches, lens = listed()
        lz.append_kv_(torch.ones(3, 1, 2, 16), torch.ones(3, 1, 2, 16), caches, positions=lens[:, None])
        assert lz.batched_attention(query, caches, kv_lens=lens + 1).shape == query.shape


def with_leaf(caches, row):
    """The same list, of which the values of one request ask for gradients."""
    keys, values = (list(each) for each in zip(*caches.rows, strict=True))
    values[row] = values[row].clone().requires_grad_()
    return lz.CacheList(keys, values)


REFUSED = [
    (
        lambda q, c, n: lz.batched_attention(q, c, kv_lens=n.fill_(10)),
        "kv_lens: wanted at most 8 tokens in cache 0, got 10",
    ),
    (lambda q, c, n: lz.batched_attention(q, c, kv_lens=n + 9), r"kv_lens\[0\]: wanted 0 to 12, got 14"),
    (lambda q, c, n: lz.batched_attention(q[:2], c, kv_lens=n[:2]), "key_cache: wanted batch 2 as in query, got 3"),
    (lambda q, c, n: lz.batched_attention(q[:, 0], c, kv_lens=n), "query: wanted a 4D tensor, got 3D"),
    (lambda q, c, n: lz.batched_attention(q[:, :, :3], c, kv_lens=n), "multiple of kv heads"),
    (lambda q, c, n: lz.batched_attention(q, [*c.rows[0]], [*c.rows[1]], n), r"a list goes as lz.CacheList\(keys"),
    (lambda q, c, n: lz.batched_attention(q, c, kv_lens=n, layout="HND"), "layout: wanted 'NHD' as of the caches"),
    (
        lambda q, c, n: lz.batched_attention(q, *c._stand_ins, n, cache_list=listed()[1]),
        "cache_list: wanted the list that",
    ),
    (lambda q, c, n: lz.attention(q, c, c.rows[0][1]), "key: wanted a tensor, got a CacheList; lz.batched_attention"),
    (
        lambda q, c, n: lz.append_kv_(*[q[:, :, :2]] * 2, c, positions=n.fill_(8)[:, None]),
        "positions: wanted 0 to 7 in cache 0, got 8",
    ),
    (
        lambda q, c, n: lz.append_kv_(*[q[:, :, :2]] * 2, with_leaf(c, 2), positions=n[:, None]),
        "cache 2: value_cache: wanted a tensor that may be updated in place, got a leaf",
    ),
    (lambda q, c, n: lz.CacheList([], []), "keys: wanted at least one cache, got none"),
    (lambda q, c, n: lz.CacheList([q[0]], []), "values: wanted 1 as many as keys, got 0"),
    (lambda q, c, n: lz.CacheList([q[0]], [q]), r"values\[0\]: wanted a tensor of three axes"),
    (lambda q, c, n: lz.CacheList([q[0]] * 2, [q[0], q[0].half()]), r"values\[1\]: wanted \(1, 4, 16\) of"),
    (lambda q, c, n: lz.CacheList([q[0]], [q[0]], "SHD"), "layout: wanted NHD or HND, got 'SHD'"),
]


@at_once("call, text", REFUSED)
def test_lists_that_mean_nothing_are_refused(call, text):
    with pytest.raises(lz.InvalidCallError, match=text):
        call(*listed())


@at_once("append", [True, False])
def test_debug_mode_finds_places_beyond_a_shorter_cache_before_any_kernel_runs(append):
    ran, operation = [], "kv.append.batched" if append else "attention.gqa.decode.batched"

    def append_(key, value, key_cache, value_cache, positions, *, cache_list):
        ran.append(cache_list)

    def attend(query, key_cache, value_cache, kv_lens, *, cache_list):  # neither looks, as no kernel of a GPU does
        ran.append(cache_list)
        return query

    def call(query, caches, lens):
        if append:
            lz.append_kv_(query[:, :, :2], query[:, :, :2], caches, positions=lens[:, None] - 1)
        else:
            lz.batched_attention(query, caches, kv_lens=lens)

    lz.register_kernel(operation, f"user.{append}", layout="NHD")(append_ if append else attend)
    query, caches, lens = listed()
    with lz.scope(debug=True, locks={operation: f"user.{append}"}):
        call(query, caches, lens.clamp(min=1))
        wanted = "positions: wanted 0 to 7 in cache 0, got 8" if append else "wanted at most 8 tokens in cache 0, got 9"
        with pytest.raises(lz.InvalidCallError, match=wanted):
            call(query, caches, lens.fill_(9))
    assert len(ran) == 1


def test_caches_that_touch_are_read_and_not_written():
    whole = torch.randn(2, 12, 2, 16)
    keys, values = [whole[0], whole[0, 2:]], [whole[1], whole[1, 2:]]
    assert lz.CacheList([*whole], [whole[1], whole[0]]).kind == "shared"  # keys of one, values of the other
    assert lz.CacheList.of_rows(*torch.randn(3, 12, 2, 2, 16).unbind(2)).kind == "apart"  # side by side in each token
    caches, lens = lz.CacheList(keys, values), torch.tensor([12, 10], dtype=torch.int32)
    query = torch.randn(2, 1, 4, 16)
    wanted = one_by_one(query, caches, lens)[0].float()
    torch.testing.assert_close(lz.batched_attention(query, caches, kv_lens=lens), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(lz.InvalidCallError, match="cache_list: wanted each in memory of its own"):
        lz.append_kv_(query[:, :, :2], query[:, :, :2], caches, positions=torch.tensor([0]))
    apart = lz.CacheList([key.clone() for key in keys], [value.clone() for value in values])
    lz.append_kv_(query[:, :, :2], query[:, :, :2], apart, positions=torch.tensor([0]))
    before = whole.clone()
    with pytest.raises(lz.InvalidCallError, match="cache_list: wanted each in memory of its own"):  # of the same shapes
        lz.append_kv_(query[:, :, :2], query[:, :, :2], caches, positions=torch.tensor([0]))
    assert torch.equal(whole, before)
