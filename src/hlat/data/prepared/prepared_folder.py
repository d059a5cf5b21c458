"""Open a folder of prepared data; this checks it cheaply, hlat.data.prepare.verification checks it completely.

manifest.json             written last; without it the folder is not prepared data
tokenizer/                tokenizer files, readable by transformers.AutoTokenizer
train-00000.bin ...       tokens, raw little-endian
train-documents.bin       first token of each document and end of the last one, uint64
validation-...            the same for the validation split
quarantine.jsonl          the bad rows, if there were any
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.config import DataConfig
from hlat.data.corpus_files import describe_corpus_changes
from hlat.data.documents import SPLITS, Split
from hlat.data.prepared.bad_rows import too_many_bad_rows
from hlat.data.prepared.consistency import (
    content_problems,
    content_settings,
    document_boundaries,
    manifest_problems,
    recipe_locations,
    setting_differences,
    size_problems,
    tokenizer_problems,
    with_decided_tails,
)
from hlat.data.prepared.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, DataManifest, SourceRecord, read_data_manifest
from hlat.data.prepared.shards import ShardContent, TokenArray
from hlat.data.source_file import SourceFile, sha256_of
from hlat.data.stores.remote import local_path
from hlat.data.tokenizers.base import Tokenizer
from hlat.data.tokenizers.load import load_saved, load_tokenizer
from hlat.runtime.errors import DataError
from hlat.runtime.terminal import listed

_MAX_PROBLEMS = 20  # problems that a message lists
_COMPARED_BYTES = 1 << 30  # largest split that is compared with its checksums before every run: about a second
_COUNTED_TOKENS = 1 << 22  # of which the bytes are added up at once


@dataclass(frozen=True)
class PreparedData:
    """Opened prepared data: a folder, its manifest and its tokenizer."""

    dir: Path  # the folder
    manifest: DataManifest
    tokenizer: Tokenizer
    # Folder of the run that trains on it, which remembers what it has read; None for other uses.
    run_dir: Path | None = None
    opening_notes: tuple[str, ...] = ()  # sentences for the user, not about the preparation but about this use of it

    @property
    def fingerprint(self) -> str:
        """Hash of tokens and tokenizer; independent of the folder and the source files."""
        return self.manifest.fingerprint

    def with_sources(self, sources: list[SourceRecord]) -> "PreparedData":
        """Return the same data with other source files, for a corpus that was moved; writes nothing."""
        return replace(self, manifest=self.manifest.model_copy(update={"sources": sources}))

    def for_run(self, run_dir: Path) -> "PreparedData":
        """Return the same data, to be read by a run."""
        return replace(self, run_dir=run_dir)

    @property
    def record_folders(self) -> list[Path]:
        """Folders that remember what was read; empty unless a run reads the data."""
        return [] if self.run_dir is None else [self.dir, self.run_dir]

    @property
    def tokenizer_dir(self) -> Path:
        return self.dir / TOKENIZER_FOLDER

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about this preparation, and about how it was opened."""
        return [*self.manifest.notes, *self.opening_notes]

    @property
    def train_tokens(self) -> int:
        return self.manifest.splits["train"].tokens

    @property
    def validation_tokens(self) -> int:
        """Number of tokens of the validation split; 0 if there is none."""
        return self.manifest.splits["validation"].tokens

    @property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes that each token spells, int64, shape (vocab_size,)."""
        return self.tokenizer.token_bytes

    def text_and_spelling(self, split: Split) -> list[tuple[float, float]]:
        """Return (bytes of text, bytes that its tokens spell) of each source of a split; (1, 1) if they are the same.

        Spelled bytes times the ratio are bytes of text: exactly for all tokens of a source, and for any of them if the
        tokenizer keeps the text. For some tokens of another tokenizer the error is at most that by which the ratio
        varies within the source.
        """
        record = self.manifest.splits[split]
        if self.tokenizer.keeps_text:
            return [(1.0, 1.0)] * len(record.sources)
        ends = np.cumsum([each.tokens for each in record.sources]).tolist()
        spelled = [self._spelled(split, end - each.tokens, end) for each, end in zip(record.sources, ends, strict=True)]
        return [(each.text_bytes, max(count, 1)) for each, count in zip(record.sources, spelled, strict=True)]

    def _spelled(self, split: Split, start: int, stop: int) -> int:
        """Add up the bytes that tokens spell."""
        tokens, table, total = self.tokens(split), self.token_bytes, 0
        for begin in range(start, stop, _COUNTED_TOKENS):
            ids = tokens.read(begin, min(begin + _COUNTED_TOKENS, stop))
            # Ids outside the vocabulary are reported when they are in a batch.
            total += int(table[ids[ids < len(table)]].sum())
        return total

    def check_shards(self, split: Split) -> None:
        """Read a split and compare it with its checksums; DataError lists the damaged shards."""
        shards = self.manifest.splits[split].shards
        damaged = [shard.file for shard in shards if sha256_of(self.dir / shard.file) != shard.sha256]
        if damaged:
            raise self._damaged(listed(damaged))

    def check_before_training(self) -> None:
        """Run ``check_shards`` for every split of at most 1 GiB."""
        for split in SPLITS:
            if split not in self._large_splits:
                self.check_shards(split)

    def check_while_training(self) -> None:
        """Start to compare the larger splits; reading tokens raises what is found."""
        self._content.compare_all(self._large_splits)

    def notes_at_end(self) -> list[str]:
        """Look at what ``check_while_training`` has found; return a sentence if not everything was compared.

        Raises:
            DataError: a shard differs.
        """
        reason = self._content.look_at_process()
        return [f"{self.dir}: not all checksums were compared: {reason}. Use hlat data verify."] if reason else []

    @property
    def training_notes(self) -> list[str]:
        """Sentences about the splits that ``check_before_training`` leaves out."""
        return [
            f"{self._shard_bytes(split) / 1e9:,.1f} GB of {split} shards are compared with their checksums while the "
            f"model trains; hlat data verify {self.dir} compares them before."
            for split in self._large_splits
        ]

    @property
    def _large_splits(self) -> list[Split]:
        return [split for split in SPLITS if self._shard_bytes(split) > _COMPARED_BYTES]

    @cached_property
    def _content(self) -> ShardContent:
        return ShardContent(self.dir, self.manifest, self.record_folders)

    def _shard_bytes(self, split: Split) -> int:
        tokens = sum(shard.tokens for shard in self.manifest.splits[split].shards)
        return tokens * np.dtype(self.manifest.dtype).itemsize

    def _damaged(self, files: str) -> DataError:
        return DataError(
            f"{self.dir}: damaged: {files}: the checksum differs from the manifest's. Restore the file, or delete the "
            "folder and prepare again: the same corpus and settings give the same data, and runs can resume with it."
        )

    def tokens(self, split: Split) -> TokenArray:
        """Map the tokens of a split. A run compares them, as it reads them, with what was read before."""
        shards = self.manifest.splits[split].shards
        paths, counts = [self.dir / shard.file for shard in shards], [shard.tokens for shard in shards]
        if not self.record_folders:
            return TokenArray(paths, counts, self.manifest.dtype)
        return TokenArray(paths, counts, self.manifest.dtype, partial(self._content.check, split))

    def document_boundaries(self, split: Split) -> npt.NDArray[np.uint64]:
        """Memory-map first token of each document and end of the last: uint64, shape (documents + 1,)."""
        if split not in self._boundaries:
            record = self.manifest.splits[split]
            file = self.dir / record.documents_file
            # The first call reads all of it, 8 bytes per document. DataError if it is damaged.
            if sha256_of(file) != record.documents_sha256:
                raise self._damaged(record.documents_file)
            self._boundaries[split] = document_boundaries(self.dir, record)
        return self._boundaries[split]

    @cached_property
    def _boundaries(self) -> dict[Split, npt.NDArray[np.uint64]]:
        return {}


def open_prepared(dir: str | Path, config: DataConfig | None = None) -> PreparedData:
    """Open prepared data after checking its manifest, file sizes and some document boundaries.

    ``hlat.data.prepare.verification`` checks the rest. With ``config``, the settings that decide the content must be
    those that the data was prepared with.

    Raises:
        DataError: no prepared data, or it is incomplete, damaged, or prepared with other settings.
    """
    folder = Path(local_path(dir))
    manifest = read_data_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data here (no {MANIFEST_FILE}). Run hlat data prepare first.")
    _refuse(folder, list(manifest_problems(manifest)))
    # Before content is looked at: files are mapped by the sizes in the manifest.
    _refuse(folder, list(size_problems(folder, manifest)))
    tokenizer = load_saved(folder / TOKENIZER_FOLDER)
    try:
        _refuse(folder, [*tokenizer_problems(manifest, tokenizer), *content_problems(folder, manifest)])
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    if config is not None:
        check_settings(folder, manifest, config)
    return PreparedData(folder, manifest, tokenizer)


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        shown = listed(problems, _MAX_PROBLEMS, "\n  ")
        raise DataError(
            f"{folder}: damaged:\n  {shown}\nRestore what differs, or delete {folder} and prepare again: the same "
            "corpus and settings give the same data, and runs can resume with it."
        )


def check_settings(
    folder: Path, manifest: DataManifest, config: DataConfig, files: list[SourceFile] | None = None
) -> None:
    """Raise DataError if data was prepared with other settings, or of other ``files`` than these, if given."""
    problems = setting_problems(folder, manifest, config)
    if files is not None:
        problems += describe_corpus_changes([(record.path, record.content) for record in manifest.sources], files)
    if problems:
        differences = "".join(f"\n  {problem}" for problem in problems)
        raise DataError(
            f"{folder}: contains data that was prepared differently:{differences}\nSet data.prepared_dir to another "
            "folder, delete this one to prepare again, or use the earlier settings and corpus."
        )


def setting_problems(folder: Path, manifest: DataManifest, config: DataConfig) -> list[str]:
    """Describe how the settings of prepared data differ from a recipe's; errors of ``current_settings``."""
    problems = setting_differences(manifest.settings, current_settings(folder, manifest, config))
    bad_rows, rows = manifest.total("unreadable_rows"), manifest.total("rows")
    if too_many_bad_rows(bad_rows, rows, config.unreadable_rows):
        problems.append(
            f"data.unreadable_rows: prepared without {bad_rows:,} of {rows:,} rows that cannot be read, now a share "
            f"of {config.unreadable_rows:g} is allowed"
        )
    return problems


