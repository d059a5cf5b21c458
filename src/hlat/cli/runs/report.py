"""``hlat report`` and ``hlat runs``: what happened in runs, as a page, and a list of runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hlat
from hlat.cli.common import ready, say
from hlat.cli.hardware import HardwareOption
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal_text import escape_name

if TYPE_CHECKING:
    from hlat.reporting import RunSummary

_MOST_LETTERS = 60
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COLUMNS = ("run", "state", "step", "loss", "validation", "tokens", "tokens/s", "size", "updated, UTC")


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(report)
    app.command("runs")(runs_command)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    to: Annotated[
        Path | None, typer.Option("-o", "--to", help="HTML file to write; default: report.html in the first run.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the page on http://127.0.0.1, refreshed while the run goes on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --serve; 0 takes a free one.")] = 0,
    cluster: Annotated[
        str | None, typer.Option(help="Machines of the run, INSTANCE:N: shows its plan and dollars beside actual.")
    ] = None,
    price: Annotated[str | None, typer.Option(help="Kind of price, as for hlat plan.")] = None,
    hardware: HardwareOption = None,
) -> None:
    """Write what happened in a run, finished or not, as one HTML page that needs no network."""
    from hlat.reporting import Machines, ReportServer

    ready(works=True)
    if not serve:
        say(f"report: {hlat.report(runs, to, cluster=cluster, price=price, hardware=hardware)}")
        return
    if to is not None:
        raise LaunchError("--serve writes no file: give either --serve or -o FILE.")
    machines = None if cluster is None else Machines(cluster, price, None if hardware is None else str(hardware))
    server = ReportServer(runs, machines, port)
    say(f"report: {server.url} (Ctrl-C ends)")
    server.serve()


def runs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List the runs below a folder: state, step, loss, speed."""
    ready()
    found = hlat.runs(folder)
    if as_json:
        say(json.dumps([_plain(run) for run in found], indent=2))
        return
    if not found:
        say(f"{folder}: no runs")
        return
    rows = [
        ("run", "state", "step", "loss", "validation", "tokens", "tokens/s", "size", "updated, UTC"),
        *map(_cells, found),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cells(run: "RunSummary") -> tuple[str, ...]:
    name = escape_name(str(run.path))
    total = "" if run.total_steps is None else f"/{run.total_steps:,}"
    return (
        name if len(name) <= _MOST_LETTERS else f"...{name[-_MOST_LETTERS:]}",
        run.state,
        "-" if run.step is None else f"{run.step:,}{total}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.validation_loss is None else f"{run.validation_loss:.4f}",
        "-" if run.tokens is None else _short(run.tokens),
        "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        "-" if run.parameters is None else _short(run.parameters),
        "-" if run.updated is None else f"{run.updated:%Y-%m-%d %H:%M:%S}",
    )


def _short(count: float) -> str:
    return next((f"{count / unit:.1f}{prefix}" for unit, prefix in _SI if count >= unit), f"{count:.0f}")


def _plain(run: "RunSummary") -> dict[str, object]:
    from hlat.tracking import to_json_value

    plain = {**asdict(run), "path": str(run.path), "updated": None if run.updated is None else run.updated.isoformat()}
    return dict(to_json_value(plain))
