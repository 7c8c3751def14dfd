"""Latent attention: absorbed against projected, every kernel here against the reference, and what calls refuse."""

from __future__ import annotations

import math

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.ops.attention.reference import attention_reference
from layerzero.ops.latent import NAME, joined, mla_attention

SCALE = 192**-0.5
KERNELS = ("torch.mla_gather", "torch.mla_sdpa_cpu", "vllm.cpu.mla_decode")


def call(lens=(17, 40, 3), queries=1, heads=4, widths=(512, 64), page_size=16, dtype=torch.float32, apart=False):
    """A decode's call: NaN in every place that no sequence owns, entries of tables beyond the end that lead nowhere."""
    torch.manual_seed(0)
    blocks = -(-max(*lens, 1) // page_size)
    pages = len(lens) * blocks + 1
    both = torch.full((pages, page_size, sum(widths)), math.nan, dtype=dtype)
    table = torch.randperm(pages)[: len(lens) * blocks].view(len(lens), blocks).int()
    for row, length in enumerate(lens):
        for position in range(length):
            both[table[row, position // page_size], position % page_size] = torch.randn(sum(widths), dtype=dtype)
        table[row, -(-length // page_size) :] = 2**30
    planes = both.split(widths, -1)
    if apart:
        planes = [plane.clone() for plane in planes]
    query = [torch.randn(len(lens), queries, heads, width, dtype=dtype) for width in widths]
    return {
        **dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), (*query, *planes), strict=True)),
        "block_tables": table,
        "context_lens": torch.tensor(lens, dtype=torch.int32),
        "scale": SCALE,
    }


def widened(given):
    halves = {name: each.double() for name, each in given.items() if getattr(each, "dtype", None) is torch.bfloat16}
    return given | halves


def test_absorbed_is_attention_with_projected_keys_and_values():
    torch.manual_seed(1)
    given = call((9, 20), queries=2, heads=3, widths=(16, 8), page_size=4, dtype=torch.float64)
    up_keys, up_values = torch.randn(3, 16, 12, dtype=torch.float64), torch.randn(3, 16, 10, dtype=torch.float64)
    query = torch.randn(2, 2, 3, 12, dtype=torch.float64)
    given["q_nope"] = torch.einsum("bshd,hcd->bshc", query, up_keys)
    output, lse = lz.mla_attention(**given, return_lse=True)
    for row, length in enumerate((9, 20)):
        pages = given["block_tables"][row, : -(-length // 4)].long()
        latent, rotated = (given[name][pages].flatten(0, 1)[:length] for name in ("ckv_cache", "kpe_cache"))
        keys = torch.cat((torch.einsum("tc,hcd->thd", latent, up_keys), rotated[:, None].expand(-1, 3, -1)), -1)
        values = torch.einsum("tc,hcv->thv", latent, up_values)
        queries = torch.cat((query[row], given["q_pe"][row]), -1)
        wanted, sums = attention_reference(
            queries[None], keys[None], values[None], causal=True, scale=SCALE, return_lse=True
        )
        torch.testing.assert_close(torch.einsum("shc,hcv->shv", output[row], up_values), wanted[0])
        torch.testing.assert_close(lse[row], sums[0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lens", [(17, 40, 3), (0, 64, 16)], ids=str)
def test_every_kernel_here_reads_what_a_sequence_owns_and_nothing_else(kernel, lens):
    given = call(lens)
    missing = lz.explain("mla_attention", **given).reasons(kernel)
    if missing:
        pytest.skip(str(missing))
    with lz.scope(locks={NAME: kernel}):
        got = lz.mla_attention(**given)
    torch.testing.assert_close(got, mla_attention(**given), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("promised", [False, True], ids=["", "finite pages"])
@pytest.mark.parametrize("page_size", [7, 32])
def test_tiles_multiply_what_a_sequence_owns_and_nothing_else(page_size, promised):
    given = call((300, 17, 0, 40, 3), heads=17, page_size=page_size, dtype=torch.bfloat16)
    given["ckv_cache"][given["block_tables"][0, 299 // page_size], 299 % page_size] = math.inf
    step = lz.StepMetadata(given["block_tables"], given["context_lens"], finite_pages=True) if promised else None
    missing = lz.explain("mla_attention", **given, step=step).reasons("vllm.cpu.mla_tiles")
    if missing:
        pytest.skip(str(missing))
    with lz.scope(locks={NAME: "vllm.cpu.mla_tiles"}):
        got = lz.mla_attention(**given, step=step)
    wanted = mla_attention(**widened(given))
    assert not got[0].isfinite().any()
    torch.testing.assert_close(got[1:].double(), wanted[1:], rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("lens", [(2000,), (2000, 0), (3, 40, 700)], ids=str)
def test_tiles_take_a_sequence_in_parts(lens):
    given = call(lens, heads=16, page_size=32, dtype=torch.bfloat16)
    missing = lz.explain("mla_attention", **given).reasons("vllm.cpu.mla_tiles")
    if missing:
        pytest.skip(str(missing))
    torch.set_num_threads(8)  # four parts and more
    with lz.scope(locks={NAME: "vllm.cpu.mla_tiles"}):
        got = lz.mla_attention(**given)
    torch.testing.assert_close(got.double(), mla_attention(**widened(given)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", KERNELS[:2])
@pytest.mark.parametrize("apart", [False, True])
def test_drafts_are_causal_at_the_end_of_each_sequence(kernel, apart):
    given = call((17, 40, 3), queries=4, widths=(32, 8), apart=apart)
    with lz.scope(locks={NAME: kernel}):
        output, lse = lz.mla_attention(**given, return_lse=True)
    assert output[2, 0].abs().max() == 0  # four queries of a sequence of three tokens: the first sees none
    assert (lse[2, :, 0] == -math.inf).all()
    for token in range(4):
        one = given | {name: given[name][:, token : token + 1] for name in ("q_nope", "q_pe")}
        one["context_lens"] = given["context_lens"] - (3 - token)
        wanted, sums = mla_attention(**one, return_lse=True)
        torch.testing.assert_close(output[:, token : token + 1], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[..., token : token + 1], sums, rtol=1e-5, atol=1e-5)


def test_latents_without_pages_are_one_page():
    given = call((20,), page_size=20)
    page = given["block_tables"][0, 0]
    ckv, kpe = (given[name][page][:, None] for name in ("ckv_cache", "kpe_cache"))  # (L, 1, C), as one sequence has
    alone = {"ckv_cache": ckv.transpose(0, 1), "kpe_cache": kpe.transpose(0, 1)}
    got = lz.mla_attention(**given | alone | {"block_tables": torch.zeros(1, 1, dtype=torch.int32)})
    torch.testing.assert_close(got, lz.mla_attention(**given))


def test_planes_apart_change_no_result():
    torch.testing.assert_close(lz.mla_attention(**call(apart=True)), lz.mla_attention(**call()), rtol=1e-5, atol=1e-5)


def test_columns_of_one_tensor_are_joined_without_a_copy():
    both = torch.randn(3, 4, 24)
    latent, rotated = both.split((16, 8), -1)
    assert joined(latent, rotated).data_ptr() == both.data_ptr()
    assert torch.equal(joined(latent, rotated), both)
    other = torch.randn(3, 4, 24)[..., 16:]  # the same strides, elsewhere
    for pair in ((latent, other), (latent, rotated.clone()), (rotated, latent)):
        assert torch.equal(joined(*pair), torch.cat(pair, -1))


def test_a_step_is_taken_over_by_the_next_layer():
    given = call()
    tables = given["block_tables"], given["context_lens"]
    step = lz.StepMetadata(*tables)
    wanted = lz.mla_attention(**given)
    for _ in range(2):
        torch.testing.assert_close(lz.mla_attention(**given, step=step), wanted)
    given["context_lens"] -= 1
    with pytest.raises(lz.InvalidCallError, match=r"step: wanted advance\(\)"):
        lz.mla_attention(**given, step=step)
    step.advance()
    torch.testing.assert_close(lz.mla_attention(**given, step=step), lz.mla_attention(**given))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill_with_projected_keys_has_values_of_another_width(causal):
    torch.manual_seed(0)
    query, key = torch.randn(2, 20, 4, 192)
    value, starts = torch.randn(20, 4, 128), torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    given = (query, key, value, starts, starts)
    report = lz.explain("ragged_attention", *given, causal=causal, return_lse=True)
    assert report.kernel_id == "torch.ragged_narrow_values"
    output, lse = lz.ragged_attention(*given, causal=causal, return_lse=True)
    for first, last in ((0, 7), (7, 20)):
        dense = (each[None, first:last] for each in given[:3])
        wanted, sums = attention_reference(*dense, causal=causal, return_lse=True)
        torch.testing.assert_close(output[first:last], wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, first:last], sums[0], rtol=1e-5, atol=1e-5)


WRONG = [
    (lambda c: {"q_pe": c["q_pe"][..., :32]}, "kpe_cache: wanted rope_dim 32 as in q_pe, got 64"),
    (lambda c: {"ckv_cache": c["ckv_cache"][..., :256]}, "ckv_cache: wanted latent_dim 512 as in q_nope, got 256"),
    (lambda c: {"kpe_cache": c["kpe_cache"][1:]}, "kpe_cache: wanted pages 10"),
    (lambda c: {"kpe_cache": c["kpe_cache"].unsqueeze(2)}, "kpe_cache: wanted a 3D tensor"),
    (lambda c: {"q_nope": c["q_nope"][:, 0]}, r"q_nope: wanted a 4D tensor \(one query of each sequence: \[:, None\]"),
    (lambda c: {"q_nope": c["q_nope"].double()}, "q_pe: wanted dtype float64"),
    (lambda c: {"block_tables": c["block_tables"].long()}, "block_tables: wanted an int32 tensor"),
    (
        lambda c: {"block_tables": torch.full_like(c["block_tables"], 10)},
        r"block_tables\[0, 0\]: wanted 0 to 9, got 10",
    ),
    (lambda c: {"context_lens": c["context_lens"] + 20}, r"context_lens\[1\]: wanted 0 to 48, got 60"),
    (lambda c: {"context_lens": c["context_lens"][:2]}, "context_lens: wanted 3 lengths"),
    (lambda c: {"max_context_len": 16}, r"context_lens\[0\]: wanted 0 to 16, got 17"),
    (lambda c: {"scale": math.inf}, "scale: wanted a finite number"),
    (lambda c: {"scale": None}, "scale: wanted float"),
    (lambda c: {"step": lz.StepMetadata(c["block_tables"].clone(), c["context_lens"])}, "wanted the StepMetadata"),
]


@at_once("change, text", WRONG)
def test_what_means_nothing_is_refused(change, text):
    given = call()
    with pytest.raises(lz.InvalidCallError, match=text), lz.scope(debug=True):
        lz.mla_attention(**given | change(given))


LIBRARIES = {"torch": "2.11.0+cu130", "flashinfer-python": "0.7.2.post1", "vllm": "0.20.0"}
ON_GPUS = [
    ("vllm.flashmla", {}, set()),
    ("vllm.flashmla", {"queries": 4}, set()),
    ("vllm.flashmla", {"page_size": 16}, {"CONSTRAINT_FAILED"}),
    ("vllm.flashmla", {"apart": True}, {"NOT_CONTIGUOUS"}),
    ("vllm.flashmla", {"widths": (256, 64)}, {"HEAD_DIM_INVALID"}),
    ("flashinfer.fa3.mla", {"page_size": 16, "apart": True}, {"JIT_DISABLED"}),
    ("flashinfer.fa2.mla", {"queries": 4, "heads": 3}, {"CONSTRAINT_FAILED"}),
    ("flashinfer.fa2.mla", {"dtype": torch.float32}, {"DTYPE_UNSUPPORTED"}),
]


@pytest.mark.parametrize(("kernel", "changes", "wanted"), ON_GPUS)
def test_what_kernels_for_gpus_take(kernel, changes, wanted):
    given = call(**{"page_size": 64, "dtype": torch.bfloat16, "heads": 16} | changes)
    given = {
        name: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        if isinstance(each, torch.Tensor)
        else each
        for name, each in given.items()
    }
    report = lz.explain("mla_attention", **given, device="H100", libraries=LIBRARIES)
    assert {str(reason.code) for reason in report.reasons(kernel)} == wanted
