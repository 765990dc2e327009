"""Checkpoints written by a thread while training continues; a failed save is never silent.

An error is printed to stderr at once and raised by `Saving.wait` or the next save. Python joins the thread at exit. If nobody
saw the error by then, the exit status is 120.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Saving:
    """A checkpoint that is being written while training continues.

    Attributes:
        path: folder of the finished checkpoint.
        error: the exception that ended the save, or None.
    """

    def __init__(self, path: Path, write: Callable[[], None] | None):
        self.path = path
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if write is not None:
            # Not a daemon, so that Python joins it at exit.
            self._thread = threading.Thread(target=self._run, args=(write,), name=f"save {path.name}", daemon=False)
            self._thread.start()
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
            _unfinished.append(self)

    def done(self) -> bool:
        """Returns whether this rank has finished its part."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until the checkpoint is complete and returns its folder.

        Raises:
            OSError: it could not be written; partial files are removed.
        """
        if self._thread is not None:
            self._thread.join()
        if self in _unfinished:
            _unfinished.remove(self)
        if self.error is not None:
            raise self.error
        return self.path

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self.error = error
            _say(str(error))


_unfinished: list[Saving] = []


def wait_for_others() -> None:
    """Waits for the previous save, whose exchanges would mix with the next one's; raises its OSError if nobody has seen it."""
    while _unfinished:
        _unfinished[-1].wait()


def _at_exit() -> None:
    # Ctrl-C at exit can interrupt Python's own join.
    lost = [saving.path for saving in _unfinished if not saving.done() or saving.error is not None]
    for path in lost:
        _say(f"{path} was not saved when the program ended, and nobody has called wait() of what save_checkpoint returned")
    if lost:
        sys.stderr = _FailsAtTheEnd(sys.stderr)


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"blockfp: {text}", file=sys.stderr, flush=True)


class _FailsAtTheEnd:
    """Wraps stderr at exit. Its flush fails, which makes the exit status 120 (see `sys.exit`).

    The only other way to set the status in an exit handler is `os._exit`, which skips all other handlers.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a checkpoint was not saved, and nobody has waited for it")
