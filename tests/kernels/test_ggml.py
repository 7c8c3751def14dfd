"""ggml's products with GGUF's blocks: what they are offered, and that threads and sizes do not mix."""

from __future__ import annotations

import importlib.util
import itertools
import platform
import sys
import threading

import pytest
import torch

import layerzero as lz
from drawing import at_once
from layerzero.backends import ggml
from layerzero.core.reasons import ReasonCode
from layerzero.engine import probe
from layerzero.ops.quantize.gguf import KINDS
from layerzero.ops.quantize.schemes import scheme_of

KERNEL = "ggml.gguf_linear"
HERE = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is not installed")


def weight(kind, outputs=64, inputs=256, seed=3):
    of = lz.WeightFormat("gguf", kind)
    fields = scheme_of(of).random(of, outputs, inputs, torch.Generator().manual_seed(seed))
    return lz.QuantizedWeight(of, (outputs, inputs), *fields)


HALVES = [kind for kind in KINDS if KINDS[kind].block == 32]
"""Whose rows ggml rounds with a scale in float16."""


def call(rows, known, **rest):
    """ggml's product for this very call, through ``lz.quantized_linear``."""
    refused = lz.explain("quantized_linear", rows, known, activations="int8", **rest).reasons(KERNEL)
    if refused:
        pytest.skip("; ".join(each.message for each in refused))
    with lz.scope(locks={"mlp.linear.quant.gguf.int8": KERNEL}, fallback_enabled=False):
        return lz.quantized_linear(rows, known, activations="int8", **rest)


def off(got, rows, known):
    want = rows.double() @ known.dequantized(torch.float64).T
    return ((got.double() - want).norm() / want.norm()).item()


@at_once("dtype, activations, wanted", [
    (torch.float32, "int8", set()),
    (torch.bfloat16, "int8", set()),
    (torch.float64, "int8", {ReasonCode.DTYPE_UNSUPPORTED}),
])  # fmt: skip
def test_it_is_offered_rows_that_may_be_rounded(dtype, activations, wanted):
    report = lz.explain(
        "quantized_linear",
        torch.empty(2, 256, dtype=dtype),
        weight("Q4_K"),
        activations=activations,
        libraries={"torch": "2.13.0", "llama-cpp-python": "0.3.36"},
    )
    assert {reason.code for reason in report.reasons(KERNEL)} == wanted


def test_it_is_not_offered_rows_that_stay_as_they_are():
    report = lz.explain("quantized_linear", torch.empty(2, 256), weight("Q4_K"))
    assert KERNEL not in {each.kernel for each in report.candidates}


def test_a_package_without_its_libraries_says_what_is_missing(monkeypatch, tmp_path):
    (tmp_path / "llama_cpp" / "lib").mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    (tmp_path / "llama_cpp" / "lib" / "libggml-base.dylib").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(ggml, "library", ggml.Library)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(
        ImportError, match=r"wanted libggml-base.so.*, got libggml-base.dylib on Darwin; build"
    ) as raised:
        ggml._OfThread()
    reason = probe.mark_broken(ggml.GGML, raised.value)
    probe.reset_broken()
    assert reason.hint == "Reinstall it: pip install llama-cpp-python"  # for whatever torch


@HERE
@at_once("kind", KINDS)
def test_it_reads_every_kind_of_block(kind):
    known = weight(kind, inputs=512)
    for rows in (torch.randn(1, 512), torch.randn(3, 512)):
        assert off(ggml.of_thread().products(ggml.NUMBERS_OF[kind], known.fields.data, rows), rows, known) < 0.02


@HERE
@at_once("kind, size", itertools.product(HALVES, (1e-37, 5e-6, 0.02, 1.0, 1e6, 1e34)))
def test_rows_of_any_size_keep_their_digits(kind, size):
    known, rows = weight(kind, inputs=512), size * torch.randn(3, 512)
    assert off(call(rows, known), rows, known) < 0.02


@HERE
def test_rows_are_scaled_one_by_one():
    known, rows = weight("Q4_1", inputs=512), torch.randn(6, 512) * torch.tensor([[1e-6], [1], [0], [1e7], [1], [1]])
    rows[4, 7], rows[5, 9] = torch.nan, torch.inf
    got = call(rows, known)
    for each in (0, 1, 3):
        assert off(got[each], rows[each], known) < 0.02
    assert not got[2].any()
    assert got[4:].isnan().all()
    assert torch.equal(call(rows[1:2], known)[0], got[1])


@HERE
@at_once("kind, dtype, shape", itertools.product(
    ("Q8_0", "Q4_K"), (torch.float32, torch.bfloat16, torch.float16), ((3, 512), (2, 3, 512), (1, 1, 512)),
))  # fmt: skip
def test_a_call_may_have_a_bias_and_more_axes(kind, dtype, shape):
    known, rows, bias = weight(kind, inputs=512), torch.randn(shape).to(dtype), torch.randn(64).to(dtype)
    got = call(rows, known, bias=bias)
    assert (got.dtype, got.shape) == (dtype, (*shape[:-1], 64))
    assert off(got.double() - bias.double(), rows, known) < 0.02


@HERE
def test_a_call_reads_the_weight_and_the_rows_of_that_call():
    products, rows = ggml.of_thread().products, torch.randn(2, 256)
    one, other = weight("Q8_0"), weight("Q8_0", seed=4)
    first = products(8, one.fields.data, rows)
    second = products(8, other.fields.data, 2 * rows)
    assert max(off(first, rows, one), off(second, 2 * rows, other)) < 0.02
    one.fields.data.copy_(other.fields.data)
    assert torch.equal(products(8, one.fields.data, 2 * rows), second)


@HERE
def test_threads_do_not_share_addresses():
    known, wrong = weight("Q4_K", 512, 1024), []

    def work(seed):
        for turn in range(50):
            rows = torch.randn(1 + turn % 3, 1024, generator=torch.Generator().manual_seed(100 * seed + turn))
            if off(ggml.of_thread().products(12, known.fields.data, rows), rows, known) > 0.02:
                wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@HERE
def test_a_thread_lets_go_of_graphs_beyond_the_most(monkeypatch):
    monkeypatch.setattr(ggml, "_MOST", 2)
    known, products = weight("Q8_0"), ggml._Products(ggml.library())
    for count in (1, 2, 3, 4, 1):
        rows = torch.randn(count, 256)
        assert off(products(8, known.fields.data, rows), rows, known) < 0.02
        assert len(products._graphs) <= 2
