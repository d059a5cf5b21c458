"""Instruments of published memory readings: what a number on a page measures, and when it cannot be compared.

    "torch peak reserved as torchtitan prints it" -> reserved;  "GB as published", KempnerForge -> its log: allocated
    "GB as published", a framework whose log is not known -> not comparable, with the reason

Allocated (``max_memory_allocated``): bytes of tensors, rounded. Reserved (``max_memory_reserved``): what the caching
allocator took from the driver. Device (``nvidia-smi``): that, and the CUDA context, code and NCCL's buffers. Computed:
a formula of the source. No rule names a source or a row.
"""

import re
from dataclasses import dataclass
from typing import Literal

from published_runs.reader import find_framework, lower
from published_runs.row import CsvRow

Instrument = Literal["allocated", "reserved", "device", "computed"]

_OFFLOADS = r"off-?load\w*|parked|pinned to (?:the )?(?:host|cpu)"
_PREALLOCATES = r"preallocat\w*|xla_python_client\w*|mem(?:ory)?[_ ]fraction"
_WORDS: tuple[tuple[str, Instrument], ...] = (
    (r"analytic\w*|formula|estimat\w*|calculat\w*|theoretical", "computed"),
    (r"reserved|cached", "reserved"),
    (r"allocated|torch peak active|active", "allocated"),
    (r"\S*-smi\b|smi\b|used ?/ ?total|nvml|dcgm|gpu memory used|physical", "device"),
    (r"as torchtitan prints", "reserved"),
)
_LOGS: tuple[tuple[str, Instrument], ...] = (
    # torchtitan, components/metrics.py, get_peak_stats: the memory column is reserved_bytes.all.peak.
    (r"torchtitan", "reserved"),
    # KempnerForge, metrics/tracker.py: "mem" is peak_gb, torch.cuda.max_memory_allocated over 1024^3.
    (r"kempnerforge", "allocated"),
    # nanotron, logging/base.py, log_memory: allocated and reserved peaks; its tables have the second.
    (r"nanotron", "reserved"),
    # PaddleNLP, page of pre-training performance: "max_memory_allocated".
    (r"paddlenlp", "allocated"),
)


@dataclass(frozen=True)
class MemoryReading:
    """Kind of a published reading.

    Attributes:
        instrument: None if it cannot be compared. A share of a device's memory ("used / total") is read as what the
            device holds.
        reason: why it cannot be compared, or how the instrument was found out.
    """

    instrument: Instrument | None
    reason: str = ""


def read_instrument(kind: str, row: CsvRow) -> MemoryReading:
    """Find the instrument of a row's memory.

    Args:
        kind: the source's words for it (column ``mem_kind``).
        row: the row, for its framework and notes.
    """
    words, framework = lower(kind), lower(row.get("framework"))
    if re.search(_OFFLOADS, f"{words} {framework}"):
        return MemoryReading(None, "state or activations are moved to the host; what is moved is not stated")
    if re.search(_PREALLOCATES, words):
        return MemoryReading(None, "an allocator that takes a share of the device in advance")
    for pattern, instrument in _WORDS:
        if re.search(pattern, words):
            return MemoryReading(instrument, f"the source says: {kind}")
    if find_framework(framework).xla or re.search(r"jax|alpa|xla", framework):
        return MemoryReading(None, "XLA plans all buffers of a program; what the source read is not stated")
    for pattern, instrument in _LOGS:
        if re.search(pattern, framework):
            return MemoryReading(instrument, f"the log of {framework}")
    return MemoryReading(None, "the instrument is not stated")
