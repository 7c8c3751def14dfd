"""Host time of a call: the library's own public function against LayerZero's with that kernel locked.

    python benchmarks/gpu_host.py --out results

Tensors are small, so that the device waits for the host: a burst of calls is timed without synchronising in between,
and what is shown is the median over bursts, taken in turn. Both start from the same tensors: what a library wants
otherwise (no batch axis, rows of all sequences, weights in float32) is made in its call. ``add_rms_norm`` differs in
what it keeps: LayerZero's leaves its input as it was, the libraries' functions write the result there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import layerzero as lz

BURST, BURSTS = 100, 41
B, S, H, KV, D, ROWS, HIDDEN = 1, 128, 8, 8, 128, 16, 4096
PAGE, PAGES = 16, 8

Call = Callable[[], Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def attention() -> dict[str, tuple[Call, Call]]:
    """Kernel: (the library's call, LayerZero's), BSHD, causal."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (normal(B, S, H, D) for _ in range(3))
    qt, kt, vt = (each.transpose(1, 2) for each in (q, k, v))
    ours = partial(lz.attention, q, k, v, causal=True, layout="BSHD")
    heads_first = partial(lz.attention, qt, kt, vt, causal=True, layout="BHSD")

    def sdpa(backend: SDPBackend) -> Call:
        def call() -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(qt, kt, vt, is_causal=True)

        return call

    made: dict[str, tuple[Call, Call]] = {
        f"torch.sdpa.{name}": (sdpa(backend), heads_first)
        for name, backend in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        )
    }
    made["torch.sdpa.cudnn (no context)"] = (
        partial(F.scaled_dot_product_attention, qt, kt, vt, is_causal=True),
        heads_first,
    )

    def flashinfer(backend: str) -> Call:
        from flashinfer import single_prefill_with_kv_cache

        return lambda: single_prefill_with_kv_cache(q[0], k[0], v[0], causal=True, backend=backend)[None]

    def varlen(version: int) -> Call:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        starts = torch.arange(B + 1, dtype=torch.int32, device="cuda") * S

        def call() -> Any:
            rows = (each.flatten(0, 1) for each in (q, k, v))
            return flash_attn_varlen_func(*rows, S, starts, S, starts, causal=True, fa_version=version).view(q.shape)

        return call

    def fa4() -> Call:
        from flash_attn.cute import flash_attn_func

        return partial(flash_attn_func, q, k, v, causal=True)

    made |= {
        kernel: (call, ours)
        for kernel, call in optional(
            {
                "flashinfer.fa2.prefill": partial(flashinfer, "fa2"),
                "flashinfer.fa3.prefill": partial(flashinfer, "fa3"),
                "vllm.flash_attn.v2": partial(varlen, 2),
                "vllm.flash_attn.v3": partial(varlen, 3),
                "flash_attn.v4.sm90": fa4,
            }
        ).items()
    }
    return made


