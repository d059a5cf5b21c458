"""Metrics of a run: its state from its files, and Prometheus' text format, which its own client reads."""

import json
import math
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat.launch.metrics_server import MetricFamily, ObservedRun, RunObserver, exposition, metric_families
from hlat.resilience import GOODPUT_FILE, Goodput
from hlat.resilience.heartbeat import Heartbeat, heartbeat_path
from hlat.runtime.progress import enter_phase
from hlat.tracking import EventLog
from tests.support.launch.metrics_lint import parse

# The client's parser splits lines as str.splitlines does; the format's only line end is \n.
TEXTS = st.text(st.characters(exclude_characters="\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", exclude_categories=["Cs"]))


@given(TEXTS, st.floats())
def test_any_label_and_any_number_come_back(text: str, value: float) -> None:
    family = MetricFamily("hlat_run_info", "gauge", "A run,\nby \\ name.", [({"name": text}, value)])
    ((name, labels),) = (found := parse(exposition([family])))
    assert (name, dict(labels)) == ("hlat_run_info", {"name": text})
    (number,) = found.values()
    assert number == value or (math.isnan(number) and math.isnan(value))


@pytest.mark.parametrize(
    "family",
    [
        MetricFamily("hlat_restarts", "counter", "x", [({}, 1.0)]),
        MetricFamily("hlat_steps_total", "gauge", "x", [({}, 1.0)]),
        MetricFamily("hlat_age_minutes", "gauge", "x", [({}, 1.0)]),
        MetricFamily("hlat_Step", "gauge", "x", [({}, 1.0)]),
        MetricFamily("hlat_step", "gauge", "x", [({}, 1.0), ({}, 2.0)]),
        MetricFamily("hlat_step", "gauge", "", [({}, 1.0)]),
    ],
    ids=["counter without _total", "gauge with _total", "unit", "case", "twice", "no help"],
)
def test_the_check_of_names_finds_mistakes(family: MetricFamily) -> None:
    with pytest.raises(AssertionError):
        parse(exposition([family]))


def test_a_metric_without_series_is_left_out() -> None:
    assert exposition([MetricFamily("hlat_loss", "gauge", "Loss.")]) == ""


class Observed:
    """A run of one rank with a clock of its own, observed; wall clock and monotonic clock are equal."""

    def __init__(self, folder: Path, hang_seconds: float | None = 2.0) -> None:
        self.now, self.folder, self.step = 1000.0, folder, 0
        self.run = ObservedRun("tiny", folder, folder / "beats", 100, hang_seconds, os.getpid(), self.now)
        self.observer = RunObserver(self.run, self.clock, self.clock)
        self.begin(0)

    def clock(self) -> float:
        return self.now

    def begin(self, attempt: int) -> None:
        path = heartbeat_path(self.run.beats / f"attempt-{attempt}", 0)
        path.parent.mkdir(parents=True)
        self.beat = Heartbeat(path, self.clock)
        self.beat.set_step_counter(lambda: self.step)

    def phases(self, **seconds: float) -> None:
        for phase, duration in seconds.items():
            self.beat(phase)
            self.now += duration

    def metrics(self) -> dict[str, float]:
        """Series without labels, by name."""
        found = parse(exposition(metric_families(self.run, self.observer.observe())))
        return {name: value for (name, labels), value in found.items() if not labels}


@pytest.fixture
def observed(tmp_path: Path) -> Observed:
    enter_phase("start")  # a heartbeat begins with the phase of its process, in which other tests have trained
    return Observed(tmp_path)


@pytest.mark.parametrize(("phase", "seconds"), [("start", 1e5), ("forward", 1700.0), ("checkpoint", 1700.0)])
def test_preparing_compiling_and_saving_are_no_hangs(observed: Observed, phase: str, seconds: float) -> None:
    if phase != "start":
        observed.phases(data=0.1, **{phase: seconds})
    observed.now += seconds
    if phase == "start":
        assert observed.observer.observe().trouble is None


def test_a_first_phase_may_take_half_an_hour_and_a_later_one_ten_times_the_longest(observed: Observed) -> None:
    observed.phases(data=0.1, forward=1700.0)
    assert observed.observer.observe().trouble is None  # it compiles
    observed.phases(data=0.1, forward=0.0)
    observed.now += 16_000.0
    assert observed.observer.observe().trouble is None  # less than ten times 1700 s
    observed.now += 2_000.0
    trouble = observed.observer.observe().trouble
    assert trouble is not None and "rank 0 hangs in forward of step 1" in trouble


