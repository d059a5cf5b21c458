"""Folders of compiled code: the recipe's, else those of the environment, else one of this user alone."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._inductor.exc import InductorError

from hlat.runtime.backend import code_folders as compile_cache
from hlat.runtime.backend.c_library import find_c_compiler
from hlat.runtime.backend.code_folders import (
    compile_cache_folders,
    damaged_code_error,
    open_compile_cache,
    use_compile_cache,
)
from hlat.runtime.backend.device import restored_settings
from hlat.runtime.backend.table import backend_of
from hlat.runtime.errors import LaunchError

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for device_type in ("cpu", "cuda", "neuron"):
        for variable in backend_of(device_type).compile_cache:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hlat.runtime.backend.code_folders._set_here", {})


def test_ranks_share_a_cache_unless_their_compilers_race(tmp_path: Path) -> None:
    for device_type in ("cpu", "cuda"):
        one, other = (compile_cache_folders(device_type, tmp_path, rank) for rank in (0, 3))
        assert one == other and one[INDUCTOR] == tmp_path / "inductor"
    folders = [compile_cache_folders("neuron", tmp_path, rank) for rank in (0, 3)]
    assert not set(folders[0].values()) & set(folders[1].values())
    assert folders[1]["TORCH_NEURONX_NEFF_CACHE_DIR"] == tmp_path / "rank-3" / "neff"


def test_a_recipes_folder_is_before_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, "/given")
    assert compile_cache_folders("cpu", None, 0) == {INDUCTOR: Path("/given")}
    assert compile_cache_folders("neuron", None, 2)[INDUCTOR] == Path("/given/rank-2")
    assert compile_cache_folders("cpu", tmp_path, 0) == {INDUCTOR: tmp_path / "inductor"}


def test_without_either_it_is_a_folder_of_this_user(tmp_path: Path) -> None:
    own = tmp_path / f"hlat-compiled-{os.getuid()}"
    assert open_compile_cache("cpu", None, 0) == {INDUCTOR: own / "inductor"}
    assert own.stat().st_mode & 0o777 == (own / "inductor").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("named_by", ["recipe", "environment", "nobody"])
def test_a_folder_in_which_others_can_write_is_refused(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "given" if named_by == "recipe" else None
    if named_by == "environment":
        monkeypatch.setenv(INDUCTOR, str(tmp_path / "given"))
    [folder] = open_compile_cache("cpu", base, 0).values()
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match=f"`chmod -R go-w {folder}` mends it"), restored_settings():
        use_compile_cache("cpu", base, 0)
    folder.rmdir()
    folder.symlink_to("/tmp")  # others can write there, too
    with pytest.raises(LaunchError, match="others can write to /tmp"), restored_settings():
        use_compile_cache("cpu", base, 0)


def library(folder: Path) -> Path:
    """A compiled library in a folder, as a compiler puts it there."""
    (folder / "ab").mkdir(parents=True)
    found = folder / "ab" / "code.so"
    compiler = find_c_compiler()
    assert compiler is not None
    command = [*compiler.split(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(found)]
    subprocess.run(command, input=b"int one(void) { return 1; }", check=True)
    return found


@pytest.mark.parametrize("kept", [0.0, 0.25, 0.99])
@pytest.mark.parametrize("zeros", [False, True])
def test_incomplete_libraries_are_removed_and_told(
    kept: float, zeros: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_BEING_WRITTEN", 3600.0)
    folder = tmp_path / "cache" / "inductor"
    torn, whole, lock = library(folder), folder / "graph", folder / "locks" / "code.lock"
    lock.parent.mkdir()
    whole.write_bytes(b"graph")
    lock.touch()
    with restored_settings():
        use_compile_cache("cpu", tmp_path / "cache", 0)
        assert torn.exists() and not caplog.text
        content = torn.read_bytes()
        part = content[: int(kept * len(content))]
        torn.write_bytes(part.ljust(len(content), b"\0") if zeros else part)
        use_compile_cache("cpu", tmp_path / "cache", 0)
        assert torn.exists(), "another process may be writing it"
        os.utime(torn, (0, 0))
        use_compile_cache("cpu", tmp_path / "cache", 0)
    assert not torn.exists() and whole.exists() and lock.exists()
    assert f"{folder}: compiled code that is incomplete is compiled again (1 files)" in caplog.text


HASH = "c" + "a2" * 25


@pytest.mark.parametrize(
    ("torn", "kept"),
    [
        (f"a2/{HASH}.py", "package/__init__.py"),
        (f"fxgraph/a2/{HASH}/{HASH}", "notes"),
        (f"{HASH.upper()}/kernel.json", "settings.json"),
        ("neff/MODULE_1+2/model.neff", "neff/MODULE_3+4/model.done"),
        ("a2/kernel.o", f"a2/{HASH}.txt"),
    ],
)
def test_of_empty_files_only_compiled_code_is_removed(
    torn: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_BEING_WRITTEN", -1.0)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "users"))
    for name in (torn, kept):
        (tmp_path / "users" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "users" / name).touch()
    script, link = tmp_path / "users" / "linked.so", tmp_path / "users" / "link.so"
    script.write_text("INPUT(libm.so.6)")
    link.symlink_to("nowhere")
    with restored_settings():
        use_compile_cache("cpu", None, 0)
    assert [(tmp_path / "users" / name).exists() for name in (torn, kept)] == [False, True]
    assert script.exists() and link.is_symlink()


@pytest.mark.parametrize(("code", "mark"), [("model.neff", "model.done"), ("kernel.cubin", "__grp__kernel.json")])
def test_an_entry_without_its_code_is_no_longer_marked_as_complete(
    code: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_BEING_WRITTEN", -1.0)
    entry = tmp_path / "inductor" / HASH
    entry.mkdir(parents=True)
    for name in (code, mark):
        (entry / name).touch()
    with restored_settings():
        use_compile_cache("cpu", tmp_path, 0)
    assert list(entry.iterdir()) == []


@pytest.mark.parametrize("method", ["lstat", "unlink"])
def test_files_that_vanish_or_cannot_be_removed_do_not_end_a_start(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_cache, "_BEING_WRITTEN", -1.0)
    torn = tmp_path / "inductor" / "code.so"
    open_compile_cache("cpu", tmp_path, 0)
    torn.touch()
    plain = getattr(Path, method)

    def failing(path: Path, **options: bool) -> object:
        if path == torn:
            raise OSError("Read-only file system")
        return plain(path, **options)

    monkeypatch.setattr(Path, method, failing)
    with restored_settings():
        use_compile_cache("cpu", tmp_path, 0)
    assert torn.exists() and not caplog.text


def test_a_folder_that_the_user_names_is_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = tmp_path / "user's"
    monkeypatch.setenv(INDUCTOR, str(users))
    library(users)
    (users / "thesis.txt").touch()
    with restored_settings():
        use_compile_cache("cpu", None, 0)
        found = damaged_code_error(InductorError(SyntaxError("invalid syntax"), None))
    assert found is not None and not found.retryable
    assert f"`rm -r {shlex.quote(str(users))}`" in str(found) and "emptied" not in str(found)
    assert (users / "thesis.txt").exists() and (users / "ab" / "code.so").exists()


def raised(error: BaseException, handled: BaseException, cause: BaseException | None = None) -> BaseException:
    """An error that is raised while another one is handled."""
    try:
        try:
            raise handled
        except BaseException:
            raise error from cause
    except BaseException as found:
        return found


DAMAGE = InductorError(SyntaxError("invalid syntax"), None)


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(1),
        torch.OutOfMemoryError(),
        RuntimeError("another"),
        Unsupported("graph break"),
        InductorError(torch.OutOfMemoryError(), None),
        InductorError(LaunchError("theirs"), None),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_damage(error: BaseException, tmp_path: Path) -> None:
    library(tmp_path / "inductor")
    with restored_settings():
        use_compile_cache("cpu", tmp_path, 0)
        assert damaged_code_error(error) is None
        assert damaged_code_error(raised(error, handled=DAMAGE)) is None
        assert (tmp_path / "inductor" / "ab").exists()
        assert damaged_code_error(raised(RuntimeError("step"), handled=DAMAGE, cause=DAMAGE)) is not None


def test_after_an_error_of_a_compiler_code_of_earlier_processes_is_removed_once(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "inductor"
    with restored_settings():
        use_compile_cache("cpu", tmp_path / "cache", 0)
        failure = InductorError(SyntaxError("invalid syntax"), None)
        assert damaged_code_error(failure) is None, "nobody had compiled anything"
        library(folder)
        use_compile_cache("cpu", tmp_path / "cache", 0)
        assert damaged_code_error(RuntimeError("out of memory")) is None
        found = damaged_code_error(failure)
        assert found is not None and found.retryable and str(folder) in str(found) and "invalid syntax" in str(found)
        assert list(folder.iterdir()) == []
        use_compile_cache("cpu", tmp_path / "cache", 0)
        assert damaged_code_error(failure) is None, "it was compiled by this run: the error is the compiler's"


def test_what_a_run_has_set_does_not_bind_the_next_one(tmp_path: Path) -> None:
    with restored_settings():
        use_compile_cache("neuron", tmp_path / "a", 1)
        assert os.environ[INDUCTOR] == str(tmp_path / "a" / "rank-1" / "inductor")
        use_compile_cache("neuron", None, 1)
        assert os.environ[INDUCTOR].startswith(str(tmp_path / "hlat-compiled-"))
        before = os.environ[INDUCTOR]
        use_compile_cache("neuron", None, 1)
        assert os.environ[INDUCTOR] == before, "no second rank-1"
    assert INDUCTOR not in os.environ


def test_versions_name_everything_that_code_depends_on() -> None:
    versions = backend_of("cpu").compiler_versions(torch.device("cpu"))
    assert versions["torch"] == torch.__version__ and versions["Python"] and versions["device"]
    assert {"C++ compiler", "torch's folder"} <= versions.keys()