def current_settings(folder: Path, manifest: DataManifest | None, config: DataConfig) -> dict[str, Any]:
    """Return ``content_settings``; DataError if the tokenizer is gone and the data has another."""
    path = config.tokenizer.path
    if manifest is None or path is None or Path(local_path(path)).exists():
        return with_decided_tails(content_settings(config), config, {} if manifest is None else manifest.settings)
    earlier = manifest.places["tokenizer"]
    if earlier != recipe_locations(config)["tokenizer"]:
        raise DataError(
            f"data.tokenizer.path {path}: no such tokenizer. {folder} contains data that was prepared with "
            f"{' '.join(earlier) or 'a tokenizer trained on its corpus'}. Set that to use it, or correct the path."
        )
    # If the tokenizer has been deleted, its copy in the finished data counts.
    return with_decided_tails(content_settings(config, manifest.tokenizer_sha256), config, manifest.settings)


def check_tokenizer(config: DataConfig, vocab_size: int) -> None:
    """Check before data is prepared that the model has an embedding row for each token of the recipe's tokenizer.

    A tokenizer that does not exist here, such as one of the Hugging Face Hub, is left to ``prepare``, which may find a
    copy of it in finished data. DataError if it is unreadable, or has more tokens than ``vocab_size`` rows.
    """
    path = config.tokenizer.path
    if path is None or not Path(local_path(path)).exists():
        return
    needed = load_tokenizer(path, config.tokenizer.eos_token).vocab_size
    _refuse_few_rows(f"data.tokenizer.path {path}", needed, vocab_size, "give a smaller tokenizer")


def check_token_ids(prepared: PreparedData, split: Split, highest: int, position: int) -> None:
    """Raise DataError, which names the shard, if the ``highest`` id is outside the vocabulary."""
    if highest >= prepared.tokenizer.vocab_size:
        raise DataError(
            f"{prepared.tokens(split).file_of(position)}: damaged: it contains token {highest}, the vocabulary has "
            f"{prepared.tokenizer.vocab_size}. `hlat data prepare` names all damaged files: restore them, or delete "
            "their folder and prepare again."
        )


def check_vocabulary(prepared: PreparedData, vocab_size: int) -> None:
    """Raise DataError if the model has fewer embedding rows than the data's tokenizer has tokens."""
    remedy = "prepare the data with a smaller tokenizer"
    _refuse_few_rows(str(prepared.dir), prepared.manifest.vocab_size, vocab_size, remedy)


def _refuse_few_rows(where: str, needed: int, vocab_size: int, remedy: str) -> None:
    if needed > vocab_size:
        raise DataError(
            f"{where}: the tokenizer has {needed} tokens, the model only {vocab_size} (model.vocab_size). "
            f"Set model.vocab_size to at least {needed}, or {remedy}."
        )
