"""One failure makes several. Whatever order they are noticed in, the user reads the one that the others came of."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.launch.error_report import ErrorReport
from hlat.launch.root_cause import find_root_cause
from hlat.launch.wait import ProcessExit
from hlat.runtime.process import STOP_EXIT_CODES, STOP_SIGNALS, stop_exit_code

_NOBODY = 65534
NOWHERE = Path("/no/such/run")
OURS = 1.0  # the second in which it all happens


def end(rank, code, report=None, noticed=OURS, was_signalled=False):
    return ProcessExit(rank, code, report, noticed, was_signalled)


def own(message="run.dir: full", code=3, at=OURS, is_bug=False):
    return ErrorReport("own", message, is_bug, code, at)


def connection(at=OURS):
    return ErrorReport("connection", "RuntimeError: Connection closed by peer", True, 1, at)


def told(message, code=3, at=OURS):
    return ErrorReport("forwarded", message, False, code, at)


CONSEQUENCES = st.one_of(
    st.builds(connection, st.floats(0, 2)).map(lambda report: (1, report, False)),
    st.builds(lambda at: told("rank 9: run.dir: full", 3, at), st.floats(0, 2)).map(lambda report: (3, report, False)),
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
def test_the_cause_is_named_whoever_was_noticed_first(cause, followers, data):
    code, report, exit_code, message = CAUSES[cause]
    rank = data.draw(st.integers(0, len(followers)))
    ends = [
        *(end(at, *fate[:2], noticed, fate[2]) for at, (fate, noticed) in enumerate(followers[:rank])),
        end(rank, code, report),
        *(end(at, *fate[:2], noticed, fate[2]) for at, (fate, noticed) in enumerate(followers[rank:], rank + 1)),
    ]
    verdict = find_root_cause(ends, [], NOWHERE)
    assert verdict.exit_code == exit_code
    assert verdict.message.startswith(message.format(rank))


@given(times=st.lists(st.floats(0, 100), min_size=2, max_size=5, unique=True))
def test_of_several_causes_the_first_by_time(times):
    ends = [end(rank, 3, own(f"shard {rank}", at=at)) for rank, at in enumerate(times)]
    first = times.index(min(times))
    assert find_root_cause(ends, [], NOWHERE).message == f"rank {first} failed: shard {first}"


def test_what_every_rank_says_is_said_as_one_process_would():
    ends = [end(0, 2, own("data.path: not there", 2)), end(1, 2, told("data.path: not there", 2))]
    verdict = find_root_cause(ends, [], NOWHERE)
    assert (verdict.exit_code, verdict.message) == (2, "error: data.path: not there")


def test_a_process_that_ended_without_a_word_is_named_with_its_exit_code():
    verdict = find_root_cause([end(0, 1, connection(0.0)), end(1, 7)], [], NOWHERE)
    assert (verdict.exit_code, verdict.message) == (7, "rank 1 ended with exit code 7 without an error report")


def test_connections_that_were_lost_for_no_known_reason_are_still_told():
    ends = [end(0, 1, connection(2.0)), end(1, 1, connection(1.0))]
    assert find_root_cause(ends, [], NOWHERE).message.startswith("rank 1 failed:\nRuntimeError")


def saved(rank, number):
    return end(rank, stop_exit_code(number))


def too_early(rank, number):
    return end(rank, -number, was_signalled=True)


def lost(rank, number):
    return end(rank, 1, connection())


def finished(rank, number):
    return end(rank, 0)


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize(
    "fates", [(saved, saved), (too_early, too_early), (lost, too_early), (lost, saved), (lost, lost), (finished, saved)]
)
def test_a_run_that_was_asked_to_stop_ends_as_one_process_would(number, fates):
    verdict = find_root_cause([fate(rank, number) for rank, fate in enumerate(fates)], [number], NOWHERE)
    assert (verdict.exit_code, verdict.message) == (stop_exit_code(number), "")


@pytest.mark.parametrize("code", STOP_EXIT_CODES)
def test_a_rank_that_was_asked_to_stop_before_it_could_talk_stops_the_run(code):
    verdict = find_root_cause([end(0, code), end(1, 1, connection())], [], NOWHERE)
    assert (verdict.exit_code, verdict.message, verdict.cause) == (code, "", None)


def test_a_save_that_fails_on_the_way_out_is_a_failure():
    ends = [end(0, 3, told("rank 1: run.dir: full")), end(1, 3, own())]
    verdict = find_root_cause(ends, [signal.SIGTERM], NOWHERE)
    assert (verdict.exit_code, verdict.message) == (3, "rank 1 failed: run.dir: full")


@pytest.mark.parametrize("passed_on", [[], [signal.SIGTERM]])
def test_a_run_that_finished_has_finished(passed_on):
    verdict = find_root_cause([end(0, 0), end(1, 0)], passed_on, NOWHERE)
    assert (verdict.exit_code, verdict.message) == (0, "")


def test_logs_are_named_where_there_are_any(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-00001.log").touch()
    verdict = find_root_cause([end(0, 1, connection()), end(1, -signal.SIGSEGV)], [], tmp_path)
    assert verdict.message == (
        f"rank 1 was killed by SIGSEGV; see {logs}/rank-00001.log\neach rank's log: {logs}/rank-*.log"
    )


@pytest.mark.parametrize(
    "name", ["closed/run", "\ud800", "run\0"], ids=["a folder not to be entered", "no text", "zero"]
)
def test_a_folder_that_cannot_be_looked_at_leaves_the_explanation_as_it_is(tmp_path, name):
    """It may be the very error that is explained."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    ends = [end(0, -signal.SIGKILL), end(1, 0)]
    before = os.geteuid()
    if before == 0:
        os.seteuid(_NOBODY)  # root may enter everything
    try:
        verdict = find_root_cause(ends, [], tmp_path / name)
    finally:
        os.seteuid(before)
        closed.chmod(0o700)
    assert verdict.message == "rank 0 was killed by SIGKILL, which the system sends when memory runs out"
