"""Runs with and without fused kernels: the same losses up to rounding, and no change of kernels unasked."""

import io
import json
from pathlib import Path

import pytest
import torch
import yaml

from hlat.checkpoint.protocol.reader import read_meta, resolve
from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.model import product_library
from hlat.model.kernels.library import describe_kernels
from hlat.runtime.errors import CheckpointError
from hlat.training import run
from tests.model.test_parity import longest_path
from tests.support.model.kernel_cases import torch_only
from tests.support.same_runs import events_of

KERNELS = describe_kernels(torch.device("cpu"))


@pytest.fixture
def recipe_of(tiny_recipe: str, corpus: Path, tmp_path: Path):
    """Function that makes the tiny recipe, in fp32, with a run name and a number of steps."""

    def recipe(name: str, steps: int) -> Recipe:
        content = yaml.safe_load(tiny_recipe)
        content["precision"] = {"mode": "fp32"}
        content["run"]["dir"] = str(tmp_path / name)
        content["data"] |= {"path": str(corpus), "prepared_dir": str(tmp_path / "data")}
        content["schedule"]["warmup_steps"] = 2
        content["training"] |= {"steps": 4, "stop_after": steps, "log_every": 1}
        content["checkpoint"] |= {"every_steps": 2}
        content["tracking"] = {"tensorboard": False, "console": "plain"}
        return parse_recipe(content)

    return recipe


def trained(recipe: Recipe) -> str:
    """Train; return the output."""
    said = io.StringIO()
    run(recipe, stream=said)
    return said.getvalue()


def first_line(recipe: Recipe) -> dict[str, float]:
    """Metrics of the first step."""
    found: dict[str, float] = json.loads((recipe.run_dir / "metrics.jsonl").read_text().splitlines()[0])
    return found


def test_a_run_without_kernels_has_the_same_loss_and_gradient(recipe_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round each operation on the longest path of the model once, a unit of fp32 each."""
    monkeypatch.setenv("HLAT_VERBOSE", "1")
    with_kernels, without = recipe_of("kernels", 1), recipe_of("torch", 1)
    assert f"norms, RoPE, SwiGLU and loss: {KERNELS}" in trained(with_kernels)
    with torch_only():
        assert "norms, RoPE, SwiGLU and loss: torch" in trained(without)
    bound = 2 * longest_path(with_kernels.model, with_kernels.data.sequence_length) * 2.0**-24
    mine, theirs = first_line(with_kernels), first_line(without)
    for name in ("loss", "grad_norm"):
        assert mine[name] == pytest.approx(theirs[name], rel=bound)


def test_a_run_resumes_with_other_kernels_only_if_that_is_accepted(recipe_of) -> None:
    with torch_only():
        trained(recipe_of("run", 2))
    assert read_meta(resolve(recipe_of("run", 2).run_dir))["versions"]["kernels"] == "torch"
    with pytest.raises(CheckpointError, match=r"before the checkpoint by torch(.|\n)*run.deterministic=false"):
        trained(recipe_of("run", 3))
    accepted = recipe_of("run", 1)
    said = trained(accepted.model_copy(update={"run": accepted.run.model_copy(update={"deterministic": False})}))
    assert f"computed by {KERNELS}, before the checkpoint by torch" in said
    assert "before the checkpoint by" not in trained(recipe_of("run", 4)), "the new checkpoint has the new name"
    [found_products] = {event["products"] for event in events_of(recipe_of("run", 2).run_dir, "resume")}
    assert found_products == product_library(torch.float32, torch.device("cpu"))
    found = [event["kernels"] for kind in ("start", "resume") for event in events_of(recipe_of("run", 2).run_dir, kind)]
    assert found == ["torch", KERNELS, KERNELS]
