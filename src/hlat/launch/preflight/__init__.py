"""Preflight: hosts, devices, network and disk are examined before a run, and the bad host is named.

make_request (options, environment, recipe) --> run_preflight, on each host --> PreflightReport
hosts by name --examine_by_ssh: the same command on each--> PreflightReport
after an incident --check_before_restart, on one host--> findings
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.launch.preflight.examination import run_preflight
    from hlat.launch.preflight.host_memory import available_memory, memory_limit
    from hlat.launch.preflight.place import HostTools
    from hlat.launch.preflight.report import PreflightReport
    from hlat.launch.preflight.request import PreflightOptions, make_request
    from hlat.launch.preflight.restart_check import check_before_restart
    from hlat.launch.preflight.ssh_hosts import examine_by_ssh

__getattr__ = lazily(
    __name__,
    {
        "examination": ("run_preflight",),
        "host_memory": ("available_memory", "memory_limit"),
        "place": ("HostTools",),
        "report": ("PreflightReport",),
        "request": ("PreflightOptions", "make_request"),
        "restart_check": ("check_before_restart",),
        "ssh_hosts": ("examine_by_ssh",),
    },
)

__all__ = [
    "HostTools",
    "PreflightOptions",
    "PreflightReport",
    "available_memory",
    "check_before_restart",
    "examine_by_ssh",
    "make_request",
    "memory_limit",
    "run_preflight",
]
