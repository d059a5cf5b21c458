"""Components of other packages: found by their entry point, checked before any process starts, resumed like our own."""

import importlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hlat.checkpoint.protocol.reader import open_checkpoint, resolve
from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.launch.start_examination import check_extensions
from hlat.training import run
from hlat.training.optional_components import installed_components
from tests.support.same_runs import assert_same_state

SOURCE = '''
import torch
from hlat.checkpoint import ExtraState
from hlat.config import Section
from hlat.training.components import TrainingComponent

class Options(Section):
    scale: float = 1.0

class Movement(TrainingComponent):
    """Sums of the absolute changes of the weights, and the number of steps."""

    Options = Options
    calls = []

    def __init__(self, options, parameters):
        self._scale, self._parameters = options.scale, parameters
        self._before = [torch.empty_like(each.tensor) for each in parameters]
        self._sums = [torch.zeros_like(each.tensor) for each in parameters]
        self._steps = torch.zeros((), dtype=torch.int64)

    def begin(self, start):
        self.calls.append(("begin", start.step, start.recipe.run.name))
        start.stack.callback(self.calls.append, "left")
        self._remember()

    def before_step(self):
        self.calls.append("before")

    def after_step(self, end):
        self.calls.append(("after", end.step, end.is_last))
        for total, before, each in zip(self._sums, self._before, self._parameters):
            total += (each.tensor - before).abs() * self._scale
        self._steps += 1
        self._remember()

    def at_end(self, result):
        self.calls.append("end")

    def state(self):
        return [ExtraState("movement", self._sums, {"steps": self._steps})]

    def reset(self):
        for total in self._sums:
            total.zero_()
        self._steps.zero_()

    def _remember(self):
        for before, each in zip(self._before, self._parameters):
            before.copy_(each.tensor)

class Misnamed(Movement):
    def state(self):
        return [ExtraState("model", self._sums)]

nothing = 3
'''


def package(folder: Path, name: str, source: str, entries: dict[str, str]) -> None:
    """Install a package of one module as pip would: the module, and its metadata."""
    module = name.replace("-", "_")
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = [f"{entry} = {value}" for entry, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[hlat.components]", *lines, ""]))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages, one that works and others that do not."""
    folder = tmp_path / "site"
    entries = {name.lower(): f"its_module:{name}" for name in ("Movement", "Misnamed", "nothing")}
    package(folder, "its-module", SOURCE, entries | {"model": "its_module:Movement", "twice": "its_module:Movement"})
    broken = {"broken": "broken_module:Anything", "twice": "broken_module:Anything"}
    package(folder, "broken-module", "print('hello')\nimport no_such_library\n", broken)
    package(folder, "crashing-module", "import os\nos._exit(5)\n", {"crashing": "crashing_module:Anything"})
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield folder
    for module in ("its_module", "broken_module"):
        sys.modules.pop(module, None)


@pytest.fixture
def content(tiny_recipe: str, corpus: Path, prepared: Path, tmp_path: Path) -> dict[str, Any]:
    content = yaml.safe_load(tiny_recipe)
    content["run"] = {"name": "tiny", "dir": str(tmp_path / "run")}
    content["data"] |= {"path": str(corpus), "prepared_dir": str(prepared)}
    content["training"] = {"steps": 6, "log_every": 1, "seed": 3}
    content["checkpoint"] = {"every_steps": 1, "keep_last": 9, "background": False}
    content["tracking"] = {"tensorboard": False, "console": "plain"}
    return content


def asking(content: dict[str, Any], **components: Any) -> Any:
    return parse_recipe({**content, "training": {**content["training"], "components": components}})


def test_a_component_of_another_package_takes_part_in_a_run_and_is_resumed(
    installed: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    (entry,) = importlib.metadata.entry_points(group="hlat.components", name="movement")
    kind = entry.load()
    run(asking(content, movement={"scale": 2.0}), stream=io.StringIO())
    assert kind.calls[:3] == [("begin", 0, "tiny"), "before", ("after", 1, False)]
    assert kind.calls[-3:] == [("after", 6, True), "end", "left"]
    straight = Path(content["run"]["dir"])
    saved = open_checkpoint(resolve(straight))
    assert saved.read(["movement.steps"])["movement.steps"] == 6
    weights = {step: open_checkpoint(straight / f"checkpoints/step-{step:08d}").load("model.") for step in range(1, 7)}
    first = open_checkpoint(straight / "checkpoints/step-00000001").load("movement.model")
    for name, total in saved.load("movement.model").items():
        moved = first[name].clone()
        for step in range(2, 7):
            moved += (weights[step][f"model{name}"] - weights[step - 1][f"model{name}"]).abs() * 2.0
        assert torch.equal(total, moved), name
    content["run"]["dir"] = str(tmp_path / "stopped")
    for stop in (2, None):
        content["training"]["stop_after"] = stop
        run(asking(content, movement={"scale": 2.0}), stream=io.StringIO())
    assert_same_state(straight, tmp_path / "stopped")


@pytest.mark.parametrize(
    ("components", "problems"),
    [
        (
            {"broken": {}, "movment": {}, "movement": {"scale": "big", "more": 1}},
            [
                "training.components.broken: importing it from package broken-module 1.2 (broken_module:Anything) "
                "failed: ModuleNotFoundError: No module named 'no_such_library'. Repair that package.",
                "training.components.movment: no installed package has a component of this name.",
                "Did you mean movement or model?",
                "training.components.movement.scale = 'big': must be a valid number",
                "training.components.movement.more = 1: there is no such option. Options: scale.",
            ],
        ),
        (
            {"twice": {}},
            ["several packages have a component of this name: package broken-module 1.2", "its-module 1.2"],
        ),
        (
            {"nothing": {}},
            ["(its_module:nothing) is of type int, and not a subclass of hlat.training.components.TrainingComponent"],
        ),
        ({"model": {}}, ["training.components.model: the name is reserved for hlat's own state."]),
    ],
)
def test_all_problems_are_named_at_once_here_and_by_the_supervisor(
    installed: Path, content: dict[str, Any], components: dict[str, Any], problems: list[str]
) -> None:
    recipe = asking(content, **components)
    with pytest.raises(RecipeError) as raised:
        installed_components(recipe)
    assert all(problem in str(raised.value) for problem in problems), str(raised.value)
    if "broken" in components:
        with pytest.raises(RecipeError) as before:
            check_extensions(recipe, 1)
        assert str(before.value).startswith("parts of your own: 4 problems\n")
        assert list(map(str, before.value.problems)) == list(map(str, raised.value.problems))


def test_the_state_of_a_component_has_its_name(installed: Path, content: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="its state is called model; it has to be called misnamed"):
        run(asking(content, misnamed={}), stream=io.StringIO())


def test_no_process_starts_if_a_package_cannot_be_imported(
    cli, installed: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "recipe.yaml"
    content["training"]["components"] = {"crashing": {}}
    file.write_text(yaml.safe_dump(content))
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = cli("train", file, "--nproc", "2", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 2
    assert "importing crashing ended its process with exit code 5" in done.stderr
    assert not (tmp_path / "run").exists()
