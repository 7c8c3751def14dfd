"""vLLM's kernels for CPUs."""
