"""vLLM's CPU kernels: what is special about loading them. Their results are compared in test_kernels.py."""

from __future__ import annotations

import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import layerzero as lz
from layerzero.backends.vllm_cpu import linear, moe, paged
from layerzero.backends.vllm_cpu import norm as vllm_cpu
from layerzero.core.device import Device
from layerzero.engine.probe import this_machine
from layerzero.ops.paged import quantized
from layerzero.ops.paged.mixed import paged_tokens_reference

CPU = Device.detect("cpu")
MISSING = this_machine().state(vllm_cpu.VLLM_CPU, CPU).reason

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def unloaded(monkeypatch):
    """As if nothing had loaded the library yet."""
    vllm_cpu.operators.cache_clear()
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", list)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    yield monkeypatch
    vllm_cpu.operators.cache_clear()


@pytest.fixture
def loaded():
    try:
        return vllm_cpu.KERNELS[0].load(lz.explain("rms_norm", *call()).facts)
    except OSError as error:
        pytest.skip(f"libnuma1 is a system package that may be missing: {error.__cause__ or error}")


def call(hidden=64, dtype=torch.float32):
    return torch.randn(5, hidden).to(dtype), torch.randn(hidden).to(dtype)


def refusals(*arguments, **options):
    report = lz.explain("rms_norm", *arguments, **options)
    return [(str(reason.code), reason.message) for reason in report.reasons("vllm.cpu.rms_norm")]


def test_a_missing_system_library_is_named_with_the_command_that_installs_it(unloaded):
    def load_library(path):
        raise OSError(f"Could not load this library: {path}") from OSError("libnuma.so.1: cannot open shared object")

    unloaded.setattr(torch.ops, "load_library", load_library)
    x, w = call(dtype=torch.float16)
    with lz.scope(prefer=["vllm"]):
        wanted = torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)
        torch.testing.assert_close(lz.rms_norm(x, w), wanted, rtol=1e-3, atol=1e-3)
    [(code, message)] = refusals(x, w)
    assert code == "BACKEND_IMPORT_FAILED"
    assert "libnuma.so.1" in message
    assert "apt install libnuma1" in message


def test_it_does_not_load_beside_another_library_of_the_same_name(unloaded):
    unloaded.setattr(torch._C, "_dispatch_get_all_op_names", lambda: ["_C::paged_attention_v1"])
    unloaded.setattr(torch.ops, "load_library", lambda path: pytest.fail("would abort the process"))
    with lz.scope(unmeasured="priority"):
        lz.rms_norm(*call(dtype=torch.float16))
    [(code, message)] = refusals(*call(dtype=torch.float16))
    assert code == "BACKEND_IMPORT_FAILED"
    assert "another library" in message


def test_what_the_process_has_loaded_already_is_used(loaded, monkeypatch):
    vllm_cpu.operators.cache_clear()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded twice"))
    x, w = call()
    with lz.scope(locks={"rms_norm": "vllm.cpu.rms_norm"}):
        torch.testing.assert_close(lz.rms_norm(x, w), torch.nn.functional.rms_norm(x, w.shape, w, 1e-6))


@pytest.mark.parametrize(
    ("features", "build"),
    [({"avx2"}, "_C_AVX2"), ({"avx2", "avx512"}, "_C_AVX512"), ({"avx2", "avx512", "avx512_bf16"}, "_C")],
)
def test_the_build_fits_the_processor(unloaded, features, build):
    asked = []
    unloaded.setattr(torch.ops, "load_library", asked.append)
    unloaded.setattr(torch.ops._C, "rms_norm", torch.ops.aten.rms_norm, raising=False)
    facts = lz.explain("rms_norm", *call(), device=cpu_with(features)).facts
    vllm_cpu._load_rms_norm(facts)
    assert [path.rpartition("/")[2] for path in asked] == [f"{build}.abi3.so"]


def cpu_with(features):
    return Device(platform="cpu", name="another", vendor="intel", instruction_sets=frozenset(features))


def test_bfloat16_is_refused_where_it_would_be_cut_off():
    bfloat16 = call(dtype=torch.bfloat16)
    (refusal,) = refusals(*bfloat16, device=cpu_with({"avx2", "avx512"}))
    assert refusal[0] == "DEVICE_CAPABILITY_UNSUPPORTED"
    assert refusals(*bfloat16, device=cpu_with({"avx2", "avx512", "avx512_bf16"})) == []
    assert refusals(*call(), device=cpu_with({"avx2"})) == []
    assert [code for code, _ in refusals(*call(), device=cpu_with(set()))] == ["DEVICE_CAPABILITY_UNSUPPORTED"]


