"""``hlat report``, ``hlat runs``, ``hlat show`` and ``hlat compare``: verbs that look at runs.

report -> what happened in runs, as an HTML page     runs -> a list
show, compare -> one run, or several, as text
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hlat
from hlat.cli.options import HardwareOption, JsonOption, PortOption, PriceOption
from hlat.cli.terminal import AllOption, opening_line, ready, say
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal import TABLE_ROWS, aligned, be_verbose, columns, escape_name, first_of, is_verbose, plural

if TYPE_CHECKING:
    from hlat.reporting import LossesAt, RunComparison, RunOverview, RunSummary


_MOST_LETTERS = 60
_MOST_CHARACTERS = 160  # of a value of the recipe
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COLUMNS = ("run", "state", "step", "loss", "validation", "tokens", "tokens/s", "size", "updated, UTC")
_LEAST = ("updated, UTC", "size", "tokens")  # left out of a terminal that is too narrow, the first one first


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command()(report)
    app.command("runs")(runs_command)
    app.command()(show)
    app.command()(compare)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    to: Annotated[
        Path | None, typer.Option("-o", "--to", help="HTML file to write; default: report.html in the first run.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the page on http://127.0.0.1, refreshed while the run goes on.")
    ] = False,
    port: PortOption = 0,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a paragraph with the main numbers of each run; write no page.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="INSTANCE:N", help="Machines of the run: shows its plan and dollars beside actual."),
    ] = None,
    price: PriceOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Write what happened in a run, finished or not, as one HTML page that needs no network."""
    from hlat.reporting import Machines, ReportServer, summary_markdown

    ready(works=True)
    if sum((serve, markdown, to is not None)) > 1:
        raise LaunchError("--serve and --markdown write no file: give one of --serve, --markdown and -o FILE.")
    machines = None if cluster is None else Machines(cluster, price, None if hardware is None else str(hardware))
    if markdown:
        say(summary_markdown(runs, machines))
        return
    if not serve:
        with opening_line("writing the report"):
            written = hlat.report(runs, to, cluster=cluster, price=price, hardware=hardware)
        say(f"report: {written}")
        return
    server = ReportServer(runs, machines, port)
    say(f"report: {server.url} (Ctrl-C ends)")
    server.serve()


def runs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of runs.")] = Path("runs"),
    as_json: JsonOption = False,
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
    rows = [_COLUMNS, *map(_cells, found)]
    for name in _LEAST if sys.stdout.isatty() else ():
        if max(map(len, aligned(rows))) <= columns(sys.stdout):
            break
        at = rows[0].index(name)
        rows = [(*row[:at], *row[at + 1 :]) for row in rows]
    for line in aligned(rows):
        say(line)


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


_WIDTH = 42  # columns of a curve: with its numbers it fits a terminal of 80
_MOST_CHECKPOINTS = 8
_FORMATS = {
    "step": "{:,.0f}",
    "tokens": "{:,.0f}",
    "loss": "{:.4f}",
    "val_loss": "{:.4f}",
    "val_bits_per_byte": "{:.4f}",
    "tokens_per_second": "{:,.0f}",
    "mfu": "{:.1%}",
    "memory_bytes": "{:,.0f}",
}


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    as_json: JsonOption = False,
    verbose: AllOption = False,
) -> None:
    """Show a run: state, parent and forks, attempts, recipe, curve, last numbers, checkpoints."""
    ready()
    if verbose:
        be_verbose()
    found = hlat.show_run(run)
    if as_json:
        say(_json(found.to_dict()))
        return
    for line in _overview(found):
        say(line)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of two runs or more.")],
    as_json: JsonOption = False,
    verbose: AllOption = False,
) -> None:
    """Compare runs: fields in which their recipes differ, losses at the same tokens, last numbers."""
    ready()
    if len(runs) < 2:
        raise LaunchError("hlat compare takes the folders of two runs or more; hlat show RUN shows one.")
    if verbose:
        be_verbose()
    found = hlat.compare_runs(runs)
    if as_json:
        say(_json(found.to_dict()))
        return
    for line in _comparison(found):
        say(line)


def _json(value: dict[str, Any]) -> str:
    from hlat.tracking import to_json_value

    return json.dumps(to_json_value(value), indent=2, default=str)


