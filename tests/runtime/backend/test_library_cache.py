"""Compiled C is kept for the next process: compiled once, never loaded if it is torn or if others can write there."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from hlat.runtime.backend import c_library as library_cache
from hlat.runtime.backend.c_library import compile_c_library, find_c_compiler

PROGRAM = "import sys, pathlib, hlat.runtime.backend.c_library as p\n"
PROGRAM += "print(p.compile_c_library(pathlib.Path(sys.argv[1])).one())"


class Compiler:
    """A C compiler that writes a line for each compilation, and waits for ever while its file ``blocked`` exists."""

    def __init__(self, folder: Path) -> None:
        self.log, self.blocked, program = folder / "log", folder / "blocked", folder / "compiler"
        log = f"echo $$ >> {self.log}"
        waits = f"if [ -e {self.blocked} ]; then {log}; exec sleep 600; fi"  # once it is in the log, it waits
        logs = f'case "$*" in *--version) ;; *) {waits}; {log} ;; esac'
        program.write_text(f'#!/bin/sh\n{logs}\nexec {find_c_compiler()} "$@"\n')
        program.chmod(0o755)
        self.command = str(program)

    def pids(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    (tmp_path / "bin").mkdir()
    found = Compiler(tmp_path / "bin")
    monkeypatch.setenv("CC", found.command)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "number.h").write_text("#define NUMBER 1\n")
    (folder / "one.c").write_text('#include "number.h"\nint one(void) { return NUMBER; }\n')
    return folder / "one.c"


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / "hlat" / "kernels").glob("*.so"))


def test_a_library_is_compiled_again_only_if_something_that_it_depends_on_has_changed(
    compiler: Compiler, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert compile_c_library(source).one() == 1
    assert len(compiler.pids()) == 1
    (source.parent / "number.h").write_text("#define NUMBER 2\n")
    assert compile_c_library(source).one() == 2
    compile_c_library(source, ["-DOTHER"])
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    compile_c_library(source)
    monkeypatch.setenv("CC", f"{compiler.command} -g")
    compile_c_library(source)
    assert len(compiler.pids()) == 5


@pytest.mark.parametrize(
    "tear",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 4],  # loading it would end the process
        lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: os.urandom(3000),
    ],
    ids=["empty", "a quarter", "zeros", "a bit", "garbage"],
)
def test_a_torn_library_is_compiled_again(
    tear: Callable[[bytes], bytes], compiler: Compiler, source: Path, tmp_path: Path
) -> None:
    compile_c_library(source)
    [library] = stored(tmp_path)
    content = library.read_bytes()
    library.unlink()  # this process has loaded it
    library.write_bytes(tear(content))
    code = [sys.executable, "-c", PROGRAM, str(source)]
    for _ in range(2):
        assert subprocess.run(code, check=True, capture_output=True, text=True).stdout == "1\n"
    assert len(compiler.pids()) == 2


def test_a_folder_in_which_others_can_write_is_not_used(
    compiler: Compiler, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_c_library(source)
    [library] = stored(tmp_path)
    library.parent.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert compile_c_library(source).one() == 1
    assert len(compiler.pids()) == 2 and f"`chmod -R go-w {library.parent}` mends it" in caplog.text


@pytest.mark.parametrize("home", ["/proc/none", "relative"])
def test_without_a_home_each_process_compiles_and_nothing_is_said(
    home: str, compiler: Compiler, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", "/proc/none")
    for _ in range(2):
        assert compile_c_library(source).one() == 1
    assert len(compiler.pids()) == 2 and not caplog.text


def test_a_full_folder_for_temporary_files_does_not_matter(
    compiler: Compiler, source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler's own files are in the cache's folder, too."""
    monkeypatch.setenv("TMPDIR", "/proc/none")
    assert compile_c_library(source).one() == 1
    assert [path.suffix for path in sorted(stored(tmp_path)[0].parent.iterdir())] == [".lock", ".so"]


def test_processes_of_a_host_compile_once(compiler: Compiler, source: Path) -> None:
    code = [sys.executable, "-c", PROGRAM, str(source)]
    processes = [subprocess.Popen(code, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0] for process in processes] == ["1\n"] * 4
    assert len(compiler.pids()) == 1


def test_a_killed_process_blocks_no_other(compiler: Compiler, source: Path, tmp_path: Path) -> None:
    compiler.blocked.touch()
    killed = subprocess.Popen([sys.executable, "-c", PROGRAM, str(source)])
    while not compiler.pids():
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    compiler.blocked.unlink()
    assert compile_c_library(source).one() == 1
    assert len(compiler.pids()) == 2
    left = [path.name for path in stored(tmp_path)[0].parent.iterdir() if path.is_dir()]
    assert left == [], "its folder is removed"
    with suppress(ProcessLookupError):
        os.kill(compiler.pids()[0], signal.SIGKILL)


def test_libraries_that_nobody_uses_are_removed_first(
    compiler: Compiler, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_cache, "_KEPT", 2)
    for used, flag in ((10, "-DFIRST"), (20, "-DSECOND")):
        before = stored(tmp_path)
        compile_c_library(source, [flag])
        [made] = set(stored(tmp_path)) - set(before)
        os.utime(made, (used, used))
    assert len(compiler.pids()) == 2
    compile_c_library(source, ["-DFIRST"])
    compile_c_library(source, ["-DTHIRD"])
    assert len(stored(tmp_path)) == 2 and len(compiler.pids()) == 3
    compile_c_library(source, ["-DFIRST"])
    assert len(compiler.pids()) == 3, "it was in use"


def test_another_process_may_remove_a_library_meanwhile(
    compiler: Compiler, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "hlat" / "kernels").mkdir(parents=True)
    gone = tmp_path / "home" / "hlat" / "kernels" / "gone.so"
    gone.symlink_to("nothing")  # listed, and without a time
    assert compile_c_library(source).one() == 1
    assert compile_c_library(source).one() == 1
    assert len(compiler.pids()) == 1
