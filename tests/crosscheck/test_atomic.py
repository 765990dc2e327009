"""A file appears whole or not at all."""

import signal
import stat
import subprocess
import sys

import pytest
from processes import LIMIT

from blockfp.files.atomic import replacing


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
