"""Hosted trackers cannot disturb a run: they raise, block, crash and find no space in a process of their own."""

import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hlat.config.load import parse_recipe
from hlat.runtime.errors import LaunchError
from hlat.runtime.version import install_command
from hlat.tracking.hosted import HOSTED, HostedEntry, HostedRun, HostedTracker, check_installed
from hlat.training import run
from tests.support.launch.launching import wait_until
from tests.support.same_runs import assert_same_state, events_of, metrics_of
from tests.support.tracking import clients

NAMES = ("wandb", "mlflow", "trackio")


def replaced(monkeypatch: pytest.MonkeyPatch, **kinds: type) -> None:
    """Replace clients of the table by those of ``tests.support.tracking``."""
    for name, kind in kinds.items():
        monkeypatch.setitem(HOSTED, name, HostedEntry(f"{clients.__name__}:{kind.__name__}", "json"))


def opened(folder: Path, seconds: float = 600.0, most: int = 1000) -> HostedTracker:
    return HostedTracker("wandb", HostedRun("tiny", folder, {"a": 1}, {"mode": "offline"}), seconds, most)


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.5 / step, "batch_crc32": 7, "seconds": {"data": 0.1}, **more}


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "recorded.jsonl").read_text().splitlines()]


def test_records_arrive_and_a_resumed_run_is_the_same_run_without_repeated_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replaced(monkeypatch, wandb=clients.Recording)
    for steps, failed in ((range(1, 5), True), (range(3, 7), False)):  # killed after 4, repeats 3 and 4
        tracker = opened(tmp_path)
        for step in steps:
            tracker.log(line(step))
        wait_until((tmp_path / "recorded.jsonl").exists)  # or the second process might take the lock first
        tracker.close(failed)
        assert not tracker.notes()
    first, *rest = recorded(tmp_path)
    assert first == {"open": None, "name": "tiny", "recipe": {"a": 1}, "settings": {"mode": "offline"}}
    assert [record["step"] for record in rest if "step" in record] == [1, 2, 3, 4, 5, 6]
    assert [record for record in rest if "step" not in record] == [
        {"failed": True},
        {**first, "open": "the id"},
        {"failed": False},
    ]
    assert rest[1]["values"] == {"train/loss": 0.75, "train/seconds/data": 0.1}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (clients.RaisingAtOnce, "open: ConnectionError: no route to"),
        (clients.RaisingAlways, "log: RuntimeError: refused 1"),
        (clients.FullDisk, "log: OSError: [Errno 28] No space left on device"),
        (clients.Crashing, "its helper process has ended"),
        (clients.Blocking, "it had not ended 2 s after the run"),
    ],
)
def test_what_a_tracker_does_wrong_is_said_once_and_its_losses_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type, message: str
) -> None:
    replaced(monkeypatch, wandb=kind)
    tracker = opened(tmp_path, seconds=2.0 if kind is clients.Blocking else 600.0)
    for step in range(1, 4):
        tracker.log(line(step))
    tracker.close()
    failed, lost = tracker.notes()
    assert (failed.kind, lost.kind) == ("tracker_failed", "tracker_lost")
    assert message in failed.text and "the run continues, and metrics.jsonl has all values" in failed.text
    assert lost.fields == {"tracker": "wandb", "lost": 3, "lines": 3}
    assert not psutil.pid_exists(tracker._process.pid), "no process is left"


def test_the_queue_is_bounded_and_a_run_that_failed_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The helper process ends by itself, also if its client hangs."""
    replaced(monkeypatch, wandb=clients.Blocking)
    tracker = opened(tmp_path, seconds=0.5, most=3)
    for step in range(1, 40):
        tracker.log(line(step, seconds={str(number): 0.5 for number in range(4000)}))  # 100 KB: the socket is full soon
    assert tracker._process.channel.post() == 3
    (note,) = tracker.notes()
    assert "it does not keep up: 3 lines of metrics are waiting" in note.text
    tracker.close(failed=True)
    assert not tracker.notes()
    tracker._process.wait()


@pytest.fixture
def content(tiny_recipe: str, corpus: Path, tmp_path: Path) -> dict[str, Any]:
    content = yaml.safe_load(tiny_recipe)
    content["run"] = {"name": "tiny", "dir": str(tmp_path / "run")}
    content["data"] |= {"path": str(corpus), "prepared_dir": str(tmp_path / "data")}
    content["training"] = {"steps": 6, "log_every": 1, "seed": 3}
    content["checkpoint"] = {"every_steps": 3, "background": False}
    content["tracking"] = {"tensorboard": False, "console": "plain"}
    return content


def test_a_run_has_the_same_bits_whatever_its_trackers_do(
    monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], tmp_path: Path
) -> None:
    """One refuses everything, one blocks for ever, one has no disk; all is said once, without secrets."""
    run(parse_recipe(content), stream=io.StringIO())
    replaced(monkeypatch, wandb=clients.RaisingAtOnce, mlflow=clients.Blocking, trackio=clients.FullDisk)
    content["run"]["dir"] = str(tmp_path / "tracked")
    content["tracking"] |= {name: {"mode": "offline"} for name in NAMES} | {"flush_seconds": 5.0}
    stream = io.StringIO()
    run(parse_recipe(content), stream=stream)  # does not wait for the one that blocks
    folder = tmp_path / "tracked"
    assert_same_state(tmp_path / "run", folder)
    assert metrics_of(tmp_path / "run") == metrics_of(folder)
    for kind, count in (("tracker_failed", 1), ("tracker_lost", 1)):
        assert sorted(event["tracker"] for event in events_of(folder, kind)) == sorted(NAMES) * count
    said = stream.getvalue()
    assert all(said.count(f"{name}: ") == 2 for name in NAMES), said
    assert "secret" not in said + (folder / "events.jsonl").read_text()
    assert [event["event"] for event in events_of(folder, "end")] == ["end"]


def test_a_package_that_is_missing_is_named_with_its_extra_before_the_run(content: dict[str, Any], monkeypatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(HOSTED, name, HostedEntry("x:y", f"no_such_package_{name}"))
    content["tracking"] |= {"wandb": {}, "trackio": {"mode": "offline"}}
    recipe = parse_recipe(content)
    with pytest.raises(LaunchError) as raised:
        check_installed(recipe.tracking)
    assert str(raised.value) == (
        "tracking.wandb and tracking.trackio: not installed here: no_such_package_wandb, no_such_package_trackio. "
        f"Install it with {install_command('wandb', 'trackio')}, or set tracking.wandb and tracking.trackio to null."
    )
    with pytest.raises(LaunchError):
        run(recipe, stream=io.StringIO())
    assert not (recipe.run_dir / "metrics.jsonl").exists()
