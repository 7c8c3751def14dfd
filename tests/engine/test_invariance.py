"""Bits that do not depend on the batch or on ranks: the settings, what they choose, and conformance that proves it."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import layerzero as lz
from layerzero.backends.torch import tiled, tiled_attention
from layerzero.core.device import Device
from layerzero.core.errors import NoKernelFoundError
from layerzero.engine.registry import REGISTRY
from layerzero.ops import OPERATIONS
from layerzero.testing import invariance
from layerzero.testing.sizes import CheckSetting, base_case

LIBRARIES = {"torch": "2.11.0+cu130", "vllm": "0.20.0"}


def _meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _kernel(operation, name):
    return next(each for each in REGISTRY.candidates(operation) if each.id == name)


def _checked(check, operation, kernel, dtype=torch.float32):
    setting = CheckSetting(OPERATIONS[operation], dtype, "cpu", next(iter(OPERATIONS[operation].layouts), ""))
    case, trial = base_case(kernel, setting)
    assert trial is not None
    assert not trial.reasons
    return check(kernel, setting, case)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("mlp.linear", "torch.linear_tiled"),
        ("mlp.silu_mul", "torch.silu_mul_tiled"),
        ("attention.gqa.decode", "torch.sdpa.tiled_decode"),
        ("norm.rms", "torch.rms_norm"),
    ],
)
def test_kernels_that_declare_it_give_rows_the_same_bits_in_every_batch(operation, name):
    found = _checked(invariance.batches, operation, _kernel(operation, name))
    assert found.status == "passed", found


def test_conformance_finds_a_kernel_that_declares_it_and_has_other_bits_in_a_batch():
    planted = replace(_kernel("activation.silu", "torch.silu"), id="planted.silu", batch_invariant=True)
    inner = planted.load

    def load(facts):
        run = inner(facts)
        return lambda input: run(input) * (1 + 1e-6 * (input.numel() > input.shape[-1]))

    found = _checked(invariance.batches, "activation.silu", replace(planted, load=load))
    assert found.status == "wrong"
    assert "batch_invariant" in found.message


def test_a_check_that_compared_nothing_does_not_pass(monkeypatch):
    monkeypatch.setattr(invariance, "_place_of", lambda *_: None)  # no result has rows to cut
    found = _checked(invariance.batches, "norm.rms", _kernel("norm.rms", "torch.rms_norm"))
    assert found.status == "not tried", found


@pytest.mark.parametrize(
    ("operation", "name"), [("mlp.linear", "torch.linear_tree"), ("attention.gqa.prefill", "torch.sdpa.tiled")]
)
def test_parts_of_1_2_and_4_ranks_have_the_bits_of_the_whole(operation, name):
    found = _checked(invariance.ranks, operation, _kernel(operation, name))
    assert found.status == "passed", found


def test_conformance_finds_a_kernel_that_declares_tp_invariant_and_sums_in_another_order():
    def in_hundreds(input, weight):  # a share of 256 ends within one of them, whatever the library's own order is
        parts = zip(input.split(100, -1), weight.split(100, -1), strict=True)
        return sum(torch.nn.functional.linear(*part) for part in parts)

    planted = replace(_kernel("mlp.linear", "torch.linear_tiled"), tp_invariant=True, load=lambda _: in_hundreds)
    assert _checked(invariance.ranks, "mlp.linear", planted).status == "wrong"


def test_the_setting_leaves_kernels_that_declare_it_and_none_of_these_runs_without():
    x, weight = torch.randn(40, 96), torch.randn(64, 96) / 10
    assert lz.which("linear", x, weight)["kernel_id"] != "torch.linear_tiled"
    with lz.scope(batch_invariant=True):
        assert lz.which("linear", x, weight)["kernel_id"] == "torch.linear_tiled"
        whole = lz.linear(x, weight)
        assert all(torch.equal(lz.linear(x[row : row + 1], weight), whole[row : row + 1]) for row in range(40))
    with lz.scope(require_tp_invariant=True):
        assert lz.which("linear", x, weight)["kernel_id"] == "torch.linear_tree"


def test_prompts_cut_in_chunks_and_steps_have_the_bits_of_the_whole():
    query, key, value = torch.randn(2, 40, 8, 32), torch.randn(2, 40, 2, 32), torch.randn(2, 40, 2, 32)
    with lz.scope(batch_invariant=True):
        whole = lz.attention(query, key, value, causal=True, layout="BSHD")
        for start, end in ((0, 13), (13, 40), (39, 40), (7, 9), (0, 1)):
            part = lz.attention(query[1:, start:end], key[1:, :end], value[1:, :end], causal=True, layout="BSHD")
            assert torch.equal(part, whole[1:, start:end])


@pytest.mark.parametrize("causal", [True, False])
def test_sequences_of_unlike_lengths_have_the_bits_of_each_alone(causal):
    starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    query, key, value = torch.randn(20, 4, 32), torch.randn(20, 2, 32), torch.randn(20, 2, 32)
    with lz.scope(batch_invariant=True):
        call = (query, key, value, starts, starts)
        assert lz.explain("ragged_attention", *call, causal=causal).chosen.kernel.id == "torch.ragged_tiled"
        found = lz.ragged_attention(*call, causal=causal)
        parts = ([each[None, start:end] for each in (query, key, value)] for start, end in ((0, 7), (7, 20)))
        alone = [lz.attention(*part, layout="BSHD", causal=causal)[0] for part in parts]
    assert torch.equal(found, torch.cat(alone))


def test_paged_attention_by_tiles_is_causal_unless_told_otherwise():
    starts, lengths = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([9, 13], dtype=torch.int32)
    pages = torch.randn(2, 4, 8, 2, 32).unbind()
    call = (torch.randn(20, 4, 32), *pages, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), lengths)
    with lz.scope(batch_invariant=True):
        told = {"cu_seqlens_q": starts, "layout": "NHD"}
        assert lz.explain("paged_attention", *call, **told).chosen.kernel.id == "torch.paged_tiled"
        found, causal, full = (
            lz.paged_attention(*call, **each, **told) for each in ({}, {"causal": True}, {"causal": False})
        )
    assert torch.equal(found, causal)
    assert not torch.equal(found, full)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_draws_with_a_seed_a_row_and_what_comes_before_them_depend_on_the_row_alone(columns):
    logits, seeds, ids = torch.randn(4, 1000), torch.arange(4) * 2**32, torch.randint(1000, (4, 9))
    if columns:  # lie one after the other, as those of a product whose weight came first
        logits = logits.t().contiguous().t()
    counts = lz.TokenCounts(1000)
    rows = [counts.begin(each) for each in ids.tolist()]

    def drawn(row):
        said = lz.apply_penalties(logits[row], ids[row], repetition=1.3, frequency=0.2)
        counted = lz.apply_penalties(said, **counts.of(rows[row]), repetition=1.1, presence=0.3)
        biased = lz.add_logit_bias(counted, ids[row], torch.full((len(seeds[row]), 9), 0.1))
        tokens = lz.sample(biased, top_k=50, top_p=0.9, min_p=0.01, temperature=0.8, seed=seeds[row])
        return biased, tokens, *(lz.chosen_logprobs(each, tokens) for each in (biased, logits[row]))

    with lz.scope(batch_invariant=True):
        whole = drawn(slice(None))
        for row in range(4):
            part = drawn(slice(row, row + 1))
            assert all(torch.equal(each, every[row : row + 1]) for each, every in zip(part, whole, strict=True))
        with pytest.raises(NoKernelFoundError, match="BATCH_INVARIANCE_REQUIRED"):
            lz.sample(logits)


@pytest.mark.parametrize("vocab", [32768, 40001])
def test_log_probabilities_of_long_rows_have_the_bits_of_each_row_alone(vocab):
    """torch shares the sum of a row of 32,768 numbers and more out among threads, where it is the only row."""
    logits, ids, threads = torch.randn(3, vocab), torch.randint(vocab, (3,)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with lz.scope(batch_invariant=True):
            whole = lz.chosen_logprobs(logits, ids)
            alone = [lz.chosen_logprobs(logits[row : row + 1], ids[row : row + 1]) for row in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), whole)
    wanted = logits.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(whole.double(), wanted, rtol=1e-6, atol=1e-5)


def test_what_declares_nothing_runs_entries_of_the_batch_one_by_one_or_is_refused_by_name():
    query, key, value = torch.randn(6, 20, 4, 16), torch.randn(6, 20, 4, 16), torch.randn(6, 20, 4, 16)
    with lz.scope(batch_invariant=True), pytest.raises(NoKernelFoundError, match="BATCH_INVARIANCE_REQUIRED"):
        lz.quantize(torch.randn(4, 64), "int8")
    with lz.scope(batch_invariant=True), pytest.warns(UserWarning, match="alone"):
        whole = lz.attention(query, key, value, softcap=5.0, layout="BSHD")
    with lz.scope(batch_invariant=True):
        alone = lz.attention(query[2:3], key[2:3], value[2:3], softcap=5.0, layout="BSHD")
    assert torch.equal(alone, whole[2:3])


def test_attention_by_tiles_adds_a_mask_as_exactly_as_it_was_given():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(8, 4, rows, 64, generator=generator).half() for rows in (1, 64, 64))
    mask = torch.randn(8, 4, 1, 64, generator=generator) + 16  # float16 would round it by up to 0.8 % of a weight
    with lz.scope(batch_invariant=True):
        call = {"layout": "BHSD", "attn_mask": mask, "causal": False}
        assert lz.explain("attention", query, key, value, **call).chosen.kernel.id == "torch.sdpa.tiled_decode"
        found = lz.attention(query, key, value, **call)
    scores = query.double() @ key.double().transpose(-1, -2) / 8 + mask.double()
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ value.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("device", "more", "name"),
    [
        ("H200", {}, "vllm.flash_attn.v3.unsplit"),
        ("H200", {"softcap": 5.0}, "vllm.flash_attn.v3.unsplit"),
        ("H200", {"window": (4, 0)}, "torch.sdpa.unsplit"),  # version 3 drops a window wider than the keys
        ("A100", {}, "vllm.flash_attn.v2.unsplit"),
        ("B200", {}, "torch.sdpa.unsplit"),  # a build of version 2 in the background would change bits
    ],
)
@pytest.mark.parametrize("queries", [1, pytest.param(13, marks=pytest.mark.slow), 20])
def test_prompts_their_parts_and_steps_take_one_kernel_on_a_gpu(device, more, name, queries):
    given = _meta(3, queries, 32, 128), _meta(3, 20, 8, 128), _meta(3, 20, 8, 128)
    call = {"layout": "BSHD", "device": device, "libraries": LIBRARIES, "causal": queries > 1, **more}
    with lz.scope(batch_invariant=True, require_vetting=False):
        assert lz.explain("attention", *given, **call).chosen.kernel.id.removesuffix("_decode") == name
    with lz.scope(batch_invariant=True):  # what never ran proves itself first
        assert ".v2" not in name or lz.explain("attention", *given, **call).reasons(name)
    assert not lz.explain("attention", *given, **call).chosen.kernel.asked_for


def test_what_computes_each_number_by_itself_runs_in_one_launch_and_a_norm_that_knows_the_batch_does_not():
    query, key, table = _meta(2, 4, 8, 64), _meta(2, 4, 2, 64), torch.empty(4, 32, device="meta")
    calls = {
        "vllm.rope_inplace": ("rope_", query, key, table, table),
        "vllm.silu_mul": ("silu_mul", _meta(8, 256)),
        "torch.rms_norm": ("rms_norm", _meta(8, 256), _meta(256)),
    }
    with lz.scope(batch_invariant=True):
        for name, call in calls.items():
            more = {"layout": "BSHD"} if call[0] == "rope_" else {}
            found = lz.explain(*call, device="H200", libraries=LIBRARIES, **more)
            assert found.chosen.kernel.id == name


class _Facts(dict):
    """Of a call on a GPU that is not here."""

    device = Device("cuda", "NVIDIA H200", "nvidia")


def test_rows_are_filled_up_to_whole_tiles_once_for_all_products_of_a_call():
    given, seen = torch.randn(2, 3, 8), []

    def run(rows, weight):
        seen.append(rows)
        return rows @ weight, rows @ (2 * weight)

    filled, weight = tiled.filling(_Facts(requires_grad=False), run), torch.eye(8)
    found = filled(given, weight)
    assert [each.shape for each in seen] == [(128, 8)]
    assert torch.equal(found[0], given)
    assert torch.equal(found[1], 2 * given)
    whole = torch.randn(128, 8)
    assert torch.equal(filled(whole, weight)[0], whole)
    assert seen[1] is whole  # nothing is copied


@pytest.mark.parametrize("capturing", [False, True])
def test_layers_of_a_step_share_where_sequences_begin_and_a_capture_keeps_none_of_it(monkeypatch, capturing):
    streams = [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: streams[-1], raising=False)
    starts = tiled_attention.starts_of_one_length(_Facts(capturing=capturing))
    with FakeTensorMode():
        first = starts(3, 4, 5)
        assert first[0].shape == (4,)
        assert (starts(3, 4, 5) is first) is not capturing
        streams.append(8)
        assert starts(3, 4, 5) is not first
        made = weakref.ref(starts(2, 1, 9)[0])
    assert (made() is None) is capturing
