"""A file that is written atomically is the old one or the complete new one, wherever its writer is killed or fails."""

import errno
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hlat.runtime.storage.local_files import atomic_file, write_atomic

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = b"old", b"the new content"


def _killed_at_event(number: int, path: Path) -> bool:
    """Write in a forked child that is killed at one of its calls and returns; False if it ends before that."""
    child = os.fork()
    if child == 0:
        events = count()

        def die(frame: FrameType, event: str, argument: Any) -> None:
            if next(events) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(die)
        write_atomic(path, NEW[:3], NEW[3:], sync_folder=True)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_at_each_call(folder: Path) -> None:
    path, found = folder / "file", set()
    for number in count():
        path.write_bytes(OLD)
        if not _killed_at_event(number, path):
            break
        found.add(path.read_bytes())
        for left in set(folder.iterdir()) - {path}:
            assert left.suffix == ".tmp", "what cleans up knows it by its ending"
            left.unlink()
    assert found == {OLD, NEW} and number > 20


def test_a_writer_killed_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """In a process of its own, which is small: forking the tests' takes a tenth of a second for its page tables."""
    program = f"from pathlib import Path; from {__name__} import *; kill_at_each_call(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("failing", ["fsync", "rename", "block"])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """A disk can refuse as late as the fsync: nothing may have been renamed before."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(OLD)
    monkeypatch.setattr(
        *{"fsync": (os, "fsync"), "rename": (Path, "replace"), "block": (os, "getcwd")}[failing], refuse
    )
    with pytest.raises(OSError, match="No space left"), atomic_file(path) as file:
        file.write(NEW)
        if failing == "block":
            os.getcwd()  # noqa: PTH109  (a call that fails, for any other)
    assert path.read_bytes() == OLD and [*tmp_path.iterdir()] == [path]


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    write_atomic(tmp_path / "atomic", NEW)
    (tmp_path / "plain").touch()
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode
