"""Files and object stores: durable writes, URLs opened through fsspec, and errors of storage backends in one line."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.storage.fsspec_backends import connect, protocol_of, refusal, refuse_unusable
    from hlat.runtime.storage.fsync import sync_to_disk
    from hlat.runtime.storage.once import Once
    from hlat.runtime.storage.run_folder import (
        GONE_ON,
        ID_NAME,
        LOCK_NAME,
        EarlierAttempt,
        RunFolder,
        enter_run_folder,
        held_run_folder,
        run_number,
    )
    from hlat.runtime.storage.small_files import read_small
    from hlat.runtime.storage.storage_errors import Fault, Kind, Transient, fault_of

__getattr__ = lazily(
    __name__,
    {
        "fsspec_backends": (
            "connect",
            "protocol_of",
            "refusal",
            "refuse_unusable",
        ),
        "fsync": ("sync_to_disk",),
        "once": ("Once",),
        "run_folder": (
            "EarlierAttempt",
            "GONE_ON",
            "ID_NAME",
            "LOCK_NAME",
            "RunFolder",
            "enter_run_folder",
            "held_run_folder",
            "run_number",
        ),
        "small_files": ("read_small",),
        "storage_errors": (
            "Fault",
            "Kind",
            "Transient",
            "fault_of",
        ),
    },
)

__all__ = [
    "GONE_ON",
    "ID_NAME",
    "LOCK_NAME",
    "EarlierAttempt",
    "Fault",
    "Kind",
    "Once",
    "RunFolder",
    "Transient",
    "connect",
    "enter_run_folder",
    "fault_of",
    "held_run_folder",
    "protocol_of",
    "read_small",
    "refusal",
    "refuse_unusable",
    "run_number",
    "sync_to_disk",
]
