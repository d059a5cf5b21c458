"""``hlat rehearse``: a dry run of the real program at full size on this machine, with tensors that take no memory."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hlat
from hlat.cli.common import OverridesArgument, RecipeArgument, ready, say
from hlat.cli.plan_options import check_outputs

if TYPE_CHECKING:
    from hlat.rehearsal import Rehearsal

_WIDE = 120  # columns of output that no terminal shows
_DOES_NOT_FIT = 1  # exit code, as of an examination that finds something bad


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(rehearse)


def rehearse(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    world: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            min=1,
            help="World size of the run: one process per accelerator; default: the devices of --cluster, else 1.",
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--rank",
            min=0,
            help="Rank to rehearse; default: those that a plan reports: of the first two pipeline ranks, the last, and "
            "the one that needs most memory.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="Take the decisions of this device: neuron, cuda:h100 or another chip of the catalog; default: that "
            "of --cluster, else the CPU.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", help="Cluster to simulate, as in trn2.48xlarge:1: does it fit, how long does a step take."
        ),
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="Catalog file with more chips and instances.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write operations and messages as a Chrome trace: in time with --cluster, else in order."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Run a training step of some ranks without devices: memory, communication, FLOPs, decisions, and errors."""
    check_outputs((trace,))
    asked = hlat.load_recipe(recipe, overrides or [])
    from hlat.rehearsal import RankReport, report_lines

    ready()
    width = shutil.get_terminal_size((_WIDE, 24)).columns if sys.stdout.isatty() else _WIDE

    def show(report: RankReport) -> None:
        if not as_json:
            say("\n".join(report_lines(report, width)))

    found = hlat.rehearse(
        recipe,
        overrides or [],
        world=world,
        ranks=ranks or None,
        processes=os.cpu_count() or 1,
        on_report=show,
        device=device,
        cluster=cluster,
        hardware=hardware,
    )
    if trace is not None:
        _write(trace, json.dumps(found.chrome_trace()))
    if as_json:
        say(json.dumps(found.to_dict(), indent=2))
    else:
        _say_all(found, asked.precision.mode, width)
    if found.verdict is not None and not found.verdict.fits:
        raise typer.Exit(_DOES_NOT_FIT)


def _say_all(found: "Rehearsal", asked_mode: str, width: int) -> None:
    """Print what concerns all ranks: decisions of the device, notes, time, and the verdict on memory."""
    from hlat.rehearsal import decision_lines, note_lines, time_lines, verdict_lines

    notes = note_lines(found, asked_mode, width)
    for line in (*decision_lines(found, width), *notes, *time_lines(found, width), *verdict_lines(found, width)):
        say(line)


def _write(path: Path, content: str) -> None:
    """Write a file completely or not at all."""
    from hlat.runtime.errors import StorageError

    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(content, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
