"""The commit of a git project, read from its files: the program ``git`` is not started.

    folder --upwards--> .git, a folder or a file that names one --HEAD--> commit, or a branch
                                                                branch --its file, packed-refs--> commit

Git runs programs that a project's configuration names: filters, hooks, monitors of the file system. A run may be
started in a folder from a stranger, and reading HEAD must execute nothing that lies there. Without filters nobody can
say if a file differs from its commit, so the record has the commit only.
"""

import re
from pathlib import Path

from hlat.runtime.storage.small_files import read_small_file

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BRANCH = re.compile(r"ref: *(refs/\S+)")
_LINKS = 5  # symbolic refs that git follows, too
_LARGEST = 64 << 20  # bytes of packed-refs; a line for each of 800,000 branches and tags


def git_commit(folder: Path) -> str | None:
    """Return the commit of the project that a folder belongs to; None outside of one, or if its files do not say."""
    try:
        own = next((found for above in (folder, *folder.parents) if (found := _git_folder(above / ".git"))), None)
        return None if own is None else _resolve(own, _shared_folder(own), "HEAD", _LINKS)
    except (OSError, ValueError):  # unreadable, too large, no text
        return None


def _git_folder(path: Path) -> Path | None:
    """Folder of git's files: ``path``, or the one that it names, as in linked work trees and submodules."""
    if path.is_file():
        name = read_small_file(path).strip().removeprefix("gitdir:").strip()
        return path.parent / name
    return path if (path / "HEAD").is_file() else None


def _shared_folder(own: Path) -> Path:
    """Folder with the branches: that of the main work tree if ``own`` belongs to a linked one."""
    link = own / "commondir"
    return own / read_small_file(link).strip() if link.is_file() else own


def _resolve(own: Path, shared: Path, name: str, links: int) -> str | None:
    """Return the commit of HEAD or a branch."""
    text = _content(own, shared, name)
    branch = _BRANCH.fullmatch(text)
    if branch is None:
        return text if _COMMIT.fullmatch(text) else None  # nothing else of these files comes into the record
    if links == 0 or ".." in Path(branch[1]).parts:
        return None
    return _resolve(own, shared, branch[1], links - 1)


def _content(own: Path, shared: Path, name: str) -> str:
    """Content of the file of HEAD or a branch; its packed commit if there is no file; empty if there is none."""
    for folder in (own, shared):
        if (folder / name).is_file():
            return read_small_file(folder / name).strip()
    packed = shared / "packed-refs"
    for line in read_small_file(packed, _LARGEST).splitlines() if packed.is_file() else ():
        commit, _, branch = line.partition(" ")
        if branch == name:
            return commit
    return ""
