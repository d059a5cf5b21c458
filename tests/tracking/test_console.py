"""Consoles: plain lines, the line of a terminal, stages, warnings, and how values are written."""

import io
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from hlat.config.sections.operation import TrackingConfig
from hlat.tracking import open_tracker, read_events, read_metrics
from hlat.tracking.console import Console, PlainConsole, ProgressBarConsole, duration, make_console, rate, size
from hlat.tracking.progress import DataProgress, StageLines
from tests.support.terminal import Screen
from tests.support.tracking.consoles import PLAIN, Clock, Terminal, line


def test_the_plain_console_prints_these_lines(tmp_path: Path) -> None:
    clock, stream = Clock(), io.StringIO()
    with open_tracker(tmp_path, PLAIN, total_steps=2000, start_step=0, clock=clock, stream=stream) as tracker:
        tracker.message("quickstart: 1,024 parameters")
        clock.now = 60.0  # the first steps compile: their minute must not count
        tracker.log(line(10))
        clock.now = 61.0
        tracker.log(line(20, val_loss=2.41, val_bits_per_byte=1.93))
        clock.now = 71.0
        tracker.log(line(120, loss=math.nan, grad_norm=math.inf, tokens_per_second=math.inf, mfu=math.nan))
        tracker.log({"step": 2000, "loss": 1.5})
    values = "12.3k tok/s  mfu 31.2%  gnorm 0.52  lr 3.00e-04  mem 1.2G"
    assert stream.getvalue().splitlines() == [
        "quickstart: 1,024 parameters",
        f"step 10/2000  0.5%  eta -  loss 2.3412  {values}",
        f"step 20/2000  1.0%  eta 0:03:18  loss 2.3412  val 2.4100 (bpb 1.9300)  {values}",
        "step 120/2000  6.0%  eta 0:03:08  loss nan  inf tok/s  mfu nan%  gnorm inf  lr 3.00e-04  mem 1.2G",
        "step 2000/2000  100.0%  eta 0:00:00  loss 1.5000",
    ]


def test_the_line_of_a_terminal_shows_the_same_values_and_logged_steps_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    output, screen = Terminal(), Screen(160)
    bar = ProgressBarConsole(output, total_steps=2000, start_step=0)
    bar.message("[resumed] at step 10")  # brackets are text, not markup
    bar.log(line(20, val_loss=2.41, val_bits_per_byte=1.93), 2000, 198.0)
    bar.log(line(120), 2000, 188.0)
    shown = bar.render(159)
    bar.close()
    screen.feed(output.getvalue())
    values = "12.3k tok/s  mfu 31.2%  gnorm 0.52  lr 3.00e-04  mem 1.2G"
    assert f"step 120/2000  6.0%  eta 0:03:08  loss 2.3412  {values}" in shown
    assert screen.text.splitlines() == [
        "[resumed] at step 10",
        f"step 20/2000  loss 2.3412  val 2.4100 (bpb 1.9300)  {values}",
        f"step 120/2000  loss 2.3412  {values}",
    ]
    assert screen.cursor_is_free


def test_lines_above_a_narrow_line_end_between_words_and_leave_out_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output, screen = Terminal(), Screen(60)
    bar = ProgressBarConsole(output, total_steps=2000, start_step=0)
    bar.message("data: 3 of 5 documents are copies of others; data.duplicates=drop leaves them out")
    bar.message("  /a/path/without/spaces/that/is/longer/than/a/line/of/this/terminal/is")
    bar.log(line(120), 2000, 188.0)
    bar.log(
        {**line(140, val_loss=2.41, val_bits_per_byte=1.93), "val/books/loss": 2.5, "task/arc/acc": 0.31}, 2000, 1.0
    )
    bar.close()
    screen.feed(output.getvalue())
    assert screen.text.splitlines() == [
        "data: 3 of 5 documents are copies of others;",
        "  data.duplicates=drop leaves them out",
        "  /a/path/without/spaces/that/is/longer/than/a/line/of/this/terminal/is",
        "step 120/2000  loss 2.3412  12.3k tok/s  mfu 31.2%",
        "step 140/2000  loss 2.3412  val 2.4100 (bpb 1.9300)  val",
        "  books 2.5000  arc 31.0%",  # results of a validation are never left out
    ]


def test_a_narrow_terminal_shows_the_most_important_fields_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    bar = ProgressBarConsole(Terminal(), total_steps=2000, start_step=0)
    bar.log(line(120, val_loss=2.41), 2000, 188.0)
    for width in range(1, 200):
        assert cell_len(bar.render(width)) <= width
    shown = [re.findall(r"step|%  |eta|loss|tok/s|mfu|val|gnorm|lr|mem", bar.render(width)) for width in (30, 45, 79)]
    assert shown == [["step", "eta"], ["step", "eta", "loss"], ["step", "%  ", "eta", "loss", "tok/s", "mfu"]]
    bar.close()


