"""vLLM's kernels for NVIDIA GPUs."""
