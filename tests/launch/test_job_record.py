"""The record of a run's Slurm jobs: why it cannot be read, without the words of the system."""

from pathlib import Path

import pytest

from hlat.launch.slurm import newest_job
from hlat.runtime.errors import LaunchError


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
