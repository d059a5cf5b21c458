"""Supervisors on several hosts: one per host, of which one leads; they restart a run together."""

from hlat.launch.hosts.agent import HostPlace
from hlat.launch.hosts.host_supervisor import HostRun, supervise_host

__all__ = ["HostPlace", "HostRun", "supervise_host"]
