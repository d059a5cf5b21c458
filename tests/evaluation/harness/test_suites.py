"""Suites: shipped ones are complete, mistakes are listed, and what cannot run is refused before anything is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlat.evaluation.harness.suites import load_suite, suite_names, suite_of_tasks
from hlat.runtime.errors import DataError


def task_lister() -> Callable[..., Any]:
    pytest.importorskip("lm_eval", reason="the extra [eval] is not installed")
    from hlat.evaluation.harness.adapter import list_tasks  # noqa: PLC0415  (imports lm-eval)

    return list_tasks


def test_shipped_suites_load_and_published_values_belong_to_columns() -> None:
    assert set(suite_names()) >= {"domain", "hlat", "offline"}
    for name in suite_names():
        suite = load_suite(name)
        columns = {column.name for column in suite.columns} | {suite.average}
        for row in suite.published.rows.values() if suite.published else []:
            assert row.keys() <= columns


def test_the_suite_of_the_paper_has_its_numbers_of_examples() -> None:
    shots = {entry.task: entry.shots for entry in load_suite("hlat").entries}
    assert (shots["mmlu"], shots["gsm8k"], shots["nq_open"], shots["triviaqa"], shots["piqa"]) == (5, 8, 5, 5, 0)
    assert {"hlat_humaneval", "hlat_humaneval_pass10", "crows_pairs_french", "truthfulqa_mc2"} <= shots.keys()


def test_the_average_of_the_papers_rows_is_as_far_from_ours_as_the_suite_says() -> None:
    suite = load_suite("hlat")
    assert suite.published is not None
    differences = []
    for row in suite.published.rows.values():
        counts = {column.name: len(column.tasks) for column in suite.columns if column.averaged}
        if counts.keys() <= row.keys():
            mean = sum(row[name] * count for name, count in counts.items()) / sum(counts.values())
            differences.append(mean - row["Average"])
    assert len(differences) >= 10
    assert -1.4 < min(differences) < -1.3 and 1.5 < max(differences) < 1.6


def test_mistakes_in_a_suite_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: bad\ntitle: t\ncolumns: [{name: a, tasks: [{task: x, shot: 3}]}, {tasks: []}]\n")
    with pytest.raises(DataError, match=r"(?s)columns\.0\.tasks\.0\.shot: Extra.*columns\.1\.name: Field required"):
        load_suite(str(file))
    with pytest.raises(DataError, match=r"no such suite\. Name one of domain, hlat, offline"):
        load_suite("../hlat")


def test_everything_that_cannot_run_is_listed_at_once(tmp_path: Path, data_files: Path, suite_file: Path) -> None:
    list_tasks = task_lister()
    suite = load_suite(str(suite_file))
    with pytest.raises(DataError) as refused:
        list_tasks(suite, tmp_path, (), allow_code=False)
    for words in ("sums.jsonl is missing", "choices.json is missing", "--allow-code-execution"):
        assert words in str(refused.value)
    with pytest.raises(DataError, match="Name it with --files"):
        list_tasks(suite, None, (), allow_code=True)
    assert list_tasks(suite, data_files, (), allow_code=True, is_online=False).downloads == ()


def test_downloads_are_named_before_they_start_and_refused_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    list_tasks = task_lister()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    suite = load_suite("hlat")
    listed = list_tasks(suite, None, (), allow_code=True, is_online=True)
    assert {"cais/mmlu", "baber/piqa", "openai/gsm8k", "openai/openai_humaneval"} <= set(listed.downloads)
    with pytest.raises(DataError, match=r"(?s)cannot be reached.*cais/mmlu.*--files"):
        list_tasks(suite, None, (), allow_code=True, is_online=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="cannot be reached"):
        list_tasks(suite, None, (), allow_code=True)
    (tmp_path / "datasets--baber--piqa").mkdir()
    assert "baber/piqa" not in list_tasks(suite, None, (), allow_code=True, is_online=True).downloads


def test_a_machine_without_a_sandbox_is_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, data_files: Path, suite_file: Path
) -> None:
    list_tasks = task_lister()
    suite = load_suite(str(suite_file))
    for name in ("bubblewrap", "landlock"):
        monkeypatch.setattr(f"hlat.evaluation.code_execution.sandbox.{name}", lambda: None)
    with pytest.raises(DataError, match=r"hlat_humaneval: this machine cannot confine.*=unsafe"):
        list_tasks(suite, data_files, (), allow_code=True)
    assert list_tasks(suite, data_files, (), allow_code="unsafe", is_online=False).downloads == ()


def test_tasks_of_lm_eval_that_execute_code_without_a_sandbox_are_refused() -> None:
    list_tasks = task_lister()
    suite = suite_of_tasks(["humaneval"]).model_copy(update={"folders": ("humaneval",)})
    with pytest.raises(DataError, match=r"without a sandbox\. hlat_humaneval"):
        list_tasks(suite, None, (), allow_code=True)
    unknown = suite_of_tasks(["humanevil"]).model_copy(update={"folders": ("humaneval",)})
    with pytest.raises(DataError, match="no such task"):
        list_tasks(unknown, None, (), allow_code=True)
