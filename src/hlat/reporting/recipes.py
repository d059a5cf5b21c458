"""Recipes in a report: the fields of one, and the fields in which several differ."""

from collections.abc import Sequence

from hlat.page import Html, details, paragraph, section, table
from hlat.reporting.overview import flat_settings
from hlat.reporting.run_record import RunRecord

_ABSENT = "not in this recipe"


def recipe_section(run: RunRecord) -> Html:
    """Show the resolved recipe, and the changes with which the run was resumed."""
    contents = []
    changes = [
        (str(change.get("path")), f"{event.step or 0:,}", repr(change.get("old")), repr(change.get("new")))
        for event in run.of_kind("resume")
        for change in event.fields.get("changes") or ()
        if isinstance(change, dict)
    ]
    if changes:
        columns = ("field", "resumed at step", "before", "after")
        contents.append(table(columns, changes, caption="Changes of the recipe while resuming"))
    if run.settings:
        rows = list(flat_settings(run.settings).items())
        contents.append(details("Resolved recipe", table(("field", "value"), rows, caption="Resolved recipe")))
    else:
        contents.append(paragraph("The resolved recipe is unknown."))
    return section("Recipe", contents, level=3)


def recipe_diff_section(runs: Sequence[RunRecord]) -> Html:
    """Show the fields in which the recipes of several runs differ; empty for one run."""
    if len(runs) < 2:
        return ""
    flat = [flat_settings(run.settings) for run in runs]
    fields = dict.fromkeys(field for settings in flat for field in settings)
    rows = []
    for field in fields:
        values = [settings.get(field, _ABSENT) for settings in flat]
        if len(set(values)) > 1:
            rows.append((field, *values))
    names = ("field", *(run.name for run in runs))
    contents = [table(names, rows, caption="Fields in which the recipes differ")] if rows else []
    return section("Recipe diff", contents or [paragraph("The recipes are equal.")])
