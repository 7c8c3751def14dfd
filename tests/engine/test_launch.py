"""Launch grids: what does not fit is refused before it is launched, and the batch is cut where nothing else is left."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerzero as lz
from layerzero.core.device import Device
from layerzero.core.facts import FactsBuilder
from layerzero.core.limits import Grid
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops.attention.reference import attention_reference

C = lz.ReasonCode
CASES = [(65536, 1), (65537, 1), (1024, 64), (1024, 65), (32768, 32)]


def shapes(batch, heads, seq=4, head_dim=8):
    return [torch.empty(batch, seq, heads, head_dim, dtype=torch.float16, device="meta") for _ in range(3)]


def codes(kernel, batch, heads, **call):
    report = lz.explain("attention", *shapes(batch, heads), layout="BSHD", device="H100", **call)
    return {reason.code for reason in report.reasons(kernel)}


@pytest.mark.parametrize(("batch", "heads"), CASES)
def test_one_axis_for_batch_and_heads_overflows(batch, heads):
    declared = {"platform": "cuda", "limits": [lz.limits.grid(x=(("seq_q", 128),), y=("batch", "heads"))]}
    lz.register_kernel("attention.standard.prefill", "user.flat", **declared)(lambda q, k, v: q)
    assert codes("user.flat", batch, heads, causal=False) == {C.CUDA_GRID_DIM_EXCEEDED}


@pytest.mark.parametrize(("batch", "heads"), CASES)
def test_flash_has_an_axis_for_each(batch, heads):
    assert (C.CUDA_GRID_DIM_EXCEEDED in codes("torch.sdpa.flash", batch, heads)) == (batch > 65535)
    assert C.CUDA_GRID_DIM_EXCEEDED not in codes("torch.sdpa.flash", heads, 65535)
    assert C.CUDA_GRID_DIM_EXCEEDED in codes("torch.sdpa.flash", heads, 65536)


@pytest.mark.parametrize(("batch", "heads"), CASES)
def test_efficient_cuts_the_batch_itself_unless_there_is_dropout(batch, heads):
    assert codes("torch.sdpa.efficient", batch, heads) == set()
    with_dropout = codes("torch.sdpa.efficient", batch, heads, dropout_p=0.1)
    assert (C.CUDA_GRID_DIM_EXCEEDED in with_dropout) == (batch > 65535)


def test_efficient_has_no_room_for_65536_heads():
    report = lz.explain("attention", *shapes(1, 65536), layout="BSHD", device="H100")
    (reason,) = report.reasons("torch.sdpa.efficient")
    assert reason.code is C.CUDA_GRID_DIM_EXCEEDED
    assert reason.message == "grid.y may be at most 65535 here, it would launch 65536 (heads)"
    assert report.kernel_id not in ("torch.sdpa.efficient", "torch.sdpa.flash")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("most", "served"), [(31, [17, 25, 31]), (30, [17, 25]), (17, [17])])
def test_a_plan_serves_its_size_class_only_where_the_largest_grid_of_it_fits(most, served):
    ran = []
    declared = {"priority": 100, "limits": [lz.limits.grid(x=("rows",), max_blocks=most)]}
    lz.register_kernel("norm.rms", "user.rows", **declared)(
        lambda x, w: ran.append(len(x)) or torch.rms_norm(x, (8,), w)
    )
    for rows in (17, 25, 31, 17, 25, 31):
        lz.rms_norm(torch.ones(rows, 8), torch.ones(8))
    assert ran == served * 2
    kept = CALLS["rms_norm"].dispatcher.cache.current.values()
    assert sum(plan.kernel_id == "user.rows" for plan in kept) == (1 if most == 31 else len(served))


def test_a_launch_bound_without_a_repair_does_not_hide_what_else_refuses(caplog):
    def too_many(facts):
        batch = facts.size("batch")
        return lz.Reason(C.CUDA_GRID_DIM_EXCEEDED, "grid.y", "at most 1", batch) if batch > 1 else None

    rules = [lz.limits.Custom("batch", too_many), lz.limits.grid(x=("batch",), max_blocks=1)]
    rules.append(lz.limits.dtype("float64"))
    register = lz.register_kernel("attention.standard.prefill", "user.narrow", priority=100, limits=rules)
    register(lambda q, k, v: pytest.fail("it was refused"))
    query = torch.randn(2, 4, 1, 8)
    lz.configure(allow=["user.narrow"])  # nothing but the reference is left: the engine thinks of cutting the batch
    with pytest.warns(lz.LayerZeroFallbackWarning, match="slow reference"):
        lz.attention(query, query, query, layout="BSHD", causal=False)
    assert "its own limits" not in caplog.text


def test_a_cpu_has_no_grid():
    lz.register_kernel("norm.rms", "user.rows", limits=[lz.limits.grid(y=("rows",))])(lambda input, weight: input)
    assert lz.explain("rms_norm", torch.empty(70000, 8), torch.empty(8)).reasons("user.rows") == ()


@pytest.mark.parametrize("axis", [(("seq_q", 0),), (3,), (("seq_q",),)], ids=str)
def test_a_grid_that_means_nothing_is_refused_where_it_is_declared(axis):
    with pytest.raises(ValueError, match="a size's name"):
        lz.limits.grid(x=axis)


def test_an_unknown_size_is_refused_at_registration():
    with pytest.raises(lz.RegistrationError, match="no fact 'tokens'"):
        lz.register_kernel("norm.rms", "user.bad", limits=[lz.limits.grid(x=("tokens",))])(lambda input, weight: input)


@given(
    batch=st.integers(1, 10**6),
    heads=st.integers(1, 10**6),
    axes=st.tuples(*[st.sampled_from([(), ("batch",), ("heads",), ("batch", "heads")])] * 3),
    most=st.one_of(st.none(), st.integers(1, 10**7)),
)
def test_the_safe_batch_fits_and_one_more_does_not(batch, heads, axes, most):
    grid = Grid(*axes, max_blocks=most)
    builder, h100 = FactsBuilder(REGISTRY.operation("attention.standard.prefill")), Device.named("H100")

    def fits(size):
        return not grid.check(builder.build(*shapes(size, heads), device=h100))

    safe = grid.safe_size("batch", builder.build(*shapes(batch, heads), device=h100))
    repeated = sum(axis.count("batch") for axis in axes) > 1 and most is not None
    if not repeated:
        assert safe <= batch
        assert safe == 0 or fits(safe)
        assert safe == batch or not fits(safe + 1)


# cutting the batch


@pytest.fixture
def counted():
    """A CPU kernel that may launch eight blocks, one for each sequence and head; and the batches it was given."""
    batches = []

    def attention(query, key, value, *, causal=False, attn_mask=None, scale=None, kv_lens=None, return_lse=False):
        batches.append(query.shape[0])
        assert query.shape[0] * query.shape[2] <= 8
        return attention_reference(
            *(query, key, value),
            causal=causal,
            attn_mask=attn_mask,
            scale=scale,
            kv_lens=kv_lens,
            return_lse=return_lse,
        )

    for name in ("attention.standard.prefill", "attention.gqa.prefill"):
        limits = [lz.limits.grid(x=("batch", "heads"), max_blocks=8)]
        lz.register_kernel(name, f"user.{name}", limits=limits, grad=True)(attention)
    return batches


def qkv(batch, heads=4, kv_heads=4, layout="BSHD", grad=False):
    torch.manual_seed(0)
    tensors = [torch.randn(batch, 6, each, 8) for each in (heads, kv_heads, kv_heads)]
    tensors = tensors if layout == "BSHD" else [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    return [tensor.requires_grad_(grad) for tensor in tensors]


ARGUMENTS = {
    "plain": lambda batch: {},
    "one mask": lambda batch: {"attn_mask": torch.randn(1, 1, 6, 6), "causal": False},
    "masks": lambda batch: {"attn_mask": torch.randn(batch, 1, 6, 6), "causal": False},
    "2d mask": lambda batch: {"attn_mask": torch.randn(6, 6), "causal": False},
    "lengths": lambda batch: {"kv_lens": torch.randint(1, 7, (batch,), dtype=torch.int32), "causal": False},
    "lse": lambda batch: {"return_lse": True},
}


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("given", ARGUMENTS)
def test_chunks_give_what_the_whole_gives(counted, layout, kv_heads, given):
    tensors, arguments = qkv(5, 4, kv_heads, layout), ARGUMENTS[given](5)
    want = lz.attention(*tensors, layout=layout, **arguments)
    with lz.scope(allow=["user"]), pytest.warns(lz.LayerZeroPerformanceWarning, match="batch of 5 in chunks of 2"):
        got = lz.attention(*tensors, layout=layout, **arguments)
        again = lz.attention(*tensors, layout=layout, **arguments)
    assert counted == [2, 2, 1] * 2
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(again, want)


def test_gradients_go_through_the_chunks(counted):
    whole, cut = qkv(5, grad=True), qkv(5, grad=True)
    lz.attention(*whole, layout="BSHD").square().sum().backward()
    with lz.scope(allow=["user"]), pytest.warns(lz.LayerZeroPerformanceWarning):
        lz.attention(*cut, layout="BSHD").square().sum().backward()
    for ours, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_it_is_said_once(counted):
    with lz.scope(allow=["user"]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (5, 6, 7):
            lz.attention(*qkv(batch), layout="BSHD")
    assert [each.category for each in caught] == [lz.LayerZeroPerformanceWarning]


def test_another_kernel_is_always_preferred(counted):
    report = lz.explain("attention", *qkv(5), layout="BSHD")
    assert not report.kernel_id.startswith("user.")
    assert {reason.code for reason in report.reasons("user.attention.standard.prefill")} == {
        C.CUDA_BLOCK_LIMIT_EXCEEDED
    }
    lz.attention(*qkv(5), layout="BSHD")
    assert counted == []


def test_a_batch_that_fits_is_not_cut(counted):
    with lz.scope(allow=["user"]):
        lz.attention(*qkv(2), layout="BSHD")
    assert counted == [2]


def test_a_lock_on_the_kernel_is_reason_enough(counted):
    with lz.scope(locks={"attention.standard.prefill": "user.*"}), pytest.warns(lz.LayerZeroPerformanceWarning):
        lz.attention(*qkv(3), layout="BSHD")
    assert counted == [2, 1]


@pytest.mark.parametrize("setting", [{"strict_mode": True}, {"allow_adaptation": False}], ids=str)
def test_it_moves_data_and_so_may_be_forbidden(counted, setting):
    with lz.scope(allow=["user"], **setting):
        assert lz.explain("attention", *qkv(5), layout="BSHD").kernel_id.startswith("reference.")


def test_heads_that_do_not_fit_cannot_be_cut(counted):
    with lz.scope(allow=["user"]):
        report = lz.explain("attention", *qkv(5, heads=12, kv_heads=12), layout="BSHD")
    assert report.kernel_id.startswith("reference.")


def test_every_chunk_size_has_a_callable_of_its_own():
    loaded = []

    def load(facts):
        loaded.append((facts["batch"], facts.tensors["query"].shape))
        return lambda query, key, value: query

    kernel = lz.Kernel(
        id="mine.sized",
        operations=("attention.standard.prefill",),
        backend=lz.Backend(name="mine", summary="binds to sizes"),
        load=load,
        layout="BHSD",
        limits=(lz.limits.grid(x=("batch",), max_blocks=2),),
    )
    lz.register_backend([kernel])
    with lz.scope(allow=["mine"]), pytest.warns(lz.LayerZeroPerformanceWarning):
        lz.attention(*qkv(5), causal=False, layout="BSHD")
    assert loaded == [(2, (2, 4, 6, 8)), (1, (1, 4, 6, 8))]
