"""``lz.optimize``: what a model's modules compute, computed by LayerZero's functions; explicit, checked and undone.

Modules are found by what they compute (:mod:`modules`): a candidate is believed once it gave what the original gives on
random input. A module that is replaced stays the object that it was, with its class, parameters, names and hooks: only
its ``forward`` is another one, on this instance alone (:mod:`swaps`).
"""

from layerzero.integrations.optimize.entrance import optimize
from layerzero.integrations.optimize.models.generation import generate_step
from layerzero.integrations.optimize.times.report import Optimized

__all__ = ["Optimized", "generate_step", "optimize"]
