"""Folders of Hugging Face datasets: the same documents as the same rows in other files, in the order of state.json."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.corpus_files import list_files
from hlat.data.online.blocks import DocumentReader
from hlat.data.online.loader import build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment
from hlat.data.prepare import preparation
from hlat.data.prepare.partitions import merge_partition_folders, prepare_partition
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.tokenizers.load import load_tokenizer
from hlat.data.tokenizers.training import train_bpe
from hlat.runtime.errors import DataError
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.hf_folders import write_dataset
from tests.support.data.preparation_model import tokenize_here

TEXTS: list[str | None] = [*documents(40, 300), "", None, *documents(30, 200, seed=1)]


@pytest.fixture(scope="module", autouse=True)
def small_work() -> Iterator[None]:
    """Make work units of a few documents, tokenized in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_SMALLEST_UNIT", 2000)
        tokenize_here(patch)
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tokenizer of 300 tokens, and save it."""
    folder = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_bpe([text for text in TEXTS if text], 300).save(folder)
    return folder


def _tables(tokenizer: Path, cuts: tuple[int, ...] = (0, 30, 50, len(TEXTS))) -> list[pa.Table]:
    library = load_tokenizer(tokenizer)
    ids = [None if text is None else library.encode(text) for text in TEXTS]
    table = pa.table({"text": pa.array(TEXTS, pa.string()), "input_ids": pa.array(ids, pa.list_(pa.int32()))})
    return [table.slice(start, stop - start) for start, stop in pairwise(cuts)]


def _config(path: Path | str, tokenizer: Path, **more: Any) -> DataConfig:
    section = {"path": str(path), "tokenizer": {"path": str(tokenizer)}, "shard_tokens": 1000, "sequence_length": 24}
    return DataConfig.model_validate(section | {"validation": {"fraction": 0}} | more)


def _shards(prepared: PreparedData) -> dict[str, bytes]:
    return {name: content for name, content in tree(prepared.dir).items() if name.endswith(".bin")}


@pytest.fixture(scope="module")
def wanted(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Prepare the texts from lines."""
    folder = tmp_path_factory.mktemp("lines")
    return _shards(prepare(_config(write_jsonl(folder / "a.jsonl", TEXTS), tokenizer), folder / "out"))


@pytest.mark.parametrize("column", [{"text_column": "text"}, {"tokens_column": "input_ids"}])
def test_shards_are_the_same_as_from_lines(
    tokenizer: Path, tmp_path: Path, wanted: dict[str, bytes], column: dict[str, str]
) -> None:
    """Files that state.json does not name, such as caches of dataset.map and a card, are not read."""
    folder = write_dataset(tmp_path / "saved", _tables(tokenizer), batch=7)
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"of dataset.map")
    (folder / "README.md").write_text("# Card")
    config = _config(folder, tokenizer, **column)
    found = prepare(config, tmp_path / "out")
    assert _shards(found) == wanted and len(wanted) > 5
    assert (found.manifest.total("null_rows"), found.manifest.total("empty_documents")) == (1, 1)
    names = [Path(source.path).name for source in found.manifest.sources]
    assert names == [f"data-{number:05d}-of-00003.arrow" for number in range(3)]
    assert prepare(config, tmp_path / "out").fingerprint == found.fingerprint
    parts = [tmp_path / f"part {number}" for number in (1, 2)]
    for number, out in enumerate(parts, 1):
        prepare_partition(config, out, number, 2)
    assert _shards(merge_partition_folders(config, tmp_path / "merged", parts)) == wanted


