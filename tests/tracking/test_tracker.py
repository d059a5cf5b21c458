"""The tracker: console lines, time left, and outputs whose failures do not end the run."""

import io
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len

from hlat.config import BatchSchedule
from hlat.config.sections.operation import TrackingConfig
from hlat.runtime.errors import StorageError
from hlat.tracking import EventLog, open_tracker, read_events, read_metrics
from hlat.tracking.console import Console, PlainConsole, ProgressBarConsole, duration, make_console, rate, size
from hlat.tracking.progress import DataProgress, StageLines
from hlat.tracking.tracker import Eta
from tests.support.terminal import Screen

PLAIN = TrackingConfig(console="plain", tensorboard=False)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def line(step: int, **more: object) -> dict[str, object]:
    return {
        "step": step,
        "tokens": step * 1000,
        "loss": 2.3412345,
        "grad_norm": 0.5187,
        "lr": 3e-4,
        "tokens_per_second": 12345.6,
        "mfu": 0.3124,
        "memory_bytes": 1288490189,
        "seconds": {"data": 0.1},
        **more,
    }


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def test_time_left_is_shown_from_the_second_step_on_and_every_step(tmp_path: Path) -> None:
    clock, output = Clock(), Terminal()
    config = TrackingConfig(console="rich", tensorboard=False)
    with open_tracker(tmp_path, config, total_steps=100, start_step=0, clock=clock, stream=output) as tracker:
        bar = tracker._console
        assert isinstance(bar, ProgressBarConsole)
        shown = [bar.render(79)]
        for step in (1, 2, 3):
            clock.now += 60.0 if step == 1 else 2.0  # the first step compiles
            tracker.step_done(step, 2.5 - step / 10, 1000)
            shown.append(bar.render(79))
    assert "step 0/100" in shown[0] and "first step" in shown[0]
    assert [re.findall(r"step \d+/100|eta .*", line) for line in shown[1:]] == [
        ["step 1/100", "eta -  loss 2.4000  17 tok/s"],  # no line was logged
        ["step 2/100", "eta 0:03:16  loss 2.3000  500 tok/s"],
        ["step 3/100", "eta 0:03:14  loss 2.2000  500 tok/s"],
    ]


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


# Seconds of merges of tokenizers 0.23: corpus and vocabulary, seconds in all, and the share of them at 5 %, 20 %, 50 %
# and 75 % of the merges. Of tinyshakespeare (1.1 MB), and of 10 MB of books.
_MERGING = [
    (1791, (0.319, 0.626, 0.809, 0.904)),
    (7935, (0.232, 0.486, 0.753, 0.881)),
    (16127, (0.456, 0.637, 0.791, 0.915)),
]


@pytest.mark.parametrize(("merges", "seconds"), _MERGING)
def test_the_time_left_of_a_tokenizer_is_within_a_factor_of_two_of_what_was_measured(merges: int, seconds) -> None:
    """A time left in proportion to the merges was up to nine times too long at 5 %, and far longer before."""
    clock = Clock()
    progress = DataProgress(clock)
    progress("train tokenizer", 0, merges)
    for share, at in zip((0.0501, 0.2, 0.5, 0.75), seconds, strict=True):
        clock.now = 1000 * at
        progress("train tokenizer", math.ceil(share * merges), merges)
        hours, minutes, second = map(int, progress.text().rpartition("eta ")[2].split(":"))
        total = clock.now + 3600 * hours + 60 * minutes + second
        assert 0.5 < total / 1000 < 2.0, (share, total)


