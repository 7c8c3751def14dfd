"""lz.embedding: rows, scales, padding, shards, gradients, what is refused and when it is looked for."""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.engine.functions import CALLS
from layerzero.ops import OPERATIONS

KERNELS = ("torch.embedding", "torch.index_select")


def table(vocab=20, features=6, dtype=torch.float32):
    torch.manual_seed(vocab)
    return torch.randn(vocab, features).to(dtype)


@at_once("kernel", KERNELS)
@at_once("kind", [torch.int32, torch.int64])
@at_once("shape", [(), (5,), (2, 3), (0,)])
def test_rows_by_ids_of_any_shape(kernel, kind, shape):
    weight, ids = table(), torch.randint(0, 20, shape, dtype=kind)
    with lz.scope(locks={"embedding": kernel} if ids.numel() else {}):
        assert torch.equal(lz.embedding(ids, weight), torch.nn.functional.embedding(ids, weight))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_is_rounded_once(kernel, dtype):
    weight, ids = table(dtype=dtype), torch.tensor([3, 19, 0, 3])
    wanted = (weight[ids].double() * 33.9411255).to(dtype)
    with lz.scope(locks={"embedding": kernel}):
        torch.testing.assert_close(lz.embedding(ids, weight, scale=33.9411255), wanted)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", [None, 2.0])
def test_shards_add_up_to_the_whole_table(kernel, scale):
    weight, ids = table(), torch.randint(0, 20, (4, 7))
    wanted = lz.embedding(ids, weight, scale=scale)
    with lz.scope(locks={"embedding": f"{kernel}.shard"}):
        found = [
            lz.embedding(ids, part, scale=scale, vocab_start=start)
            for start, part in ((0, weight[:7]), (7, weight[7:13]), (13, weight[13:]))
        ]
    torch.testing.assert_close(sum(found), wanted)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ids_of_no_shard_give_zeros_however_far_they_are(kernel):
    far = torch.iinfo(torch.int32)
    ids = torch.tensor([-1, 5, 9, 10, far.min, far.max], dtype=torch.int32)
    with lz.scope(locks={"embedding": f"{kernel}.shard"}):
        found = lz.embedding(ids, table(5), vocab_start=5)
    assert torch.equal(found[[0, 3, 4, 5]], torch.zeros(4, 6))
    assert torch.equal(found[[1, 2]], table(5)[[0, 4]])


def test_one_choice_serves_every_shard():
    cache = CALLS["embedding"].dispatcher.cache
    lz.configure()  # a new epoch: nothing is kept
    before = cache.size()
    for start in range(0, 100, 5):
        lz.embedding(torch.tensor([start, 3]), table(5), vocab_start=start)
    assert cache.size() - before == 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("padding_idx", [3, -2])
def test_padding_gets_no_gradient_and_keeps_its_row(kernel, padding_idx):
    ids = torch.tensor([3, 18, 3, 1])
    weights = [table().requires_grad_() for _ in range(2)]
    with lz.scope(locks={"embedding": kernel}):
        got = lz.embedding(ids, weights[0], padding_idx=padding_idx, scale=2.0)
    wanted = torch.nn.functional.embedding(ids, weights[1], padding_idx) * 2.0
    assert torch.equal(got, wanted)
    for result in (got, wanted):
        result.square().sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    assert not weights[0].grad[padding_idx].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("padding_idx", "gone"), [(6, 1), (2, None)])
def test_gradients_of_a_shard_leave_other_ids_and_its_padding_alone(kernel, padding_idx, gone):
    ids, weight = torch.tensor([6, 0, 5, 9, 6, 2]), table(3).requires_grad_()
    with lz.scope(locks={"embedding": f"{kernel}.shard"}):
        lz.embedding(ids, weight, vocab_start=5, padding_idx=padding_idx).sum().backward()
    counts = torch.tensor([1.0, 2.0, 0.0])
    if gone is not None:
        counts[gone] = 0
    assert torch.equal(weight.grad, counts.unsqueeze(1).expand(3, 6))


@pytest.mark.parametrize("vocab_start", [None, 2])
def test_gradients_by_finite_differences(vocab_start):
    weight = table(4, 3, torch.float64).requires_grad_()
    ids = torch.tensor([[0, 3], [3, 1]])

    def call(each):
        return lz.embedding(ids, each, scale=1.5, vocab_start=vocab_start)

    assert torch.autograd.gradcheck(call, [weight])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vocab_start", [None, 5])
def test_compiled_as_one_graph(vocab_start):
    weight, ids = table(), torch.tensor([7, 9, 11])

    def model(ids):
        return lz.embedding(ids, weight, scale=2.0, vocab_start=vocab_start)

    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(ids), model(ids))


@pytest.mark.parametrize("given", [{}, {"scale": 2.0, "padding_idx": 3}])
@pytest.mark.parametrize("vocab_start", [None, 4])
def test_stock_computes_the_same(given, vocab_start):
    weight, ids = table(), torch.tensor([[4, 19], [7, 3]])
    stock = OPERATIONS["embedding.lookup"].stock(ids, weight, **given, vocab_start=vocab_start)
    torch.testing.assert_close(stock(), lz.embedding(ids, weight, **given, vocab_start=vocab_start))


@pytest.mark.parametrize("value", [20, -1])
def test_ids_that_no_row_has_are_an_error_on_a_cpu_without_a_shard(value):
    ids = torch.tensor([[1, 2], [value, 3]])
    with pytest.raises(lz.InvalidCallError, match=rf"ids\[1, 0\]: wanted 0 to 19, got {value}"):
        lz.embedding(ids, table())
    assert not lz.embedding(ids, table(), vocab_start=4).isnan().any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": torch.tensor([1.0])}, "ids: wanted dtype int32 or int64"),
        ({"weight": torch.ones(20)}, "weight: wanted a 2D tensor"),
        ({"weight": torch.ones(20, 6).long()}, "weight: wanted dtype"),
        ({"weight": torch.ones(20, 0)}, "weight: wanted rows of a width above 0"),
        ({"weight": torch.ones(0, 6)}, "weight: wanted a row for each id"),
        ({"padding_idx": 20}, "padding_idx: wanted -20 to 19, a row of weight, got 20"),
        ({"padding_idx": -1, "vocab_start": 3}, "padding_idx: wanted an id of the vocabulary"),
        ({"scale": float("nan")}, "scale: wanted a finite number, got nan"),
        ({"vocab_start": -1}, "vocab_start: wanted 0 to inf, got -1"),
    ],
)
def test_what_means_nothing_is_refused_with_wanted_and_got(change, words):
    with pytest.raises(lz.InvalidCallError, match=words):
        lz.embedding(**({"ids": torch.tensor([1, 2]), "weight": table()} | change))
