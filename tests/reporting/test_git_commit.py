"""The commit that a run records is the one that git says, and no program of the project's configuration runs."""

import os
import subprocess
from pathlib import Path

import pytest

from hlat.training.start import git_commit

WHO = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always"]


def git(folder: Path, *words: str) -> str:
    command = ["git", *WHO, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "inner" / "most").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "inner" / "file").write_text("text")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return folder


def test_the_commit_is_that_of_git(project: Path) -> None:
    for words in (
        ["log", "-1"],
        ["checkout", "-qb", "a/branch"],
        ["pack-refs", "--all"],
        ["checkout", "-q", "--detach"],
    ):
        git(project, *words)
        assert git_commit(project / "inner" / "most") == git(project, "rev-parse", "HEAD")
    git(project, "checkout", "-q", "a/branch")
    git(project, "commit", "-q", "--allow-empty", "-m", "two")  # a file again, and the packed commit is older
    assert git_commit(project) == git(project, "rev-parse", "HEAD")


def test_linked_work_trees_and_submodules_have_commits_of_their_own(project: Path, tmp_path: Path) -> None:
    git(project, "worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    git(tmp_path / "linked", "commit", "-q", "--allow-empty", "-m", "two")
    git(project, "submodule", "--quiet", "add", str(tmp_path / "linked"), "sub")
    git(project / "sub", "commit", "-q", "--allow-empty", "-m", "three")
    commits = {git_commit(folder) for folder in (project, tmp_path / "linked", project / "sub")}
    assert commits == {git(folder, "rev-parse", "HEAD") for folder in (project, tmp_path / "linked", project / "sub")}
    git(tmp_path / "linked", "pack-refs", "--all")
    assert git_commit(tmp_path / "linked") == git(tmp_path / "linked", "rev-parse", "HEAD") and len(commits) == 3


@pytest.mark.parametrize(
    "head", ["", "text", "ref: refs/heads/none", "ref: ../../secret", "ref: refs/heads/a", "\0" * 9]
)
def test_what_is_no_commit_is_not_recorded(head: str, project: Path) -> None:
    """Files of a stranger may lead anywhere: nothing but the digits of a commit leaves them."""
    (project.parent / "secret").write_text("secret")
    (project / ".git" / "refs" / "heads" / "a").write_text("ref: refs/heads/a\n")
    (project / ".git" / "HEAD").write_text(head)
    assert git_commit(project) is None


def test_devices_and_folders_without_a_project_have_no_commit(project: Path, tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    (project / ".git" / "HEAD").unlink()
    os.mkfifo(project / ".git" / "HEAD")
    assert git_commit(project) is None
    (tmp_path / ".git").write_text("gitdir: /dev/zero\n")
    assert git_commit(tmp_path) is None


def test_no_program_of_the_project_runs(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter, a monitor of files, a pager, an ssh, a hook, and a ``git`` in the current folder, which PATH names."""
    ran = tmp_path / "ran"
    program = project / "git"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    (project / ".gitattributes").write_text("* filter=own\n")
    for key in ("filter.own.clean", "core.fsmonitor", "core.pager", "core.sshCommand"):
        git(project, "config", key, str(program))
    (project / ".git" / "hooks").mkdir(exist_ok=True)
    (project / ".git" / "hooks" / "post-index-change").symlink_to(program)
    expected = (project / ".git" / "refs" / "heads" / "main").read_text().strip()
    os.utime(project / "inner" / "file")
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    monkeypatch.chdir(project)
    assert git_commit(Path.cwd()) == expected and not ran.exists()
    subprocess.run(["git", "status"], check=True, capture_output=True)
    assert ran.exists(), "git itself would have run them"
