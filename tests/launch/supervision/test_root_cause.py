"""One failure causes others. In whatever order they are noticed, the user reads the root cause."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.launch.supervision.incidents import find_root_cause
from hlat.launch.supervision.running_ranks import ProcessExit
from hlat.launch.worker_process import ErrorReport
from hlat.runtime.logs import log_path
from hlat.runtime.process import STOP_EXIT_CODES, STOP_SIGNALS, stop_exit_code

_NOBODY = 65534
NOWHERE = Path("/no/such/run")
NOW = 1.0  # time of all events, in seconds


def process_exit(rank, code, report=None, noticed=NOW, was_signalled=False):
    return ProcessExit(rank, code, report, noticed, was_signalled)


def own(message="run.dir: full", code=3, at=NOW, is_bug=False):
    return ErrorReport("own", message, is_bug, code, at)


def connection(at=NOW):
    return ErrorReport("connection", "RuntimeError: Connection closed by peer", True, 1, at)


def forwarded(message, code=3, at=NOW):
    return ErrorReport("forwarded", message, False, code, at)


CONSEQUENCES = st.one_of(
    st.builds(connection, st.floats(0, 2)).map(lambda report: (1, report, False)),
    st.builds(lambda at: forwarded("rank 9: run.dir: full", 3, at), st.floats(0, 2)).map(
        lambda report: (3, report, False)
    ),
    st.just((-signal.SIGTERM, None, True)),
    st.just((-signal.SIGKILL, None, True)),
    st.just((-signal.SIGABRT, None, False)),
    st.just((75, None, False)),
    st.just((0, None, False)),
)
CAUSES = {
    "a mistake": (3, own(), 3, "rank {} failed: run.dir: full"),
    "a bug": (1, own("Traceback\nKeyError: 1", 1, is_bug=True), 1, "rank {} failed:\nTraceback\nKeyError: 1"),
    "killed": (-signal.SIGKILL, None, 1, "rank {} was killed by SIGKILL"),
    "crashed": (-signal.SIGSEGV, None, 1, "rank {} was killed by SIGSEGV"),
    "terminated": (-signal.SIGTERM, None, 1, "rank {} was killed by SIGTERM"),
}


@pytest.mark.parametrize("cause", CAUSES)
@given(followers=st.lists(st.tuples(CONSEQUENCES, st.floats(0, 2)), min_size=1, max_size=6), data=st.data())
def test_the_cause_is_found_in_any_order_of_notice(cause, followers, data):
    code, report, exit_code, message = CAUSES[cause]
    rank = data.draw(st.integers(0, len(followers)))
    exits = [
        *(process_exit(at, *fate[:2], noticed, fate[2]) for at, (fate, noticed) in enumerate(followers[:rank])),
        process_exit(rank, code, report),
        *(
            process_exit(at, *fate[:2], noticed, fate[2])
            for at, (fate, noticed) in enumerate(followers[rank:], rank + 1)
        ),
    ]
    outcome = find_root_cause(exits, [], NOWHERE)
    assert outcome.exit_code == exit_code
    assert outcome.message.startswith(message.format(rank))


@given(times=st.lists(st.floats(0, 100), min_size=2, max_size=5, unique=True))
def test_the_earliest_of_several_causes_is_reported(times):
    exits = [process_exit(rank, 3, own(f"shard {rank}", at=at)) for rank, at in enumerate(times)]
    first = times.index(min(times))
    assert find_root_cause(exits, [], NOWHERE).message == f"rank {first} failed: shard {first}"


def test_an_error_on_all_ranks_is_reported_as_by_a_single_process():
    exits = [
        process_exit(0, 2, own("data.path: does not exist", 2)),
        process_exit(1, 2, forwarded("data.path: does not exist", 2)),
    ]
    outcome = find_root_cause(exits, [], NOWHERE)
    assert (outcome.exit_code, outcome.message) == (2, "error: data.path: does not exist")


def test_an_exit_without_a_report_is_reported_with_its_code():
    outcome = find_root_cause([process_exit(0, 1, connection(0.0)), process_exit(1, 7)], [], NOWHERE)
    assert (outcome.exit_code, outcome.message) == (7, "rank 1 ended with exit code 7 without an error report")


def test_lost_connections_without_a_cause_are_reported():
    exits = [process_exit(0, 1, connection(2.0)), process_exit(1, 1, connection(1.0))]
    assert find_root_cause(exits, [], NOWHERE).message.startswith("rank 1 failed:\nRuntimeError")


def exited_after_saving(rank, number):
    return process_exit(rank, stop_exit_code(number))


def ended_by_the_signal(rank, number):
    return process_exit(rank, -number, was_signalled=True)


def lost_its_peer(rank, number):
    return process_exit(rank, 1, connection())


def finished(rank, number):
    return process_exit(rank, 0)


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize(
    "fates",
    [
        (exited_after_saving, exited_after_saving),
        (ended_by_the_signal, ended_by_the_signal),
        (lost_its_peer, ended_by_the_signal),
        (lost_its_peer, exited_after_saving),
        (lost_its_peer, lost_its_peer),
        (finished, exited_after_saving),
    ],
)
def test_a_stopped_run_ends_like_a_single_process(number, fates):
    outcome = find_root_cause([fate(rank, number) for rank, fate in enumerate(fates)], [number], NOWHERE)
    assert (outcome.exit_code, outcome.message) == (stop_exit_code(number), "")


@pytest.mark.parametrize("code", STOP_EXIT_CODES)
def test_a_rank_stopped_before_it_joined_stops_the_run(code):
    outcome = find_root_cause([process_exit(0, code), process_exit(1, 1, connection())], [], NOWHERE)
    assert (outcome.exit_code, outcome.message, outcome.cause) == (code, "", None)


def test_a_failed_save_while_stopping_is_a_failure():
    exits = [process_exit(0, 3, forwarded("rank 1: run.dir: full")), process_exit(1, 3, own())]
    outcome = find_root_cause(exits, [signal.SIGTERM], NOWHERE)
    assert (outcome.exit_code, outcome.message) == (3, "rank 1 failed: run.dir: full")


@pytest.mark.parametrize("signals", [[], [signal.SIGTERM]])
def test_a_finished_run_succeeds_despite_a_late_signal(signals):
    outcome = find_root_cause([process_exit(0, 0), process_exit(1, 0)], signals, NOWHERE)
    assert (outcome.exit_code, outcome.message) == (0, "")


def test_existing_logs_are_named(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-00001.log").touch()
    outcome = find_root_cause([process_exit(0, 1, connection()), process_exit(1, -signal.SIGSEGV)], [], tmp_path)
    assert outcome.message == (
        f"rank 1 was killed by SIGSEGV; see {logs}/rank-00001.log\neach rank's log: {logs}/rank-*.log"
    )


@pytest.mark.parametrize("name", ["closed/run", "\ud800", "run\0"], ids=["no permission", "surrogate", "null byte"])
def test_an_inaccessible_folder_does_not_change_the_explanation(tmp_path, name):
    """The inaccessible folder may be the error that is being explained."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    exits = [process_exit(0, -signal.SIGKILL), process_exit(1, 0)]
    before = os.geteuid()
    if before == 0:
        os.seteuid(_NOBODY)  # root may enter every folder
    try:
        outcome = find_root_cause(exits, [], tmp_path / name)
    finally:
        os.seteuid(before)
        closed.chmod(0o700)
    assert outcome.message == "rank 0 was killed by SIGKILL, which the system sends when memory runs out"


