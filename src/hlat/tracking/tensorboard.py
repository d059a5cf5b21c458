"""TensorBoard event files: the same numbers, as scalars that a browser can plot.

metrics -> train/loss, train/lr, train/seconds/data, ...   validation/loss, validation/bits_per_byte
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hlat.tracking.jsonl import storage_errors
from hlat.tracking.metrics import Metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_VALIDATION = {"val_loss": "validation/loss", "val_bits_per_byte": "validation/bits_per_byte"}
# The step is the axis; a checksum is not a quantity.
_NOT_PLOTTED = frozenset({"step", "batch_crc32"})


def scalars(metrics: Metrics) -> dict[str, float]:
    """Tag and value of everything in a line of metrics that can be plotted."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if key in _NOT_PLOTTED:
            continue
        tag = _VALIDATION.get(key, f"train/{key}")
        parts: dict[str, Any] = (
            {f"{tag}/{name}": part for name, part in value.items()} if isinstance(value, dict) else {}
        )
        for name, number in (parts or {tag: value}).items():
            if isinstance(number, int | float):
                found[name] = float(number)
    return found


class TensorBoard:
    """Writes scalars to event files in a folder.

    What an earlier part of the run wrote for steps after ``start_step`` is marked as superseded, so that TensorBoard
    shows each step once.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        self._folder = folder
        self._writer = _writer(folder, start_step)

    def rewind(self, step: int) -> None:
        """Mark what was written for steps after ``step`` as superseded."""
        self.close()
        self._writer = _writer(self._folder, step)

    def log(self, metrics: Metrics) -> None:
        """Add the scalars of one step."""
        with storage_errors(self._folder, "write TensorBoard events"):
            for tag, value in scalars(metrics).items():
                self._writer.add_scalar(tag, value, metrics["step"])

    def close(self) -> None:
        """Flush and close."""
        with storage_errors(self._folder, "write TensorBoard events"):
            self._writer.close()


def _writer(folder: Path, step: int) -> "SummaryWriter":
    """Writes a new file of events, which supersedes those of steps after ``step``."""
    # Importing it takes seconds, and a run may do without.
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

    with storage_errors(folder, "write TensorBoard events"):
        return SummaryWriter(str(folder), purge_step=step + 1)
