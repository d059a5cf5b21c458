"""Checkpoints: complete and verified, or absent. Tensors have canonical names, so any parallel layout can load them."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.checkpoint.async_saver import *
    from hlat.checkpoint.average import *
    from hlat.checkpoint.fork import *
    from hlat.checkpoint.format.filesystem import *
    from hlat.checkpoint.format.tensor_files import *
    from hlat.checkpoint.importing.weights import *
    from hlat.checkpoint.inventory import *
    from hlat.checkpoint.protocol.commit import *
    from hlat.checkpoint.protocol.reader import *
    from hlat.checkpoint.protocol.store import *
    from hlat.checkpoint.run_id import *
    from hlat.checkpoint.saved_run import *
    from hlat.checkpoint.state import *
    from hlat.checkpoint.stored_model import *
    from hlat.checkpoint.tiers import *

__getattr__ = lazily(
    __name__,
    {
        "async_saver": "AsyncSaver SaveOutcome SaverReport SlowStorage run_saver",
        "average": "average_checkpoints",
        "fork": "Fork fork_run",
        "format.filesystem": "Disk",
        "format.tensor_files": "TensorChunk replicated_chunks",
        "importing.weights": "import_model",
        "inventory": (
            "CheckpointEntry RemotePrefix committed_checkpoints find_checkpoints_folder group_tensors "
            "is_checkpoint list_checkpoints open_unverified"
        ),
        "protocol.commit": "CheckpointContent",
        "protocol.reader": (
            "Checkpoint open_checkpoint read_manifest resolve step_folder_name step_of_path verify_checkpoint"
        ),
        "protocol.store": "BAD_SUFFIX CheckpointStore FailedAttempt SaveResult prunable_steps save_with_retries",
        "run_id": "RunId",
        "saved_run": (
            "RecipeChange check_fork check_resume check_same_tokenizer find_saved_recipe has_tokenizer read_saved_run "
            "read_tokenizer saved_determinism saved_precision_mode software_versions tokenizer_files"
        ),
        "state": "ExtraState collect extra_names restore",
        "stored_model": "ModelSource end_token_ids export_hf find_weights load_model load_weights open_model",
        "tiers": "SnapshotResult TierEvent TierSettings Tiers",
    },
)
