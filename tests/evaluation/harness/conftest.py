"""Data files of made-up questions, in the format of GSM8K, BIG-bench Hard and HumanEval."""

import json
import random
from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="session")
def data_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("files"), random.Random(1)

    def sums(count: int) -> str:
        pairs = [(rng.randrange(9), rng.randrange(9)) for _ in range(count)]
        rows = [{"question": f"{a} + {b} = ?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in pairs]
        return "".join(json.dumps(row) + "\n" for row in rows)

    (folder / "sums.jsonl").write_text(sums(9))
    (folder / "solved.jsonl").write_text(sums(12))
    examples = [{"input": f"the cat sees {n} engines", "target": rng.choice(["Yes", "No"])} for n in range(11)]
    (folder / "choices.json").write_text(json.dumps({"canary": "none", "examples": examples}))
    program = {"prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1\n", "entry_point": "one"}
    (folder / "programs.jsonl").write_text(json.dumps(program) + "\n")
    return folder


@pytest.fixture(scope="session")
def suite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite of a generated, a scored and an executed task on these files."""
    gsm8k = {"task": "gsm8k", "shots": 2, "metric": "exact_match,strict-match"}
    gsm8k |= {"files": {"test": "sums.jsonl", "train": "solved.jsonl"}}
    navigate = {"task": "hlat_bbh_navigate", "files": {"test": "choices.json"}, "field": "examples"}
    human = {"task": "hlat_humaneval", "metric": "pass@1,create_test", "files": {"test": "programs.jsonl"}}
    columns = [
        {"name": "Sums", "tasks": [gsm8k]},
        {"name": "Choices | <b>", "tasks": [navigate]},
        {"name": "Programs", "tasks": [human], "averaged": False},
    ]
    published = {"source": "a paper", "rows": {"other": {"Sums": 50.0}}}
    file = tmp_path_factory.mktemp("suite") / "small.yaml"
    suite = {"name": "small", "title": "Small", "folders": ["gsm8k"], "columns": columns, "published": published}
    file.write_text(yaml.safe_dump(suite))
    return file