def test_the_order_of_the_files_is_that_of_the_state(tokenizer: Path, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    """Also if it is not that of their names."""
    first, second, third = _tables(tokenizer)
    order = [{"filename": f"data-{number:05d}-of-00003.arrow"} for number in (2, 0, 1)]
    folder = write_dataset(tmp_path / "saved", [second, third, first], _data_files=order)
    assert _shards(prepare(_config(folder, tokenizer), tmp_path / "out")) == wanted


def test_the_only_split_of_a_dict_and_a_validation_split_are_read(
    tokenizer: Path, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    write_dataset(tmp_path / "dict" / "train", _tables(tokenizer))
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert _shards(prepare(_config(tmp_path / "dict", tokenizer), tmp_path / "one")) == wanted
    write_dataset(tmp_path / "dict" / "test", _tables(tokenizer, (0, 10)))
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError) as caught:
        prepare(_config(tmp_path / "dict", tokenizer), tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'dict'}: a DatasetDict with the splits train, test. Name the folder of one as the corpus, for "
        "example its folder train, and that of another as data.validation.path."
    )
    validation = {"path": str(tmp_path / "dict" / "test")}
    found = prepare(_config(tmp_path / "dict" / "train", tokenizer, validation=validation), tmp_path / "two")
    assert found.manifest.splits["train"].documents == len(TEXTS) - 2
    assert found.manifest.splits["validation"].documents == 10


def test_a_url_gives_the_same_data(tokenizer: Path, tmp_path: Path, wanted: dict[str, bytes]) -> None:
    folder = write_dataset(tmp_path / "saved", _tables(tokenizer))
    store = fsspec.filesystem("memory")
    for file in folder.iterdir():
        store.pipe(f"/saved/{file.name}", file.read_bytes())
    try:
        for number, url in enumerate(("memory://saved", "memory://saved/")):
            assert _shards(prepare(_config(url, tokenizer), tmp_path / f"{number}")) == wanted
    finally:
        store.rm("/saved", recursive=True)


def test_online_record_batches_are_blocks_and_every_document_is_read(tokenizer: Path, tmp_path: Path) -> None:
    """An arrow stream that is not in such a folder is one block, as it always was."""
    folder = write_dataset(tmp_path / "saved", _tables(tokenizer), batch=7)
    config = _config(folder, tokenizer, mode="online", streams=2, tokens_column="input_ids")
    plan = build_worker_plan(
        prepare_online(config, tmp_path / "out", 0), config, 3, StreamAssignment(0, 1, BatchSchedule(8), 2, 3)
    )
    blocks, partitions = sum(plan.sources[0].blocks), plan.sources[0].partition_count(2)
    assert blocks >= 5 + 3 + 4 and partitions == 2
    found = []
    for partition in range(partitions):
        for document in DocumentReader(plan).documents(0, partition, partitions)(0, 0):
            if document.block * partitions + (partition + document.block) % partitions < blocks:
                found.append(document.content.tolist())  # type: ignore[union-attr]
            elif document.block * partitions > blocks + partitions:
                break
    library = load_tokenizer(tokenizer)
    assert sorted(found) == sorted(library.encode(text) for text in TEXTS if text)
    plain = config.model_copy(update={"path": f"{folder}/*.arrow"})
    assert (
        sum(
            build_worker_plan(
                prepare_online(plain, tmp_path / "plain", 0), plain, 3, StreamAssignment(0, 1, BatchSchedule(8), 2, 3)
            )
            .sources[0]
            .blocks
        )
        == 3
    )


def test_a_folder_that_the_library_wrote_is_read(tmp_path: Path) -> None:
    """``saved_dataset`` was written by DatasetDict.save_to_disk of datasets 5.2.0, with two shards of six rows."""
    files = list_files(DataConfig(path=str(Path(__file__).with_name("saved_dataset"))), tmp_path)
    contents = []
    for file in files:
        with file.open_local() as local, file.as_input(local, None) as opened:
            contents += [row.content for row in file.format.documents(opened)]
    assert contents == ["first", "zwei 日本", "", "vier\nlines", None, "six"] and len(files) == 2


# --- folders that are refused --------------------------------------------------------------------------------------


def _state(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, **changes}))

    return change


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


