"""Intel Gaudi's fused attention: declared from its documentation, never run by this project.

Read: the FusedSDPA section of the Gaudi PyTorch API reference and its use in Intel's model library (2026-11-21).
``FusedSDPA.apply(query, key, value, attn_mask, dropout_p, is_causal, scale)`` takes BHSD as
``F.scaled_dot_product_attention`` does, with the causal mask aligned top-left, and an additive mask.
Library: habana-torch-plugin 1.18 or newer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend
from layerzero.ops.attention import declare as attention
from layerzero.ops.attention.limits import SameHeads, SquareCausal

HABANA = Backend(
    name="habana",
    summary="Intel Gaudi's fused attention",
    import_name="habana_frameworks",
    distribution=("habana-torch-plugin", "habana_torch_plugin"),
    versions=">=1.18",
    platforms=("hpu",),
    install="pip install habana-torch-plugin (with Intel's Gaudi software)",
    homepage="https://docs.habana.ai",
)


def _load(facts: Facts) -> Callable[..., Any]:
    from habana_frameworks.torch.hpex.kernels import FusedSDPA

    def fused(
        *tensors: Tensor, causal: bool = False, scale: float | None = None, attn_mask: Tensor | None = None
    ) -> Any:
        return FusedSDPA.apply(*tensors, attn_mask, 0.0, causal, scale)

    return fused


KERNELS = (
    HABANA.kernel(
        "habana.fused_sdpa",
        attention.ALL,
        _load,
        limit.dtype("float32", "bfloat16"),
        SquareCausal(),
        limit.one_of("attn_mask", "none", "float", foldable=True),
        limit.one_of("mask_dtype", "none", "bool", "query"),
        SameHeads(),
        limit.positive("scale"),
        layout="BHSD",
        accepts=("causal", "scale", "attn_mask"),
        folds=("causal", "attn_mask", "window", "alibi_slopes", "kv_lens"),
        priority=90,
    ),
)
