"""A run in a few numbers: the headline of its page, a paragraph of Markdown, a table of several runs.

RunRecord, Machines --run_facts--> RunFacts --headline_section--> the numbers at the top of the page
                                            --summary_markdown--> one paragraph for a pull request or a chat
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hlat.page import Html, duration, format_value, headline, paragraph, table
from hlat.reporting.planned_and_actual import Machines, measure_progress, median
from hlat.reporting.report_sections import goodput_seconds
from hlat.reporting.run_record import RunRecord, read_run, shown
from hlat.reporting.run_status import forecast_range, last_stage, parameters_of, stage_words
from hlat.runtime.quantities import short_count, usd_text


class RunFact(NamedTuple):
    """A main number of a run; ``value`` is empty if it is unknown."""

    name: str
    value: str
    note: str = ""


def run_facts(run: RunRecord, machines: Machines | None) -> list[RunFact]:
    """Return the main numbers of a run, the most important first; HardwareError, PlanError."""
    if not run.metrics:
        return [RunFact("State", run.status.state, run.status.reason)]
    progress, last = measure_progress(run), run.last
    bits = shown(last("val_bits_per_byte"), lambda found: f"{format_value(found)} bits per byte")
    left = f"about {duration(progress.left)} left" if progress.left and run.status.goes_on else ""
    return [
        RunFact("State", run.status.state, run.status.reason if run.status.state != "running" else left),
        RunFact("Model", shown(parameters_of(run.events), short_count), "parameters"),
        RunFact("Tokens", shown(last("tokens"), short_count), _steps(run)),
        RunFact("Loss", shown(last("loss"), format_value), "training, last step"),
        RunFact("Validation loss", shown(last("val_loss"), format_value), bits),
        *_forecast(run),
        RunFact("Time", duration(progress.elapsed), _machine(run)),
        RunFact("Speed", shown(progress.rate, short_count), "tok/s" + shown(median(run, "mfu"), ", MFU {:.1%}".format)),
        *_goodput(run),
        *_cost(progress.elapsed, machines),
    ]


def _steps(run: RunRecord) -> str:
    steps = f"step {run.step:,}" + shown(run.recipe, lambda recipe: f" of {recipe.total_steps:,}")
    return ", ".join(filter(None, (steps, stage_words(run.settings, last_stage(run.events)))))


def _forecast(run: RunRecord) -> list[RunFact]:
    found = forecast_range(run.events)
    return [] if found is None else [RunFact("Forecast", *found)]


def _machine(run: RunRecord) -> str:
    begun = next((event for event in reversed(run.events) if event.begins), None)
    if begun is None or not begun.words("device"):
        return ""
    count = int(begun.number("processes") or 1)
    return begun.words("device") if count == 1 else f"{count} × {begun.words('device')}"


def _goodput(run: RunRecord) -> list[RunFact]:
    seconds = goodput_seconds(run)
    total = sum(seconds.values())
    restarts = len(run.of_kind("resume")) - len(run.of_kind("fork"))  # the first resume of a fork is its start
    words = f", {restarts} restart{'s' if restarts > 1 else ''}" if restarts > 0 else ""
    if total:
        share = seconds.get("productive", 0.0) / total
        return [RunFact("Goodput", f"{share:.0%}", f"of the time in useful steps{words}")]
    return [RunFact("Restarts", str(restarts))] if restarts > 0 else []


def _cost(elapsed: float, machines: Machines | None) -> list[RunFact]:
    if machines is None:
        return []
    _, priced = machines.resolve()
    if priced is None:
        return []
    kind, hourly = priced
    return [RunFact("Cost", usd_text(elapsed / 3600 * hourly), f"{usd_text(hourly, 4)} per hour, {kind}")]


def headline_section(runs: Sequence[RunRecord], machines: Machines | None) -> Html:
    """Show the main numbers of one run, or a table of several, the one with the least loss marked."""
    facts = [run_facts(run, machines) for run in runs]
    if not any(run.metrics for run in runs):
        return Html("\n").join([*map(headline, facts), paragraph("No step has been logged yet.")])
    if len(runs) == 1:
        return headline(facts[0])
    found = dict.fromkeys(fact.name for each in facts for fact in each if fact.value)
    # Losses first: a phone shows the first columns.
    names = sorted(found, key=lambda name: not name.lower().endswith("loss"))
    values = [{fact.name: fact.value for fact in each} for each in facts]
    rows = [(run.name, *(each.get(name, "") for name in names)) for run, each in zip(runs, values, strict=True)]
    return table(("run", *names), rows, caption="Runs; the least loss is marked", marked=_best(runs))


def _best(runs: Sequence[RunRecord]) -> int | None:
    # Validation losses are compared only if every run has one.
    name = "val_loss" if all(run.last("val_loss") is not None for run in runs) else "loss"
    losses = [(value, number) for number, run in enumerate(runs) if (value := run.last(name)) is not None]
    return min(losses)[1] if losses else None


def summary_markdown(folders: Sequence[Path], machines: Machines | None = None) -> str:
    """Describe runs in a paragraph of Markdown each; errors as ``report_page``."""
    return "\n\n".join(_paragraph(run, machines) for run in (read_run(folder) for folder in folders))


def _paragraph(run: RunRecord, machines: Machines | None) -> str:
    facts = run_facts(run, machines)
    words = [_words(fact) for fact in facts[1:] if fact.value]
    reason = f" ({_escaped(facts[0].note)})" if facts[0].note else ""
    return f"**{_escaped(run.name)}**: {facts[0].value}{reason}" + (f"; {', '.join(words)}." if words else ".")


def _words(fact: RunFact) -> str:
    note = f" ({_escaped(fact.note)})" if fact.note and fact.name not in ("Loss", "Model", "Speed") else ""
    forms = {"Model": "{} parameters", "Tokens": "{} tokens", "Speed": f"{{}} {_escaped(fact.note)}"}
    return forms.get(fact.name, f"{fact.name.lower()} {{}}").format(_escaped(fact.value)) + note


def _escaped(text: str) -> str:
    # Names are untrusted: none becomes a link, an image, HTML or emphasis.
    return re.sub(r"([\\`*_\[\]<>|!#&~])", r"\\\1", " ".join(text.split()))
