"""Scores of rendered tasks are those that lm-eval computes with its own model class on the exported weights."""

import json
import math
import random

import pytest
import yaml

from hlat.checkpoint import export_hf
from hlat.config import Recipe
from hlat.evaluation import watch_run
from hlat.evaluation.harness.run import quiet, render_tasks
from hlat.runtime.errors import DataError
from hlat.training import run
from hlat.training.validation.tasks import read_requests, write_requests

pytest.importorskip("lm_eval", reason="needs the extra eval: pip install -e '.[eval]'")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

WORDS = ("the", "cat", "dog", "sat", "ran", "on", "under", "a", "mat", "log", "tree", "and", "then", "red", "blue")
CHOICE = {
    "task": "toy_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "num_fewshot": 2,
    "fewshot_split": "test",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ANSWER = {
    "task": "toy_answer",
    "output_type": "generate_until",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_target": "{{choices[gold]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
    "metric_list": [{"metric": "exact_match"}],
}


def sentence(draw: random.Random, most: int = 9) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return lm-eval's manager of two tasks with documents in a file."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(3)
    documents = [
        {"question": sentence(draw), "choices": [sentence(draw, 5) for _ in range(4)], "gold": draw.randrange(4)}
        for _ in range(25)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}}}
    for task in (CHOICE, ANSWER):
        content = {**task, **where, "test_split": "test", "metadata": {"version": 1.0}}
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(content))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a small run."""
    folder, draw = tmp_path_factory.mktemp("run"), random.Random(4)
    (folder / "corpus.txt").write_text(". ".join(sentence(draw) for _ in range(3000)))
    recipe = {
        "run": {"dir": str(folder / "run"), "device": "cpu"},
        "model": {"vocab_size": 320, "layers": 2, "hidden_size": 64, "intermediate_size": 128, "heads": 2},
        "data": {
            "path": str(folder / "corpus.txt"),
            "sequence_length": 256,
            "tokenizer": {"train": "bpe", "vocab_size": 320},
            "validation": {"fraction": 0.1, "by": "tail"},
        },
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optimizer": {"lr": 3e-3},
        "training": {"steps": 12},
        "precision": {"mode": "fp32"},
        "tracking": {"console": "none", "tensorboard": False},
    }
    run(Recipe.model_validate(recipe))
    return folder / "run"


def rendered(tasks, file):
    write_requests(file, render_tasks(tasks.load(["toy_choice", "toy_answer"])["tasks"]))
    return file


def test_scores_are_those_of_lm_eval_on_the_exported_weights(tasks, trained, tmp_path):
    """Log-likelihoods differ by fp32 rounding, about 1e-6 of sums of 30 nats; 25 examples have no ties within 1e-4."""
    (found,) = watch_run(trained, [rendered(tasks, tmp_path / "toy.jsonl")], once=True)
    export_hf(trained, tmp_path / "hf")
    model = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=4, max_length=256)
    wanted = simple_evaluate(model=model, tasks=["toy_choice"], task_manager=tasks, bootstrap_iters=0)
    score, results = found.result.tasks["toy_choice"], wanted["results"]["toy_choice"]
    assert score.examples == 25
    assert (score.accuracy, score.normalized_accuracy) == (results["acc,none"], results["acc_norm,none"])
    golds = [request for request in read_requests([tmp_path / "toy.jsonl"]) if request.is_gold]
    for task in ("toy_choice", "toy_answer"):
        pairs = [(each.context, each.continuation) for each in golds if each.task == task]
        bits = _bits_per_byte(model, pairs)
        assert found.result.tasks[task].bits_per_byte == pytest.approx(bits, rel=1e-5)


def _bits_per_byte(model, pairs):
    """Compute the mean bits per byte of continuations with lm-eval's model."""
    from lm_eval.api.instance import Instance  # noqa: PLC0415

    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    nats = [-value for value, _ in model.loglikelihood(requests)]
    each = [value / math.log(2) / len(text.encode()) for value, (_, text) in zip(nats, pairs, strict=True)]
    return sum(each) / len(each)


def test_a_task_without_right_answers_is_refused(tasks):
    loaded = tasks.load(["toy_choice"])["tasks"]
    loaded["toy_choice"].set_config("num_fewshot", 0)
    loaded["toy_choice"].doc_to_target = lambda *_: 9
    with pytest.raises(DataError, match="toy_choice, example 0: its right answer is none of its choices"):
        render_tasks(loaded)


def test_progress_bars_of_lm_eval_are_hidden_inside_the_block_only(tasks, capfd):
    loaded = tasks.load(["toy_choice"])["tasks"]
    with quiet():
        render_tasks(loaded, 5)
    assert "5/5" not in capfd.readouterr().err
    render_tasks(loaded, 5)
    assert "5/5" in capfd.readouterr().err
