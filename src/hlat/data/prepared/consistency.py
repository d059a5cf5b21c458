"""Check that a manifest is consistent with itself, its files and its tokenizer; yield one sentence per problem.

    counts --sums--> counts by shard and source, fingerprint
    counts --sizes, a few boundaries--> files
    block index --checksum--> file                    (if the text is tokenized while training)

These checks run whenever data is opened, so they read no tokens; prepare/verification.py verifies the content of the
shards. An error in any field that decides samples is found here even in a manifest without a checksum.
"""

import hashlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
from hlat.data.tokenizers.base import Tokenizer


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
    if listed != manifest.unreadable_rows:
        yield f"{MANIFEST_FILE}: {manifest.unreadable_rows} rows could not be read, {listed} are listed"


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


def changed_ids(manifest: DataManifest, tokenizer: Tokenizer) -> str:
    """Say why an earlier version of hlat gave this data other ids than this one would; empty if it did not."""
    if tokenizer.ids_changed is None or tokenizer.earlier_sha256 != manifest.tokenizer_sha256:
        return ""
    return f"an earlier version of hlat prepared this data with other ids: {tokenizer.ids_changed[0]}"


def tokenizer_problems(manifest: DataManifest, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the differences between the tokenizer in the folder and the manifest."""
    if reason := changed_ids(manifest, tokenizer):
        yield f"{TOKENIZER_FOLDER}: {reason}"
    elif tokenizer.sha256 != manifest.tokenizer_sha256:
        yield f"{TOKENIZER_FOLDER}: not the tokenizer that prepared this data"
    elif (tokenizer.vocab_size, tokenizer.eos_id) != (manifest.vocab_size, manifest.eos_id):
        yield (
            f"{MANIFEST_FILE}: {manifest.vocab_size} tokens and end token {manifest.eos_id}, but the tokenizer has "
            f"{tokenizer.vocab_size} and {tokenizer.eos_id}"
        )


def size_problems(folder: Path, manifest: DataManifest) -> Iterator[str]:
    """Yield the files that are missing or have the wrong size; each sentence begins with the file name."""
    for name, size in _file_sizes(manifest):
        try:
            actual = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name}: is missing, should have {size} bytes"
        except OSError as error:
            yield f"{name}: cannot be read: {error.strerror}"
        else:
            if actual != size:
                yield f"{name}: has {actual} bytes, should have {size} bytes"


def _file_sizes(manifest: DataManifest) -> Iterator[tuple[str, int]]:
    for record in manifest.splits.values():
        yield record.documents_file, 8 * (record.documents + 1)
        for shard in record.shards:
            yield shard.file, shard.bytes
    if manifest.blocks is not None:
        yield manifest.blocks.file, manifest.blocks.bytes


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
