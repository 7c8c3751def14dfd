"""Pairs of kernels for drafts: which fit together, how many tokens a batch drafts, what is kept and what refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from drawing import examples
from layerzero.ops.kv.layer import attention_over

C = lz.ReasonCode


def cache(**form):
    return lz.KVCache(1, 2, 32, pages=4, page_size=16, **{"dtype": torch.float32, **form})


def codes(error):
    return [each.code for each in error.value.reasons]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (9, 5), (15, 5), (16, 2), (31, 2), (32, 0), (33, 0), (1000, 0)])
def test_a_larger_batch_drafts_fewer_tokens(batch, tokens):
    pair = lz.speculative_pair(cache(), cache(), heads=4).at(batch)
    assert (pair.tokens, pair.nodes) == (tokens, tokens)
    assert (pair.target is None) == (pair.draft is None) == (tokens == 0)


def test_the_length_may_stay_and_speculation_may_be_off():
    always = lz.SpeculativeConfig(adaptive_speculation=False, num_speculative_tokens=3)
    assert lz.speculative_pair(cache(), cache(), heads=4, config=always).at(500).tokens == 3
    off = lz.SpeculativeConfig(enabled=False)
    assert lz.speculative_pair(cache(), cache(), heads=4, config=off).at(1).tokens == 0
    own = lz.SpeculativeConfig(adaptive=lz.AdaptiveSpeculation(few_from=2, off_from=3, few_tokens=1))
    assert [own.tokens_for(batch) for batch in (1, 2, 3)] == [5, 1, 0]


def test_the_target_comes_first_and_both_read_the_same():
    target, draft = cache(), cache(layout="HND")
    pair = lz.speculative_pair(draft, target, heads=4).at(4)
    query, starts = torch.empty(4 * 6, 4, 32), torch.arange(0, 25, 6, dtype=torch.int32)
    tables, lens = torch.zeros(4, 16, dtype=torch.int32), torch.full((4,), 6, dtype=torch.int32)
    layer = target.layers[0]
    wanted = lz.which(
        *("paged_attention", query, layer.keys, layer.values, tables, lens), cu_seqlens_q=starts, max_seqlen_q=6
    )
    assert pair.target == wanted["kernel_id"]
    assert pair.locks == {wanted["operation"]: pair.target, "attention.gqa.decode.paged": pair.draft}
    with lz.scope(locks=pair.locks):  # the kernels can be held
        assert lz.paged_attention(torch.zeros(4, 1, 4, 32), layer, block_tables=tables, context_lens=lens).shape[0] == 4


def test_a_draft_takes_a_slower_kernel_that_reads_what_the_target_reads():
    """The fastest kernel of the draft reads nothing that the target's kernel reads: the next that does is taken."""
    with lz.scope(deny=["torch.paged_gather"]):
        pair = lz.speculative_pair(cache(), cache(), heads=4).at(1)
    assert pair.draft != "torch.paged_gather"


def test_dtypes_that_do_not_meet_are_refused():
    with pytest.raises(lz.NoCompatibleKernelPairError, match="Make both caches of one layout and dtype") as raised:
        lz.speculative_pair(cache(), cache(dtype=torch.int8, scales="tensor"), heads=4)
    assert codes(raised) == [C.SPEC_DECODE_KV_INCOMPATIBLE]


def test_all_broken_rules_are_told_at_once():
    config = lz.SpeculativeConfig(pipeline_parallel_size=2, draft_tp_size=4, max_draft_tp_size=2, share_kv_cache=True)
    with pytest.raises(lz.NoCompatibleKernelPairError) as raised:
        lz.speculative_pair(cache(layout="HND", dtype=torch.bfloat16), cache(), heads=4, config=config)
    kv = C.SPEC_DECODE_KV_INCOMPATIBLE
    assert codes(raised) == [C.SPEC_DECODE_PP_INCOMPATIBLE, C.SPEC_DECODE_DRAFT_TP_CONSTRAINT, kv, kv]
    assert "layout of a draft that shares the cache: wanted NHD, got HND" in str(raised.value)


