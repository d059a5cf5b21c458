"""Small runs that evaluate a validation split, a further set and a task."""

from pathlib import Path
from typing import Any

from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.training.validation.tasks import TaskRequest, write_requests

TEXT = "the cat sat on the mat and the dog sat on the log. "


def recipe_of(folder: Path, **training: Any) -> Recipe:
    """A run of six steps that evaluates a split, a set and a task every second step."""
    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text(TEXT * 200)
    (folder / "set.txt").write_text("a log sat on the cat. " * 20)
    choices = [(" mat", True), (" cat sat", False)]
    requests = [
        TaskRequest(task="qa", group=0, context="the cat sat on the", continuation=text, is_gold=gold)
        for text, gold in choices
    ]
    write_requests(folder / "qa.jsonl", requests)
    return parse_recipe(
        {
            "run": {"dir": str(folder / "run"), "device": "cpu"},
            "model": {"vocab_size": 32, "layers": 1, "hidden_size": 32, "intermediate_size": 64, "heads": 2},
            "data": {
                "path": str(folder / "corpus.txt"),
                "sequence_length": 32,
                "tokenizer": {"train": "char"},
                "validation": {"fraction": 0.1, "by": "tail"},
            },
            "batch": {"global_batch": 4, "micro_batch": 2},
            "training": {"steps": 6, "log_every": 1, **training},
            "evaluation": {
                "every_steps": 2,
                "sets": {"log": str(folder / "set.txt")},
                "tasks": [str(folder / "qa.jsonl")],
            },
            "tracking": {"console": "none", "tensorboard": False},
        }
    )
