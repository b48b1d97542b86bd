"""The threads and the memory of a process that runs clients."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def keep_memory() -> None:
    """Ask the C library to keep freed memory: a step frees and takes the same big blocks again and again.

    Without it glibc hands them back to the kernel each time, and a twentieth of the time goes into page faults.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(m_mmap_threshold, 32 * 2**20)
        mallopt(m_trim_threshold, 2**30)


def one_thread() -> AbstractContextManager[None]:
    """One thread for everything inside: sums come out in one order, and so in the same bits, wherever they run."""
    return threads(1)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for everything inside; afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
