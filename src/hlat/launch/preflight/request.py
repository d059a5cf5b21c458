"""A request for a preflight: options and environment become one description of what is examined.

recipe, --nodes, --node, --nproc, --address, ..., variables of Slurm, Kubernetes, torchrun --> PreflightRequest
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.config import Recipe, RecipeError, load_recipe
from hlat.hardware import Cluster, load_catalog, parse_cluster
from hlat.runtime.distributed.addresses import address_of, resolve_addresses
from hlat.runtime.errors import HardwareError, LaunchError
from hlat.runtime.terminal_text import escape_controls

_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SLURM_STEP_LIMIT = 0xFFFFFFF0  # higher step numbers: batch script, interactive shell, ...
_SLURM_SECONDS = 10.0


@dataclass(frozen=True)
class PreflightRequest:
    """Subject of a preflight, as this host sees it.

    Attributes:
        run_dir: folder of the run, or the folder to examine without a recipe.
        recipe: recipe of the run; None examines the machines alone.
        recipe_error: problems of the recipe on this host; empty if there are none.
        nproc: processes per host.
        nodes: number of hosts.
        node: index of this host.
        name: name of this host in the report.
        names: names of all hosts, as far as they are known before they report.
        address: address on which this host listens; None for the default.
        port: port on which it listens; 0 for any free one.
        cluster: machines of this kind, from the hardware catalog; None if unknown.
        patience: seconds to wait for other hosts and for collectives.
    """

    run_dir: Path
    recipe: Recipe | None = None
    recipe_error: str = ""
    nproc: int = 1
    nodes: int = 1
    node: int = 0
    name: str = ""
    names: tuple[str, ...] = ()
    address: str | None = None
    port: int = 0
    cluster: Cluster | None = None
    patience: float = 60.0

    @property
    def world(self) -> int:
        """Number of processes of the run."""
        return self.nodes * self.nproc

    @property
    def device(self) -> str:
        """Device type to examine, as ``run.device`` has it."""
        return "auto" if self.recipe is None else self.recipe.run.device

    def listen_address(self) -> str:
        """Return the address to listen on: as asked, or of the interface for collectives, or of this host's name.

        Raises:
            OSError: the interface has no address, or the name is unknown.
        """
        if self.address is not None:
            return resolve_addresses(self.address)[0]
        if os.environ.get(_INTERFACE):
            interface = os.environ[_INTERFACE].split(",")[0]
            if (found := address_of(interface)) is None:
                raise OSError(f"the network interface {interface} has no address here")
            return found
        return _LOOPBACK if self.nodes == 1 else resolve_addresses(socket.gethostname())[0]

    def name_of(self, node: int) -> str:
        """Return the name of a host that has not reported yet."""
        return self.names[node] if node < len(self.names) else f"host {node}"


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
        environment: environment variables.

    Raises:
        LaunchError: an option is wrong, or it is unknown which host this is; every problem is listed.
        RecipeError: the recipe has problems, on host 0; another host reports them as a finding.
    """
    problems: list[str] = []
    nodes, node = _place(options, environment, problems)
    cluster = _cluster(options, nodes, problems)
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
    found, error = _load(recipe, overrides, nodes * nproc, node)
    folder = found.run_dir if found is not None else options.run_dir or Path.cwd()
    return PreflightRequest(
        folder.absolute(),
        found,
        error,
        nproc,
        nodes,
        node,
        options.name or environment.get("SLURMD_NODENAME") or socket.gethostname(),
        _slurm_names(nodes, environment),
        options.address,
        options.port,
        cluster,
        options.patience,
    )


def _place(options: PreflightOptions, environment: Mapping[str, str], problems: list[str]) -> tuple[int, int]:
    """Number of hosts, and index of this one."""
    in_job = bool(environment.get("SLURM_JOB_ID"))
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    in_step = in_job and step.isdecimal() and int(step) < _SLURM_STEP_LIMIT
    machines = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if in_job and not in_step and options.nodes is None and (machines or 1) > 1:
        problems.append(
            f"this is the script or the shell of a Slurm job of {machines} machines: `srun --ntasks-per-node=1 hlat "
            "doctor ...` examines all of them, --nodes 1 this one alone."
        )
    nodes = options.nodes if options.nodes is not None else (machines if in_step else None)
    nodes = nodes if nodes is not None else _number(environment, "GROUP_WORLD_SIZE") or 1
    if nodes < 1:
        problems.append(f"--nodes {nodes}: expected 1 or more.")
        return 1, 0
    slurm = ("SLURM_NODEID",) if in_step else ()
    node = (
        options.node if options.node is not None else _number(environment, *slurm, "JOB_COMPLETION_INDEX", "GROUP_RANK")
    )
    if node is None and nodes > 1:
        problems.append(f"--node is missing: the index of this host, 0 to {nodes - 1}.")
    elif node is not None and not 0 <= node < nodes:
        problems.append(f"--node {node}: with --nodes {nodes} it is between 0 and {nodes - 1}.")
    return nodes, node or 0


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """First of these variables that is a number."""
    found = (environment.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), None)


def _cluster(options: PreflightOptions, nodes: int, problems: list[str]) -> Cluster | None:
    if options.instance is None:
        return None
    try:
        return parse_cluster(f"{options.instance}:{nodes}", load_catalog(options.hardware))
    except HardwareError as error:
        problems.append(f"--instance {escape_controls(options.instance)}: {error}")
        return None


def _load(recipe: Recipe | str | None, overrides: Sequence[str], world: int, node: int) -> tuple[Recipe | None, str]:
    """Load the recipe; on other hosts than the first, return its problems instead of raising them."""
    if recipe is None or isinstance(recipe, Recipe):
        return recipe, ""
    try:
        return load_recipe(recipe, list(overrides), world=world), ""
    except RecipeError as error:
        if node == 0:
            raise
        return None, " ".join(str(error).split())


def _slurm_names(nodes: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the hosts of a Slurm step in the order of their indices; none outside of Slurm."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes == 1 or not listed or not environment.get("SLURM_JOB_ID"):
        return ()
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            capture_output=True,
            text=True,
            timeout=_SLURM_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.split())
