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
    LostError,
    NumericsError,
    PersistentCorruptionError,
    PlanError,
    StorageError,
)
from hlat.runtime.lazy import lazily
from hlat.runtime.rank_env import Place, place
from hlat.runtime.terminal_text import Shown, show_beneath_rich, visible, visible_name
from hlat.runtime.urls import WEB, is_url, secret_in, tree_without_secrets, value_without_secrets, without_secrets

__all__ = [
    "WEB",
    "CheckpointError",
    "CorruptionError",
    "DataError",
    "HardwareError",
    "HlatError",
    "LaunchError",
    "LostError",
    "NumericsError",
    "PersistentCorruptionError",
    "Place",
    "PlanError",
    "Shown",
    "StorageError",
    "is_url",
    "lazily",
    "place",
    "secret_in",
    "show_beneath_rich",
    "tree_without_secrets",
    "value_without_secrets",
    "visible",
    "visible_name",
    "without_secrets",
]
