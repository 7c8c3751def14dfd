"""What else dispatches an attention call, each with a kernel that does nothing; peers that are not installed say so."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]

LIBRARY = torch.library.Library("layerzero_bench", "FRAGMENT")  # lives as long as its operators


class Missing(Exception):  # noqa: N818  # no error: the reason why a peer is left out
    pass


def of_torch(q: Any, k: Any, v: Any, kernel: Callable[..., Any]) -> tuple[dict[str, Call], dict[str, str]]:
    """Torch's own ways; the operators do as little as they may: those of Python return an alias or a copy."""
    LIBRARY.define("noop(Tensor q, Tensor k, Tensor v, bool causal=True) -> Tensor")
    LIBRARY.impl("noop", lambda *tensors, **_: tensors[0].view_as(tensors[0]), "CompositeExplicitAutograd")

    @torch.library.custom_op("layerzero_bench::custom", mutates_args=())
    def custom(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
        return q.clone()

    try:
        packet, no_work = _compiled(), (q, k, v, True, None)
        missing = {}
    except (OSError, subprocess.CalledProcessError) as error:
        packet, no_work = torch.ops.aten.is_same_size, (q, k)
        missing = {"a C++ operator of three tensors": f"{error}; is_same_size, of two, stands in"}
    overload = packet.default
    choice, python_operator = torch.ops.aten._fused_sdp_choice.default, torch.ops.layerzero_bench.noop.default
    return {
        "C++ operator, .default": lambda: overload(*no_work),
        "C++ operator, packet": lambda: packet(*no_work),
        "C++ operator of six arguments (sdp choice)": lambda: choice(q, k, v, None, 0.0, True),
        "F.sdpa, whole call": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "torch.library, Python kernel": lambda: python_operator(q, k, v),
        "torch.library.custom_op": lambda: custom(q, k, v),
        "lru_cache on shapes and dtypes (unsound)": _cached(q, k, v, kernel),
    }, missing


def _compiled() -> Any:
    """The operator of noop_operator.cpp, compiled once for a version of torch (half a minute)."""
    from torch.utils import cpp_extension

    if not hasattr(torch.ops.layerzero_bench, "native"):
        source = Path(__file__).with_name("noop_operator.cpp")
        library = Path(tempfile.gettempdir()) / f"layerzero_bench_{os.getuid()}_{torch.__version__}.so"
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            folder = Path(torch.__file__).parent / "lib"
            flags = ["-O2", "-fPIC", "-shared", "-std=c++20"]
            flags += [f"-I{path}" for path in cpp_extension.include_paths()]
            links = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu"]
            subprocess.run(["g++", *flags, str(source), "-o", str(made), *links], check=True)
            made.rename(library)
        torch.ops.load_library(library)
    return torch.ops.layerzero_bench.native


def _cached(q: Any, k: Any, v: Any, kernel: Callable[..., Any]) -> Call:
    @functools.lru_cache(maxsize=1024)
    def chosen(*key: Any) -> Callable[..., Any]:
        return kernel

    def call() -> Any:
        run = chosen(q.shape, k.shape, v.shape, q.dtype, q.device, True)
        return run(q, k, v, causal=True, scale=None)

    return call


def transformers(q: Any, k: Any, v: Any, kernel: Callable[..., Any]) -> Call:
    """How its models find their attention on each call; the interface's signature is kept."""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise Missing(str(error)) from error

    def interface(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        return kernel(query, key, value, causal=True, scale=None)

    ALL_ATTENTION_FUNCTIONS.register("layerzero_bench", interface)
    find = ALL_ATTENTION_FUNCTIONS.get_interface
    return lambda: find("layerzero_bench", interface)(None, q, k, v, None, dropout=0.0, scaling=None)


def diffusers(q: Any, k: Any, v: Any, kernel: Callable[..., Any]) -> Call:
    """Its attention dispatch with its native backend replaced by the kernel."""
    try:
        from diffusers.models import attention_dispatch as dispatch
    except Exception as error:  # it raises more than ImportError where its own dependencies are missing
        raise Missing(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def native(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **given: Any) -> Any:
        return kernel(query, key, value, causal=True, scale=None)

    registry, name = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName.NATIVE
    registry._backends[name] = native
    return lambda: dispatch.dispatch_attention_fn(q, k, v, is_causal=True)


def flashinfer_bench(q: Any, k: Any, v: Any, kernel: Callable[..., Any]) -> Call:
    """Its ``apply``: the key of a definition and one look into the table, which has no solution but this fallback."""
    os.environ.setdefault("FIB_CACHE_PATH", tempfile.mkdtemp())
    try:
        from flashinfer_bench import ApplyConfig, Definition, TraceSet
        from flashinfer_bench.apply import apply
        from flashinfer_bench.apply.runtime import ApplyRuntime
    except Exception as error:  # it raises more than ImportError where its own dependencies are missing
        raise Missing(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    axes: dict[str, Any] = {name: {"type": "var"} for name in ("B", "S", "H")}
    tensor = {"shape": ["B", "S", "H", "D"], "dtype": "float32"}
    definition = Definition.model_validate({
        "name": "noop", "op_type": "attention", "axes": axes | {"D": {"type": "const", "value": q.shape[-1]}},
        "inputs": dict.fromkeys(("q", "k", "v"), tensor), "outputs": {"o": tensor},
        "reference": "def run(q, k, v):\n    return q",
    })  # fmt: skip
    runtime = ApplyRuntime(TraceSet(definitions={"noop": definition}), ApplyConfig())
    runtime.start()

    def fallback(q: Any, k: Any, v: Any) -> Any:
        return kernel(q, k, v, causal=True, scale=None)

    return lambda: apply("noop", args=(q, k, v), fallback=fallback)


def flag_gems(q: Any, k: Any, v: Any, kernel: Callable[..., Any]) -> Call:
    """It replaces aten operators through torch.library, so that a call costs what 'torch.library' costs, on a GPU."""
    try:
        import flag_gems as loaded
    except Exception as error:  # Triton raises where there is no GPU
        raise Missing(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    if not torch.cuda.is_available():
        raise Missing("its kernels need a GPU")
    query, key, value = (each.to("cuda", torch.float16) for each in (q, k, v))
    return lambda: loaded.ops.scaled_dot_product_attention(query, key, value)


PEERS: dict[str, Callable[..., Call]] = {
    "Transformers' attention interface": transformers,
    "diffusers' dispatch_attention_fn": diffusers,
    "flashinfer-bench apply": flashinfer_bench,
    "FlagGems": flag_gems,
}


def installed(q: Any, k: Any, v: Any, kernel: Callable[..., Any]) -> tuple[dict[str, Call], dict[str, str]]:
    """The peers that serve here, torch's own ways first, and why the others do not."""
    calls, missing = of_torch(q, k, v, kernel)
    for name, make in PEERS.items():
        try:
            call = make(q, k, v, kernel)
            call()
        except Missing as reason:
            missing[name] = str(reason)
        else:
            calls[name] = call
    return calls, missing
