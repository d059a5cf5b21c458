"""What a failed process writes is what our launcher and torchrun read."""

import json

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hlat.launch.error_report import describe_error, read_report, report_errors
from hlat.runtime import DataError, StorageError

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] {} [127.0.0.1]:40324"


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def caught(error, cause=None):
    try:
        raise error from cause
    except Exception as raised:
        return raised


def fail(error, file, monkeypatch):
    """End as a process does that meets an error."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as ended, report_errors():
        raise error
    return ended.value.code


def test_a_users_mistake_is_its_message_and_its_exit_code(error_file, monkeypatch, capfd):
    assert fail(StorageError("disk full"), error_file, monkeypatch) == 3
    report = read_report(error_file)
    assert (report.kind, report.message, report.is_bug, report.exit_code) == ("own", "disk full", False, 3)
    assert capfd.readouterr() == ("", "")


def test_a_bug_is_its_traceback(error_file, monkeypatch):
    assert fail(KeyError("wq"), error_file, monkeypatch) == 1
    report = read_report(error_file)
    assert report.is_bug and report.message.startswith("Traceback") and report.message.endswith("KeyError: 'wq'")


def told(message):
    error = DataError(message)
    error.from_rank = 2
    return error


LOST = [
    RuntimeError(GLOO.format("Connection closed by peer")),
    RuntimeError(GLOO.format("Read error: Connection reset by peer")),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms"),
    dist.DistNetworkError("The client socket has failed to connect"),
    caught(StorageError("checkpoint: rank 1 has gone"), RuntimeError(GLOO.format("Connection closed by peer"))),
]
OWN = [
    ValueError("connection closed by peer"),
    RuntimeError("The size of tensor a (4) must match the size of tensor b (8)"),
    RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
    caught(StorageError("disk full"), OSError(28, "No space left on device")),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_connection_is_known_for_one(error):
    assert describe_error(error).kind == "connection"


@pytest.mark.parametrize("error", OWN, ids=str)
def test_an_error_of_this_process_is_its_own(error):
    assert describe_error(error).kind == "own"


def test_an_error_that_another_rank_told_is_not_its_own():
    assert describe_error(told("shard 3 is damaged")).kind == "forwarded"


@pytest.mark.parametrize("followed", [LOST[0], told("shard 3 is damaged")], ids=["lost", "forwarded"])
def test_torchrun_takes_the_cause_for_the_first_failure(tmp_path, monkeypatch, followed):
    codes = [
        fail(followed, tmp_path / "0.json", monkeypatch),
        fail(DataError("shard 3 is damaged"), tmp_path / "1.json", monkeypatch),
    ]
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(tmp_path / f"{rank}.json"))
        for rank, code in enumerate(codes)
    }
    report = ChildFailedError("hlat", failures)
    assert report.get_first_failure()[0] == 1
    assert "traceback : DataError: shard 3 is damaged" in str(report).partition("Root Cause")[2]


def test_without_anybody_to_tell_the_error_stays_what_it_was(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(DataError, match="shard"), report_errors():
        raise DataError("shard 3 is damaged")


def test_a_report_that_cannot_be_written_leaves_the_error_to_the_console(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such" / "folder.json"))
    with pytest.raises(DataError, match="shard"), report_errors():
        raise DataError("shard 3 is damaged")


@pytest.mark.parametrize("rank, seen", [("0", KeyboardInterrupt), ("1", SystemExit)])
def test_of_many_that_are_interrupted_the_first_says_so(error_file, monkeypatch, rank, seen):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(seen), report_errors():
        raise KeyboardInterrupt
    assert not error_file.exists()


def test_a_file_that_torchs_own_handler_wrote_is_no_report_of_ours(tmp_path):
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": "x", "timestamp": "1"}}}))
    assert read_report(file) is None and read_report(tmp_path / "missing.json") is None
