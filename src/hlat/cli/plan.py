"""``hlat plan`` and ``hlat rehearse``: what a run will need, before anything is started.

plan      model, --cluster or --chips -> layout, time, memory and cost by the cost model
rehearse  recipe -> a dry run of the real program at full size on this machine, with tensors that take no memory
"""

import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

import hlat
from hlat.cli.options import (
    HardwareOption,
    JsonOption,
    PriceOption,
    StageOption,
    WorldOption,
    check_outputs,
    write_output,
)
from hlat.cli.terminal import OverridesArgument, RecipeArgument, count, opening_line, ready, say
from hlat.runtime.terminal import escape_name, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hlat.hardware import Cluster
    from hlat.planner import ClusterComparison, LayoutPrediction, ModelSize, PlanQuestion, Purchase, TrainingPlan
    from hlat.rehearsal import Rehearsal


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command("plan", cls=_Plan)(plan_command)
    app.command()(rehearse)


_PANELS = {
    "Run and layout": ("sequence_length", "global_batch", "precision", "layout", "against", "search"),
    "Machines and prices": (
        *("per", "hardware", "quotes", "prices_of", "interruptions"),
        *("storage", "network", "pue", "rank_by"),
    ),
    "Other questions": ("grid", "flops", "inference_tokens", "ladder"),
    "Files": ("trace", "fragment"),
}
"""Groups of options in help; the usual ones are in none of them, and on its first page."""


class _Plan(TyperCommand):
    """Verb whose help lists its options in groups."""

    def get_params(self, ctx: Any) -> Any:
        params: list[Any] = super().get_params(ctx)
        for each in params:
            each.rich_help_panel = next((panel for panel, names in _PANELS.items() if each.name in names), None)
        return params


QuotesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Prices of your own, a CSV file; hlat hardware quotes prints one.")
]
LadderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Ladder of small runs, whose law forecasts the loss and chooses the size of a model."
    ),
]


