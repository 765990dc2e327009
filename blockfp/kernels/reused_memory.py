"""Memory for large results, used again once nobody holds it: the first writes to fresh pages take as long as quantizing does.

A block belongs to the array over it and comes back when that is gone, and with it all views, tensors and DLPack capsules made
of it. A few blocks wait here, and the system may take their pages whenever it needs memory (MADV_FREE).
"""

from __future__ import annotations

import mmap
import os
from collections import deque

import numpy as np

LEAST = 4 << 20
"""Bytes of a result that gets such memory: below, the C library's allocator keeps pages by itself."""
MOST = 128 << 20
"""Bytes of a result that gets such memory, so that what waits is bounded in bytes, too."""
WAITING = 4
"""Blocks that wait at most."""

_PAGE = 2 << 20


class _Block:
    """Private memory of `size` bytes."""

    def __init__(self, size: int):
        self.size = size
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"a result of {size} bytes can't be allocated: {error.strerror}") from error
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data


# Appending and popping are atomic, without the interpreter's lock, too, and where a garbage collection interrupts them.
_waiting: deque[_Block] = deque(maxlen=WAITING)


def _start_anew() -> None:
    """Leaves the blocks of a forked process's parent alone: another thread may have been changing them."""
    global _waiting
    _waiting = deque(maxlen=WAITING)


os.register_at_fork(after_in_child=_start_anew)


class _Loan:
    """Holds a block for the array over it, and lets it wait for the next one afterwards."""

    def __init__(self, block: _Block, size: int):
        self.block = block
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (block.address, False)}

    def __del__(self) -> None:
        try:
            self.block.memory.madvise(mmap.MADV_FREE)
        except (AttributeError, OSError):
            return  # an older system, or pages that are locked: they go back to the system at once
        if _waiting is not None:  # as it is when the interpreter ends
            _waiting.append(self.block)


def array(size: int) -> np.ndarray | None:
    """Returns an array of so many bytes, whose values are arbitrary; None where the size isn't one for such memory."""
    if not LEAST <= size <= MOST:
        return None
    whole = -(-size // _PAGE) * _PAGE
    return np.asarray(_Loan(_waiting_block(whole) or _Block(whole), size))


def _waiting_block(size: int) -> _Block | None:
    """Takes a block of this size out of those that wait; None where there is none."""
    waiting = _waiting
    for _ in range(len(waiting)):
        try:
            block = waiting.popleft()
        except IndexError:
            return None
        if block.size == size:
            return block
        waiting.append(block)
    return None
