"""``hlat plan``: layout, time, memory and cost of a run, before anything is started."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hlat.cli.common import ready, say
from hlat.cli.hardware import HardwareOption
from hlat.cli.plan_options import check_outputs, parse_tokens
from hlat.runtime import escape_name

if TYPE_CHECKING:
    from hlat.planner.report import ClusterComparison
    from hlat.planner.search import LayoutPrediction, TrainingPlan

_GIB = 1 << 30
_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved-1f1b": "interleaved",
    "interleaved-zero-bubble": "zero bubble",
    "zbv": "zbv",
}
"""Short names of schedules, for the table."""


def register(app: typer.Typer) -> None:
    """Add the verb of this module."""
    app.command("plan")(plan_command)


def plan_command(
    model: Annotated[
        str | None, typer.Option(help="Preset, config.json, recipe file, or the name of a shipped recipe.")
    ] = None,
    cluster: Annotated[
        list[str] | None, typer.Option(help="INSTANCE:N, as in trn1.32xlarge:64; several are compared.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the whole run, as in 300B or 3e11.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision mode, as in a recipe.")] = None,
    price: Annotated[str | None, typer.Option(help="on-demand, capacity-block, reserved, spot or own.")] = None,
    rank_by: Annotated[str | None, typer.Option(help="Order several clusters by time or by cost.")] = None,
    layout: Annotated[str | None, typer.Option(help="Predict this layout only, as in tp=8,pp=1,zero=1.")] = None,
    against: Annotated[str | None, typer.Option(help="Compare the choice with this layout.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the choice.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with pictures.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the simulated step as a Chrome trace.")] = None,
    fragment: Annotated[Path | None, typer.Option(help="Write the layout as sections of a recipe.")] = None,
    validate: Annotated[Path | None, typer.Option(help="Predict every run of a CSV file and print the errors.")] = None,
    hardware: HardwareOption = None,
) -> None:
    """Choose the layout of a run, and predict its time, memory, cost and goodput."""
    import hlat.planner.report  # while Ctrl-C cannot interrupt it
    from hlat.runtime import PlanError

    ready()
    if validate is not None:
        if model is not None or cluster:
            raise PlanError("--validate predicts the runs of a file; it takes no --model and no --cluster")
        _validate(validate, as_json)
        return
    if model is None or not cluster:
        raise PlanError("hlat plan needs --model and --cluster, or --validate FILE")
    check_outputs((html, trace, fragment))
    found = hlat.compare_plans(
        model,
        cluster,
        tokens=parse_tokens(tokens),
        sequence=seq,
        global_batch=global_batch,
        precision=precision,
        price=price,
        rank_by=rank_by,
        layout=layout,
        against=against,
        hardware=hardware,
    )
    _say(found, as_json=as_json, words=explain)
    _write(list(found.plans), html, trace, fragment)


def _say(found: "ClusterComparison", *, as_json: bool, words: bool) -> None:
    from hlat.planner.report import comparison_lines

    if as_json:
        content = found.to_dict()
        say(json.dumps(content[0] if len(content) == 1 else content, indent=2))
        return
    plans = list(found.plans)
    _say_table(plans)
    for plan in plans:
        _say_words(plan, words, found.against.get(plan.request.cluster.name))
    for line in [*comparison_lines(plans), *found.refused.values()]:
        say(line)


def _say_table(plans: list["TrainingPlan"]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hlat.planner.report import pareto_front_of_plans
    from hlat.planner.search import format_number, layout_json

    front = {id(one) for _, one in pareto_front_of_plans(plans)}
    table = Table(box=None, pad_edge=False)
    names = (
        "cluster",
        "tp",
        "pp",
        "dp",
        "cp",
        "v",
        "schedule",
        "zero",
        "mbs",
        "acc",
        "recompute",
        "GiB",
        "step s",
        "tok/s/chip",
    )
    for name in (*names, "MFU", "days", "USD", "goodput", "front"):
        table.add_column(name, justify="right" if name not in ("cluster", "schedule", "recompute") else "left")
    for one in plans:
        for index, planned in enumerate([one.chosen, *one.alternatives]):
            said = layout_json(one.request, planned)
            cost = "" if planned.cost_usd is None else format_number(planned.cost_usd, 0)
            table.add_row(
                Text(
                    escape_name(one.request.cluster.name) if index == 0 else ""
                ),  # as plain text: rich markup in it has no effect
                *(str(said[name]) for name in ("tensor", "pipeline", "data", "context", "virtual_stages")),
                _SCHEDULES[said["schedule"]] if said["pipeline"] > 1 else "",
                str(said["zero"]),
                str(said["micro_batch"]),
                str(said["accumulation"]),
                said["activation_checkpointing"],
                f"{said['memory_gib']:.1f}",
                format_number(planned.step_seconds),
                f"{said['tokens_per_second_per_chip']:,.0f}",
                f"{planned.mfu:.1%}",
                format_number(planned.days),
                cost,
                f"{planned.goodput:.1%}",
                "*" if id(planned) in front else "",
                style="bold" if index == 0 else "",
            )
    console = Console(width=None if Console().is_terminal else 160)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().rstrip("\n").split("\n"):
        say(line.rstrip())
    say("* no other row is better in time, cost and memory at once" if len(front) > 1 else "")


def _say_words(plan: "TrainingPlan", words: bool, other: "LayoutPrediction | None") -> None:
    from hlat.planner.report import comparison_with, explain
    from hlat.planner.search import fits

    request, said = plan.request, plan.assumptions()
    say()
    devices, steps = f"{request.cluster.devices:,} devices", f"{request.steps:,} steps"
    say(f"{request.name} on {request.cluster.name}: {devices}, {steps}, precision {request.mode}")
    for one in request.assumed:
        say(f"  assumed    {one}")
    price = (
        "not known"
        if said["usd_per_hour"] is None
        else f"{said['usd_per_hour']:,.2f} USD per hour, {said['price_kind']}"
    )
    say(f"  price      {price}")
    say(
        f"  failures   one in {said['mean_hours_between_failures']:.1f} hours; save every "
        f"{said['checkpoint_every_steps']:,} steps; goodput {plan.chosen.goodput:.1%} by Daly's formula, "
        f"{plan.goodput_simulated[0]:.1%} simulated, {plan.goodput_simulated[1]:.1%} in the worst tenth of runs"
    )
    if not fits(request, plan.chosen):
        need = plan.chosen.peak_memory / _GIB
        say(f"  memory     DOES NOT FIT: {need:.1f} GiB of {said['memory_gib_per_device']} GiB")
    for line in explain(plan) if words else []:
        say(f"  {line}")
    if other is not None:
        say(f"  {comparison_with(plan, other)}")


def _write(plans: list["TrainingPlan"], html: Path | None, trace: Path | None, recipe: Path | None) -> None:
    from hlat.planner.report import chrome_trace, html_page
    from hlat.planner.search import fits, recipe_fragment
    from hlat.runtime import StorageError

    contents: list[tuple[Path, str]] = []
    if html is not None:
        contents.append((html, html_page(plans)))
    if trace is not None:
        contents.append((trace, json.dumps(chrome_trace(plans[0]))))
    if recipe is not None:
        first = plans[0]
        fits_in = fits(first.request, first.chosen)
        contents.append((recipe, recipe_fragment(first.request, first.chosen.candidate, fits_in=fits_in)))
    for path, content in contents:
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error}") from error


def _validate(path: Path, as_json: bool) -> None:
    from hlat.planner.calibration import prediction_errors

    result = prediction_errors(path)
    if as_json:
        say(json.dumps(result, indent=2))
        return
    for title, errors in (("tokens per second, by source", result), ("memory, by source", result["memory"])):
        say(f"{title:60} {'n':>5} {'mean':>7} {'median':>7} {'90%':>7}")
        for name, one in (*errors["groups"].items(), ("all", errors["overall"])):
            if one["n"]:
                say(f"{name[:60]:60} {one['n']:5} {one['mean']:7.1%} {one['median']:7.1%} {one['p90']:7.1%}")
    for reason, count in result["skipped"]["reasons"].items():
        say(f"skipped {count:5}: {reason}")
