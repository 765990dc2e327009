"""Publication of checkpoints: a complete checkpoint gets its name atomically, even if other processes save to the folder.

FOLDER/
  step-00000200/                     a complete checkpoint (`manifest`)
  .step-00000300.0123456789ab.tmp/   being written: its manifest is empty and locked by the writing process
  .step-00000100.0123456789ab.old/   surplus, being removed
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from . import manifest
from .atomic import is_open, left_behind, make_folder, naming, to_disk
from .manifest import LEFT_BEHIND, MANIFEST, FileSum

_ours: dict[Path, set[tuple[str, int]]] = {}
"""Checkpoints that this process may remove, by the run's folder; each is identified by name and modification time of its
manifest."""


def take_over(run: Path) -> None:
    """Declares that this process continues a run: `keep` may remove checkpoints present now and those saved here later.

    Checkpoints that other processes save later stay. A process that doesn't call this takes over at its first save.
    """
    _ours[run.resolve()] = set(_whole(run).values())


def _whole(run: Path) -> dict[Path, tuple[str, int]]:
    """Returns a run's checkpoints, lowest steps first, with their identities."""
    found = {}
    for path in (manifest.folder_of(run, step) for step in manifest.steps(run)):
        with suppress(FileNotFoundError, NotADirectoryError):
            found[path] = path.name, (path / MANIFEST).stat().st_mtime_ns
    return found


class Draft:
    """A checkpoint being written.

    Attributes:
        checkpoint: the final folder.
        folder: the temporary folder, private to this process.
    """

    def __init__(self, checkpoint: Path, folder: Path):
        self.checkpoint, self.folder = checkpoint, folder
        self._lock: int | None = None

    def lock(self) -> bool:
        """Creates the manifest and locks it while the checkpoint is written; returns False if the folder is gone."""
        path = self.folder / MANIFEST
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return False
        # On a file system without locks, nobody removes the folder either.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return is_open(path, self._lock)

    def publish(self, files: Mapping[str, FileSum], keep: int | None) -> None:
        """Renames a checkpoint whose files are on disk to its final name, then removes old ones until `keep` are left.

        The lowest steps are removed first. This checkpoint stays, even if the run went back and later steps exist, and so do
        checkpoints saved by other processes (`take_over`). Failing to remove one only warns.

        Raises:
            FileExistsError: another process has saved this step.
            OSError: a file is missing or incomplete, or the folder can't be renamed. Nothing is removed then.
        """
        found = [p for name, expected in files.items() if (p := manifest.problem_with(self.folder / name, expected.length))]
        if found:
            raise OSError(f"{'; '.join(found)}: every rank must write to the same folder, on a shared file system")
        assert self._lock is not None
        with naming(self.folder / MANIFEST, "writing"), open(self._lock, "wb", closefd=False) as file:
            file.write(manifest.text_of(files))
            file.flush()
            os.fsync(file.fileno())
        to_disk(self.folder)
        self._rename()
        try:
            _remove(self._surplus(keep))
        except OSError as error:
            warnings.warn(f"{self.checkpoint} is saved, but older checkpoints can't be removed: {error}", stacklevel=2)
        self._unlock()

    def _rename(self) -> None:
        """Renames the folder. No file system replaces a non-empty folder, so this can't replace a checkpoint."""
        assert self._lock is not None
        try:
            os.rename(self.folder, self.checkpoint)
        except OSError as error:
            # An NFS server may have renamed it and received a retry because its answer was lost.
            if not is_open(self.checkpoint / MANIFEST, self._lock):
                if os.path.lexists(self.checkpoint):
                    raise FileExistsError(f"{self.checkpoint} exists: another process has saved this step meanwhile") from error
                raise
        try:
            to_disk(self.checkpoint.parent)
        except OSError:
            # Undo: the checkpoint must not look saved as long as a crash could lose it.
            with suppress(OSError):
                os.rename(self.checkpoint, self.folder)
            raise

    def _surplus(self, keep: int | None) -> list[Path]:
        """Returns the surplus checkpoints in the folder that this process may remove."""
        run = self.checkpoint.parent
        there, ours = _whole(run), _ours.setdefault(run.resolve(), set())
        if self.checkpoint in there:
            ours.add(there.pop(self.checkpoint))
        if keep is None:
            return []
        for path, known in there.items():
            if known not in ours:
                warnings.warn(f"{path} was saved by another process meanwhile: keep={keep} leaves it", stacklevel=2)
        others = [path for path, known in there.items() if known in ours]
        return others[: max(0, len(others) + 1 - keep)]

    def give_up(self) -> None:
        """Deletes the draft."""
        self._unlock()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def begin(checkpoint: Path) -> Draft:
    """Creates a temporary folder for a checkpoint and removes those of dead runs.

    Raises:
        FileExistsError: the checkpoint exists, or the run's folder is a checkpoint itself.
        OSError: the run's folder is a file, or is not writable.
    """
    run = checkpoint.parent
    if checkpoint.exists():
        raise FileExistsError(f"{checkpoint} exists: a checkpoint is never overwritten; save another step, or remove it first")
    if (run / MANIFEST).is_file():
        raise FileExistsError(f"{run} is a checkpoint itself: save to the folder of the run, {run.parent}")
    if run.exists() and not run.is_dir():
        raise NotADirectoryError(f"{run} is not a folder, which checkpoints need")
    make_folder(run)
    if run.resolve() not in _ours:
        take_over(run)
    for path in run.iterdir():
        if LEFT_BEHIND.fullmatch(path.name) and (path.is_dir() or path.is_symlink()):
            _remove_left_behind(path)
    while (draft := _begun(checkpoint)) is None:
        pass
    return draft