def _overview(run: "RunOverview") -> Iterator[str]:
    from hlat.reporting import family_lines, flat_settings, shown_settings, sparkline

    state = f"{run.status.state} ({run.status.reason})" if run.status.reason else run.status.state
    size = "" if run.parameters is None else f", {run.parameters:,} parameters"
    yield f"{escape_name(run.name)}: {state}{size}; {escape_name(str(run.folder))}"
    yield from map(escape_name, filter(None, [run.stage_words, *family_lines(run.parent, run.forks)]))
    if run.damaged_lines:
        yield f"left out: {plural(run.damaged_lines, 'damaged line')} of its files"
    # The newest ones: of a run on machines that are taken away there are hundreds.
    attempts, more = first_of(reversed([*enumerate(run.attempts, 1)]))
    yield from ([f"attempts: {len(run.attempts):,}, of which the last {len(attempts)} (-v lists all)"] if more else [])
    for number, attempt in reversed(attempts):
        yield from _attempt(number, attempt)
    losses = run.loss.losses
    if losses:
        yield f"loss {losses[0]:.4f} {sparkline(losses, _WIDTH)} {losses[-1]:.4f}, by logged steps"
    for name, value in run.numbers.items():
        yield f"  {name:<20}{_FORMATS[name].format(value)}"
    sets, more = first_of(name for name in run.validation if name != "validation")
    yield from (f"  {f'{name} loss':<20}{run.validation[name]:.4f}" for name in sets)
    yield from ([f"  {more} validation losses (-v)"] if more else [])
    yield from ([escape_name(run.forecast)] if run.forecast else [])
    if run.checkpoints:
        shown = ", ".join(f"{step:,}" for step in run.checkpoints[-_MOST_CHECKPOINTS:])
        earlier = len(run.checkpoints) - _MOST_CHECKPOINTS
        yield f"checkpoints of steps {shown}" + (f" and {earlier} earlier ones" if earlier > 0 else "")
    usual = {} if is_verbose() else _default_settings()
    head = "recipe, where it differs from the defaults (-v lists all):" if usual else "recipe:"
    yield head if run.settings else "recipe: unknown"
    given = {field: text for field, text in flat_settings(run.settings).items() if text != "null"}
    fields, more = shown_settings({field: text for field, text in given.items() if usual.get(field) != text})
    yield from (f"  {field} = {escape_name(_cut(text))}" for field, text in fields)
    yield from ([f"  {more}"] if more else [])


def _default_settings() -> dict[str, str]:
    from hlat.config import Recipe
    from hlat.reporting import flat_settings

    sizes = {"vocab_size": 2, "layers": 1, "hidden_size": 2, "intermediate_size": 1, "heads": 1}
    required = {"model": sizes, "data": {"path": "text"}, "training": {"steps": 1}}
    fields = flat_settings(Recipe.model_validate(required).model_dump(mode="json"))
    return {field: text for field, text in fields.items() if field not in flat_settings(required)}


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS or is_verbose() else f"{text[:_MOST_CHARACTERS]}..."


def _attempt(number: int, attempt: Mapping[str, Any]) -> Iterator[str]:
    # Records of other versions may lack any field.
    git, found = attempt.get("git"), attempt.get("versions")
    versions = found if isinstance(found, dict) else {}
    overrides, changes = (each if isinstance(each := attempt.get(n), list) else [] for n in ("overrides", "changes"))
    made = ", ".join(f"{n} {versions[n]}" for n in ("hlat", "torch", "python") if n in versions)
    commit = ""
    if isinstance(git, dict):
        commit = f"; git {str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"
    when = str(attempt.get("time", ""))[:19].replace("T", " ")
    where = f"{attempt.get('processes', '?')} x {attempt.get('device', '?')} on {attempt.get('host', '?')}"
    yield escape_name(f"attempt {number}, {when} UTC: {where}; {made}{commit}")
    yield escape_name(f"  recipe {attempt.get('recipe')} {' '.join(map(str, overrides))}".rstrip())
    for change in changes:
        if isinstance(change, dict):
            old, new = (_cut(repr(change.get(name))) for name in ("old", "new"))
            yield escape_name(f"  changed: {change.get('path')}: {old} -> {new}")


def _comparison(found: "RunComparison") -> Iterator[str]:
    from hlat.reporting import shown_settings

    names = [escape_name(str(run.folder)) for run in found.runs]
    fields, more = shown_settings(found.recipe)
    rows = [[field, *("-" if value is None else escape_name(_cut(value)) for value in values)]
            for field, values in fields]  # fmt: skip
    yield from aligned([["recipe", *names], *(rows or [["(equal)", *("" for _ in names)]])])
    yield from ([more] if more else [])
    yield ""
    if found.curve:
        yield from aligned([["loss at tokens", *names], *(_losses(row) for row in found.curve)])
        if any(flag for row in found.curve for flag in row.interpolated):
            yield "~ between two logged steps of that run: they have logged no loss at the same tokens"
        yield ""
    last = [["last", *names], ["state", *(run.status.state for run in found.runs)]]
    if any(run.stage for run in found.runs):
        last.append(["stage", *(escape_name(run.stage) or "-" for run in found.runs)])
    for name, form in _FORMATS.items():
        values = [run.numbers.get(name, math.nan) for run in found.runs]
        if not all(math.isnan(value) for value in values):
            last.append([name, *("-" if math.isnan(value) else form.format(value) for value in values)])
    every = dict.fromkeys(name for run in found.runs for name in run.validation if name != "validation")
    sets, more = first_of(every, TABLE_ROWS)
    for name in sets:
        texts = (f"{run.validation[name]:.4f}" if name in run.validation else "-" for run in found.runs)
        last.append([f"{escape_name(name)} loss", *texts])
    yield from aligned(last)
    yield from ([f"{more} validation losses (-v)"] if more else [])


def _losses(row: "LossesAt") -> list[str]:
    marked = zip(row.losses, row.interpolated, strict=True)
    return [f"{row.tokens:,.0f}", *(f"{'~' if flag else ''}{loss:.4f}" for loss, flag in marked)]