def test_a_console_of_lines_says_where_it_is_when_no_step_is_logged_for_a_while() -> None:
    clock, stream = Clock(), io.StringIO()
    console = PlainConsole(stream, clock)
    for step in range(1, 9):
        clock.now += 10.0
        console.step({"step": step, "loss": 2.5, "tokens_per_second": 900.0}, 1000, None)
    for share in (0.0, 0.2, 0.4):
        clock.now += 10.0
        console.pause("validation", share=share)
    assert stream.getvalue().splitlines() == [
        "step 3/1000  0.3%  eta -  loss 2.5000  900 tok/s",
        "step 6/1000  0.6%  eta -  loss 2.5000  900 tok/s",
        "validation 0%",
    ]


def test_stages_are_lines_and_long_ones_tell_their_time() -> None:
    clock, said = Clock(), list[str]()
    stages = StageLines(said.append, clock)
    for name, seconds in (("importing PyTorch", 3.2), ("building the model", 0.5), ("first step", 61.0), ("", 9.0)):
        stages(name)
        clock.now += seconds
    stages("")
    assert said == [
        "importing PyTorch ...",
        "importing PyTorch: 3 s",
        "building the model ...",
        "first step ...",
        "first step: 61 s",
    ]


def test_the_progress_of_data_has_a_speed_and_a_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    clock = Clock()
    progress = DataProgress(clock)
    progress("tokenize", 2_000_000, 12_000_000)  # an interrupted preparation that goes on
    clock.now += 4.0
    progress("tokenize", 4_000_000, 12_000_000)
    assert progress.render(100).split("  ")[1:] == [
        "━━━━━━━─────────────",
        "33.3%",
        "4.0 of 12.0 MB of files",
        "0.5 MB/s",
        "eta 0:00:16",
    ]
    assert progress.text() == "prepare: tokenize 33%, 4.0 of 12.0 MB of files, eta 0:00:16"
    progress("train tokenizer", 0, 0)
    clock.now += 3.0
    assert progress.render(100).endswith("train tokenizer  3 s")
    progress("train tokenizer", 0, 4000)
    clock.now += 1.0
    progress("train tokenizer", 190, 4000)
    assert "190 of 4,000 merges  eta -" in progress.render(100)  # less than 5 % is no measure
    assert all(cell_len(progress.render(width)) <= width for width in range(1, 120))


@pytest.fixture
def terminal() -> Iterator[io.TextIOWrapper]:
    """The program's end of a pseudo-terminal."""
    parent, child = os.openpty()
    with os.fdopen(child, "w") as stream:
        yield stream
    os.close(parent)


def test_auto_is_the_progress_bar_on_a_capable_terminal_and_plain_elsewhere(
    terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(console: str, stream: io.TextIOBase) -> type:
        made = make_console(TrackingConfig(console=console), stream, total_steps=10, start_step=0)
        made.close()
        return type(made)

    monkeypatch.setenv("TERM", "xterm-256color")
    assert kind("auto", terminal) is ProgressBarConsole
    assert kind("auto", io.StringIO()) is PlainConsole
    assert kind("plain", terminal) is PlainConsole
    assert kind("none", terminal) is Console
    monkeypatch.setenv("TERM", "dumb")
    assert kind("auto", terminal) is PlainConsole


def test_console_none_prints_nothing_and_records_everything(tmp_path: Path) -> None:
    stream, config = io.StringIO(), TrackingConfig(console="none", tensorboard=False)
    with open_tracker(tmp_path, config, total_steps=10, start_step=0, stream=stream) as tracker:
        tracker.message("hello")
        tracker.log(line(1))
        tracker.event("end", step=1)
    assert stream.getvalue() == ""
    assert read_metrics(tmp_path / "metrics.jsonl") == [line(1)]
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["end"]


def test_a_warning_is_marked_and_all_that_console_warnings_prints(tmp_path: Path) -> None:
    said = {}
    for kind in ("plain", "json", "warnings", "none"):
        stream, config = io.StringIO(), TrackingConfig(console=kind, tensorboard=False)
        (tmp_path / kind).mkdir()
        with open_tracker(tmp_path / kind, config, total_steps=10, start_step=0, stream=stream) as tracker:
            tracker.message("hello")
            tracker.warn("a rate of 3")
            tracker.log(line(1))
        said[kind] = stream.getvalue()
    assert said["warnings"] == "warning: a rate of 3\n" and said["none"] == ""
    assert "hello\nwarning: a rate of 3\nstep 1/10" in said["plain"]
    found = [json.loads(each) for each in said["json"].splitlines()]
    assert [each["level"] for each in found if "a rate of 3" in str(each)] == ["warning"]


def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    """As in ``hlat train recipe.yaml | head -3``, with a pipe."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    with open_tracker(tmp_path, PLAIN, total_steps=10, start_step=0, stream=stream) as tracker:
        tracker.log(line(1))
        os.close(reading)
        tracker.log(line(2))
        tracker.message("nobody reads this")
        tracker.log(line(3))
    with pytest.raises(BrokenPipeError):
        stream.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (86399.6, "1d 00:00:00"), (187200, "2d 04:00:00")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (999.4, "999"),
        (999.96, "1.0k"),
        (12345.6, "12.3k"),
        (999_960, "1.0M"),
        (2.5e9, "2.5G"),
        (math.nan, "nan"),
    ],
)
def test_rates_are_formatted(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0M"), (850 * 2**20, "850M"), (1288490189, "1.2G"), (141 * 2**30, "141.0G")]
)
def test_sizes_are_formatted(count: int, text: str) -> None:
    assert size(count) == text
