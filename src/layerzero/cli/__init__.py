"""The command line: ``layerzero explain``, ``doctor``, ``kernels`` and the others, over the public API."""
