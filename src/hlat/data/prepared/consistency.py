"""Check that prepared data fits: the settings that decided it, its manifest, its files, its tokenizer.

    data section --content_settings--> what decides tokens --setting_differences--> one sentence per difference
    counts --sums--> counts by shard and source, fingerprint
    counts --sizes, a few boundaries--> files
    block index --checksum--> file                    (if the text is tokenized while training)

These checks run whenever data is opened, so they read no tokens; prepare/verification.py verifies the content of the
shards. An error in any field that decides samples is found here, whatever its checksum says.

data.unreadable_rows is not among the settings: with any value, the result is the same, or preparation fails.
"""

import hashlib
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.config import DataConfig, short
from hlat.data.corpus_files import numbered_sources
from hlat.data.documents import Split
from hlat.data.prepared.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    BlocksRecord,
    DataManifest,
    SourceRows,
    SplitRecord,
    content_fingerprint,
    documents_file,
)
from hlat.data.prepared.shards import token_dtype
from hlat.data.stores.remote import local_path
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_tokenizer

TAILS = "data.validation.by (sources split at their tail)"
"""Setting of data of which data.validation.by=auto has split some sources so: their indices. Others lack it."""


def recipe_locations(config: DataConfig) -> dict[str, list[str]]:
    """List the settings that locate the corpus and the tokenizer, as "field=value", by "corpus" and "tokenizer".

    After corpus or tokenizer was deleted, prepared data is still used for recipes with the same locations. A tokenizer
    trained on the corpus has none.
    """
    tokenizer = config.tokenizer
    end = "null" if tokenizer.eos_token is None else tokenizer.eos_token
    loaded = [f"data.tokenizer.path={tokenizer.path}", f"data.tokenizer.eos_token={end}"]
    return {
        "corpus": [f"{source.field}={source.path}" for source in numbered_sources(config)],
        "tokenizer": [] if tokenizer.path is None else loaded,
    }


def content_settings(config: DataConfig, tokenizer_sha256: str | None = None) -> dict[str, Any]:
    """Return the settings that decide the prepared content, by field name; paths are not among them.

    ``tokenizer_sha256`` stands for the recipe's tokenizer if its file is gone. DataError if the tokenizer cannot be
    read.
    """
    settings: dict[str, Any] = {
        **_columns(config),
        "data.mode": config.mode,
        "data.duplicates": config.duplicates,
    }
    if config.mode == "online":
        settings["data.streams"] = config.streams  # decides the size of the blocks of small corpora
    else:
        settings["data.shard_tokens"] = config.shard_tokens
    tokenizer = config.tokenizer
    if tokenizer.path is not None:
        is_deleted = tokenizer_sha256 is not None and not Path(local_path(tokenizer.path)).exists()
        settings["data.tokenizer.path (content)"] = (
            tokenizer_sha256 if is_deleted else load_tokenizer(tokenizer.path, tokenizer.eos_token).sha256
        )
    else:
        settings["data.tokenizer.train"] = tokenizer.train
        settings["data.tokenizer.eos_token"] = tokenizer.eos_token
        if tokenizer.train == "bpe":
            settings["data.tokenizer.vocab_size"] = tokenizer.vocab_size
            settings["data.tokenizer.train_bytes"] = tokenizer.train_bytes
    validation = config.validation
    settings["data.validation.path"] = "given" if validation.path is not None else None
    if validation.path is None:
        settings["data.validation.fraction"] = validation.fraction
        if validation.fraction > 0:
            # With auto, sources of which the tail is held out are recorded besides.
            settings["data.validation.by"] = "document" if validation.by == "auto" else validation.by
    return settings


def with_decided_tails(settings: dict[str, Any], config: DataConfig, before: Mapping[str, Any]) -> dict[str, Any]:
    """Add the tails that an earlier preparation chose, if the recipe leaves the choice to the preparation."""
    return settings | ({TAILS: before[TAILS]} if config.validation.by == "auto" and TAILS in before else {})


def _columns(config: DataConfig) -> dict[str, list[str | None]]:
    """Return the columns of the sources by the field that names them: text_column, and others that a source has."""
    columns = [source.column for source in numbered_sources(config) if source.number >= 0]
    fields = ["text_column", *(column.kind.field for column in columns)]
    return {f"data.{field}": [c.name if c.kind.field == field else None for c in columns] for field in fields}


