"""Start the processes of a run on this machine, supervise and restart them, and report in one message why a run ended.

Modules that need torch are imported on first use: the supervisor of a single process does not import it.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.launch.compile_job import *
    from hlat.launch.evaluation_job import *
    from hlat.launch.hosts_job import *
    from hlat.launch.local_hosts import *
    from hlat.launch.local_processes import *
    from hlat.launch.preflight.examination import *
    from hlat.launch.preflight.judgement import *
    from hlat.launch.preflight.request import *
    from hlat.launch.run_request import *
    from hlat.launch.schedulers.kubernetes import *
    from hlat.launch.schedulers.kubernetes_options import *
    from hlat.launch.schedulers.slurm import *
    from hlat.launch.start_examination import *
    from hlat.launch.start_place import *
    from hlat.launch.supervision.incidents import *
    from hlat.launch.supervision.local_run import *
    from hlat.launch.supervision.supervisor import *
    from hlat.launch.training_job import *
    from hlat.launch.worker_process import *

__getattr__ = lazily(
    __name__,
    {
        "compile_job": "CompileJob ProcessesFailed is_worker",
        "evaluation_job": "EvaluationJob",
        "hosts_job": "HostOptions supervise_on_hosts",
        "schedulers.kubernetes": "apply_manifests manifests manifests_yaml pods_query",
        "schedulers.kubernetes_options": "KubernetesOptions",
        "local_hosts": "LocalRequest examine_by_ssh run_local",
        "local_processes": "launch_forked launch_multiprocess",
        "preflight.examination": "run_preflight",
        "preflight.judgement": "PreflightReport",
        "preflight.request": "PreflightOptions make_request",
        "run_request": "RunRequest",
        "schedulers.slurm": "SlurmOptions SlurmSubmission batch_script cancel_job job_log job_state submit_script",
        "start_place": "Here",
        "start_examination": "check_extensions load_and_check summary_lines",
        "supervision.incidents": "RunOutcome",
        "supervision.local_run": "run_processes supervise",
        "supervision.supervisor": "Supervision Voice",
        "training_job": (
            "TrainingJob join_slurm_job parse_nproc parse_range refuse_half_environment refuse_worker supervise_job"
        ),
        "worker_process": "worker_context",
    },
)
