"""FlashAttention 2, 3 and 4, from Dao-AILab and its CuTe build."""

MODULES = (
    "attention",
    "cute",
    "paged",
    "varlen",
)
"""The files that declare kernels, a family each."""
