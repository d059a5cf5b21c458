"""Check that the packages which a recipe names are here, before any process of a run starts.

    recipe -> packages of hosted trackers are found; a process of its own imports the components of other packages
           -> RecipeError or LaunchError with the package's name

The supervisor does not import them itself: it stays small, and without torch.
"""

import json
import subprocess
import sys

from hlat.config import Problem, Recipe, RecipeError
from hlat.runtime.errors import LaunchError
from hlat.tracking import check_installed

_SHOWN = 1000  # last characters of what a failing import printed


def check_extensions(recipe: Recipe) -> None:
    """Check hosted trackers and components of other packages.

    Raises:
        LaunchError: the package of a hosted tracker is not installed, or importing a component ended the process.
        RecipeError: components are not there, or cannot be imported, or their options are invalid; lists all of them.
    """
    check_installed(recipe.tracking)
    if not recipe.training.components:
        return
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], input=recipe.model_dump_json(), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        names = ", ".join(recipe.training.components)
        raise LaunchError(
            f"training.components: importing {names} ended its process with exit code {done.returncode}: "
            f"{done.stderr[-_SHOWN:].strip()}"
        )
    if problems := json.loads(lines[-1]):  # a package may print when it is imported
        raise RecipeError([Problem(**problem) for problem in problems])


def main() -> None:
    """Import the components of the recipe on standard input; print their problems as a line of JSON."""
    from hlat.training import installed_components  # noqa: PLC0415  (imports torch)

    problems: list[dict[str, object]] = []
    try:
        installed_components(Recipe.model_validate_json(sys.stdin.read()))
    except RecipeError as error:
        for each in error.problems:
            value = {"value": each.value, "has_value": True} if each.has_value else {}
            problems.append({"path": each.path, "reason": each.reason, "remedy": each.remedy, **value})
    print("\n" + json.dumps(problems))  # noqa: T201
