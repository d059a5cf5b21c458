"""Fixtures with corpora for the tests of the data room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hlat.data.prepare import preparation
from hlat.data.prepare.preparation import prepare
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparing import LARGE, UNIT, Watched, data_config, watch_units


@pytest.fixture(scope="module")
def small_units() -> Iterator[None]:
    """Work units of 50 kB instead of at least 1 MiB, so that a corpus of many units is tokenized in a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_SMALLEST_UNIT", UNIT)
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files with 60 documents, and null and empty rows."""
    folder = tmp_path_factory.mktemp("small")
    write_jsonl(folder / "a.jsonl", [*documents(40, 800), None, ""])
    write_jsonl(folder / "b.jsonl", [None, *documents(20, 800, seed=1)])
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of about 20 units and 8 shards, in three files; its tokenizer is trained on a sample."""
    folder = tmp_path_factory.mktemp("large")
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", documents(60, 4_500, seed=number))
    return folder


@pytest.fixture(scope="module")
def undisturbed(large: Path, small_units: None, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """The files of the large corpus prepared without interruption, and the units that were tokenized."""
    out = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        units = watch_units(patch)
        prepare(data_config(large, **LARGE), out, workers=2)
    assert len(units) > 15
    assert sum(name.startswith("train-0") for name in tree(out)) > 3
    return Watched(tree(out), units)


@pytest.fixture
def reference(undisturbed: Watched) -> dict[str, bytes]:
    """The files of the large corpus, prepared without interruption."""
    return undisturbed.files
