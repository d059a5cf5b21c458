"""The two sides of lm-eval: the tasks of a suite as it takes them, and a model of hlat as it asks it.

    suite, folder of data files -> configurations of tasks --checked--> all problems at once, or the downloads
    lm-eval: (context, continuation), (text), (context, settings) -> tokens -> responder -> log-probabilities, texts

Tasks are checked before anything is loaded: names, data files, downloads, code. lm-eval downloads a data set when it
builds the task; what it would download is therefore read from its index before.
The model follows lm-eval's own model ``hf`` in everything that decides about results: how context and continuation are
tokenized, what is cut off if they are too long, which token precedes a text, and where a generated text ends.

This file imports lm-eval (the extra ``eval``); others import it when they need it.
"""

import os
import random
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lm_eval
import numpy
from huggingface_hub import constants
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hlat.evaluation.code_execution.sandbox import CodePermission, find_confinement
from hlat.evaluation.generation import GenerationRequest
from hlat.evaluation.harness.suites import Suite, TaskEntry
from hlat.evaluation.next_token import Sampling
from hlat.evaluation.responses import ServedModel
from hlat.evaluation.scoring import ScoreRequest
from hlat.runtime.backend.code_folders import check_code_folder
from hlat.runtime.errors import DataError, LaunchError

_OWN_TASKS = Path(__file__).with_name("tasks")
_FILE_BUILDERS = ("json", "csv", "parquet", "arrow", "text")  # of ``datasets``: they read files that are named
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_SECONDS = 5.0


@dataclass(frozen=True)
class TaskList:
    """Tasks, ready to be built."""

    manager: TaskManager
    suite: Suite  # with the tasks of each tag in place of it
    groups: tuple[str, ...]  # names of groups, each of one entry of the suite
    downloads: tuple[str, ...]  # data sets that are not on this machine, with their licences

    def build(self, seed: int) -> list[Any]:
        """Build the groups with their tasks and data; raises DataError listing the entries for which that fails."""
        built, problems = [], []
        # Some tasks shuffle the choices of their examples with the global generators.
        random.seed(seed)
        numpy.random.seed(seed)
        for entry, group in zip(self.suite.entries, self.groups, strict=True):
            try:
                built.append(self.manager.load([group])["groups"][group])
            except Exception as error:  # data that do not fit: of `datasets`, of a task's own functions
                problems.append(f"{entry.task}: {type(error).__name__}: {error}")
        if problems:
            raise DataError("\n  ".join([f"suite {self.suite.name}: these tasks cannot read their data:", *problems]))
        try:
            self.manager.load(built)
        except ValueError as error:  # a task twice: under its own name and in a group, for example
            raise DataError(f"suite {self.suite.name}: {error}") from error
        return built


def list_tasks(
    suite: Suite,
    files: Path | None,
    include: Sequence[Path],
    allow_code: CodePermission,
    is_online: bool | None = None,
) -> TaskList:
    """Find and check the tasks of a suite; ``is_online`` None finds out if data sets can be downloaded.

    Raises:
        DataError: tasks or files are missing, or need a download or code execution that is not possible; lists all.
        LaunchError: others can write to a folder with further tasks.
    """
    for folder in include:  # a task may name functions of files beside it
        check_code_folder(folder)
    built_in = Path(lm_eval.__file__).parent / "tasks"
    folders = [*([built_in / name for name in suite.folders] or [built_in]), _OWN_TASKS, *include]
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    suite = _without_tags(manager, suite)
    problems = [problem for entry in suite.entries for problem in _problems(manager, entry, files, allow_code)]
    missing = sorted({name for entry in suite.entries for name in _downloads(manager, entry, files)})
    if missing and not (_can_download() if is_online is None else is_online):
        problems.append(
            f"These data sets are not on this machine, and the Hugging Face hub cannot be reached from it: "
            f"{', '.join(missing)}. On a machine that is connected, copy each with `hf download NAME --repo-type "
            f"dataset --local-dir FOLDER/NAME`, and name FOLDER with --files. Or copy the cache of a run there "
            f"({constants.HF_HUB_CACHE})."
        )
    if problems:
        raise DataError("\n  ".join([f"suite {suite.name}: these tasks cannot run:", *problems]))
    groups = [f"suite {suite.name}, {number}: {entry.task}" for number, entry in enumerate(suite.entries)]
    for name, entry in zip(groups, suite.entries, strict=True):
        group = {"group": name, "task": [_settings(manager, entry, files)]}
        # In the index, because lm-eval gives the fields of a group that is not there to the tasks of groups in it.
        manager.task_index[name] = TaskIndex.entry_from_config(group)
    return TaskList(manager, suite, tuple(groups), tuple(missing))


