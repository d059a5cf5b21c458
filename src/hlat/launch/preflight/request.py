"""A request for a preflight, and a host as checks see it.

recipe, --nodes, --node, --nproc, --address, ..., variables of Slurm, Kubernetes, torchrun
    --make_request--> PreflightRequest: what is examined
PreflightRequest, HostTools (clock, locks, memory, ...), Peers once known --> HostView: where checks measure
/proc/meminfo, control groups (versions 1 and 2), ulimit -v --> available_memory, memory_limit, in bytes
"""

import fcntl
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hlat.config import Recipe, RecipeError
from hlat.hardware import Cluster, load_catalog, parse_cluster
from hlat.planner import load_run_recipe, resolve_defaults
from hlat.runtime import slurm
from hlat.runtime.distributed.network import address_of, resolve_addresses
from hlat.runtime.errors import HardwareError, LaunchError
from hlat.runtime.process import host_name
from hlat.runtime.terminal import escape_controls

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_CONTROL_GROUP_FILES = (  # limit, usage, and the part of the usage that is only a cache of files
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int:
    """Return the bytes that this process and its children can still allocate."""
    return min([_machine_memory(), *(left for _, left in _control_groups()), *_address_space_limit()])


def memory_limit() -> int:
    """Return the bytes that processes can have at most, by the machine, its control groups and a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(most for most, _ in _control_groups()), *_address_space_limit()])


def _machine_memory() -> int:
    """Memory that is free, or used by caches that the system gives back."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_groups() -> Iterator[tuple[int, int]]:
    """Limit of each control group of this process that has one, and the memory left in it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CONTROL_GROUPS / "memory" if controllers else _CONTROL_GROUPS
            folder = root / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group == root.parent:
                    break
                yield from _control_group(group)


def _control_group(folder: Path) -> Iterator[tuple[int, int]]:
    for limit, usage, cache in _CONTROL_GROUP_FILES:
        with suppress(OSError, ValueError):
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            cached = next((int(line.split()[1]) for line in lines if line.split()[0] == cache), 0)
            # The system gives a cache of files back when memory is needed.
            yield most, max(0, most - used + cached)


def _address_space_limit() -> Iterator[int]:
    """Address space left under ``ulimit -v``: the limit is per process."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        yield most


ADDRESSES_ENV = "HLAT_ADDRESSES"
"""Environment variable with the addresses of hosts whose names may not resolve: NAME=ADDRESS, separated by spaces."""


def own_address(given: str | None, environment: Mapping[str, str]) -> str:
    """Return the address of this host for the others; OSError if it is unknown.

    It is the given one, or that of the interface for collectives, in HLAT_ADDRESSES, or of the host's name.
    """
    if given is None and (interface := environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]):
        given = address_of(interface)
        if given is None:
            raise OSError(f"the network interface {interface} has no address here")
    name = host_name(environment)
    listed = dict(each.partition("=")[::2] for each in environment.get(ADDRESSES_ENV, "").split())
    wanted = given or listed.get(name, name)
    try:
        return resolve_addresses(wanted)[0]
    except OSError as error:
        raise OSError(f"{wanted}: {error.strerror or error}") from error


@dataclass(frozen=True)
class PreflightOptions:
    """Options of ``hlat doctor`` about the hosts; None takes the value from the environment.

    Attributes:
        nproc: processes per host; None for one per device of the instance, or one.
        nodes: number of hosts.
        node: index of this host.
        name: name of this host in the report.
        address: address on which this host listens.
        port: port on which it listens; 0 for any free one.
        run_dir: folder to examine without a recipe; None for the present one.
        instance: name of the machines in the hardware catalog.
        hardware: file with a catalog on top of the one that ships with hlat.
        patience: seconds to wait for other hosts and for collectives.
    """

    nproc: int | None = None
    nodes: int | None = None
    node: int | None = None
    name: str | None = None
    address: str | None = None
    port: int = 0
    run_dir: Path | None = None
    instance: str | None = None
    hardware: str | None = None
    patience: float = 60.0

    def words(self) -> list[str]:
        """Return the options that do not say which host it is, as the command line has them."""
        folder = None if self.run_dir is None else str(self.run_dir.absolute())
        values = {"--nproc": self.nproc, "--run-dir": folder, "--instance": self.instance, "--hardware": self.hardware}
        values |= {"--port": self.port or None, "--wait": f"{self.patience:g}"}
        return [word for option, value in values.items() if value is not None for word in (option, str(value))]


