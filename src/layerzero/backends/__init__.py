"""Kernel libraries: one file each, holding ``KERNELS``. Imported on demand; a library itself only when chosen.

Add a backend: write its file and its line here, in alphabetical order.
"""

from __future__ import annotations

BUILTIN: dict[str, str] = {
    "flash_attn": "layerzero.backends.flash_attn",
    "torch": "layerzero.backends.torch_aten",
    "zentorch": "layerzero.backends.zentorch",
}
"""Name of a backend to the module that declares its kernels."""
