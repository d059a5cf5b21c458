"""A run resumes with fewer or more processes: same samples, and losses equal up to the order of additions."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Hlat = Callable[..., "object"]
DATA = {"prepared": [], "online": ["data.mode=online", "data.streams=12"]}
STEPS = 24


@pytest.fixture(scope="module")
def start(corpus: Path, tiny_recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Return arguments of ``hlat train`` for a run folder and any number of processes that divides 12."""
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


def read_lines(arguments: list[str], file: str) -> list[dict]:
    folder = Path(next(a for a in arguments if a.startswith("run.dir=")).removeprefix("run.dir="))
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def assert_same_samples_and_near_losses(actual: list[dict], expected: list[dict]) -> None:
    batches = [(line["step"], line["samples"], line["batch_crc32"]) for line in actual]
    assert batches == [(line["step"], line["samples"], line["batch_crc32"]) for line in expected]
    assert len({crc for _, _, crc in batches}) == len(batches), "all batches differ"
    for line, reference in zip(actual, expected, strict=True):
        # tests/distributed/comparing.py: 12 sqrt(n) u a step, with chains of fewer than 4000 additions here
        assert abs(line["loss"] - reference["loss"]) <= 12 * 4000**0.5 * 2.0**-24 * line["step"] * reference["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
def test_a_run_with_changing_numbers_of_processes_is_the_same_run(start, cli, data):
    undisturbed = start(f"quiet-{data}", data)
    assert cli(*undisturbed).returncode == 0
    arguments = start(f"changing-{data}", data)
    for nproc in ("4", "2", "3", "4"):
        done = cli(*arguments, "--nproc", nproc, "training.stop_after=6")
        assert done.returncode == 0, done.stderr
    assert_same_samples_and_near_losses(
        read_lines(arguments, "metrics.jsonl"), read_lines(undisturbed, "metrics.jsonl")
    )


@pytest.mark.slow
def test_the_run_shrinks_after_a_rank_is_lost_twice(start, cli):
    undisturbed = start("quiet-prepared", "prepared")
    assert cli(*undisturbed).returncode == 0
    kills = [{"kind": "kill", "rank": 1, "at_step": 7}] * 2
    arguments = start("shrinking", "prepared", "--nproc", "2:3", f"faults={json.dumps(kills)}", "--allow-faults")
    done = cli(*arguments)
    assert done.returncode == 0 and "rank 1 of 3 was lost twice in a row: continuing with 2 processes" in done.stderr, (
        done.stderr
    )
    events = read_lines(arguments, "events.jsonl")
    (resized,) = [event for event in events if event["event"] == "resized"]
    assert (resized["rank"], resized["before"], resized["now"]) == (1, 3, 2)
    assert [event["nproc"] for event in events if event["event"] == "restart"] == [3, 2]
    assert_same_samples_and_near_losses(
        read_lines(arguments, "metrics.jsonl"), read_lines(undisturbed, "metrics.jsonl")
    )
