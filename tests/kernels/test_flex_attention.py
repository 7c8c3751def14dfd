"""flex_attention compiled ahead of time: refused until built, then right for every call of its class."""

from __future__ import annotations

import math
import shutil
import threading

import pytest
import torch

import layerzero as lz
from layerzero.backends.torch import flex_attention
from layerzero.ops.attention.reference import attention_reference
from layerzero.testing import check
from layerzero.testing.generate import RandomCall

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler to build with"),
    pytest.mark.skipif(
        not torch.__version__.startswith(("2.13.", "2.14.", "2.15.")), reason="VERSION_UNSUPPORTED: this torch"
    ),
]

KERNEL = "flex_attention.cpu"
VARIANTS = [
    {"causal": causal, "window": window, "softcap": softcap}
    for causal in (False, True)
    for window in (None, (3, 0), (0, 5), (-1, 2), (0, 0))
    for softcap in (None, 2.0)
] + [{"scale": 0.0}, {"scale": -0.3, "causal": True}, {"alibi_slopes": torch.linspace(0.1, 1, 4)}]


def attention(batch, seq_q, seq_k, *, kv_heads=4, dtype=torch.float32, changed=None, **arguments):
    sizes = {"query": (batch, seq_q, 4, 32), "key": (batch, seq_k, kv_heads, 32), "value": (batch, seq_k, kv_heads, 32)}
    tensors = {name: torch.randn(size).to(dtype) for name, size in sizes.items()}
    if changed:
        tensors[changed].view(-1)[5] = math.nan
    return RandomCall("attention", {**tensors, "layout": "BSHD", **arguments}, f"{seq_q} to {seq_k}: {arguments}")


def codes(call):
    return [str(reason.code) for reason in lz.explain("attention", **call.arguments).reasons(KERNEL)]


def built(*, dtype=torch.float32, **sizes):
    """Build for the class of a call as a call under allow_jit_compile does; warmup has no shapes with lengths apart."""
    call = attention(**sizes, dtype=dtype)
    facts = lz.explain("attention", **call.arguments).facts
    flex_attention._load(facts)
    return facts


def locked():
    return lz.scope(locks={"attention": KERNEL}, fallback_enabled=False, allow_jit_compile=True)


def wrong(calls):
    found = []
    with locked():
        for call in calls:
            found += [f"{call.text}: {problem}" for problem in check(call)]
    return found


def test_it_is_refused_until_warmup_built_it_and_then_serves_its_class():
    assert codes(attention(2, 64, 64)) == ["JIT_DISABLED"]
    results = lz.warmup("attention.standard.prefill", shapes=[(2, 64, 4, 32)], device="cpu")
    assert [(each.kernel_id, each.error) for each in results] == [(KERNEL, "")]
    assert codes(attention(3, 127, 65)) == []
    for other in (attention(4, 64, 64), attention(2, 128, 64), attention(2, 64, 64, dtype=torch.bfloat16)):
        assert codes(other) == ["JIT_DISABLED"]
    wider = {name: torch.randn(2, 64, 4, 40) for name in ("query", "key", "value")}
    assert codes(RandomCall("attention", {**wider, "layout": "BSHD"}, "same class, other head_dim")) == ["JIT_DISABLED"]
    reasons = codes(attention(2, 64, 64, alibi_slopes=torch.rand(2, 4)))
    assert reasons == ["CONSTRAINT_FAILED"], "slopes of a batch"
    assert (
        wrong(attention(*sizes, **each) for sizes in ((2, 64, 64), (3, 127, 65), (2, 65, 127)) for each in VARIANTS)
        == []
    )
    assert wrong(attention(2, 65, 127, changed=name, causal=True) for name in ("query", "key", "value")) == []


def test_its_builds_do_not_depend_on_the_state_of_the_caller():
    facts = built(batch=2, seq_q=64, seq_k=64)
    run = flex_attention._load(facts)  # causal is what lz.attention takes it to be where nothing is said
    call = attention(2, 64, 64, causal=True)
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    wanted = lz.attention(query, key, value, causal=True, layout="BSHD")
    results = []
    thread = threading.Thread(target=lambda: results.append(run(query, key, value)))
    thread.start()
    thread.join()
    threads = torch.get_num_threads()
    try:
        for count in range(1, flex_attention._THREADS + 1):
            torch.set_num_threads(count)
            results.append(run(query, key, value))
        torch.set_num_threads(flex_attention._THREADS + 1)
        with pytest.raises(RuntimeError, match="threads at most"):
            run(query, key, value)
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        results.append(run(query, key, value))
    with torch.autocast("cpu"):
        results.append(run(query, key, value))
    for result in results:
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_decode_of_grouped_heads_in_bfloat16():
    options = {"kv_heads": 2, "dtype": torch.bfloat16}
    built(batch=1, seq_q=1, seq_k=64, **options)
    decode = [{}, {"softcap": 2.0}, {"window": (9, 0)}, {"alibi_slopes": torch.linspace(0.1, 1, 4)}]
    assert wrong(attention(1, 1, seq_k, **options, **each) for seq_k in (64, 65, 127) for each in decode) == []


def test_what_a_gpu_would_run_serves_its_exact_sizes_and_raises_for_others():
    names = (*flex_attention._RANGES, *flex_attention._EXACT)
    sizes = dict(zip(names, (1, 48, 80, 4, 2, 32, 32), strict=True))
    cpu, dtype = torch.device("cpu"), torch.float32
    # torch 2.11 has it off; pytest 9.2's monkeypatch hides the setting for good, as it deletes what had no entry
    with torch._dynamo.config.patch(enable_aot_compile=False):
        run = flex_attention._for_exact_sizes(cpu, dtype, sizes)
    call = attention(1, 48, 80, kv_heads=2)
    query, key, value = (call.arguments[name] for name in ("query", "key", "value"))
    numbers = [torch.tensor(32**-0.5), torch.tensor(2.0), torch.tensor(7), torch.tensor(0), torch.tensor(32)]
    got = run([*numbers, torch.zeros(4), query, key, value])
    wanted = attention_reference(query, key, value, causal=True, window=(7, 0), softcap=2.0)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="expected size"):
        run([*numbers, torch.zeros(4), query[:, :40], key, value])
