"""From a call to a kernel. Start reading in :mod:`layerzero.engine.dispatch`."""
