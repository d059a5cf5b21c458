"""Fixtures of tests on the stand-in for a Trainium device."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import hlat
from tests.support.neuron.building import build, skip_reason
from tests.support.neuron.running import counts_of, hlat_on_neuron

STEPS = 6


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    """The library of the device, built before anything is timed."""
    if reason := skip_reason():
        pytest.skip(reason)
    build()


class Runs:
    """Runs of one small recipe in separate folders, on the CPU and on the device, which share the prepared text."""

    def __init__(self, folder: Path, recipe: Path, corpus: Path) -> None:
        self._folder, self._recipe, self._corpus = folder, recipe, corpus

    def words(self, name: str, *more: str) -> list[str]:
        """Arguments of the command; ``more`` replaces what it sets too."""
        words = [
            "train",
            str(self._recipe),
            f"data.path={self._corpus}",
            f"data.prepared_dir={self._folder / 'data'}",
            f"run.dir={self.folder(name)}",
            f"training.steps={STEPS}",
            "training.log_every=1",
            "checkpoint.every_steps=3",
            "checkpoint.keep_last=100",
            "evaluation.every_steps=3",
            "tracking.console=plain",
            "tracking.tensorboard=false",
            "recovery.backoff_seconds=0.05",
            "run.compile=none",
        ]
        given = {word.partition("=")[0] for word in more}
        return [word for word in words if word.partition("=")[0] not in given] + list(more)

    def folder(self, name: str) -> Path:
        """Folder of a run."""
        return self._folder / name

    def on_cpu(self, name: str, *more: str) -> Path:
        """Train on the CPU, unless a test did."""
        if not self.folder(name).exists():
            done = hlat(*self.words(name, *more))
            assert done.returncode == 0, done.stderr
        return self.folder(name)

    def try_on_neuron(
        self, name: str, *more: str, allow: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Train on the device."""
        counts = self._folder / f"{name}-counts"
        return hlat_on_neuron(*self.words(name, *more), allow=allow, counts=counts, env=env)

    def on_neuron(self, name: str, *more: str, allow: Sequence[str] = (), env: dict[str, str] | None = None) -> Path:
        """Train on the device, which has to succeed."""
        done = self.try_on_neuron(name, *more, allow=allow, env=env)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return self.folder(name)

    def counts(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        """Counts of each step of a rank."""
        return counts_of(self._folder / f"{name}-counts", rank)


def losses(run: Path, name: str = "loss") -> list[float]:
    """Loss of every step, or ``val_loss`` where the run was validated."""
    return [line[name] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if name in line]


@pytest.fixture(scope="session")
def runs(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the tiny recipe."""
    folder = tmp_path_factory.mktemp("neuron")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    return Runs(folder, folder / "recipe.yaml", corpus)