def _without_tags(manager: TaskManager, suite: Suite) -> Suite:
    """Put the tasks of a tag in place of it: lm-eval has no result for a tag."""

    def tasks(entry: TaskEntry) -> list[TaskEntry]:
        found = manager.task_index.get(entry.task)
        if found is None or found.cfg:
            return [entry]
        return [entry.model_copy(update={"task": name}) for name in sorted(found.tags)] or [entry]

    columns = (
        column.model_copy(update={"tasks": tuple(each for entry in column.tasks for each in tasks(entry))})
        for column in suite.columns
    )
    return suite.model_copy(update={"columns": tuple(columns)})


def _problems(manager: TaskManager, entry: TaskEntry, files: Path | None, allow_code: CodePermission) -> Iterator[str]:
    if entry.task not in manager.task_index:
        yield f"{entry.task}: lm-eval {lm_eval.__version__} has no such task. `lm-eval ls tasks` lists them."
        return
    for name in entry.files.values():
        if files is None:
            yield f"{entry.task}: reads {name} from a folder of data files. Name it with --files."
        elif not (files / name).is_file():
            yield f"{entry.task}: {_licensed(str(files / name), entry)} is missing."
    copy = _copied_data(manager, entry, files)
    # Versions of `datasets` below 4 would run it.
    if copy is not None and (script := copy / f"{copy.name}.py").exists():
        yield f"{entry.task}: {script} is a program that reads the data. Copy a data set of data files only."
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


def _downloads(manager: TaskManager, entry: TaskEntry, files: Path | None) -> Iterator[str]:
    if entry.files or entry.task not in manager.task_index or _copied_data(manager, entry, files):
        return
    for name in _data_sets(manager, entry):
        if not _is_cached(name) and not Path(name).exists():
            yield _licensed(name, entry)


def _data_sets(manager: TaskManager, entry: TaskEntry) -> set[str]:
    """Names of the data sets of a task, or of all tasks of a group, on the Hugging Face hub."""
    configurations = ({**config, **entry.settings} for _, config in _configurations(manager, entry.task))
    return {str(config.get("dataset_path", "")) for config in configurations} - {"", *_FILE_BUILDERS}


def _copied_data(manager: TaskManager, entry: TaskEntry, files: Path | None) -> Path | None:
    """Return the copy of a task's data set in the folder of data files, under the data set's name."""
    names = _data_sets(manager, entry)
    # lm-eval replaces the data set of all tasks of a group or of none.
    if files is None or len(names) != 1 or not (files / min(names)).is_dir():
        return None
    return (files / min(names)).resolve()


def _licensed(name: str, entry: TaskEntry) -> str:
    return f"{name} ({entry.license})" if entry.license else name


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


def _settings(manager: TaskManager, entry: TaskEntry, files: Path | None) -> dict[str, Any]:
    # The name of a group under the key "task" would replace the names of its tasks.
    kind = "group" if "group" in (manager.task_index[entry.task].cfg or {}) else "task"
    settings: dict[str, Any] = {kind: entry.task, **entry.settings}
    if entry.shots is not None:
        settings["num_fewshot"] = entry.shots
    if entry.files:
        assert files is not None, "list_tasks has refused this"
        data_files = {split: str((files / name).resolve()) for split, name in entry.files.items()}
        reader = {"data_files": data_files} | ({"field": entry.field} if entry.field else {})
        # The task's own data set is replaced by files that the user has.
        settings |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": reader}
    elif (folder := _copied_data(manager, entry, files)) is not None:
        settings["dataset_path"] = str(folder)
    return settings


def _can_download() -> bool:
    if any(os.environ.get(name, "0").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        return False
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=_SECONDS):
            return True
    except OSError:
        return False


