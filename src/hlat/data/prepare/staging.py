"""The staging folder of a preparation: resumes work of the same preparation, never deletes finished work of another.

<dir>/partial/key.json         identity of the preparation: data format, settings, content of every file
<dir>/partial/hashes.json      hashes of the files (hlat.data.manifest.hash_cache)
<dir>/partial/units/           finished units
<dir>/partial/characters.json  characters of each file, if validation tails have to be found
<dir>/partial/out/             the result under construction
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.data.manifest.hash_cache import save_hashes
from hlat.data.manifest.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, WORK_VERSION
from hlat.data.manifest.settings import setting_differences
from hlat.data.sources.file_list import describe_corpus_changes
from hlat.data.sources.source_file import SourceFile
from hlat.data.stores.atomic_files import write_atomic
from hlat.runtime.errors import DataError

PARTIAL = "partial"
_KEY = "key.json"


@dataclass(frozen=True)
class StagingFolder:
    """The staging folder inside the output folder.

    Attributes:
        folder: the output folder.
    """

    folder: Path

    @property
    def root(self) -> Path:
        """The staging folder itself."""
        return self.folder / PARTIAL

    @property
    def units(self) -> Path:
        """Folder of the finished units."""
        return self.root / "units"

    @property
    def characters(self) -> Path:
        """File with the counted characters of each file."""
        return self.root / "characters.json"

    @property
    def out(self) -> Path:
        """Folder in which the result is built."""
        return self.root / "out"

    def claim(self, settings: dict[str, Any], files: list[SourceFile]) -> None:
        """Prepare the folder for work, and keep what an interrupted run of the same preparation left.

        Args:
            settings: the settings that decide the content.
            files: the files of the corpus, with their hashes.

        Raises:
            DataError: the folder holds finished units of another preparation, which may have taken days.
        """
        if not self._can_resume(settings, files):
            (self.root / _KEY).unlink(
                missing_ok=True
            )  # first, so that a half-deleted folder is not mistaken for unfinished work
            shutil.rmtree(self.root, ignore_errors=True)
            self._refuse_foreign_files()
        self.units.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(exist_ok=True)
        for leftover in [*self.units.glob("*.tmp"), *self.out.glob("*.tmp")]:
            leftover.unlink()
        save_hashes(self.root, files)
        content = [[file.path, file.content] for file in files]
        key = {"format": WORK_VERSION, "settings": settings, "files": content}
        write_atomic(self.root / _KEY, json.dumps(key).encode())

    def _can_resume(self, settings: dict[str, Any], files: list[SourceFile]) -> bool:
        """Return True if the folder holds work of the same preparation; if False, the folder may be deleted.

        Raises:
            DataError: it holds finished units of another preparation.
        """
        reasons = self._differences_from(settings, files)
        if reasons and next(self.units.glob("*.json"), None) is not None:
            raise DataError(
                f"{self.root}: holds finished work of an interrupted preparation that differs from this one:"
                + "".join(f"\n  {reason}" for reason in reasons)
                + f"\nContinue with its settings and files, or use another data.prepared_dir, or delete {self.root}."
            )
        return not reasons

    def _differences_from(self, settings: dict[str, Any], files: list[SourceFile]) -> list[str]:
        """Describe how the preparation that left this folder differs from the one described by the arguments."""
        try:
            key = json.loads((self.root / _KEY).read_bytes())
            if key["format"] != WORK_VERSION:
                return [f"data format: {key['format']}, this version of hlat writes {WORK_VERSION}"]
            before = [(str(path), list(content)) for path, content in key["files"]]
            return setting_differences(dict(key["settings"]), settings) + describe_corpus_changes(before, files)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return [f"{_KEY} is missing or damaged, so the earlier preparation cannot be identified"]

    def _refuse_foreign_files(self) -> None:
        foreign = [p.name for p in self.folder.iterdir() if p.name == TOKENIZER_FOLDER or p.suffix == ".bin"]
        if foreign:
            raise DataError(
                f"{self.folder}: holds {foreign[0]} but no {MANIFEST_FILE}: not complete, and not left by an "
                "interrupted run of this preparation. Use another folder (data.prepared_dir), or delete this one."
            )
