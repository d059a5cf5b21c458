"""Messages about a Slurm job: accelerators that it does not reserve or use, and a record that cannot be read."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hlat.launch.schedulers.slurm import newest_job
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
        (("--set", "gpus-per-node=2"), False),
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


def test_options_that_the_script_has_itself_are_refused_together(recipe_file, tmp_path):
    given = ["nodes=4", "--ntasks-per-node=8", "array=1-3", "-p gpu", "partition gpu", "constraint=ib"]
    words = [word for text in given for word in ("--set", text)]
    done = hlat("launch", "slurm", recipe_file, "data.path=texts", "--nodes", "1", *words, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    lines = [line.strip() for line in done.stderr.splitlines() if "--set" in line]
    assert lines == [
        "--set '-p gpu': expected one option of sbatch in the form --comment=text.",
        "--set '--partition gpu': expected one option of sbatch in the form --comment=text.",
        "--set --nodes=4: give --nodes, which sets it.",
        "--set --ntasks-per-node=8: give --nproc, which sets it.",
        "--set --array=1-3: give --chain, which sets it.",
    ]


@pytest.mark.parametrize("words", [(), ("--doctor",), ("--doctor", "--chain", "3"), ("--doctor", "--least", "1")])
def test_scripts_have_no_faults_that_shellcheck_knows(recipe_file, tmp_path, words):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    given = ("data.path=texts", "--nodes", "2", "--instance", "p5.48xlarge", "batch.global_batch=16", *words)
    script = hlat("launch", "slurm", recipe_file, "batch.micro_batch=1", *given, "--dry-run", cwd=tmp_path).stdout
    done = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


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
