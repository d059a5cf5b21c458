"""The floor of the house: device, processes, randomness, errors. The only room that knows the backend.

What needs torch is imported when it is first asked for: ``hlat check`` and a refused recipe do without.
"""

from typing import TYPE_CHECKING

from hlat.runtime import slurm
from hlat.runtime.clock import machine_clock
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
from hlat.runtime.file_systems import connect, protocol_of, refusal, refuse_unusable
from hlat.runtime.keys import stream_key
from hlat.runtime.lazy import lazily
from hlat.runtime.others import LAUNCHER, is_running, is_stopped, session_lives
from hlat.runtime.phase import PHASES, current_phase, enter_phase, observed_phases
from hlat.runtime.place import Place, place
from hlat.runtime.run_folder import (
    GONE_ON,
    ID_NAME,
    LOCK_NAME,
    EarlierAttempt,
    RunFolder,
    enter_run_folder,
    held_run_folder,
    run_number,
)
from hlat.runtime.secret import RUN_SECRET
from hlat.runtime.sendable import SENDABLE, sendable
from hlat.runtime.small_files import read_small
from hlat.runtime.stopping import DEADLINE, INTERRUPTED, REQUEUE, STOP_CODES, STOPPING, stop_code
from hlat.runtime.store_faults import Fault, Kind, Transient, fault_of
from hlat.runtime.torch_private import TESTED as TESTED_TORCH
from hlat.runtime.torch_private import untested_torch
from hlat.runtime.urls import (
    WEB,
    is_url,
    secret_in,
    tree_without_secrets,
    value_without_secrets,
    without_secrets,
)
from hlat.runtime.visible import Shown, show_beneath_rich, visible, visible_name

if TYPE_CHECKING:
    from hlat.runtime.beside import Beside, Line, start_beside
    from hlat.runtime.device import (
        compute_capability,
        describe,
        has_fast_bf16,
        peak_memory_bytes,
        pin,
        synchronize,
        unpin,
    )
    from hlat.runtime.disk import sync_to_disk
    from hlat.runtime.identity import check_same, code_identity
    from hlat.runtime.meeting import Meeting
    from hlat.runtime.once import Once
    from hlat.runtime.pretence import host_values, is_pretended, pretended
    from hlat.runtime.processes import Runtime, abandon, finish, join_beside, joined, start
    from hlat.runtime.random import normal_block, normal_range, philox
    from hlat.runtime.ranklog import log_path, rank_log
    from hlat.runtime.ranks import Ranks
    from hlat.runtime.rng import rng_state, seed_generators, set_rng_state
    from hlat.runtime.vote import Vote
    from hlat.runtime.waiting import audibly

_WITH_TORCH = {
    "beside": ("Beside", "Line", "start_beside"),
    "device": (
        "compute_capability",
        "describe",
        "has_fast_bf16",
        "peak_memory_bytes",
        "pin",
        "synchronize",
        "unpin",
    ),
    "disk": ("sync_to_disk",),
    "meeting": ("Meeting",),
    "once": ("Once",),
    "identity": ("check_same", "code_identity"),
    "processes": ("Runtime", "abandon", "finish", "join_beside", "joined", "start"),
    "pretence": ("host_values", "is_pretended", "pretended"),
    "random": ("normal_block", "normal_range", "philox"),
    "ranklog": ("log_path", "rank_log"),
    "ranks": ("Ranks",),
    "rng": ("rng_state", "seed_generators", "set_rng_state"),
    "vote": ("Vote",),
    "waiting": ("audibly",),
}

__getattr__ = lazily(__name__, _WITH_TORCH)


__all__ = [
    "DEADLINE",
    "GONE_ON",
    "ID_NAME",
    "INTERRUPTED",
    "LAUNCHER",
    "LOCK_NAME",
    "PHASES",
    "REQUEUE",
    "RUN_SECRET",
    "SENDABLE",
    "STOPPING",
    "STOP_CODES",
    "TESTED_TORCH",
    "WEB",
    "Beside",
    "CheckpointError",
    "CorruptionError",
    "DataError",
    "EarlierAttempt",
    "Fault",
    "HardwareError",
    "HlatError",
    "Kind",
    "LaunchError",
    "Line",
    "LostError",
    "Meeting",
    "NumericsError",
    "Once",
    "PersistentCorruptionError",
    "Place",
    "PlanError",
    "Ranks",
    "RunFolder",
    "Runtime",
    "Shown",
    "StorageError",
    "Transient",
    "Vote",
    "abandon",
    "audibly",
    "check_same",
    "code_identity",
    "compute_capability",
    "connect",
    "current_phase",
    "describe",
    "enter_phase",
    "enter_run_folder",
    "fault_of",
    "finish",
    "has_fast_bf16",
    "held_run_folder",
    "host_values",
    "is_pretended",
    "is_running",
    "is_stopped",
    "is_url",
    "join_beside",
    "joined",
    "lazily",
    "log_path",
    "machine_clock",
    "normal_block",
    "normal_range",
    "observed_phases",
    "peak_memory_bytes",
    "philox",
    "pin",
    "place",
    "pretended",
    "protocol_of",
    "rank_log",
    "read_small",
    "refusal",
    "refuse_unusable",
    "rng_state",
    "run_number",
    "secret_in",
    "seed_generators",
    "sendable",
    "session_lives",
    "set_rng_state",
    "show_beneath_rich",
    "slurm",
    "start",
    "start_beside",
    "stop_code",
    "stream_key",
    "sync_to_disk",
    "synchronize",
    "tree_without_secrets",
    "unpin",
    "untested_torch",
    "value_without_secrets",
    "visible",
    "visible_name",
    "without_secrets",
]
