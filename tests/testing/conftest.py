"""Checks of kernels run on one thread here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from more threads, and lose much beside other work."""
    import torch  # pytest reads this file in the process, too, that hands tests to workers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
