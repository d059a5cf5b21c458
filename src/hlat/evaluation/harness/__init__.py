"""Tasks of lm-eval (the extra ``eval``) on models of hlat: suites, results, tables."""

from hlat.evaluation.harness.rendering import render_suite, render_tasks
from hlat.evaluation.harness.report import SuiteReport, read_report
from hlat.evaluation.harness.run import SuiteOptions, run_suite
from hlat.evaluation.harness.suites import Suite, load_suite, suite_names, suite_of_tasks

__all__ = [
    "Suite",
    "SuiteOptions",
    "SuiteReport",
    "load_suite",
    "read_report",
    "render_suite",
    "render_tasks",
    "run_suite",
    "suite_names",
    "suite_of_tasks",
]
