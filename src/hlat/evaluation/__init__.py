"""Evaluation of checkpoints: perplexity, bits per byte, and text generation."""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.evaluation.checkpoints import *
    from hlat.evaluation.generation import *
    from hlat.evaluation.harness.run import *
    from hlat.evaluation.harness.suites import *
    from hlat.evaluation.next_token import *
    from hlat.evaluation.responses import *
    from hlat.evaluation.scoring import *

__getattr__ = lazily(
    __name__,
    {
        "checkpoints": "EvaluatedCheckpoint Perplexity evaluate_checkpoint watch_run",
        "generation": "GenerationLimits generate generate_text",
        "harness.run": "SuiteOptions render_suite run_suite",
        "harness.suites": "Suite SuiteReport load_suite read_report suite_of_tasks",
        "responses": "ServingOptions",
        "next_token": "Sampling",
        "scoring": "BatchLimits",
    },
)
