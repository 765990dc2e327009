"""How a checkpoint gets its name: when it is whole, in one step, and beside others who save to the same folder.

FOLDER/
  step-00000200/                     a checkpoint that is whole (`manifest`)
  .step-00000300.0123456789ab.tmp/   one being written: its manifest is empty, and locked by the process that writes it
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
"""By a run's folder: the checkpoints that this process may remove from it, by name and the time of their manifest."""


def take_over(run: Path) -> None:
    """Says that a run goes on here: `keep` may remove the checkpoints that are there now, and those that this process saves.

    What another process saves later stays. A process that doesn't call it takes over what is there at its first save.
    """
    _ours[run.resolve()] = set(_whole(run).values())


def _whole(run: Path) -> dict[Path, tuple[str, int]]:
    """The checkpoints of a run, those of the lowest steps first, with what they are known by."""
    found = {}
    for path in (manifest.folder_of(run, step) for step in manifest.steps(run)):
        with suppress(FileNotFoundError, NotADirectoryError):
            found[path] = path.name, (path / MANIFEST).stat().st_mtime_ns
    return found


class Draft:
    """A checkpoint that is being written.

    Attributes:
        checkpoint: the folder that it is to be.
        folder: the one that it is until then, which nobody else has.
    """

    def __init__(self, checkpoint: Path, folder: Path):
        self.checkpoint, self.folder = checkpoint, folder
        self._lock: int | None = None

    def lock(self) -> bool:
        """Makes the manifest, and holds its lock as long as it is being written; False where the folder is gone."""
        path = self.folder / MANIFEST
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return False
        # Where the file system has no locks nobody removes it either.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return is_open(path, self._lock)

    def publish(self, files: Mapping[str, FileSum], keep: int | None) -> None:
        """Gives a checkpoint whose files are on the disk its name, in one step; then removes others until `keep` are left.

        Those of the lowest steps go first; this one stays, also where the run went back and there are later steps, and so do
        those that another process has saved meanwhile (`take_over`). What can't be removed is a warning: the checkpoint is
        there.

        Raises:
            FileExistsError: another process has saved this step meanwhile.
            OSError: a file isn't there, or not whole, or the folder couldn't get its name. Nothing is removed then.
        """
        found = [p for name, expected in files.items() if (p := manifest.problem_with(self.folder / name, expected.length))]
        if found:
            raise OSError(f"{'; '.join(found)}: every rank must write to one folder, on a file system that all of them see")
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
            warnings.warn(f"{self.checkpoint} is saved; what is surplus beside it can't be removed: {error}", stacklevel=2)
        self._unlock()

    def _rename(self) -> None:
        """Renames the folder. No file system replaces a folder that has files, so this replaces no checkpoint."""
        assert self._lock is not None
        try:
            os.rename(self.folder, self.checkpoint)
        except OSError as error:
            # A server of NFS may have done it, and been asked again when its answer was lost.
            if not is_open(self.checkpoint / MANIFEST, self._lock):
                if os.path.lexists(self.checkpoint):
                    raise FileExistsError(f"{self.checkpoint} exists: another process has saved this step meanwhile") from error
                raise
        try:
            to_disk(self.checkpoint.parent)
        except OSError:
            # It is not saved while a crash could take it, and the caller is told so.
            with suppress(OSError):
                os.rename(self.checkpoint, self.folder)
            raise

    def _surplus(self, keep: int | None) -> list[Path]:
        """The checkpoints beside this one that are too many, and this process's to remove."""
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
        """Removes what was written of it."""
        self._unlock()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def begin(checkpoint: Path) -> Draft:
    """Makes a folder to write a checkpoint to, with a name of its own, and removes what runs that died left.

    Raises:
        FileExistsError: there is a checkpoint of this name, or the run's folder is a checkpoint itself.
        OSError: the run's folder is a file, or can't be written to.
    """
    run = checkpoint.parent
    if checkpoint.exists():
        raise FileExistsError(f"{checkpoint} exists: a checkpoint is never overwritten; save another step, or remove it first")
    if (run / MANIFEST).is_file():
        raise FileExistsError(f"{run} is a checkpoint itself: save to the folder of the run, {run.parent}")
    if run.exists() and not run.is_dir():
        raise NotADirectoryError(f"{run} is no folder, which checkpoints need")
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
    """Makes a folder of a new name, and its manifest, locked; None where another process took it for left behind."""
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
        # An empty one may be just begun: who begins it makes another. Versions before this one had nothing that is locked.
        with suppress(OSError):
            os.rmdir(path)
        if path.suffix == ".tmp" and not path.is_symlink() and os.path.lexists(path / MANIFEST):
            with left_behind(path / MANIFEST):
                path = _hidden(path)
        _delete(path)
    except BlockingIOError:
        warnings.warn(f"{path} is being written: another process saves to this folder at the same time", stacklevel=2)
    except FileNotFoundError:
        pass  # It has its name now, or another process has removed it.
    except OSError as error:
        warnings.warn(f"{path} was left behind and can't be removed: {error}", stacklevel=2)


def _remove(surplus: Iterable[Path]) -> None:
    for old in surplus:
        try:
            _delete(_hidden(old))
        except OSError as error:
            warnings.warn(f"{old} is surplus and can't be removed: {error}", stacklevel=2)


def _hidden(folder: Path) -> Path:
    """Renames what is to be removed, so that nobody finds half of it; returns what it is called now.

    A file of it that is open meanwhile, as a lock is, NFS would keep, and the folder with it.
    """
    name = folder.name.removeprefix(".").split(".")[0]
    hidden = folder.with_name(f".{name}.{secrets.token_hex(6)}.old")
    os.rename(folder, hidden)
    return hidden


def _delete(folder: Path) -> None:
    """Removes a folder; of one that lies elsewhere the link to it."""
    for again in (True, False):
        try:
            return folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        except OSError:
            # Another process may remove it too, and servers have their moments.
            if not os.path.lexists(folder):
                return
            if not again:
                raise
