"""Start the processes of a run on this machine, supervise and restart them, and report in one message why a run ended.

Modules that need torch are imported on first use: the supervisor of a single process does not import it.
"""

from typing import TYPE_CHECKING

from hlat.runtime import lazily

if TYPE_CHECKING:
    from hlat.launch.compile_job import CompileJob, ProcessesFailed, is_worker
    from hlat.launch.fork_launcher import launch_forked
    from hlat.launch.hosts_job import HostOptions, supervise_on_hosts
    from hlat.launch.local_hosts import LocalRequest, run_local
    from hlat.launch.multiprocess_launcher import launch_multiprocess
    from hlat.launch.supervised_run import SupervisedRun, supervise
    from hlat.launch.training_job import (
        SupervisionOptions,
        TrainingJob,
        join_slurm_job,
        parse_nproc,
        refuse_half_environment,
        refuse_worker,
        supervise_job,
    )
    from hlat.launch.worker_main import worker_context

__getattr__ = lazily(
    __name__,
    {
        "compile_job": ("CompileJob", "ProcessesFailed", "is_worker"),
        "fork_launcher": ("launch_forked",),
        "hosts_job": ("HostOptions", "supervise_on_hosts"),
        "local_hosts": ("LocalRequest", "run_local"),
        "multiprocess_launcher": ("launch_multiprocess",),
        "supervised_run": ("SupervisedRun", "supervise"),
        "training_job": (
            "SupervisionOptions",
            "TrainingJob",
            "join_slurm_job",
            "parse_nproc",
            "refuse_half_environment",
            "refuse_worker",
            "supervise_job",
        ),
        "worker_main": ("worker_context",),
    },
)

__all__ = [
    "CompileJob",
    "HostOptions",
    "LocalRequest",
    "ProcessesFailed",
    "SupervisedRun",
    "SupervisionOptions",
    "TrainingJob",
    "is_worker",
    "join_slurm_job",
    "launch_forked",
    "launch_multiprocess",
    "parse_nproc",
    "refuse_half_environment",
    "refuse_worker",
    "run_local",
    "supervise",
    "supervise_job",
    "supervise_on_hosts",
    "worker_context",
]
