"""Lowest layer of hlat: errors, rank environment, terminal text, URLs; its wings hold the backend and distributed code.

This is the only room that knows the backend. Modules that need torch are imported when a name of theirs is first
used: ``hlat check`` and a rejected recipe run without torch.
"""

from hlat.runtime.bottom_line import BottomLine, draws_lines, erase_line, erase_rest_of, open_line
from hlat.runtime.errors import (
    CheckpointError,
    CheckpointFormatError,
    CorruptionError,
    DataError,
    DeviceMemoryError,
    HardwareError,
    HlatError,
    LaunchError,
    MissingHostsError,
    NumericsError,
    PersistentCorruptionError,
    PlanError,
    StateLostError,
    StorageError,
    error_class,
)
from hlat.runtime.hub_ids import dataset_id_advice
from hlat.runtime.lazy import lazily
from hlat.runtime.rank_env import RankInfo, host_name, rank_info
from hlat.runtime.stage_line import StageLine, spinner, writes_unicode
from hlat.runtime.terminal_text import (
    EscapingStream,
    escape_controls,
    escape_name,
    line_problems,
    plural,
)
from hlat.runtime.urls import WEB_PROTOCOLS, find_secret, is_url, redact, redact_json, redact_value

__all__ = [
    "WEB_PROTOCOLS",
    "BottomLine",
    "CheckpointError",
    "CheckpointFormatError",
    "CorruptionError",
    "DataError",
    "DeviceMemoryError",
    "EscapingStream",
    "HardwareError",
    "HlatError",
    "LaunchError",
    "MissingHostsError",
    "NumericsError",
    "PersistentCorruptionError",
    "PlanError",
    "RankInfo",
    "StageLine",
    "StateLostError",
    "StorageError",
    "dataset_id_advice",
    "draws_lines",
    "erase_line",
    "erase_rest_of",
    "error_class",
    "escape_controls",
    "escape_name",
    "find_secret",
    "host_name",
    "is_url",
    "lazily",
    "line_problems",
    "open_line",
    "plural",
    "rank_info",
    "redact",
    "redact_json",
    "redact_value",
    "spinner",
    "writes_unicode",
]
