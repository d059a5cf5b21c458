"""Run a suite on a model, or render its tasks to requests, which a run scores while it trains (``evaluation.tasks``).

    run_suite:     suite -> tasks, checked -> model in all processes -> lm-eval on rank 0, whose requests all compute
                       -> results.json, results.md, results.html, samples/TASK.jsonl
    render_suite:  task of lm-eval --its prompts and choices--> TaskRequests, one per choice      multiple choice
                       --> one TaskRequest with the gold answer            generation, likelihood of a text

Every process of the run calls ``run_suite``. lm-eval builds the prompts, few-shot examples included; it is imported on
use (an extra), and not needed when rendered requests are scored.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

from hlat.evaluation.code_execution.sandbox import CodePermission, unconfined_execution
from hlat.evaluation.harness.suites import (
    RESULTS,
    Suite,
    SuiteReport,
    column_values,
    html_page,
    markdown_page,
    task_results,
)
from hlat.evaluation.responses import Progress, ServedModel, ServingOptions, serve_model
from hlat.model import count_parameters
from hlat.runtime.distributed.join import Runtime
from hlat.runtime.errors import DataError, StorageError
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.version import install_command
from hlat.training import TaskRequest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SuiteOptions:
    """Options of one evaluation by a suite."""

    out: Path
    files: Path | None = None
    include: tuple[Path, ...] = ()
    limit: int | None = None  # most samples of each task; None for all
    seed: int = 1234  # seed of the choice of examples, and of sampled texts
    max_length: int | None = None  # most tokens of context and continuation; None for the model's maximum
    max_new_tokens: int | None = None  # most tokens of a generated text; None for what the tasks say
    allow_code: CodePermission = False  # execute code that the model writes, in a sandbox; "unsafe": without one
    serving: ServingOptions = field(default_factory=ServingOptions)


def run_suite(
    path: str | Path, suite: Suite, options: SuiteOptions, runtime: Runtime, progress: Progress
) -> SuiteReport | None:
    """Run a suite on a model and write the results; return the report on rank 0, None on other ranks. Collective.

    ``path`` is a checkpoint, a checkpoints folder, a run folder, or a Hugging Face folder.

    Raises:
        DataError: lm-eval is not installed; or tasks, data files or downloads are missing: lists all.
        CheckpointError: there is no valid checkpoint, or it has no tokenizer.
        LaunchError: the model cannot be divided over the processes.
        StorageError: results cannot be written.
    """
    begin = time.monotonic()
    tasks: list[Any] = []
    built: list[Any] = []

    def check() -> None:
        tasks.append(find_tasks(suite, options.files, options.include, options.allow_code))
        with quiet():
            built.extend(tasks[0].build(options.seed))

    # Before the model is loaded, which may take long.
    runtime.ranks.run_on_rank0(check)

    def work(served: ServedModel) -> SuiteReport:
        with quiet(), unconfined_execution() if options.allow_code == "unsafe" else nullcontext():
            raw = _ask_harness(tasks[0].manager, built, served, options)
        whole = tasks[0].suite
        report = _report(raw, whole, options, served, runtime, time.monotonic() - begin)
        _write(options.out, whole, report, raw["samples"])
        return report

    return serve_model(path, options.serving, runtime, options.out / "responses", progress, work)


def find_tasks(suite: Suite, files: Path | None, include: Sequence[Path], allow_code: CodePermission) -> Any:
    """Find and check the tasks of a suite; warn of downloads. Raises DataError without lm-eval, or listing problems."""
    with quiet():
        try:
            from hlat.evaluation.harness.adapter import list_tasks  # noqa: PLC0415  (an extra, and slow to import)
        except ImportError as error:
            raise DataError(f"tasks need lm-eval ({error}): {install_command('eval')}") from error
        tasks = list_tasks(suite, files, include, allow_code)
    if tasks.downloads:
        _LOG.warning("these data sets are downloaded now: %s", ", ".join(tasks.downloads))
    return tasks


def _ask_harness(manager: Any, tasks: list[Any], served: ServedModel, options: SuiteOptions) -> Mapping[str, Any]:
    import lm_eval  # noqa: PLC0415

    from hlat.evaluation.harness.adapter import HarnessModel  # noqa: PLC0415  (imports lm-eval)

    model = HarnessModel(served, options.seed, options.max_length, options.max_new_tokens)
    raw: Mapping[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager,
        limit=options.limit,
        log_samples=True,
        bootstrap_iters=1000,
        random_seed=options.seed,
        numpy_random_seed=options.seed,
        torch_random_seed=options.seed,
        fewshot_random_seed=options.seed,
        confirm_run_unsafe_code=bool(options.allow_code),
    )
    return raw


@contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and messages of lm-eval and of the libraries that it uses."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        with suppress(ImportError):  # the caller reports that the extra is missing
            import datasets  # noqa: PLC0415
            from tqdm import tqdm  # noqa: PLC0415

            datasets.disable_progress_bars()
            # tqdm reads its variable TQDM_DISABLE at import only, and torch has imported it.
            stack.callback(setattr, tqdm, "__init__", tqdm.__init__)
            tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
        yield


def _report(
    raw: Mapping[str, Any],
    suite: Suite,
    options: SuiteOptions,
    served: ServedModel,
    runtime: Runtime,
    seconds: float,
) -> SuiteReport:
    import lm_eval  # noqa: PLC0415

    tasks = task_results(raw)
    columns, average = column_values(suite, tasks)
    return SuiteReport(
        suite=suite.name,
        model={
            "path": str(served.path),
            "weights": options.serving.weights,
            "sha256": served.sha256,
            "tokenizer_sha256": served.tokenizer.sha256,
            "dtype": str(served.dtype).removeprefix("torch."),
            "parameters": count_parameters(served.config).total,
        },
        harness={
            "name": "lm-eval",
            "version": lm_eval.__version__,
            "seed": options.seed,
        },
        settings={
            "limit": options.limit,
            "max_length": options.max_length,
            "max_new_tokens": options.max_new_tokens,
            "code_execution": options.allow_code,
        },
        tasks=tasks,
        columns=columns,
        average=average,
        run={
            "processes": runtime.world,
            "tensor": served.tensor,
            "computed": served.responder.computed,
            "looked_up": served.responder.looked_up,
            "seconds": round(seconds, 1),
        },
    )


def _write(out: Path, suite: Suite, report: SuiteReport, samples: Mapping[str, Any]) -> None:
    try:
        (out / "samples").mkdir(parents=True, exist_ok=True)
        for name, rows in samples.items():
            lines = [json.dumps(_sample(row), ensure_ascii=False, default=str) for row in rows]
            write_atomic(out / "samples" / f"{name}.jsonl", ("\n".join(lines) + "\n").encode())
        write_atomic(out / "results.md", markdown_page(suite, report).encode())
        write_atomic(out / "results.html", html_page(suite, report).encode())
        # Last, so that it is there if all others are.
        write_atomic(out / RESULTS, (json.dumps(report.to_dict(), indent=1) + "\n").encode())
    except OSError as error:
        raise StorageError(f"{out}: cannot write the results ({error.strerror or error}).") from error


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    # The hashes identify question and prompt without repeating them.
    kept = ("doc_id", "filter", "target", "resps", "filtered_resps", "doc_hash", "prompt_hash", *row["metrics"])
    return {name: row[name] for name in kept if name in row}


def render_suite(
    suite: Suite,
    files: Path | None = None,
    include: Sequence[Path] = (),
    limit: int | None = None,
    seed: int = 1234,
) -> list[TaskRequest]:
    """Render the tasks of a suite to requests, without executing a model's code; raises DataError listing problems."""
    found = find_tasks(suite, files, include, allow_code="unsafe")  # nothing is executed
    with quiet():
        return render_tasks(found.manager.load(found.build(seed))["tasks"], limit, seed)


