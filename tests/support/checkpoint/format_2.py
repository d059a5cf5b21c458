"""A version 2 of the checkpoint format, as a later release might add it: other files, other index, other manifest."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hlat.checkpoint.format.base import CheckpointFormat, ReadFile
from hlat.checkpoint.format.filesystem import Disk, FileRecord, HashedFile, write_file
from hlat.checkpoint.format.index import StoredChunk, StoredTensor
from hlat.checkpoint.format.tensor_files import Region, TensorChunk, WriteResult

_ABOUT = "about.json"


class Format2(CheckpointFormat):
    """Raw bytes of tensors, one file per rank, and one JSON file with index and metadata."""

    version = 2
    small_files = (_ABOUT,)

    def write_chunks(self, disk: Disk, folder: Path, chunks: Sequence[TensorChunk], rank: int) -> WriteResult:
        name, stored = f"raw-{rank}.bin", []
        with HashedFile(disk, folder / name) as file:
            for chunk in chunks:
                data = chunk.tensor().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                place = (name, file.tell(), len(data))
                stored.append(StoredChunk(chunk.name, chunk.dtype, chunk.shape, chunk.offsets, chunk.sizes, *place))
                file.write(data)
        return WriteResult({name: file.record}, stored)

    def write_small_files(
        self, disk: Disk, folder: Path, chunks: Iterable[StoredChunk], meta: bytes
    ) -> dict[str, FileRecord]:
        plain = [{**asdict(chunk), "dtype": str(chunk.dtype).removeprefix("torch.")} for chunk in chunks]
        content = json.dumps({"chunks": plain, "meta": json.loads(meta)}).encode()
        return {_ABOUT: write_file(disk, folder / _ABOUT, content)}

    def manifest_fields(self, step: int, files: Mapping[str, FileRecord]) -> dict[str, Any]:
        return {"at": step, "content": [[name, record.bytes, record.sha256] for name, record in files.items()]}

    def parse_manifest(self, manifest: Mapping[str, Any]) -> tuple[int, dict[str, FileRecord]]:
        return manifest["at"], {name: FileRecord(size, digest) for name, size, digest in manifest["content"]}

    def read_meta(self, read: ReadFile, step: int | None = None) -> dict[str, Any]:
        return json.loads(read(_ABOUT))["meta"]

    def read_index(self, read: ReadFile, file_bytes: Mapping[str, int]) -> dict[str, StoredTensor]:
        found: dict[str, list[StoredChunk]] = {}
        for entry in json.loads(read(_ABOUT))["chunks"]:
            numbers = {key: tuple(entry[key]) for key in ("shape", "offsets", "sizes")}
            chunk = StoredChunk(**{**entry, **numbers, "dtype": getattr(torch, entry["dtype"])})
            found.setdefault(chunk.name, []).append(chunk)
        return {name: StoredTensor(of[0].dtype, of[0].shape, tuple(of)) for name, of in found.items()}

    def read_regions(
        self, folder: Path, index: Mapping[str, StoredTensor], regions: Sequence[Region]
    ) -> list[torch.Tensor]:
        return [self._whole(folder, index[region.name])[_slices(region)].clone() for region in regions]

    def _whole(self, folder: Path, stored: StoredTensor) -> torch.Tensor:
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            data = bytearray((folder / chunk.file).read_bytes()[chunk.begin : chunk.begin + chunk.length])
            values = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = values.view(stored.dtype).reshape(chunk.sizes)
        return whole


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
