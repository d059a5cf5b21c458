"""The list of runs: found below a folder, their state from events and the process that trains, read from file ends."""

import json
import os
import socket

import pytest

import hlat
from hlat.reporting.run_status import read_status
from hlat.runtime.errors import DataError
from tests.support.commands import hlat as command
from tests.support.reporting import event, line, resolved_recipe, write_run

ENDS = {
    "finished": event("end", 10, step=100, reason="finished"),
    "stopped": event("end", 10, step=50, reason="SIGTERM"),
    "failed": event("error", 10, step=50, message="disk full"),
    "restarting": event("incident", 10, step=50, cause="SIGKILL", restart=True),
}


@pytest.mark.parametrize("state", ENDS)
def test_the_last_event_is_the_state(tmp_path, state):
    start = event("start", 0, step=0, recipe=resolved_recipe())
    write_run(tmp_path / "a" / "run", [line(10), line(20)], [start, ENDS[state]])
    (found,) = hlat.runs(tmp_path)
    assert (found.state, found.step, found.total_steps, found.loss) == (state, 20, 100, 8.0 - 20 / 50)
    assert found.path == tmp_path / "a" / "run" and found.tokens_per_second == 500.0


def test_an_incident_after_which_nothing_is_restarted_is_a_failure(tmp_path):
    events = [event("start", 0, step=0), event("incident", 10, step=50, cause="SIGKILL", restart=False)]
    (found,) = hlat.runs(write_run(tmp_path, [line(10)], events))
    assert (found.state, found.reason) == ("failed", "SIGKILL")


def test_the_run_that_was_updated_last_comes_first(tmp_path):
    for name, seconds in (("a", 2000), ("b", 3000), ("c", 1000)):
        run = write_run(tmp_path / name, [line(10)])
        os.utime(run / "metrics.jsonl", (0, seconds))
        os.utime(run / "events.jsonl", (0, 0))
    assert [(run.path.name, run.updated.timestamp()) for run in hlat.runs(tmp_path)] == [
        ("b", 3000),
        ("a", 2000),
        ("c", 1000),
    ]


def test_a_run_without_an_end_is_running_while_its_process_is_there(tmp_path):
    run = write_run(tmp_path, [line(10)])
    lock = run / ".lock"
    states = {}
    for name, content in {
        "mine": f"pid {os.getpid()} on {socket.gethostname()}, launcher none",
        "gone": f"pid {2**22 + 1} on {socket.gethostname()}, launcher none",
        "elsewhere": "pid 1 on another-machine, launcher none",
        "damaged": "\0\0",
    }.items():
        lock.write_text(content)
        states[name] = hlat.runs(run)[0].state
    assert states == {"mine": "running", "gone": "killed", "elsewhere": "unknown", "damaged": "killed"}
    assert read_status(run, []).state == "killed"


def test_only_the_end_of_the_metrics_is_read(tmp_path):
    run = write_run(tmp_path / "run", [line(10), line(20)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "lo')
    assert hlat.runs(tmp_path)[0].step == 20
    (run / "metrics.jsonl").write_text("not json\n" + json.dumps(line(7)) + "\n")
    assert hlat.runs(tmp_path)[0].step == 7, "a damaged line before is not looked at"


def test_the_command_lists_runs_and_escapes_names(tmp_path):
    write_run(tmp_path / "one", [line(10)], [event("start", 0, step=0), ENDS["finished"]])
    write_run(tmp_path / "two\x1b[2J", [])
    done = command("runs", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and len(done.stdout.splitlines()) == 3 and "finished" in done.stdout
    listed = json.loads(command("runs", tmp_path, "--json").stdout)
    assert {each["state"] for each in listed} == {"finished", "killed"}
    assert command("runs", tmp_path / "one" / "missing").returncode == 2


def test_folders_without_runs(tmp_path):
    assert hlat.runs(tmp_path) == []
    with pytest.raises(DataError, match="no such folder"):
        hlat.runs(tmp_path / "missing")


def test_the_command_writes_the_report(tmp_path):
    run = write_run(tmp_path / "run", [line(10), line(20)])
    done = command("report", run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"report: {run / 'report.html'}"
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert command("report", run, "-o", tmp_path / "page.html").returncode == 0 and (tmp_path / "page.html").is_file()
    refused = command("report", tmp_path)
    assert refused.returncode == 2 and "is not the folder of a run" in refused.stderr
