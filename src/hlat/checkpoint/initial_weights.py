"""The weights that a run starts from: those of a checkpoint, or of a Hugging Face model without converting it first.

checkpoint.init_from --find_weights, rank 0--> verified folder --load_weights, all ranks--> local parameters
"""

from collections.abc import Sequence
from pathlib import Path

from hlat.checkpoint.model_source import HFModel, fill_from_tensors, is_hf_folder
from hlat.checkpoint.protocol.manifest import MANIFEST_NAME, hash_file
from hlat.checkpoint.protocol.reader import open_on_all_ranks, resolve
from hlat.checkpoint.state import fill
from hlat.config import ModelConfig
from hlat.model import LocalParameter, canonical_shapes, check_canonical
from hlat.runtime.distributed.consistency import check_consistent
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError
from hlat.runtime.storage.hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, HubError, HubModel


def find_weights(path: str, config: ModelConfig) -> Path:
    """Find the folder of weights to start from, and check it, without loading them.

    Args:
        path: a checkpoint, a checkpoints folder or a run folder, which stand for the newest checkpoint; a Hugging Face
            folder; or the id of a model of the Hub, which is downloaded once.
        config: model of the run, which the weights of a Hugging Face folder have to fit.

    Returns:
        The checkpoint, or the Hugging Face folder.

    Raises:
        CheckpointError: there is no valid checkpoint; or the files of the Hugging Face folder are missing or damaged,
            or do not fit the model.
        RecipeError: hlat does not have the architecture of the Hugging Face folder.
    """
    folder = _local_folder(path)
    if not is_hf_folder(folder):
        return resolve(folder)
    _check_fits(HFModel(folder), config)
    return folder


def load_weights(
    path: str | Path,
    config: ModelConfig,
    parameters: Sequence[LocalParameter],
    ranks: HostGroup | None = None,
    expected: str | None = None,
) -> str:
    """Load weights into local parameters, converted to their dtype; bf16 to fp32 is exact. Collective.

    Args:
        path: as for ``find_weights``, which rank 0 calls.
        config: the full model.
        parameters: local parameters of this process; filled in place.
        ranks: processes that load together; None for this process alone.
        expected: identity of the weights that the run began with before; None if it did not.

    Returns:
        The identity of the weights: a hash of everything stored with them.

    Raises:
        CheckpointError: there are no valid weights, they do not fit the model, or they are not the expected ones.
        LaunchError: a rank sees other files in the Hugging Face folder than rank 0.
    """
    ranks = ranks or HostGroup()
    folder = ranks.run_on_rank0(lambda: find_weights(str(path), config))
    identity = ranks.run_on_rank0(lambda: _identify(folder, expected))
    if not ranks.run_on_rank0(lambda: is_hf_folder(folder)):
        checkpoint = open_on_all_ranks(folder, ranks)
        ranks.run_on_all(lambda: fill(checkpoint, config, parameters))
        return identity
    # Other hosts have a cache of their own; rank 0 has found the model, so theirs can be filled.
    folder = ranks.run_on_all(lambda: _local_folder(str(path)))
    model = ranks.run_on_all(lambda: HFModel(folder))
    check_consistent(ranks, {f"the Hugging Face model {path}": _sizes(folder)})
    ranks.run_on_all(lambda: _fill(model, config, parameters))
    return identity


def _identify(folder: Path, expected: str | None) -> str:
    try:
        identity = HFModel(folder).sha256() if is_hf_folder(folder) else hash_file(folder / MANIFEST_NAME)
    except OSError as error:
        raise CheckpointError(f"checkpoint.init_from {folder}: cannot be read: {error}") from error
    if expected not in (None, identity):
        raise CheckpointError(
            f"checkpoint.init_from {folder}: these are not the weights that this run began with. Restore them, or name "
            "that checkpoint itself if a newer one is found now; for a run with other weights, use another run.dir."
        )
    return identity


def _local_folder(path: str) -> Path:
    hub = HubModel.parse(path)
    if hub is None:
        return Path(path)
    try:
        return hub.snapshot((*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES))
    except HubError as error:
        raise CheckpointError(f"checkpoint.init_from {path}: {error}.") from error


def _fill(model: HFModel, config: ModelConfig, parameters: Sequence[LocalParameter]) -> None:
    _check_fits(model, config)
    for parameter in parameters:
        fill_from_tensors(parameter, model.tensors)


def _check_fits(model: HFModel, config: ModelConfig) -> None:
    found = {name: model.tensors.header(name) for name in model.tensors}
    check_canonical(canonical_shapes(config), found, f"the weights in {model.path}")


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes in bytes of the files that hold the model, by name: what every host has to see alike."""
    return {file.name: file.stat().st_size for file in sorted([folder / "config.json", *folder.glob("*.safetensors")])}
