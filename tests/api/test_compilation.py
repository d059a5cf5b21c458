"""``hlat.compile_cache`` and ``hlat.unpack_cache``: the process stays as it was, errors are those of the command."""

import os
from pathlib import Path

import pytest
import torch

import hlat
from hlat.compilation import pack
from hlat.runtime.backend.table import backend_of


def test_an_archive_fills_the_cache_that_the_recipe_names(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(b"code")
    versions = backend_of("cpu").compiler_versions(torch.device("cpu"))
    pack(tmp_path / "code.tar", "cpu", versions, 1, {"inductor/ab/code": tmp_path / "code"})
    changes = {"run.compile_cache": str(tmp_path / "cache"), "run.device": "cpu", "data.path": "none"}
    before = dict(os.environ)
    found = hlat.unpack_cache(recipe_file, tmp_path / "code.tar", changes)
    assert (found.files, found.size, found.versions) == (1, 4, versions)
    assert (tmp_path / "cache" / "inductor" / "ab" / "code").read_bytes() == b"code"
    assert dict(os.environ) == before
    with pytest.raises(hlat.StorageError, match=r"absent\.tar"):
        hlat.unpack_cache(recipe_file, tmp_path / "absent.tar", changes)


@pytest.mark.slow  # a new interpreter
def test_a_refusal_of_the_processes_is_raised_here(recipe_file: Path, tmp_path: Path) -> None:
    changes = {"run.compile_cache": str(tmp_path / "cache"), "run.device": "cpu", "data.path": "none"}
    with pytest.raises(hlat.LaunchError, match=r"nothing to compile.*run\.compile=blocks"):
        hlat.compile_cache(recipe_file, changes | {"run.compile": "none"}, out=tmp_path / "code.tar")
    with pytest.raises(hlat.StorageError, match="does not exist"):
        hlat.compile_cache(recipe_file, changes, out=tmp_path / "no" / "code.tar")
    assert not (tmp_path / "code.tar").exists()
