"""A process beside this one: messages, open files, and what it does not take along."""

import os
import select
import signal
import time
from pathlib import Path

import pytest

from hlat.runtime.distributed import Channel, start_helper
from hlat.runtime.distributed import helper_process as beside


@pytest.fixture(params=["copy", "new interpreter"])
def started(request, monkeypatch):
    """Start a process in both ways; it is gone when the test ends."""
    if request.param == "new interpreter":
        monkeypatch.setattr(beside, "_may_fork", lambda: False)
    processes = []

    def start(work):
        processes.append(start_helper(work))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def answer(line: Channel) -> None:
    """Work of the other process: say what it is told, what is in the files that come along, and what it ignores."""
    while True:
        message, descriptors = line.receive()
        texts = [os.read(descriptor, 100).decode() for descriptor in descriptors]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        line.send((message, texts, os.getsid(0) == os.getpid()))


def test_messages_and_open_files_go_over_the_line_and_signals_of_schedulers_end_nothing(started, tmp_path):
    (tmp_path / "a").write_text("of the file")
    process = started(answer)
    with (tmp_path / "a").open("rb") as file:
        process.channel.send({"a": 1}, [file.fileno()])
    process.channel.send("more")
    assert process.channel.receive(60)[0] == ({"a": 1}, ["of the file"], True)
    assert process.channel.receive(60)[0] == ("more", [], True)
    assert process.channel.receive(0) is None


def test_one_that_is_killed_is_noticed(started):
    process = started(answer)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EOFError):
        process.channel.receive(60)
    with pytest.raises(EOFError):
        process.channel.send("nobody hears this")
    assert process.wait() == -signal.SIGKILL
    process.kill()


def until_the_end(line: Channel) -> None:
    """Work of the other process: leave with the end of the line."""
    try:
        line.receive()
    except EOFError:
        os._exit(7)


def test_the_end_of_the_line_is_heard(started):
    process = started(until_the_end)
    process.close()
    assert process.wait() == 7


def stuck(line: Channel) -> None:
    """Work of the other process: not to look at the line."""
    line.on_peer_exit(lambda: os._exit(8), lambda: 0.0)
    signal.pause()


def test_one_that_hangs_notices_the_end_of_the_line_too(started):
    process = started(stuck)
    process.close()
    assert process.wait() == 8


def leave_nothing_unread(line: Channel) -> None:
    """Work of the other process: say whether there is something unread, and receive it, until the line ends."""
    said = line.receive()
    assert said is not None
    while not line.has_unread():
        time.sleep(0.01)
    line.send("something")
    assert line.receive() == ("second", []) and not line.has_unread()
    line.send("nothing")


def test_what_was_not_received_yet_is_known(started):
    process = started(leave_nothing_unread)
    process.channel.send("first")
    process.channel.send("second")
    assert [process.channel.receive(), process.channel.receive()] == [("something", []), ("nothing", [])]
    process.close()
    assert process.wait() == 0


def test_it_keeps_no_connection_of_ours_open(started):
    """Whoever waits for the end of one would not learn that we have gone."""
    reading, writing = os.pipe()
    process = started(answer)
    process.channel.send("begun?")
    assert process.channel.receive(60) is not None
    os.close(writing)
    assert select.select([reading], [], [], 20)[0], "somebody else holds the other end"
    assert os.read(reading, 1) == b"", "end of file"
    os.close(reading)


def fail(line: Channel) -> None:
    """Work of the other process: a bug."""
    raise KeyError("a bug")


def test_a_bug_is_told_on_standard_error(started, capfd):
    assert started(fail).wait() == 1
    said = capfd.readouterr().err
    assert "Traceback" in said and "KeyError: 'a bug'" in said


def test_a_copy_runs_nothing_that_is_to_happen_at_our_end(tmp_path: Path):
    try:
        process = start_helper(until_the_end)
        process.close()
        assert process.wait() == 7
    finally:
        with (tmp_path / "ends").open("a") as file:
            file.write("x")
    assert (tmp_path / "ends").read_text() == "x"
