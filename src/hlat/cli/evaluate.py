"""``hlat evaluate`` and ``hlat generate``: validation loss and tasks of a checkpoint, and text from it."""

import json
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hlat.cli.options import JsonOption
from hlat.cli.terminal import (
    CheckpointArgument,
    QuietOption,
    WeightsOption,
    complain,
    count,
    opening_line,
    ready,
    say,
)
from hlat.runtime.errors import LaunchError
from hlat.runtime.terminal import TABLE_ROWS, escape_name, first_of, listed

if TYPE_CHECKING:
    from hlat.evaluation import EvaluatedCheckpoint
    from hlat.launch import EvaluationJob

_SECONDS_BETWEEN_LINES = 5.0
_IN_SANDBOX = "sandbox"
_RENDERED = ("tasks", "suite", "files", "include", "shots", "limit", "seed")
"""Options that ``--render`` takes."""


def register(app: typer.Typer) -> None:
    """Add the verbs of this module."""
    app.command(cls=_Evaluate)(evaluate)
    app.command()(generate)


class _Evaluate(TyperCommand):
    """Verb with an option whose value may be left out: click would take the next word, the checkpoint, for it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = "--allow-code-execution"
        return super().parse_args(ctx, [f"{bare}={_IN_SANDBOX}" if word == bare else word for word in args])


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        str | None, typer.Argument(help="Run folder, its checkpoints folder, or one checkpoint.", show_default=False)
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of prepared data; default: that of the run.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Run tasks of lm-eval instead, as in hellaswag,gsm8k.")] = None,
    suite: Annotated[str | None, typer.Option(help="Run a suite of tasks: hlat, offline, domain, or a file.")] = None,
    to: Annotated[str | None, typer.Option(help="Folder of the tasks' results; default: evaluation/NAME.")] = None,
    files: Annotated[str | None, typer.Option(help="Folder of data files and copied data sets.")] = None,
    include: Annotated[str | None, typer.Option(help="Folder with further tasks, as YAML files.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples per question, for --tasks; default: the tasks' own.")
    ] = None,
    limit: Annotated[int | None, count("Most samples of each task.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of examples and of sampled texts.")] = 1234,
    max_length: Annotated[
        int | None, count("Most tokens of question and answer; default: the model's maximum.", 2)
    ] = None,
    max_tokens: Annotated[int | None, count("Most tokens of a generated text; default: what the task says.")] = None,
    allow_code_execution: Annotated[
        str | None,
        typer.Option(
            metavar="[=unsafe]",
            help="Execute code that the model writes, in a sandbox; =unsafe: without one, with your rights.",
        ),
    ] = None,
    weights: WeightsOption = "model",
    dtype: Annotated[str, typer.Option(help="auto (that of the weights), float32, bfloat16 or float16.")] = "auto",
    nproc: Annotated[int | None, typer.Option(min=1, help="Number of processes for tasks on this machine.")] = None,
    tensor: Annotated[
        int, typer.Option(min=1, help="Processes that share one copy of the model (tensor parallelism).")
    ] = 1,
    batch_tokens: Annotated[int, count("Most tokens of a forward pass.")] = 2048,
    batch_rows: Annotated[int, typer.Option(min=1, help="Most texts that are generated together.")] = 64,
    render: Annotated[
        Path | None, typer.Option(help="Write the requests of --tasks or --suite to a file for evaluation.tasks.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Evaluate each checkpoint of a run on what its recipe names, as it goes on.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="With --watch: end after the checkpoints that exist.")] = False,
    as_json: JsonOption = False,
    requests: Annotated[
        list[str] | None, typer.Option(help="With --watch: a further file of requests, as in evaluation.tasks.")
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Compute loss, perplexity and bits per byte over the whole validation split; or run tasks of lm-eval.

    An evaluation of tasks that was interrupted goes on with the same command.
    """
    if render is not None:
        _render(context, render)
    elif checkpoint is None:
        raise LaunchError("name a run folder, a checkpoints folder or one checkpoint; only --render needs none.")
    elif tasks is not None or suite is not None:
        raise typer.Exit(_run_tasks(_tasks_job(context), nproc, quiet))
    elif watch:
        _refuse_others(context, "--watch", {"checkpoint", "weights", "watch", "once", "requests"})
        _watch(checkpoint, requests or [], weights, once)
    else:
        alone = "an evaluation without --tasks, --suite or --watch"
        _refuse_others(context, alone, {"checkpoint", "data", "weights", "as_json", "quiet"})
        _show_loss(checkpoint, data, weights, as_json, quiet)


def _render(context: typer.Context, file: Path) -> None:
    from hlat.launch import EvaluationJob

    _refuse_others(context, "--render", ("render", *_RENDERED))
    wanted = EvaluationJob("", **{name: context.params[name] for name in _RENDERED})
    say(f"{wanted.render(file):,} requests are in {file}")


