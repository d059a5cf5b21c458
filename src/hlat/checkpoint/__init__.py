"""Checkpoints: whole and verified, or not there. Written under canonical names, so that they know no layout."""

from hlat.checkpoint.blocks import Block, whole_tensors
from hlat.checkpoint.export import end_token_ids, export_hf, import_hf, load_model
from hlat.checkpoint.identity import Change, check_resume, versions
from hlat.checkpoint.inventory import (
    Entry,
    Group,
    checkpoints_folder,
    contents,
    inventory,
    is_checkpoint,
    look,
)
from hlat.checkpoint.manifest import read_manifest, verify
from hlat.checkpoint.reading import Checkpoint, open_checkpoint, read_meta, resolve
from hlat.checkpoint.state import collect, load_weights, restore
from hlat.checkpoint.store import CheckpointStore, surplus
from hlat.checkpoint.tokenizer import carried_tokenizer, check_same_tokenizer, has_tokenizer, read_tokenizer

__all__ = [
    "Block",
    "Change",
    "Checkpoint",
    "CheckpointStore",
    "Entry",
    "Group",
    "carried_tokenizer",
    "check_resume",
    "check_same_tokenizer",
    "checkpoints_folder",
    "collect",
    "contents",
    "end_token_ids",
    "export_hf",
    "has_tokenizer",
    "import_hf",
    "inventory",
    "is_checkpoint",
    "load_model",
    "load_weights",
    "look",
    "open_checkpoint",
    "read_manifest",
    "read_meta",
    "read_tokenizer",
    "resolve",
    "restore",
    "surplus",
    "verify",
    "versions",
    "whole_tensors",
]
