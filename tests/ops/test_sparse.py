"""Block-sparse attention: every kernel here against a mask, patterns that are none, and handles of patterns."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch
from torch.nn import functional

import layerzero as lz
from drawing import at_once
from layerzero.backends.flashinfer import sparse as flashinfer
from layerzero.backends.torch import hidden_keys
from layerzero.core.facts import FactsBuilder
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.sparse.declare import NAME, block_mask, block_table
from layerzero.ops.sparse.variable import VARIABLE_SPARSE, variable_sparse_attention

STARTS, COLUMNS = (0, 2, 2, 5, 6), (4, 1, 0, 2, 5, 3)


def call(dtype=torch.float32, rows=16, cols=16, dim=32):
    torch.manual_seed(0)
    query = torch.randn(4 * rows, 4, dim, dtype=dtype)
    key, value = torch.randn(2, 6 * cols, 2, dim, dtype=dtype)
    pattern = (torch.tensor(each, dtype=torch.int32) for each in (STARTS, COLUMNS))
    names = ("query", "key", "value", "block_indptr", "block_indices", "block_rows", "block_cols")
    return dict(zip(names, (query, key, value, *pattern, rows, cols), strict=True))


def masked(given, scale=None):
    """The same written as a dense mask: the output and its log-sum-exp."""
    mask = torch.zeros(len(given["query"]), len(given["key"]), dtype=torch.bool)
    for row in range(4):
        for column in COLUMNS[STARTS[row] : STARTS[row + 1]]:
            rows, cols = given["block_rows"], given["block_cols"]
            mask[row * rows : (row + 1) * rows, column * cols : (column + 1) * cols] = True
    dense = (given[name][None] for name in ("query", "key", "value"))
    output, lse = attention_reference(*dense, attn_mask=mask, scale=scale, return_lse=True)
    return output[0], lse[0]


@pytest.mark.parametrize("kernel", ["torch.block_sparse_masked", "torch.block_sparse_rows", f"reference.{NAME}"])
@pytest.mark.parametrize("blocks", [(16, 16), (1, 3), (8, 64)], ids=str)
def test_a_pattern_is_a_mask_of_blocks(kernel, blocks):
    given = call(torch.float64, *blocks)
    with lz.scope(locks={NAME: kernel}):
        for scale in (None, 0.3):
            torch.testing.assert_close(lz.sparse_attention(**given, scale=scale), masked(given, scale)[0])


def test_a_row_without_blocks_gives_nothing():
    output, lse = lz.sparse_attention(**call(), return_lse=True)
    assert output[16:32].abs().max() == 0
    assert (lse[:, 16:32] == -math.inf).all()
    torch.testing.assert_close(lse, masked(call())[1])


def test_a_pattern_as_mask_and_as_table():
    given = call()
    pattern = given["block_indptr"], given["block_indices"]
    mask = block_mask(*pattern, 6)
    assert mask.nonzero().tolist() == [[0, 1], [0, 4], [2, 0], [2, 2], [2, 5], [3, 3]]
    table, counts = block_table(*pattern, 6)
    assert counts.tolist() == [2, 0, 3, 1]
    assert [row[:count].tolist() for row, count in zip(table, counts, strict=True)] == [[4, 1], [], [0, 2, 5], [3]]


def test_flashinfer_plans_once_for_a_pattern_and_again_when_it_changed(monkeypatch):
    planned = []

    class Wrapper:
        def __init__(self, *_):
            pass

        def plan(self, indptr, indices, **arguments):
            planned.append((indptr.tolist(), indices.tolist(), arguments["R"], arguments["sm_scale"]))

        def run(self, query, key, value, return_lse):
            return query, torch.ones(len(query), 4)

    monkeypatch.setitem(sys.modules, "flashinfer.sparse", types.SimpleNamespace(BlockSparseAttentionWrapper=Wrapper))
    monkeypatch.setattr(flashinfer, "workspace", lambda *_, **__: None)
    given = call()
    run = flashinfer._load(lz.explain("sparse_attention", **given).facts)
    pattern, (*tensors, rows, cols) = lz.BlockPattern(given["block_indptr"], given["block_indices"]), given.values()
    for _ in range(2):
        _, lse = run(*tensors, block_rows=rows, block_cols=cols, block_pattern=pattern, return_lse=True)
    assert planned == [([*STARTS], [*COLUMNS], 16, None)]
    assert lse.shape == (4, 64)
    assert lse[0, 0] == pytest.approx(math.log(2))
    given["block_indices"][0] = 5
    pattern.advance()
    assert planned[1][1][0] == 5


@pytest.mark.parametrize("heads_first", [(1, 3), (3, 1)], ids=["one head", "one token"])
def test_flashinfer_reads_blocks_of_unlike_sizes_from_new_memory(monkeypatch, heads_first):
    """A tensor of one head or one token is dense however its axes lie, and may begin anywhere."""
    read = []

    class Wrapper:
        def __init__(self, *_):
            pass

        def plan(self, *_, **__):
            pass

        def run(self, *tensors):
            read.extend(tensors)
            return tensors[0]

    module = types.SimpleNamespace(VariableBlockSparseAttentionWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer.sparse", module)
    monkeypatch.setattr(flashinfer, "workspace", lambda *_, **__: None)
    heads, tokens = heads_first
    given = [torch.randn(tokens * heads * 64 + 5)[5:].view(tokens, heads, 64) for _ in range(3)]
    one = torch.ones(heads, 1, 1, dtype=torch.bool), *(torch.full((heads, 1), tokens, dtype=torch.int32),) * 2
    run = flashinfer._load_sparse_variable(lz.explain("variable_sparse_attention", *given, *one).facts)
    assert torch.equal(run(*given, *one), given[0])
    assert [each.data_ptr() % 16 for each in read] == [0, 0, 0]


WRONG = [
    (lambda c: {"query": c["query"][:-1]}, "query: wanted 4 rows of 16 queries"),
    (lambda c: {"key": c["key"][:-1], "value": c["value"][:-1]}, "key: wanted whole blocks of 16 keys, got 95"),
    (lambda c: {"value": c["value"][:-1]}, "value: wanted kv_tokens 96"),
    (lambda c: {"block_rows": 0}, "block_rows: wanted a number of at least 1, got 0"),
    (lambda c: {"block_cols": 2.0}, r"block_cols: wanted a number of at least 1, got 2\.0"),
    (lambda c: {"block_indptr": c["block_indptr"] + 1}, r"block_indptr\[0\]: wanted 0, got 1"),
    (lambda c: {"block_indices": c["block_indices"][:-1]}, r"block_indptr\[4\]: wanted \d+, the number of blocks, got"),
    (
        lambda c: {"block_indptr": c["block_indptr"][[0, 3, 1, 2, 4]]},
        r"block_indptr\[2\]: wanted at least 5, the number before it, got 2",
    ),
    (lambda c: {"block_indices": c["block_indices"] + 2}, r"block_indices\[0\]: wanted a column of blocks from 0 to 5"),
    (lambda c: {"block_indices": c["block_indices"] * 0}, "wanted each column once in a row"),
    (lambda c: {"block_indices": c["block_indices"].to("meta")}, "block_indices: wanted device cpu"),
    (lambda c: {"block_indices": c["block_indices"].long()}, "block_indices: wanted an int32 tensor"),
    (lambda c: {"query": c["query"][:, :3]}, "query heads must be a multiple of kv heads"),
    (lambda c: {"scale": math.nan}, "scale: wanted a finite number"),
    (
        lambda c: {"block_pattern": lz.BlockPattern(c["block_indptr"].clone(), c["block_indices"])},
        "block_pattern: wanted the BlockPattern of these two",
    ),
]


@at_once("change, text", WRONG)
def test_what_means_nothing_is_refused(change, text):
    given = call()
    lz.sparse_attention(**given)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.sparse_attention(**given | change(given))


def test_a_kept_plan_is_told_what_leads_beyond_the_keys():
    given = call()
    lz.sparse_attention(**given)
    wrong = given | {"block_indices": given["block_indices"] + 2}
    for debug in (False, True):
        with lz.scope(debug=debug), pytest.raises(lz.InvalidCallError, match="wanted a column of blocks from 0 to 5"):
            lz.sparse_attention(**wrong)


def of_unlike_sizes():
    torch.manual_seed(0)
    query, (key, value) = torch.randn(12, 4, 16), torch.randn(2, 20, 2, 16)
    sizes = torch.tensor([[5, 0, 7], [1, 2, 9]], dtype=torch.int32), torch.tensor([[8, 12], [20, 0]], dtype=torch.int32)
    seen = torch.tensor([[[1, 0], [1, 1], [0, 1]], [[1, 1], [0, 1], [1, 0]]], dtype=torch.bool)
    names = ("query", "key", "value", "seen_blocks", "row_sizes", "col_sizes")
    return dict(zip(names, (query, key, value, seen, *sizes), strict=True))


@pytest.mark.parametrize("kernel", ["torch.variable_sparse_masked", "reference.attention.sparse.variable"])
def test_blocks_of_unlike_sizes_are_a_mask_for_each_key_head(kernel):
    given = of_unlike_sizes()
    mask = torch.zeros(2, 12, 20, dtype=torch.bool)
    mask[0, :5, :8] = mask[0, 5:, 8:] = mask[1, :1] = mask[1, 3:] = True
    dense = (given[name][None] for name in ("query", "key", "value"))
    wanted = attention_reference(*dense, attn_mask=mask.repeat_interleave(2, 0)[None])[0]
    with lz.scope(locks={"attention.sparse.variable": kernel}):
        output = lz.variable_sparse_attention(**given)
    torch.testing.assert_close(output, wanted)
    assert output[1:3, 2:].abs().max() == 0  # the second row of the second key head sees a block without a key


@pytest.mark.parametrize("device", ["H100", "cpu"])
def test_on_a_gpu_each_head_has_keys_of_its_own(monkeypatch, device):
    given, attend, seen = of_unlike_sizes(), functional.scaled_dot_product_attention, []

    def attended(query, key, value, *, attn_mask, scale):
        seen.append(key)
        return attend(query, key, value, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(hidden_keys.functional, "scaled_dot_product_attention", attended)
    named = lz.Device.detect("cpu") if device == "cpu" else lz.Device.named(device)
    facts = FactsBuilder(VARIABLE_SPARSE).build(**given, device=named)
    output = hidden_keys._load(facts)(*given.values())
    torch.testing.assert_close(output, variable_sparse_attention(**given))
    (key,) = seen
    assert key.shape == (2, 2, 20, 16)
    assert (key.stride(1) == 0) is (device == "cpu")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: {"row_sizes": c["row_sizes"] + 1}, r"row_sizes\[0\]: wanted sizes of at least 0 that sum up to 12"),
        (lambda c: {"col_sizes": c["col_sizes"][:, :1]}, "col_sizes: wanted col_blocks 2"),
        (lambda c: {"seen_blocks": c["seen_blocks"].int()}, "seen_blocks: wanted dtype bool"),
        (lambda c: {"query": c["query"][:, :3]}, "query heads must be a multiple of kv heads"),
    ],
)
def test_blocks_of_unlike_sizes_that_mean_nothing_are_refused(change, text):
    given = of_unlike_sizes()
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.variable_sparse_attention(**given | change(given))
