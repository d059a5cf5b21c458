"""Version 1 of the checkpoint format: files of torch.distributed.checkpoint (DCP) with an index and JSON metadata.

    manifest.json   {"format": 1, "step": 40, "files": {path: {"bytes": n, "sha256": hex}}}
    meta.json       metadata --parse_meta--> a mapping whose known fields have the types of ``_Meta``; others are free
    .metadata       index of tensors, a pickle in DCP's format that is never unpickled (``index.py``)
    *.distcp        tensors, in the bytes of torch.save (``tensor_files.py``)

Every reader of a checkpoint checks the types of its metadata, including ``verify_checkpoint``. So a file that was
edited, with its checksums updated, is reported as damage; it cannot cause an unexpected error later.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hlat.checkpoint.format.base import CheckpointFormat, ReadFile
from hlat.checkpoint.format.filesystem import Disk, FileRecord, write_file
from hlat.checkpoint.format.index import INDEX_NAME, StoredChunk, StoredTensor, parse_index, write_index
from hlat.checkpoint.format.tensor_files import Region, TensorChunk, WriteResult, read_regions, write_chunks
from hlat.runtime.errors import CheckpointError
from hlat.runtime.terminal import listed

META_NAME = "meta.json"

# The ranges of 64-bit integers: larger numbers would overflow where they are used.
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Ids = _Count | list[_Count] | None


_LISTED = 8  # problems in a message


class _Strict(BaseModel):
    # Strict: "40" for 40 is not what hlat writes, so the file was edited.
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _SpecialIds(_Strict):
    """Fields of ``hlat.model.hf.config.SpecialIds``."""

    model_config = ConfigDict(extra="forbid")
    bos: _Ids = None
    eos: _Ids = None
    pad: _Ids = None


class _Rollback(_Strict):
    step: _Count
    samples: Annotated[list[_Count], Field(min_length=2, max_length=2)]


class _Anomalies(_Strict):
    """Fields of ``hlat.resilience.AnomalyPolicy.state()``."""

    losses: list[float]
    norms: list[float]
    skipped_steps: list[_Count]
    rollbacks: list[_Rollback]


class _ForecastWatch(_Strict):
    """Fields of ``hlat.forecast.ForecastWatch``."""

    model_config = ConfigDict(extra="forbid")
    sha256: str = ""
    too_high: _Count = 0
    good_step: _Count = 0


class _Meta(_Strict):
    """Fields of ``meta.json``. The checkpoint of a run has a recipe, imported weights have a model section."""

    step: _Count = 0
    samples: _Count = 0
    tokens: _Count = 0
    recipe: dict[str, dict[str, Any] | list[dict[str, Any]]] = {}
    model: dict[str, Any] = {}
    data_fingerprint: str = ""
    versions: dict[str, str] = {}
    anomalies: _Anomalies | None = None
    forecast_watch: _ForecastWatch = _ForecastWatch()
    special_ids: _SpecialIds = _SpecialIds()
    generation_ids: _SpecialIds = _SpecialIds()


def parse_meta(data: bytes) -> dict[str, Any]:
    """Parse ``meta.json`` and return it unchanged; CheckpointError lists fields of types that hlat does not write."""
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{META_NAME} is not JSON ({exc})") from exc
    if not isinstance(meta, dict):
        raise CheckpointError(f"{META_NAME} is not a JSON object")
    try:
        _Meta.model_validate(meta)
    except ValidationError as exc:
        problems = [f"{'.'.join(map(str, found['loc']))[:100]}: {found['msg'].lower()}" for found in exc.errors()]
        raise CheckpointError(f"{META_NAME} has invalid fields: {listed(problems, _LISTED, '; ')}") from None
    return meta


_SHA256 = re.compile(r"[0-9a-f]{64}")


class Format1(CheckpointFormat):
    """Version 1; see the head of this module."""

    version = 1
    small_files = (META_NAME, INDEX_NAME)

    def write_chunks(self, disk: Disk, folder: Path, chunks: Sequence[TensorChunk], rank: int) -> WriteResult:
        return write_chunks(disk, folder, chunks, rank)

    def write_small_files(
        self, disk: Disk, folder: Path, chunks: Iterable[StoredChunk], meta: bytes
    ) -> dict[str, FileRecord]:
        # The index first: it checks that the chunks cover every tensor.
        return {INDEX_NAME: write_index(disk, folder, chunks), META_NAME: write_file(disk, folder / META_NAME, meta)}

    def manifest_fields(self, step: int, files: Mapping[str, FileRecord]) -> dict[str, Any]:
        return {"step": step, "files": {name: asdict(record) for name, record in sorted(files.items())}}

    def parse_manifest(self, manifest: Mapping[str, Any]) -> tuple[int, dict[str, FileRecord]]:
        files = {name: _record(name, entry) for name, entry in manifest["files"].items()}
        for required in (INDEX_NAME, META_NAME):
            if required not in files:
                raise CheckpointError(f"manifest.json does not list {required}")
        step = manifest["step"]
        if type(step) is not int or step < 0:
            raise CheckpointError(f"manifest.json has an impossible step {step!r}")
        return step, files

    def read_meta(self, read: ReadFile, step: int | None = None) -> dict[str, Any]:
        meta = parse_meta(read(META_NAME))
        # A file of another checkpoint may be valid by itself.
        if step is not None and (found := meta.get("step", step)) != step:
            raise CheckpointError(f"{META_NAME} is of step {found}, the manifest of step {step}")
        return meta

    def read_index(self, read: ReadFile, file_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
        try:
            return parse_index(read(INDEX_NAME), file_bytes)
        except CheckpointError as exc:
            raise CheckpointError(f"{INDEX_NAME}: {exc}") from exc

    def read_regions(
        self, folder: Path, index: Mapping[str, StoredTensor], regions: Sequence[Region]
    ) -> list[torch.Tensor]:
        return read_regions(folder, index, regions)


def _record(name: str, entry: Mapping[str, Any]) -> FileRecord:
    if not is_safe_name(name):
        raise CheckpointError(f"manifest.json lists {name!r}, which is not a plain path inside the checkpoint")
    size, digest = entry["bytes"], entry["sha256"]
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise CheckpointError(f"manifest.json has an impossible size or checksum for {name}")
    return FileRecord(size, digest)


def is_safe_name(name: str) -> bool:
    """True if a name is a relative path that stays inside its folder on every platform."""
    # A manifest may be hostile: no name in it may lead out of the checkpoint.
    path = PurePosixPath(name)
    plain = not path.is_absolute() and path.as_posix() == name and ".." not in path.parts and name not in ("", ".")
    return plain and not any(character in name for character in "\\:\0")