@dataclass(frozen=True)
class PreflightRequest:
    """Subject of a preflight, as this host sees it: the options, and what the environment and the recipe add."""

    options: PreflightOptions
    run_dir: Path  # folder of the run, or the folder to examine without a recipe
    recipe: Recipe | None  # recipe of the run; None examines the machines alone
    recipe_error: str  # problems of the recipe on this host; empty if there are none
    nproc: int
    nodes: int
    node: int
    name: str  # name of this host in the report
    names: tuple[str, ...]  # names of all hosts, as far as they are known before they report
    cluster: Cluster | None  # machines of this kind, from the hardware catalog; None if unknown

    @property
    def world(self) -> int:
        return self.nodes * self.nproc

    @property
    def device(self) -> str:
        """Device type to examine, as ``run.device`` has it."""
        return "auto" if self.recipe is None else self.recipe.run.device

    def listen_address(self) -> str:
        """Address to listen on, that of this host for the others; OSError if it is unknown."""
        return own_address(self.options.address or ("127.0.0.1" if self.nodes == 1 else None), os.environ)

    def name_of(self, node: int) -> str:
        """Return the name of a host that has not reported yet."""
        return self.names[node] if node < len(self.names) else f"host {node}"


def make_request(
    recipe: Recipe | str | None,
    overrides: Sequence[str],
    options: PreflightOptions,
    environment: Mapping[str, str] = os.environ,
) -> PreflightRequest:
    """Check options, load the recipe, and find out which host this is.

    Args:
        recipe: recipe, its file, or the name of a shipped one; None examines the machines alone.
        overrides: changes of the recipe.
        options: options about the hosts.
        environment: variables of Slurm, Kubernetes or torchrun that number the hosts.

    Raises:
        LaunchError: an option is wrong, or it is unknown which host this is; every problem is listed.
        RecipeError: the recipe has problems, on host 0; another host reports them as a finding.
    """
    problems: list[str] = []
    nodes, node = _find_node(options, environment, problems)
    cluster = cluster_of(options.instance, nodes, options.hardware, problems)
    nproc = options.nproc if options.nproc is not None else 1 if cluster is None else cluster.devices_per_instance
    if nproc < 1:
        problems.append(f"--nproc {nproc}: expected 1 or more.")
    if options.patience <= 0:
        problems.append(f"--wait {options.patience:g}: expected more than 0 seconds.")
    if recipe is None and overrides:
        problems.append(f"{escape_controls(overrides[0])}: overrides change a recipe, and none is given.")
    if recipe is not None and options.run_dir is not None:
        problems.append("--run-dir: with a recipe the folder is its run.dir; override that instead.")
    if problems:
        raise LaunchError("\n".join(["hlat doctor cannot start:", *(f"  {problem}" for problem in problems)]))
    found, error = _load_recipe(recipe, overrides, nodes * nproc, node, cluster)
    folder = found.run_dir if found is not None else options.run_dir or Path.cwd()
    return PreflightRequest(
        options,
        folder.absolute(),
        found,
        error,
        nproc,
        nodes,
        node,
        options.name or environment.get("SLURMD_NODENAME") or socket.gethostname(),
        _slurm_names(nodes, environment),
        cluster,
    )


