"""File format of checkpoints: the index of tensors, and tensor files read without unpickling."""

from hlat.checkpoint.format.filesystem import (
    NEW_FOLDER_REMEDY,
    READ_REMEDY,
    RUN_REMEDY,
    Disk,
    FileRecord,
    HashedFile,
    Remedy,
    copy_file,
    human_bytes,
    make_checkpoints_folder,
    make_folders,
    storage_error,
    write_file,
)
from hlat.checkpoint.format.index import INDEX_NAME, StoredChunk, StoredTensor, parse_index, read_index, write_index
from hlat.checkpoint.format.meta import META_NAME, check_meta, parse_meta
from hlat.checkpoint.format.partial_read import Region, read_regions
from hlat.checkpoint.format.tensor_chunks import TensorChunk, replicated_chunks
from hlat.checkpoint.format.writer import WriteResult, write_chunks

__all__ = [
    "INDEX_NAME",
    "META_NAME",
    "NEW_FOLDER_REMEDY",
    "READ_REMEDY",
    "RUN_REMEDY",
    "Disk",
    "FileRecord",
    "HashedFile",
    "Region",
    "Remedy",
    "StoredChunk",
    "StoredTensor",
    "TensorChunk",
    "WriteResult",
    "check_meta",
    "copy_file",
    "human_bytes",
    "make_checkpoints_folder",
    "make_folders",
    "parse_index",
    "parse_meta",
    "read_index",
    "read_regions",
    "replicated_chunks",
    "storage_error",
    "write_chunks",
    "write_file",
    "write_index",
]