def render_tasks(tasks: Mapping[str, Any], limit: int | None = None, seed: int = 1234) -> list[TaskRequest]:
    """Render tasks of lm-eval, by name; raises DataError listing those without gold answers."""
    requests: list[TaskRequest] = []
    problems: list[str] = []
    for name, task in tasks.items():
        render = _RENDERERS.get(task.OUTPUT_TYPE)
        if render is None:
            problems.append(f"{name}: a task of the kind {task.OUTPUT_TYPE} has no gold answers")
            continue
        task.set_fewshot_seed(seed=seed)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        for group, instances in enumerate(_by_document(task)):
            found = list(render(task, name, group, instances))
            if any(request.is_gold for request in found):
                requests += found
            else:
                problems.append(f"{name}, example {group}: its right answer is none of its choices")
    if problems:
        raise DataError("\n".join(["tasks that cannot be rendered:", *problems[:10]]))
    return requests


def _by_document(task: Any) -> list[list[Any]]:
    documents: dict[int, list[Any]] = {}
    for instance in task.instances:
        documents.setdefault(instance.doc_id, []).append(instance)
    return [sorted(instances, key=lambda instance: int(instance.idx)) for instances in documents.values()]


def _render_choices(task: Any, name: str, group: int, instances: Sequence[Any]) -> Iterator[TaskRequest]:
    document = instances[0].doc
    choices = task.doc_to_choice(document)
    golds = _gold_indices(task, document, choices)
    # Not strict: requests without the question, for mutual information, come last and are left out.
    for index, (choice, instance) in enumerate(zip(choices, instances, strict=False)):
        context, continuation = instance.args[:2]
        yield TaskRequest(
            task=name,
            group=group,
            context=context,
            continuation=continuation,
            is_gold=index in golds,
            characters=max(1, len(choice)),
        )


def _gold_indices(task: Any, document: Any, choices: Sequence[str]) -> set[int]:
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    # Tasks of lm-eval give an index, several, or a choice.
    several = gold if isinstance(gold, list) else [gold]
    return {choices.index(each) if isinstance(each, str) and each in choices else each for each in several}


def _render_gold(task: Any, name: str, group: int, instances: Sequence[Any]) -> Iterator[TaskRequest]:
    target = task.doc_to_target(instances[0].doc)
    # A question may have several gold answers.
    for text in dict.fromkeys(target if isinstance(target, list) else [target]):
        continuation = f"{task.config.target_delimiter}{text}"
        if continuation:
            context = instances[0].args[0]
            yield TaskRequest(task=name, group=group, context=context, continuation=continuation, is_gold=True)


def _render_text(task: Any, name: str, group: int, instances: Sequence[Any]) -> Iterator[TaskRequest]:
    del task
    context, continuation = instances[0].args[:2]
    yield TaskRequest(task=name, group=group, context=context, continuation=continuation, is_gold=True)


_RENDERERS = {
    "multiple_choice": _render_choices,
    "generate_until": _render_gold,
    "loglikelihood": _render_text,
}
"""Functions that render an example, by lm-eval's kind of task."""
