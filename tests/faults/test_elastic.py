"""A run goes on with fewer or more processes: the same samples, and losses as near as the order of additions allows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Hlat = Callable[..., "object"]
DATA = {"prepared": [], "online": ["data.mode=online", "data.streams=12"]}
STEPS = 24


@pytest.fixture(scope="module")
def start(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """The arguments of ``hlat train`` in a run folder of that name, for any number of processes that divides 12."""
    folder = tmp_path_factory.mktemp("elastic")
    recipe = folder / "recipe.yaml"
    recipe.write_text(tiny_recipe)

    def arguments(name: str, data: str, *more: str) -> list[str]:
        return [
            "train",
            str(recipe),
            f"data.path={corpus}",
            f"data.prepared_dir={folder / f'data-{data}'}",
            f"run.dir={folder / name}",
            f"training.steps={STEPS}",
            "training.log_every=1",
            "batch.global_batch=12",
            "batch.micro_batch=1",
            "checkpoint.every_steps=4",
            "evaluation.every_steps=null",
            "tracking.console=plain",
            "tracking.tensorboard=false",
            "recovery.backoff_seconds=0.05",
            *DATA[data],
            *more,
        ]

    return arguments


def lines(arguments: list[str], file: str) -> list[dict]:
    folder = Path(next(a for a in arguments if a.startswith("run.dir=")).removeprefix("run.dir="))
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def assert_same_samples_and_near_losses(found: list[dict], expected: list[dict]) -> None:
    read = [(line["step"], line["samples"], line["batch_crc32"]) for line in found]
    assert read == [(line["step"], line["samples"], line["batch_crc32"]) for line in expected]
    assert len({crc for _, _, crc in read}) == len(read), "no batch is like another"
    for line, other in zip(found, expected, strict=True):
        # tests/distributed/comparing.py: 12 sqrt(n) u a step, with chains of fewer than 4000 additions here
        assert abs(line["loss"] - other["loss"]) <= 12 * 4000**0.5 * 2.0**-24 * line["step"] * other["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
def test_with_four_two_three_and_four_processes_it_is_the_same_run(start, cli, data):
    quiet = start(f"quiet-{data}", data)
    assert cli(*quiet).returncode == 0
    arguments = start(f"changing-{data}", data)
    for nproc in ("4", "2", "3", "4"):
        done = cli(*arguments, "--nproc", nproc, "training.stop_after=6")
        assert done.returncode == 0, done.stderr
    assert_same_samples_and_near_losses(lines(arguments, "metrics.jsonl"), lines(quiet, "metrics.jsonl"))


@pytest.mark.slow
def test_a_rank_that_is_lost_twice_is_left_out(start, cli):
    quiet = start("quiet-prepared", "prepared")
    assert cli(*quiet).returncode == 0
    kills = [{"kind": "kill", "rank": 1, "at_step": 7}] * 2
    arguments = start("shrinking", "prepared", "--nproc", "2:3", f"faults={json.dumps(kills)}", "--allow-faults")
    done = cli(*arguments)
    assert done.returncode == 0 and "rank 1 of 3 was lost twice in a row: continuing with 2 processes" in done.stderr, (
        done.stderr
    )
    events = lines(arguments, "events.jsonl")
    (resized,) = [event for event in events if event["event"] == "resized"]
    assert (resized["rank"], resized["before"], resized["now"]) == (1, 3, 2)
    assert [event["nproc"] for event in events if event["event"] == "restart"] == [3, 2]
    assert_same_samples_and_near_losses(lines(arguments, "metrics.jsonl"), lines(quiet, "metrics.jsonl"))
