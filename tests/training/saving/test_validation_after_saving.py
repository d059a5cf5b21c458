"""The state of a step is saved before validation, so a failure in validation loses only the validation."""

import json

import pytest

from hlat.checkpoint.protocol.reader import open_checkpoint
from tests.support.same_runs import assert_same_run, events_of, metrics_of

# Steps 20 and 40, the last one, are saved, validated and logged; step 30 is saved and logged.
RUN = ["recovery.backoff_seconds=0.05", "tracking.tensorboard=false", "checkpoint.keep_last=9"]


@pytest.fixture(scope="module")
def quiet(cli, tiny_recipe, corpus, tmp_path_factory):
    """Return the folder of an uninterrupted run of ``world`` processes."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "recipe.yaml").write_text(tiny_recipe)

    def run(processes):
        target = folder / str(processes)
        if not target.exists():
            nproc = ["--nproc", processes]
            done = cli("train", folder / "recipe.yaml", f"data.path={corpus}", f"run.dir={target}", *RUN, *nproc)
            assert done.returncode == 0, done.stderr
        return target

    return run


def faults(*each):
    return [f"faults={json.dumps(each)}", "--allow-faults"]


@pytest.mark.slow  # test_resume kills a run in validation in the default suite
@pytest.mark.parametrize(
    ("processes", "background"),
    [("1", "true"), ("1", "false"), ("2", "true")],
    ids=["beside", "not beside", "two ranks"],
)
def test_a_run_killed_in_validation_resumes_at_the_validated_step(
    cli, recipe_file, tiny, tmp_path, quiet, processes, background
):
    kinds = faults(
        {"kind": "kill", "at_step": 20, "phase": "evaluation"},
        {"kind": "exception", "at_step": 40, "phase": "evaluation"},
    )
    change = [*RUN, f"checkpoint.background={background}", "--nproc", processes]
    done = cli("train", recipe_file, *tiny, *change, *kinds)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert [event["step"] for event in events_of(run, "incident")] == [20, 40]
    assert [event["step"] for event in events_of(run, "resume")] == [20, 40]
    assert_same_run(run, quiet(processes))
    assert [line["step"] for line in metrics_of(run) if "val_loss" in line] == [20, 40]
    assert "validation loss" in done.stdout.splitlines()[-3]


def test_the_missing_line_of_a_step_without_validation_is_written_too(cli, recipe_file, tiny, tmp_path, quiet):
    """Its metrics are in the checkpoint, so a line lost in a power failure is written again."""
    stopped = cli("train", recipe_file, *tiny, *RUN, "training.stop_after=30")
    assert stopped.returncode == 0, stopped.stderr
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:7])
    done = cli("train", recipe_file, *tiny, *RUN)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "run", quiet("1"))


def test_a_checkpoint_has_the_metrics_of_its_line_except_the_times(cli, recipe_file, quick, tmp_path):
    """Only for logged steps; NaN and the infinities too, which JSON does not have."""
    nan = faults({"kind": "nan", "at_step": 10})
    every = ["checkpoint.every_steps=3", "training.steps=12", "training.log_every=5", "anomalies.non_finite=skip"]
    done = cli("train", recipe_file, *quick, *RUN, *every, "evaluation.every_steps=6", *nan, "training.stop_after=10")
    assert done.returncode == 0, done.stderr
    saved = {
        step: open_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{step:08d}").meta["metrics"]
        for step in (3, 6, 9, 10)
    }
    assert saved[3] is None and saved[9] is None
    lines = {line["step"]: line for line in metrics_of(tmp_path / "run")}
    for step in (6, 10):
        assert {key: value for key, value in lines[step].items() if not key.startswith("val_")} == saved[step]
    assert saved[10]["grad_norm"] == "NaN"


def test_non_finite_weights_are_not_saved_but_their_step_is_logged(cli, recipe_file, quick, tmp_path):
    """The line has no validation, which would be useless."""
    both = ["checkpoint.every_steps=5", "evaluation.every_steps=5", "optimizer.lr=1e38", "schedule.warmup_steps=1"]
    done = cli("train", recipe_file, *quick, *RUN, *both)
    assert done.returncode == 4 and "training has diverged" in done.stderr
    [line] = metrics_of(tmp_path / "run")
    assert line["step"] == 5 and line["param_norm"] == "NaN" and "val_loss" not in line
    assert not any((tmp_path / "run" / "checkpoints").iterdir())