@pytest.mark.parametrize(("hidden", "codes"), [(64, []), (60, ["CONSTRAINT_FAILED"])])
def test_rows_are_whole_vectors(hidden, codes):
    assert [code for code, _ in refusals(*call(hidden))] == codes


def test_several_threads_get_their_own_results(loaded):
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x, w = torch.randn(64, 256, generator=generator), torch.randn(256, generator=generator)
            if not torch.allclose(
                loaded(x, w, eps=1e-6), torch.nn.functional.rms_norm(x, w.shape, w, 1e-6), 1e-5, 1e-5
            ):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_zeros_of_float8_are_zeros(loaded):
    """Its operator reads e4m3's 0 as 2^-7, which adds up in rows of the weight that are zeros."""
    if not {"avx512_bf16"} <= CPU.instruction_sets:
        pytest.skip("the operator is in the build for bfloat16 alone")
    numbers = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 100.0
    numbers[5], numbers[130, 1:] = 0.0, 0.0
    weight = lz.QuantizedWeight(
        "fp8:group=128,rows=128", (256, 256), numbers.to(torch.float8_e4m3fn), torch.full((2, 2), 0.01)
    )
    rows = torch.ones(3, 256, dtype=torch.bfloat16)
    with lz.scope(prefer=["vllm"]):
        assert lz.which("quantized_linear", rows, weight)["kernel_id"] == "vllm.cpu.fp8_blocks"
        got = lz.quantized_linear(rows, weight)
    assert not got[:, 5].any()
    wanted = rows.float() @ weight.dequantized(torch.float32).t()
    torch.testing.assert_close(got.float(), wanted, rtol=1e-2, atol=2e-2)


SCORES = {
    "plain": {},
    "everything": {"causal": False},
    "window": {"window": (9, 0), "softcap": 3.0},
    "window to both sides": {"causal": False, "window": (9, 9)},
    "slopes": {"alibi_slopes": torch.linspace(0.0, 0.5, 8)},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, 8, dtype=torch.float16), "scale": 0.3},
}


