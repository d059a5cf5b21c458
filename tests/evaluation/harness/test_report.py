"""Columns and averages of a suite, from results as lm-eval 0.4.13 writes them, worked out by hand."""

from typing import Any

from hlat.evaluation.harness.suites import Column, Suite, TaskEntry, column_values, entry_value, task_results

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
