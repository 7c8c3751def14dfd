"""AMD's zentorch, loaded as an operator library: what its kernels share.

``import zentorch`` takes 1.6 s and brings torch.compile along; its shared library alone loads in 0.02 s and holds the
same operators. Limits were found by probing zentorch 2.13.0.2 with torch 2.13.0 on an Intel Xeon with AMX, 2026-11-21;
much that the operators cannot do they do wrong in silence.
Library: zentorch 2.13.0.2, MIT.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from layerzero.core import limits as limit
from layerzero.core.kernel import Backend, Release

ZENTORCH = Backend(
    name="zentorch",
    summary="AMD's kernels for CPUs with AVX-512",
    import_name="zentorch",
    distribution="zentorch",
    versions=">=2.13.0.2,<2.14.1",
    tested=("2.13.0.2", "2.14.0.1"),
    known_bad="==2.13.0.1",  # it answers from stale pointers
    releases=(
        Release(">=2.14.0.1,<2.14.1", ("torch>=2.14,<2.15",), "pip install zentorch==2.14.0.1"),
        Release(">=2.13.0.2,<2.13.1", ("torch>=2.13,<2.14",), "pip install zentorch==2.13.0.2"),
    ),
    platforms=("cpu",),
    homepage="https://github.com/amd/ZenDNN-pytorch-plugin",
    flags=("deterministic",),
)


@functools.cache
def operators() -> Any:
    """``torch.ops.zentorch``. Raises: ImportError if it is not installed, OSError if it does not load."""
    # Read once, at the first matrix product: without it zentorch_linear_unary reorders the caller's weights in place.
    os.environ.setdefault("ZENDNNL_MATMUL_WEIGHT_CACHE", "0")
    spec = importlib.util.find_spec("zentorch")
    if spec is None or spec.origin is None:
        raise ImportError("zentorch is not installed")
    torch.ops.load_library(str(Path(spec.origin).parent / "libzentorch.so"))  # type: ignore[no-untyped-call]
    return torch.ops.zentorch


VECTORS = limit.cpu_feature("avx512")  # without, attention is torch's own, and norms were never tried
# float16: errors of 0.012 in attention and 0.014 in norms on the Xeon, NaN norms on the EPYC, products raise. float64:
# torch's own attention, which reads a float32 mask wrongly, and an error from the others.
DTYPES = limit.dtype("float32", "bfloat16")
# Without it the norms, not the attention, kill the process with an illegal instruction (Skylake Xeon, 2026-11-21).
BFLOAT16 = limit.cpu_feature("avx512_bf16", dtype="bfloat16")
