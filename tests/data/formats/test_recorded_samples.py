"""The same documents in every file format: tokens, blocks and online samples are those that were recorded.

A refactoring of the readers must not change the order of a run. So the hashes below were recorded before the formats
became objects of one protocol; a format that was added later has the hash of its first version.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import ipc

from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.online.loader import CursorTable, build_worker_plan
from hlat.data.online.prepare import prepare_online
from hlat.data.online.streams import StreamAssignment
from hlat.data.prepare import preparation
from hlat.data.prepare.preparation import prepare
from hlat.data.tokenizers.training import train_char
from tests.support.data.corpora import documents, write_jsonl
from tests.support.data.megatron_files import write_megatron
from tests.support.data.preparation_model import tokenize_here
from tests.support.data.reading_ranks import run

TEXTS: list[str | None] = [*documents(60, 500), None, "", *documents(30, 500, seed=1), *documents(3, 500)]
STREAMS, BATCH, STEPS = 8, 8, 12


@pytest.fixture(scope="module", autouse=True)
def small_work() -> Iterator[None]:
    """Make work units of a few documents, tokenized in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_SMALLEST_UNIT", 5000)
        tokenize_here(patch)
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tokenizer of the characters of the corpus, which no version of a library can change."""
    folder = tmp_path_factory.mktemp("tokenizer") / "saved"
    train_char({character for text in TEXTS for character in text or ""}, "<|endoftext|>").save(folder)
    return folder


def _table() -> pa.Table:
    return pa.table({"id": list(range(len(TEXTS))), "text": pa.array(TEXTS, pa.string())})


def _parquet(folder: Path) -> None:
    pq.write_table(_table(), folder / "a.parquet", row_group_size=25, compression="none", use_dictionary=False)


def _arrow(folder: Path) -> None:
    with ipc.new_file(folder / "a.arrow", _table().schema) as writer:
        writer.write_table(_table(), max_chunksize=20)


def _arrow_stream(folder: Path) -> None:
    with ipc.new_stream(folder / "a.arrow", _table().schema) as writer:
        writer.write_table(_table(), max_chunksize=20)


def _jsonl(folder: Path) -> None:
    write_jsonl(folder / "a.jsonl", TEXTS[:40])
    write_jsonl(folder / "b.json", TEXTS[40:])


def _gz(folder: Path) -> None:
    _jsonl(folder)
    for name in ("a.jsonl", "b.json"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes(), mtime=0))
        (folder / name).unlink()


def _zst(folder: Path) -> None:
    _jsonl(folder)
    for name in ("a.jsonl", "b.json"):
        (folder / f"{name}.zst").write_bytes(zstandard.compress((folder / name).read_bytes()))
        (folder / name).unlink()


def _text(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        suffix = (".txt", ".md", "", ".txt.gz")[number % 4]
        content = (text or "").encode()
        (folder / f"{number:03d}{suffix}").write_bytes(gzip.compress(content, mtime=0) if "gz" in suffix else content)


def _megatron(folder: Path) -> None:
    alphabet = {c: n for n, c in enumerate(sorted({character for text in TEXTS for character in text or ""}))}
    ids = [[[alphabet[character] for character in text or ""]] for text in TEXTS]
    write_megatron(folder / "a.bin", ids[:40])
    write_megatron(folder / "b.bin", ids[40:], "int32")


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _hashes(path: str, tokenizer: Path, out: Path) -> tuple[str, str, str]:
    """Return hashes of the shards and boundaries, of the block index, and of the first samples of an online run."""
    section: dict[str, Any] = {"sources": [{"path": path, "name": "all"}], "tokenizer": {"path": str(tokenizer)}}
    section |= {"sequence_length": 32, "shard_tokens": 4000, "validation": {"fraction": 0.2}}
    prepared = prepare(DataConfig.model_validate(section), out / "prepared")
    shards = b"".join(file.name.encode() + file.read_bytes() for file in sorted(prepared.dir.glob("*.bin")))
    config = DataConfig.model_validate(section | {"mode": "online", "streams": STREAMS})
    online = prepare_online(config, out / "online", 500)
    plan = build_worker_plan(online, config, 3, StreamAssignment(0, 1, BatchSchedule(BATCH), STREAMS, 3))
    samples = run(plan, 1, 1, CursorTable(STREAMS, 1), 0, STEPS)
    held_out = b"".join(file.read_bytes() for file in sorted(online.dir.glob("validation*.bin")))
    return (
        _sha(shards),
        _sha((online.dir / "blocks.npy").read_bytes()),
        _sha(json.dumps(sorted(samples.items())).encode() + held_out),
    )


Recorded = list[tuple[Callable[[Path], None], tuple[str, str, str]]]
RECORDED: Recorded = [
    (_parquet, ("1673ef175aa64d71", "a05114b27dcd53f4", "09ea86dcfd4fa128")),
    (_arrow, ("1673ef175aa64d71", "e91595068779167b", "9352177bc68f7a1c")),
    (_arrow_stream, ("1673ef175aa64d71", "b8fd57d225bf3644", "9b7bd5623717858f")),
    (_jsonl, ("1673ef175aa64d71", "b767d3f56d15d969", "1221c9228729d172")),
    (_gz, ("1673ef175aa64d71", "b1da98d947f97883", "120a5ebb30e1090a")),
    (_zst, ("1673ef175aa64d71", "b1da98d947f97883", "120a5ebb30e1090a")),
    (_text, ("1673ef175aa64d71", "9b64a25116af2229", "29d1f61d40d719c0")),
    (_megatron, ("6e41ee9e2fa48254", "2c8f2574cf8ba924", "212cc7096e0d4f6c")),
]
REMOTE: Recorded = [
    (_parquet, ("1673ef175aa64d71", "b8fd57d225bf3644", "9b7bd5623717858f")),
    (_arrow, ("1673ef175aa64d71", "b8fd57d225bf3644", "9b7bd5623717858f")),
    (_jsonl, ("1673ef175aa64d71", "b767d3f56d15d969", "1221c9228729d172")),
    (_gz, ("1673ef175aa64d71", "b1da98d947f97883", "120a5ebb30e1090a")),
    (_text, ("1673ef175aa64d71", "9b64a25116af2229", "29d1f61d40d719c0")),
    (_megatron, ("6e41ee9e2fa48254", "b1da98d947f97883", "b01f6cce4953e1de")),
]


@pytest.mark.parametrize(("write", "recorded"), RECORDED, ids=[write.__name__[1:] for write, _ in RECORDED])
def test_samples_are_those_that_were_recorded(
    tmp_path: Path, tokenizer: Path, write: Callable[[Path], None], recorded: tuple[str, str, str]
) -> None:
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus")
    assert _hashes(str(tmp_path / "corpus"), tokenizer, tmp_path) == recorded


@pytest.mark.parametrize(("write", "recorded"), REMOTE, ids=[write.__name__[1:] for write, _ in REMOTE])
def test_remote_samples_are_those_that_were_recorded(
    tmp_path: Path, tokenizer: Path, write: Callable[[Path], None], recorded: tuple[str, str, str]
) -> None:
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus")
    store = fsspec.filesystem("memory")
    for file in (tmp_path / "corpus").iterdir():
        store.pipe(f"/recorded/{file.name}", file.read_bytes())
    try:
        assert _hashes("memory://recorded", tokenizer, tmp_path) == recorded
    finally:
        store.rm("/recorded", recursive=True)