_DEFAULT_LENGTH = 2048  # tokens, for a model without a maximum: the default of lm-eval
_DEFAULT_NEW_TOKENS = 256  # the default of lm-eval
_KNOWN_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A served model with the interface of lm-eval; limits are in tokens, None for the model's or the task's own."""

    def __init__(
        self, served: ServedModel, seed: int, max_length: int | None = None, max_new_tokens: int | None = None
    ) -> None:
        super().__init__()
        self._served, self._seed, self._max_new_tokens = served, seed, max_new_tokens
        # Longer texts would be rotated by their own lengths, and here they share stems and batches.
        longest = served.config.max_sequence_length or _DEFAULT_LENGTH
        self.max_length = max_length or min(longest, served.config.rope.constant_up_to or longest)
        # The choices of a question share its context, which lm-eval has encoded each time.
        self._encode = lru_cache(maxsize=64)(self._encode_text)
        self._start = tuple(served.tokenizer.encode_prompt(""))  # tokens that the tokenizer puts in front of a text

    @property
    def eot_token_id(self) -> int:
        if not self._served.end_ids:
            raise DataError(f"{self._served.path}: neither the model nor its tokenizer says which token ends a text.")
        return min(self._served.end_ids)

    @property
    def prefix_token_id(self) -> int:
        # This token precedes a text without context: that of the beginning, or else that of the end.
        begin = self._served.tokenizer.bos_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._encode(string, add_special_tokens))

    def _encode_text(self, text: str, add_special_tokens: bool | None) -> tuple[int, ...]:
        tokens, start = tuple(self._served.tokenizer.encode_prompt(text)), len(self._start)
        if add_special_tokens is None:
            # A text that has the token already gets no second one.
            add_special_tokens = not text.startswith(self._served.tokenizer.token_name(self.prefix_token_id))
        return tokens[start:] if not add_special_tokens and tokens[:start] == self._start else tokens

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [ScoreRequest(tuple(before), tuple(after)).truncated(self.max_length) for _, before, after in requests]
        scores = self._served.responder.respond(self._served.scoring, asked)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for request in requests:
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        seen: Counter[GenerationRequest] = Counter()
        asked, stops = [], []
        for request in requests:
            text, settings = request.args
            stop, plain = self._generation_request(text, settings)
            asked.append(self._repeated(plain, seen[plain]))
            stops.append(stop)
            seen[plain] += 1
        texts = self._served.responder.respond(self._served.generation, asked)
        decode = self._served.tokenizer.decode
        return [
            str(postprocess_generated_text(decode(text), stop, None)) for text, stop in zip(texts, stops, strict=True)
        ]

    def _generation_request(self, text: str, settings: dict[str, Any]) -> tuple[list[str], GenerationRequest]:
        """Return the texts at which a generated text ends, and the request."""
        normal = normalize_gen_kwargs(settings, _DEFAULT_NEW_TOKENS)
        if unknown := sorted(set(normal) - _KNOWN_SETTINGS):
            raise DataError(f"a task asks for generation with {', '.join(unknown)}, which hlat does not have.")
        new = min(normal["max_gen_toks"], self._max_new_tokens or normal["max_gen_toks"])
        if new >= self.max_length:
            raise DataError(
                f"a task asks for {new:,} new tokens, but context and text together have {self.max_length:,} at most "
                f"in this model. Limit the texts with --max-tokens {self.max_length // 2}."
            )
        end = self._served.tokenizer.token_name(self.eot_token_id)
        stop = [each for each in handle_stop_sequences(list(normal["until"]), eos=end) if each]
        temperature = float(normal.get("temperature") or 0.0) if normal["do_sample"] else 0.0
        top_k, top_p = (normal.get("top_k"), normal.get("top_p")) if temperature > 0 else (None, None)
        sampling = Sampling(temperature, top_k, top_p, self._seed)
        context = self.tok_encode(text)[-(self.max_length - new) :]
        return stop, GenerationRequest(tuple(context), new, tuple(stop), sampling)

    def _repeated(self, request: GenerationRequest, number: int) -> GenerationRequest:
        # Repeats of a sampled request get other samples; those of a greedy one have the same text.
        repeat = number if request.sampling.temperature > 0 else 0
        return replace(request, repeat=repeat)
