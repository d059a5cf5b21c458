"""The file formats of checkpoints, in one table: the only place that knows which versions there are.

    newest version --newest_format--> CheckpointFormat (``base.py``) that writes
    version in a manifest --format_numbered--> CheckpointFormat that reads it | CheckpointFormatError

    ``format_1.py`` --> ``index.py``, which ``pickled.py`` reads without unpickling: name -> shape, dtype, chunks
                    --> ``tensor_files.py``: chunks of tensors to files, and regions of tensors back
    all of them     --> ``filesystem.py``

To add version N, write ``format_N.py`` with a ``CheckpointFormat``, and add its line to ``FORMATS``. From then on
checkpoints are written in version N; those of all other versions in the table stay readable, and runs resume from them.
"""

from typing import Any

from hlat.checkpoint.format.base import CheckpointFormat
from hlat.checkpoint.format.format_1 import Format1
from hlat.runtime.errors import CheckpointError, CheckpointFormatError

FORMATS: dict[int, CheckpointFormat] = {  # by version
    1: Format1(),
}


def newest_format() -> CheckpointFormat:
    """Return the newest format, in which checkpoints are written."""
    return FORMATS[max(FORMATS)]


def format_numbered(version: Any) -> CheckpointFormat:
    """Format of a version in a manifest; CheckpointFormatError if newer than all, CheckpointError if unknown."""
    newest = newest_format().version
    # The type first: True and 1.0 are equal to 1.
    if type(version) is int and version in FORMATS:
        return FORMATS[version]
    if type(version) is int and version > newest:
        raise CheckpointFormatError(
            f"its format {version} is newer than format {newest}, the newest that this version of hlat reads. The "
            "checkpoint is left as it is. Use the version of hlat that wrote it (versions.hlat in its meta.json), or a "
            "later one; or export the model with that one, and import it with this one."
        )
    known = ", ".join(map(str, sorted(FORMATS)))
    raise CheckpointError(f"manifest.json: format {version!r} does not exist; this version of hlat reads {known}")
