"""Reading of published rows: one parser per kind of column, each with a value or a refusal that says why.

    spellings, numbers -> interconnects, chips, frameworks, batches, policies -> Reading(value, sure, reason, spread)

``row`` puts the readings of a row together.
"""

from published_runs.reader.batches import (
    micro_batches_assumed,
    read_accumulation,
    read_global_batch,
    read_micro_batch,
    read_sequence,
)
from published_runs.reader.chips import RunChip, read_chip
from published_runs.reader.frameworks import (
    OTHER,
    Framework,
    find_date,
    find_framework,
    is_async_tensor,
    is_compiled,
    is_fused,
    is_overlapping,
    read_attention,
)
from published_runs.reader.interconnects import Network, machine_network, read_network
from published_runs.reader.policies import Recomputation, read_eight_bit, read_recompute, read_zero
from published_runs.reader.reading import Reading, UnreadableError
from published_runs.reader.schedules import PipelineWords, read_schedule
from published_runs.reader.texts import is_unstated, lower, parse_count, parse_number

__all__ = [
    "OTHER",
    "Framework",
    "Network",
    "PipelineWords",
    "Reading",
    "Recomputation",
    "RunChip",
    "UnreadableError",
    "find_date",
    "find_framework",
    "is_async_tensor",
    "is_compiled",
    "is_fused",
    "is_overlapping",
    "is_unstated",
    "lower",
    "machine_network",
    "micro_batches_assumed",
    "parse_count",
    "parse_number",
    "read_accumulation",
    "read_attention",
    "read_chip",
    "read_eight_bit",
    "read_global_batch",
    "read_micro_batch",
    "read_network",
    "read_recompute",
    "read_schedule",
    "read_sequence",
    "read_zero",
]
