"""File format of checkpoints: the index of tensors, and tensor files read without unpickling."""

from hlat.checkpoint.format.base import CheckpointFormat, ReadFile
from hlat.checkpoint.format.filesystem import (
    NEW_FOLDER_REMEDY,
    READ_REMEDY,
    RUN_REMEDY,
    Disk,
    FileRecord,
    HashedFile,
    Remedy,
    check_new_folder,
    copy_file,
    human_bytes,
    make_checkpoints_folder,
    make_folders,
    refuse_file_name,
    storage_error,
    write_file,
)
from hlat.checkpoint.format.format_1 import is_safe_name
from hlat.checkpoint.format.index import INDEX_NAME, StoredChunk, StoredTensor, parse_foreign_index, parse_index
from hlat.checkpoint.format.partial_read import Region, read_regions
from hlat.checkpoint.format.tensor_chunks import ComputedChunk, TensorChunk, replicated_chunks
from hlat.checkpoint.format.versions import FORMATS, format_numbered, newest_format
from hlat.checkpoint.format.writer import WriteResult

__all__ = [
    "FORMATS",
    "INDEX_NAME",
    "NEW_FOLDER_REMEDY",
    "READ_REMEDY",
    "RUN_REMEDY",
    "CheckpointFormat",
    "ComputedChunk",
    "Disk",
    "FileRecord",
    "HashedFile",
    "ReadFile",
    "Region",
    "Remedy",
    "StoredChunk",
    "StoredTensor",
    "TensorChunk",
    "WriteResult",
    "check_new_folder",
    "copy_file",
    "format_numbered",
    "human_bytes",
    "is_safe_name",
    "make_checkpoints_folder",
    "make_folders",
    "newest_format",
    "parse_foreign_index",
    "parse_index",
    "read_regions",
    "refuse_file_name",
    "replicated_chunks",
    "storage_error",
    "write_file",
]
