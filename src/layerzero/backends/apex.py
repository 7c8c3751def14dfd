"""NVIDIA Apex's fused norms: the CUDA extension ``fused_layer_norm_cuda``, which exists where Apex was built with it.

PyPI's ``apex`` is another project (a web toolkit, 0.9); NVIDIA's is 0.1 and comes as source. Its extension has no home
in the package: it is a module of its own, absent where Apex was built for Python only. Limits follow
csrc/layer_norm_cuda.cpp and csrc/layer_norm_cuda_kernel.cu: contiguous tensors, offsets in 31 bits. Both kernels round
the normalised value to the input's dtype before they multiply with the weight; layer norm then rounds the product
before it adds the bias, and where the two cancel no 16 bit dtype is within tolerance. Read, never run: no package fits
the hosts at hand (2026-11-21).
Library: NVIDIA apex 0.1, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.norm_limits import ElementsBelow
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend

APEX = Backend(
    name="apex",
    summary="NVIDIA Apex's fused norms",
    import_name="apex",
    distribution="apex",
    versions=">=0.1,<0.9",
    known_bad=">=0.9",  # PyPI's apex, another project
    platforms=("cuda",),
    install="build github.com/NVIDIA/apex with its CUDA extensions; PyPI's apex is another project",
    homepage="https://github.com/NVIDIA/apex",
    flags=("deterministic", "graph_safe"),
)


def _extension() -> Any:
    try:
        import fused_layer_norm_cuda
    except ModuleNotFoundError as error:
        raise ImportError("apex was built without its CUDA extension fused_layer_norm_cuda") from error
    return fused_layer_norm_cuda


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    forward, shape = _extension().rms_forward_affine, (facts.size("hidden"),)

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output: Tensor = forward(input, shape, weight, eps)[0]
        return output

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    forward = _extension().forward_affine

    def run(input: Tensor, *, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        output: Tensor = forward(input, normalized_shape, weight, bias, eps)[0]
        return output

    return run


_LIMITS = (ElementsBelow(2**31), limit.contiguous("input", "weight", "bias"))

KERNELS = (
    APEX.kernel(
        "apex.rms_norm",
        "norm.rms",
        _load_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, limit.dtype("float32", "float16", "bfloat16")),
        priority=50,
    ),
    APEX.kernel(
        "apex.layer_norm",
        "norm.layer",
        _load_layer_norm,
        accepts=("normalized_shape", "weight", "bias", "eps"),
        limits=(*_LIMITS, limit.dtype("float32"), limit.one_of("weight", "float"), limit.one_of("bias", "float")),
        priority=35,
    ),
)
