"""Kernel libraries: one file each, holding ``KERNELS``. Imported on demand; a library itself only when chosen.

Add a backend: write its file and its line here, in alphabetical order.
"""

from __future__ import annotations

BUILTIN: dict[str, str] = {
    "flash_attn": "layerzero.backends.flash_attn",
    "flex_attention": "layerzero.backends.flex_attention",
    "inductor": "layerzero.backends.inductor",
    "onnxruntime": "layerzero.backends.onnxruntime",
    "torch_attention": "layerzero.backends.torch_attention",
    "torch_cuda_attention": "layerzero.backends.torch_cuda_attention",
    "torch_norm": "layerzero.backends.torch_norm",
    "vllm_cpu": "layerzero.backends.vllm_cpu",
    "zentorch": "layerzero.backends.zentorch",
}
"""A name, sorted, to the module that declares kernels; torch has a file for each family."""
