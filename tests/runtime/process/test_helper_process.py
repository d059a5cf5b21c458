"""A helper process: messages, file descriptors, exits of either side, and files that it must not inherit."""

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from hlat.runtime import helper_process as helper_module
from hlat.runtime.backend import table
from hlat.runtime.errors import DataError, HlatError, StorageError
from hlat.runtime.helper_process import Channel, PeerEnded, start_helper, start_program


@pytest.fixture(params=["fork", "new interpreter"])
def start(request, monkeypatch):
    """Start helper processes by fork and by a new interpreter; kill them when the test ends."""
    if request.param == "new interpreter":
        monkeypatch.setattr(helper_module, "_may_fork", lambda: False)
    processes = []

    def start(work):
        processes.append(start_helper(work))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def echo(channel: Channel) -> None:
    """Helper: echo each message with the content of its files, after sending itself the signals that it must ignore."""
    while True:
        message, descriptors = channel.receive()
        texts = [os.read(descriptor, 100).decode() for descriptor in descriptors]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        channel.send((message, texts, os.getsid(0) == os.getpid()))


def test_messages_and_files_are_exchanged_and_signals_are_ignored(start, tmp_path):
    (tmp_path / "a").write_text("of the file")
    process = start(echo)
    with (tmp_path / "a").open("rb") as file:
        process.channel.send({"a": 1}, [file.fileno()])
    process.channel.send("more")
    assert process.receive(600) == ({"a": 1}, ["of the file"], True)
    assert process.receive(600) == ("more", [], True)
    assert process.receive(0) is None


def test_a_killed_helper_is_noticed(start):
    process = start(echo)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PeerEnded, match="a helper process was killed by signal 9"):
        process.receive(600)
    with pytest.raises(PeerEnded):
        process.channel.send("nobody receives this")
    assert process.wait() == -signal.SIGKILL
    process.kill()


def exit_when_closed(channel: Channel) -> None:
    """Helper: exit when the channel is closed."""
    try:
        channel.receive()
    except EOFError:
        os._exit(7)


def test_a_helper_sees_the_closed_channel(start):
    process = start(exit_when_closed)
    process.close()
    assert process.wait() == 7


def never_read(channel: Channel) -> None:
    """Helper: never read the channel."""
    channel.on_parent_exit(lambda: os._exit(8))
    signal.pause()


def test_a_helper_that_hangs_is_ended_by_the_closed_channel(start):
    process = start(never_read)
    process.close()
    assert process.wait() == 8


def report_unread(channel: Channel) -> None:
    """Helper: report unread messages and receive them, until the channel is closed."""
    channel.receive()
    while not channel.has_unread():
        time.sleep(0.01)
    channel.send("something")
    assert channel.receive() == ("second", []) and not channel.has_unread()
    channel.send("nothing")


def test_unread_messages_are_reported(start):
    process = start(report_unread)
    process.channel.send("first")
    process.channel.send("second")
    assert [process.receive(), process.receive()] == ["something", "nothing"]
    process.close()
    assert process.wait() == 0


def test_a_helper_keeps_no_inherited_connection_open(start):
    """The reader of an inherited pipe sees end of file when this process closes its end."""
    reading, writing = os.pipe()
    process = start(echo)
    process.channel.send("begun?")
    assert process.receive(600) is not None
    os.close(writing)
    assert select.select([reading], [], [], 600)[0], "another process holds the other end"
    assert os.read(reading, 1) == b"", "end of file"
    os.close(reading)


def test_a_helper_keeps_no_file_of_a_device_open(start, monkeypatch):
    """A driver frees the memory of a killed process when no other has its files open: /dev/zero stands for one."""
    monkeypatch.setattr(table, "OPENED_FILES", ("/dev/z*",))
    with Path("/dev/zero").open("rb"), Path("/dev/full").open("wb"):
        process = start(echo)
        process.channel.send("begun?")
        assert process.receive(600) is not None
        found = {str(entry.readlink()) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert "/dev/zero" not in found
    assert ("/dev/full" in found) == (helper_module._may_fork()), "a forked helper keeps other files"


def test_the_files_of_all_known_drivers_are_device_files():
    names = ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "kfd", "dri/renderD128", "neuron3")
    assert all(table.is_device_file(f"/dev/{name}") for name in names)
    assert not any(table.is_device_file(path) for path in ("/dev/null", "/dev/shm/nvidia", "/home/dev/nvidia0"))


class AwayError(StorageError):
    """An error of another module."""


def fail(channel: Channel) -> None:
    """Helper: raise the error that it receives."""
    raise channel.receive()[0]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (AwayError("the store is away"), StorageError, "the store is away"),
        (DataError("a row"), DataError, "a row"),
        (KeyError("a bug"), RuntimeError, r"a helper process failed:\nTraceback (.*\n)*KeyError: 'a bug'"),
    ],
    ids=["of a module", "data", "bug"],
)
def test_an_error_of_the_work_is_raised_by_its_parent(start, error, kind, text):
    """An error of a user arrives with its sentence and its class here, any other one as a traceback."""
    process = start(fail)
    process.send(error)
    with pytest.raises(RuntimeError if kind is RuntimeError else HlatError, match=f"^{text}") as raised:
        process.receive()
    assert type(raised.value) is kind and process.wait() == 1


def test_a_forked_helper_does_not_run_the_parents_cleanup(tmp_path: Path):
    try:
        process = start_helper(exit_when_closed)
        process.close()
        assert process.wait() == 7
    finally:
        with (tmp_path / "ends").open("a") as file:
            file.write("x")
    assert (tmp_path / "ends").read_text() == "x"


def test_modules_of_the_current_folder_do_not_hide_those_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pickle.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    process = start_program(f"{__name__}:echo")
    process.send("more")
    assert process.receive(600) == ("more", [], True)
    process.kill()
