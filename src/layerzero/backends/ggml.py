"""ggml's products with GGUF's blocks on a CPU, from the shared libraries that llama-cpp-python brings.

A weight is read where it lies: no form of it is made, and none is kept. Rows are rounded to int8 as llama.cpp rounds
them, by blocks of 32 or 256 numbers. A block of 32 has a float16 scale: rows that are too small or too large for it are
divided by a power of two, and their results multiplied. There a row with NaN gives NaN; in a k-quant, finite numbers.

A thread has a graph for each size of product, whose addresses a call sets. To build it anew takes 10 us more, and 40
between products of 2 MB and more, which leave no cache warm. Neither llama_cpp nor a model is loaded. Of ggml's structs
the code relies on ``ggml_init_params`` alone.

Microseconds of ggml and of ONNX Runtime for 8192 x 2048 beyond the caches, in float32:

    one row: Q8_0 1,463 and 1,462, Q4_K 742 and 1,230, Q6_K 777 and 1,695
    64 rows: Q8_0 21,200 and 14,700, Q4_K 9,700 and 17,800, Q6_K 15,900 and 14,500

They hold for one busy thread of an AMD EPYC Zen 4 and llama-cpp-python 0.3.36 built on it, 2026-11-27. ggml's own order
of Q4_K needs a copy of the weight, and is left out. It took 408 us for one row where this took 461, and 30,800 for 128
rows where this took 17,600.
Library: ggml in llama-cpp-python >= 0.3.36, MIT.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import platform
import threading
from collections.abc import Callable
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.grouped_weights import ROUNDING_GGUF
from layerzero.backends.torch.quantized_linear import propagate_nan
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.ops.quantize.gguf import KINDS, NUMBERS

GGML = Backend(
    name="ggml",
    summary="ggml's products with GGUF's blocks, as llama.cpp runs them on CPUs",
    import_name="llama_cpp",
    distribution="llama-cpp-python",
    versions=">=0.3.36,<0.4",
    tested=("0.3.36",),
    platforms=("cpu",),
    install="pip install llama-cpp-python",
    homepage="https://github.com/abetlen/llama-cpp-python",
    flags=("deterministic",),
)

NUMBERS_OF = {name: number for number, name in NUMBERS.items()}
FLOAT32, FLOAT16 = 0, 1  # GGML_TYPE_F32 and GGML_TYPE_F16
_NODES = 4
_MOST = 256
"""Graphs that a thread keeps, of 3 KB each: of every size of weight and number of rows one."""
BASE, _EVERYWHERE = 64, 2**62
"""An address and a size: one buffer of ggml's that spans all memory, so that tensors of it lie wherever torch's do."""


class Init(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Library:
    """The functions of both libraries, and where the address of its numbers is in a tensor of ggml's."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise ImportError("llama-cpp-python is not installed")
        folder, wanted = Path(spec.origin).parent / "lib", ("libggml-base.so", "libggml-cpu.so")
        if not all((folder / each).is_file() for each in wanted):
            got = ", ".join(sorted(each.name for each in folder.glob("*ggml*"))) or "none of ggml's"
            raise ImportError(
                f"ggml: wanted {' and '.join(wanted)} of Linux in {folder}, got {got} on {platform.system()}; "
                "build llama-cpp-python from source on Linux; elsewhere other kernels serve these calls"
            )
        base, cpu = str(folder / wanted[0]), ctypes.PyDLL(str(folder / wanted[1]))
        quick, slow = ctypes.PyDLL(base), ctypes.CDLL(base)
        self.quick = quick
        at, size = c_void_p, c_size_t
        self.init = typed(quick, "ggml_init", at, Init)
        self.free = typed(quick, "ggml_free", None, at)
        self.tensor_bytes = typed(quick, "ggml_tensor_overhead", size)()
        self.graph_bytes = typed(quick, "ggml_graph_overhead_custom", size, size, c_bool)
        self.tensor = typed(quick, "ggml_new_tensor_2d", at, at, c_int, c_int64, c_int64)
        self.product = typed(quick, "ggml_mul_mat", at, at, at, at)
        self.graph = typed(quick, "ggml_new_graph_custom", at, at, size, c_bool)
        self.expand = typed(quick, "ggml_build_forward_expand", None, at, at)
        self.place = typed(quick, "ggml_backend_tensor_alloc", c_int, at, at, at)
        self.backend = typed(cpu, "ggml_backend_cpu_init", at)
        self.forget = typed(quick, "ggml_backend_free", None, at)
        self.threads = typed(cpu, "ggml_backend_cpu_set_n_threads", None, at, c_int)
        self.compute = typed(slow, "ggml_backend_graph_compute", c_int, at, at)  # without the interpreter's lock
        self.everywhere = typed(quick, "ggml_backend_cpu_buffer_from_ptr", at, at, size)(BASE, _EVERYWHERE)
        self.data = self._offset()

    def _offset(self) -> int:
        """Of the address, which is found by a number that is nowhere else."""
        mark, context = BASE + 0x5EED_0000_0000, self.init(Init(2 * self.tensor_bytes, None, True))
        tensor = self.tensor(context, FLOAT32, 1, 1)
        self.place(self.everywhere, tensor, mark)
        words = (ctypes.c_uint64 * (self.tensor_bytes // 8 - 8)).from_address(tensor)
        found = [8 * place for place, word in enumerate(words) if word == mark]
        self.free(context)
        if len(found) != 1:
            raise ImportError(
                f"ggml: wanted one address in a tensor, got {len(found)}; install llama-cpp-python 0.3.36"
            )
        return found[0]


def typed(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of a library, with its types."""
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


library = functools.cache(Library)


class _Graph:
    """One product of given sizes in memory of ggml's; the addresses of its tensors are set before each run."""

    def __init__(self, of: Library, kind: int, outputs: int, inputs: int, count: int) -> None:
        self._free = of.free
        self._context = context = of.init(Init(4 * of.tensor_bytes + of.graph_bytes(_NODES, False) + 1024, None, True))
        tensors = [of.tensor(context, kind, inputs, outputs), of.tensor(context, FLOAT32, inputs, count)]
        tensors.append(of.product(context, *tensors))
        for each in tensors:
            of.place(of.everywhere, each, BASE)
        self.weight, self.rows, self.output = [c_void_p.from_address(each + of.data) for each in tensors]
        self.graph = of.graph(context, _NODES, False)
        of.expand(self.graph, tensors[-1])

    def __del__(self) -> None:
        self._free(self._context)


class _Products:
    """The graphs of one thread, and ggml's scratch memory for its rows in int8."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._backend, self._threads = library.backend(), 0
        self._graphs: dict[tuple[int, int, int, int], _Graph] = {}

    def __del__(self) -> None:
        self._library.forget(self._backend)

    def __call__(self, kind: int, weight: Tensor, rows: Tensor) -> Tensor:
        """Multiply. Shapes: weight (N, bytes), rows (M, K) → (M, N), float32."""
        (count, inputs), outputs = rows.shape, weight.shape[0]
        output, key = rows.new_empty((count, outputs)), (kind, outputs, inputs, count)
        of = self._graphs.get(key)
        if of is None:
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            of = self._graphs[key] = _Graph(self._library, *key)
        of.weight.value, of.rows.value, of.output.value = weight.data_ptr(), rows.data_ptr(), output.data_ptr()
        self.run(of.graph)
        return output

    def run(self, graph: int) -> None:
        """Compute what a graph says, in as many threads as torch has."""
        if (threads := torch.get_num_threads()) != self._threads:
            self._library.threads(self._backend, threads)
            self._threads = threads
        if status := self._library.compute(self._backend, graph):
            raise RuntimeError(f"ggml: wanted a product, got status {status}; deny ggml.gguf_linear and report it")


def _divisor(largest: float) -> float:
    """What a row of this largest magnitude is divided by: a power of two, or NaN where the magnitude is not finite.

    Float16 holds the scales of rows from 1 to 1024, and the sums of 32 numbers that Q8_1 has besides. Other rows come
    to 512 to 1024, less where the power would leave float32. To look at one row takes 3 % of a Q8_0 product of
    8192 x 2048, 5 % of 2048 x 2048 and 19 % of 256 x 2048; to divide it, too, 13, 12 and 53 % (AMD EPYC Zen 4,
    2026-11-27).
    """
    if 1 <= largest < 1024:
        return 1.0
    return math.ldexp(1.0, max(math.frexp(largest)[1], -116) - 10) + (largest - largest)


class _OfThread(threading.local):
    """What each thread has of its own: a graph's addresses are those of one call."""

    def __init__(self) -> None:
        self.products = _Products(library())


of_thread = functools.cache(_OfThread)


def _load(facts: Facts) -> Callable[..., Any]:
    kind, features, ndim = NUMBERS_OF[str(facts["weight_kind"])], facts.size("in_features"), facts["input_ndim"]
    given, here = facts["dtype"], of_thread()
    assert isinstance(given, torch.dtype)
    narrow, half = given is not torch.float32, KINDS[NUMBERS[kind]].block == 32

    def product(weight: Tensor, rows: Tensor) -> Tensor:
        divisors = [_divisor(each) for each in rows.abs().amax(-1).tolist()] if half else []
        if all(each == 1 for each in divisors):
            output = here.products(kind, weight, rows)
            return output if half else propagate_nan(output, rows)
        divisor = rows.new_tensor(divisors).unsqueeze(-1)
        return here.products(kind, weight, rows / divisor).mul_(divisor)

    def run(input: Tensor, weight: Tensor, *, weight_format: str, bias: Tensor | None = None) -> Tensor:
        rows = input if ndim == 2 else input.reshape(-1, features)
        output = product(weight, rows.float() if narrow else rows)
        if bias is not None:
            output += bias
        output = output.to(given) if narrow else output
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


KERNELS = (
    GGML.kernel(
        "ggml.gguf_linear",
        ROUNDING_GGUF,
        _load,
        limit.platform("cpu"),
        limit.dtype("float32", "bfloat16", "float16"),
        limit.one_of("weight_kind", *NUMBERS_OF),
        limit.contiguous("input", "weight"),
        limit.aligned(2, "weight"),  # blocks begin with a float16 number
        accepts=("weight_format", "bias"),
        priority=60,
    ),
)
