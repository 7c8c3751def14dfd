"""Attention over a paged cache: the references against loops, steps, and what calls refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from drawing import at_once
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.paged.declare import paged_attention_reference
from layerzero.testing import case_call, check
from paged_calls import PAGE, decoding


def by_hand(query, keys, values, table, lens, scale=None, left=None):
    """One score after the other."""
    batch, _, heads, head_dim = query.shape
    scale, group = scale or head_dim**-0.5, heads // keys.shape[2]
    output = torch.zeros(batch, 1, heads, values.shape[-1], dtype=query.dtype)
    for b in range(batch):
        length = int(lens[b])
        first = 0 if left is None else max(0, length - 1 - left)
        for h in range(heads):
            rows = [(int(table[b, p // PAGE]), p % PAGE, h // group) for p in range(first, length)]
            weights = [math.exp(float(query[b, 0, h] @ keys[row]) * scale) for row in rows]
            for weight, row in zip(weights, rows, strict=True):
                output[b, 0, h] += weight / sum(weights) * values[row]
    return output


@pytest.mark.parametrize("garbage", [-1, 2**30])
@pytest.mark.parametrize("lens", [(5, 1, 8), (0, 3, 4)], ids=str)
def test_the_reference_is_attention_by_hand(lens, garbage):
    call = decoding(lens, garbage=garbage)
    torch.testing.assert_close(paged_attention_reference(*call), by_hand(*call))
    torch.testing.assert_close(
        paged_attention_reference(*call, scale=0.3, window=(2, 0)), by_hand(*call, scale=0.3, left=2)
    )
    torch.testing.assert_close(paged_attention_reference(*call, max_context_len=max(lens)), by_hand(*call))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_public_function_routes_by_head_counts_and_takes_both_layouts(kv_heads):
    query, keys, values, table, lens = call = decoding(kv_heads=kv_heads)
    kind = "standard" if kv_heads == 4 else "gqa"
    assert lz.explain("paged_attention", *call).operation == f"attention.{kind}.decode.paged"
    wanted = by_hand(*call)
    torch.testing.assert_close(lz.paged_attention(*call), wanted)
    moved = [cache.transpose(1, 2).contiguous() for cache in (keys, values)]
    torch.testing.assert_close(lz.paged_attention(query, *moved, table, lens, layout="HND"), wanted)


@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # only the reference has the log-sum-exp here
def test_an_empty_sequence_gives_zero_and_minus_infinity():
    output, lse = lz.paged_attention(*decoding((0, 3)), return_lse=True)
    assert output[0].abs().max() == 0
    assert torch.equal(lse[0], torch.full((4, 1), -math.inf))
    assert lse.dtype is torch.float32
    assert lse[1].isfinite().all()


def test_lengths_that_grow_within_the_bound_stay_on_one_plan():
    query, keys, values, table, lens = decoding((5, 3))
    lz.paged_attention(query, keys, values, table, lens, max_context_len=5)
    kept = CALLS["paged_attention"].dispatcher.cache.size()
    lens += 1
    keys.nan_to_num_(0.5)
    values.nan_to_num_(0.25)
    table.clamp_(min=0)
    got = lz.paged_attention(query, keys, values, table, lens, max_context_len=6)
    torch.testing.assert_close(got, by_hand(query, keys, values, table, lens))
    assert CALLS["paged_attention"].dispatcher.cache.size() == kept


# steps


def counting_kernel(counts):
    """A kernel that plans on values, as FlashInfer does, and counts how often."""

    class Lengths:
        def __init__(self, step):
            self.update(step)

        def update(self, step):
            counts.append(step.context_lens.tolist())
            self.lens = step.context_lens.clone()

    def run(query, key_cache, value_cache, block_tables, context_lens, *, step=None, max_context_len=None):
        if step is None:
            step = lz.StepMetadata(block_tables, context_lens)
        slot = step.slot("user.planning", Lengths)
        return paged_attention_reference(query, key_cache, value_cache, block_tables, slot.lens)

    lz.register_kernel("attention.gqa.decode.paged", "user.planning", layout="NHD", priority=100)(run)


def test_layers_that_share_a_step_plan_once_and_again_when_it_advances():
    counts = []
    counting_kernel(counts)
    call = decoding((5, 3))
    table, lens = call[3:]
    step = lz.StepMetadata(table, lens)
    for _layer in range(32):
        got = lz.paged_attention(*call, step=step)
    torch.testing.assert_close(got, by_hand(*call))
    assert counts == [[5, 3]]
    lens -= 1
    step.advance()
    torch.testing.assert_close(lz.paged_attention(*call, step=step), by_hand(*call))
    assert counts == [[5, 3], [4, 2]]
    lz.paged_attention(*call)
    lz.paged_attention(*call)
    assert len(counts) == 4  # without a step, every call


def test_a_step_of_other_tables_is_refused_on_a_kept_plan_too():
    query, keys, values, table, lens = call = decoding((5, 3))
    step = lz.StepMetadata(table, lens)
    lz.paged_attention(*call, step=step)
    with pytest.raises(lz.InvalidCallError, match="step: wanted the StepMetadata of these block_tables"):
        lz.paged_attention(query, keys, values, table.clone(), lens, step=step)


def test_slot_mapping_is_where_the_newest_tokens_belong_and_keeps_its_buffer():
    table = torch.tensor([[7, 2], [5, 9]], dtype=torch.int32)
    lens = torch.tensor([5, 1], dtype=torch.int32)
    step = lz.StepMetadata(table, lens)
    slots = step.slot_mapping(PAGE)
    assert slots.tolist() == [2 * PAGE + 0, 5 * PAGE]
    assert step.slot_mapping(PAGE, tokens=2).tolist() == [7 * PAGE + 3, 2 * PAGE, -1, 5 * PAGE]
    lens += 1
    step.advance()
    assert slots.tolist() == [2 * PAGE + 1, 5 * PAGE + 1]
    assert step.slot_mapping(PAGE) is slots


def test_append_then_attend_as_a_model_does():
    query, keys, values, table, lens = decoding((5, 3), dtype=torch.float32)
    table.clamp_(min=0)
    table[1, 1] = 6 - int(table.sum() - table[1, 1]) % 5  # any page of its own will do
    pages = set(table[0].tolist()) | {int(table[1, 0])}
    table[1, 1] = next(page for page in range(5) if page not in pages)
    lens += 1
    step = lz.StepMetadata(table, lens)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    lz.append_paged_kv_(k, v, keys, values, step.slot_mapping(PAGE))
    got = lz.paged_attention(query, keys, values, table, lens, step=step)
    torch.testing.assert_close(got, by_hand(query, keys, values, table, lens))


# what a call refuses


def changed(**changes):
    names = ("query", "key_cache", "value_cache", "block_tables", "context_lens")
    return dict(zip(names, decoding(), strict=True)) | changes


WRONG = [
    (lambda c: {"block_tables": c["block_tables"].long()}, "block_tables: wanted an int32 tensor"),
    (lambda c: {"block_tables": c["block_tables"].float()}, "block_tables: wanted an int32 tensor"),
    (lambda c: {"block_tables": c["block_tables"][0]}, r"wanted an int32 tensor \(B, max_blocks\), got int32 \(2,\)"),
    (
        lambda c: {"block_tables": c["block_tables"].to("meta")},
        "block_tables and context_lens: wanted both on the device of the caches, got meta and cpu",
    ),
    (lambda c: {"block_tables": c["block_tables"].tolist()}, "got list"),
    (lambda c: {"context_lens": c["context_lens"][:2]}, "wanted 3 lengths as in block_tables, got 2"),
    (lambda c: {"context_lens": c["context_lens"].long()}, "context_lens: wanted an int32 tensor"),
    (lambda c: {"query": c["query"][:2]}, "wanted batch"),
    (lambda c: {"query": c["query"].expand(3, 2, 4, 8)}, "one token a sequence"),
    (lambda c: {"query": c["query"][:, 0]}, "query: wanted a 4D tensor, got 3D"),
    (lambda c: {"value_cache": c["value_cache"].float()}, "value_cache: wanted dtype float64 like query, got float32"),
    (
        lambda c: {"query": c["query"].float(), "value_cache": c["value_cache"].half()},
        "value_cache: wanted dtype float64 like key_cache, got float16",
    ),
    (lambda c: {"query": c["query"][..., :4]}, "key_cache: wanted head_dim 4"),
    (lambda c: {"query": c["query"][:, :, :3]}, "query heads must be a multiple of kv heads"),
    (lambda c: {"value_cache": c["value_cache"][:3]}, "value_cache: wanted pages"),
    (lambda c: {"layout": "BSHD"}, "layout: wanted NHD or HND, got 'BSHD'"),
    (lambda c: {"max_context_len": 0}, "max_context_len: wanted a number of at least 1 or None, got 0"),
    (lambda c: {"max_context_len": 2.0}, "max_context_len: wanted a number"),
    (lambda c: {"step": "now"}, "step: wanted a StepMetadata or None, got str"),
    (lambda c: {"scale": math.inf}, "scale: wanted a finite number"),
    (lambda c: {"window": (1,)}, "window: wanted"),
    (lambda c: {"softcap": -1.0}, "softcap: wanted"),
]


@at_once("change, text", WRONG)
def test_what_means_nothing_is_refused_before_anything_is_read(change, text):
    arguments = changed()
    lz.paged_attention(**arguments)
    with pytest.raises(lz.InvalidCallError, match=text):
        lz.paged_attention(**arguments | change(arguments))
    assert not ENGINE.health.breakers()


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (lambda c: c["context_lens"].fill_(9), r"context_lens\[0\]: wanted 0 to 8, got 9"),
        (lambda c: c["context_lens"].fill_(-1), r"context_lens\[0\]: wanted 0 to 8, got -1"),
        (lambda c: c["block_tables"].fill_(7), r"block_tables\[0, 0\]: wanted 0 to 6, got 7"),
        (lambda c: c["block_tables"].fill_(-1), r"block_tables\[0, 0\]: wanted 0 to 6, got -1"),
        (lambda c: c.update(max_context_len=7), r"context_lens\[2\]: wanted 0 to 7, got 8"),
    ],
)
def test_debug_mode_looks_at_the_values_on_kept_plans_too(break_it, text):
    arguments = changed()
    with lz.scope(debug=True):
        lz.paged_attention(**arguments)
        break_it(arguments)
        for _ in range(2):
            with pytest.raises(lz.InvalidCallError, match=text):
                lz.paged_attention(**arguments)
    assert not ENGINE.health.breakers()


def test_a_cache_is_never_copied_for_a_kernel():
    def dense(query, key_cache, value_cache, block_tables, context_lens):
        return paged_attention_reference(query, key_cache, value_cache, block_tables, context_lens)

    limits = [lz.limits.contiguous("key_cache", "query")]
    lz.register_kernel("attention.gqa.decode.paged", "user.dense", layout="NHD", limits=limits)(dense)
    query, keys, values, table, lens = decoding()
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(*query.shape[:-1], 16, dtype=query.dtype)[..., ::2].copy_(query)
    reasons = lz.explain("paged_attention", wide, strided, values, table, lens).reasons("user.dense")
    assert [(reason.code, reason.fact) for reason in reasons] == [("NOT_CONTIGUOUS", "key_cache")]


def without_garbage():
    """Calls that may be run on any of their numbers."""
    query, keys, values, table, lens = decoding(dtype=torch.float32, garbage=0)
    return query, keys.nan_to_num(0.5), values.nan_to_num(0.5), table, lens


@pytest.mark.parametrize("name", ["paged_attention", "paged_attention_lse", "append_paged_kv_"])
@pytest.mark.filterwarnings("ignore::layerzero.LayerZeroFallbackWarning")  # only the reference has the log-sum-exp here
def test_operators_pass_torchs_own_check(name):
    query, keys, values, table, lens = without_garbage()
    arguments = (query, keys, values, table, lens, 0.3, "NHD", [2, 0])
    if name == "append_paged_kv_":
        arguments = (torch.randn(2, 2, 8), torch.randn(2, 2, 8), keys, values, torch.tensor([3, 9]))
    torch.library.opcheck(getattr(torch.ops.layerzero, name).default, arguments)


def test_compiled_code_sees_one_operator_for_each():
    query, keys, values, table, lens = without_garbage()
    step = lz.StepMetadata(table, lens)

    def layer(query, new, slots):
        lz.append_paged_kv_(new, new * 2, keys, values, slots)
        return lz.paged_attention(query, keys, values, table, lens, max_context_len=8)

    new, slots = torch.randn(3, 2, 8), step.slot_mapping(PAGE)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(query, new, slots)
    torch.testing.assert_close(got, by_hand(query, keys, values, table, lens))


def test_a_step_that_compiled_code_cannot_use_is_told():
    query, keys, values, table, lens = without_garbage()
    step = lz.StepMetadata(table, lens)

    def layer(query):
        return lz.paged_attention(query, keys, values, table, lens, step=step)

    with pytest.warns(lz.LayerZeroPerformanceWarning, match="paged_attention: step= has no effect in compiled code"):
        got = torch.compile(layer, fullgraph=True, backend="aot_eager")(query)
    torch.testing.assert_close(got, by_hand(query, keys, values, table, lens))


@pytest.mark.parametrize(
    "operation", ["attention.standard.decode.paged", "attention.gqa.decode.paged", "kv.append.paged"]
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_smallest_case_of_each_operation_is_right(operation, layout):
    declared = next(each for each in lz.list_operations() if each.name == operation)
    call = case_call(declared, declared.cases[0], torch.bfloat16, layout=layout)
    assert check(call) == []


@pytest.mark.parametrize("kernel", ["torch.paged_gather", "reference.attention.gqa.decode.paged"])
@pytest.mark.parametrize(("lens", "tokens"), [([5, 9, 0], 12), ([0, 0, 0], 0), ([1, 2, 64], 64)])
def test_on_a_cpu_no_more_of_a_table_is_read_than_the_longest_sequence_has(kernel, lens, tokens):
    """Tables of a step that is reused have columns for the longest sequence that there may be."""
    keys, values, query = torch.randn(48, 4, 2, 32), torch.randn(48, 4, 2, 32), torch.randn(3, 1, 4, 32)
    tables = torch.randperm(48).int().view(3, 16)
    call = query, keys, values, tables, torch.tensor(lens, dtype=torch.int32)
    read = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **kwargs or {})
            if function is torch.ops.aten.index.Tensor and args[0].ndim == 4:
                read.append(found.shape[1] * found.shape[2])
            return found

    run = REGISTRY.kernel(kernel).load(lz.explain("paged_attention", *call).facts)
    with Watched():
        got = run(*call)
    assert read == [tokens, tokens]
    dense = [each[tables.long()].flatten(1, 2) for each in (keys, values)]
    torch.testing.assert_close(got, attention_reference(query, *dense, kv_lens=call[-1]))


@pytest.mark.parametrize("form", ["dense", "paged"])
def test_contexts_beyond_32768_tokens_are_right_by_every_kernel(form):
    lens, page_size = torch.tensor([40_000, 32_769], dtype=torch.int32), 64
    query, (keys, values) = torch.randn(2, 1, 4, 32), torch.randn(2, 2, 40_000, 2, 32).unbind()
    hidden = torch.arange(40_000) < lens[:, None]
    stock = torch.nn.functional.scaled_dot_product_attention
    turned = (each.transpose(1, 2) for each in (query, keys, values))
    wanted = stock(*turned, attn_mask=hidden[:, None, None], enable_gqa=True).transpose(1, 2)
    if form == "dense":
        name, given = "attention", {"query": query, "key": keys, "value": values, "kv_lens": lens, "layout": "BSHD"}
    else:
        caches = (each.reshape(-1, page_size, 2, 32) for each in (keys, values))
        tables = torch.arange(2 * 625, dtype=torch.int32).view(2, 625)
        name, given = "paged_attention", dict(zip(("key_cache", "value_cache"), caches, strict=True))
        given |= {"query": query, "block_tables": tables, "context_lens": lens}
    report = lz.explain(name, **given)
    for kernel in [each.kernel.id for each in report.candidates if each.legal]:
        with lz.scope(locks={report.operation: kernel}):
            torch.testing.assert_close(getattr(lz, name)(**given), wanted, rtol=1e-4, atol=1e-5)
