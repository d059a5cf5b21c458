"""Checkpoints: complete and verified, or absent. Tensors have canonical names, so any parallel layout can load them."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.checkpoint.async_saver import AsyncSaver as AsyncSaver
    from hlat.checkpoint.async_saver import SaveOutcome as SaveOutcome
    from hlat.checkpoint.async_saver import SaverReport as SaverReport
    from hlat.checkpoint.async_saver import SlowStorage as SlowStorage
    from hlat.checkpoint.async_saver import run_saver as run_saver
    from hlat.checkpoint.average import average_checkpoints as average_checkpoints
    from hlat.checkpoint.format.filesystem import Disk as Disk
    from hlat.checkpoint.format.tensor_files import TensorChunk as TensorChunk
    from hlat.checkpoint.format.tensor_files import replicated_chunks as replicated_chunks
    from hlat.checkpoint.importing.weights import import_hf as import_hf
    from hlat.checkpoint.importing.weights import import_model as import_model
    from hlat.checkpoint.inventory import CheckpointEntry as CheckpointEntry
    from hlat.checkpoint.inventory import RemotePrefix as RemotePrefix
    from hlat.checkpoint.inventory import find_checkpoints_folder as find_checkpoints_folder
    from hlat.checkpoint.inventory import group_tensors as group_tensors
    from hlat.checkpoint.inventory import is_checkpoint as is_checkpoint
    from hlat.checkpoint.inventory import list_checkpoints as list_checkpoints
    from hlat.checkpoint.inventory import open_unverified as open_unverified
    from hlat.checkpoint.protocol.commit import CheckpointContent as CheckpointContent
    from hlat.checkpoint.protocol.reader import Checkpoint as Checkpoint
    from hlat.checkpoint.protocol.reader import open_checkpoint as open_checkpoint
    from hlat.checkpoint.protocol.reader import read_manifest as read_manifest
    from hlat.checkpoint.protocol.reader import resolve as resolve
    from hlat.checkpoint.protocol.reader import step_folder_name as step_folder_name
    from hlat.checkpoint.protocol.reader import step_of_path as step_of_path
    from hlat.checkpoint.protocol.reader import verify_checkpoint as verify_checkpoint
    from hlat.checkpoint.protocol.store import BAD_SUFFIX as BAD_SUFFIX
    from hlat.checkpoint.protocol.store import CheckpointStore as CheckpointStore
    from hlat.checkpoint.protocol.store import FailedAttempt as FailedAttempt
    from hlat.checkpoint.protocol.store import SaveResult as SaveResult
    from hlat.checkpoint.protocol.store import prunable_steps as prunable_steps
    from hlat.checkpoint.protocol.store import save_with_retries as save_with_retries
    from hlat.checkpoint.run_id import RunId as RunId
    from hlat.checkpoint.saved_run import RecipeChange as RecipeChange
    from hlat.checkpoint.saved_run import check_resume as check_resume
    from hlat.checkpoint.saved_run import check_same_tokenizer as check_same_tokenizer
    from hlat.checkpoint.saved_run import find_saved_recipe as find_saved_recipe
    from hlat.checkpoint.saved_run import has_tokenizer as has_tokenizer
    from hlat.checkpoint.saved_run import read_saved_run as read_saved_run
    from hlat.checkpoint.saved_run import read_tokenizer as read_tokenizer
    from hlat.checkpoint.saved_run import saved_determinism as saved_determinism
    from hlat.checkpoint.saved_run import saved_precision_mode as saved_precision_mode
    from hlat.checkpoint.saved_run import software_versions as software_versions
    from hlat.checkpoint.saved_run import tokenizer_files as tokenizer_files
    from hlat.checkpoint.state import ExtraState as ExtraState
    from hlat.checkpoint.state import collect as collect
    from hlat.checkpoint.state import extra_names as extra_names
    from hlat.checkpoint.state import restore as restore
    from hlat.checkpoint.stored_model import ModelSource as ModelSource
    from hlat.checkpoint.stored_model import end_token_ids as end_token_ids
    from hlat.checkpoint.stored_model import export_hf as export_hf
    from hlat.checkpoint.stored_model import find_weights as find_weights
    from hlat.checkpoint.stored_model import load_model as load_model
    from hlat.checkpoint.stored_model import load_weights as load_weights
    from hlat.checkpoint.stored_model import open_model as open_model
    from hlat.checkpoint.tiers import SnapshotResult as SnapshotResult
    from hlat.checkpoint.tiers import TierEvent as TierEvent
    from hlat.checkpoint.tiers import Tiers as Tiers
    from hlat.checkpoint.tiers import TierSettings as TierSettings

__getattr__ = lazily(
    __name__,
    {
        "async_saver": "AsyncSaver SaveOutcome SaverReport SlowStorage run_saver",
        "average": "average_checkpoints",
        "format.filesystem": "Disk",
        "format.tensor_files": "TensorChunk replicated_chunks",
        "importing.weights": "import_hf import_model",
        "inventory": (
            "CheckpointEntry RemotePrefix find_checkpoints_folder group_tensors is_checkpoint "
            "list_checkpoints open_unverified"
        ),
        "protocol.commit": "CheckpointContent",
        "protocol.reader": (
            "Checkpoint open_checkpoint read_manifest resolve step_folder_name step_of_path verify_checkpoint"
        ),
        "protocol.store": "BAD_SUFFIX CheckpointStore FailedAttempt SaveResult prunable_steps save_with_retries",
        "run_id": "RunId",
        "saved_run": (
            "RecipeChange check_resume check_same_tokenizer find_saved_recipe has_tokenizer read_saved_run "
            "read_tokenizer saved_determinism saved_precision_mode software_versions tokenizer_files"
        ),
        "state": "ExtraState collect extra_names restore",
        "stored_model": "ModelSource end_token_ids export_hf find_weights load_model load_weights open_model",
        "tiers": "SnapshotResult TierEvent TierSettings Tiers",
    },
)
