"""Options of ``hlat train --nodes`` and ``hlat launch local``: this host's number and address, commands for hosts."""

import shlex
import socket
import subprocess
import sys

import pytest

from hlat.launch import HostOptions, LocalRequest, run_local
from hlat.launch.local_hosts import HostCommand
from hlat.runtime.errors import LaunchError


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({"SLURM_NODEID": "3"}, 3),
        ({"JOB_COMPLETION_INDEX": "2"}, 2),
        ({"GROUP_RANK": "1"}, 1),
        ({"NODE_RANK": "0"}, 0),
    ],
)
def test_the_number_of_a_host_is_that_of_its_scheduler(variables, number):
    options = HostOptions("2:4", address="127.0.0.1")
    least, most, place = options.resolve(8, variables)
    assert (least, most, place.index, place.nproc) == (2, 4, number, 8)


def test_the_address_is_that_of_the_interface_for_gloo_and_names_are_resolved():
    assert HostOptions(1, 0).resolve(1, {"GLOO_SOCKET_IFNAME": "lo"})[2].address == "127.0.0.1"
    assert HostOptions(2, 0, "localhost").resolve(1, {})[2].address in ("127.0.0.1", "::1")
    with pytest.raises(LaunchError, match="the network interface no0 has no address here"):
        HostOptions(1, 0).resolve(1, {"GLOO_SOCKET_IFNAME": "no0"})
    listed = {"SLURMD_NODENAME": "n1", "HLAT_ADDRESSES": "n0=10.0.0.1 n1=10.0.0.2"}
    assert HostOptions(2, 0).resolve(1, listed)[2].address == "10.0.0.2"


def test_all_problems_are_told_at_once(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    with pytest.raises(LaunchError) as caught:
        HostOptions("4:2", None, "no-such-host").resolve(1, {})
    text = str(caught.value)
    assert "--nodes 4:2: expected a number of hosts" in text
    assert "--node is missing" in text
    assert "the address of this host is unknown: no-such-host: Name or service not known" in text
    with pytest.raises(LaunchError, match=r"--node 2: with --nodes 2 it is between 0 and 1"):
        HostOptions(2, 2, "127.0.0.1").resolve(1, {})


def test_a_name_that_is_loopback_is_refused_for_several_hosts(monkeypatch):
    """Debian's /etc/hosts gives a machine's own name to 127.0.1.1, where no other host reaches it."""
    with pytest.raises(LaunchError, match=r"this host is .*where no other host reaches it"):
        HostOptions(2, 0).resolve(1, {"SLURMD_NODENAME": "localhost"})
    assert HostOptions(1, 0).resolve(1, {"SLURMD_NODENAME": "localhost"})[2].index == 0


def _unknown(*arguments: object, **options: object) -> list[object]:
    raise socket.gaierror(-2, "Name or service not known")


def test_without_names_of_hosts_supervisors_on_loopback_rehearse_the_run(tmp_path):
    commands = LocalRequest("r.yaml", ("a=b",), nodes=3, least=2, nproc=4).commands(tmp_path)
    parsed = [shlex.split(str(command)) for command in commands]
    assert [words[words.index("--node") + 1] for words in parsed] == ["0", "1", "2"]
    for words in parsed:
        assert words[words.index("train") : words.index("--node")] == [
            *["train", "r.yaml", "a=b", "--nproc", "4", "--nodes", "2:3"]
        ]
        assert words[words.index("--address") + 1] == "127.0.0.1"


def test_a_command_for_ssh_survives_the_shell_of_the_host(tmp_path):
    """Ssh hands one text to the shell of the host: here the real shell takes it apart again."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    show = f"{sys.executable} -c 'import os, sys; print(os.getcwd()); print(sys.argv[1:])'"
    request = LocalRequest("r $HOME.yaml", ("a='b c'",), hosts=("h0", "h1=10.0.0.2"), program=show, ssh="echo")
    [_, command] = request.commands(folder)
    assert command.is_remote and command.words[:2] == ("echo", "h1")
    output = subprocess.run(["sh", "-c", command.words[2]], capture_output=True, text=True, check=True).stdout
    cwd, words = output.splitlines()
    assert cwd == str(folder)
    expected = ["train", "r $HOME.yaml", "a='b c'", "--nproc", "1", "--nodes", "2", "--node", "1"]
    assert words == str([*expected, "--address", "10.0.0.2"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give the hosts with --hosts"),
        ({"nodes": 3, "hosts": ("a", "b")}, "--hosts names 2"),
        ({"hosts": ("a", "a")}, "a is there more than once"),
        ({"hosts": ("-oProxyCommand=x",)}, "expected the name of a host"),
        ({"nodes": 2, "least": 3}, "least 3"),
        ({"nodes": 2, "nproc": 0}, "--nproc 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_started(tmp_path, fields, message):
    with pytest.raises(LaunchError, match=message):
        LocalRequest("r.yaml", **fields).commands(tmp_path)


def shell(host: str, script: str) -> HostCommand:
    return HostCommand(host, ("sh", "-c", script), is_remote=False)


def test_lines_of_all_hosts_are_shown_with_their_names_and_the_highest_exit_code_counts():
    shown: list[str] = []
    assert run_local([shell("a", "echo one; exit 3"), shell("b", "echo two >&2")], shown.append) == 3
    assert sorted(shown) == ["a: one", "b: two"]


def test_a_host_that_cannot_be_started_ends_the_others(tmp_path):
    mark = tmp_path / "ended"
    slow = shell("a", f"trap 'touch {mark}' EXIT; sleep 60")
    with pytest.raises(LaunchError, match="b: /no/such/program cannot be started"):
        run_local([slow, HostCommand("b", ("/no/such/program",), is_remote=False)], print)


def test_ctrl_c_goes_through_the_terminal_of_a_host(tmp_path):
    """A stand-in for ssh -tt: ``script`` runs a command in a terminal, which makes a signal of the character."""
    seen = tmp_path / "seen"
    inner = f"trap 'touch {seen}; exit 130' INT; touch {tmp_path / 'ready'}; while true; do sleep 0.1; done"
    command = HostCommand("a", ("script", "-qec", f"sh -c {shlex.quote(inner)}", "/dev/null"), is_remote=True)
    words = f"""
import os, signal, sys, threading, time
from pathlib import Path
from hlat.launch import run_local
from hlat.launch.local_hosts import HostCommand
def interrupt():
    while not Path({str(tmp_path / "ready")!r}).exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
sys.exit(run_local([HostCommand("a", {command.words!r}, is_remote=True)], print))
"""
    assert subprocess.run([sys.executable, "-c", words], timeout=1200, check=False).returncode == 130
    assert seen.exists()
