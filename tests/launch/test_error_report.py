"""Error reports of failed processes can be read by hlat's launcher and by torchrun."""

import json

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hlat.launch.worker_process import describe_error, read_report, report_errors
from hlat.runtime.errors import DataError, StorageError

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] {} [127.0.0.1]:40324"


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def chained(error, cause=None):
    try:
        raise error from cause
    except Exception as raised:
        return raised


def fail(error, file, monkeypatch):
    """Fail like a process with this error; return its exit code."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as ended, report_errors():
        raise error
    return ended.value.code


def test_a_user_error_is_reported_with_message_and_exit_code(error_file, monkeypatch, capfd):
    assert fail(StorageError("disk full"), error_file, monkeypatch) == 3
    report = read_report(error_file)
    assert (report.kind, report.message, report.is_bug, report.exit_code) == ("own", "disk full", False, 3)
    assert capfd.readouterr() == ("", "")


def test_a_bug_is_reported_with_its_traceback(error_file, monkeypatch):
    assert fail(KeyError("wq"), error_file, monkeypatch) == 1
    report = read_report(error_file)
    assert report.is_bug and report.message.startswith("Traceback") and report.message.endswith("KeyError: 'wq'")


def test_mistakes_of_a_program_are_named_with_their_place(error_file, monkeypatch):
    here = "test_error_report.py:"
    for error in (chained(AttributeError("x")), chained(RuntimeError("stage 0 failed"), chained(TypeError("y")))):
        assert here in describe_error(error).mistake
    for error in (RuntimeError("NCCL error: unhandled system error"), OSError(5, "Input/output error"), DataError("z")):
        assert describe_error(chained(error)).mistake == ""
    fail(KeyError("wq"), error_file, monkeypatch)
    assert read_report(error_file).mistake.startswith("KeyError at ") and here in read_report(error_file).mistake


def forwarded(message):
    error = DataError(message)
    error.from_rank = 2
    return error


LOST = [
    RuntimeError(GLOO.format("Connection closed by peer")),
    RuntimeError(GLOO.format("Read error: Connection reset by peer")),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms"),
    dist.DistNetworkError("The client socket has failed to connect"),
    chained(StorageError("checkpoint: rank 1 has gone"), RuntimeError(GLOO.format("Connection closed by peer"))),
]
OWN = [
    ValueError("connection closed by peer"),
    RuntimeError("The size of tensor a (4) must match the size of tensor b (8)"),
    RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
    chained(StorageError("disk full"), OSError(28, "No space left on device")),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_connection_is_recognized(error):
    assert describe_error(error).kind == "connection"


@pytest.mark.parametrize("error", OWN, ids=str)
def test_other_errors_originate_in_this_process(error):
    assert describe_error(error).kind == "own"


def test_an_error_from_another_rank_is_forwarded():
    assert describe_error(forwarded("shard 3 is damaged")).kind == "forwarded"


@pytest.mark.parametrize("consequence", [LOST[0], forwarded("shard 3 is damaged")], ids=["lost", "forwarded"])
def test_torchrun_finds_the_cause_as_first_failure(tmp_path, monkeypatch, consequence):
    codes = [
        fail(consequence, tmp_path / "0.json", monkeypatch),
        fail(DataError("shard 3 is damaged"), tmp_path / "1.json", monkeypatch),
    ]
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(tmp_path / f"{rank}.json"))
        for rank, code in enumerate(codes)
    }
    report = ChildFailedError("hlat", failures)
    assert report.get_first_failure()[0] == 1
    assert "traceback : DataError: shard 3 is damaged" in str(report).partition("Root Cause")[2]


def test_without_a_launcher_the_error_is_raised(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(DataError, match="shard"), report_errors():
        raise DataError("shard 3 is damaged")


def test_the_error_is_raised_if_the_report_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such" / "folder.json"))
    with pytest.raises(DataError, match="shard"), report_errors():
        raise DataError("shard 3 is damaged")


@pytest.mark.parametrize("rank, raised", [("0", KeyboardInterrupt), ("1", SystemExit)])
def test_only_rank_0_reports_an_interrupt(error_file, monkeypatch, rank, raised):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(raised), report_errors():
        raise KeyboardInterrupt
    assert not error_file.exists()


def test_a_file_of_torchs_own_handler_is_not_a_report(tmp_path):
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": "x", "timestamp": "1"}}}))
    assert read_report(file) is None and read_report(tmp_path / "missing.json") is None
