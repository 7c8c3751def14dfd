"""Where the layers meet: what the engine gets from those above it. The one file that the import order does not bind."""

from __future__ import annotations

from layerzero.core.ledger import Ledger, MemoryLedger


def ledger() -> Ledger:
    """The ledger of this process: files in the cache folder, or memory where ``LAYERZERO_CACHE_DIR`` is empty."""
    from layerzero.tuning.files import FileLedger, cache_folder
    from layerzero.tuning.store import StoreLedger

    folder = cache_folder()
    return StoreLedger(MemoryLedger() if folder is None else FileLedger(folder))
