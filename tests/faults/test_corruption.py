"""A flipped bit in runs of the real command is found, reported and not saved, and the final state is correct."""

from pathlib import Path

import pytest

from tests.support.same_runs import assert_same_run, events_of, newest

FLIP = ["--allow-faults", "faults=[{kind: bitflip, at_step: 6, rank: 1}]"]
LAYOUT = ["--nproc", "3", "parallel.zero=0", "batch.global_batch=6", "batch.micro_batch=2"]
STEPS = ["training.steps=14", "training.log_every=1", "checkpoint.every_steps=4"]


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_the_run_resumes_without_it(
    cli, recipe_file: Path, tiny: list[str], tmp_path: Path
) -> None:
    command = ["train", recipe_file, *tiny, *LAYOUT, *STEPS]
    assert cli(*command, f"run.dir={tmp_path / 'undisturbed'}").returncode == 0

    alone = f"run.dir={tmp_path / 'alone'}"
    found = cli(*command, *FLIP, alone, "recovery.restarts=0")
    assert found.returncode == 5 and "rank 1 on" in found.stderr and "is wrong" in found.stderr, found.stderr
    assert "Traceback" not in found.stderr and newest(tmp_path / "alone").meta["step"] == 4
    again = cli(*command, *FLIP, alone)
    assert again.returncode == 0 and "step 8 was repeated, and its replicas are equal: rank 1 on" in again.stdout, (
        again.stderr
    )

    supervised = cli(*command, *FLIP, f"run.dir={tmp_path / 'supervised'}")
    assert supervised.returncode == 0, supervised.stderr
    assert len(events_of(tmp_path / "supervised", "restart")) == 1
    for name in ("alone", "supervised"):
        run = tmp_path / name
        assert_same_run(run, tmp_path / "undisturbed")
        assert [event["ranks"] for event in events_of(run, "corruption")] == [[1]]
        assert [event["ranks"] for event in events_of(run, "corruption_explained")] == [[1]]
