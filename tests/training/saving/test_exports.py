"""Exports beside the checkpoints of a run: which steps have one, and never a reason for the run to stop.

What they contain is compared in test_resume.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hlat.config import RecipeError, load_recipe
from hlat.config.sections.operation import CheckpointConfig
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.helper_process import PeerEnded
from hlat.training.components import LoopStart, StepEnd
from hlat.training.run_state import RunState, SavedCheckpoint
from hlat.training.saving.exports import WeightExports
from tests.support.same_runs import events_of

RUN = ["training.steps=6", "checkpoint.every_steps=4", "evaluation.every_steps=null", "tracking.tensorboard=false"]


def test_a_failing_export_does_not_stop_the_run(cli, recipe_file, tiny, tmp_path):
    (tmp_path / "used").write_text("a file where a folder should be")
    options = [*RUN, f"checkpoint.export={{every_steps: 6, dir: {tmp_path / 'used'}}}"]
    done = cli("train", recipe_file, *tiny, *options)
    assert done.returncode == 0, done.stderr
    (event,) = events_of(tmp_path / "run", "export_failed")
    assert event["step"] == 6 and str(tmp_path / "used") in event["message"]
    assert events_of(tmp_path / "run", "end")


def test_the_average_has_to_exist(cli, recipe_file, tiny):
    with pytest.raises(RecipeError, match=r"checkpoint\.export\.weights"):
        load_recipe(recipe_file, [*tiny, "checkpoint.export={every_steps: 2, weights: ema}"])


@dataclass
class Process:
    """An export that ends when the test says so."""

    target: Path
    ended: tuple[int, str] | None = None

    def receive(self, seconds: float) -> None:
        if self.ended is not None:
            end = PeerEnded(self.ended[1])
            end.code = self.ended[0]
            raise end


@dataclass
class Run:
    """A run whose checkpoints the test makes, and what its exports did."""

    folder: Path
    dir: str | None = None
    started: list[Process] = field(default_factory=list)
    events: list[tuple[str, int, str]] = field(default_factory=list)
    refuses: bool = False

    def __post_init__(self) -> None:
        self.state = SimpleNamespace(
            saved=None,
            runtime=SimpleNamespace(ranks=HostGroup()),
            recipe=SimpleNamespace(
                run_dir=self.folder,
                checkpoint=CheckpointConfig.model_validate({"export": {"every_steps": 10, "dir": self.dir}}),
            ),
        )
        tracker = cast(Any, SimpleNamespace(event=self.event, message=lambda text: None, warn=lambda text: None))
        self.exports = WeightExports(cast(RunState, self.state), tracker, self.start, linger_seconds=0.0)

    def start(self, checkpoint: Path, target: Path, dtype: str | None, weights: str) -> Any:
        if self.refuses:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        target.mkdir(parents=True)  # hlat export refuses a folder that exists
        self.started.append(Process(target))
        return self.started[-1]

    def event(self, kind: str, step: int, **fields: Any) -> None:
        self.events.append((kind, step, fields.get("message", "")))

    def save(self, step: int) -> None:
        self.state.saved = SavedCheckpoint(step, self.folder / "checkpoints" / f"step-{step:08d}")

    def step(self) -> None:
        self.exports.after_step(cast(StepEnd, None))

    @property
    def steps(self) -> list[int]:
        return [int(process.target.name.removeprefix("step-")) for process in self.started]


def test_one_export_runs_at_a_time_and_none_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (5, 10, 15, 20, 30):
        run.save(step)
        run.step()
    assert run.steps == [10], "20 and 30 wait, 5 and 15 are no multiples"
    run.started[0].ended = (0, "")
    run.step()
    run.started[1].ended = (-9, "killed")
    run.step()
    run.step()
    assert run.steps == [10, 20, 30]
    assert run.events == [("export", 10, ""), ("export_failed", 20, "killed")]
    run.exports.at_end(None)
    assert run.events[2][:2] == ("export_failed", 30), "it is still running when the run ends, and is not waited for"


def test_a_resumed_run_exports_what_was_cut_off_and_nothing_twice(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(20)
    run.exports.begin(cast(LoopStart, None))
    assert run.steps == [20]
    other = Run(tmp_path / "other")
    (tmp_path / "other" / "exports" / "step-00000020").mkdir(parents=True)
    other.save(20)
    other.exports.begin(cast(LoopStart, None))
    assert other.steps == []


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_steps_that_are_done_again_are_exported_again(tmp_path: Path, folder: str | None) -> None:
    """In place of the exports of undone weights, in the run's own folder and in another."""
    run = Run(tmp_path, dir=None if folder is None else str(tmp_path / folder))
    for step in (10, 20):
        run.save(step)
        run.step()
        run.started[-1].ended = (0, "")
    run.save(10)
    run.exports.after_rollback(10)
    (run.started[1].target / "model.safetensors").write_text("undone")
    run.save(20)
    run.step()
    assert run.steps == [10, 20, 20]
    assert not (run.started[2].target / "model.safetensors").exists()


def test_a_folder_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, dir=str(tmp_path / "elsewhere"))
    other = tmp_path / "elsewhere" / "step-00000010" / "model.safetensors"
    other.parent.mkdir(parents=True)
    other.write_text("of another run")
    run.save(10)
    run.step()
    assert run.events[0][:2] == ("export_failed", 10) and other.read_text() == "of another run"


def test_a_machine_without_room_for_processes_fails_only_the_export(tmp_path: Path) -> None:
    run = Run(tmp_path, refuses=True)
    run.save(10)
    run.step()
    assert run.events == [("export_failed", 10, "no process can be started: Resource temporarily unavailable")]
