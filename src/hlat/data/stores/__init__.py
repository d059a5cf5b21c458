"""Local files and object stores: atomic writes, retries, downloads, and a size-limited cache of remote files."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.stores.atomic_files import (
        AtomicFileWriter,
        convert_disk_errors,
        is_disk_error,
        sync_folder,
        unwritable_folder_error,
        write_atomic,
    )
    from hlat.data.stores.cache import Cache
    from hlat.data.stores.content_record import ContentRecord
    from hlat.data.stores.fetching import CachedStore
    from hlat.data.stores.prefetch import prefetch_in_order
    from hlat.data.stores.remote import RemoteFile, Store, StoreAccessError, local_path, url_file_name
    from hlat.data.stores.retries import StoreUnavailableError

__getattr__ = lazily(
    __name__,
    {
        "atomic_files": (
            "AtomicFileWriter",
            "convert_disk_errors",
            "is_disk_error",
            "sync_folder",
            "unwritable_folder_error",
            "write_atomic",
        ),
        "cache": ("Cache",),
        "content_record": ("ContentRecord",),
        "fetching": ("CachedStore",),
        "prefetch": ("prefetch_in_order",),
        "remote": (
            "RemoteFile",
            "Store",
            "StoreAccessError",
            "local_path",
            "url_file_name",
        ),
        "retries": ("StoreUnavailableError",),
    },
)

__all__ = [
    "AtomicFileWriter",
    "Cache",
    "CachedStore",
    "ContentRecord",
    "RemoteFile",
    "Store",
    "StoreAccessError",
    "StoreUnavailableError",
    "convert_disk_errors",
    "is_disk_error",
    "local_path",
    "prefetch_in_order",
    "sync_folder",
    "unwritable_folder_error",
    "url_file_name",
    "write_atomic",
]