def crash(message: str, at: float = NOW) -> ErrorReport:
    return ErrorReport("own", f"Traceback\nRuntimeError: {message}", True, 1, at)


def test_a_broken_device_is_the_cause_and_not_those_that_waited_for_it():
    waited = crash("nrt_execute failed: status=1200", at=0.5)
    broken = crash("nrt_execute failed: NRT_EXEC_HW_ERR_NC_UE", at=1.5)
    exits = [process_exit(0, 1, waited), process_exit(1, 1, broken), process_exit(2, 1, waited)]
    outcome = find_root_cause(exits, [], NOWHERE)
    assert outcome.cause is exits[1]
    assert "NRT_EXEC_HW_ERR_NC_UE: memory of a core has a parity error. Replace the instance" in outcome.message


def test_a_worker_that_died_is_the_cause_of_a_hang_in_collectives():
    waited = crash("suspected hang in collectives operation", at=0.5)
    exits = [process_exit(0, 1, waited), process_exit(1, -signal.SIGSEGV, noticed=2.0)]
    assert find_root_cause(exits, [], NOWHERE).cause is exits[1]
    alone = find_root_cause(exits[:1], [], NOWHERE)
    assert alone.cause is exits[0] and "Look at the other workers first" in alone.message


def test_a_device_fault_is_read_from_the_log_of_a_process_that_left_no_report(tmp_path):
    log = log_path(tmp_path, 1)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"\xff" * 100_000 + b"\nnrt: NRT_EXEC_HW_ERR_HBM_UE\n")
    exits = [process_exit(0, 1, crash("KeyError: 1", at=0.1)), process_exit(1, -signal.SIGABRT)]
    outcome = find_root_cause(exits, [], tmp_path)
    assert outcome.cause is exits[1] and "device memory has an error that cannot be repaired" in outcome.message


def test_a_rank_that_waited_for_a_broken_gpu_is_not_the_cause():
    waited = crash("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", at=0.5)
    remote = crash("ncclRemoteError: A call failed possibly due to a network error", at=0.7)
    broken = crash("CUDA error: uncorrectable ECC error encountered", at=1.5)
    exits = [process_exit(0, 1, waited), process_exit(1, 1, remote), process_exit(2, 1, broken)]
    outcome = find_root_cause(exits, [], NOWHERE)
    assert outcome.cause is exits[2] and "Reset the GPU" in outcome.message
    killed = [process_exit(0, 1, remote), process_exit(1, -signal.SIGKILL, noticed=2.0)]
    assert find_root_cause(killed, [], NOWHERE).cause is killed[1]