def _find_node(options: PreflightOptions, environment: Mapping[str, str], problems: list[str]) -> tuple[int, int]:
    in_job = bool(environment.get("SLURM_JOB_ID"))
    # Only in a step of srun does every node run this command; a job's variables are in its script too.
    in_step = in_job and slurm.in_step(environment)
    machines = slurm.first_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if in_job and not in_step and options.nodes is None and (machines or 1) > 1:
        problems.append(
            f"this is the script or the shell of a Slurm job of {machines} machines: `srun --ntasks-per-node=1 hlat "
            "doctor ...` examines all of them, --nodes 1 this one alone."
        )
    nodes = options.nodes if options.nodes is not None else (machines if in_step else None)
    nodes = nodes if nodes is not None else slurm.first_number(environment, "GROUP_WORLD_SIZE") or 1
    if nodes < 1:
        problems.append(f"--nodes {nodes}: expected 1 or more.")
        return 1, 0
    own = ("SLURM_NODEID",) if in_step else ()
    node = (
        options.node
        if options.node is not None
        else slurm.first_number(environment, *own, "JOB_COMPLETION_INDEX", "GROUP_RANK")
    )
    if node is None and nodes > 1:
        problems.append(f"--node is missing: the index of this host, 0 to {nodes - 1}.")
    elif node is not None and not 0 <= node < nodes:
        problems.append(f"--node {node}: with --nodes {nodes} it is between 0 and {nodes - 1}.")
    return nodes, node or 0


def cluster_of(instance: str | None, hosts: int, hardware: str | None, problems: list[str]) -> Cluster | None:
    """Return the machines of ``--instance``, if it is given; unknown ones are a problem."""
    if instance is None:
        return None
    try:
        return parse_cluster(f"{instance}:{hosts}", load_catalog(hardware))
    except HardwareError as error:
        problems.append(f"--instance {escape_controls(instance)}: {error}")
        return None


def _load_recipe(
    recipe: Recipe | str | None, overrides: Sequence[str], world: int, node: int, cluster: Cluster | None
) -> tuple[Recipe | None, str]:
    """Load the recipe; on other hosts than the first, return its problems instead of raising them."""
    if recipe is None or isinstance(recipe, Recipe):
        return recipe, ""
    try:
        loaded = load_run_recipe(recipe, overrides, world=world)
        return resolve_defaults(loaded, world, cluster)[0], ""
    except RecipeError as error:
        if node == 0:
            raise
        return None, " ".join(str(error).split())


def _slurm_names(nodes: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the hosts of a Slurm step in the order of their indices; none outside of Slurm."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes == 1 or not listed or not environment.get("SLURM_JOB_ID"):
        return ()
    return tuple(slurm.run_command(["scontrol", "show", "hostnames", listed]).split())


@dataclass(frozen=True)
class HostTools:
    """Functions of the system that checks of a host use."""

    clock: Callable[[], float] = time.time  # seconds since 1970
    flock: Callable[[int, int], None] = fcntl.flock
    # bytes of memory that processes of this host can still allocate
    available_memory: Callable[[], int] = available_memory


@dataclass(frozen=True)
class Peer:
    """Another host of the examination, or this one."""

    name: str  # name in the report
    hostname: str  # name that the machine itself has
    address: str  # address on which it listens
    addresses: Sequence[str]  # all addresses of its interfaces
    port: int  # port on which it accepts connections; 0 if it could not listen


@dataclass(frozen=True)
class HostView:
    """Place of measurements on a host."""

    request: PreflightRequest
    tools: HostTools = HostTools()
    listen_error: str = ""  # reason why this host cannot listen on its address; empty if it does
    # hosts by index, this one included; empty before they have met
    peers: Mapping[int, Peer] = field(default_factory=dict)
    lock_file: Path | None = None  # file that host 0 has locked; None before the hosts have met, and on host 0

    def others(self) -> dict[int, Peer]:
        return {node: peer for node, peer in self.peers.items() if node != self.request.node}
