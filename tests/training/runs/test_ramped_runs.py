"""Runs with a batch ramp: killed, resumed, on other numbers of ranks and rolled back, they read the same samples."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.same_runs import assert_same_run, events_of, metrics_of

SIZES = [4, 4, 4, 8, 8, 16, 16, 16, 16, 16]  # sequences of each step
STEPS, LENGTH = len(SIZES), 32
RUN = [
    f"training.steps={STEPS}",
    "training.log_every=1",
    "batch.global_batch=16",
    "batch.micro_batch=2",
    f"batch.ramp=[{{tokens: {3 * 4 * LENGTH - 100}, global_batch: 4}}, {{tokens: {2 * 8 * LENGTH}, global_batch: 8}}]",
    "evaluation.every_steps=null",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
    "anomalies.window=8",
    "recovery.backoff_seconds=0",
    "tracking.console=plain",
    "tracking.tensorboard=false",
]
FORMS = {"prepared": [], "online": ["data.mode=online", "data.streams=8"]}


class Runs:
    """Runs of one recipe on the same data, each in its folder."""

    def __init__(self, folder: Path, overrides: list[str], cli: Callable[..., "object"], data: Path) -> None:
        self._folder, self._overrides, self._cli, self._data = folder, overrides, cli, data

    def train(self, name: str, *more: str) -> Path:
        """Train a run, or go on with it; return its folder."""
        here = [f"run.dir={self._folder / name}", f"data.prepared_dir={self._data}"]
        done = self._cli("train", self._folder / "recipe.yaml", *here, *RUN, *self._overrides, *more)
        assert done.returncode == 0, done.stderr
        self.printed = done.stdout
        return self._folder / name


@pytest.fixture(scope="module", params=FORMS)
def runs(request, tmp_path_factory, tiny_recipe, corpus, prepared, cli) -> Runs:
    folder = tmp_path_factory.mktemp("ramped")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    data = prepared if request.param == "prepared" else folder / "data"
    return Runs(folder, [f"data.path={corpus}", *FORMS[request.param]], cli, data)


@pytest.fixture(scope="module")
def straight(runs) -> Path:
    """An undisturbed run of one process."""
    run = runs.train("straight")
    expected = "; 10 steps: 3 of 128 tokens, then 2 of 256 tokens, then 5 of 512 tokens"
    assert expected in runs.printed, runs.printed
    return run


def batches(run: Path) -> list[tuple[int, ...]]:
    """Step, samples, tokens and checksum of each step."""
    return [tuple(line[name] for name in ("step", "samples", "tokens", "batch_crc32")) for line in metrics_of(run)]


def test_positions_are_sums_over_the_stages(straight):
    positions = [sum(SIZES[:step]) for step in range(1, STEPS + 1)]
    found = batches(straight)
    assert [line[:3] for line in found] == [
        (step, position, position * LENGTH) for step, position in enumerate(positions, start=1)
    ]
    assert len({crc for *_, crc in found}) == STEPS, "all batches differ"


@pytest.mark.slow  # test_resume kills a run with a ramp, and all else, at these places
def test_killed_within_a_stage_and_at_its_end_a_run_resumes_bitwise(runs, straight):
    """After step 2 (of 3 in the first stage) and before step 6, the first one with the final batch."""
    kills = "faults=[{kind: kill, at_step: 3, phase: backward}, {kind: kill, at_step: 6, phase: data}]"
    run = runs.train("killed", kills, "--allow-faults", "checkpoint.background=false")
    assert [event["step"] for event in events_of(run, "resume")] == [2, 4]
    assert_same_run(run, straight)


@pytest.mark.parametrize(
    "parts",
    [
        [("2", "training.stop_after=4"), ("1",)],
        pytest.param([("1", "training.stop_after=2"), ("2",)], marks=pytest.mark.slow),
    ],
    ids=["2, then 1", "1, then 2"],
)
def test_other_numbers_of_ranks_read_the_same_samples(runs, straight, parts):
    for nproc, *more in parts:
        run = runs.train(f"ranks {parts[0][0]}", "--nproc", nproc, *more)
    assert batches(run) == batches(straight)


@pytest.mark.slow
def test_a_pipeline_reads_the_same_samples(runs, straight):
    run = runs.train("pipeline", "--nproc", "2", "parallel.pipeline=2")
    assert batches(run) == batches(straight)


def test_after_a_rollback_the_bad_batch_is_left_out_and_all_others_keep_their_sizes(runs, straight):
    """Step 4 has the first batch of 8 sequences. Skipped, it keeps its place, so the stage has one step only."""
    run = runs.train("rolled back", "anomalies.spike=rollback", "faults=[{kind: spike, at_step: 4}]", "--allow-faults")
    (event,) = events_of(run, "anomaly")
    assert (event["step"], event["action"], event["samples"]) == (4, "rollback", [12, 20])
    assert [each["step"] for each in events_of(run, "rollback")] == [2]
    sizes = SIZES[:3] + SIZES[4:] + [16]
    lines = metrics_of(run)
    assert [line["samples"] for line in lines] == [sum(sizes[:n]) + 8 * (n > 3) for n in range(1, STEPS + 1)]
    assert [line["tokens"] for line in lines] == [sum(sizes[:n]) * LENGTH for n in range(1, STEPS + 1)]
    plain = [crc for *_, crc in batches(straight)]
    assert event["batch_crc32"] == plain[3]
    assert [line["batch_crc32"] for line in lines][:-1] == plain[:3] + plain[4:]
