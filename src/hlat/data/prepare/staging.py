"""The staging folder of a preparation: goes on with work that is its own, refuses to destroy another's.

<dir>/partial/key.json       what the work in it is: data format, settings, content of every file
<dir>/partial/hashes.json    hashes of the files (hlat.data.manifest.hash_cache)
<dir>/partial/units/         finished units
<dir>/partial/characters.json  of each file, where validation tails have to be found
<dir>/partial/out/           what becomes the result
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlat.data.manifest import MANIFEST_FILE, TOKENIZER_FOLDER, WORK_VERSION, save_hashes, setting_differences
from hlat.data.sources import SourceFile, describe_corpus_changes
from hlat.data.stores import write_atomic
from hlat.runtime import DataError

PARTIAL = "partial"
_KEY = "key.json"


@dataclass(frozen=True)
class StagingFolder:
    """The staging folder inside the folder of the result."""

    folder: Path

    @property
    def root(self) -> Path:
        """The folder itself."""
        return self.folder / PARTIAL

    @property
    def units(self) -> Path:
        """Where finished units are."""
        return self.root / "units"

    @property
    def characters(self) -> Path:
        """Where the characters of each file are kept once they are counted."""
        return self.root / "characters.json"

    @property
    def out(self) -> Path:
        """Where the result is put together."""
        return self.root / "out"

    def claim(self, settings: dict[str, Any], files: list[SourceFile]) -> None:
        """Make the folder ready for a preparation, keeping what an interrupted run of the same one left.

        Raises:
            DataError: it holds finished units of another preparation, which may have taken days.
        """
        if not self._can_resume(settings, files):
            (self.root / _KEY).unlink(missing_ok=True)  # first: half removed must not be taken for unfinished
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
        """Whether the folder holds work of this very preparation; else it may be removed."""
        reasons = self._differences_from(settings, files)
        if reasons and next(self.units.glob("*.json"), None) is not None:
            raise DataError(
                f"{self.root}: holds the finished work of an interrupted preparation that was another one:"
                + "".join(f"\n  {reason}" for reason in reasons)
                + f"\nGo on with what it was started with, or give another data.prepared_dir, or delete {self.root}."
            )
        return not reasons

    def _differences_from(self, settings: dict[str, Any], files: list[SourceFile]) -> list[str]:
        """How the preparation that was at work here differs from this one."""
        try:
            key = json.loads((self.root / _KEY).read_bytes())
            if key["format"] != WORK_VERSION:
                return [f"data format: {key['format']}, this version of hlat writes {WORK_VERSION}"]
            before = [(str(path), list(content)) for path, content in key["files"]]
            return setting_differences(dict(key["settings"]), settings) + describe_corpus_changes(before, files)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return [f"{_KEY} is missing or damaged, so what it was cannot be told"]

    def _refuse_foreign_files(self) -> None:
        strangers = [p.name for p in self.folder.iterdir() if p.name == TOKENIZER_FOLDER or p.suffix == ".bin"]
        if strangers:
            raise DataError(
                f"{self.folder}: holds {strangers[0]} but no {MANIFEST_FILE}: not complete, and not left by an "
                "interrupted run of this preparation. Give another folder with data.prepared_dir, or delete this one."
            )
