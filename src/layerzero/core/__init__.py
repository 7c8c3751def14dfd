"""The vocabulary: what operations, kernels, facts, limits, reasons, plans and reports are.

Nothing here chooses, imports a kernel library or touches a device at import time.
"""

INSTALLERS: list = []  # type: ignore[type-arg]  # a precise type takes an import, and importing layerzero has few
"""Functions that fill the ports of :mod:`layerzero.engine.services`, called with them as that module is imported."""
