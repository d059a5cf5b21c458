"""Prepare the data of a recipe; of online data once: tokenizer, validation split, block index.

    recipe --data.mode--> all of its tokens (hlat.data.prepare), or:
    files --sampled hashes--> identity of the corpus --> tokenizer, given or trained
          --blocks------------------------> blocks.npy
          --documents of some blocks------> validation tokens
          --> manifest.json, written last
          --pages of small files-----------> corpus.content; the others while the model trains (``blocks.py``)

The corpus is not read completely unless a tokenizer is trained on it or it is small. At first a file is identified by
its size and the hash of its beginning, middle and end; by all of its content only while the model trains. As with
prepared data, hashes decide which documents are validation text. Of these, as many are taken as the recipe evaluates
on, from blocks all over the corpus.
"""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np

from hlat.config import DataConfig, Recipe
from hlat.data.corpus_files import list_files
from hlat.data.documents import (
    Content,
    Split,
    SplitRule,
    Vocabulary,
    content_bytes,
    hash_threshold,
    text_byte_count,
    tokenize_contents,
)
from hlat.data.formats.base import WHOLE
from hlat.data.formats.rows import Row
from hlat.data.online.blocks import (
    CONTENT_FILE,
    BlockReader,
    CorpusContent,
    FileBlock,
    split_file,
)
from hlat.data.prepare.corpus import Corpus, ProgressCallback, SplitPlan, make_tokenizer
from hlat.data.prepare.preparation import ignore_progress, locked_folder, prepare, resolve_output_folder
from hlat.data.prepare.staging import complete_folder
from hlat.data.prepared.manifest import (
    BLOCKS_FILE,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    BlocksRecord,
    ShardRecord,
    SourceRecord,
    SourceTokens,
    SplitRecord,
    documents_file,
    read_data_manifest,
    shard_file,
)
from hlat.data.prepared.prepared_folder import PreparedData, check_settings, current_settings, open_prepared
from hlat.data.prepared.shards import token_dtype
from hlat.data.samples.order import permute
from hlat.data.source_file import SourceFile
from hlat.data.source_listing import check_first_bytes, doubts
from hlat.data.stores.local_files import as_data_error
from hlat.data.tokenizers.base import TokenIdArray, Tokenizer
from hlat.runtime.errors import DataError
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.terminal import plural

_HASHED_BYTES = 1 << 16  # bytes hashed at each of three positions of a file
_RECORDED_BYTES = 1 << 26  # of files whose content is recorded before training: less than a tenth of a second
_MIN_BLOCK, _MAX_BLOCK = 1 << 12, 1 << 22  # bytes of a block
_BLOCKS_PER_STREAM = 2
_TOKENIZED_TOGETHER = 32  # validation documents tokenized in one batch


def prepare_online(
    config: DataConfig,
    out_dir: str | Path,
    validation_tokens: int | None,
    progress: ProgressCallback | None = None,
) -> PreparedData:
    """Prepare everything online training needs besides the text itself; return at once if that is done already.

    ``validation_tokens`` is approximate; None for all there are. DataError if the corpus or tokenizer cannot be used or
    the folder holds other data, StorageError of files.
    """
    folder = resolve_output_folder(out_dir)
    files = [_with_sampled_hash(file) for file in list_files(config, folder)]
    manifest = read_data_manifest(folder)
    settings = current_settings(folder, manifest, config)
    with locked_folder(folder, wait=True):
        manifest = read_data_manifest(folder)
        if manifest is None:
            check_first_bytes(files, config.unreadable_rows)
            _OnlinePreparation(config, folder, files, validation_tokens, progress or ignore_progress).run(settings)
        else:
            check_settings(folder, manifest, config, files)
    prepared = open_prepared(folder, config)
    _compare_content(prepared, files)
    return prepared.with_sources([SourceRecord.from_file(file) for file in files])


def _compare_content(prepared: PreparedData, files: list[SourceFile]) -> None:
    """Compare or record the content of small files; DataError if a file differs, or may be another text."""
    is_new = not (prepared.dir / CONTENT_FILE).exists()
    parts = [part for file in files for part in file.files]
    with closing(CorpusContent(files, [prepared.dir], prepared.fingerprint)) as content:
        content.complete(budget=_RECORDED_BYTES)
        incomplete = [] if is_new else content.incomplete()
    times = [part.mtime_ns for record in prepared.manifest.sources for part in record.files]
    before = dict(zip([part.path for part in parts], times, strict=True))
    # Written after its preparation, and before all of it was recorded: nobody knows whether it is the same text.
    written = [part.path for part in incomplete if before[part.path] != part.mtime_ns]
    if written:
        raise DataError(
            f"{written[0]}: the file was written after its text was prepared, and before all of its content was "
            f"recorded ({plural(len(written), 'such file')}): it may be another text. Delete {prepared.dir} to prepare "
            "again, or set data.prepared_dir to another folder. If the text is the same, a run can resume with it."
        )


