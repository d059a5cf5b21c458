"""Folders from which code is loaded: those in which somebody else could put code are refused, with what mends them."""

import os
import struct
import subprocess
from pathlib import Path

import pytest

from hlat.runtime.backend import code_folders as code_folder
from hlat.runtime.backend.code_folders import open_code_folder
from hlat.runtime.errors import LaunchError

STRANGER = 12345


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "above" / "cache"
    (found / "inner").mkdir(parents=True)
    (found / "inner" / "code.so").write_bytes(b"code")
    for path in (found.parent, found, found / "inner"):
        path.chmod(0o755)
    return found


def test_missing_folders_are_created_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        open_code_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b" / "c")] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777, 0o720])
@pytest.mark.parametrize("which", [".", "inner", "inner/code.so"])
def test_what_others_can_write_is_refused_and_the_command_mends_it(
    folder: Path, which: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_folder, "_is_private_group", lambda gid: False)
    open_code_folder(folder)
    (folder / which).chmod(mode)
    with pytest.raises(LaunchError) as refused:
        open_code_folder(folder)
    command = str(refused.value).split("`")[1]
    assert command.startswith("chmod -R go-w")
    subprocess.run(command, shell=True, check=True)
    open_code_folder(folder)


@pytest.mark.parametrize("is_private", [True, False])
def test_a_group_of_this_user_alone_may_write(folder: Path, is_private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask 002 lets it: folders are 0775, files 0664, and those that a linker makes 0775."""
    group = folder.stat().st_gid
    monkeypatch.setattr(code_folder, "_is_private_group", lambda gid: is_private and gid == group)
    for path, mode in ((folder.parent, 0o775), (folder, 0o775), (folder / "inner" / "code.so", 0o664)):
        path.chmod(mode)
        if is_private:
            open_code_folder(folder)
        else:
            with pytest.raises(LaunchError, match="others can write"):
                open_code_folder(folder)


@pytest.mark.parametrize("which", ["..", ".", "inner/code.so"])
@pytest.mark.parametrize(
    ("entries", "is_open"),
    [
        ([(2, 6, STRANGER), (4, 5, None)], True),  # setfacl -m u:12345:rw
        ([(4, 5, None), (8, 6, STRANGER)], True),  # setfacl -m g:12345:rw
        ([(2, 4, STRANGER), (4, 7, None)], False),  # he may read, and the private group may write
        ([(2, 7, os.geteuid()), (4, 5, None)], False),
    ],
)
def test_an_access_control_list_is_read(
    folder: Path, which: str, entries: list[tuple[int, int, int | None]], is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the group are the list's mask, so a group of this user alone tells nothing about who may write."""
    monkeypatch.setattr(code_folder, "_is_private_group", lambda gid: gid == os.getegid())
    nobody = 0xFFFFFFFF
    lines = [(1, 7, None), *entries, (16, 7, None), (32, 5, None)]  # owner, entries, mask, others
    packed = [struct.pack("<HHI", tag, rights, nobody if who is None else who) for tag, rights, who in lines]
    try:
        os.setxattr(folder / which, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(packed))
    except OSError as error:
        pytest.skip(f"the file system has no access control lists: {error}")
    if not is_open:
        open_code_folder(folder)
        return
    with pytest.raises(LaunchError, match="others can write") as refused:
        open_code_folder(folder)
    subprocess.run(str(refused.value).split("`")[1], shell=True, check=True)
    open_code_folder(folder)


def test_nobody_reaches_what_is_in_a_private_folder(folder: Path) -> None:
    (folder / "inner").chmod(0o777)
    folder.chmod(0o700)
    open_code_folder(folder)


@pytest.mark.parametrize("mode", [0o757, 0o777])
def test_a_folder_above_it_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    """They could exchange the folder, unless they may only rename what is theirs, as in /tmp."""
    folder.parent.chmod(mode)
    with pytest.raises(LaunchError, match=f"`chmod go-w {folder.parent}` mends it"):
        open_code_folder(folder)
    with pytest.raises(LaunchError, match=f"`chmod go-w {folder.parent}` mends it"):
        open_code_folder(folder.parent / "missing" / "cache")
    folder.parent.chmod(mode | 0o1000)
    open_code_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file to somebody else")
@pytest.mark.parametrize("which", [".", "inner", "inner/code.so", ".."])
def test_what_belongs_to_others_is_refused(folder: Path, which: str) -> None:
    os.chown(folder / which, STRANGER, STRANGER)
    with pytest.raises(LaunchError, match=f"belongs to user {STRANGER}"):
        open_code_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file to somebody else")
def test_links_are_followed_and_must_be_this_users(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("above/../above/cache")
    open_code_folder(link)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(LaunchError, match=f"{link} belongs to user {STRANGER}"):
        open_code_folder(link)
    os.chown(link, 0, 0, follow_symlinks=False)
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(LaunchError, match=f"cache belongs to user {STRANGER}"):
        open_code_folder(link)


def test_links_in_a_circle_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(LaunchError, match="too many symbolic links"):
        open_code_folder(tmp_path / "one" / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="it is no folder"):
        open_code_folder(tmp_path / "file")


def test_where_root_has_no_number_its_folders_are_trusted(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """In a container of Apptainer / belongs to the number for users that it does not know."""
    uid_map = tmp_path / "uid_map"
    monkeypatch.setattr(code_folder, "_UID_MAP", uid_map)
    uid_map.write_text("      1000       1000          1\n")
    assert code_folder._unmapped_root() == int(code_folder._OVERFLOW_UID.read_text())
    uid_map.write_text("         0          0 4294967295\n")
    assert code_folder._unmapped_root() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file to somebody else")
def test_that_number_is_trusted_only_where_the_system_has_mounted_something(folder: Path, monkeypatch) -> None:
    """Folders of all strangers show the same number there."""
    monkeypatch.setattr(code_folder, "_unmapped_root", lambda: STRANGER)
    os.chown(folder.parent, STRANGER, STRANGER)
    monkeypatch.setattr(os.path, "ismount", lambda place: place == folder.parent)
    open_code_folder(folder)
    monkeypatch.setattr(os.path, "ismount", lambda place: False)
    with pytest.raises(LaunchError, match=f"{folder.parent} belongs to user {STRANGER}"):
        open_code_folder(folder)