def _tasks_job(context: typer.Context) -> "EvaluationJob":
    from hlat.launch import EvaluationJob

    options = {each.name for each in fields(EvaluationJob)}
    _refuse_others(context, "--tasks and --suite", options | {"nproc", "quiet"})
    given = {name: context.params[name] for name in options}
    allowed = given["allow_code_execution"]
    return EvaluationJob(**given | {"allow_code_execution": {_IN_SANDBOX: True, None: False}.get(allowed, allowed)})


def _watch(run: str, requests: list[str], weights: str, once: bool) -> None:
    import hlat.evaluation  # while Ctrl-C cannot interrupt it

    ready()
    hlat.watch(run, requests, weights=weights, once=once, on_result=_say_result)


def _show_loss(checkpoint: str, data: str | None, weights: str, as_json: bool, quiet: bool) -> None:
    import hlat.evaluation  # while Ctrl-C cannot interrupt it

    ready()
    from hlat.tracking import show_progress, to_json_value

    # Standard output is for the JSON alone.
    with show_progress(sys.stderr if as_json else sys.stdout, complain if as_json else say) as progress:
        result = hlat.evaluate(checkpoint, data, weights=weights, on_progress=None if quiet else progress)
    if as_json:
        say(json.dumps(to_json_value(result.to_dict()), indent=2))
        return
    say(f"validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}")
    say(f"{result.bits_per_byte:.4f} bits per byte, over {result.tokens:,} tokens")
    for what, parts in (("source", result.sources), ("set", result.sets)):
        first, more = first_of(parts.items())
        for name, part in first:
            shown = f"{what} {escape_name(name)}: loss {part.loss:.4f}, perplexity {part.perplexity:.2f}"
            say(f"{shown}, {part.bits_per_byte:.4f} bits per byte, over {part.tokens:,} tokens")
        if more:
            say(f"{more} {what}s; --json has all")


def _refuse_others(context: typer.Context, what: str, allowed: Collection[str]) -> None:
    """Raise LaunchError for options of the command line that take no part in what is to be done."""
    # Only what the user has typed: defaults are no mistake.
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = sorted(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    shown = {"checkpoint": "CHECKPOINT", "as_json": "--json"}
    others = [shown.get(name, f"--{name.replace('_', '-')}") for name in given]
    wrong = [shown for name, shown in zip(given, others, strict=True) if name not in allowed]
    if wrong:
        raise LaunchError(f"{', '.join(wrong)}: no part of {what}. See hlat evaluate --help.")


def _run_tasks(job: "EvaluationJob", nproc: int | None, quiet: bool) -> int:
    from hlat.launch import join_slurm_job, refuse_worker, run_processes, worker_context

    join_slurm_job(nproc)
    if nproc is not None and nproc > 1:
        refuse_worker(nproc)
        job.load_suite()  # reports errors before any process starts
        ready(works=True)
        outcome = run_processes(job.arguments(), nproc, job.folder)
        if outcome.message:
            complain(outcome.message)
        return outcome.exit_code
    with worker_context():
        suite = job.load_suite()
        import hlat.evaluation.harness  # noqa: F401

        ready(hears_sigterm=True, works=True)
        report = job.evaluate_here(suite, (lambda *_: None) if quiet else _progress())
    if report is not None:
        for name, value in report.columns.items():
            say(f"{name}: {value:.1f} %")
        if report.average is not None:
            say(f"average: {report.average:.1f} %")
        say(f"results: {job.folder / 'results.html'}, results.md, results.json")
    return 0


def _progress() -> Callable[[str, int, int], None]:
    """Return a function that prints a line every few seconds."""
    said_at = time.monotonic()

    def line(what: str, done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= _SECONDS_BETWEEN_LINES:
            said_at = time.monotonic()
            say(f"{what}: {done:,} of {total:,}")

    return line


def _say_result(found: "EvaluatedCheckpoint") -> None:
    # Not each source of the validation split, as in the lines of a run.
    columns = {name: value for name, value in found.result.columns().items() if not name.startswith("val/sources/")}
    say(f"step {found.step}  {listed((f'{name} {value:.4f}' for name, value in columns.items()), TABLE_ROWS, '  ')}")


def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, count("Most tokens to generate; fewer if the context is full.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the smallest set of tokens with total probability p."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    weights: WeightsOption = "model",
) -> None:
    r"""Continue a prompt. Control characters of the text are printed as escapes (\u001b), except newlines and tabs."""
    given = locals()
    import hlat.evaluation

    ready()
    with opening_line("generating"):
        new = hlat.generate(**given)
    say(prompt + new, exact=True)
