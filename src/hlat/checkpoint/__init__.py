"""Checkpoints: whole and verified, or not there. Written under canonical names, so that they know no layout."""

from hlat.checkpoint.export import end_token_ids, export_hf, import_hf, load_model
from hlat.checkpoint.inventory import Entry, checkpoints_folder, contents, inventory, is_checkpoint, look
from hlat.checkpoint.remote_inventory import RemotePrefix
from hlat.checkpoint.resume_check import Change, check_resume, saved_mode, saved_run, versions
from hlat.checkpoint.state import collect, load_weights, restore
from hlat.checkpoint.tokenizer import carried_tokenizer, check_same_tokenizer, has_tokenizer, read_tokenizer

__all__ = [
    "Change",
    "Entry",
    "RemotePrefix",
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
    "read_tokenizer",
    "restore",
    "saved_mode",
    "saved_run",
    "versions",
]
