"""Checkpoints: complete and verified, or absent. Tensors have canonical names, so any parallel layout can load them."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.checkpoint.average import average_checkpoints as average_checkpoints
    from hlat.checkpoint.background.async_saver import AsyncSaver as AsyncSaver
    from hlat.checkpoint.background.async_saver import SaveOutcome as SaveOutcome
    from hlat.checkpoint.background.async_saver import SaverReport as SaverReport
    from hlat.checkpoint.background.async_saver import SlowStorage as SlowStorage
    from hlat.checkpoint.background.saver_process import run_saver as run_saver
    from hlat.checkpoint.export import end_token_ids as end_token_ids
    from hlat.checkpoint.export import export_hf as export_hf
    from hlat.checkpoint.export import load_model as load_model
    from hlat.checkpoint.format.filesystem import Disk as Disk
    from hlat.checkpoint.format.tensor_chunks import TensorChunk as TensorChunk
    from hlat.checkpoint.format.tensor_chunks import replicated_chunks as replicated_chunks
    from hlat.checkpoint.import_model import import_hf as import_hf
    from hlat.checkpoint.import_model import import_model as import_model
    from hlat.checkpoint.initial_weights import find_weights as find_weights
    from hlat.checkpoint.initial_weights import load_weights as load_weights
    from hlat.checkpoint.inventory import CheckpointEntry as CheckpointEntry
    from hlat.checkpoint.inventory import find_checkpoints_folder as find_checkpoints_folder
    from hlat.checkpoint.inventory import group_tensors as group_tensors
    from hlat.checkpoint.inventory import is_checkpoint as is_checkpoint
    from hlat.checkpoint.inventory import list_checkpoints as list_checkpoints
    from hlat.checkpoint.inventory import open_unverified as open_unverified
    from hlat.checkpoint.model_source import ModelSource as ModelSource
    from hlat.checkpoint.model_source import open_model as open_model
    from hlat.checkpoint.protocol.commit import CheckpointContent as CheckpointContent
    from hlat.checkpoint.protocol.manifest import read_manifest as read_manifest
    from hlat.checkpoint.protocol.manifest import step_folder_name as step_folder_name
    from hlat.checkpoint.protocol.manifest import step_of_path as step_of_path
    from hlat.checkpoint.protocol.manifest import verify_checkpoint as verify_checkpoint
    from hlat.checkpoint.protocol.reader import Checkpoint as Checkpoint
    from hlat.checkpoint.protocol.reader import open_checkpoint as open_checkpoint
    from hlat.checkpoint.protocol.reader import resolve as resolve
    from hlat.checkpoint.protocol.retry import FailedAttempt as FailedAttempt
    from hlat.checkpoint.protocol.retry import SaveResult as SaveResult
    from hlat.checkpoint.protocol.retry import save_with_retries as save_with_retries
    from hlat.checkpoint.protocol.store import BAD_SUFFIX as BAD_SUFFIX
    from hlat.checkpoint.protocol.store import CheckpointStore as CheckpointStore
    from hlat.checkpoint.protocol.store import prunable_steps as prunable_steps
    from hlat.checkpoint.remote_inventory import RemotePrefix as RemotePrefix
    from hlat.checkpoint.resume_check import RecipeChange as RecipeChange
    from hlat.checkpoint.resume_check import check_resume as check_resume
    from hlat.checkpoint.resume_check import find_saved_recipe as find_saved_recipe
    from hlat.checkpoint.resume_check import read_saved_run as read_saved_run
    from hlat.checkpoint.resume_check import saved_determinism as saved_determinism
    from hlat.checkpoint.resume_check import saved_precision_mode as saved_precision_mode
    from hlat.checkpoint.resume_check import software_versions as software_versions
    from hlat.checkpoint.state import ExtraState as ExtraState
    from hlat.checkpoint.state import collect as collect
    from hlat.checkpoint.state import extra_names as extra_names
    from hlat.checkpoint.state import restore as restore
    from hlat.checkpoint.tiers.run_id import RunId as RunId
    from hlat.checkpoint.tiers.run_tiers import SnapshotResult as SnapshotResult
    from hlat.checkpoint.tiers.run_tiers import TierEvent as TierEvent
    from hlat.checkpoint.tiers.run_tiers import Tiers as Tiers
    from hlat.checkpoint.tiers.run_tiers import TierSettings as TierSettings
    from hlat.checkpoint.tokenizer import check_same_tokenizer as check_same_tokenizer
    from hlat.checkpoint.tokenizer import has_tokenizer as has_tokenizer
    from hlat.checkpoint.tokenizer import read_tokenizer as read_tokenizer
    from hlat.checkpoint.tokenizer import tokenizer_files as tokenizer_files

__getattr__ = lazily(
    __name__,
    {
        "average": "average_checkpoints",
        "background.async_saver": "AsyncSaver SaveOutcome SaverReport SlowStorage",
        "background.saver_process": "run_saver",
        "export": "end_token_ids export_hf load_model",
        "format.filesystem": "Disk",
        "format.tensor_chunks": "TensorChunk replicated_chunks",
        "import_model": "import_hf import_model",
        "initial_weights": "find_weights load_weights",
        "inventory": (
            "CheckpointEntry find_checkpoints_folder group_tensors is_checkpoint list_checkpoints open_unverified"
        ),
        "model_source": "ModelSource open_model",
        "protocol.commit": "CheckpointContent",
        "protocol.manifest": "read_manifest step_folder_name step_of_path verify_checkpoint",
        "protocol.reader": "Checkpoint open_checkpoint resolve",
        "protocol.retry": "FailedAttempt SaveResult save_with_retries",
        "protocol.store": "BAD_SUFFIX CheckpointStore prunable_steps",
        "remote_inventory": "RemotePrefix",
        "resume_check": (
            "RecipeChange check_resume find_saved_recipe read_saved_run saved_determinism "
            "saved_precision_mode software_versions"
        ),
        "state": "ExtraState collect extra_names restore",
        "tiers.run_id": "RunId",
        "tiers.run_tiers": "SnapshotResult TierEvent TierSettings Tiers",
        "tokenizer": "check_same_tokenizer has_tokenizer read_tokenizer tokenizer_files",
    },
)
