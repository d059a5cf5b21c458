"""Modules that commands and ranks of tests use, for the server that they are forked from: they are imported once.

The objects of these modules are frozen: no forked process searches them for reference cycles again.
"""

import gc
import importlib

from hlat.hardware import load_catalog

for _name in (
    "hlat.cli",
    "hlat.checkpoint.average",
    "hlat.checkpoint.importing.weights",
    "hlat.evaluation.harness.run",
    "hlat.launch.training_job",
    "hlat.parallel.context_parallel",
    "hlat.parallel.pipeline_parallel",
    "hlat.planner.report.html_report",
    "hlat.quickstart",
    "hlat.training.loop",
    "pytest",
    "tests.support.forked_ranks",
    "torch.distributed.fsdp",
):
    importlib.import_module(_name)

load_catalog()
gc.collect()
gc.freeze()