def plan_command(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Preset, config.json, recipe file or its name.")
    ] = None,
    cluster: Annotated[
        list[str] | None, typer.Option(metavar="INSTANCE:N", help="As in trn1.32xlarge:64; repeat to compare.")
    ] = None,
    chips: Annotated[
        str | None, typer.Option(metavar="INSTANCE", help="Instead: how many of these; or of any.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --chips: longest time, 36h or 14d.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="USD", help="With --chips: highest cost, as in 50k.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Tokens of the whole run, as in 300B.")] = None,
    price: PriceOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the choice.")] = False,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="HTML page to write, with pictures.")] = None,
    as_json: JsonOption = False,
    sequence_length: Annotated[int | None, count("Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, count("Sequences per step.")] = None,
    precision: Annotated[str | None, typer.Option(help="Precision mode, as in a recipe.")] = None,
    layout: Annotated[str | None, typer.Option(help="Predict this layout only, as in tp=8,pp=1,zero=1.")] = None,
    against: Annotated[str | None, typer.Option(help="Compare the choice with this layout.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Choose the micro-batch and recomputation of a recipe too.")
    ] = False,
    per: Annotated[str | None, typer.Option(help="What N counts: instance (the default) or chip.")] = None,
    hardware: HardwareOption = None,
    quotes: QuotesOption = None,
    prices_of: Annotated[str | None, typer.Option(help="Month whose prices are used, as in 2024-04.")] = None,
    interruptions: Annotated[
        float | None, typer.Option(help="Interruptions per instance and day, as of spot instances.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Rate of the shared file system, as in 5GB/s (whole cluster) or 2GB/s/instance.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Rate of a machine to others, as in 400 GB/s, 3200 Gb/s or 8x400 Gb/s.")
    ] = None,
    pue: Annotated[float | None, typer.Option(help="Power usage effectiveness, for the energy, as in 1.2.")] = None,
    rank_by: Annotated[str | None, typer.Option(help="Order several clusters by time or by cost.")] = None,
    grid: Annotated[
        str | None,
        typer.Option(help="Instead of --model: models and sizes, as in 1b,7b,70b, on each --cluster."),
    ] = None,
    flops: Annotated[
        str | None, typer.Option(help="With --chips and no model: size of a model for so many FLOPs, as in 1e22.")
    ] = None,
    inference_tokens: Annotated[
        str | None, typer.Option(help="Without a model: tokens that it will generate, as in 1T.")
    ] = None,
    ladder: LadderOption = None,
    trace: Annotated[Path | None, typer.Option(help="Write the simulated step as a Chrome trace.")] = None,
    fragment: Annotated[Path | None, typer.Option(help="Write the layout as sections of a recipe.")] = None,
) -> None:
    """Choose the layout of a run, and predict its time, memory, cost and goodput."""
    options = locals()
    from hlat.planner import PlanQuestion, check_options, compare_clusters  # before ready(), which lets Ctrl-C in

    ready()
    if grid is not None:
        _say_grid(grid, options, to, as_json=as_json)
        return
    check_options(options)
    if chips is not None:
        _say_choice(PlanQuestion.of_options(options), options, as_json=as_json)
        return
    check_outputs((to, trace, fragment))
    with opening_line("planning"):
        compared = compare_clusters(PlanQuestion.of_options(options))
    _say_plans(compared, as_json=as_json, words=explain)
    if per is None and not as_json:
        say_units(plan.request.cluster for plan in compared.plans)
    _write_files(compared, to, trace, fragment)


def _say_grid(models: str, options: "Mapping[str, Any]", html: Path | None, *, as_json: bool) -> None:
    from hlat.planner import PlanQuestion, check_grid_options, grid_lines, grid_page, plan_grid

    check_grid_options(options)
    check_outputs((html,))
    gc.freeze()  # as for a choice
    with opening_line("planning"):
        found = plan_grid(models, PlanQuestion.of_options(options))
    if html is not None:
        write_output(html, grid_page(found))
    for line in [json.dumps(found.to_dict(), indent=2)] if as_json else map(escape_name, grid_lines(found, _columns())):
        say(line)


# A plan on the chosen cluster takes all other options of the question, in the order of their declaration.
_OF_THE_CHOICE = {"cluster", "chips", "deadline", "budget", "flops", "inference_tokens", "explain", "as_json"}


def _say_choice(question: "PlanQuestion", options: "Mapping[str, Any]", *, as_json: bool) -> None:
    """Print a choice of cluster or of a model's size, and the command that plans its run."""
    from hlat.planner import (
        choose_cluster,
        choose_model_size,
        command_lines,
        model_size_json,
        model_size_lines,
        purchase_json,
        purchase_lines,
    )

    gc.freeze()  # what was imported stays; a question makes many small objects
    found: Purchase | ModelSize
    if question.model is None:
        with opening_line("planning"):
            found = choose_model_size(question)
        content, lines = model_size_json(found), model_size_lines(found, _columns())
    else:
        with opening_line("planning"):
            found = choose_cluster(question)
        content, lines = purchase_json(found), purchase_lines(found, _columns())
    if as_json:
        say(json.dumps(content, indent=2))
        return
    for line in lines:
        say(escape_name(line))
    say("\n* the choice. Its plan:")
    run = found.chosen.request
    chosen = {"model": run.name, "tokens": options["tokens"] or (run.tokens if found.affords else None)}
    values = {**options, **chosen, "price": options["price"] or found.price}
    given = [name for name, value in values.items() if value not in (None, False) and name not in _OF_THE_CHOICE]
    words = [word for name in given for word in (f"--{name.replace('_', '-')}", str(values[name])) if word != "True"]
    command = ["hlat", "plan", *words, "--cluster", run.cluster.name, "--explain"]
    for line in command_lines(command, _columns()):
        say(line)


def _columns() -> int:
    from hlat.planner import WIDE

    # The width of the terminal, or COLUMNS; wide where the output is not a terminal, so that programs find whole lines.
    return shutil.get_terminal_size((WIDE, 24)).columns


def say_units(clusters: "Iterable[Cluster]") -> None:
    """Say what N counts, where the name of an instance is that of a chip."""
    for cluster in clusters:
        if cluster.count > 1 and cluster.instance.chips > 1 and "." not in cluster.instance.name:
            say(f"{cluster.name} means {cluster.count:,} instances, {cluster.chips:,} chips; --per chip counts chips")
        elif cluster.count > 1 and cluster.instance.up_to and cluster.instance.chips == 1:
            several = f"8x{cluster.instance.name}:1"
            say(f"{cluster.name} means {cluster.count:,} machines of one chip; one machine of several is {several}")


def _say_plans(found: "ClusterComparison", *, as_json: bool, words: bool) -> None:
    from hlat.planner import comparison_lines, plan_lines, plan_words

    if as_json:
        content = found.to_dict()
        say(json.dumps(content[0] if len(content) == 1 else content, indent=2))
        return
    plans = list(found.plans)
    columns = _columns()

    def say_words(plan: "TrainingPlan", other: "LayoutPrediction | None") -> None:
        for sentence, indent in plan_words(plan, words, other):
            for line in wrapped(sentence, columns, indent):
                say(line)

    for line in plan_lines(plans, columns, layouts=words or len(plans) == 1):
        say(escape_name(line))
    for plan in plans:
        say()
        say_words(plan, found.against.get(plan.request.cluster.name))
        for name, stage in plan.stages.items() if words else ():
            say(f"\nstage {name}")
            for line in plan_lines([stage], columns):
                say(escape_name(line))
            say_words(stage, None)
    for sentence in comparison_lines(plans):
        for line in wrapped(sentence, columns, 2):
            say(line)
    for line in found.refused.values():
        say(line)


def _write_files(found: "ClusterComparison", html: Path | None, trace: Path | None, recipe: Path | None) -> None:
    from hlat.planner import chrome_trace, html_page

    plans = found.plans
    contents: list[tuple[Path, str]] = []
    if html is not None:
        contents.append((html, html_page(plans, found.refused.values())))
    if trace is not None:
        contents.append((trace, json.dumps(chrome_trace(plans[0]))))
    if recipe is not None:
        contents.append((recipe, plans[0].fragment()))
    for path, content in contents:
        write_output(path, content)


_WIDE = 120  # columns of output that no terminal shows
_DOES_NOT_FIT = 1  # exit code, as of an examination that finds something bad


def rehearse(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    world: WorldOption = None,
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
            help="Take the decisions of this device: neuron, cuda:h100 or another chip of the catalog; default: that "
            "of --cluster, else the CPU.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="INSTANCE:N", help="Cluster to simulate: does the run fit, how long does a step take. Sets --world."
        ),
    ] = None,
    hardware: HardwareOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write operations and messages as a Chrome trace: in time with --cluster, else in order."),
    ] = None,
    stage: StageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a training step of some ranks without devices: memory, communication, FLOPs, decisions, and errors."""
    check_outputs((trace,))
    # Before the slow imports: a wrong recipe is refused at once.
    asked = hlat.load_recipe(recipe, overrides or [])
    stages: list[str | None] = [stage]
    if stage is None and asked.stages:
        stages = [each.name for each in asked.stages]
    if trace is not None and len(stages) > 1:
        raise typer.BadParameter(
            f"--trace writes the step of one stage: name it with --stage, as in --stage {stages[0]}"
        )
    from hlat.rehearsal import RankReport, report_lines

    ready()
    width = shutil.get_terminal_size((_WIDE, 24)).columns if sys.stdout.isatty() else _WIDE

    def show(report: RankReport) -> None:
        if not as_json:
            say("\n".join(report_lines(report, width)))

    contents, all_fit = list[dict[str, Any]](), True
    for name in stages:
        if asked.stages and not as_json:
            say(f"stage {name}")
        with opening_line("rehearsing"):
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
                stage=name,
            )
        if trace is not None:
            _write_trace(trace, json.dumps(found.chrome_trace()))
        contents.append({"stage": name, **found.to_dict()} if asked.stages else found.to_dict())
        if not as_json:
            _say_all(found, asked.precision.mode, width)
        all_fit = all_fit and (found.verdict is None or found.verdict.fits)
    if as_json:
        say(json.dumps({"stages": contents} if len(contents) > 1 else contents[0], indent=2))
    if not all_fit:
        raise typer.Exit(_DOES_NOT_FIT)


def _say_all(found: "Rehearsal", asked_mode: str, width: int) -> None:
    from hlat.rehearsal import decision_lines, note_lines, time_lines, verdict_lines

    notes = note_lines(found, asked_mode, width)
    for line in (*decision_lines(found, width), *notes, *time_lines(found, width), *verdict_lines(found, width)):
        say(line)


def _write_trace(path: Path, content: str) -> None:
    from hlat.runtime.errors import StorageError
    from hlat.runtime.storage.local_files import write_atomic

    try:
        write_atomic(path, content.encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
