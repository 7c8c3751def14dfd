"""FlashAttention 2, 3 and 4, from Dao-AILab and its CuTe build."""
