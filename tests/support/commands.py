"""The command ``hlat`` in processes that are forked from one that has imported it.

Importing torch and its distributed parts takes seconds of CPU time, and the tests start hundreds of commands. A server
imports them once and forks a process per command: of its own, with its own arguments, folder, environment, output and
exit code. The ranks of its runs are forked from it in turn. Tests that are about starting, signals or terminals start
the real command instead.
"""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

_TIMEOUT = 300.0
_ROOT = Path(__file__).resolve().parents[2]


def forking() -> "multiprocessing.context.ForkServerContext":
    """Starts processes that have imported hlat."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    with contextlib.chdir(_ROOT):  # where the server finds ``tests``; it would go on without what it cannot import
        forkserver.ensure_running()
    return context


def hlat(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = _TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run the command: what ``subprocess.run`` would return for it, with its output as text."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        streams = (_Inherited(out.fileno()), _Inherited(err.fileno()))
        process = forking().Process(
            target=_command, args=(words, streams, dict(os.environ if env is None else env), str(cwd or Path.cwd()))
        )
        process.start()
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


class _Inherited:
    """A file descriptor that travels to the new process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _receive, (multiprocessing.reduction.DupFd(self._descriptor),)


def _receive(duplicate: "multiprocessing.resource_sharer.DupFd") -> int:
    return duplicate.detach()


def _command(words: list[str], streams: tuple[int, int], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, descriptor in enumerate(streams, start=1):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
    sys.argv = ["hlat", *words]
    from hlat.command import main  # noqa: PLC0415
    from tests.support import forked_ranks  # noqa: PLC0415

    forked_ranks.install()
    main()
