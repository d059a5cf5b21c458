"""A folder of prepared data, opened: checked cheaply here, and completely by hlat.data.prepare.verification.

manifest.json             written last: without it the folder is not prepared data
tokenizer/                as transformers.AutoTokenizer reads it
train-00000.bin ...       tokens, raw little-endian
train-documents.bin       where each document begins, uint64, and where the last one ends
validation-...            the same
quarantine.jsonl          the rows that could not be read, where there were any
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hlat.config.sections import DataConfig
from hlat.data.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    DataManifest,
    SourceRecord,
    content_settings,
    read_manifest,
    recipe_locations,
    setting_differences,
    too_many_bad_rows,
)
from hlat.data.prepared.consistency import (
    content_problems,
    document_boundaries,
    manifest_problems,
    size_problems,
    tokenizer_problems,
)
from hlat.data.prepared.shards import TokenArray
from hlat.data.sources import Split, sha256_of
from hlat.data.tokenizers import Tokenizer, load_saved, load_tokenizer
from hlat.runtime import DataError

_TOLD = 20  # problems that a message lists
_NO_CHECKSUM = (
    f"{MANIFEST_FILE} has no checksum of its own, as earlier versions wrote none: hlat data prepare with this recipe "
    "verifies all of the data and adds it."
)


@dataclass(frozen=True)
class PreparedData:
    """Prepared data, opened.

    Attributes:
        dir: the folder.
        manifest: what it says of itself.
        tokenizer: the tokenizer that made it.
    """

    dir: Path
    manifest: DataManifest
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of the content, tokens and tokenizer, wherever it lies and whatever it was made from."""
        return self.manifest.fingerprint

    def with_sources(self, sources: list[SourceRecord]) -> "PreparedData":
        """The same, of a corpus that may have been moved: text is read where it is now. Nothing is written."""
        return replace(self, manifest=self.manifest.model_copy(update={"sources": sources}))

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer's files."""
        return self.dir / TOKENIZER_FOLDER

    @property
    def notes(self) -> list[str]:
        """What the user should know about this preparation, one sentence each."""
        return self.manifest.notes

    @property
    def advice(self) -> list[str]:
        """What could be better about the folder, one sentence each."""
        return [] if self.manifest.has_checksum else [_NO_CHECKSUM]

    @property
    def train_tokens(self) -> int:
        """Tokens of the training split."""
        return self.manifest.splits["train"].tokens

    @property
    def validation_tokens(self) -> int:
        """Tokens of the validation split, 0 if there is none."""
        return self.manifest.splits["validation"].tokens

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of text that each token id stands for, shape (vocab_size,); see Tokenizer.token_bytes."""
        return self.tokenizer.token_bytes

    def tokens(self, split: Split) -> TokenArray:
        """The tokens of a split, memory-mapped."""
        shards = self.manifest.splits[split].shards
        return TokenArray([self.dir / s.file for s in shards], [s.tokens for s in shards], self.manifest.dtype)

    def document_boundaries(self, split: Split) -> npt.NDArray[np.uint64]:
        """Where each document of a split begins, in tokens, and where the last one ends: shape (documents + 1,).

        Asked for the first time, the file is compared with its checksum: 8 bytes a document are read.

        Raises:
            DataError: it is damaged.
        """
        if split not in self._boundaries:
            record = self.manifest.splits[split]
            file = self.dir / record.documents_file
            if sha256_of(file) != record.documents_sha256:
                raise DataError(
                    f"{file}: damaged: the checksum differs from the manifest's. Restore it, or delete {self.dir} and "
                    "prepare again: the same corpus and settings give the same data, with which a run goes on."
                )
            self._boundaries[split] = document_boundaries(self.dir, record)
        return self._boundaries[split]

    @cached_property
    def _boundaries(self) -> dict[Split, npt.NDArray[np.uint64]]:
        """Cache of verified document boundaries, by split."""
        return {}


def open_prepared(dir: str | Path, config: DataConfig | None = None) -> PreparedData:
    """Open prepared data; the manifest is checked completely, of its files sizes and borders (verify does the rest).

    Args:
        dir: the folder.
        config: if given, the settings that decide the content must be the ones the data was prepared with.

    Raises:
        DataError: not prepared data, incomplete, damaged, or prepared with other settings.
    """
    folder = Path(dir).expanduser()
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data here (no {MANIFEST_FILE}). Run hlat data prepare first.")
    _refuse(folder, list(manifest_problems(manifest)))
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
    """Raise DataError if there are any."""
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems[:_TOLD])
        more = f"\n  and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        raise DataError(
            f"{folder}: damaged:{listed}{more}\nRestore what differs, or delete {folder} and prepare again: the same "
            "corpus and settings give the same data, with which a run goes on."
        )


def check_settings(folder: Path, manifest: DataManifest, config: DataConfig, more: list[str] | None = None) -> None:
    """Raise DataError if data was prepared with other settings than these, or for the reasons in ``more``."""
    found = setting_problems(folder, manifest, config) + (more or [])
    if found:
        listed = "".join(f"\n  {reason}" for reason in found)
        raise DataError(
            f"{folder}: holds data prepared otherwise:{listed}\nGive another folder with data.prepared_dir, or delete "
            "this one to prepare anew, or go back to what it was prepared with."
        )


def setting_problems(folder: Path, manifest: DataManifest, config: DataConfig) -> list[str]:
    """How data was prepared otherwise than a recipe says, a sentence each.

    Raises:
        DataError: a tokenizer that is not there, and that is not the one the data was prepared with.
    """
    found = setting_differences(manifest.settings, current_settings(folder, manifest, config))
    unreadable, rows = manifest.unreadable_rows, manifest.all_rows
    if too_many_bad_rows(unreadable, rows, config.unreadable_rows):
        found.append(
            f"data.unreadable_rows: prepared without {unreadable:,} of {rows:,} rows that cannot be read, now a share "
            f"of {config.unreadable_rows:g} may be"
        )
    return found


def current_settings(folder: Path, manifest: DataManifest | None, config: DataConfig) -> dict[str, Any]:
    """``settings_of``, where finished data in the folder holds a copy of a given tokenizer that has gone since.

    Raises:
        DataError: a tokenizer that is not there, and that is not the one the data was prepared with.
    """
    path = config.tokenizer.path
    if manifest is None or path is None or Path(path).expanduser().exists():
        return content_settings(config)
    then = manifest.places["tokenizer"]
    if then != recipe_locations(config)["tokenizer"]:
        raise DataError(
            f"data.tokenizer.path {path}: no such tokenizer. {folder} holds data that was prepared with "
            f"{' '.join(then) or 'a tokenizer trained on its corpus'}. Ask for that to use it, or correct the path."
        )
    return content_settings(config, manifest.tokenizer_sha256)


def check_tokenizer(config: DataConfig, vocab_size: int) -> None:
    """``check_vocabulary`` before anything is prepared, where the recipe names a tokenizer that is there.

    One that is not there is left to ``prepare``, which knows whether finished data stands in for it.

    Raises:
        DataError: the tokenizer is unreadable, or has more tokens than the model has embedding rows.
    """
    path = config.tokenizer.path
    if path is None or not Path(path).expanduser().exists():
        return
    needed = load_tokenizer(path, config.tokenizer.eos_token).vocab_size
    if needed > vocab_size:
        raise DataError(
            f"data.tokenizer.path {path}: the tokenizer has {needed} tokens, the model only {vocab_size} "
            f"(model.vocab_size). Set model.vocab_size to at least {needed}, or give a smaller tokenizer."
        )


def check_token_ids(prepared: PreparedData, split: Split, highest: int, place: int) -> None:
    """Raise DataError if the highest of some token ids, at a position of a split, is none of the tokenizer's."""
    if highest >= prepared.tokenizer.vocab_size:
        raise DataError(
            f"{prepared.tokens(split).file_of(place)}: damaged: it holds token {highest}, the vocabulary has "
            f"{prepared.tokenizer.vocab_size}. `hlat data prepare` names all damaged files: restore them, or delete "
            "their folder and prepare again."
        )


def check_vocabulary(prepared: PreparedData, vocab_size: int) -> None:
    """Raise DataError if the data has token ids that a model with so many embedding rows does not."""
    needed = prepared.manifest.vocab_size
    if needed > vocab_size:
        raise DataError(
            f"{prepared.dir}: the tokenizer has {needed} tokens, the model only {vocab_size} (model.vocab_size). "
            f"Set model.vocab_size to at least {needed}, or prepare the data with a smaller tokenizer."
        )
