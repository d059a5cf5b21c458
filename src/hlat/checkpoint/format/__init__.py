"""Files of a checkpoint: the index of tensors, and tensors read and written without pickle."""

from hlat.checkpoint.format.filesystem import (
    IN_A_NEW_FOLDER,
    IN_A_RUN,
    READING,
    Disk,
    FileRecord,
    HashedFile,
    WayOut,
    copy_file,
    human_bytes,
    make_folders,
    make_root,
    storage_error,
    write_file,
)
from hlat.checkpoint.format.index import INDEX_NAME, StoredBlock, StoredTensor, parse_index, read_index, write_index
from hlat.checkpoint.format.meta import META_NAME, check_meta, parse_meta
from hlat.checkpoint.format.partial_read import Region, read_regions
from hlat.checkpoint.format.tensor_chunks import Block, whole_tensors
from hlat.checkpoint.format.writer import Written, write_blocks

__all__ = [
    "INDEX_NAME",
    "IN_A_NEW_FOLDER",
    "IN_A_RUN",
    "META_NAME",
    "READING",
    "Block",
    "Disk",
    "FileRecord",
    "HashedFile",
    "Region",
    "StoredBlock",
    "StoredTensor",
    "WayOut",
    "Written",
    "check_meta",
    "copy_file",
    "human_bytes",
    "make_folders",
    "make_root",
    "parse_index",
    "parse_meta",
    "read_index",
    "read_regions",
    "storage_error",
    "whole_tensors",
    "write_blocks",
    "write_file",
    "write_index",
]
