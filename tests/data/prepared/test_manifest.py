"""A changed manifest is refused, or gives the same samples: no field of it is trusted without a check.

The reference is a plain reader without a manifest: shard files by name, numpy, and rows of S + 1 tokens.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hlat.config.sections.data import DataConfig
from hlat.data.online.prepare import prepare_online
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.verification import verify_data
from hlat.data.prepared import prepared_folder
from hlat.data.prepared.manifest import read_data_manifest
from hlat.data.prepared.prepared_folder import PreparedData, open_prepared
from hlat.data.samples.training_data import TrainingData, ValidationData
from hlat.data.stores.local_files import with_checksum
from hlat.data.tokenizers.load import load_saved
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.preparation_model import tokenize_here
from tests.support.data.preparing import SMALL

LENGTH = 32


@pytest.fixture(scope="module", autouse=True)
def single_process() -> Iterator[None]:
    """Tokenize in this process, and load the tokenizer of a folder, which these tests do not change, only once."""
    with pytest.MonkeyPatch.context() as patch:
        tokenize_here(patch)
        loaded: dict[Path, Any] = {}

        def load_once(folder: Path) -> Any:
            loaded[folder] = loaded.get(folder) or load_saved(folder)
            return loaded[folder]

        patch.setattr(prepared_folder, "load_saved", load_once)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Two sources with every kind of row, and several shards each."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = documents(40, 800)
    write_jsonl(folder / "a.jsonl", [*texts, None, "", texts[3]])
    write_jsonl(folder / "b.jsonl", [texts[5], *documents(20, 800, seed=1)])
    with (folder / "b.jsonl").open("a") as file:
        file.write("{nonsense\n")
    sources = [{"path": str(folder / f"{name}.jsonl"), "name": name} for name in "ab"]
    more = {"duplicates": "drop", "unreadable_rows": 0.1, "shuffle": False, "sequence_length": LENGTH}
    return DataConfig.model_validate({**SMALL, "sources": sources, **more})


@pytest.fixture(scope="module")
def finished(config: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """Prepare the corpus; tests change its manifest through ``folder``, which restores it."""
    return prepare(config, tmp_path_factory.mktemp("finished"), workers=1)


@pytest.fixture
def folder(finished: PreparedData) -> Iterator[Path]:
    """Yield the folder of the prepared data; restore its manifest after the test."""
    content = (finished.dir / "manifest.json").read_bytes()
    yield finished.dir
    (finished.dir / "manifest.json").write_bytes(content)


def without_checksum(folder: Path) -> dict[str, Any]:
    """Return the values of the manifest."""
    stored = json.loads((folder / "manifest.json").read_bytes())
    del stored["checksum"]
    return dict(stored)


def with_right_checksum(values: Any) -> bytes:
    """Return a manifest of these values, as who changes it on purpose would write it."""
    content = with_checksum(values) if isinstance(values, dict) else values
    return json.dumps(content, indent=2, ensure_ascii=False).encode()


def reference_rows(folder: Path, split: str) -> list[list[int]]:
    """Read all rows of a split in the order of the corpus: S inputs and the label of the last one."""
    files = sorted(file for file in folder.glob(f"{split}-*.bin") if "documents" not in file.name)
    tokens = np.concatenate([np.fromfile(file, dtype="<u2") for file in files])
    return [tokens[row * LENGTH : (row + 1) * LENGTH + 1].tolist() for row in range((len(tokens) - 1) // LENGTH)]


def samples(found: PreparedData, config: DataConfig) -> list[list[int]]:
    """Read an epoch and three samples of the next one."""
    data = TrainingData(found, config, seed=0)
    batch = data.batch(0, data.samples_per_epoch + 3)
    both = zip(batch.inputs_BS.tolist(), batch.labels_BS.tolist(), strict=True)
    return [[*inputs, labels[-1]] for inputs, labels in both]


def validation(found: PreparedData) -> list[list[int]]:
    """Read the inputs and labels of the validation split."""
    data = ValidationData(found, LENGTH)
    batch = data.batch(0, len(data))
    return [batch.inputs_BS.tolist(), batch.labels_BS.tolist()]


class ManifestChecker:
    """Checker that counts refused and accepted manifests, and fails if an accepted one gives other samples."""

    def __init__(self, folder: Path, config: DataConfig) -> None:
        self._folder, self._config = folder, config
        rows = reference_rows(folder, "train")
        self._train, self._original = rows + rows[:3], read_data_manifest(folder)
        self._validation = validation(open_prepared(folder, config))
        assert (
            reference_rows(folder, "validation")
            == [[*inputs, labels[-1]] for inputs, labels in zip(*self._validation, strict=True)][
                : len(reference_rows(folder, "validation"))
            ]
        )
        self.refused = self.same = 0

    def check(self, content: bytes, change: object) -> None:
        """Open the data with another manifest; ``change`` describes it in failures."""
        (self._folder / "manifest.json").write_bytes(content)
        try:
            found = open_prepared(self._folder, self._config)
        except DataError as error:
            assert str(self._folder) in str(error)
            self.refused += 1
            return
        if found.manifest != self._original:
            assert samples(found, self._config) == self._train, change
            assert validation(found) == self._validation, change
        self.same += 1


def flips(content: bytes, bits: Callable[[int], set[int]]) -> Iterator[tuple[int, int, bytes]]:
    """Yield the content with one flipped bit each: position, bit and content."""
    for position in range(len(content)):
        for bit in bits(position):
            changed = bytes([content[position] ^ 1 << bit])
            yield position, bit, content[:position] + changed + content[position + 1 :]


def test_the_reference_reader_gives_the_same_samples(finished: PreparedData, config: DataConfig) -> None:
    rows = reference_rows(finished.dir, "train")
    assert len(list(finished.dir.glob("train-0*.bin"))) > 2
    assert samples(finished, config) == rows + rows[:3]


def test_a_manifest_with_a_flipped_bit_is_refused_or_has_the_same_values(folder: Path) -> None:
    content, original = (folder / "manifest.json").read_bytes(), read_data_manifest(folder)
    refused = same = 0
    for position, bit, changed in flips(content, lambda position: {position % 8, (position + 4) % 8}):
        (folder / "manifest.json").write_bytes(changed)
        try:
            assert read_data_manifest(folder) == original, (position, bit)
            same += 1
        except DataError:
            refused += 1
    assert refused + same == 2 * len(content)
    assert same < 0.02 * refused  # only white space that became other white space


def _check_flips(folder: Path, config: DataConfig, bits: Callable[[int], set[int]]) -> ManifestChecker:
    """Check manifests that differ in a bit, and have the right checksum, so that only their values tell."""
    checker, content = ManifestChecker(folder, config), json.dumps(without_checksum(folder), indent=2).encode()
    for position, bit, changed in flips(content, bits):
        try:
            made = with_right_checksum(json.loads(changed))
        except ValueError:  # no JSON
            continue
        checker.check(made, (position, bit, content[max(position - 40, 0) : position + 20]))
    return checker


def test_a_flipped_bit_under_a_right_checksum_is_refused_or_gives_the_same_samples(
    folder: Path, config: DataConfig
) -> None:
    checker = _check_flips(folder, config, lambda position: {position % 8})
    assert checker.refused > checker.same > 0


@pytest.mark.slow
def test_any_flipped_bit_under_a_right_checksum_is_refused_or_gives_the_same_samples(
    folder: Path, config: DataConfig
) -> None:
    _check_flips(folder, config, lambda _: set(range(8)))


def leaf_paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in JSON that is neither an object nor a list."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path
        return
    for key, inner in items:
        yield from leaf_paths(inner, (*path, key))


def with_change(stored: Any, path: tuple[str | int, ...], change: Callable[[Any], Any]) -> Any:
    """Return a copy with another value at one path."""
    copy = json.loads(json.dumps(stored))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change(inner[path[-1]])
    return copy


def changes(value: object) -> list[Any]:
    """Return values that a field could have by mistake or manipulation."""
    odd: list[Any] = [None, True, [], {}, "", "../../etc/passwd", "/etc/passwd", "x\x1b[2J", 1.5, float("nan"), 1e300]
    if isinstance(value, int) and not isinstance(value, bool):
        return [*odd, value + 1, value - 1, 2 * value, 0, -1, -value, 10**20, 2**63, str(value), float(value)]
    return odd


def test_any_other_value_in_any_field_is_refused_or_gives_the_same_samples(folder: Path, config: DataConfig) -> None:
    checker, stored = ManifestChecker(folder, config), without_checksum(folder)
    for path in leaf_paths(stored):
        value = stored
        for key in path:
            value = value[key]
        for odd in changes(value):
            changed = with_change(stored, path, lambda _, odd=odd: odd)
            checker.check(with_right_checksum(changed), (path, odd))
    assert checker.refused > checker.same > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["splits"]["train"].update(tokens=m["splits"]["train"]["tokens"] - 1000),
        lambda m: m["splits"]["train"]["shards"][0].update(tokens=4999),
        lambda m: m["splits"]["train"]["shards"][0].update(file="train-00001.bin"),
        lambda m: m["splits"]["train"]["shards"][0].update(file="../train-00000.bin"),
        lambda m: m["splits"]["train"]["shards"].reverse(),
        lambda m: [m["splits"]["train"]["shards"][index].update(tokens=5000 + 2 * index - 1) for index in (0, 1)],
        lambda m: [m["splits"]["train"]["sources"][index].update(source=1 - index) for index in (0, 1)],
        lambda m: [m["rows"][0].update({name: m["rows"][0][name] + 2}) for name in ("rows", "documents")],
        lambda m: m["splits"].pop("validation"),
        lambda m: m["splits"]["train"]["sources"].reverse(),
        lambda m: m["splits"]["train"]["sources"][0].update(source=1),
        lambda m: (
            m["splits"]["train"]["sources"][0].update(tokens=m["splits"]["train"]["sources"][0]["tokens"] - 1),
            m["splits"]["train"]["sources"][1].update(tokens=m["splits"]["train"]["sources"][1]["tokens"] + 1),
        ),
        lambda m: m.update(dtype="uint32"),
        lambda m: m.update(eos_id=1),
        lambda m: m.update(fingerprint="0" * 64),
        lambda m: m["rows"].pop(),
        lambda m: m["places"].clear(),
    ],
)
def test_a_contradiction_is_refused_whatever_the_checksum(folder: Path, change: Callable[[Any], object]) -> None:
    stored = without_checksum(folder)
    change(stored)
    (folder / "manifest.json").write_bytes(with_right_checksum(stored))
    for open_data in (open_prepared, verify_data):
        with pytest.raises(DataError, match=r"manifest\.json|begins at token"):
            open_data(folder)


def test_json_that_is_nested_too_deeply_is_damaged(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"manifest\.json: damaged: its JSON is nested too deeply"):
        open_prepared(folder)


def test_a_manifest_of_another_format_or_without_a_checksum_is_refused(folder: Path) -> None:
    stored = without_checksum(folder)
    for changed, message in (
        (stored, "damaged: its content does not match the checksum in it"),
        (with_checksum(stored | {"format_version": 9}), "data format 9; this version reads 4"),
    ):
        (folder / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(DataError, match=message):
            read_data_manifest(folder)


def test_the_block_index_of_online_data_is_compared_with_its_checksum(config: DataConfig, tmp_path: Path) -> None:
    online = config.model_copy(update={"mode": "online", "streams": 4, "duplicates": "keep"})
    before = prepare_online(online, tmp_path, 100)
    content = (tmp_path / "manifest.json").read_bytes()
    assert prepare_online(online, tmp_path, 100).fingerprint == before.fingerprint
    for name, position in (("blocks.npy", -3), ("blocks.npy", 10), ("manifest.json", content.index(b'"below"') + 9)):
        right = (tmp_path / name).read_bytes()
        wrong = bytearray(right)
        wrong[position] ^= 1
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(DataError, match=name):
            open_prepared(tmp_path, online)
        (tmp_path / name).write_bytes(right)
