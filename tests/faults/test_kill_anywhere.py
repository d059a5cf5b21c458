"""Law 3 with SIGKILL: whatever is killed at any time, the run ends with the same bits as an undisturbed run.

Five layouts, prepared and online data, two precisions; victims are a rank, all ranks, the supervisor, or everything.
"""

import random
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest

from tests.support.faults.killing import Killer, assert_same_run

LAYOUTS = {
    "one process": [],
    "DP2 ZeRO-1": ["--nproc", "2", "parallel.zero=1"],
    "TP2": ["--nproc", "2", "parallel.tensor=2"],
    "PP2": ["--nproc", "2", "parallel.pipeline=2"],
    "TP2 x DP2": ["--nproc", "4", "parallel.tensor=2"],
}
DATA = {"prepared": [], "online": ["data.mode=online", "data.streams=8"]}
PRECISIONS = ("mixed", "bf16-sr")
STEPS = {"one process": 500}  # others 200

KILLS = 10  # per case; 200 in all 20 cases


@pytest.fixture(scope="module")
def command(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory):
    """Return the arguments of ``hlat train`` for a run folder of this name; all runs share the prepared text."""
    folder = tmp_path_factory.mktemp("killed")
    recipe = folder / "recipe.yaml"
    recipe.write_text(tiny_recipe.replace("max_epochs: 20", "max_epochs: 1000"))

    def arguments(name: str, layout: str, data: str, precision: str, steps: int) -> tuple[list[str], Path]:
        run = folder / f"{name}-{crc32(repr((layout, data, precision)).encode()):08x}"
        return [
            "train",
            str(recipe),
            f"data.path={corpus}",
            f"data.prepared_dir={folder / f'data-{data}'}",
            f"run.dir={run}",
            f"training.steps={steps}",
            f"precision.mode={precision}",
            "training.log_every=1",
            "checkpoint.every_steps=7",
            "evaluation.every_steps=50",
            "tracking.console=plain",
            "tracking.tensorboard=false",
            "recovery.restarts=1000",
            "recovery.backoff_seconds=0.05",
            *LAYOUTS[layout],
            *DATA[data],
        ], run

    return arguments


def kill_and_compare(
    command, layout: str, data: str, precision: str, steps: int, kills: int, seed: int, fresh: bool
) -> Counter[str]:
    """Run one case until it has survived this many kills, and compare each run with the undisturbed one."""
    undisturbed, expected = command("undisturbed", layout, data, precision, steps)
    Killer(random.Random(0), 0, fresh).drive(undisturbed)
    killer, number = Killer(random.Random(seed), kills, fresh), 0
    while killer.left:
        arguments, run = command(f"killed-{number}", layout, data, precision, steps)
        killer.drive(arguments)
        assert_same_run(run, expected)
        number += 1
    return killer.kills


def test_a_run_killed_twice_ends_with_the_same_bits(command) -> None:
    kill_and_compare(command, "DP2 ZeRO-1", "online", "bf16-sr", steps=100, kills=2, seed=1, fresh=False)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_killed_at_random_ends_with_the_same_bits(command, layout: str, data: str, precision: str) -> None:
    seed, steps = crc32(repr((layout, data, precision)).encode()), STEPS.get(layout, 200)
    kills = kill_and_compare(command, layout, data, precision, steps, KILLS, seed, fresh=True)
    print(f"killed: {layout}, {data}, {precision}: {dict(kills)}")
