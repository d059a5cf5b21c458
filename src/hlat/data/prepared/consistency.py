"""Consistency of a manifest with itself, its files and the tokenizer beside them: one sentence for each problem.

    counts --sums--> counts of parts, fingerprint
    counts --sizes, a few boundaries--> files
    catalogue of blocks --checksum--> file            (where text is tokenized while training)

All of it is done whenever data is opened, so it looks at no token: what every shard holds is compared by
prepare/verification.py. Whatever of a manifest decides samples is found wrong here even where it has no checksum.
"""

import hashlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hlat.data.manifest import (
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
from hlat.data.sources import Split
from hlat.data.tokenizers import Tokenizer


def manifest_problems(manifest: DataManifest) -> Iterator[str]:
    """Name what the manifest says that cannot be true."""
    stated = (manifest.tokenizer_sha256, manifest.dtype, manifest.splits, manifest.sources, manifest.blocks)
    if content_fingerprint(*stated) != manifest.fingerprint:
        yield f"{MANIFEST_FILE}: the fingerprint does not belong to the shards it lists"
    if manifest.dtype != token_dtype(manifest.vocab_size):
        yield f"{MANIFEST_FILE}: dtype {manifest.dtype} does not match a vocabulary of {manifest.vocab_size:,} tokens"
    for split, record in manifest.splits.items():
        yield from _of_split(split, record, np.dtype(manifest.dtype).itemsize)
    yield from _of_rows(manifest)
    if manifest.blocks is None:
        yield from _of_sources(manifest)


def _of_split(split: Split, record: SplitRecord, itemsize: int) -> Iterator[str]:
    for shard in record.shards:
        if shard.tokens * itemsize != shard.bytes:
            yield f"{MANIFEST_FILE}: {shard.file} has {shard.tokens} tokens in {shard.bytes} bytes, {itemsize} bytes each"
    for what, stated, parts, found in (
        ("tokens", record.tokens, "its shards", sum(shard.tokens for shard in record.shards)),
        ("tokens", record.tokens, "its sources", sum(source.tokens for source in record.sources)),
        ("documents", record.documents, "its sources", sum(source.documents for source in record.sources)),
    ):
        if stated != found:
            yield f"{MANIFEST_FILE}: {split} has {stated} {what}, those of {parts} are {found}"


def _of_rows(manifest: DataManifest) -> Iterator[str]:
    for source in manifest.rows:
        told = source.null_rows + source.empty_documents + source.unreadable_rows + source.documents
        if told != source.rows:
            yield f"{MANIFEST_FILE}: source {source.source} has {source.rows} rows, its kept and dropped ones sum to {told}"
        if source.copies > source.documents:
            yield f"{MANIFEST_FILE}: source {source.source} has {source.copies} copies among {source.documents} documents"
    listed = 0 if manifest.quarantine is None else manifest.quarantine.rows
    if listed != manifest.unreadable_rows:
        yield f"{MANIFEST_FILE}: {manifest.unreadable_rows} rows could not be read, {listed} are listed"


def _of_sources(manifest: DataManifest) -> Iterator[str]:
    """Which source a stretch of tokens is of: the order is that of the files, the documents are those of its rows."""
    rows = {row.source: row for row in manifest.rows}
    order = [source for record in manifest.sources if isinstance(source := record.content[0], int)]
    if list(dict.fromkeys(order)) != [row.source for row in manifest.rows]:
        yield f"{MANIFEST_FILE}: the sources of its rows are not those of its files"
        return
    for split, record in manifest.splits.items():
        places = [list(rows).index(part.source) if part.source in rows else -1 for part in record.sources]
        if -1 in places or places != sorted(set(places)):
            yield f"{MANIFEST_FILE}: the order of sources in {split} differs from the order of the files"
            return
    for row in manifest.rows:
        yield from _of_documents(manifest, row)


def _of_documents(manifest: DataManifest, row: SourceRows) -> Iterator[str]:
    parts = [part for record in manifest.splits.values() for part in record.sources if part.source == row.source]
    kept = sum(part.documents for part in parts)
    expected = row.documents - (row.copies if manifest.copies_dropped else 0)
    if kept - expected not in (0, 1):  # one more where a validation tail begins inside a document
        yield f"{MANIFEST_FILE}: source {row.source} gave {expected} documents, the splits have {kept} of it"


def tokenizer_problems(manifest: DataManifest, tokenizer: Tokenizer) -> Iterator[str]:
    """Name what the tokenizer in the folder has otherwise than the manifest says."""
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        yield f"{TOKENIZER_FOLDER}: not the tokenizer that made this data"
    elif (tokenizer.vocab_size, tokenizer.eos_id) != (manifest.vocab_size, manifest.eos_id):
        yield (
            f"{MANIFEST_FILE}: says {manifest.vocab_size} tokens and end token {manifest.eos_id}, the tokenizer has "
            f"{tokenizer.vocab_size} and {tokenizer.eos_id}"
        )


def size_problems(folder: Path, manifest: DataManifest) -> Iterator[str]:
    """Name files that are missing or of another size than the manifest says; each sentence begins with the name."""
    for name, size in _sizes(manifest):
        try:
            actual = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name}: is missing, should have {size} bytes"
        except OSError as error:
            yield f"{name}: cannot be read: {error.strerror}"
        else:
            if actual != size:
                yield f"{name}: has {actual} bytes, should have {size} bytes"


def _sizes(manifest: DataManifest) -> Iterator[tuple[str, int]]:
    for record in manifest.splits.values():
        yield record.documents_file, 8 * (record.documents + 1)
        for shard in record.shards:
            yield shard.file, shard.bytes
    if manifest.blocks is not None:
        yield manifest.blocks.file, manifest.blocks.bytes


def content_problems(folder: Path, manifest: DataManifest) -> Iterator[str]:
    """Name what the small files say otherwise than the manifest; all files have to have their sizes.

    Of the boundaries of documents only those are looked at where a source begins or ends.

    Raises:
        OSError: a file cannot be read.
    """
    for split, record in manifest.splits.items():
        yield from _of_boundaries(split, record, document_boundaries(folder, record))
    if manifest.blocks is not None:
        yield from _of_catalogue(folder, manifest.blocks, len(manifest.sources))


def document_boundaries(folder: Path, record: SplitRecord) -> npt.NDArray[np.uint64]:
    """Where each document of a split begins, in tokens, and where the last one ends: shape (documents + 1,)."""
    return np.memmap(folder / record.documents_file, dtype="<u8", mode="r", shape=(record.documents + 1,))


def _of_boundaries(split: Split, record: SplitRecord, starts: npt.NDArray[np.uint64]) -> Iterator[str]:
    document = token = 0
    for source in [None, *record.sources]:
        if source is not None:
            document, token = document + source.documents, token + source.tokens
        if (found := int(starts[document])) != token:
            yield f"{documents_file(split)}: document {document} begins at token {found}, and the manifest says {token}"


def _of_catalogue(folder: Path, record: BlocksRecord, files: int) -> Iterator[str]:
    content = (folder / record.file).read_bytes()
    if hashlib.sha256(content).hexdigest() != record.sha256:
        yield f"{record.file}: the checksum differs from the manifest's"
        return
    blocks = np.load(BytesIO(content), allow_pickle=False)
    if blocks.shape != (sum(record.counts), 3) or not (0 <= blocks[:, 0].min() <= blocks[:, 0].max() < files):
        yield f"{MANIFEST_FILE}: says {sum(record.counts)} blocks of {files} files, which are not those of {record.file}"
