"""Time kernels on calls, and decide which calls."""
