"""Pages of the reference, generated from the code each time that the site is built: they cannot go out of date.

recipe schema, command line, docstrings, errors, records of events --this package--> Markdown of docs/reference/

python -m website.reference FOLDER    write the pages to a folder, to read them without the site
"""

from collections.abc import Callable

from website.reference.commands import commands_page
from website.reference.exit_codes import exit_codes_page
from website.reference.python import python_page
from website.reference.recipe import recipe_page
from website.reference.run_files import events_page, metrics_page

PAGES: dict[str, Callable[[], str]] = {
    "reference/recipe.md": recipe_page,
    "reference/commands.md": commands_page,
    "reference/metrics.md": metrics_page,
    "reference/events.md": events_page,
    "reference/exit-codes.md": exit_codes_page,
    "reference/python.md": python_page,
}
"""Path below docs/ -> function that returns the page."""

__all__ = ["PAGES"]
