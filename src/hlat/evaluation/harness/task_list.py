"""The tasks of a suite as lm-eval takes them, checked before anything is loaded: names, data files, downloads, code.

    suite, folder of data files -> configurations of tasks --check_tasks--> all problems at once, or the downloads

lm-eval downloads a data set when it builds the task. What it would download is therefore read from its index before.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lm_eval
from huggingface_hub import constants
from lm_eval.tasks import TaskManager

from hlat.evaluation.code_execution.sandbox import CodePermission, find_confinement
from hlat.evaluation.harness.suites import Suite, TaskEntry
from hlat.runtime.compiled_code.code_folder import check_code_folder
from hlat.runtime.errors import DataError, LaunchError

_OWN_TASKS = Path(__file__).with_name("tasks")
_FILE_BUILDERS = ("json", "csv", "parquet", "arrow", "text")  # of ``datasets``: they read files that are named
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_SECONDS = 5.0


@dataclass(frozen=True)
class TaskList:
    """Tasks, ready to be built.

    Attributes:
        manager: lm-eval's index of tasks.
        group: configuration of a group that has all tasks of the suite.
        downloads: data sets that are not on this machine.
    """

    manager: TaskManager
    group: dict[str, Any]
    downloads: tuple[str, ...]


def list_tasks(
    suite: Suite,
    files: Path | None,
    include: Sequence[Path],
    allow_code: CodePermission,
    is_online: bool | None = None,
) -> TaskList:
    """Find and check the tasks of a suite.

    Args:
        suite: the suite.
        files: folder of data files; None if there is none.
        include: folders with further tasks.
        allow_code: True if code that the model writes may be executed in a sandbox; "unsafe" if also without one.
        is_online: True if data sets can be downloaded; None to find out.

    Raises:
        DataError: tasks or files are missing, or need a download or code execution that is not possible; lists all.
        LaunchError: others can write to a folder with further tasks.
    """
    for folder in include:  # a task may name functions of files beside it
        check_code_folder(folder)
    built_in = Path(lm_eval.__file__).parent / "tasks"
    folders = [*([built_in / name for name in suite.folders] or [built_in]), _OWN_TASKS, *include]
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    problems = [problem for entry in suite.entries for problem in _problems(manager, entry, files, allow_code)]
    if problems:
        raise DataError("\n  ".join([f"suite {suite.name}: these tasks cannot run:", *problems]))
    missing = sorted({name for entry in suite.entries for name in _downloads(manager, entry)})
    if missing and not (_can_download() if is_online is None else is_online):
        raise DataError(
            f"suite {suite.name}: these data sets are not on this machine, and the Hugging Face hub cannot be reached "
            f"from it:\n  {', '.join(missing)}\nRun it once on a machine that is connected and copy its cache "
            f"({constants.HF_HUB_CACHE}), or take --suite offline, which reads files that you have (--files)."
        )
    members = [_settings(entry, files) for entry in suite.entries]
    return TaskList(manager, {"group": f"suite {suite.name}", "task": members}, tuple(missing))


def _problems(manager: TaskManager, entry: TaskEntry, files: Path | None, allow_code: CodePermission) -> Iterator[str]:
    if entry.task not in manager.task_index:
        yield f"{entry.task}: lm-eval {lm_eval.__version__} has no such task. `lm-eval ls tasks` lists them."
        return
    for name in entry.files.values():
        if files is None:
            yield f"{entry.task}: reads {name} from a folder of data files. Name it with --files."
        elif not (files / name).is_file():
            yield f"{entry.task}: {files / name} is missing."
    for name, config in _configurations(manager, entry.task):
        if not config.get("unsafe_code"):
            continue
        if _OWN_TASKS not in Path(manager.task_index[name].yaml_path or "").parents:
            yield (
                f"{name}: executes code that the model writes, without a sandbox. hlat_humaneval and "
                "hlat_humaneval_pass10 execute it in one."
            )
        elif not allow_code:
            yield f"{name}: executes code that the model writes. Allow it with --allow-code-execution."
        elif allow_code != "unsafe":
            try:
                find_confinement()
            except LaunchError as error:
                yield f"{name}: {error}"


def _downloads(manager: TaskManager, entry: TaskEntry) -> Iterator[str]:
    """Data sets that a task would download."""
    if entry.files:
        return
    for _, config in _configurations(manager, entry.task):
        name = str({**config, **entry.settings}.get("dataset_path", ""))
        if name and name not in _FILE_BUILDERS and not _is_cached(name) and not Path(name).exists():
            yield name


def _is_cached(name: str) -> bool:
    return (Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}").is_dir()


def _configurations(manager: TaskManager, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configurations of a task, or of all tasks of a group or tag."""
    entry = manager.task_index[name]
    config = entry.cfg or {}
    members = config.get("task") if "group" in config else sorted(entry.tags) if not config else None
    if not isinstance(members, list):
        yield name, config
        return
    for member in members:
        inner = member if isinstance(member, str) else str(member.get("task", member.get("group", "")))
        if inner in manager.task_index:
            yield from _configurations(manager, inner)


def _settings(entry: TaskEntry, files: Path | None) -> dict[str, Any]:
    """Return the configuration of a task: its name and what replaces its own settings."""
    settings: dict[str, Any] = {"task": entry.task, **entry.settings}
    if entry.shots is not None:
        settings["num_fewshot"] = entry.shots
    if entry.files:
        assert files is not None, "list_tasks has refused this"
        data_files = {split: str((files / name).resolve()) for split, name in entry.files.items()}
        reader = {"data_files": data_files} | ({"field": entry.field} if entry.field else {})
        settings |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": reader}
    return settings


def _can_download() -> bool:
    """Return True if the Hugging Face hub can be reached."""
    if any(os.environ.get(name, "0").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        return False
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=_SECONDS):
            return True
    except OSError:
        return False
