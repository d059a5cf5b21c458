"""Checkpoints: whole and verified, or not there. Written under canonical names, so that they know no layout."""

from hlat.checkpoint.background import BackgroundSaver, Note, Settled
from hlat.checkpoint.blocks import Block, whole_tensors
from hlat.checkpoint.commit import Content
from hlat.checkpoint.disk import Disk
from hlat.checkpoint.export import end_token_ids, export_hf, import_hf, load_model
from hlat.checkpoint.identity import Change, check_resume, saved_mode, saved_run, versions
from hlat.checkpoint.inventory import (
    Entry,
    Group,
    checkpoints_folder,
    contents,
    inventory,
    is_checkpoint,
    look,
)
from hlat.checkpoint.manifest import read_manifest, step_in, verify
from hlat.checkpoint.owner import Owner
from hlat.checkpoint.reading import Checkpoint, open_checkpoint, read_meta, resolve
from hlat.checkpoint.remote_inventory import RemotePrefix
from hlat.checkpoint.saver import run_saver
from hlat.checkpoint.state import collect, load_weights, restore
from hlat.checkpoint.store import BAD_SUFFIX, CheckpointStore, surplus
from hlat.checkpoint.tiers import SnapshotResult, TierNote, Tiers, TierSettings
from hlat.checkpoint.tokenizer import carried_tokenizer, check_same_tokenizer, has_tokenizer, read_tokenizer
from hlat.checkpoint.tries import Refusal, SaveResult, save_in_tries

__all__ = [
    "BAD_SUFFIX",
    "BackgroundSaver",
    "Block",
    "Change",
    "Checkpoint",
    "CheckpointStore",
    "Content",
    "Disk",
    "Entry",
    "Group",
    "Note",
    "Owner",
    "Refusal",
    "RemotePrefix",
    "SaveResult",
    "Settled",
    "SnapshotResult",
    "TierNote",
    "TierSettings",
    "Tiers",
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
    "run_saver",
    "save_in_tries",
    "saved_mode",
    "saved_run",
    "step_in",
    "surplus",
    "verify",
    "versions",
    "whole_tensors",
]