def setting_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe each setting that differs, in one sentence each."""
    return [
        f"{name}: prepared with {_format(before, name)}, now {_format(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, _NOT_SET) != now.get(name, _NOT_SET)
    ]


_NOT_SET = object()


def _format(settings: dict[str, Any], name: str) -> str:
    value = settings.get(name, "none")
    return value if isinstance(value, str) else short(value)  # a list of sources may be long


def manifest_problems(manifest: DataManifest) -> Iterator[str]:
    """Yield the contradictions within a manifest, one sentence each."""
    stated = (manifest.tokenizer_sha256, manifest.dtype, manifest.splits, manifest.sources, manifest.blocks)
    if content_fingerprint(*stated) != manifest.fingerprint:
        yield f"{MANIFEST_FILE}: the fingerprint does not match the shards in it"
    if manifest.dtype != token_dtype(manifest.vocab_size):
        yield f"{MANIFEST_FILE}: dtype {manifest.dtype} does not match a vocabulary of {manifest.vocab_size:,} tokens"
    for split, record in manifest.splits.items():
        yield from _split_problems(split, record, np.dtype(manifest.dtype).itemsize)
    yield from _row_problems(manifest)
    if manifest.blocks is None:
        yield from _source_problems(manifest)


def _split_problems(split: Split, record: SplitRecord, itemsize: int) -> Iterator[str]:
    for shard in record.shards:
        if shard.tokens * itemsize != shard.bytes:
            yield f"{MANIFEST_FILE}: {shard.file} has {shard.tokens} tokens of {itemsize} bytes in {shard.bytes} bytes"
    for noun, stated, items, found in (
        ("tokens", record.tokens, "its shards", sum(shard.tokens for shard in record.shards)),
        ("tokens", record.tokens, "its sources", sum(source.tokens for source in record.sources)),
        ("documents", record.documents, "its sources", sum(source.documents for source in record.sources)),
    ):
        if stated != found:
            yield f"{MANIFEST_FILE}: {split} has {stated} {noun}, but {items} have {found}"


def _row_problems(manifest: DataManifest) -> Iterator[str]:
    for source in manifest.rows:
        total = source.null_rows + source.empty_documents + source.unreadable_rows + source.documents
        if total != source.rows:
            yield (
                f"{MANIFEST_FILE}: source {source.source} has {source.rows} rows, but its kept and dropped rows add up "
                f"to {total}"
            )
        if source.copies > source.documents:
            yield (
                f"{MANIFEST_FILE}: source {source.source} has {source.copies} copies among {source.documents} documents"
            )
    listed = 0 if manifest.quarantine is None else manifest.quarantine.rows
    if listed != (found := manifest.total("unreadable_rows")):
        yield f"{MANIFEST_FILE}: {found} rows could not be read, {listed} are listed"


def _source_problems(manifest: DataManifest) -> Iterator[str]:
    """Check the sources of each split: their order is that of the files, their documents are counted in ``rows``."""
    rows = {row.source: row for row in manifest.rows}
    order = [source for record in manifest.sources if isinstance(source := record.content[0], int)]
    if list(dict.fromkeys(order)) != [row.source for row in manifest.rows]:
        yield f"{MANIFEST_FILE}: the sources in rows are not those in sources"
        return
    for split, record in manifest.splits.items():
        indices = [list(rows).index(item.source) if item.source in rows else -1 for item in record.sources]
        if -1 in indices or indices != sorted(set(indices)):
            yield f"{MANIFEST_FILE}: the order of sources in {split} differs from the order of the files"
            return
    for row in manifest.rows:
        yield from _document_problems(manifest, row)


def _document_problems(manifest: DataManifest, row: SourceRows) -> Iterator[str]:
    tokens = [item for record in manifest.splits.values() for item in record.sources if item.source == row.source]
    kept = sum(item.documents for item in tokens)
    expected = row.documents - (row.copies if manifest.copies_dropped else 0)
    if kept - expected not in (0, 1):  # one more where a validation tail begins inside a document
        yield f"{MANIFEST_FILE}: source {row.source} has {expected} documents, but the splits have {kept} of it"


def tokenizer_problems(manifest: DataManifest, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the differences between the tokenizer in the folder and the manifest."""
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        yield f"{TOKENIZER_FOLDER}: not the tokenizer that prepared this data"
    elif (tokenizer.vocab_size, tokenizer.eos_id) != (manifest.vocab_size, manifest.eos_id):
        yield (
            f"{MANIFEST_FILE}: {manifest.vocab_size} tokens and end token {manifest.eos_id}, but the tokenizer has "
            f"{tokenizer.vocab_size} and {tokenizer.eos_id}"
        )


def size_problems(folder: Path, manifest: DataManifest) -> Iterator[str]:
    """Yield the files that are missing or have the wrong size; each sentence begins with the file name."""
    sizes = list[tuple[str, int]]()
    for record in manifest.splits.values():
        sizes.append((record.documents_file, 8 * (record.documents + 1)))
        sizes += ((shard.file, shard.bytes) for shard in record.shards)
    if manifest.blocks is not None:
        sizes.append((manifest.blocks.file, manifest.blocks.bytes))
    for name, size in sizes:
        try:
            actual = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name}: is missing, should have {size} bytes"
        except OSError as error:
            yield f"{name}: cannot be read: {error.strerror}"
        else:
            if actual != size:
                yield f"{name}: has {actual} bytes, should have {size} bytes"


def content_problems(folder: Path, manifest: DataManifest) -> Iterator[str]:
    """Yield differences between small files and manifest; OSError if a file cannot be read."""
    for split, record in manifest.splits.items():
        yield from _boundary_problems(split, record, document_boundaries(folder, record))
    if manifest.blocks is not None:
        yield from _block_problems(folder, manifest.blocks, len(manifest.sources))


def document_boundaries(folder: Path, record: SplitRecord) -> npt.NDArray[np.uint64]:
    """Map the first token of each document and the end of the last one: uint64, (documents + 1,)."""
    return np.memmap(folder / record.documents_file, dtype="<u8", mode="r", shape=(record.documents + 1,))


def _boundary_problems(split: Split, record: SplitRecord, starts: npt.NDArray[np.uint64]) -> Iterator[str]:
    # Only the boundaries at which a source begins or ends are read: opening must stay quick.
    document = token = 0
    for source in [None, *record.sources]:
        if source is not None:
            document, token = document + source.documents, token + source.tokens
        if (found := int(starts[document])) != token:
            yield f"{documents_file(split)}: document {document} begins at token {found}, expected {token}"


def _block_problems(folder: Path, record: BlocksRecord, files: int) -> Iterator[str]:
    content = (folder / record.file).read_bytes()
    if hashlib.sha256(content).hexdigest() != record.sha256:
        yield f"{record.file}: the checksum differs from the manifest's"
        return
    blocks = np.load(BytesIO(content), allow_pickle=False)  # the bytes that were hashed, not the file again
    if blocks.shape != (sum(record.counts), 3) or not (0 <= blocks[:, 0].min() <= blocks[:, 0].max() < files):
        yield f"{MANIFEST_FILE}: has {sum(record.counts)} blocks of {files} files, which {record.file} does not"
