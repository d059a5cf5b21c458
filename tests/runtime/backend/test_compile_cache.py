"""Folders of compiled code: the recipe's, else those of the environment, else one of this user alone."""

import os
from pathlib import Path

import pytest

from hlat.runtime import LaunchError
from hlat.runtime.backend import backend_of, compile_cache_folders, restored_settings, use_compile_cache
from hlat.runtime.backend.neuron import ENVIRONMENT

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for device_type in ("cpu", "cuda", "neuron"):
        for variable in backend_of(device_type).compile_cache:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("hlat.runtime.backend.compile_cache._set_here", {})


def test_ranks_share_a_cache_unless_their_compilers_race(tmp_path: Path) -> None:
    for device_type in ("cpu", "cuda"):
        one, other = (compile_cache_folders(device_type, tmp_path, rank) for rank in (0, 3))
        assert one == other and one[INDUCTOR] == tmp_path / "inductor"
    folders = [compile_cache_folders("neuron", tmp_path, rank) for rank in (0, 3)]
    assert not set(folders[0].values()) & set(folders[1].values())
    assert folders[1]["TORCH_NEURONX_NEFF_CACHE_DIR"] == tmp_path / "rank-3" / "neff"
    assert folders[0].keys() - {INDUCTOR} <= ENVIRONMENT.keys(), "the table documents them"


def test_a_recipes_folder_is_before_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, "/given")
    assert compile_cache_folders("cpu", None, 0) == {INDUCTOR: Path("/given")}
    assert compile_cache_folders("neuron", None, 2)[INDUCTOR] == Path("/given/rank-2")
    assert compile_cache_folders("cpu", tmp_path, 0) == {INDUCTOR: tmp_path / "inductor"}


def test_without_either_it_is_a_folder_of_this_user(tmp_path: Path) -> None:
    own = tmp_path / f"hlat-compiled-{os.getuid()}"
    assert compile_cache_folders("cpu", None, 0) == {INDUCTOR: own / "inductor"}
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(LaunchError, match="others can write there"):
        compile_cache_folders("cpu", None, 0)
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(LaunchError, match="others can write there"):
        compile_cache_folders("cpu", None, 0)


def test_what_a_run_has_set_does_not_bind_the_next_one(tmp_path: Path) -> None:
    with restored_settings():
        use_compile_cache("neuron", tmp_path / "a", 1)
        assert os.environ[INDUCTOR] == str(tmp_path / "a" / "rank-1" / "inductor")
        use_compile_cache("neuron", None, 1)
        assert os.environ[INDUCTOR].startswith(str(tmp_path / "hlat-compiled-"))
        before = os.environ[INDUCTOR]
        use_compile_cache("neuron", None, 1)
        assert os.environ[INDUCTOR] == before, "no second rank-1"
    assert INDUCTOR not in os.environ


def test_versions_name_everything_that_code_depends_on() -> None:
    import torch  # noqa: PLC0415

    versions = backend_of("cpu").compiler_versions(torch.device("cpu"))
    assert versions["torch"] == torch.__version__ and versions["Python"] and versions["device"]
    assert {"C++ compiler", "torch's folder"} <= versions.keys()