def test_time_left_has_the_validations_and_saves_to_come_and_speed_has_none() -> None:
    """A run of 100 steps of a second, a validation of 20 s after every 10th and a save of 3 s after every 25th."""
    clock = Clock()
    breaks = {"validation": lambda step: 10 - step // 10, "saving": lambda step: (99 // 25) - step // 25}
    eta, end = Eta(100, clock, breaks=breaks), 100 * 1.0 + 10 * 20.0 + 3 * 3.0
    for step in range(1, 101):
        eta.enter("forward")
        clock.now += 1.0
        if step % 25 == 0 and step < 100:
            eta.enter("checkpoint")
            clock.now += 3.0
        if step % 10 == 0:
            eta.enter("evaluation")
            clock.now += 20.0
        eta.enter("between")
        left, speed = eta.mark(step), eta.speed(1000)
        assert speed == pytest.approx(1000.0)
        if step >= 25:  # one of each has been measured
            assert clock.now + left == pytest.approx(end)
    assert clock.now == end


def test_the_line_shows_how_far_a_validation_is_and_how_long_a_save_takes(tmp_path: Path) -> None:
    clock, output = Clock(), Terminal()
    bar = ProgressBarConsole(output, total_steps=100, start_step=0, clock=clock)

    def shown() -> str:
        return "  ".join(re.findall(r"step \d+/100|(?:validation|saving) \S+(?: s)?|eta \S+", bar.render(79)))

    bar.step({"step": 50, "loss": 2.5}, 100, None)
    bar.pause("validation")
    clock.now += 2.0
    assert shown() == "step 50/100  validation 2 s"  # nothing is known of its time
    for share, text in ((0.04, "validation 4%"), (0.1, "validation 10%  eta 0:00:18")):
        bar.pause("validation", share=share)
        assert shown() == f"step 50/100  {text}"
    bar.pause("")
    bar.step({"step": 99, "loss": 2.5}, 100, 14.0)
    bar.pause("saving", seconds=30.0)
    clock.now += 4.0
    assert shown() == "step 99/100  saving 4 s  eta 0:00:10"  # the time left of the run goes on
    clock.now += 16.0
    assert shown() == "step 99/100  saving 20 s  eta 0:00:10"  # it is over: what is left is that of the save
    bar.close()


def test_time_left_follows_the_recent_pace() -> None:
    clock = Clock()
    eta = Eta(total_steps=1000, clock=clock)
    for step in range(1, 301):
        clock.now += 1.0 if step <= 100 else 3.0
        left = eta.mark(step)
    assert left == 700 * 3.0


def test_time_left_of_a_ramp_is_in_proportion_to_the_samples() -> None:
    clock = Clock()
    eta = Eta(total_steps=100, clock=clock, batches=BatchSchedule(8, ((50, 2),)))
    for step in range(1, 41):
        clock.now += 2 * 0.25  # a quarter of a second for each sample
        left = eta.mark(step)
    assert left == (10 * 2 + 50 * 8) * 0.25


def test_time_left_after_a_resume_counts_only_the_steps_of_this_process() -> None:
    clock = Clock()
    clock.now = 1e6
    eta = Eta(total_steps=1000, clock=clock)
    assert eta.mark(905) is None
    clock.now += 10.0
    assert eta.mark(910) == 90 * 2.0


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


def test_metrics_are_on_disk_before_an_event_that_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a checkpoint: a power failure must not leave it without the steps before."""
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        sync(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append((name, (tmp_path / name).read_bytes().count(b"\n")))

    with open_tracker(tmp_path, PLAIN, total_steps=10, start_step=0, stream=io.StringIO()) as tracker:
        tracker.log(line(1))
        monkeypatch.setattr(os, "fsync", record)
        tracker.event("checkpoint", step=1)
        assert synced == [("metrics.jsonl", 1), ("events.jsonl", 1)]


def test_a_resumed_run_continues_its_files(tmp_path: Path) -> None:
    config = TrackingConfig(console="none")
    for start, last in ((0, 5), (3, 8)):
        with open_tracker(tmp_path, config, total_steps=8, start_step=start, wall_clock=lambda: 0.0) as tracker:
            tracker.event("resume" if start else "start", step=start)
            for step in range(start + 1, last + 1):
                tracker.log(line(step, part=start))
    steps = [(record["step"], record["part"]) for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [(1, 0), (2, 0), (3, 0), (4, 3), (5, 3), (6, 3), (7, 3), (8, 3)]
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["start", "resume"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


_MOVES = {
    "renamed": lambda file: file.rename(file.with_suffix(".1")),
    "removed": lambda file: file.unlink(),
    "rotated": lambda file: (file.rename(file.with_suffix(".1")), file.touch()),
    "copied over": lambda file: (
        file.with_suffix(".new").write_bytes(file.read_bytes()),
        file.with_suffix(".new").rename(file),
    ),
}


@pytest.mark.parametrize("move", _MOVES)
def test_nothing_is_lost_if_files_are_moved_while_a_run_writes_them(tmp_path: Path, move: str) -> None:
    """A second process, such as the supervisor, writes events meanwhile."""
    stream, config = io.StringIO(), TrackingConfig(console="plain")
    other = EventLog(tmp_path / "events.jsonl")
    with open_tracker(tmp_path, config, total_steps=9, start_step=0, stream=stream) as tracker:
        tracker.event("start", step=0)
        for step in (1, 2, 3):
            tracker.log(line(step))
        for file in (tmp_path / "metrics.jsonl", tmp_path / "events.jsonl", *(tmp_path / "tensorboard").iterdir()):
            _MOVES[move](file)
        tracker.log(line(4))
        other.append("hang", step=4)
        tracker.rewind(3)
        for step in (4, 5):
            tracker.log(line(step))
        tracker.event("end", step=5)
    other.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    events = [(event["event"], event.get("file", "")) for event in read_events(tmp_path / "events.jsonl")]
    assert [kind for kind, _ in events if kind != "record_restored"] == ["start", "hang", "end"]
    restored = [file.partition(".out")[0] for kind, file in events if kind == "record_restored"]
    assert sorted(restored) == ["events.jsonl", "metrics.jsonl", "tensorboard/events"]
    said = "may be only in the old one" if move == "copied over" else "nothing is lost"
    assert stream.getvalue().count(said) == 3


def test_a_file_system_that_never_gives_a_file_the_same_identity_is_written_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    with open_tracker(tmp_path, TrackingConfig(console="none"), total_steps=9, start_step=0) as tracker:
        for step in (1, 2, 3):
            tracker.log(line(step))
        tracker.event("end", step=3)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    events = [event["event"] for event in read_events(tmp_path / "events.jsonl")]
    assert events.count("end") == 1 and events.count("record_restored") <= 4


def test_another_folder_in_the_place_of_the_run_s_gets_none_of_its_files(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    with open_tracker(folder, TrackingConfig(console="none"), total_steps=9, start_step=0) as tracker:
        tracker.log(line(1))
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        tracker.log(line(2))
    assert list(folder.iterdir()) == []
    assert [record["step"] for record in read_metrics(tmp_path / "moved" / "metrics.jsonl")] == [1, 2]


def test_damaged_metrics_are_reported_and_do_not_stop_a_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(1)) + "\ngarbage\n" + json.dumps(line(2)) + "\n")
    stream = io.StringIO()
    with open_tracker(tmp_path, PLAIN, total_steps=8, start_step=2, stream=stream):
        pass
    assert "dropped 1 damaged line\n" in stream.getvalue()
    assert read_events(tmp_path / "events.jsonl")[0]["event"] == "metrics_damaged"
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_tracker_that_cannot_open_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    process = psutil.Process()
    before = process.num_fds()
    with pytest.raises(StorageError, match=r"events\.jsonl: cannot open: Is a directory"):
        open_tracker(tmp_path, PLAIN, total_steps=8, start_step=0)
    assert process.num_fds() == before


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


def test_a_rewind_drops_the_metrics_of_undone_steps_and_no_event(tmp_path: Path) -> None:
    clock, stream = Clock(), io.StringIO()
    with open_tracker(tmp_path, PLAIN, total_steps=100, start_step=0, clock=clock, stream=stream) as tracker:
        for step in (1, 2, 3):
            clock.now += 1.0
            tracker.log(line(step, loss=0.0))
        tracker.event("anomaly", step=3)
        tracker.rewind(1)
        for step in (2, 3):
            clock.now += 2.0
            tracker.log(line(step, loss=1.0))
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        (1, 0),
        (2, 1),
        (3, 1),
    ]
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["anomaly"]
    assert [line.split("  ")[2] for line in stream.getvalue().splitlines()] == [
        "eta -",
        "eta 0:01:38",
        "eta 0:01:37",
        "eta -",
        "eta 0:03:14",
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")  # noqa: PTH110
def test_tensorboard_on_a_full_disk_is_dropped_with_one_message(tmp_path: Path, capfd) -> None:
    stream = io.StringIO()
    config = TrackingConfig(console="plain", tensorboard=True)
    with open_tracker(tmp_path, config, total_steps=10, start_step=0, stream=stream) as tracker:
        tracker.log(line(1))
        [events] = (tmp_path / "tensorboard").iterdir()
        [ours] = [file for file in psutil.Process().open_files() if file.path == str(events)]
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, ours.fd)
        os.close(full)
        for step in (2, 3, 4):
            tracker.log(line(step))
        tracker.rewind(3)
        tracker.log(line(4))
    assert stream.getvalue().count("continuing without TensorBoard") == 1
    [dropped] = read_events(tmp_path / "events.jsonl")
    assert dropped["event"] == "tensorboard_dropped" and "No space left on device" in dropped["message"]
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert capfd.readouterr() == ("", "")


def test_tensorboard_that_cannot_be_opened_is_dropped_with_one_message(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    stream = io.StringIO()
    config = TrackingConfig(console="plain", tensorboard=True)
    with open_tracker(tmp_path, config, total_steps=10, start_step=0, stream=stream) as tracker:
        tracker.log(line(1))
    assert stream.getvalue().count("continuing without TensorBoard") == 1
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["tensorboard_dropped"]


def test_ends_before_is_true_if_the_last_line_is_of_an_earlier_step(tmp_path: Path) -> None:
    with open_tracker(tmp_path, PLAIN, total_steps=9, start_step=0, stream=io.StringIO()) as tracker:
        assert tracker.ends_before(1)
        for step in (2, 4):
            tracker.log(line(step))
    for start, lacks in ((4, False), (3, True), (2, False)):
        with open_tracker(tmp_path, PLAIN, total_steps=9, start_step=start, stream=io.StringIO()) as tracker:
            assert tracker.ends_before(start) == lacks, start


def test_a_missing_run_folder_is_not_created(tmp_path: Path) -> None:
    """It was removed; creating it again would hide that."""
    with pytest.raises(StorageError, match=r"run/metrics\.jsonl: cannot open: No such file"):
        open_tracker(tmp_path / "run", PLAIN, total_steps=8, start_step=0)
    assert not (tmp_path / "run").exists()


def test_messages_and_events_have_no_url_credentials_and_no_control_characters(tmp_path):
    """A checkpoint of an earlier version may contain the URL of its text with credentials."""
    stream = io.StringIO()
    with open_tracker(tmp_path, TrackingConfig(console="plain"), total_steps=2, start_step=0, stream=stream) as tracker:
        tracker.message("changed: 'https://S3CR3T@host/x?k=S3CR3T' -> 'x\x1b[2J\x9b'")
        tracker.event("resume", changes=[{"path": "data.path", "old": "https://host/x#a=S3CR3T", "new": "x"}])
    assert stream.getvalue() == "changed: 'https://...@host/x?...' -> 'x\\u001b[2J\\u009b'\n"
    assert "S3CR3T" not in (tmp_path / "events.jsonl").read_text()
    assert "https://host/x#..." in (tmp_path / "events.jsonl").read_text()
