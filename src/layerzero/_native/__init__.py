"""The hit path in C, optional: :mod:`layerzero.engine.accelerator` loads it, :mod:`layerzero.engine.call` does without."""
