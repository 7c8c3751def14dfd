"""The vocabulary: what operations, kernels, facts, limits, reasons, plans and reports are.

Nothing here chooses, imports a kernel library or touches a device at import time.
"""