def _with_sampled_hash(file: SourceFile) -> SourceFile:
    """Return the file with a hash of its size, beginning, middle and end."""
    if file.index is not None:
        file = replace(file, index=_with_sampled_hash(file.index))
    digest = hashlib.sha256(str(file.size).encode())
    if file.cached_store is not None:
        # A hash of a remote file's version in the store: its content would have to be fetched.
        digest.update((file.etag or str(file.mtime_ns)).encode())
    else:
        with as_data_error(file.path), Path(file.path).open("rb") as stream:
            for position in (0, (file.size - _HASHED_BYTES) // 2, file.size - _HASHED_BYTES):
                stream.seek(max(position, 0))
                digest.update(stream.read(_HASHED_BYTES))
    return replace(file, sha256=digest.hexdigest())


def _without_hash(file: SourceFile) -> SourceFile:
    # A sampled hash must not be compared with the hash of a fetched file.
    return replace(file, sha256="", index=None if file.index is None else _without_hash(file.index))


class _OnlinePreparation:
    """One preparation, from files to the finished folder."""

    def __init__(
        self,
        config: DataConfig,
        folder: Path,
        files: list[SourceFile],
        validation_tokens: int | None,
        progress: ProgressCallback,
    ) -> None:
        self._config, self._folder, self._progress = config, folder, progress
        self._listed, self._files = files, [_without_hash(file) for file in files]
        self._wanted = validation_tokens
        self._share = config.validation.fraction if config.validation.path is None else 0.0
        self._below = hash_threshold(self._share)

    def run(self, settings: dict[str, object]) -> None:
        """Write all files, the manifest last."""
        blocks, counts = self._blocks()
        tokenizer, notes = self._tokenizer()
        buffer = BytesIO()
        np.save(buffer, np.array(blocks, dtype=np.int64), allow_pickle=False)  # shape (blocks, 3)
        content = buffer.getvalue()
        write_atomic(self._folder / BLOCKS_FILE, content)
        sha256 = hashlib.sha256(content).hexdigest()
        record = BlocksRecord(file=BLOCKS_FILE, sha256=sha256, bytes=len(content), counts=counts, below=self._below)
        dtype = token_dtype(tokenizer.vocab_size)
        splits = {
            "train": self._write_split("train", [], dtype, 0),
            "validation": self._validation(blocks, tokenizer, dtype),
        }
        notes += doubts(self._files)
        found = {"splits": splits, "rows": [], "quarantine": None, "notes": notes, "blocks": record}
        complete_folder(self._folder, self._config, settings, self._listed, tokenizer, found)

    def _blocks(self) -> tuple[list[FileBlock], list[int]]:
        """Return the blocks of all training files, and the number of blocks of each source."""
        total = sum(file.size for file in self._files if not file.is_validation)
        size = min(max(total // (_BLOCKS_PER_STREAM * self._config.streams), _MIN_BLOCK), _MAX_BLOCK)
        blocks: list[FileBlock] = []
        counts = [0] * max(len(self._config.sources), 1)
        for index, file in enumerate(self._files):
            if not file.is_validation:
                found = split_file(index, file, size)
                blocks += found
                counts[file.source] += len(found)
        if not blocks:
            raise DataError(f"{self._files[0].path}: no text for training: the files hold no rows.")
        return blocks, counts

    def _tokenizer(self) -> tuple[Tokenizer, list[str]]:
        """Load or train the tokenizer and save it; return it, and notes for the user."""
        corpus = Corpus(self._files, range(len(self._files)), self._config.unreadable_rows)
        plan = SplitPlan(self._share)
        return make_tokenizer(self._config, corpus, plan, self._folder / TOKENIZER_FOLDER, self._progress)

    # --- validation --------------------------------------------------------------------------------------------------

    def _validation(self, blocks: list[FileBlock], tokenizer: Tokenizer, dtype: str) -> SplitRecord:
        """Tokenize validation documents until there are enough tokens, and write them."""
        documents: list[TokenIdArray] = []
        end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        total_bytes = tokens = 0
        found = self._validation_documents(blocks, Vocabulary.from_tokenizer(tokenizer))
        while self._wanted is None or tokens < self._wanted:
            batch = list(islice(found, _TOKENIZED_TOGETHER))
            if not batch:
                break
            for content, ids in zip(batch, tokenize_contents(batch, tokenizer), strict=True):
                documents.append(np.concatenate([ids, np.array(end, dtype=np.uint32)]))
                tokens += len(documents[-1])
                total_bytes += text_byte_count(content, tokenizer)
        return self._write_split("validation", documents, dtype, total_bytes)

    def _validation_documents(self, blocks: list[FileBlock], vocabulary: Vocabulary) -> Iterator[Content]:
        """Yield the documents of the validation files, or else those chosen by hash."""
        reader = BlockReader(vocabulary)
        if self._config.validation.path is not None:
            for file in self._files:
                if file.is_validation:
                    yield from _documents(reader.rows(file, FileBlock(0, 0, WHOLE), 0))
            return
        if not self._below:
            return
        assignment = SplitRule(below=self._below)
        # Permuted, so that the few documents that are taken come from all over the corpus.
        for number in permute(0, 0, np.arange(len(blocks)), len(blocks)).tolist():
            file = self._files[blocks[number].file]
            for content in _documents(reader.rows(file, blocks[number], 0)):
                if assignment.split_of(content_bytes(content)) == "validation":
                    yield content

    def _write_split(self, split: Split, documents: list[TokenIdArray], dtype: str, text_bytes: int) -> SplitRecord:
        """Write a split as one shard; return its record."""
        starts = np.cumsum([0, *map(len, documents)], dtype=np.uint64).astype("<u8").tobytes()
        tokens = np.concatenate(documents) if documents else np.empty(0, dtype=np.uint32)
        content = tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        write_atomic(self._folder / documents_file(split), starts)
        shards = []
        if documents:
            name = shard_file(split, 0)
            write_atomic(self._folder / name, content)
            sha256 = hashlib.sha256(content).hexdigest()
            shards = [ShardRecord(file=name, tokens=len(tokens), bytes=len(content), sha256=sha256)]
        counts = {"documents": len(documents), "tokens": len(tokens), "text_bytes": text_bytes}
        return SplitRecord(
            **counts,
            sources=[SourceTokens(source=-1, **counts)] if documents else [],
            shards=shards,
            documents_file=documents_file(split),
            documents_sha256=hashlib.sha256(starts).hexdigest(),
        )


def _documents(rows: Iterator[Row]) -> Iterator[Content]:
    yield from (row.content for row in rows if row.content is not None and len(row.content))


def check_first_stage(recipe: Recipe) -> None:
    """Raise DataError for a later stage whose tokenizer is still to be made, with the data of the first."""
    place, path = recipe.place, recipe.data.tokenizer.path
    if place is None or path is None or path != str(place.run.prepared_dir / "tokenizer") or Path(path).exists():
        return
    if (recipe.prepared_dir / MANIFEST_FILE).exists():  # prepared data has a copy of it
        return
    first = place.run.stages[0].name
    raise DataError(
        f"stage {place.stage.name}: its text is tokenized as that of the first stage, whose tokenizer {path} is made "
        f"when the data of that is prepared. Prepare it first: `hlat data prepare RECIPE --stage {first}`; or give "
        "data.tokenizer.path."
    )


def prepare_recipe_data(
    recipe: Recipe, *, workers: int | None = None, progress: ProgressCallback | None = None
) -> PreparedData:
    """Prepare the data of a recipe in its data.mode; return at once if this has been done before.

    ``workers`` counts for the mode "prepared" only; None for data.workers, or one per core. In the mode "online" the
    result has the tokenizer, the validation tokens and the block index. DataError if the corpus or tokenizer cannot be
    used or the folder contains other data, StorageError if the disk refuses.
    """
    check_first_stage(recipe)
    data = recipe.data
    if data.mode == "prepared":
        return prepare(data, recipe.prepared_dir, workers=workers, progress=progress)
    sequences = recipe.evaluation.sequences
    # One more, the label of the last input.
    validation_tokens = None if sequences is None else sequences * data.sequence_length + 1
    return prepare_online(data, recipe.prepared_dir, validation_tokens, progress)


def prepare_validation_sets(recipe: Recipe, prepared: PreparedData) -> None:
    """Prepare the sets of ``evaluation.sets`` in the run's folder; return at once if this has been done before.

    They share the tokenizer and the columns of ``prepared``. DataError if a set cannot be used or its folder contains
    other data, StorageError if the disk refused the write.
    """
    model = prepared.tokenizer_dir / "tokenizer.model"  # as ``load_saved``, which prefers the model
    tokenizer = str(model if model.is_file() else prepared.tokenizer_dir)
    for name, path in recipe.evaluation.sets.items():
        data = DataConfig.model_validate(
            {
                "path": path,
                "text_column": recipe.data.text_column,
                "tokens_column": recipe.data.tokens_column,
                "tokenizer": {"path": tokenizer, "eos_token": prepared.tokenizer.eos_token},
                "validation": {"fraction": 0},  # all of a set is in its training split
                "sequence_length": recipe.data.sequence_length,
            }
        )
        prepare(data, _set_folder(recipe, name), workers=1)


def open_validation_sets(recipe: Recipe, *, compare: bool = True) -> dict[str, PreparedData]:
    """Open the prepared sets of ``evaluation.sets``, by name; DataError if one is missing or damaged."""
    folders = {name: _set_folder(recipe, name) for name in recipe.evaluation.sets}
    opened = {name: open_prepared(folder).for_run(folder) for name, folder in folders.items()}
    # One process of each machine compares checksums: all would read the same files.
    for prepared in opened.values() if compare else ():
        prepared.check_before_training()
    return opened


def _set_folder(recipe: Recipe, name: str) -> Path:
    return recipe.run_dir / "validation" / name