FIRST = {"filename": "data-00000-of-00003.arrow"}
REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (
        _state(_indices_data_files=[{"filename": "indices.arrow"}]),
        "state.json has a mapping of indices (_indices_data_",
    ),
    (_state(_indices_files=["i"]), "state.json has a mapping of indices (_indices_files), which selects and orders"),
    (_state(_format_type="custom"), "state.json has a transform, which hlat does not run. Apply it with dataset.map"),
    (_state(_format_kwargs={"transform": "f"}), "state.json has a transform"),
    (_state(_inplace_history=[{"transforms": [{"f": 1}]}]), "state.json has a transform"),
    (_state(_data_files=[{**FIRST, "skip": 3}]), "state.json describes a data file with more or less than its name"),
    (_state(_data_files=["a.arrow"]), "state.json describes a data file with more or less than its name: 'a.arrow'"),
    (_state(_data_files=[FIRST, FIRST]), "state.json lists a data file twice"),
    (_state(_data_files=[]), "state.json lists no data files"),
    (_state(_data_files=None), "state.json lists no data files"),
    (
        _state(_data_files=[{"filename": "../secret.arrow"}]),
        "names the data file ../secret.arrow, which is not next to",
    ),
    (_state(_data_files=[{"filename": "/etc/passwd"}]), "names the data file /etc/passwd, which is not next to it"),
    (_state(_data_files=[{"filename": "\x1b[31m"}]), "names the data file \\u001b[31m, which is not next to it"),
    (_state(_format_kwargs=5, _inplace_history=5, _data_files=5), "state.json lists no data files"),
    (_remove("data-00001-of-00003.arrow"), "names the data file data-00001-of-00003.arrow, which is not next to it"),
    (_remove("dataset_info.json"), "dataset_info.json is missing: the dataset was not saved completely"),
    (_write("state.json", b"{"), "state.json is not JSON"),
    (_write("state.json", b"\xff\xfe"), "state.json is text in UTF-16"),
    (_write("state.json", b"[" * 100_000), "state.json is not JSON"),
    (_write("state.json", b"[]"), "state.json is not a JSON object"),
    (_write("state.json", b" " * ((1 << 24) + 1)), "state.json has 16,777,217 bytes, which is too many"),
    (_write("dataset_dict.json", b'{"splits": [1]}'), "dataset_dict.json does not list the splits"),
    (_write("dataset_dict.json", b'{"splits": ["../x"]}'), "../x/state.json is missing"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_would_be_ignored_or_is_damaged_is_refused(
    tokenizer: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = write_dataset(tmp_path / "saved", _tables(tokenizer))
    change(folder)
    attempts: dict[str, Callable[[DataConfig], object]] = {
        "prepared": lambda config: prepare(config, tmp_path / "out"),
        "online": lambda config: prepare_online(config, tmp_path / "out", 0),
    }
    for mode, attempt in attempts.items():
        config = _config(folder, tokenizer, mode=mode, unreadable_rows=0.9)
        with pytest.raises(DataError) as caught:
            attempt(config)
        assert str(caught.value).startswith(f"{folder}: ") and message in str(caught.value)
        assert not (tmp_path / "out").exists(), "refused before anything is written"


def test_a_folder_of_datasets_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_dataset(tmp_path / "all" / name, _tables(tokenizer))
    with pytest.raises(
        DataError, match=r"all: holds datasets of save_to_disk in its folders a, b\. Make each an entry"
    ):
        prepare(_config(tmp_path / "all", tokenizer), tmp_path / "out")


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_truncated_file_is_named_in_both_modes(tokenizer: Path, tmp_path: Path, share: float) -> None:
    folder = write_dataset(tmp_path / "saved", _tables(tokenizer), batch=7)
    file = folder / "data-00001-of-00003.arrow"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(DataError, match=rf"{file}: the hf-dataset file cannot be read to its end"):
        prepare(_config(folder, tokenizer), tmp_path / "prepared")
    with pytest.raises(DataError, match=rf"{file}: the hf-dataset file cannot be .* truncated or damaged"):
        prepare_online(_config(folder, tokenizer, mode="online"), tmp_path / "online", 0)


def test_a_wrong_column_lists_those_of_the_dataset(tokenizer: Path, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "saved", _tables(tokenizer))
    with pytest.raises(DataError, match=r"00000-of-00003\.arrow: no column 'body'; it has text, input_ids"):
        prepare(_config(folder, tokenizer, text_column="body"), tmp_path / "out")