def test_a_save_that_takes_longer_than_hang_seconds_is_alive(observed: Observed) -> None:
    observed.phases(data=0.1, forward=0.1, checkpoint=0.0)
    observed.now += 1700.0
    status = observed.observer.observe()
    assert status.trouble is None and status.is_training


def test_without_hang_seconds_nothing_is_a_hang(tmp_path: Path) -> None:
    observed = Observed(tmp_path, hang_seconds=None)
    observed.phases(data=0.1, forward=1e6)
    assert observed.observer.observe().trouble is None


def test_metrics_keep_the_last_value_of_each_and_follow_a_file_that_is_cut_back(observed: Observed) -> None:
    file = observed.folder / "metrics.jsonl"
    file.write_text('{"step": 5, "loss": 3.5, "val_loss": 3.25}\n{"step": 10, "loss": "NaN", "mf')
    assert observed.metrics()["hlat_loss"] == 3.5
    with file.open("a") as more:
        more.write('u": 0.25}\n')
    found = observed.metrics()
    assert (found["hlat_logged_step"], found["hlat_validation_loss"], found["hlat_mfu_ratio"]) == (10, 3.25, 0.25)
    assert found["hlat_loss"] != found["hlat_loss"]  # NaN
    new = file.with_name("new")
    new.write_text('{"step": 5, "loss": 3.0}\n')
    new.replace(file)
    assert observed.metrics()["hlat_loss"] == 3.0


def test_ages_and_events(observed: Observed) -> None:
    log = EventLog(observed.folder / "events.jsonl", observed.clock)
    log.append("checkpoint", step=10)
    log.append("anomaly", step=12)
    log.append("anomaly", step=13)
    observed.now += 42.0
    status = observed.observer.observe()
    assert status.events == {"checkpoint": 1, "anomaly": 2}
    assert status.checkpoint_age == pytest.approx(42.0, abs=1e-3)  # events have milliseconds
    assert status.heartbeat_ages == {0: 42.0}
    assert datetime.fromtimestamp(observed.now, UTC)
    log.close()


def test_goodput_of_a_running_attempt_and_of_a_wait_before_the_next(observed: Observed) -> None:
    account = Goodput(1000.0)
    (observed.run.beats / GOODPUT_FILE).write_text(json.dumps(account.state()))
    observed.now += 10.0
    assert observed.metrics()["hlat_goodput_ratio"] == 0.0  # starting
    observed.phases(data=1.0, forward=4.0, checkpoint=5.0, between=0.0)
    found = observed.observer.observe().goodput
    assert found == pytest.approx(
        {"productive": 4.0, "saving": 5.0, "lost": 0.0, "starting": 10.0, "recovering": 0.0, "waiting": 1.0}
    )
    assert observed.metrics()["hlat_goodput_ratio"] == pytest.approx(4.0 / 20.0)
    account.record_attempt(observed.now, None, failed=False)  # 20 s, of which nothing is known
    (observed.run.beats / GOODPUT_FILE).write_text(json.dumps(account.state()))
    observed.now += 7.0
    assert observed.observer.observe().goodput["waiting"] == pytest.approx(7.0)
    observed.begin(1)
    assert observed.metrics()["hlat_restarts_total"] == 1
    assert observed.observer.observe().goodput["recovering"] == pytest.approx(7.0)


def test_processes_that_have_ended_are_no_hang(tmp_path: Path) -> None:
    """Their supervisor starts them again, perhaps after waiting half an hour for another host."""
    beats = tmp_path / "beats/attempt-0"
    beats.mkdir(parents=True)
    program = (
        "import sys, pathlib, time; from hlat.resilience.heartbeat import Heartbeat\n"
        "beat = Heartbeat(pathlib.Path(sys.argv[1])); beat.set_step_counter(lambda: 3)\n"
        "for phase in ('data', 'forward', 'data', 'forward'): beat(phase)\n"
        "print('alive', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, str(heartbeat_path(beats, 0))]
    later = time.monotonic() + 10_000
    run = ObservedRun("tiny", tmp_path, tmp_path / "beats", 100, 2.0, os.getpid(), later)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "alive\n"
        alive = RunObserver(run, lambda: later).observe()
        assert process.stdin is not None
        process.stdin.close()
    ended = RunObserver(run, lambda: later).observe()
    assert alive.trouble is not None and alive.is_training
    assert ended.trouble is None and not ended.is_training
