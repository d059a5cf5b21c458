"""Run functions and the command ``hlat`` on the test device, in processes of their own.

on_neuron(function, world=2) --fork--> ranks that have the device --> their results, or the error of the first
hlat_on_neuron("train", ...)  --fork--> the command, whose ranks have the device --> its output; counts of every step
"""

import json
import multiprocessing
import os
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.commands import forking, hlat
from tests.support.launch.ports import free_port
from tests.support.neuron.rules import allowing

FAULT_ENV = "HLAT_STAND_IN_FAULT"
"""File with rank, step and status of the runtime: an operator of that step fails there, once. Needs counts."""

_COUNTS_ENV = "HLAT_STAND_IN_COUNTS"
_SECONDS = 120.0
_AFTER_AN_ERROR = 5.0
_LOST = ("connectFullMesh", "Connection closed", "Connection reset", "recvValue", "did not answer", "Broken pipe")


class RankError(Exception):
    """Error of a rank: its type and message."""


def on_neuron(
    function: Callable[..., Any],
    *arguments: Any,
    world: int = 1,
    allow: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a function in processes that have the device; several find each other by the usual variables.

    Args:
        function: a function of a module.
        arguments: its arguments.
        world: number of processes.
        allow: rules that do not hold.
        env: further variables.

    Returns:
        The results by rank.

    Raises:
        RankError: of the first rank that failed by itself.
    """
    port = free_port()
    processes, ends = [], []
    for rank in range(world):
        ours, theirs = multiprocessing.Pipe()
        variables = {**os.environ, **allowing(*allow), **(env or {}), **_places(rank, world, port)}
        process = forking().Process(target=_run, args=(function, arguments, variables, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    results: list[Any] = []
    errors: list[str] = []
    try:
        for rank, end in enumerate(ends):
            if not end.poll(_AFTER_AN_ERROR if errors else _SECONDS):
                errors.append(f"rank {rank} did not answer")
                continue
            try:
                error, result = end.recv()
            except EOFError:
                error, result = f"rank {rank} ended without a result", None
            if error:
                errors.append(error)
            results.append(result)
        for end in ends if not errors else ():
            end.send("end")
        if errors:
            # Those that lost their connection, or still wait, are consequences.
            raise RankError(next((error for error in errors if not any(map(error.__contains__, _LOST))), errors[0]))
    finally:
        for process in processes:
            process.join(5 if len(results) == world else 0.2)
            if process.exitcode is None:
                process.kill()
    return results


def hlat_on_neuron(
    *arguments: str | Path,
    allow: Sequence[str] = (),
    counts: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command on a machine with the device.

    Args:
        arguments: words after ``hlat``.
        allow: rules that do not hold.
        counts: folder for the counts of every step of each rank; see ``counts_of``.
        env: further variables.
    """
    variables = {**os.environ, **allowing(*allow), **(env or {})}
    if counts is not None:
        counts.mkdir(exist_ok=True)
        variables[_COUNTS_ENV] = str(counts)
    return hlat(*arguments, env=variables, prepare=prepare)


def counts_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the counts of the steps of a rank."""
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def prepare() -> None:
    """Give this process the device, and count what its steps do if that is asked for."""
    from tests.support.neuron.device_module import load  # noqa: PLC0415

    load()
    if _COUNTS_ENV in os.environ:
        _count_steps(Path(os.environ[_COUNTS_ENV]))


def _count_steps(folder: Path) -> None:
    from hlat.training import loop  # noqa: PLC0415
    from tests.support.neuron import compiling, device_module, process_group  # noqa: PLC0415

    plain = loop._training_step

    def counted(state: Any, prefetcher: Any) -> Any:
        _fail_once(state.runtime.rank, state.step + 1)
        before = device_module.counts()["waits"]
        process_group.clear()
        result = plain(state, prefetcher)
        found = device_module.counts() | {"collectives": process_group.clear(), "graphs": compiling.COMPILED[0]}
        found |= {"not cached": compiling.NOT_CACHED[0], "waits before": before}
        with (folder / f"rank-{state.runtime.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": state.step, **found}) + "\n")
        return result

    loop._training_step = counted


def _fail_once(rank: int, step: int) -> None:
    """Let the next operator fail if the file of faults says so; remove the file."""
    from tests.support.neuron.device_module import native  # noqa: PLC0415

    file = Path(os.environ.get(FAULT_ENV, "/nowhere"))
    if file.is_file() and (fault := json.loads(file.read_text())) and (fault["rank"], fault["step"]) == (rank, step):
        file.unlink()
        native().stand_in_fail_next(fault["status"])


def _run(function: Callable[..., Any], arguments: Sequence[Any], variables: dict[str, str], answer: Connection) -> None:
    os.environ.clear()
    os.environ.update(variables)
    try:
        prepare()
        answer.send(("", function(*arguments)))
        answer.poll(_SECONDS)  # rank 0 has the store: it ends after all ranks have joined and answered
    except BaseException as error:
        answer.send((f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None))
    os._exit(0)  # no destructor waits for a peer that has failed


def _places(rank: int, world: int, port: int) -> dict[str, str]:
    if world == 1:
        return {}
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
