"""Checkpoints: complete and verified, or absent. Tensors have canonical names, so any parallel layout can load them."""

from hlat.checkpoint.average import average_checkpoints
from hlat.checkpoint.export import end_token_ids, export_hf, load_model
from hlat.checkpoint.import_model import import_hf, import_model
from hlat.checkpoint.initial_weights import find_weights, load_weights
from hlat.checkpoint.inventory import (
    CheckpointEntry,
    find_checkpoints_folder,
    group_tensors,
    is_checkpoint,
    list_checkpoints,
    open_unverified,
)
from hlat.checkpoint.model_source import ModelSource, open_model
from hlat.checkpoint.remote_inventory import RemotePrefix
from hlat.checkpoint.resume_check import (
    RecipeChange,
    check_resume,
    find_saved_recipe,
    read_saved_run,
    saved_determinism,
    saved_precision_mode,
    software_versions,
)
from hlat.checkpoint.state import ExtraState, collect, extra_names, restore
from hlat.checkpoint.tokenizer import check_same_tokenizer, has_tokenizer, read_tokenizer, tokenizer_files

__all__ = [
    "CheckpointEntry",
    "ExtraState",
    "ModelSource",
    "RecipeChange",
    "RemotePrefix",
    "average_checkpoints",
    "check_resume",
    "check_same_tokenizer",
    "collect",
    "end_token_ids",
    "export_hf",
    "extra_names",
    "find_checkpoints_folder",
    "find_saved_recipe",
    "find_weights",
    "group_tensors",
    "has_tokenizer",
    "import_hf",
    "import_model",
    "is_checkpoint",
    "list_checkpoints",
    "load_model",
    "load_weights",
    "open_model",
    "open_unverified",
    "read_saved_run",
    "read_tokenizer",
    "restore",
    "saved_determinism",
    "saved_precision_mode",
    "software_versions",
    "tokenizer_files",
]
