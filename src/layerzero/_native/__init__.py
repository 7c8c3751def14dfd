"""The hit path in C, optional: :mod:`layerzero.engine.accelerator` loads it where it was built."""
