"""Each process writes its output to its own log; only rank 0 prints on the console, which stays a terminal."""

import faulthandler
import io
import os
import sys
from contextlib import redirect_stdout

import pytest
from rich.console import Console
from rich.progress import Progress

from hlat.runtime.errors import StorageError
from hlat.runtime.logs import log_path, rank_log


class Terminal(io.StringIO):
    """A console that reports to be a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        return 1


def log_lines(run_dir, rank):
    """Lines of a log after its header."""
    return log_path(run_dir, rank).read_text().splitlines()[1:]


def test_a_single_process_has_no_log(tmp_path, capsys):
    with rank_log(tmp_path, 0, 1):
        print("here")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == "here\n"


def test_rank_0_prints_on_the_console_and_in_its_log(tmp_path, capsys):
    with rank_log(tmp_path, 0, 2):
        print("step 1")
        print("careful", file=sys.stderr)
    assert log_lines(tmp_path, 0) == ["step 1", "careful"]
    assert capsys.readouterr() == ("step 1\n", "careful\n")


def test_the_console_of_rank_0_stays_a_terminal(tmp_path):
    with redirect_stdout(Terminal()) as terminal, rank_log(tmp_path, 0, 2):
        assert sys.stdout.isatty() and sys.stdout.fileno() == 1 and sys.stdout.encoding == "utf-8"
        assert Console(file=sys.stdout).is_terminal
        print("x", flush=True)
    assert terminal.getvalue() == "x\n" and log_lines(tmp_path, 0) == ["x"]


def test_a_progress_bar_is_logged_as_lines_without_escape_sequences(tmp_path):
    with redirect_stdout(Terminal()) as terminal, rank_log(tmp_path, 0, 2):
        console = Console(file=sys.stdout, force_terminal=True, width=60)
        with Progress("{task.description}", console=console, auto_refresh=False) as bar:
            task = bar.add_task("step 0")
            for step in (1, 2):
                bar.update(task, description=f"[red]step {step}[/red]", refresh=True)
            bar.console.print("a message")
    assert "\x1b[" in terminal.getvalue(), "the progress bar is drawn on the terminal"
    written = log_lines(tmp_path, 0)
    assert "\x1b" not in "".join(written) and "\r" not in "".join(written)
    assert [line.strip() for line in written if line.strip()][:3] == ["step 0", "step 1", "step 2"]
    assert "a message" in [line.strip() for line in written]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_log_that_is_rotated_goes_on_under_its_name(tmp_path, rank):
    """Output of C++ code too, which knows descriptors only."""
    with rank_log(tmp_path, rank, 4):
        print("before")
        log_path(tmp_path, rank).rename(tmp_path / "old.log")
        print("after")
        if rank:
            os.write(1, b"descriptor 1\n")
    assert (tmp_path / "old.log").read_text().splitlines()[1:] == ["before"]
    assert log_path(tmp_path, rank).read_text().splitlines() == ["after", "descriptor 1"][: 1 + (rank > 0)]


def test_other_ranks_print_only_to_their_log(tmp_path, capfd):
    with rank_log(tmp_path, 3, 4):
        print("python")
        os.write(1, b"descriptor 1\n")
        os.write(2, b"descriptor 2\n")
        os.system("echo a child")
    os.write(2, b"after\n")
    assert sorted(log_lines(tmp_path, 3)) == sorted(["python", "descriptor 1", "descriptor 2", "a child"])
    assert capfd.readouterr() == ("", "after\n")


def test_a_second_start_appends(tmp_path, capfd):
    for _ in range(2):
        with rank_log(tmp_path, 1, 2):
            print("again")
    text = log_path(tmp_path, 1).read_text()
    assert text.count("again\n") == 2 and text.count("==== ") == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_logged_and_not_printed(tmp_path, capfd, rank):
    with pytest.raises(ZeroDivisionError), rank_log(tmp_path, rank, 2):
        raise ZeroDivisionError("loss / tokens")
    with pytest.raises(StorageError), rank_log(tmp_path, rank, 2):
        raise StorageError("disk full")
    text = log_path(tmp_path, rank).read_text()
    assert "Traceback" in text and "ZeroDivisionError: loss / tokens" in text
    assert text.endswith("error: disk full\n") and "StorageError" not in text
    assert capfd.readouterr() == ("", "")


def test_the_stacks_of_a_crash_are_logged(tmp_path, capfd):
    before = faulthandler.is_enabled()
    child = os.fork()
    if child == 0:  # pragma: no cover
        with rank_log(tmp_path, 0, 2):
            faulthandler._sigsegv()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert "Segmentation fault" in "\n".join(log_lines(tmp_path, 0))
    assert faulthandler.is_enabled() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")  # noqa: PTH110
def test_a_full_disk_does_not_end_the_run(tmp_path, capsys):
    log_path(tmp_path, 0).parent.mkdir()
    log_path(tmp_path, 0).symlink_to("/dev/full")
    with rank_log(tmp_path, 0, 2):
        print("continues")
    assert capsys.readouterr().out == "continues\n"


def test_a_log_that_cannot_be_opened_is_reported(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"rank-00000.log.*run.dir"), rank_log(tmp_path, 0, 2):
        pass
