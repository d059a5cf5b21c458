"""The tracker: files of metrics and events, and outputs whose failures do not end the run."""

import io
import json
import os
from pathlib import Path

import psutil
import pytest

from hlat.config.sections.operation import TrackingConfig
from hlat.runtime.errors import StorageError
from hlat.tracking import EventLog, open_tracker, read_events, read_metrics
from tests.support.tracking.consoles import PLAIN, Clock, line


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