def test_a_shared_cache_is_one_or_alike():
    target, config = cache(), lz.SpeculativeConfig(share_kv_cache=True)
    for draft in (None, target, cache()):
        assert lz.speculative_pair(draft, target, heads=4, config=config).at(1).draft is not None


@pytest.mark.parametrize("config", [lz.MedusaConfig(), lz.NGramConfig()], ids=lambda each: each.algorithm)
def test_drafts_without_a_cache_have_no_kernel(config):
    pair = lz.speculative_pair(None, cache(), heads=4, config=config).at(1)
    assert (pair.tokens, pair.draft) == (5, None)
    with pytest.raises(lz.InvalidCallError, match=f"draft: wanted None with {config.algorithm}"):
        lz.speculative_pair(cache(), cache(), heads=4, config=config)
    with pytest.raises(lz.InvalidCallError, match="share_kv_cache: wanted False"):
        type(config)(share_kv_cache=True)


def test_two_kernels_of_one_operation_are_not_locked():
    """A decode and a verification over latent attention are one operation, which a lock leaves one kernel."""
    latent = lz.KVCache(1, latent=(512, 64), pages=2, page_size=16)
    pair = lz.speculative_pair(latent, latent, heads=4).at(1)
    function, given = attention_over(latent, 4, 1, pair.nodes + 1)
    with lz.scope(locks=pair.locks):
        assert lz.which(function, **given)["kernel_id"] == pair.target


def test_trees_want_a_cache_whose_kernels_take_masks():
    latent = lz.KVCache(1, latent=(512, 64), pages=2, page_size=16, dtype=torch.float32)
    tree = lz.MedusaConfig(choices=((0,), (1,), (0, 0)))
    with pytest.raises(lz.NoCompatibleKernelPairError) as raised:
        lz.speculative_pair(None, latent, heads=4, config=tree)
    assert codes(raised) == [C.SPEC_DECODE_ALGORITHM_UNSUPPORTED]
    assert lz.speculative_pair(None, latent, heads=4, config=lz.NGramConfig()).at(1).target is not None
    assert lz.speculative_pair(None, cache(), heads=4, config=tree).at(1).nodes == 3
    eagle = lz.EagleConfig(topk=4, num_speculative_tokens=3)
    assert lz.speculative_pair(cache(), cache(), heads=4, config=eagle).at(1).nodes == 12


def test_a_cache_that_nothing_attends_over_is_refused():
    with pytest.raises(lz.NoCompatibleKernelPairError) as raised:
        lz.speculative_pair(cache(), cache(layout="VLLM"), heads=4)
    assert codes(raised) == [C.SPEC_DECODE_KV_INCOMPATIBLE]


def test_pairs_are_kept_by_bucket_and_dropped_on_change():
    pairs = lz.speculative_pair(cache(), cache(), heads=4)
    assert pairs.at(5) is pairs.at(8)
    assert pairs.at(5) is not pairs.at(4)
    assert len(pairs) == 3  # one sequence was asked about when it was made
    assert pairs.at(15) is not pairs.at(16)  # of one bucket, but not of one length
    kept = pairs.at(5)
    try:
        lz.lock("attention.gqa.decode.paged", "reference.attention.gqa.decode.paged")
        assert pairs.at(5).draft == "reference.attention.gqa.decode.paged"
        assert len(pairs) == 1
    finally:
        lz.unlock("attention.gqa.decode.paged")
    assert pairs.at(5) == kept
    before = pairs.at(5)
    for _ in range(2):  # a scope's are its own: steps that take turns choose once each
        with lz.scope(deny=["torch.paged_gather"]):
            scoped = pairs.at(5)
            assert pairs.at(5) is scoped
        assert pairs.at(5) is before
    assert len(pairs) == 2
    forgets = lz.speculative_pair(cache(), cache(), heads=4, config=lz.SpeculativeConfig(cache_kernel_pairs=False))
    assert forgets.at(2) is not forgets.at(2)
    assert len(forgets) == 0


