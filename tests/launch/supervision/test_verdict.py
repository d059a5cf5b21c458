"""Blame for a hang, from the reports of the ranks that could write one."""

import dataclasses
import os

import pytest

from hlat.launch.supervision.self_watch import HangReport, HangReports, judge
from tests.support.resilience.readings import reading


def report(rank, host, waiting=True, since=-23.0, step=20, late=True, location="parallel/data_parallel.py:9 reduce"):
    beat = reading(rank, phase="reduce", step=step, since=since, alive_at=0.0, waiting=waiting, location=location)
    return HangReport(beat, host, late)


def verdict(reports, world, local_world=2):
    return judge(reports, reports[0], world, local_world)


def test_a_host_whose_ranks_are_all_silent_is_named():
    found = verdict([report(0, "a"), report(1, "a")], 6)
    assert (found.ranks, found.phase, found.step, found.seconds) == ([2, 3, 4, 5], "reduce", 21, 23.0)
    assert found.why == "no sign of life from host 1 (ranks 2 to 3), host 2 (ranks 4 to 5)"


def test_a_silent_rank_of_a_host_with_others_is_named_with_its_host():
    found = verdict([report(0, "a"), report(1, "a"), report(3, "b")], 4)
    assert found.ranks == [2] and found.why == "no sign of life from rank 2 on b"
    assert verdict([report(0, "a"), report(1, "a"), report(3, "b")], 4, None).why == "no sign of life from rank 2"


def test_a_rank_that_works_is_blamed_rather_than_those_that_wait_for_it():
    found = verdict([report(0, "a"), report(1, "b", waiting=False, late=False, location="training/loop.py:5 f")], 2, 1)
    assert found.ranks == [1] and found.why == "waits for no other rank, in training/loop.py:5 f"


def test_if_all_ranks_of_several_hosts_wait_the_network_is_suspected():
    found = verdict([report(rank, f"node{rank // 2}") for rank in range(4)], 4)
    assert found.ranks == [0, 1, 2, 3]
    assert found.why == "all ranks wait for one another, on node0, node1: look for a broken network between them"
    assert "network" not in verdict([report(0, "a"), report(1, "a")], 2).why


def test_reports_are_read_as_written_and_an_alarm_is_seen_once(tmp_path):
    first, second = HangReports(tmp_path, 0), HangReports(tmp_path, 1)
    assert not second.alarmed() and first.read(2) == []
    written = report(1, "b")
    first.raise_alarm()
    assert second.alarmed() and not second.alarmed()
    second.write(written)
    assert first.read(3) == [written]
    first.raise_alarm()
    assert second.alarmed()


def test_alarm_and_own_report_of_an_earlier_attempt_do_not_count(tmp_path):
    earlier = HangReports(tmp_path, 0)
    earlier.raise_alarm()
    for rank in (0, 1):
        HangReports(tmp_path, rank).write(report(rank, "a"))
    later = HangReports(tmp_path, 0)
    assert not later.alarmed()
    assert [found.beat.rank for found in later.read(2)] == [1], "each rank removes its own"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"beat": {"rank": 1}, "host": "a", "late": true}'])
def test_a_damaged_report_counts_as_none(tmp_path, content):
    reports = HangReports(tmp_path, 0)
    reports.write(report(0, "a"))
    (tmp_path / "logs" / "hang" / "rank-00001.json").write_text(content)
    assert reports.read(2) == [report(0, "a")]


def test_times_are_ages_so_that_clocks_of_hosts_do_not_matter():
    beat = dataclasses.replace(report(0, "a").beat, since=100.0, alive_at=119.5)
    found = HangReport(beat.aged(120.0), "a", late=False)
    assert (found.beat.since, found.beat.alive_at, found.late) == (-20.0, -0.5, False)


def test_a_report_of_an_earlier_alarm_after_which_the_run_went_on_counts_as_none(tmp_path):
    reports, others = HangReports(tmp_path, 0), HangReports(tmp_path, 1)
    reports.raise_alarm()
    reports.write(report(0, "a"))
    others.write(report(1, "a"))
    assert [found.beat.rank for found in reports.read(2)] == [0, 1]
    alarm, file = tmp_path / "logs" / "hang" / "alarm", tmp_path / "logs" / "hang" / "rank-00001.json"
    before = alarm.stat().st_mtime - 3
    os.utime(file, (before, before))
    assert [found.beat.rank for found in reports.read(2)] == [0]
    assert [found.beat.rank for found in reports.read(2, margin=4.0)] == [0, 1], "of a rank that ended just before"
