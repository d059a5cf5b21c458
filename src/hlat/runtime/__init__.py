"""The floor of the house: device, processes, randomness, errors. The only room that knows the backend.

What needs torch is imported when it is first asked for: ``hlat check`` and a refused recipe do without.
"""

from hlat.runtime.errors import (
    CheckpointError,
    CorruptionError,
    DataError,
    HardwareError,
    HlatError,
    LaunchError,
    NumericsError,
    PersistentCorruptionError,
    PlanError,
    StateLostError,
    StorageError,
)
from hlat.runtime.lazy import lazily
from hlat.runtime.rank_env import RankInfo, rank_info
from hlat.runtime.terminal_text import EscapingStream, escape_beneath_rich, escape_controls, escape_name
from hlat.runtime.urls import WEB_PROTOCOLS, find_secret, is_url, redact, redact_json, redact_value

__all__ = [
    "WEB_PROTOCOLS",
    "CheckpointError",
    "CorruptionError",
    "DataError",
    "EscapingStream",
    "HardwareError",
    "HlatError",
    "LaunchError",
    "NumericsError",
    "PersistentCorruptionError",
    "PlanError",
    "RankInfo",
    "StateLostError",
    "StorageError",
    "escape_beneath_rich",
    "escape_controls",
    "escape_name",
    "find_secret",
    "is_url",
    "lazily",
    "rank_info",
    "redact",
    "redact_json",
    "redact_value",
]
