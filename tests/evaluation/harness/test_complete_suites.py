"""The suites run to their end on stand-ins of every data set: names, numbers of examples and metrics of all tasks."""

import json
from pathlib import Path
from typing import Any

import pytest

from hlat.evaluation.harness.suites import (
    Column,
    Suite,
    TaskEntry,
    column_values,
    load_suite,
    suite_of_tasks,
    task_results,
)
from hlat.runtime.errors import DataError
from tests.support.commands import hlat
from tests.support.evaluation.text_model import write_text_model

pytest.importorskip("lm_eval", reason="the extra [eval] is not installed")

import datasets
import lm_eval

from hlat.evaluation.harness.adapter import list_tasks
from hlat.evaluation.harness.run import quiet
from tests.support.evaluation.stand_ins import HalfRight, write_stand_ins

OF_EACH_KIND = {
    # task: examples, metric
    "medqa_4options": (3, "acc"),  # choices
    "winogrande": (2, "acc"),  # the choices are in the prompt
    "crows_pairs_french": (0, "pct_stereotype"),  # no prompt
    "nq_open": (4, "exact_match"),  # text
    "hlat_humaneval": (0, "pass@1"),  # program
    "ai2_arc": (1, "acc_norm"),  # tag
    "legalbench": (2, "exact_match"),  # group
}
FOLDERS = ("medqa", "winogrande", "nq_open", "crows_pairs", "arc", "legalbench")
TASKS = Path(lm_eval.__file__).parent / "tasks"


def configurations(pattern: str) -> list[str]:
    """Names of the configurations of a data set in the files of lm-eval's tasks."""
    lines = (line for file in TASKS.glob(pattern) for line in file.read_text().splitlines())
    return sorted({line.split(":")[1].strip(' "') for line in lines if line.strip('"').startswith("dataset_name")})


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mmlu, contracts = configurations("mmlu/default/mmlu_*.yaml"), configurations("legalbench/contract_nli_*.yaml")
    assert (len(mmlu), len(contracts)) == (57, 14)
    return write_stand_ins(tmp_path_factory.mktemp("data"), mmlu, contracts)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def answer(suite: Suite, files: Path) -> tuple[dict[str, float], dict[str, set[int]], dict[str, Any]]:
    """Return the columns of a model that answers half of the items rightly, and the examples that it saw."""
    found = list_tasks(suite, files, (), allow_code=True, is_online=False)
    model = HalfRight()
    settings = {"task_manager": found.manager, "bootstrap_iters": 0, "confirm_run_unsafe_code": True}
    with quiet():
        raw = lm_eval.simple_evaluate(model=model, tasks=found.build(seed=1), **settings)
    tasks = task_results(raw)
    columns, _ = column_values(found.suite, tasks)
    return columns, model.shots, tasks


@pytest.mark.usefixtures("cache")
def test_a_task_of_each_kind_scores_the_half_that_is_right(stand_ins: Path) -> None:
    entries = [TaskEntry(task=task, shots=n, metric=metric) for task, (n, metric) in OF_EACH_KIND.items()]
    columns = tuple(Column(name=entry.task, tasks=(entry,)) for entry in entries)
    found, shots, _ = answer(Suite(name="kinds", title="Kinds", folders=FOLDERS, columns=columns), stand_ins)
    assert found == dict.fromkeys(OF_EACH_KIND, 50.0)
    members = {"arc_easy": "ai2_arc", "arc_challenge": "ai2_arc"}
    for task, numbers in shots.items():
        kind = "legalbench" if task.startswith("legalbench") else members.get(task, task)
        assert numbers == {OF_EACH_KIND[kind][0]}, task
    assert members.keys() <= shots.keys() and len(shots) == len(OF_EACH_KIND) + 1 + 4


SHOTS = {
    "hlat": {"mmlu": 5, "nq_open": 5, "triviaqa": 5, "gsm8k": 8},
    "domain": {
        "legalbench_abercrombie": 5,
        "legalbench_corporate_lobbying": 1,
        "legalbench_function": 7,
        "legalbench_international": 4,
        "legalbench_proa": 5,
        "legalbench_contract": 8,
    },
}
"""Examples by the beginning of the name of a task; others have none. Those of domain are lm-eval's own."""


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", SHOTS)
def test_each_task_of_a_suite_has_its_examples_and_scores_the_half_that_is_right(name: str, stand_ins: Path) -> None:
    suite = load_suite(name)
    columns, shots, tasks = answer(suite, stand_ins)
    # exactly, but for mc2: probabilities of e^-50 beside 1
    assert columns == pytest.approx({column.name: 50.0 for column in suite.columns}, rel=1e-12)
    expected = {task: next((n for start, n in SHOTS[name].items() if task.startswith(start)), 0) for task in shots}
    assert shots == {task: {number} for task, number in expected.items()}
    assert len(shots) == {"hlat": 73, "domain": 23}[name]
    assert {entry.task for entry in suite.entries} <= tasks.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOTS)
def test_a_suite_runs_to_its_end_on_a_model(name: str, stand_ins: Path, tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "model", max_sequence_length=4096)
    out = tmp_path / "out"
    options = ["--suite", name, "--files", str(stand_ins), "--to", str(out), "--max-tokens", "8"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = hlat("evaluate", str(model), *options, "--allow-code-execution", env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "results.json").read_text())
    assert report["columns"].keys() == {column.name for column in load_suite(name).columns}
    assert (report["average"] is None) == (name == "domain")


def test_what_is_missing_is_named_with_its_licence_and_how_to_copy_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    suite = load_suite("domain")
    with pytest.raises(DataError) as refused:
        list_tasks(suite, tmp_path, (), allow_code=False, is_online=False)
    for entry in suite.entries:
        assert f"({entry.license})" in str(refused.value)
    assert "pubmedqa_test.jsonl (MIT) is missing" in str(refused.value)
    assert "hf download NAME --repo-type dataset --local-dir FOLDER/NAME" in str(refused.value)


@pytest.mark.usefixtures("cache")
def test_data_that_do_not_fit_are_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "GBaker/MedQA-USMLE-4-options-hf"
    folder.mkdir(parents=True)
    (folder / "test.json").write_text('{"question": "of another version"}\n')
    suite = suite_of_tasks(["medqa_4options"]).model_copy(update={"folders": ("medqa",)})
    with pytest.raises(DataError, match="medqa_4options: KeyError: 'train'"):
        list_tasks(suite, tmp_path, (), allow_code=False, is_online=False).build(seed=1)
    (folder / f"{folder.name}.py").write_text("raise SystemExit('a loading script must not run')")
    with pytest.raises(DataError, match=r"medqa_4options: .*hf\.py is a program"):
        list_tasks(suite, tmp_path, (), allow_code=False, is_online=False)


@pytest.mark.usefixtures("cache")
def test_a_task_that_is_asked_for_twice_is_refused(stand_ins: Path) -> None:
    suite = suite_of_tasks(["legalbench", "legalbench_proa"]).model_copy(update={"folders": ("legalbench",)})
    with pytest.raises(DataError, match="legalbench_proa"):
        list_tasks(suite, stand_ins, (), allow_code=False, is_online=False).build(seed=1)
