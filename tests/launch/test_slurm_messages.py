"""Messages about a Slurm job: accelerators that it does not reserve or use, and a record that cannot be read."""

from pathlib import Path

import pytest

from hlat.launch.slurm import newest_job
from hlat.runtime.errors import LaunchError
from tests.support.commands import hlat


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ((), True),
        (("--sbatch=--reservation=mine",), True),
        (("--sbatch=--gpus-per-node=2",), False),
        (("--sbatch=--gres=gpu:2",), False),
        (("--sbatch=--exclusive",), False),
        (("--instance", "p5.48xlarge"), False),
        (("run.device=cpu",), False),
    ],
)
def test_a_job_without_accelerators_is_warned_of(recipe_file, tmp_path, words, warns) -> None:
    words = ("data.path=texts", "batch.micro_batch=1", *words)
    done = hlat("launch", "slurm", str(recipe_file), "--nodes", "1", "--dry-run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("asks Slurm for no accelerators" in done.stderr) == warns
    assert "warning" not in done.stdout, "the script can be piped into sbatch"


@pytest.mark.parametrize(
    ("nproc", "said"),
    [
        ("8", ""),
        ("4", "--nproc 4 uses 4 of them. Use --nproc 8"),
        ("16", "--nproc 16 starts more processes than that"),
    ],
)
def test_devices_that_a_job_reserves_and_does_not_use_are_said(recipe_file, tmp_path, nproc, said) -> None:
    words = ("data.path=texts", "batch.micro_batch=1", "batch.global_batch=16", "--instance", "h100", "--nproc", nproc)
    done = hlat("launch", "slurm", str(recipe_file), "--nodes", "1", "--dry-run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("reserves the 8 devices of each h100" in done.stderr) == bool(said) and said in done.stderr


def test_a_record_of_jobs_that_cannot_be_read_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm-jobs.jsonl").write_text("not JSON\n")
    with pytest.raises(LaunchError, match=r"slurm-jobs\.jsonl\) is damaged in its last line"):
        newest_job(tmp_path)
    (tmp_path / "slurm-jobs.jsonl").write_text("")
    with pytest.raises(LaunchError, match=r"slurm-jobs\.jsonl\) is empty.*`hlat launch slurm` submits one"):
        newest_job(tmp_path)

    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(LaunchError, match=r": permission denied\. Ask for the permission") as caught:
        newest_job(tmp_path)
    assert "Errno" not in str(caught.value)