def _begun(checkpoint: Path) -> Draft | None:
    """Creates a temporary folder with a locked manifest; returns None if another process removed it before it was locked."""
    draft = Draft(checkpoint, checkpoint.parent / f".{checkpoint.name}.{secrets.token_hex(6)}.tmp")
    draft.folder.mkdir()
    try:
        if draft.lock():
            return draft
    except BaseException:
        draft.give_up()
        raise
    draft.give_up()
    return None


def _remove_left_behind(path: Path) -> None:
    try:
        # An empty folder may have just been created; its creator retries with another. Folders of earlier versions have no
        # lock.
        with suppress(OSError):
            os.rmdir(path)
        if path.suffix == ".tmp" and not path.is_symlink() and os.path.lexists(path / MANIFEST):
            with left_behind(path / MANIFEST):
                path = _hidden(path)
        _delete(path)
    except BlockingIOError:
        warnings.warn(f"{path} is being written: another process saves to this folder at the same time", stacklevel=2)
    except FileNotFoundError:
        pass  # It has been published, or another process has removed it.
    except OSError as error:
        warnings.warn(f"{path} is left over from an earlier save and can't be removed: {error}", stacklevel=2)


def _remove(surplus: Iterable[Path]) -> None:
    for old in surplus:
        try:
            _delete(_hidden(old))
        except OSError as error:
            warnings.warn(f"{old} is surplus and can't be removed: {error}", stacklevel=2)


def _hidden(folder: Path) -> Path:
    """Renames a folder before its removal, so that nobody finds a partial checkpoint; returns the new path.

    Callers hold the lock for the renaming only: NFS keeps an open file, and with it the folder.
    """
    name = folder.name.removeprefix(".").split(".")[0]
    hidden = folder.with_name(f".{name}.{secrets.token_hex(6)}.old")
    os.rename(folder, hidden)
    return hidden


def _delete(folder: Path) -> None:
    """Removes a folder, or just the link if it is a symbolic link."""
    for again in (True, False):
        try:
            return folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        except OSError:
            # Another process may be removing it too, and network errors can be transient.
            if not os.path.lexists(folder):
                return
            if not again:
                raise
