"""A file appears whole or not at all, is on the disk when it does, and belongs to whom it belonged."""

import errno
import os
import pickle
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from command import run
from processes import LIMIT

import blockfp
from blockfp.files import untrusted
from blockfp.files.atomic import make_folder, naming, replacing, to_disk
from blockfp.files.untrusted import HeldFile, NotPlain

STRANGER = 1234


def test_replaces(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with replacing(path) as temporary:
        assert temporary.parent == tmp_path
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_exception_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")

    def interrupted():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    script = f"""
from pathlib import Path
from blockfp.files.atomic import replacing
with replacing(Path({str(path)!r})) as temporary:
    temporary.write_text("half")
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=LIMIT)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    [left] = [p for p in tmp_path.iterdir() if p != path]
    assert left.name.startswith(".f.")
    assert left.name.endswith(".tmp")


def test_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    with replacing(tmp_path / "f") as temporary:
        temporary.write_text("")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@contextmanager
def as_stranger():
    """Has this process act as a user who owns nothing."""
    if os.geteuid() != 0:
        pytest.skip("root alone can act as another user")
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(STRANGER)
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def saved(path, like=None):
    """Saves over `path`; returns its mode and owner, and the mode that it had while it was being written."""
    with replacing(path, like) as temporary:
        temporary.write_text("new")
        while_written = stat.S_IMODE(temporary.stat().st_mode)
    assert path.read_text() == "new"
    found = path.stat()
    return stat.S_IMODE(found.st_mode), (found.st_uid, found.st_gid), while_written


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o664, 0o400])
def test_a_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(mode)
    assert saved(path) == (mode, (os.geteuid(), os.getegid()), 0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert saved(link)[0] == mode
    assert saved(tmp_path / "other", like=path)[0] == mode


def test_new_content_does_not_run_as_its_owner(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o6755)
    assert saved(path)[0] == 0o755


def test_a_file_keeps_its_owner(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("root alone can make a file of another user's")
    path = tmp_path / "f"
    path.write_text("old")
    os.chown(path, STRANGER, 4321)
    path.chmod(0o640)
    assert saved(path) == (0o640, (STRANGER, 4321), 0o600)


def test_an_owner_who_cannot_be_kept_is_said(tmp_path, request):
    """The file is then its writer's own, and what its group could do nobody else can."""
    folder = Path(tempfile.gettempdir()) / f"blockfp-{tmp_path.name}-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    request.addfinalizer(lambda: [*(file.unlink() for file in folder.iterdir()), folder.rmdir()])
    folder.chmod(0o777)
    path = folder / "f"
    path.write_text("old")
    path.chmod(0o640)
    before = path.stat()
    said = rf"f belonged to uid {before.st_uid}, .* uid {STRANGER}, gid {STRANGER} now"
    with as_stranger(), pytest.warns(UserWarning, match=said), replacing(path) as temporary:
        temporary.write_text("new")
    after = path.stat()
    assert (after.st_uid, stat.S_IMODE(after.st_mode)) == (STRANGER, 0o600)


def test_a_list_of_users_is_kept(tmp_path):
    """Without it the mask that a list shows as the group's permissions would be the group's."""
    entries = [(0x01, 6, -1), (0x02, 4, STRANGER), (0x04, 0, -1), (0x10, 6, -1), (0x20, 0, -1)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    path = tmp_path / "f"
    path.write_text("old")
    try:
        os.setxattr(path, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"no lists here: {error}")
    assert saved(path)[0] == 0o660
    assert os.getxattr(path, "system.posix_acl_access") == acl
    (tmp_path / "plain").write_text("old")
    os.setxattr(tmp_path, "system.posix_acl_default", acl)
    saved(tmp_path / "plain")
    assert "system.posix_acl_access" not in os.listxattr(tmp_path / "plain")


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a device"])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    path = tmp_path / "f"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link to a device": lambda: path.symlink_to("/dev/null")}[kind]()
    with pytest.raises(NotPlain, match=r"is a directory: '.*/f'|is not a regular file: '.*/f'"), replacing(path):
        pytest.fail("it can't be written")
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


class Disk:
    """Watches what becomes durable: names made in folders, and folders flushed. Nothing may be removed before that."""

    def __init__(self, monkeypatch):
        self.unflushed = set()
        self.removed = 0
        unlink = os.unlink

        def removing(path, **options):
            assert not [made for made in self.unflushed if os.path.dirname(made) == os.path.dirname(path)], path
            unlink(path, **options)
            self.removed += 1

        monkeypatch.setattr(os, "unlink", removing)
        for name in ("replace", "rename", "mkdir"):
            monkeypatch.setattr(os, name, self.making(getattr(os, name)))
        fsync = os.fsync

        def flushed(descriptor):
            fsync(descriptor)
            where = os.readlink(f"/proc/self/fd/{descriptor}")
            self.unflushed = {made for made in self.unflushed if os.path.dirname(made) != where}

        monkeypatch.setattr(os, "fsync", flushed)

    def making(self, call):
        def made(*arguments, **options):
            call(*arguments, **options)
            self.unflushed.add(os.path.abspath(os.fspath(arguments[-1 if call.__name__ != "mkdir" else 0])))

        return made


def test_names_are_on_the_disk(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    make_folder(tmp_path / "a" / "b" / "c")
    assert disk.unflushed == set()
    with replacing(tmp_path / "a" / "b" / "c" / "f") as temporary:
        temporary.write_text("new")
    assert disk.unflushed == set()
    os.mkdir(tmp_path / "d")
    assert disk.unflushed == {str(tmp_path / "d")}
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(NotADirectoryError, match=r"making the folder: Not a directory: '.*/file'"):
            make_folder(path)


def test_models_are_on_the_disk_before_older_ones_go(tmp_path, monkeypatch):
    arrays = {f"{name}.weight": np.ones((16, 64), np.float32) for name in "abc"}
    path, new = tmp_path / "m.safetensors", tmp_path / "a" / "b"
    for before, after, removed in ((None, 5000, 1), (5000, 5000, 3), (5000, None, 4)):
        with monkeypatch.context() as patch:
            blockfp.save(path, arrays, file_bytes=before)
            disk = Disk(patch)
            blockfp.save(path, arrays, file_bytes=after)
            assert disk.unflushed == set()
            assert disk.removed == removed
    disk = Disk(monkeypatch)
    blockfp.save(path, {name: blockfp.quantize(x, "nvfp4") for name, x in arrays.items()})
    result = run("convert", path, new, "--layout", "modelopt")
    assert result.exit_code == 0, result.output
    assert {file.name for file in new.iterdir()} > {"model.safetensors", "config.json"}
    assert disk.unflushed == set()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_a_flush_that_fails_is_said_with_the_name(tmp_path, monkeypatch, number):
    """The system's error has none. Once the file has its name, nobody says that it wasn't saved."""
    path, fsync, failing = tmp_path / "f", os.fsync, []
    path.write_text("old")

    def failed(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == failing[0]:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failed)
    for folder, message, content in ((False, "saving: ", "old"), (True, "it has been saved, .* can't be flushed: ", "new")):
        failing[:] = [folder]
        with pytest.raises(OSError, match=rf"\[Errno {number}\] {message}{os.strerror(number)}: '{path}'"):
            saved(path)
        assert path.read_text() == content
        assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
    with pytest.raises(OSError, match=rf"flushing to the disk: {os.strerror(number)}: '{tmp_path}'"):
        to_disk(tmp_path)


def test_a_file_system_that_flushes_no_folders(tmp_path, monkeypatch):
    def failed(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", failed)
    saved(tmp_path / "f")


def test_errors_say_what_was_done_with_which_file(tmp_path):
    def named(error, doing="reading"):
        with pytest.raises(type(error)) as caught, naming(tmp_path, doing):
            raise error
        assert caught.value is error or error.errno is None
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        return str(caught.value)

    text = os.strerror(errno.EIO)
    assert named(OSError(errno.EIO, text)) == f"[Errno 5] reading: {text}: '{tmp_path}'"
    assert named(OSError(errno.EIO, text, "/other")) == f"[Errno 5] reading {tmp_path}: {text}: '/other'"
    assert named(FileExistsError(errno.EEXIST, "taken", "/other")) == "[Errno 17] taken: '/other'"
    assert named(FileExistsError("there is one")) == f"reading {tmp_path}: there is one"
    assert named(FileExistsError(f"{tmp_path} is there")) == f"{tmp_path} is there"


def test_what_is_held_is_read_whatever_takes_its_name(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_text("old content")
    held = HeldFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(untrusted, "MOST_HELD", 0)
        again = HeldFile(path)
    with held.reader() as one, held.reader() as other:
        assert (one.read(3), other.read(), one.read()) == (b"old", b"old content", b" content")
    path.write_text("old content")
    with replacing(path) as temporary:
        temporary.write_text("new content")
    for file in (held, again):
        with pytest.raises(OSError, match=r"was replaced or written to after it was opened: '.*/f'"), file.reader() as reader:
            reader.read()
    whole = HeldFile(path)
    path.unlink()
    with whole.reader() as reader:
        assert reader.read() == b"new content"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_descriptor_is_closed_once(tmp_path, monkeypatch):
    """One that is closed twice may be another thread's by then: Ctrl-C comes just after the file has been opened."""
    (tmp_path / "f").write_text("content")

    def interrupted(*arguments, **options):
        open(*arguments, **options)  # noqa: SIM115
        raise KeyboardInterrupt

    monkeypatch.setattr(untrusted, "open", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        untrusted.open_regular(tmp_path / "f")