def test_algorithms_have_fields_of_their_own():
    assert lz.EagleConfig().hidden_layers_of(32) == (31,)
    assert lz.Eagle3Config().hidden_layers_of(32) == (2, 16, 29)
    assert lz.Eagle3Config(hidden_layers=(1, 2, 3)).hidden_layers_of(32) == (1, 2, 3)
    medusa = lz.MedusaConfig(choices=((1,), (0,), (0, 1), (0, 0), (1, 0)))
    assert medusa.parents(2) == [-1, -1, 0, 0, 1]
    assert medusa.parents(1) == [-1, -1]
    assert lz.MedusaConfig().parents(3) == [-1, 0, 1]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4), st.integers(0, 6))
def test_an_ngram_drafts_what_followed_the_same_tokens(tokens, most, count):
    drafted = lz.NGramConfig(most=most).propose(tokens, count)
    if not drafted:
        assert count == 0 or tokens[-1:] == [] or tokens[-1] not in tokens[:-1]
        return
    assert len(drafted) <= count
    size = next(size for size in range(most, 0, -1) if tokens[-size:] in [
        tokens[at : at + size] for at in range(len(tokens) - size)
    ])  # fmt: skip
    assert any(
        tokens[at : at + size] == tokens[-size:] and tokens[at + size :][: len(drafted)] == drafted
        for at in range(len(tokens) - size)
    )


def test_bad_fields_are_refused_by_name():
    for call, said in (
        (
            lambda: lz.SpeculativeConfig(num_speculative_tokens=0),
            "num_speculative_tokens: wanted a number from 1 to 10",
        ),
        (lambda: lz.SpeculativeConfig(num_speculative_tokens=11), "num_speculative_tokens: wanted"),
        (lambda: lz.SpeculativeConfig(enabled=1), "enabled: wanted True or False, got 1"),
        (lambda: lz.SpeculativeConfig(draft_tp_size=0), "draft_tp_size: wanted"),
        (lambda: lz.SpeculativeConfig(adaptive=5), "adaptive: wanted an AdaptiveSpeculation, got 5"),
        (lambda: lz.AdaptiveSpeculation(few_from=40), "few_from: wanted at most off_from, 32, got 40"),
        (lambda: lz.EagleConfig(topk=0), "topk: wanted"),
        (lambda: lz.EagleConfig(nodes=8), "nodes: wanted None with topk=1"),
        (lambda: lz.Eagle3Config(hidden_layers=(1, 1, 2)), "hidden_layers: wanted three layers"),
        (lambda: lz.MedusaConfig(choices=((0, 1),)), r"choices: wanted the path \(0,\) as well"),
        (lambda: lz.NGramConfig(most=1, least=2), "least: wanted"),
        (
            lambda: lz.speculative_pair(None, cache(), heads=4),
            "draft: wanted the draft's cache, or share_kv_cache=True",
        ),
        (lambda: lz.speculative_pair(cache(), 3, heads=4), "target: wanted a KVCache, got 3"),
        (lambda: lz.speculative_pair(cache(), cache(), heads=0), "heads: wanted a number of at least 1, got 0"),
        (lambda: lz.speculative_pair(cache(), cache(), heads=3), "heads: wanted a multiple of the 2 key heads, got 3"),
        (
            lambda: lz.speculative_pair(cache(), cache(), heads=4, draft_heads=3),
            "speculative_pair: draft_heads: wanted a multiple of the 2 key heads, got 3",
        ),
        (lambda: lz.speculative_pair(cache(), cache(), heads=4, config={}), "config: wanted a SpeculativeConfig"),
        (lambda: lz.speculative_pair(cache(), cache(), heads=4).at(0), "batch: wanted a number of at least 1"),
    ):
        with pytest.raises(lz.InvalidCallError, match=said):
            call()
