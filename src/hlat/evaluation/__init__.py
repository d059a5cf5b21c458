"""Evaluation of checkpoints: perplexity, bits per byte, and text generation."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.evaluation.batch_generation.requests import GenerationLimits as GenerationLimits
    from hlat.evaluation.generation import generate as generate
    from hlat.evaluation.generation import generate_text as generate_text
    from hlat.evaluation.harness.rendering import render_suite as render_suite
    from hlat.evaluation.harness.report import SuiteReport as SuiteReport
    from hlat.evaluation.harness.report import read_report as read_report
    from hlat.evaluation.harness.run import SuiteOptions as SuiteOptions
    from hlat.evaluation.harness.run import run_suite as run_suite
    from hlat.evaluation.harness.suites import Suite as Suite
    from hlat.evaluation.harness.suites import load_suite as load_suite
    from hlat.evaluation.harness.suites import suite_of_tasks as suite_of_tasks
    from hlat.evaluation.perplexity import Perplexity as Perplexity
    from hlat.evaluation.perplexity import evaluate_checkpoint as evaluate_checkpoint
    from hlat.evaluation.responses.served_model import ServingOptions as ServingOptions
    from hlat.evaluation.sampling import Sampling as Sampling
    from hlat.evaluation.scoring.batches import BatchLimits as BatchLimits
    from hlat.evaluation.watch import EvaluatedCheckpoint as EvaluatedCheckpoint
    from hlat.evaluation.watch import watch_run as watch_run

__getattr__ = lazily(
    __name__,
    {
        "batch_generation.requests": "GenerationLimits",
        "generation": "generate generate_text",
        "harness.rendering": "render_suite",
        "harness.report": "SuiteReport read_report",
        "harness.run": "SuiteOptions run_suite",
        "harness.suites": "Suite load_suite suite_of_tasks",
        "perplexity": "Perplexity evaluate_checkpoint",
        "responses.served_model": "ServingOptions",
        "sampling": "Sampling",
        "scoring.batches": "BatchLimits",
        "watch": "EvaluatedCheckpoint watch_run",
    },
)
