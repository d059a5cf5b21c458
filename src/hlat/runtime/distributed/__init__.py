"""Distributed runtime: rendezvous of the processes of a run, process groups, and exchange of values on the CPU."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.runtime.distributed.addresses import (
        address_of,
        interface_of,
        is_loopback,
        listen,
        own_addresses,
        resolve_addresses,
    )
    from hlat.runtime.distributed.async_max import AsyncMax
    from hlat.runtime.distributed.consistency import check_consistent, code_identity
    from hlat.runtime.distributed.fake_world import fake_rank, host_values, in_fake_world
    from hlat.runtime.distributed.helper_process import Channel, HelperProcess, start_helper
    from hlat.runtime.distributed.host_collectives import HostGroup
    from hlat.runtime.distributed.join import Runtime, device_group, join_helpers, join_run, joined_run
    from hlat.runtime.distributed.rendezvous import Rendezvous
    from hlat.runtime.distributed.run_secret import RUN_SECRET_ENV
    from hlat.runtime.distributed.sendable_types import sendable
    from hlat.runtime.distributed.waiting import call_interruptibly

__getattr__ = lazily(
    __name__,
    {
        "addresses": ("address_of", "interface_of", "is_loopback", "listen", "own_addresses", "resolve_addresses"),
        "async_max": ("AsyncMax",),
        "consistency": (
            "check_consistent",
            "code_identity",
        ),
        "fake_world": (
            "host_values",
            "in_fake_world",
            "fake_rank",
        ),
        "helper_process": (
            "HelperProcess",
            "Channel",
            "start_helper",
        ),
        "host_collectives": ("HostGroup",),
        "join": (
            "Runtime",
            "device_group",
            "join_helpers",
            "joined_run",
            "join_run",
        ),
        "rendezvous": ("Rendezvous",),
        "run_secret": ("RUN_SECRET_ENV",),
        "sendable_types": ("sendable",),
        "waiting": ("call_interruptibly",),
    },
)

__all__ = [
    "RUN_SECRET_ENV",
    "AsyncMax",
    "Channel",
    "HelperProcess",
    "HostGroup",
    "Rendezvous",
    "Runtime",
    "address_of",
    "call_interruptibly",
    "check_consistent",
    "code_identity",
    "device_group",
    "fake_rank",
    "host_values",
    "in_fake_world",
    "interface_of",
    "is_loopback",
    "join_helpers",
    "join_run",
    "joined_run",
    "listen",
    "own_addresses",
    "resolve_addresses",
    "sendable",
    "start_helper",
]
