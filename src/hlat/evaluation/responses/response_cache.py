"""Responses on disk: what was computed before an interruption, or in an earlier evaluation, is not computed again.

    request, identity of the model --response_key--> key     folder/<model>/<segment>.jsonl: key, response, checksum

Every process that writes has a segment of its own, so that evaluations may share a folder. A line that was being
written when its process was killed has no valid checksum and is ignored.
"""

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hlat.evaluation.batch_generation.requests import GenerationRequest
from hlat.evaluation.scoring.requests import ScoreRequest
from hlat.runtime.errors import StorageError

_SUFFIX = ".jsonl"


class ResponseCache:
    """Responses of one model by key, in memory and on disk; a context that opens and closes the files.

    Args:
        folder: folder of all models' responses.
        model: identity of the model: a hash of its weights and of what else changes responses.

    Attributes:
        folder: folder of this model's responses.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder / model[:32]
        self._responses: dict[str, Any] = {}
        self._file: TextIO | None = None

    def __enter__(self) -> "ResponseCache":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for segment in sorted(self.folder.glob(f"*{_SUFFIX}")):
                self._responses |= dict(_valid_lines(segment))
            name = f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            self._file = (self.folder / name).open("x", encoding="utf-8")
        except OSError as error:
            raise _refused(self.folder, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            name, empty = Path(self._file.name), self._file.tell() == 0
            self._file.close()
            if empty:
                name.unlink(missing_ok=True)

    def __contains__(self, key: str) -> bool:
        return key in self._responses

    def __getitem__(self, key: str) -> Any:
        return self._responses[key]

    def add(self, responses: Mapping[str, Any]) -> None:
        """Store responses: JSON values by key. They survive the end of the process, in whatever way it ends.

        Raises:
            StorageError: the disk refused the write.
        """
        assert self._file is not None, "used as a context"
        lines = [_line(key, value) for key, value in responses.items()]
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError as error:
            raise _refused(self.folder, error) from error
        self._responses |= responses


def response_key(request: ScoreRequest | GenerationRequest) -> str:
    """Return the key of a request: a hash of all that decides about the response of a given model."""
    text = json.dumps([type(request).__name__, asdict(request)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _line(key: str, value: Any) -> str:
    content = json.dumps([key, value], separators=(",", ":"))
    return f"{zlib.crc32(content.encode()):08x} {content}\n"


def _valid_lines(segment: Path) -> Iterable[tuple[str, Any]]:
    for line in segment.read_text(encoding="utf-8", errors="replace").splitlines():
        checksum, _, content = line.partition(" ")
        if checksum == f"{zlib.crc32(content.encode()):08x}":
            key, value = json.loads(content)
            yield key, value


def _refused(folder: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"{folder}: cannot store responses ({reason}). Free space, or name another folder with --out.")
