"""Train the runs of a sweep, here or by Slurm, and show what they have reached.

run_sweep, one run after the other on this machine, each a process of its own (``hlat train``):
already finished -> left alone
subprocess -> exit code; a run that fails does not keep the others from running

array_script, a job array of Slurm, one element for each run:
sbatch SCRIPT -> elements 0 ... N-1, at most so many at once -> hlat sweep ... --only $SLURM_ARRAY_TASK_ID
an element that fails may be given to Slurm again

results, the best run first --sweep_lines--> a table, --sweep_json--> JSON
"""

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hlat.reporting import RunSummary, list_runs
from hlat.runtime import slurm
from hlat.runtime.backend.table import expects_accelerator
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal import aligned, line_problems
from hlat.sweep.runs import Sweep, SweepRun

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class SweepResult:
    """A run of a sweep: its state and last numbers, read from its folder."""

    run: SweepRun
    summary: RunSummary | None  # None if it has not begun
    exit_code: int | None = None  # None if it was not started this time

    @property
    def is_finished(self) -> bool:
        found = self.summary
        return found is not None and found.state == "finished" and (found.step or 0) >= self.run.steps

    def number(self, name: str) -> float | None:
        """Return a number of its summary; None if it has not begun, or has none."""
        return None if self.summary is None else getattr(self.summary, name)

    @property
    def state(self) -> str:
        return "not begun" if self.summary is None else self.summary.state


def sweep_results(sweep: Sweep) -> list[SweepResult]:
    """State of each run, read from its folder."""
    return [_result(run) for run in sweep.runs]


def run_hlat(words: Sequence[str], *, silent: bool = False) -> tuple[int, bool]:
    """Run a command of hlat in a process of its own; return its exit code, and True if a signal was passed on to it.

    ``silent`` shows only what it writes to stderr: warnings and errors.
    """
    # -P: Python must not import a file hlat.py of the working folder instead of the package.
    # A process group of its own: Ctrl-C at a terminal would reach it twice, and twice means at once.
    output = subprocess.DEVNULL if silent else None
    process = subprocess.Popen([sys.executable, "-P", "-m", "hlat", *words], process_group=0, stdout=output)
    with _passing_on(process) as passed:
        return process.wait(), bool(passed)


def run_sweep(
    sweep: Sweep,
    say: Callable[[str], None],
    *,
    only: int | None = None,
    train_options: Sequence[str] = (),
) -> list[SweepResult]:
    """Train the runs that are not finished; return every run as it stands then.

    Training ends with the run that a signal interrupted.

    Args:
        sweep: the runs, as ``plan_sweep`` has checked them.
        say: shows a message to the user.
        only: number of the run to train, from 0; None trains all.
        train_options: options of ``hlat train``, such as ("--nproc", "2").
    """
    codes: dict[str, int] = {}
    for number, run in enumerate(sweep.runs):
        if only not in (None, number):
            continue
        head = f"run {number + 1} of {len(sweep.runs)}: {run.name}"
        if _result(run).is_finished:
            say(f"{head}: finished before")
            continue
        say(head)
        codes[run.name], interrupted = run_hlat(["train", *train_options, sweep.recipe, *run.overrides])
        if interrupted:
            break
    return [_result(run, codes.get(run.name)) for run in sweep.runs]


def _result(run: SweepRun, exit_code: int | None = None) -> SweepResult:
    found = list_runs(run.folder) if run.folder.is_dir() else []
    return SweepResult(run, next((one for one in found if one.path == run.folder), None), exit_code)


