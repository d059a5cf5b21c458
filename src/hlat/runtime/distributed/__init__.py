"""Processes of a run: how they find each other, join, and exchange values on the CPU."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.distributed.async_max import Vote
    from hlat.runtime.distributed.consistency import check_same, code_identity
    from hlat.runtime.distributed.fake_world import host_values, is_pretended, pretended
    from hlat.runtime.distributed.helper_process import Beside, Line, start_beside
    from hlat.runtime.distributed.host_collectives import Ranks
    from hlat.runtime.distributed.join import Runtime, join_beside, joined, start
    from hlat.runtime.distributed.rendezvous import Meeting
    from hlat.runtime.distributed.run_secret import RUN_SECRET
    from hlat.runtime.distributed.sendable_types import sendable
    from hlat.runtime.distributed.waiting import audibly

__getattr__ = lazily(
    __name__,
    {
        "async_max": ("Vote",),
        "consistency": (
            "check_same",
            "code_identity",
        ),
        "fake_world": (
            "host_values",
            "is_pretended",
            "pretended",
        ),
        "helper_process": (
            "Beside",
            "Line",
            "start_beside",
        ),
        "host_collectives": ("Ranks",),
        "join": (
            "Runtime",
            "join_beside",
            "joined",
            "start",
        ),
        "rendezvous": ("Meeting",),
        "run_secret": ("RUN_SECRET",),
        "sendable_types": ("sendable",),
        "waiting": ("audibly",),
    },
)

__all__ = [
    "RUN_SECRET",
    "Beside",
    "Line",
    "Meeting",
    "Ranks",
    "Runtime",
    "Vote",
    "audibly",
    "check_same",
    "code_identity",
    "host_values",
    "is_pretended",
    "join_beside",
    "joined",
    "pretended",
    "sendable",
    "start",
    "start_beside",
]
