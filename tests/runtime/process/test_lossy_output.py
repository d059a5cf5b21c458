"""Output ends no work: a stream takes everything, and what its descriptor refuses is counted and told."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlat.runtime import process as lossy_output
from hlat.runtime.errors import StorageError
from hlat.runtime.process import check_result, let_output_be_lost, lossy_stream, lost_output

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream and no choice of another test."""
    monkeypatch.setattr(lossy_output, "_outputs", type(lossy_output._outputs)())
    monkeypatch.setattr(lossy_output, "_waits", True)


@pytest.fixture
def full() -> Iterator[int]:
    descriptor = os.open(FULL, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@needs_full
def test_lines_that_a_full_disk_refuses_are_told_before_the_first_that_it_takes(full: int, tmp_path: Path) -> None:
    stream = lossy_stream(full)
    for number in range(3):
        print("line", number, file=stream)
    assert lost_output() == (3, "No space left on device")
    with (tmp_path / "log").open("wb") as log:
        os.dup2(log.fileno(), full)  # space again
        print("line 3", file=stream)
        print("line 4", file=stream)
    said = (tmp_path / "log").read_text().splitlines()
    assert said == ["(3 lines of output lost: No space left on device)", "line 3", "line 4"]
    assert lost_output() == (3, "No space left on device")


def test_a_line_cut_by_the_end_of_the_disk_stays_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As write(2) has it: a full disk takes the beginning of a line, and refuses the rest."""
    write, room = os.write, [4]

    def little(descriptor: int, data: memoryview) -> int:
        if room and not room[0]:
            raise OSError(28, "No space left on device")
        taken = write(descriptor, data[: room[0]] if room else data)
        room[:] = [room[0] - taken] if room else []
        return taken

    with (tmp_path / "log").open("wb") as log:
        stream = lossy_stream(log.fileno())
        monkeypatch.setattr(os, "write", little)
        print("first line", file=stream)
        print("second", file=stream)
        room.clear()
        print("third", file=stream)
    said = (tmp_path / "log").read_text().splitlines()
    assert said == ["firs", "(2 lines of output lost: No space left on device)", "third"]


def test_work_goes_on_when_nobody_reads_its_pipe_and_every_line_is_read_or_counted() -> None:
    let_output_be_lost()
    reads, writes = os.pipe()
    stream = lossy_stream(writes)
    for number in range(40):
        print(f"{number:4} " + "x" * 5000, file=stream)  # 200 KB; a pipe of Linux has 64 KB
    lost, why = lost_output()
    assert lost and why == "nobody reads it"
    os.set_blocking(reads, False)
    said = os.read(reads, 1 << 20)
    print("read again", file=stream)
    said += os.read(reads, 1 << 20)
    lines = said.decode().splitlines()
    assert lines[-2:] == [f"({lost} lines of output lost: nobody reads it)", "read again"]
    whole = [line for line in lines if line.endswith("x" * 5000)]
    assert [int(line[:4]) for line in whole] == list(range(len(whole))) and len(whole) + lost == 40
    os.close(reads)
    print("closed", file=stream)
    assert lost_output() == (lost + 1, "Broken pipe")
    os.close(writes)


def test_a_pipe_that_another_process_made_non_blocking_loses_nothing() -> None:
    """As Node.js does with the pipes of its children: a full one then answers EAGAIN."""
    program = (
        "import sys; from hlat.runtime.process import lossy_stream; lossy_stream(1).write('x' * 1_000_000 + '\\n')"
    )
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with subprocess.Popen([sys.executable, "-c", program], stdout=writes) as process, os.fdopen(reads, "rb") as pipe:
        os.close(writes)
        assert pipe.read() == b"x" * 1_000_000 + b"\n"
    assert process.returncode == 0


@needs_full
def test_a_result_that_the_disk_refused_is_no_success_and_that_of_work_is(full: int) -> None:
    saved = os.dup(1)
    os.dup2(full, 1)
    try:
        stream = lossy_stream(1)
        print("result", file=stream)
        with pytest.raises(StorageError, match="standard output is incomplete: 1 line lost: No space left on device"):
            check_result()
        let_output_be_lost()
        check_result()
    finally:
        os.dup2(saved, 1)
        os.close(saved)


@needs_full
@pytest.mark.parametrize(
    ("redirection", "code"),
    [
        ("> /dev/full", 3),
        (">&-", 0),
        ("<&- >&- 2>&-", 0),
        pytest.param("2> /dev/full", 0, marks=pytest.mark.slow),
        pytest.param("> /dev/full 2>&1", 3, marks=pytest.mark.slow),
        pytest.param("| head -1", 0, marks=pytest.mark.slow),
    ],
)
def test_a_result_is_whole_or_the_exit_code_says_so(redirection: str, code: int) -> None:
    command = f"set -o pipefail; {sys.executable} -m hlat schema {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert ("lines lost: No space left on device" in done.stderr) == (code == 3 and "2>" not in redirection)