@contextmanager
def _passing_on(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Send the signals that end a program to another process instead; yields those that have come."""
    passed: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed.append(number)
        process.send_signal(number)

    # Signals that this process ignores stay ignored, as SIGHUP under nohup.
    heard = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in heard}
    try:
        yield passed
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def array_script(
    sweep: Sweep, words: Sequence[str], options: Sequence[str], at_once: int | None, verb: str = "sweep"
) -> tuple[str, list[Path]]:
    """Return the batch script of a sweep, and the folders of its output, which Slurm does not make.

    Args:
        sweep: an element of the array for each of its runs.
        words: arguments of the verb after the recipe: axes, overrides and options, without --slurm.
        options: options of sbatch, as in --time=2:00:00.
        at_once: elements that may run at the same time; None for no limit.
        verb: of hlat, with the options --to and --only.

    Raises:
        LaunchError: an option is wrong; every problem is listed.
    """
    limit = "" if at_once is None else f"%{at_once}"
    folder, name = sweep.folder.absolute(), sweep.folder.name
    # Slurm expands % in the name of an output file; %% is a percent sign.
    output = f"--output={str(folder).replace('%', '%%')}/slurm-%a.out"
    head = [f"--job-name={name}", f"--array=0-{len(sweep.runs) - 1}{limit}", output, *options]
    head += slurm.memory_options(options)
    command = [sys.executable, "-P", "-m", "hlat", verb, sweep.recipe, *words, "--to", str(sweep.folder)]
    folders, unfit = slurm.output_folders(head, name, Path.cwd())
    named = {"the working folder": str(Path.cwd()), "--to": str(folder), "recipe": sweep.recipe}
    problems = [*slurm.option_problems("--sbatch", "sbatch", options), *unfit]
    problems += [found for what, text in named.items() for found in line_problems(what, text)]
    problems += [found for word in words for found in line_problems("argument", word)]
    if problems:
        raise LaunchError("\n".join(problems))
    text = "\n".join(
        [
            "#!/bin/bash",
            *map(slurm.directive, head),
            f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
            # srun is not used: each element is one task on one node
            "unset SLURM_NTASKS SLURM_PROCID",
            f'exec {shlex.join(command)} --only "$SLURM_ARRAY_TASK_ID"',
            "",
        ]
    )
    return text, folders


def accelerator_warning(sweep: Sweep, options: Sequence[str], processes: int) -> str | None:
    """Return a warning if the array reserves no accelerators although a run may want one; else None.

    ``processes`` are those of each run.
    """
    # A login node, where this is asked, knows nothing of the devices that ``auto`` finds on a compute node.
    wants = any(run.device == "auto" or expects_accelerator(run.device) for run in sweep.runs)
    if not wants or slurm.asks_for_accelerators(options):
        return None
    return (
        "warning: the job asks Slurm for no accelerators, and without any its runs train on the CPUs. Add "
        f"--sbatch=--gpus-per-node={processes}, or say run.device=cpu; nothing is missing on a cluster whose nodes "
        "give theirs to every job."
    )


_RESULT_HEADS = ("state", "step", "loss", "validation", "tokens/s")
_NUMBERS = {"step": "{:,}", "loss": "{:.4f}", "validation_loss": "{:.4f}", "tokens_per_second": "{:,.0f}"}
"""Numbers of a run's summary, and how the table writes them."""


def ranked(results: Sequence[SweepResult]) -> list[SweepResult]:
    """Order the runs by validation loss, or training loss if no run has one; runs without a number last."""
    by_validation = any(result.number("validation_loss") is not None for result in results)
    scores = [result.number("validation_loss" if by_validation else "loss") for result in results]
    order = sorted(range(len(results)), key=lambda place: (scores[place] is None, scores[place] or 0.0))
    return [results[place] for place in order]


def sweep_lines(results: Sequence[SweepResult]) -> list[str]:
    """Lines of a table: a column for each field that varies, then what the runs have reached."""
    order = ranked(results)
    fields = list(order[0].run.values)
    rows = [(*fields, *_RESULT_HEADS), *(_cells(result, fields) for result in order)]
    return list(aligned(rows))


def sweep_json(results: Sequence[SweepResult]) -> list[dict[str, Any]]:
    """Results as JSON values, the best run first."""
    return [
        {
            "name": result.run.name,
            "values": result.run.values,
            "folder": str(result.run.folder),
            "state": result.state,
            **{name: result.number(name) for name in _NUMBERS},
            "exit_code": result.exit_code,
        }
        for result in ranked(results)
    ]


def _cells(result: SweepResult, fields: Sequence[str]) -> tuple[str, ...]:
    numbers = ((result.number(name), pattern) for name, pattern in _NUMBERS.items())
    shown = ("-" if value is None else pattern.format(value) for value, pattern in numbers)
    return (*(result.run.values[field] for field in fields), result.state, *shown)
