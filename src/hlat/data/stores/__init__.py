"""Files on this machine and in object stores: atomic writes, retries, downloads, and a cache of bounded size."""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.data.stores.atomic_files import GrowingFile, is_refusal, storage_error, storing, sync_folder, write_whole
    from hlat.data.stores.cache import Cache
    from hlat.data.stores.fetching import Shelf
    from hlat.data.stores.prefetch import in_turn
    from hlat.data.stores.remote import Missing, RemoteFile, Store, local_path, name_of
    from hlat.data.stores.retries import Away

__getattr__ = lazily(
    __name__,
    {
        "atomic_files": (
            "GrowingFile",
            "is_refusal",
            "storage_error",
            "storing",
            "sync_folder",
            "write_whole",
        ),
        "cache": ("Cache",),
        "fetching": ("Shelf",),
        "prefetch": ("in_turn",),
        "remote": (
            "Missing",
            "RemoteFile",
            "Store",
            "local_path",
            "name_of",
        ),
        "retries": ("Away",),
    },
)

__all__ = [
    "Away",
    "Cache",
    "GrowingFile",
    "Missing",
    "RemoteFile",
    "Shelf",
    "Store",
    "in_turn",
    "is_refusal",
    "local_path",
    "name_of",
    "storage_error",
    "storing",
    "sync_folder",
    "write_whole",
]
