"""A checkpoint saved in any layout loads into any other, resumes there, and exports to the same bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hlat.checkpoint import collect, export_hf, restore
from hlat.checkpoint.protocol.reader import open_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.optim import Optimizer, build_optimizer
from hlat.parallel import ParallelModel, build_parallel
from hlat.parallel.layout import StepShape
from hlat.parallel.stages.stage_layers import stage_layers
from hlat.runtime.distributed.join import Runtime
from hlat.training import accumulate_gradients, update
from tests.support.distributed.comparing import bound
from tests.support.distributed.jobs import batch_of
from tests.support.distributed.layouts import CASES, GLOBAL_BATCH, GQA, SOME, Case, recipe_content
from tests.support.distributed.workers import Pool

SAVED, GONE_ON = 3, 5  # steps before the checkpoint and after it


def _train(model: ParallelModel, optimizer: Optimizer, recipe: Recipe, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        term = accumulate_gradients(model, batch_of(model, recipe, step))
        losses.append(float(update(model, optimizer, recipe, step, term).loss))
    return losses


def _save(runtime: Runtime, model: ParallelModel, optimizer: Optimizer, recipe: Recipe, root: Path) -> None:
    meta = {"recipe": recipe.model_dump(mode="json")}
    store = CheckpointStore(root, keep_last=3, ranks=runtime.ranks)
    store.save(SAVED, collect(recipe.model, model.local_parameters, optimizer), meta)


def train_and_save(runtime: Runtime, content: dict[str, Any], root: Path) -> list[float]:
    """Train, save, and continue training."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, recipe.training.seed)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, matrices=model.matrices)
    _train(model, optimizer, recipe, 1, SAVED)
    _save(runtime, model, optimizer, recipe, root)
    return _train(model, optimizer, recipe, SAVED + 1, GONE_ON)


def load_and_go_on(
    runtime: Runtime, content: dict[str, Any], roots: list[Path], copy: Path | None = None
) -> list[list[float]]:
    """Load each checkpoint, save a copy, and continue training."""
    recipe = parse_recipe(content, world=runtime.world)
    model = build_parallel(recipe, runtime, None)
    optimizer = build_optimizer(model.local_parameters, recipe.optimizer, matrices=model.matrices)
    losses = []
    for root in roots:
        [folder] = root.glob("step-*")
        restore(open_checkpoint(folder), recipe.model, model.local_parameters, optimizer)
        if copy is not None:
            _save(runtime, model, optimizer, recipe, copy)
        losses.append(_train(model, optimizer, recipe, SAVED + 1, GONE_ON))
    return losses


Reference = Callable[[Case], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Train the model of a case in one process; return its checkpoint, and the losses after it."""
    known: dict[str, tuple[Path, list[float]]] = {}

    def find(case: Case) -> tuple[Path, list[float]]:
        key = repr((sorted(case.model.items()), case.lr))
        if key not in known:
            root = tmp_path_factory.mktemp("alone")
            alone = Case("one process", 1, {}, case.model, GLOBAL_BATCH, case.lr)
            torch.set_num_threads(1)
            known[key] = root, train_and_save(Runtime(torch.device("cpu")), recipe_content(alone), root)
        return known[key]

    return find


def _close(case: Case, losses: list[float], expected: list[float]) -> None:
    for number, (found, right) in enumerate(zip(losses, expected, strict=True), start=SAVED + 1):
        assert abs(found - right) <= bound(case, torch.float32, number) * right, f"step {number}"


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".safetensors", ".json")}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in SOME else pytest.mark.slow) for case in CASES]
)
def test_one_process_and_a_layout_load_each_others_checkpoints(
    case: Case, reference: Reference, pool: Pool, tmp_path: Path
) -> None:
    """A checkpoint of one process, loaded and saved in the layout, exports to the same bytes.

    From a checkpoint of the layout, one process continues as the layout does.
    """
    root, expected = reference(case)
    content = recipe_content(case)
    [losses] = pool.run(case.world, load_and_go_on, content, [root], tmp_path / "copy")[0]
    _close(case, losses, expected)
    original = _files(export_hf(root, tmp_path / "hf"))
    assert _files(export_hf(tmp_path / "copy", tmp_path / "hf-copy")) == original
    assert any(name.endswith(".safetensors") for name in original)

    went_on = pool.run(case.world, train_and_save, content, tmp_path / "own")[0]
    _close(case, went_on, expected)
    alone = Case("one process", 1, {}, case.model, GLOBAL_BATCH, case.lr)
    torch.set_num_threads(1)
    [losses] = load_and_go_on(Runtime(torch.device("cpu")), recipe_content(alone), [tmp_path / "own"])
    _close(case, losses, went_on)


def test_a_run_can_resume_with_a_different_split_into_stages(pool: Pool, tmp_path: Path) -> None:
    """The first part of the run uses a split with more layers in earlier stages, the second the balanced split."""
    model = {**GQA, "layers": 6}
    before, now = ([2, 2, 1, 1], None)
    cases = [Case(f"PP4, {split}", 4, {"pipeline": 4, "split": split}, model) for split in (before, now)]
    contents = [recipe_content(case) for case in cases]
    cut = StepShape.of(parse_recipe(contents[1], world=4), 4)
    assert [len(layers) for layers in stage_layers(cut)] != before
    went_on = pool.run(4, train_and_save, contents[0], tmp_path)
    found = pool.run(4, load_and_go_on, contents[1], [tmp_path])
    for [losses], expected in zip(found, went_on, strict=True):
        _close(cases[1], losses, expected)


@pytest.mark.slow
def test_every_layout_loads_the_checkpoints_of_every_other(pool: Pool, tmp_path: Path) -> None:
    """All pairs of layouts of the common model, and all pairs of layouts of each other model."""
    for model in {repr(sorted(case.model.items())): case.model for case in CASES}.values():
        cases = [case for case in CASES if case.model == model]
        own = {}
        for number, case in enumerate(cases):
            root = tmp_path / f"{len(own)}-{number}-{case.world}-{hash(repr(model)) % 9973}"
            own[root] = pool.run(case.world, train_and_save, recipe_content(case), root)[0]
        for case in cases:
            found = pool.run(case.world, load_and_go_on, recipe_content(case), list(own))[0]
            for losses, expected in zip(found, own.values(), strict=True):
                _close(case, losses, expected)


def test_most_layouts_use_the_common_model() -> None:
    """Otherwise the test of all pairs would cover little."""
    assert sum(case.model == GQA for case in CASES) >= 20
