"""Simulated hosts on one machine: network namespaces with an address, a host name and mounts of their own.

with net_hosts(folder, 2) as hosts:
    subprocess.run([str(hosts.transport), "h1", "hostname"])      # as ssh does
    hosts.setup("h1", "ulimit -n 100")                            # shell commands before each command on that host
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAMS = ("ip", "unshare", "bash", "hostname")
_TRANSPORT = """#!/bin/bash
# HOST COMMAND...: the command on a host
host=$1; shift
inside='hostname "$0"; . "{folder}/setup-$0"; exec "$@"'
exec ip netns exec {prefix}$host unshare --uts --mount bash -c "$inside" "$host" "$@"
"""


def missing() -> str:
    """Explain why hosts cannot be simulated here; empty if they can."""
    gone = [program for program in _PROGRAMS if shutil.which(program) is None]
    if gone:
        return f"{', '.join(gone)} not installed: apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"try{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "the system does not allow network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class NetHosts:
    """Simulated hosts h0, h1, ...

    Args:
        folder: folder for scripts.
        count: number of hosts.

    Attributes:
        names: names of the hosts.
        transport: program that runs a command on a host, as ssh does.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.names = folder, [f"h{node}" for node in range(count)]
        self._prefix = f"t{os.getpid()}"
        self._switch = f"{self._prefix}sw"
        self.transport = folder / "on-host"

    def up(self) -> None:
        """Create the hosts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.transport.write_text(_TRANSPORT.format(prefix=self._prefix, folder=self.folder))
        self.transport.chmod(0o755)
        self.ip("netns", "add", self._switch)
        self.switch("link", "add", "br0", "type", "bridge")
        self.switch("link", "set", "br0", "up")
        for node, name in enumerate(self.names):
            space = self._prefix + name
            self.ip("netns", "add", space)
            self.switch("link", "add", f"p{node}", "type", "veth", "peer", "name", "eth0", "netns", space)
            self.switch("link", "set", f"p{node}", "master", "br0", "up")
            self.ip("-n", space, "link", "set", "lo", "up")
            self.ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            self.ip("-n", space, "link", "set", "eth0", "up")
            self.name_addresses(name, {other: self.address(index) for index, other in enumerate(self.names)})
            self.setup(name)

    def down(self) -> None:
        """End the processes of the hosts, by id, and remove them."""
        for name in [*self.names, "sw"]:
            space = self._prefix + name
            found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)

    @staticmethod
    def address(node: int) -> str:
        """Address of a host."""
        return f"10.77.0.{node + 1}"

    def name_addresses(self, host: str, addresses: dict[str, str]) -> None:
        """Set the addresses of names on a host."""
        folder = Path("/etc/netns") / (self._prefix + host)
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def space(self, host: str) -> str:
        """Name of the network namespace of a host."""
        return self._prefix + host

    def pids(self, host: str) -> list[int]:
        """Process ids of the processes of a host."""
        words = ["ip", "netns", "pids", self.space(host)]
        return [int(pid) for pid in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()]

    def setup(self, host: str, *commands: str) -> None:
        """Set the shell commands that run before each command on a host."""
        lines = ["export GLOO_SOCKET_IFNAME=eth0", *commands]
        (self.folder / f"setup-{host}").write_text("\n".join(lines) + "\n")

    def ip(self, *words: str) -> None:
        """Run ``ip``."""
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def switch(self, *words: str) -> None:
        """Run ``ip`` on the switch between the hosts."""
        self.ip("-n", self._switch, *words)

    def on_switch(self, *command: str) -> None:
        """Run a command on the switch."""
        subprocess.run(["ip", "netns", "exec", self._switch, *command], check=True, capture_output=True)

    def on(self, host: str, *command: str) -> None:
        """Run a command in the network of a host, and wait for it."""
        subprocess.run(["ip", "netns", "exec", self._prefix + host, *command], check=True, capture_output=True)

    def start(self, host: str, *command: str) -> "subprocess.Popen[str]":
        """Start a command on a host."""
        return subprocess.Popen([str(self.transport), host, *command], stdout=subprocess.PIPE, text=True)


@contextmanager
def net_hosts(folder: Path, count: int) -> Iterator[NetHosts]:
    """Create hosts, and remove them at the end of the block."""
    hosts = NetHosts(folder, count)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()
