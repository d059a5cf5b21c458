"""hlat: pre-train LLaMA-class language models on the hardware you have, from one recipe file.

The functions and errors below are the Python API (docs/python.md); each is imported when it is first used. This module
imports nothing itself: an import here would run before the command handles Ctrl-C (``hlat.command``).
"""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the import
if TYPE_CHECKING:
    from hlat.api import TrainingResult as TrainingResult
    from hlat.api import average as average
    from hlat.api import choose_cluster as choose_cluster
    from hlat.api import choose_model_size as choose_model_size
    from hlat.api import compare_plans as compare_plans
    from hlat.api import compare_runs as compare_runs
    from hlat.api import compile_cache as compile_cache
    from hlat.api import doctor as doctor
    from hlat.api import draft_recipe as draft_recipe
    from hlat.api import evaluate as evaluate
    from hlat.api import evaluate_tasks as evaluate_tasks
    from hlat.api import export as export
    from hlat.api import fork as fork
    from hlat.api import generate as generate
    from hlat.api import import_model as import_model
    from hlat.api import launch_local as launch_local
    from hlat.api import load_model as load_model
    from hlat.api import load_recipe as load_recipe
    from hlat.api import metrics as metrics
    from hlat.api import plan as plan
    from hlat.api import plan_grid as plan_grid
    from hlat.api import rehearse as rehearse
    from hlat.api import report as report
    from hlat.api import runs as runs
    from hlat.api import show_run as show_run
    from hlat.api import submit_kubernetes as submit_kubernetes
    from hlat.api import submit_slurm as submit_slurm
    from hlat.api import train as train
    from hlat.api import train_ladder as train_ladder
    from hlat.api import unpack_cache as unpack_cache
    from hlat.api import watch as watch
    from hlat.config import Recipe as Recipe
    from hlat.config import RecipeError as RecipeError
    from hlat.launch import KubernetesOptions as KubernetesOptions
    from hlat.launch import PreflightOptions as PreflightOptions
    from hlat.launch import PreflightReport as PreflightReport
    from hlat.launch import SlurmOptions as SlurmOptions
    from hlat.launch import SlurmSubmission as SlurmSubmission
    from hlat.runtime.errors import CheckpointError as CheckpointError
    from hlat.runtime.errors import CheckpointFormatError as CheckpointFormatError
    from hlat.runtime.errors import CorruptionError as CorruptionError
    from hlat.runtime.errors import DataError as DataError
    from hlat.runtime.errors import HardwareError as HardwareError
    from hlat.runtime.errors import HlatError as HlatError
    from hlat.runtime.errors import LaunchError as LaunchError
    from hlat.runtime.errors import NumericsError as NumericsError
    from hlat.runtime.errors import PlanError as PlanError
    from hlat.runtime.errors import StorageError as StorageError

__version__: str

_API = {
    "api": (
        *("launch_local", "submit_kubernetes", "submit_slurm"),
        *(
            "TrainingResult",
            "average",
            "choose_cluster",
            "choose_model_size",
            "compare_plans",
            "compare_runs",
            "doctor",
            "draft_recipe",
            "evaluate",
            "evaluate_tasks",
            "export",
            "fork",
            "generate",
        ),
        *(
            "compile_cache",
            "import_model",
            "load_model",
            "load_recipe",
            "metrics",
            "plan",
            "plan_grid",
            "rehearse",
            "report",
            "runs",
            "show_run",
            "train",
            "train_ladder",
            "unpack_cache",
            "watch",
        ),
    ),
    "config": ("Recipe", "RecipeError"),
    "launch": ("KubernetesOptions", "PreflightOptions", "PreflightReport", "SlurmOptions", "SlurmSubmission"),
    "runtime.errors": (
        *("CheckpointError", "CheckpointFormatError", "CorruptionError", "DataError", "HardwareError", "HlatError"),
        *("LaunchError", "NumericsError", "PlanError", "StorageError"),
    ),
}
_HOMES = {name: module for module, names in _API.items() for name in names}


def __getattr__(name: str) -> object:
    """Look up a name of the API, or ``__version__``, when it is first used."""
    if name == "__version__":
        from hlat.runtime import version  # noqa: PLC0415

        return version.VERSION
    if name not in _HOMES:
        from difflib import get_close_matches  # noqa: PLC0415

        close = get_close_matches(name, _HOMES, n=3)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"it has {', '.join(sorted(_API['api'], key=str.lower))}"
        )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {hint}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "__version__"])
