"""Average of the weights: torch's own formula, whatever layout, kill, resume or rollback; loaded and exported."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hlat.checkpoint import export_hf, load_model
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.evaluation import evaluate_checkpoint, generate_text
from hlat.runtime.errors import CheckpointError
from hlat.training import run
from hlat.training.components import StepEnd
from hlat.training.optional_components import WeightAverage
from tests.support.same_runs import events_of

DECAY = 0.75  # a power of two: an average of 3/4 and 1/4 changes visibly within a few steps
Saved = dict[str, torch.Tensor]


@pytest.fixture
def content(tiny_recipe: str, corpus: Path, prepared: Path, tmp_path: Path) -> dict[str, Any]:
    """A recipe of 8 steps that keeps the checkpoint of each step, with an average."""
    content = yaml.safe_load(tiny_recipe)
    content["run"] = {"name": "tiny", "dir": str(tmp_path / "run")}
    content["data"] |= {"path": str(corpus), "prepared_dir": str(prepared)}
    content["training"] = {"steps": 8, "log_every": 1, "seed": 3, "ema": {"decay": DECAY}}
    content["checkpoint"] = {"every_steps": 1, "keep_last": 99, "background": False}
    content["evaluation"] = {"every_steps": None}
    content["tracking"] = {"tensorboard": False, "console": "plain"}
    return content


def train(content: dict[str, Any], **training: Any) -> tuple[Recipe, str]:
    """Train in this process; return the recipe and the console's text."""
    recipe = parse_recipe({**content, "training": {**content["training"], **training}})
    stream = io.StringIO()
    run(recipe, stream=stream, allow_faults=True)
    return recipe, stream.getvalue()


def saved_steps(recipe: Recipe, prefix: str) -> dict[int, Saved]:
    """Return the tensors below a prefix in every checkpoint, by step."""
    folders = sorted((recipe.run_dir / "checkpoints").glob("step-*"))
    checkpoints = [open_checkpoint(folder) for folder in folders]
    return {checkpoint.step: checkpoint.load(prefix) for checkpoint in checkpoints}


def torch_average(weights: dict[int, Saved], updates: Callable[[int], bool]) -> dict[int, Saved]:
    """Average with torch's ``AveragedModel``, beginning with the first weights, after the steps that update."""
    module = torch.nn.ParameterDict({name.replace(".", "/"): tensor for name, tensor in _first(weights).items()})
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(module)  # the first call copies
    found = {}
    for step, tensors in weights.items():
        if found and updates(step):
            for name, tensor in tensors.items():
                module[name.replace(".", "/")].data.copy_(tensor)
            averaged.update_parameters(module)
        found[step] = {name.replace("/", "."): tensor.detach().clone() for name, tensor in averaged.module.items()}
    return found


def _first(weights: dict[int, Saved]) -> Saved:
    return {name: tensor.float() for name, tensor in weights[min(weights)].items()}


def assert_equal(found: Saved, expected: Saved) -> None:
    assert found.keys() == expected.keys() and found
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name


def test_the_average_is_that_of_torch(content: dict[str, Any]) -> None:
    """Step by step and bit for bit, also if not every step updates it, and up to its first step the weights."""
    ema = {"decay": DECAY, "start_step": 2, "every_steps": 3}
    recipe, _ = train(content, ema=ema)
    weights, averages = saved_steps(recipe, "model."), saved_steps(recipe, "ema.")
    for step in (1, 2):
        assert_equal(averages[step], weights[step])
    expected = torch_average({step: weights[step] for step in range(2, 9)}, lambda step: step % 3 == 0)
    for step in range(2, 9):
        assert_equal(averages[step], expected[step])
    assert not torch.equal(averages[8]["model.norm.weight"], weights[8]["model.norm.weight"])


def test_the_average_survives_a_stop_and_another_layout(cli, content: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks with ZeRO 3 begin, two tensor-parallel ranks go on, one process ends: torch's formula throughout."""
    file, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(content))
    for stop, layout in ((4, "parallel.zero=3"), (2, "parallel.tensor=2")):
        done = cli("train", file, "--nproc", "2", layout, f"training.stop_after={stop}", "integrity.every_steps=1")
        assert done.returncode == 0, done.stderr
    recipe, said = train(content)
    assert "resumed at step 6" in said and not events_of(run_dir, "component_begun")
    assert not events_of(run_dir, "corruption")
    weights, averages = saved_steps(recipe, "model."), saved_steps(recipe, "ema.")
    assert list(weights) == list(range(1, 9))
    for step in range(2, 9):  # the weights of step 0 are not saved
        expected = {name: before.lerp(weights[step][name], 1 - DECAY) for name, before in averages[step - 1].items()}
        assert_equal(averages[step], expected)


