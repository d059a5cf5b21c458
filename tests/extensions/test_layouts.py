"""Own parts at every seam, in one process and sharded: killed and resumed with the same bits, and the same model."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.same_runs import events_of, metrics_of, newest

LAYOUTS = {
    "one": ("1", []),
    "tensor": ("2", ["parallel.tensor=2"]),
    "pipeline": ("2", ["parallel.pipeline=2"]),
    "zero3": ("2", ["parallel.zero=3"]),
}


@pytest.fixture
def train(cli, installed: Path, content: dict[str, Any], tmp_path: Path):
    """A run of the recipe by the command, in a folder of its own."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(content))

    def run(name: str, nproc: str, *words: str) -> Path:
        done = cli("train", file, f"run.dir={tmp_path / name}", "--nproc", nproc, *words, env=dict(os.environ))
        assert done.returncode == 0, done.stderr + done.stdout
        return tmp_path / name

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_run_with_own_parts_resumes_with_the_same_bits(layout: str, train) -> None:
    nproc, words = LAYOUTS[layout]
    straight = train("straight", nproc, *words)
    kill = "faults=[{kind: kill, at_step: 5}]"
    killed = train("killed", nproc, *words, kill, "--allow-faults")
    assert events_of(killed, "resume")
    tensors, others = newest(straight).load(""), newest(killed).load("")
    assert tensors.keys() == others.keys()
    assert {name.split(".")[0] for name in tensors} >= {"model", "optimizer", "largest"}
    assert sum(name.startswith("optimizer.momentum.") for name in tensors) > 10
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    assert metrics_of(straight) == metrics_of(killed)
    lines = [line.split() for line in (killed / "lines.txt").read_text().splitlines() if not line.startswith("run")]
    assert [int(step) for step, _ in lines] == list(range(1, 9))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_sharded_run_with_own_parts_is_that_of_one_process(layout: str, train) -> None:
    whole, sharded = train("whole", "1"), train("sharded", *[LAYOUTS[layout][0], *LAYOUTS[layout][1]])
    for one, other in zip(metrics_of(whole), metrics_of(sharded), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-4), one["step"]
