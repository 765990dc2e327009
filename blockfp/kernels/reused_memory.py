"""Reuses memory for large results, because first writes to fresh pages take as long as quantizing.

A block belongs to the array over it and is released with that array and all views, tensors and DLPack capsules made from it. A
few released blocks are kept for reuse; the system may reclaim their pages (MADV_FREE).
"""

from __future__ import annotations

import mmap
import os
from collections import deque

import numpy as np

LEAST = 4 << 20
"""Minimum bytes of a result; below, the C library's allocator already reuses pages."""
MOST = 128 << 20
"""Maximum bytes of a result, which also bounds the bytes kept."""
WAITING = 4
"""Maximum number of blocks kept."""

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


# A deque's append and popleft are atomic, even without the GIL and if a garbage collection interrupts them.
_waiting: deque[_Block] = deque(maxlen=WAITING)


def _start_anew() -> None:
    """Discards the blocks in a forked child; another thread of the parent may have been changing the queue."""
    global _waiting
    _waiting = deque(maxlen=WAITING)


os.register_at_fork(after_in_child=_start_anew)


class _Loan:
    """Holds a block for the array over it, and returns it to the queue when that array is gone."""

    def __init__(self, block: _Block, size: int):
        self.block = block
        self.__array_interface__ = {"version": 3, "shape": (size,), "typestr": "|u1", "data": (block.address, False)}

    def __del__(self) -> None:
        try:
            self.block.memory.madvise(mmap.MADV_FREE)
        except (AttributeError, OSError):
            return  # an old system, or locked pages: the memory is unmapped
        if _waiting is not None:  # None at interpreter shutdown
            _waiting.append(self.block)


def array(size: int) -> np.ndarray | None:
    """Returns an uninitialized array of this many bytes; None if the size is outside `LEAST` to `MOST`."""
    if not LEAST <= size <= MOST:
        return None
    whole = -(-size // _PAGE) * _PAGE
    return np.asarray(_Loan(_waiting_block(whole) or _Block(whole), size))


def _waiting_block(size: int) -> _Block | None:
    """Takes a block of this size from the queue; returns None if there is none."""
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