def mixed_call(beyond=0.0, page=32):
    """A decode, a chunk behind a prefix, no query, a prefill, over pages with transposed keys as vLLM has them."""
    lens, counts, kv_heads, width = (40, 70, 33, 50), (1, 30, 0, 50), 2, 32
    torch.manual_seed(0)
    blocks = [-(-each // page) for each in lens]
    tables = torch.full((4, max(blocks)), -1, dtype=torch.int32)
    pages = torch.randperm(sum(blocks)).int().split(blocks)
    for row, own in enumerate(pages):
        tables[row, : len(own)] = own
    both = torch.randn(sum(blocks), kv_heads, 2 * page, width)
    keys, values = both.chunk(2, dim=2)
    keys = keys.as_strided(keys.shape, (*keys.stride()[:2], 1, page))
    for own, length in zip(pages, lens, strict=True):
        keys[own[-1], :, (length - 1) % page + 1 :] = values[own[-1], :, (length - 1) % page + 1 :] = beyond
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    query = torch.randn(sum(counts), 8, width)
    return query, keys, values, tables, torch.tensor(lens, dtype=torch.int32), starts


@pytest.mark.parametrize("with_step", [False, True])
@pytest.mark.parametrize("scores", SCORES)
def test_a_mixed_step_over_vllms_pages_runs_in_vllms_kernel(loaded, scores, with_step):
    *arguments, starts = mixed_call()
    step = lz.StepMetadata(*arguments[-2:], cu_seqlens_q=starts) if with_step else None
    more = {**SCORES[scores], "layout": "HND", "cu_seqlens_q": starts, "step": step}
    report = lz.explain("paged_attention", *arguments, **more)
    assert "vllm.cpu.paged_tokens" in [each.kernel.id for each in report.candidates if not each.reasons]
    with lz.scope(locks={"paged_attention": "vllm.cpu.paged_tokens"}):
        got = lz.paged_attention(*arguments, **more)
    query, *caches, tables, lens = arguments
    nhd = (cache.transpose(1, 2) for cache in caches)
    wanted = paged_tokens_reference(query, *nhd, tables, lens, starts, **{"causal": True, **SCORES[scores]})
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beyond", [float("nan"), float("inf"), 1e30])
def test_what_lies_beyond_a_sequence_reaches_no_result(loaded, beyond):
    (*clean, starts), (*dirty, _) = mixed_call(), mixed_call(beyond)
    with lz.scope(locks={"paged_attention": "vllm.cpu.paged_tokens"}):
        wanted, got = (lz.paged_attention(*each, layout="HND", cu_seqlens_q=starts) for each in (clean, dirty))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_step", [False, True])
@pytest.mark.parametrize("kernel", ["vllm.cpu.paged_tokens", "vllm.cpu.paged_codes"])
@pytest.mark.parametrize("name", ["alibi_slopes", "cu_seqlens_q", "context_lens"])
def test_numbers_that_do_not_follow_each_other_are_read_as_they_are(loaded, name, kernel, with_step):
    """The operator reads them as if they did: slopes, starts and lengths were those of others."""
    query, *caches, tables, lens, starts = mixed_call()
    scales = {}
    if kernel == "vllm.cpu.paged_codes":
        keys, whole = caches[0], torch.randn(len(caches[0]), 2, 64, 32).to(torch.float8_e4m3fn)
        caches = [whole[:, :, :32].as_strided(keys.shape, keys.stride()), whole[:, :, 32:]]
        scales = {"key_scale": torch.tensor(0.5), "value_scale": torch.tensor(0.3)}

    def run(context_lens=lens, cu_seqlens_q=starts, alibi_slopes=SCORES["slopes"]["alibi_slopes"]):
        step = lz.StepMetadata(tables, context_lens, cu_seqlens_q=cu_seqlens_q) if with_step else None
        more = {"cu_seqlens_q": cu_seqlens_q, "alibi_slopes": alibi_slopes, "step": step, "layout": "HND", **scales}
        arguments = (query, *caches, tables, context_lens)
        if reasons := lz.explain("paged_attention", *arguments, **more).reasons(kernel):
            pytest.skip("; ".join(map(str, reasons)))
        with lz.scope(locks={"paged_attention": kernel}):
            return lz.paged_attention(*arguments, **more)

    dense = {"context_lens": lens, "cu_seqlens_q": starts, **SCORES["slopes"]}[name]
    strided = torch.stack((dense, torch.full_like(dense, 7)), 1)[:, 0]
    torch.testing.assert_close(run(**{name: strided}), run(), rtol=1e-5, atol=1e-5)


def test_masks_that_vllms_kernel_draws_otherwise_are_refused(loaded):
    *arguments, starts = mixed_call()
    for more in (
        {"causal": False, "window": (9, 3)},
        {"causal": False, "alibi_slopes": torch.ones(8)},
        {"alibi_slopes": torch.ones(4, 8)},
    ):
        report = lz.explain("paged_attention", *arguments, layout="HND", cu_seqlens_q=starts, **more)
        assert report.reasons("vllm.cpu.paged_tokens")


def test_a_result_lies_where_the_step_wants_it_once(loaded):
    query, keys, values, tables, lens, starts = mixed_call()
    step = lz.StepMetadata(tables, lens, cu_seqlens_q=starts, finite_pages=True)
    more = {"layout": "HND", "cu_seqlens_q": starts, "step": step}
    with lz.scope(locks={"paged_attention": "vllm.cpu.paged_tokens"}):
        wanted = lz.paged_attention(query, keys, values, tables, lens, **more)
        step.destination = there = torch.full_like(query, 7.0)
        assert lz.paged_attention(query, keys, values, tables, lens, **more) is there
        again = lz.paged_attention(query, keys, values, tables, lens, **more)
        step.destination = torch.zeros(len(query), 8 * 32)
        other = lz.paged_attention(query, keys, values, tables, lens, **more)
    assert again is not there
    assert step.destination is None, "one that does not fit is left, and forgotten"
    for got in (there, again, other):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("several", [True, False, "biased"], ids=["mixed", "decodes", "sinks and slopes"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_pages_are_written_and_read_by_vllms_kernels(loaded, dtype, several):
    query, keys, values, tables, lens, starts = mixed_call()
    whole = torch.zeros(len(keys), 2, 64, 32).to(dtype)
    codes = [whole[:, :, :32].as_strided(keys.shape, keys.stride()), whole[:, :, 32:]]
    key_scale, value_scale = torch.tensor(0.02), torch.tensor(0.03)
    slots = torch.cat(
        [table[torch.arange(n) // 32].long() * 32 + torch.arange(n) % 32 for table, n in zip(tables, lens, strict=True)]
    )
    new = [cache.transpose(1, 2).reshape(-1, 2, 32)[slots] for cache in (keys, values)]
    lz.append_quantized_kv_(*new, *codes, slots, key_scale, value_scale, layout="HND")
    read = [cache.transpose(1, 2) for cache in codes]
    for cache, scale, wanted in zip(read, (key_scale, value_scale), new, strict=True):
        got = cache.float().reshape(-1, 2, 32)[slots] * scale
        torch.testing.assert_close(got, wanted, rtol=0.26, atol=0.02)
    more = {"key_scale": key_scale, "value_scale": value_scale, "layout": "HND", "window": (30, 0)}
    if several:
        heads = query.shape[1]
        given = {"sinks": torch.randn(heads), "alibi_slopes": torch.rand(heads)} if several == "biased" else {}
        more |= {"cu_seqlens_q": starts, **given}
        wanted = quantized.PREFILL.reference(
            query, *read, tables, lens, starts, key_scale, value_scale, causal=True, window=(30, 0), **given
        )
    else:
        query = query[:4].unsqueeze(1)
        wanted = quantized.DECODE.reference(query, *read, tables, lens, key_scale, value_scale, window=(30, 0))
    report = lz.explain("paged_attention", query, *codes, tables, lens, **more)
    if not report.facts.device.instruction_sets >= {"avx512"}:
        pytest.skip("wanted vllm-cpu's kernel of float8 pages, which asks for avx512")
    assert report.chosen.kernel.id == "vllm.cpu.paged_codes"
    torch.testing.assert_close(lz.paged_attention(query, *codes, tables, lens, **more), wanted, rtol=1e-5, atol=1e-5)


def test_weights_of_experts_that_float8_misreads_are_looked_at_once(monkeypatch):
    """A row of numbers too small for its block's scale: another kernel computes, and no later call looks again."""
    looked, generator = [], torch.Generator().manual_seed(0)
    weights = [torch.randn(2, rows, 128, generator=generator) / 11 for rows in (256, 128)]
    weights[0][1, 0] *= 1e-4
    gate_up, down = (lz.quantize_weight(each, "fp8:group=128,rows=128") for each in weights)
    given = torch.randn(3, 128, generator=generator).bfloat16(), gate_up, down
    given = *given, torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    if lz.which("moe_experts", *given)["kernel_id"] != "vllm.cpu.fused_experts_fp8":
        pytest.skip("wanted vllm-cpu's experts of float8 to be chosen, which ask for avx512_bf16")
    usual = moe.misread
    monkeypatch.setattr(moe, "misread", lambda weight: (looked.append(weight), usual(weight))[1])
    results = [lz.moe_experts(*given) for _ in range(3)]
    assert len(looked) == 2
    assert torch.equal(results[0], results[2])
    exact = lz.moe_experts(given[0].float(), gate_up.dequantized(), down.dequantized(), *given[3:])
    torch.testing.assert_close(results[0].float(), exact, rtol=0.02, atol=0.02)


def test_operators_that_share_scratch_memory_run_one_at_a_time(loaded, monkeypatch):
    held = {}

    class Operators:
        def __getattr__(self, name):
            def run(*given):
                held.setdefault(name, set()).add(vllm_cpu.SCRATCH.locked())
                return getattr(torch.ops._C, name).default(*given)

            return SimpleNamespace(default=run)

    for module in (linear, moe, paged):
        monkeypatch.setattr(module, "operators", lambda _: Operators())
    ids, shares = torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.rand(3, 2)
    weights = torch.randn(2, 64, 96), torch.randn(2, 96, 32)
    packed = {name: lz.PackedWeight(each) for name, each in zip(moe.PACKED_OF, weights, strict=True)}
    codes = lz.quantize_weight(torch.randn(32, 224), "int4", group_size=32)
    with lz.scope(prefer=["vllm"]):
        lz.moe_experts(torch.randn(3, 96), *weights, ids, shares, **packed)
        lz.quantized_linear(torch.randn(3, 224).bfloat16(), codes)
        lz.paged_attention(*mixed_call()[:-1], layout="HND", cu_seqlens_q=mixed_call()[-1])
    wanted = {"cpu_fused_moe", "get_scheduler_metadata", "cpu_attention_with_kv_cache"}
    wanted |= {"cpu_gemm_wna16"} if CPU.instruction_sets >= {"avx512_bf16"} else set()
    assert {name: held[name] for name in wanted} == {key: {True} for key in wanted}


def test_a_thread_that_never_called_torch_plans_for_as_many_threads_as_torch_has():
    keys = torch.randn(6, 2, 64, 32).transpose(2, 3)
    tables, lens = torch.arange(6, dtype=torch.int32).view(3, 2), torch.tensor([40, 33, 7], dtype=torch.int32)
    call = torch.randn(80, 8, 64), keys, torch.randn(6, 2, 32, 64), tables, lens  # as many zeros as torch shares out
    starts, before = torch.tensor([0, 40, 73, 80], dtype=torch.int32), torch.get_num_threads()
    report = lz.explain("paged_attention", *call, cu_seqlens_q=starts, layout="HND")
    if reasons := report.reasons("vllm.cpu.paged_tokens"):
        pytest.skip(str(reasons[0]))
    run = next(each.kernel for each in report.candidates if each.kernel.id == "vllm.cpu.paged_tokens").load(
        report.facts
    )
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        wanted = run(*call, starts)
        with ThreadPoolExecutor(1) as fresh:
            torch.testing.assert_close(fresh.submit(run, *call, starts).result(), wanted)
    finally:
        torch.set_num_threads(before)


def test_rows_of_the_least_numbers_are_quantized_as_others_are():
    """vLLM multiplies by 127 over a row's largest number, which is infinite up to 4e-37: each number became -128."""
    largest = torch.tensor([1.0, 0.0, 2.8e-39, 1.4e-45, 3e-37, 127 * 2.0**-128])
    x = torch.tensor([1.0, -0.5, 0.0, 0.25] * 8) * largest.unsqueeze(1)
    found = []
    for kernel in ("vllm.cpu.quantize_rows", "reference.quantize.int8"):
        with lz.scope(locks={"quantize.int8": kernel}):
            found.append(lz.quantize(x, "int8", per="row"))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-45)


def codes_of_four_bits():
    call = torch.randn(3, 64).bfloat16(), lz.quantize_weight(torch.randn(64, 64), "int4", group_size=32)
    return "quantized_linear", "vllm.cpu.w4a8", call, {"activations": "int8"}


def latent_by_tiles():
    cache, tables = torch.randn(17, 16, 576).bfloat16(), torch.arange(16, dtype=torch.int32)[:, None]
    parts = (*torch.randn(16, 1, 8, 576).bfloat16().split((512, 64), -1), *cache.split((512, 64), -1))
    return "mla_attention", "vllm.cpu.mla_tiles", (*parts, tables, torch.full((16,), 16, dtype=torch.int32), 0.1), {}


@pytest.mark.parametrize("made", [codes_of_four_bits, latent_by_tiles])
def test_a_thread_keeps_its_number_of_threads(made):
    """The operators' first loop in it took the process's; with room for fewer that ended the process."""
    function, kernel, call, named = made()
    if reasons := lz.explain(function, *call, **named).reasons(kernel):
        pytest.skip(str(reasons[0]))
    before, operation = torch.get_num_threads(), lz.explain(function, *call, **named).operation

    def own():
        torch.set_num_threads(before + 1)  # one that is larger than the process's is harmless
        return torch.get_num_threads()

    def run():
        with lz.scope(locks={operation: kernel}):
            return getattr(lz, function)(*call, **named), torch.get_num_threads()

    with ThreadPoolExecutor(1) as fresh:
        wanted = fresh.submit(own).result()
        torch.set_num_threads(before)
        got, has = fresh.submit(run).result()
    assert has == wanted
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == before
    assert torch.equal(got, run()[0])


def test_threads_that_begin_together_leave_the_process_its_number():
    function, kernel, call, named = codes_of_four_bits()
    if reasons := lz.explain(function, *call, **named).reasons(kernel):
        pytest.skip(str(reasons[0]))
    before, numbers = torch.get_num_threads(), (1, 2, 3, 1)

    def begin(number):
        torch.set_num_threads(number)
        torch.get_num_threads()
        together.wait()
        together.wait()  # the process has its own number again
        lz.quantized_linear(*call, **named)
        return torch.get_num_threads()

    with lz.scope(locks={"quantized_linear": kernel}):
        lz.quantized_linear(*call, **named)
    for _ in range(10):
        together = threading.Barrier(len(numbers) + 1)
        with lz.scope(locks={"quantized_linear": kernel}), ThreadPoolExecutor(len(numbers)) as fresh:
            begun = [fresh.submit(contextvars.copy_context().run, begin, number) for number in numbers]
            together.wait()
            torch.set_num_threads(before)
            together.wait()
            assert tuple(each.result() for each in begun) == numbers
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == before