def norms() -> dict[str, dict[str, tuple[Call, Call]]]:
    """The same for the norms, by function."""
    x, residual, weight, bias = normal(ROWS, HIDDEN), normal(ROWS, HIDDEN), normal(HIDDEN), normal(HIDDEN)

    def liger_rms() -> Call:
        from liger_kernel.transformers.functional import liger_rms_norm

        return partial(liger_rms_norm, x, weight, 1e-6)

    def liger_add() -> Call:
        from liger_kernel.transformers.functional import liger_fused_add_rms_norm

        return partial(liger_fused_add_rms_norm, x, residual, weight, 1e-6)

    def liger_layer() -> Call:
        from liger_kernel.transformers.functional import liger_layer_norm

        return partial(liger_layer_norm, x, weight, bias, 1e-5)

    def flashinfer_rms() -> Call:
        from flashinfer.norm import rmsnorm

        return partial(rmsnorm, x, weight, 1e-6)

    def flashinfer_add() -> Call:
        from flashinfer.norm import fused_add_rmsnorm

        return partial(fused_add_rmsnorm, x, residual, weight, 1e-6)

    def quack_rms() -> Call:
        from quack import rmsnorm

        return partial(rmsnorm, x, weight, eps=1e-6)

    def quack_layer() -> Call:
        from quack.rmsnorm import layernorm_fwd

        return lambda: layernorm_fwd(x, weight.float(), bias.float(), eps=1e-5)

    def vllm_rms() -> Call:
        from layerzero.backends.vllm_library import operators

        operator = operators("_C.abi3.so", "_C").rms_norm  # as vllm/_custom_ops.py calls it

        def call() -> Any:
            output = torch.empty_like(x)
            operator(output, x, weight, 1e-6)
            return output

        return call

    rms = partial(lz.rms_norm, x, weight, eps=1e-6)
    add = partial(lz.add_rms_norm, x, residual, weight, eps=1e-6)
    layer = partial(lz.layer_norm, x, (HIDDEN,), weight, bias)
    theirs = {
        "rms_norm": (
            rms,
            {
                "torch.rms_norm": lambda: partial(F.rms_norm, x, (HIDDEN,), weight, 1e-6),
                "flashinfer.rms_norm": flashinfer_rms,
                "liger.rms_norm": liger_rms,
                "quack.rms_norm": quack_rms,
                "vllm.rms_norm": vllm_rms,
            },
        ),
        "add_rms_norm": (add, {"flashinfer.add_rms_norm": flashinfer_add, "liger.add_rms_norm": liger_add}),
        "layer_norm": (
            layer,
            {
                "torch.layer_norm": lambda: partial(F.layer_norm, x, (HIDDEN,), weight, bias),
                "liger.layer_norm": liger_layer,
                "quack.layer_norm": quack_layer,
            },
        ),
    }
    return {
        name: {kernel: (call, ours) for kernel, call in optional(makers).items()}
        for name, (ours, makers) in theirs.items()
    }


def optional(makers: dict[str, Callable[[], Call]]) -> dict[str, Call]:
    """The calls of what is installed; what is not is said."""
    made = {}
    for kernel, make in makers.items():
        try:
            made[kernel] = make()
            made[kernel]()
        except Exception as error:  # noqa: BLE001  # a library that is not there or fails is a line of the output
            made.pop(kernel, None)
            print(f"{kernel}: its own function does not run: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return made


def burst_us(call: Call) -> float:
    started = time.perf_counter_ns()
    for _ in range(BURST):
        call()
    taken = time.perf_counter_ns() - started
    torch.cuda.synchronize()
    return taken / BURST / 1000


def compare(function: str, kernel: str, library: Call, ours: Call) -> dict[str, Any]:
    """Medians of interleaved bursts, with the kernel that LayerZero ran."""
    lz.configure(locks={operation_of(kernel, function): kernel.split(" ", maxsplit=1)[0]}, allow_jit_compile=True)
    try:
        for call in (library, ours):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {"library": [], "layerzero": []}
        for turn in range(BURSTS):
            for name, call in (("library", library), ("layerzero", ours)):
                taken = burst_us(call)
                if turn:
                    times[name].append(taken)
    finally:
        lz.configure(locks={})
    medians = {name: round(statistics.median(each), 2) for name, each in times.items()}
    return {
        "function": function,
        "kernel": kernel,
        "library_us": medians["library"],
        "layerzero_us": medians["layerzero"],
    }


def operation_of(kernel: str, function: str) -> str:
    """The operation that the calls of this file route to."""
    return {
        "attention": "attention.standard.prefill",
        "rms_norm": "norm.rms",
        "add_rms_norm": "norm.add_rms",
        "layer_norm": "norm.layer",
    }[function]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| function | kernel | library, us | LayerZero, us | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = row["layerzero_us"] / row["library_us"]
        cells = (
            row["function"],
            f"`{row['kernel']}`",
            f"{row['library_us']:.1f}",
            f"{row['layerzero_us']:.1f}",
            f"{ratio:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write ``host.json`` and ``host.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for function, pairs in {"attention": attention(), **norms()}.items():
            for kernel, (library, ours) in pairs.items():
                try:
                    rows.append(compare(function, kernel, library, ours))
                    print(rows[-1], flush=True)
                except Exception as error:  # noqa: BLE001  # one kernel's failure is a line, not the end
                    print(f"{kernel}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    (out / "host.json").write_text(json.dumps(rows, indent=1))
    (out / "host.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
