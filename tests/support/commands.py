"""The command ``hlat`` in processes that are forked from one that has imported it.

Importing torch and its distributed parts takes seconds of CPU time, and the tests start hundreds of commands. A server
imports them once and forks a process per command: of its own, with its own arguments, folder, environment, output and
exit code. The ranks of its runs are forked from it in turn. Tests that are about starting, signals or terminals start
the real command instead.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import IO

_TIMEOUT = 1200.0  # seconds: only a command that hangs takes so long, on any machine
_ROOT = Path(__file__).resolve().parents[2]


def forking() -> "multiprocessing.context.ForkServerContext":
    """Starts processes that have imported hlat."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    with contextlib.chdir(_ROOT):  # where the server finds ``tests``; it would go on without what it cannot import
        forkserver.ensure_running()
    return context


def hlat(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = _TIMEOUT,
    prepare: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command: what ``subprocess.run`` would return for it, with its output as text.

    ``prepare`` is called in the new process before the command, whose ranks are forked from it.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        process = _fork(words, out.fileno(), err.fileno(), env, cwd, prepare)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["hlat", *words], timeout)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return subprocess.CompletedProcess(["hlat", *words], process.exitcode, *texts)


def hlat_in_turn(commands: Sequence[tuple[Sequence[str | Path], Path]]) -> list[subprocess.CompletedProcess[str]]:
    """Run commands one after another in one process, each in its folder: a quarter of the time, for what is refused.

    Args:
        commands: words after ``hlat``, and the folder.

    Returns:
        What ``hlat`` would return for each.
    """
    asked = [([str(word) for word in words], str(folder)) for words, folder in commands]
    with tempfile.TemporaryDirectory() as folder:
        process = forking().Process(target=_in_turn, args=(asked, folder, dict(os.environ)))
        process.start()
        process.join(_TIMEOUT)
        process.kill()
        done = []
        for number, (words, _) in enumerate(asked):
            code, out, err = ((Path(folder) / f"{number}.{kind}").read_text("utf-8") for kind in ("code", "out", "err"))
            done.append(subprocess.CompletedProcess(["hlat", *words], int(code), out, err))
    return done


def _in_turn(commands: list[tuple[list[str], str]], results: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    from hlat.command import main  # noqa: PLC0415

    for number, (words, folder) in enumerate(commands):
        os.chdir(folder)
        for descriptor, kind in ((1, "out"), (2, "err")):
            with Path(results, f"{number}.{kind}").open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = (os.fdopen(each, "w", 1, encoding="utf-8", closefd=False) for each in (1, 2))
        sys.argv = ["hlat", *words]
        code: object = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = 1
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        Path(results, f"{number}.code").write_text(str(code or 0), "utf-8")


class StartedCommand:
    """The command in the background, with what tests use of ``subprocess.Popen``.

    Standard output and standard error are one stream, unless ``errors`` is given.

    Args:
        arguments: words after ``hlat``.
        output: file for the stream; None for a pipe, ``stdout``.
        errors: file for standard error, if it is not to be in that stream.
        env: environment variables; None for those of this process.
        prepare: called in the new process before the command, as by ``hlat``.

    Attributes:
        stdout: the stream as text, if it is a pipe.
    """

    def __init__(
        self,
        *arguments: str | Path,
        output: IO[str] | None = None,
        errors: IO[str] | None = None,
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._words = [str(argument) for argument in arguments]
        reads, writes = os.pipe() if output is None else (-1, output.fileno())
        self._process = _fork(self._words, writes, writes if errors is None else errors.fileno(), env, None, prepare)
        if output is None:
            os.close(writes)
            self.stdout = os.fdopen(reads, encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended the command; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return self._process.exitcode

    def wait(self, timeout: float = _TIMEOUT) -> int:
        """Wait for the end and return the exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(["hlat", *self._words], timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = _TIMEOUT) -> tuple[str, None]:
        """Return the rest of the stream, once its last writer has ended, and None for the stream of errors."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with self.stdout:
            text = self.stdout.read()
        timer.cancel()
        self.wait(timeout)
        return text, None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the command."""
        self.send_signal(signal.SIGKILL)


def _fork(
    words: list[str],
    out: int,
    err: int,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    prepare: Callable[[], None] | None = None,
) -> "multiprocessing.context.ForkServerProcess":
    streams, variables = (_Inherited(out), _Inherited(err)), dict(os.environ if env is None else env)
    process = forking().Process(target=_command, args=(words, streams, variables, str(cwd or Path.cwd()), prepare))
    process.start()
    return process


class _Inherited:
    """A file descriptor that travels to the new process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _receive, (multiprocessing.reduction.DupFd(self._descriptor),)


def _receive(duplicate: "multiprocessing.resource_sharer.DupFd") -> int:
    return duplicate.detach()


def _command(
    words: list[str],
    streams: tuple[int, int],
    environment: dict[str, str],
    folder: str,
    prepare: Callable[[], None] | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, descriptor in enumerate(streams, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, encoding="utf-8", closefd=False) for number in (1, 2))
    sys.argv = ["hlat", *words]
    from hlat.command import main  # noqa: PLC0415
    from tests.support import forked_ranks  # noqa: PLC0415

    forked_ranks.install()
    if prepare is not None:
        prepare()
    main()
