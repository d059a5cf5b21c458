"""Rendering of lm-eval's tasks to files of requests, which a run scores while it trains (``evaluation.tasks``).

    task of lm-eval --its prompts and choices--> TaskRequests, one per choice           multiple choice
                                             --> one TaskRequest with the gold answer   generation, likelihood of a text

lm-eval builds the prompts, few-shot examples included. Nothing of lm-eval is needed when the requests are scored.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hlat.evaluation.harness.run import find_tasks, quiet
from hlat.evaluation.harness.suites import Suite
from hlat.runtime.errors import DataError
from hlat.training import TaskRequest


def render_suite(
    suite: Suite,
    files: Path | None = None,
    include: Sequence[Path] = (),
    limit: int | None = None,
    seed: int = 1234,
) -> list[TaskRequest]:
    """Render the tasks of a suite to requests. No code of a model is executed.

    Args:
        suite: the suite.
        files: folder of the suite's data files; None if it needs none.
        include: folders with further tasks.
        limit: number of examples of each task; None for all.
        seed: seed of the choice of few-shot examples.

    Raises:
        DataError: lm-eval is not installed; tasks, data files or downloads are missing; or a task cannot be rendered.
    """
    found = find_tasks(suite, files, include, allow_code="unsafe")  # nothing is executed
    with quiet():
        return render_tasks(found.manager.load([found.group])["tasks"], limit, seed)


def render_tasks(tasks: Mapping[str, Any], limit: int | None = None, seed: int = 1234) -> list[TaskRequest]:
    """Render tasks to requests.

    Args:
        tasks: tasks of lm-eval by name, ``lm_eval.api.task.Task``.
        limit: number of examples of each task; None for all.
        seed: seed of the choice of few-shot examples.

    Raises:
        DataError: a task has no gold answers, or is of a kind that has none; lists all of them.
    """
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
    """Return the requests of each example of a task, in order."""
    documents: dict[int, list[Any]] = {}
    for instance in task.instances:
        documents.setdefault(instance.doc_id, []).append(instance)
    return [sorted(instances, key=lambda instance: int(instance.idx)) for instances in documents.values()]


def _render_choices(task: Any, name: str, group: int, instances: Sequence[Any]) -> Iterator[TaskRequest]:
    """Yield the choices of a question; requests without the question, for mutual information, are left out."""
    document = instances[0].doc
    choices = task.doc_to_choice(document)
    golds = _gold_indices(task, document, choices)
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
    """Return the indices of the right choices; lm-eval's tasks give an index, several, or a choice."""
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    several = gold if isinstance(gold, list) else [gold]
    return {choices.index(each) if isinstance(each, str) and each in choices else each for each in several}


def _render_gold(task: Any, name: str, group: int, instances: Sequence[Any]) -> Iterator[TaskRequest]:
    """Yield the gold answers of a task that generates a text: a question may have several."""
    target = task.doc_to_target(instances[0].doc)
    for text in dict.fromkeys(target if isinstance(target, list) else [target]):
        continuation = f"{task.config.target_delimiter}{text}"
        if continuation:
            context = instances[0].args[0]
            yield TaskRequest(task=name, group=group, context=context, continuation=continuation, is_gold=True)


def _render_text(task: Any, name: str, group: int, instances: Sequence[Any]) -> Iterator[TaskRequest]:
    """Yield the text of a task that asks for its likelihood."""
    del task
    context, continuation = instances[0].args[:2]
    yield TaskRequest(task=name, group=group, context=context, continuation=continuation, is_gold=True)


_RENDERERS = {
    "multiple_choice": _render_choices,
    "generate_until": _render_gold,
    "loglikelihood": _render_text,
}
"""Functions that render an example, by lm-eval's kind of task."""
