"""Columns and averages of a suite, from results as lm-eval 0.4.13 writes them, worked out by hand."""

import re
from typing import Any

from hlat.evaluation.harness.suites import (
    Column,
    Published,
    Suite,
    SuiteReport,
    TaskEntry,
    column_values,
    entry_value,
    html_page,
    markdown_page,
    task_results,
)

RAW: dict[str, Any] = {
    "results": {
        "group": {"alias": "group"},  # a group without a metric of its own
        "qa": {"acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.75, "sample_len": 8, "alias": "qa"},
        "sums": {"exact_match,strict": 0.25, "exact_match,flexible": 0.5, "alias": "sums"},
        "code": {"pass@1,create_test": float("nan"), "alias": "code"},
    },
    "versions": {"qa": 1.0, "sums": 3},
    "n-shot": {"qa": 5, "sums": 0},
    "n-samples": {"sums": {"original": 100, "effective": 10}},
}


def test_results_of_lm_eval_are_read() -> None:
    tasks = task_results(RAW)
    assert list(tasks) == ["qa", "sums", "code"]
    assert tasks["qa"] == {
        "version": 1.0,
        "shots": 5,
        "samples": 8,
        "samples_of_task": None,
        "metrics": {"acc,none": 0.5, "acc_stderr,none": 0.1, "acc_norm,none": 0.75},
    }
    assert (tasks["sums"]["samples"], tasks["sums"]["samples_of_task"]) == (10, 100)
    assert tasks["code"]["metrics"] == {"pass@1,create_test": None}, "JSON has no NaN"


def test_a_metric_is_found_with_and_without_its_filter() -> None:
    tasks = task_results(RAW)
    for task, metric, value in [
        ("qa", "acc", 50.0),
        ("qa", "acc_norm", 75.0),
        ("qa", "", 50.0),  # the first that is not an error estimate
        ("sums", "exact_match,flexible", 50.0),
        ("sums", "exact_match", 25.0),  # the first filter
        ("sums", "acc", None),
        ("code", "pass@1", None),
        ("absent", "acc", None),
    ]:
        assert entry_value(TaskEntry(task=task, metric=metric), tasks) == value, (task, metric)


def test_a_column_needs_all_its_tasks_and_an_average_all_averaged_columns() -> None:
    tasks = task_results(RAW)
    qa, norm = TaskEntry(task="qa"), TaskEntry(task="qa", metric="acc_norm")
    sums, code = TaskEntry(task="sums", metric="exact_match"), TaskEntry(task="code", metric="pass@1")
    both, one, none = (
        Column(name="both", tasks=(qa, norm)),
        Column(name="one", tasks=(sums,)),
        Column(name="half", tasks=(sums, code), averaged=False),
    )
    suite = Suite(name="s", title="t", columns=(both, one, none))
    assert column_values(suite, tasks) == ({"both": 62.5, "one": 25.0}, 50.0)  # (50 + 75 + 25) / 3: each task once
    averaged = Suite(name="s", title="t", columns=(both, Column(name="half", tasks=(sums, code))))
    assert column_values(averaged, tasks) == ({"both": 62.5}, None)
    assert column_values(Suite(name="s", title="t", average=None, columns=(one,)), tasks) == ({"one": 25.0}, None)
    assert column_values(Suite(name="s", title="t", columns=(none,)), {}) == ({}, None)


def test_tables_list_the_model_published_rows_and_tasks_and_show_names_as_text() -> None:
    """Names of columns and the path of the model are escaped: they may be HTML or Markdown."""
    column = Column(name="a | <b>", tasks=(TaskEntry(task="qa"),))
    published = Published(source="Them 2025", rows={"other": {"a | <b>": 50.25}})
    suite = Suite(name="s", title="Tables", columns=(column,), average=None, published=published)
    model = {"path": "runs/<i>", "sha256": "0" * 64, "dtype": "float32", "parameters": 1000}
    columns, average = column_values(suite, tasks := task_results(RAW))
    harness, settings = {"name": "lm-eval", "version": "0.4.13", "seed": 1}, {"limit": 3}
    report = SuiteReport("s", model, harness, settings, tasks, columns, average, {})
    markdown, page = markdown_page(suite, report), html_page(suite, report)
    assert "| model | a \\| \\<b\\> |" in markdown and "| runs/\\<i\\> | 50.0 |" in markdown
    assert "| other | 50.2 |" in markdown and "| sums | 3 | 0 | 10 | exact\\_match,strict | 0.2500 |" in markdown
    assert "<b>" not in page and "<i>" not in page and page.count("<script") == 1, "that of every page"
    cells = [re.findall(r"<t[hd][^>]*>([^<]*?)\s*</t", row) for row in page.split("<tr")]
    assert ["runs/&lt;i&gt;", "50.0"] in cells and ["other", "50.2"] in cells
    assert ["sums", "3", "0", "10", "exact_match,strict", "0.2500"] in cells and ["code", "pass@1", "-"] not in cells
    assert "<p>At most 3 samples of each task" in page and "Them 2025" in page
