"""Files and object stores: durable writes, URLs opened through fsspec, and one-line descriptions of storage errors."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.storage.file_content import HEAD_BYTES, broken_link, recognize, recognize_file
    from hlat.runtime.storage.fsspec_backends import (
        check_url,
        explain_failure,
        open_filesystem,
        protocol_of,
        why_not_writable,
    )
    from hlat.runtime.storage.fsync import sync_to_disk
    from hlat.runtime.storage.hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, HubError, HubModel
    from hlat.runtime.storage.once import OnceMarkers
    from hlat.runtime.storage.run_folder import (
        ATTEMPT_ENV,
        ATTEMPTS_NAME,
        EARLIER_ATTEMPT_ENV,
        ID_NAME,
        LOCK_NAME,
        RECIPE_HEAD,
        RECIPE_NAME,
        EarlierAttempt,
        RunFolder,
        hold_run_folder,
        is_foreign_recipe,
        open_run_folder,
        read_run_id,
    )
    from hlat.runtime.storage.small_files import read_small_file
    from hlat.runtime.storage.storage_errors import FailureKind, StorageFailure, TransientError, classify_error

__getattr__ = lazily(
    __name__,
    {
        "file_content": ("HEAD_BYTES", "broken_link", "recognize", "recognize_file"),
        "fsspec_backends": (
            "open_filesystem",
            "protocol_of",
            "explain_failure",
            "check_url",
            "why_not_writable",
        ),
        "fsync": ("sync_to_disk",),
        "hub": ("CONFIG_FILES", "TOKENIZER_FILES", "WEIGHT_FILES", "HubError", "HubModel"),
        "once": ("OnceMarkers",),
        "run_folder": (
            "EarlierAttempt",
            "ATTEMPT_ENV",
            "EARLIER_ATTEMPT_ENV",
            "ID_NAME",
            "ATTEMPTS_NAME",
            "LOCK_NAME",
            "RECIPE_HEAD",
            "RECIPE_NAME",
            "RunFolder",
            "open_run_folder",
            "hold_run_folder",
            "is_foreign_recipe",
            "read_run_id",
        ),
        "small_files": ("read_small_file",),
        "storage_errors": (
            "StorageFailure",
            "FailureKind",
            "TransientError",
            "classify_error",
        ),
    },
)

__all__ = [
    "ATTEMPTS_NAME",
    "ATTEMPT_ENV",
    "CONFIG_FILES",
    "EARLIER_ATTEMPT_ENV",
    "HEAD_BYTES",
    "ID_NAME",
    "LOCK_NAME",
    "RECIPE_HEAD",
    "RECIPE_NAME",
    "TOKENIZER_FILES",
    "WEIGHT_FILES",
    "EarlierAttempt",
    "FailureKind",
    "HubError",
    "HubModel",
    "OnceMarkers",
    "RunFolder",
    "StorageFailure",
    "TransientError",
    "broken_link",
    "check_url",
    "classify_error",
    "explain_failure",
    "hold_run_folder",
    "is_foreign_recipe",
    "open_filesystem",
    "open_run_folder",
    "protocol_of",
    "read_run_id",
    "read_small_file",
    "recognize",
    "recognize_file",
    "sync_to_disk",
    "why_not_writable",
]
