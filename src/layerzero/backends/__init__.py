"""Kernel libraries: one file each, holding ``KERNELS``. Imported on demand; a library itself only when chosen.

Add a backend: write its file and its line here, in alphabetical order.
"""

from __future__ import annotations

BUILTIN: dict[str, str] = {
    "aiter": "layerzero.backends.aiter",
    "apex": "layerzero.backends.apex",
    "cudnn_frontend": "layerzero.backends.cudnn_frontend",
    "flash_attn": "layerzero.backends.flash_attn",
    "flash_attn_cute": "layerzero.backends.flash_attn_cute",
    "flash_attn_paged": "layerzero.backends.flash_attn_paged",
    "flashinfer": "layerzero.backends.flashinfer",
    "flashinfer_norm": "layerzero.backends.flashinfer_norm",
    "flashinfer_paged": "layerzero.backends.flashinfer_paged",
    "flex_attention": "layerzero.backends.flex_attention",
    "habana": "layerzero.backends.habana",
    "inductor": "layerzero.backends.inductor",
    "liger": "layerzero.backends.liger",
    "onnxruntime": "layerzero.backends.onnxruntime",
    "quack": "layerzero.backends.quack",
    "torch_attention": "layerzero.backends.torch_attention",
    "torch_cuda_attention": "layerzero.backends.torch_cuda_attention",
    "torch_norm": "layerzero.backends.torch_norm",
    "torch_paged": "layerzero.backends.torch_paged",
    "vllm_cpu": "layerzero.backends.vllm_cpu",
    "vllm_cpu_paged": "layerzero.backends.vllm_cpu_paged",
    "vllm_flash_attn": "layerzero.backends.vllm_flash_attn",
    "vllm_norm": "layerzero.backends.vllm_norm",
    "vllm_paged": "layerzero.backends.vllm_paged",
    "xformers": "layerzero.backends.xformers",
    "zentorch": "layerzero.backends.zentorch",
}
"""A name, sorted, to the module that declares kernels; torch has a file for each family."""
