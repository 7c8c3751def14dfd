"""Kernel libraries: a folder each, or one file where a library is small; each module below declares ``KERNELS``.

All declarations are read at the first call (10 ms); a library itself is imported when one of its kernels was chosen.

Add a backend: write its file and its line here, in alphabetical order.
"""

from __future__ import annotations

BUILTIN: tuple[str, ...] = (
    "aiter",
    "apex",
    "cudnn_frontend",
    "flash_attn.attention",
    "flash_attn.cute",
    "flash_attn.paged",
    "flashinfer.attention",
    "flashinfer.norm",
    "flashinfer.paged",
    "habana",
    "liger",
    "onnxruntime",
    "quack",
    "torch.attention",
    "torch.cuda_attention",
    "torch.flex_attention",
    "torch.inductor",
    "torch.norm",
    "torch.paged",
    "vllm.flash_attn",
    "vllm.norm",
    "vllm.paged",
    "vllm_cpu.norm",
    "vllm_cpu.paged",
    "xformers",
    "zentorch",
)
"""Modules of this package that declare kernels, sorted; torch and other large libraries have one for each family."""
