"""Checkpoints that are written while the training goes on, none of which ends without a word.

A thread writes each. What fails is on stderr at once, and an error of `Saving.wait`, or of the next save. Python waits for the
thread when the program ends. Where it failed and nobody was told, the program's exit status says so.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Saving:
    """A checkpoint that is being written while the training goes on.

    Attributes:
        path: the folder that it has when it is whole.
        error: why it could not be written, where that is known.
    """

    def __init__(self, path: Path, write: Callable[[], None] | None):
        self.path = path
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if write is not None:
            # Python waits for it at the end.
            self._thread = threading.Thread(target=self._run, args=(write,), name=f"save {path.name}", daemon=False)
            self._thread.start()
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
            _unfinished.append(self)

    def done(self) -> bool:
        """Returns whether this rank has nothing more to do with it."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until the checkpoint is whole, and returns its folder.

        Raises:
            OSError: it could not be written; what there was of it is removed.
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
    """Waits for the save before: two at a time would mix up their exchanges.

    Raises:
        OSError: it could not be written, and nobody has waited for it.
    """
    while _unfinished:
        _unfinished[-1].wait()


def _at_exit() -> None:
    # Ctrl-C at the end may have ended Python's own waiting.
    lost = [saving.path for saving in _unfinished if not saving.done() or saving.error is not None]
    for path in lost:
        _say(f"{path} was not saved when the program ended, and nobody has called wait() of what save_checkpoint returned")
    if lost:
        sys.stderr = _FailsAtTheEnd(sys.stderr)


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"blockfp: {text}", file=sys.stderr, flush=True)


class _FailsAtTheEnd:
    """Stands for stderr while Python ends: that it can't be flushed makes the exit status 120 (see `sys.exit`).

    An exit handler can't set the status otherwise, but by `os._exit`, which leaves out all other handlers.
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
