"""Unfinished work damaged between two runs: the next run reports the damage or produces the same bytes."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlat.config.sections.data import DataConfig
from hlat.data.prepare import preparation
from hlat.data.prepare.partitions import merge_partition_folders, prepare_partition
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.runtime.errors import DataError
from tests.support.data.corpora import tree
from tests.support.data.preparation_model import tokenize_here
from tests.support.data.preparing import data_config, training_data


class Stopped(Exception):
    """Raised by the progress callback to stop a preparation."""


@pytest.fixture(scope="module", autouse=True)
def tokenize_in_this_process() -> Iterator[None]:
    """Tokenize units of 5 kB in this process."""
    with pytest.MonkeyPatch.context() as patch:
        tokenize_here(patch)
        patch.setattr(preparation, "_SMALLEST_UNIT", 5_000)
        yield


def stop(stage: str, done: int, total: int) -> None:
    if stage == "tokenize" and done > total // 2:
        raise Stopped


def flip_bit(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.fixture(scope="module")
def config(small: Path) -> DataConfig:
    return data_config(small, validation={"fraction": 0.2, "by": "tail"})


def test_damaged_unfinished_work_is_detected(config: DataConfig, tmp_path: Path) -> None:
    reference = tree(prepare(config, tmp_path / "reference", workers=1).dir)
    with pytest.raises(Stopped):
        prepare(config, tmp_path / "stopped", workers=1, progress=stop)
    left = tree(tmp_path / "stopped")
    names = [name for name in left if name.startswith("partial/units/")]
    assert len([name for name in names if name.endswith(".json")]) > 3
    assert len([name for name in names if name.endswith(".train")]) > 1, "tokens that no shard holds yet"
    rng, refused = random.Random(0), 0
    for name in [*names, "partial/hashes.json", "partial/key.json"]:
        for number, changed in enumerate([*(flip_bit(left[name], rng) for _ in range(3)), b"[" * 100_000, b""]):
            out = tmp_path / f"{Path(name).name}-{number}"
            shutil.copytree(tmp_path / "stopped", out)
            (out / name).write_bytes(changed)
            try:
                assert tree(prepare(config, out, workers=1).dir) == reference
            except DataError as error:
                assert name in str(error) or (name not in names and f"{out / 'partial'}: " in str(error))
                refused += 1
            shutil.rmtree(out)
    assert refused > 3 * len(names)


def test_a_damaged_partition_record_is_detected(config: DataConfig, tmp_path: Path, small: Path) -> None:
    given = data_config(small, tokenizer={"path": str(prepare(config, tmp_path / "first", workers=1).tokenizer_dir)})
    reference = tree(prepare(given, tmp_path / "reference", workers=1).dir)
    prepare_partition(given, tmp_path / "part", 1, 1, workers=1)
    record = tmp_path / "part" / "part" / "part.json"
    content, rng = record.read_bytes(), random.Random(0)
    refused = 0
    for number in range(60):
        record.write_bytes(flip_bit(content, rng))
        try:
            assert tree(merge_partition_folders(given, tmp_path / f"{number}", [tmp_path / "part"]).dir) == reference
        except DataError as error:
            assert str(tmp_path / "part") in str(error)
            refused += 1
    assert refused > 40


def read_rows(prepared: PreparedData) -> list[list[list[int]]]:
    data = training_data(prepared, 64, 0, packing="best-fit")
    batch = data.batch(0, data.samples_per_epoch)
    return [batch.inputs_BS.tolist(), batch.labels_BS.tolist()]


def test_a_damaged_packing_plan_is_computed_again(config: DataConfig, tmp_path: Path) -> None:
    prepared = prepare(config, tmp_path, workers=1)
    wanted, rng = read_rows(prepared), random.Random(0)
    (plan,) = (tmp_path / "rows").iterdir()
    right = tree(plan)
    assert sorted(right) == ["documents.npy", "lengths.npy", "offsets.npy", "rows.npy", "sums.json"]
    for name, content in right.items():
        for changed in [b"", content[:-1], *(flip_bit(content, rng) for _ in range(6)), None]:
            if changed is None:
                (plan / name).unlink()
            else:
                (plan / name).write_bytes(changed)
            assert read_rows(prepared) == wanted
            assert tree(plan) == right or name == "sums.json"  # white space in sums.json does not matter
    assert [path.name for path in (tmp_path / "rows").iterdir()] == [plan.name]
