"""LayerZero's Triton kernels compile for GPUs that are not here: what ran under the interpreter alone never did.

Skipped without Triton (``pip install --no-deps triton`` beside a torch for CPUs) and under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from triton_interpreter import INTERPRETED, on_cpu

import layerzero as lz
from layerzero.engine.registry import REGISTRY
from layerzero.testing.generate import RandomCall
from layerzero.testing.single_run import attempt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: kernels are interpreted, and never compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),  # Triton 3.9 warns of its own default
]

TARGETS = {"sm_90": ("cuda", 90, 32, 99), "gfx942": ("hip", "gfx942", 64, 64)}
"""Each with its backend, architecture, threads of a warp, and KiB of shared memory that a program may have: on NVIDIA's
as many as sm_86 and sm_89 have, the fewest."""

DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(4, 2, 24, 40, 8), (1, 1, 1, 1, 1), (8, 1, 128, 128, 16), (64, 2, 192, 128, 16), (8, 4, 256, 256, 64)]
"""Heads, key heads, their width, the values' and tokens of a page."""

VARIANTS = {
    "plain": {},
    "all keys": {"causal": False},
    "left": {"window": (6, -1)},
    "right": {"window": (-1, 2), "causal": False},
    "window": {"window": (1, 1), "causal": False},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "tree": {"tree_mask": 4},
    "narrow tree": {"tree_mask": 1},
    "lse": {"return_lse": True},
    "all": {"softcap": 5.0, "sinks": True, "tree_mask": 4, "return_lse": True},
}


@pytest.fixture(params=TARGETS)
def compiled(request, monkeypatch):
    """A function that runs a call with launches that only compile; gives its key and what was compiled for it."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from layerzero.backends import triton_kernels

    *target, kib = TARGETS[request.param]
    made, driver, target = [], triton.runtime.driver, GPUTarget(*target)

    class Compiling:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                try:
                    made.append(self.kernel.warmup(*arguments, grid=grid, **constants))
                except Exception as error:
                    if re.search("not found|[Cc]annot find", str(error)):
                        pytest.skip(f"Triton lacks what it needs for {request.param}: {error}")
                    raise

            return launch

    def run(kernel_id, name, call):
        kernel = on_cpu(next(each for each in REGISTRY.kernels() if each.id == kernel_id))
        with lz.scope(allow_jit_compile=True):
            trial = attempt(kernel, REGISTRY.operation(name), call)
            assert not trial.reasons
            trial.run(**call.arguments)
        assert made[-1].metadata.shared <= kib * 1024
        return kernel.build_key(trial.facts), made[-1]

    kernels = {name: each for name, each in vars(triton_kernels).items() if isinstance(each, triton.JITFunction)}
    assert set(kernels) == {"swiglu_oai", "paged_tokens"}, "each has a test below"
    for name, each in kernels.items():
        monkeypatch.setattr(triton_kernels, name, Compiling(each))
    before = dict(vars(driver))
    # kernels are kept by device: the target stands for it
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: request.param,
            get_current_stream=lambda _device: 0,
            get_current_target=lambda: target,
        )
    )
    yield run
    vars(driver).update(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turns", [False, True])
def test_gates(compiled, turns, dtype):
    rows = {"input": torch.ones(3, 2 * 24, dtype=dtype)} | ({} if turns else {"up": torch.ones(3, 2 * 24, dtype=dtype)})
    name = "mlp.swiglu_oai.interleaved" if turns else "mlp.swiglu_oai"
    compiled("layerzero_triton.swiglu_oai", name, RandomCall("swiglu_oai", rows))


def paged(sizes, dtype, tokens=8, *, sinks=False, tree_mask=0, **more):
    heads, kv_heads, width, value_width, page = sizes
    lengths = torch.tensor([9, 23], dtype=torch.int32)
    given = {
        "query": torch.ones(tokens, heads, width, dtype=dtype),
        "key_cache": torch.ones(64, page, kv_heads, width, dtype=dtype),
        "value_cache": torch.ones(64, page, kv_heads, value_width, dtype=dtype),
        "block_tables": torch.zeros(2, 23 // page + 1, dtype=torch.int32),
        "context_lens": lengths,
        "cu_seqlens_q": torch.tensor([0, tokens // 2, tokens], dtype=torch.int32),
        "layout": "NHD",
    }
    if sinks:
        given["sinks"] = torch.ones(heads)
    if tree_mask:
        given["tree_mask"] = torch.ones(tokens // 2, tree_mask, dtype=torch.bool).tril().repeat(2, 1)
    return RandomCall("paged_attention", given | more)


def of_pages(compiled, sizes, dtype, **more):
    name = "standard" if sizes[0] == sizes[1] else "gqa"
    call = paged(sizes, dtype, **more)
    return compiled("layerzero_triton.paged_tokens", f"attention.{name}.prefill.paged", call)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_asked_of_pages(compiled, variant):
    of_pages(compiled, HEADS[0], torch.bfloat16, **VARIANTS[variant])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_widths_of_pages(compiled, sizes, dtype):
    of_pages(compiled, sizes, dtype, **VARIANTS["all"])


def of_one_key_one_build(found):
    """Calls of one key have one build: else the second would wait for the compiler."""
    builds = {key: {id(each) for other, each in found if other == key} for key, _ in found}
    assert len(builds) > 1
    assert all(len(each) == 1 for each in builds.values())
    assert max(sum(other == key for other, _ in found) for key in builds) > 1


def test_gates_of_one_key_share_a_build(compiled):
    shapes = [(3, 5), (4, 4), (2, 2), (1, 1), (8, 16), (5, 7), (4, 5)]
    rows = [RandomCall("swiglu_oai", {"input": torch.ones(each), "up": torch.ones(each)}) for each in shapes]
    of_one_key_one_build([compiled("layerzero_triton.swiglu_oai", "mlp.swiglu_oai", each) for each in rows])


def test_pages_of_one_key_share_a_build(compiled):
    calls = [{"window": each, "causal": False} for each in ((6, 1), (16, 0), (1, 32))]
    calls += [{"tokens": each} for each in (2, 6, 16)] + [{"tree_mask": each} for each in (1, 4, 16)]
    of_one_key_one_build([of_pages(compiled, HEADS[0], torch.float32, **each) for each in calls])
