"""The formats that ``hlat import`` reads: Hugging Face folders, NeuronX Distributed shards, torchtitan checkpoints.

    folder --find_format--> SourceFormat --open--> SourceModel --import_model--> checkpoint of weights

To add one: a file with a ``SourceFormat`` (see ``base.py``), and its line in ``SOURCE_FORMATS``.
"""

from pathlib import Path

from hlat.checkpoint.importing.base import SourceFormat
from hlat.checkpoint.importing.hugging_face import HuggingFaceFolder
from hlat.checkpoint.importing.nxd import NxdShards
from hlat.checkpoint.importing.torchtitan import TorchtitanCheckpoint
from hlat.runtime.errors import CheckpointError

SOURCE_FORMATS: tuple[SourceFormat, ...] = (HuggingFaceFolder(), NxdShards(), TorchtitanCheckpoint())


def find_format(folder: Path) -> SourceFormat:
    """Return the first format that recognises a folder; CheckpointError if none does."""
    for source in SOURCE_FORMATS:
        if folder.is_dir() and source.recognises(folder):
            return source
    reason = "nothing in it is recognised as a model" if folder.is_dir() else "no such folder"
    known = "; ".join(f"{source.name} ({source.signs})" for source in SOURCE_FORMATS)
    raise CheckpointError(f"{folder}: {reason}. hlat imports {known}.")
