"""Two installations have the same identity exactly if their source files are equal."""

import shutil
from pathlib import Path

import hlat
from hlat.runtime.distributed.host_collectives import format_ranks
from hlat.runtime.distributed.join import _source_hash, code_identity

PACKAGE = Path(hlat.__file__).parent


def test_the_identity_has_a_source_hash_and_versions():
    code_identity.cache_clear()  # an earlier test in this process may have computed it with replaced functions
    identity = code_identity()
    assert set(identity) == {"source", "hlat", "torch", "python"} and all(identity.values())
    assert identity["source"] == _source_hash(PACKAGE)


def test_a_copy_has_the_same_hash_and_any_change_another(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    same = _source_hash(tmp_path / "copy")
    assert same == _source_hash(PACKAGE)
    file = tmp_path / "copy" / "optim" / "__init__.py"
    for change in (
        lambda: file.write_text(file.read_text() + "\n"),
        lambda: file.rename(file.with_name("renamed.py")),
        file.with_name("added.py").touch,
    ):
        before = _source_hash(tmp_path / "copy")
        change()
        assert _source_hash(tmp_path / "copy") != before


def test_ranks_are_formatted_compactly():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
