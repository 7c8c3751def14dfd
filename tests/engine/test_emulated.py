"""Half precision on CPUs without instructions for it: kernels that widen come before what torch emulates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.core import device as devices
from layerzero.core import emulation
from layerzero.core.evidence import Measurement
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY

WEIGHT = torch.randn(48, 64)
WIDENED = "torch.linear_widened"


def cpu(*features, **more):
    return replace(lz.Device.named("CPU"), name="a laptop", instruction_sets=frozenset(features), **more)


AVX2, AVX512 = cpu("avx2"), cpu("avx2", "avx512", "avx512_vnni")
BF16, AMX = cpu("avx2", "avx512", "avx512_bf16"), cpu("avx2", "avx512", "avx512_bf16", "amx_bf16")
FP16, ARM = cpu("avx2", "avx512", "avx512_fp16"), cpu("neon", "arm_bf16", "arm_fp16")


def asked(rows, dtype=torch.bfloat16, *, on, function="linear", **more):
    return lz.explain(function, torch.ones(rows, 64, dtype=dtype), WEIGHT.to(dtype), device=on, **more)


@pytest.fixture
def here(monkeypatch):
    """This CPU with other features; what confirms them says what a test wants, and counts how often it was asked."""

    def set_here(*features, ratio=4.0):
        poorer = replace(devices.cpu_of_this_machine(), name="poorer", instruction_sets=frozenset(features))
        monkeypatch.setattr(devices, "_detect", lambda *_: poorer)
        monkeypatch.setattr(emulation, "RATIO", lambda dtype: asked_for.append(dtype) or ratio)
        emulation.forget()
        ENGINE.bump()
        return asked_for

    asked_for = []
    yield set_here
    emulation.forget()
    monkeypatch.undo()
    ENGINE.bump()


@at_once("on, dtype, widens", [
    (AVX2, torch.bfloat16, True),
    (AVX2, torch.float16, True),
    (AVX512, torch.bfloat16, True),
    (BF16, torch.bfloat16, False),
    (BF16, torch.float16, True),
    (AMX, torch.bfloat16, False),
    (FP16, torch.float16, False),
    (ARM, torch.bfloat16, False),
    (ARM, torch.float16, False),
    (cpu("neon"), torch.bfloat16, True),
    (cpu(), torch.bfloat16, False),
    (AVX2, torch.float32, False),
    (lz.Device.named("H100"), torch.bfloat16, False),
])  # fmt: skip
def test_features_tell_what_a_cpu_emulates(on, dtype, widens):
    assert (asked(64, dtype, on=on).kernel_id == WIDENED) == widens


@pytest.mark.parametrize(("rows", "widens"), [(1, False), (7, False), (8, True), (1000, True)])
def test_few_rows_keep_what_wins_there(rows, widens):
    assert (asked(rows, on=AVX2).kernel_id == WIDENED) == widens


def test_explain_gives_the_term_and_the_reason_in_a_line():
    report = asked(64, on=AVX2)
    terms = {term.name: term.points for term in report.chosen.terms}
    assert terms == {"priority": 30.0, "emulated": 30.0}
    (note,) = [each for each in report.notes if "emulate" in each]
    assert note.startswith("this CPU has no bfloat16 products: torch emulates them")
    assert not any("emulate" in each for each in asked(64, on=BF16).notes)


def test_a_product_confirms_once_and_only_where_a_call_asks(here):
    confirmed = here("avx2")
    lz.explain("linear", torch.ones(64, 64), WEIGHT)
    lz.explain("linear", torch.ones(2, 64).bfloat16(), WEIGHT.bfloat16())
    assert confirmed == []
    for rows in (8, 64, 64):
        found = lz.explain("linear", torch.ones(rows, 64).bfloat16(), WEIGHT.bfloat16())
        assert found.kernel_id == WIDENED
    assert confirmed == [torch.bfloat16]
    lz.explain("linear", torch.ones(64, 64).half(), WEIGHT.half())
    assert confirmed == [torch.bfloat16, torch.float16]


def test_stock_stays_where_the_product_disagrees(here):
    here("avx2", ratio=1.1)
    assert lz.explain("linear", torch.ones(64, 64).bfloat16(), WEIGHT.bfloat16()).kernel_id == "torch.linear"


def test_a_cpu_that_is_elsewhere_is_told_by_its_features(here):
    confirmed = here("avx2", ratio=0.0)
    assert asked(64, on=AVX512).kernel_id == WIDENED
    assert confirmed == []


def test_times_override(here):
    here("avx2")
    call = torch.ones(64, 64).bfloat16(), WEIGHT.bfloat16()

    def record(kernel_id, us):
        facts = lz.explain("linear", *call).facts
        ENGINE.ledger.record_time(REGISTRY.kernel(kernel_id), facts, Measurement(us, us, 0.01, 20))
        ENGINE.bump()

    record("torch.linear", 100.0)
    assert lz.explain("linear", *call).kernel_id == WIDENED  # nothing says that it is slower
    record(WIDENED, 130.0)
    report = lz.explain("linear", *call)
    assert report.kernel_id == "torch.linear"
    assert not any("emulated" in [term.name for term in each.terms] for each in report.candidates)


def test_users_get_what_they_ask_for():
    with lz.prefer("torch.linear"):
        assert asked(64, on=AVX2).kernel_id == "torch.linear"
    lz.lock("mlp.linear", "torch.linear")
    assert asked(64, on=AVX2).kernel_id == "torch.linear"
    lz.lock("mlp.linear", WIDENED)
    assert asked(1, on=BF16).kernel_id == WIDENED


def test_gradients_are_refused_with_a_reason():
    weight = WEIGHT.bfloat16().requires_grad_()
    report = lz.explain("linear", torch.ones(64, 64).bfloat16(), weight, device=AVX2)
    assert report.kernel_id == "torch.linear"
    assert [str(each.code) for each in report.failures[WIDENED]] == ["GRAD_UNSUPPORTED"]


def test_plans_are_not_shared_across_the_least_number_of_rows(here):
    here("avx2")
    weight = WEIGHT.half()
    ran = []
    ENGINE.watch(watcher := lambda _, plan: ran.append(plan.kernel.id))
    for rows in (4, 64, 7, 9):
        lz.linear(torch.ones(rows, 64).half(), weight)
    ENGINE.unwatch(watcher)
    assert ran == ["torch.linear", WIDENED, "torch.linear", WIDENED]
    for rows, kernel in ((4, "torch.linear"), (64, WIDENED), (7, "torch.linear"), (9, WIDENED)):
        lz.linear(torch.ones(rows, 64).half(), weight)
        assert lz.which("linear", torch.ones(rows, 64).half(), weight)["kernel_id"] == kernel


def test_the_product_that_confirms_gives_a_ratio():
    assert emulation.product_ratio(torch.float16) > 0
    with torch.device("meta"):
        assert emulation.product_ratio(torch.bfloat16) > 0


@pytest.mark.parametrize(("function", "widened"), [
    ("mlp", "torch.mlp_widened"),
    ("qkv_linear", "torch.qkv_linear_widened"),
    ("batched_linear", "torch.bmm_widened"),
    ("grouped_linear", "torch.linear_each_widened"),
    ("moe_experts", "torch.experts_each_widened"),
])  # fmt: skip
def test_every_family_of_products_widens_from_enough_rows_for_each_weight(function, widened):
    def chosen(rows):
        def half(*size):
            return torch.ones(size, dtype=torch.bfloat16)

        given = {
            "mlp": (half(rows, 64), half(96, 64), half(64, 96)),
            "qkv_linear": (half(rows, 64), half(64, 64), half(32, 64), half(32, 64)),
            "batched_linear": (half(4, rows, 64), half(4, 48, 64)),
            "grouped_linear": (half(4 * rows, 64), half(4, 48, 64), torch.arange(1, 5, dtype=torch.int32) * rows),
            "moe_experts": (
                *(half(2 * rows, 64), half(4, 64, 64), half(4, 64, 32)),
                *(torch.zeros(2 * rows, 2, dtype=torch.int64), torch.ones(2 * rows, 2)),
            ),
        }[function]
        return lz.explain(function, *given, device=AVX2).kernel_id

    assert "widened" not in chosen(1)
    assert chosen(8) == widened


@pytest.mark.parametrize(("dtype", "queries", "kv_heads", "widens"), [
    (torch.float16, 16, 4, True),
    (torch.float16, 1, 4, True),
    (torch.float16, 1, 2, True),
    (torch.bfloat16, 16, 4, False),  # torch's operator adds up in float32 there
    (torch.bfloat16, 1, 4, True),
    (torch.bfloat16, 1, 2, False),
])  # fmt: skip
def test_attention_widens_where_torchs_operator_is_slower(dtype, queries, kv_heads, widens):
    query, key = (torch.ones(1, heads, rows, 16, dtype=dtype) for heads, rows in ((4, queries), (kv_heads, 32)))
    assert (
        lz.explain("attention", query, key, key, layout="BHSD", device=AVX2).kernel_id == "torch.sdpa.cpu_flash_widened"
    ) == widens
    starts = torch.tensor([0, queries], dtype=torch.int32), torch.tensor([0, 32], dtype=torch.int32)
    rows = [each[0].transpose(0, 1) for each in (query, key, key)]
    report = lz.explain("ragged_attention", *rows, *starts, device=AVX2)
    assert (report.kernel_id == "torch.ragged_sdpa_widened") == (dtype is torch.float16)


@pytest.mark.parametrize("more", [{"sinks": torch.zeros(4)}, {"kv_lens": torch.tensor([20], dtype=torch.int32)}])
def test_attention_that_torch_has_not_is_widened_by_itself(here, monkeypatch, more):
    here("avx2")
    kinds = []
    operator = torch._scaled_dot_product_flash_attention_for_cpu

    def seen(query, *given, **named):
        kinds.append(query.dtype)
        return operator(query, *given, **named)

    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention_for_cpu", seen)
    query, key = (torch.randn(1, heads, 32, 16).half() for heads in (4, 4))
    lz.attention(query, key, key, layout="BHSD", causal=False, **more)
    assert set(kinds) == {torch.float32}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "kernel"), [(3, None), (4, "_packed_widened"), (8, "_packed_widened")])
def test_a_weight_may_be_kept_in_float32_from_fewer_rows(dtype, rows, kernel):
    weight = WEIGHT.to(dtype)
    packed = lz.PackedWeight(weight)
    found = lz.explain("linear", torch.ones(rows, 64, dtype=dtype), weight, packed=packed, device=AVX2)
    assert (found.kernel_id == "torch.onednn_linear_packed_widened") == (kernel is not None)
    assert packed.bytes == 0
