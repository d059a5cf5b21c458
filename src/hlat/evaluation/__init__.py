"""Evaluation of checkpoints: perplexity, bits per byte, and text generation."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.evaluation.checkpoints import EvaluatedCheckpoint as EvaluatedCheckpoint
    from hlat.evaluation.checkpoints import Perplexity as Perplexity
    from hlat.evaluation.checkpoints import evaluate_checkpoint as evaluate_checkpoint
    from hlat.evaluation.checkpoints import watch_run as watch_run
    from hlat.evaluation.generation import GenerationLimits as GenerationLimits
    from hlat.evaluation.generation import generate as generate
    from hlat.evaluation.generation import generate_text as generate_text
    from hlat.evaluation.harness.run import SuiteOptions as SuiteOptions
    from hlat.evaluation.harness.run import render_suite as render_suite
    from hlat.evaluation.harness.run import run_suite as run_suite
    from hlat.evaluation.harness.suites import Suite as Suite
    from hlat.evaluation.harness.suites import SuiteReport as SuiteReport
    from hlat.evaluation.harness.suites import load_suite as load_suite
    from hlat.evaluation.harness.suites import read_report as read_report
    from hlat.evaluation.harness.suites import suite_of_tasks as suite_of_tasks
    from hlat.evaluation.responses import ServingOptions as ServingOptions
    from hlat.evaluation.sampling import Sampling as Sampling
    from hlat.evaluation.scoring import BatchLimits as BatchLimits

__getattr__ = lazily(
    __name__,
    {
        "checkpoints": "EvaluatedCheckpoint Perplexity evaluate_checkpoint watch_run",
        "generation": "GenerationLimits generate generate_text",
        "harness.run": "SuiteOptions render_suite run_suite",
        "harness.suites": "Suite SuiteReport load_suite read_report suite_of_tasks",
        "responses": "ServingOptions",
        "sampling": "Sampling",
        "scoring": "BatchLimits",
    },
)