def test_bf16_weights_are_averaged_in_fp32(content: dict[str, Any]) -> None:
    content["precision"] = {"mode": "bf16-sr"}
    recipe, _ = train(content)
    weights, averages = saved_steps(recipe, "model."), saved_steps(recipe, "ema.")
    for step in range(2, 9):
        before = averages[step - 1].items()
        assert_equal(
            averages[step], {name: average.lerp(weights[step][name].float(), 1 - DECAY) for name, average in before}
        )


class Recorded(WeightAverage):
    """Average that keeps the weights of each step when it is first called after it, and those it begins with."""

    weights: dict[int, Saved] = {}
    steps: list[int] = []

    def reset(self) -> None:
        super().reset()
        self._record(0)

    def after_step(self, end: StepEnd) -> None:
        super().after_step(end)
        self._record(end.step)
        self.steps.append(end.step)

    def _record(self, step: int) -> None:
        self.weights[step] = {each.name: each.tensor.clone() for each in self._parameters}
        self.averages = dict(zip(self.weights[step], self._averages, strict=True))
        Recorded.last = self


@pytest.mark.parametrize("every", [3, None])
def test_a_rollback_returns_to_the_average_of_then(
    content: dict[str, Any], monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    """To that of a checkpoint, and to the initial weights if there is none; an update that is skipped is no update."""
    monkeypatch.setattr("hlat.training.optional_components.WeightAverage", Recorded)
    Recorded.weights, Recorded.steps = {}, []
    content["checkpoint"]["every_steps"] = every
    content["training"]["steps"] = 14
    content["anomalies"] = {"window": 8, "spike": "rollback"}
    content["faults"] = [{"kind": "spike", "at_step": 11}, {"kind": "nan", "at_step": 4}]
    recipe, _ = train(content)
    (rollback,) = events_of(recipe.run_dir, "rollback")
    back = 9 if every else 0
    assert (rollback["step"], rollback["undone"]) == (back, 11)
    assert Recorded.steps == [*range(1, 11), *range(back + 1, 15)]
    assert [event["step"] for event in events_of(recipe.run_dir, "anomaly") if event["action"] == "skip"] == [4]
    skipped = {4} if every else set()  # a step that is repeated finds its fault gone
    weights = {step: Recorded.weights[step] for step in range(15)}
    assert_equal(Recorded.last.averages, torch_average(weights, lambda step: step not in skipped)[14])


def test_an_average_begins_with_a_checkpoint_that_has_none_and_is_dropped_by_a_recipe_without(
    content: dict[str, Any],
) -> None:
    """Both are said and recorded; nothing else of the run changes."""
    recipe, said = train(content, ema=None, stop_after=2)
    assert "ema" not in said and not any("ema." in name for name in saved_steps(recipe, "")[2])
    _, said = train(content, stop_after=3)
    assert "ema: the checkpoint has no state of it; it begins with the weights of step 2" in said
    weights, averages = saved_steps(recipe, "model."), saved_steps(recipe, "ema.")
    expected = torch_average({step: weights[step] for step in range(2, 6)}, lambda step: True)
    for step in range(3, 6):
        assert_equal(averages[step], expected[step])
    _, said = train(content, ema=None)
    assert "ema: the checkpoint has its state, but the recipe does not ask for it" in said
    assert not saved_steps(recipe, "ema.")[8]
    (begun,), (dropped,) = events_of(recipe.run_dir, "component_begun"), events_of(recipe.run_dir, "component_dropped")
    assert (begun["step"], begun["name"], dropped["step"], dropped["name"]) == (2, "ema", 5, "ema")


def test_the_average_is_exported_evaluated_and_generates(content: dict[str, Any], tmp_path: Path) -> None:
    recipe, _ = train(content)
    folder = recipe.run_dir
    averages = saved_steps(recipe, "ema.")[8]
    exported = load_file(export_hf(folder, tmp_path / "hf", weights="ema") / "model.safetensors")
    assert_equal(exported, averages)
    model, _ = load_model(folder, "cpu", weights="ema")
    assert torch.equal(dict(model.named_parameters())["norm.weight"], averages["model.norm.weight"])
    assert evaluate_checkpoint(folder, weights="ema").loss != evaluate_checkpoint(folder).loss
    assert generate_text(folder, "the ", 4, weights="ema")
    train(content | {"run": {"name": "without", "dir": str(tmp_path / "without")}}, ema=None, steps=6)
    with pytest.raises(CheckpointError, match=r"has no ema weights.*training\.ema"):
        export_hf(tmp_path / "without", tmp_path / "none", weights="ema")
    assert not (tmp_path / "none").exists()
