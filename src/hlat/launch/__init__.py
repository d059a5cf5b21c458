"""Start the processes of a run on this machine, supervise and restart them, and report in one message why a run ended.

Modules that need torch are imported on first use: the supervisor of a single process does not import it.
"""

from typing import TYPE_CHECKING

from hlat.runtime.lazy import lazily

if TYPE_CHECKING:
    from hlat.launch.compile_job import CompileJob as CompileJob
    from hlat.launch.compile_job import ProcessesFailed as ProcessesFailed
    from hlat.launch.compile_job import is_worker as is_worker
    from hlat.launch.evaluation_job import EvaluationJob as EvaluationJob
    from hlat.launch.hosts_job import HostOptions as HostOptions
    from hlat.launch.hosts_job import supervise_on_hosts as supervise_on_hosts
    from hlat.launch.kubernetes import KubernetesOptions as KubernetesOptions
    from hlat.launch.kubernetes import apply_manifests as apply_manifests
    from hlat.launch.kubernetes import manifests as manifests
    from hlat.launch.kubernetes import manifests_yaml as manifests_yaml
    from hlat.launch.local_hosts import LocalRequest as LocalRequest
    from hlat.launch.local_hosts import examine_by_ssh as examine_by_ssh
    from hlat.launch.local_hosts import run_local as run_local
    from hlat.launch.local_processes import launch_forked as launch_forked
    from hlat.launch.local_processes import launch_multiprocess as launch_multiprocess
    from hlat.launch.preflight.examination import run_preflight as run_preflight
    from hlat.launch.preflight.judgement import PreflightReport as PreflightReport
    from hlat.launch.preflight.request import PreflightOptions as PreflightOptions
    from hlat.launch.preflight.request import make_request as make_request
    from hlat.launch.run_request import RunRequest as RunRequest
    from hlat.launch.slurm import SlurmOptions as SlurmOptions
    from hlat.launch.slurm import SlurmSubmission as SlurmSubmission
    from hlat.launch.slurm import batch_script as batch_script
    from hlat.launch.slurm import cancel_job as cancel_job
    from hlat.launch.slurm import job_log as job_log
    from hlat.launch.slurm import job_state as job_state
    from hlat.launch.slurm import submit_script as submit_script
    from hlat.launch.start_checks import Here as Here
    from hlat.launch.start_examination import load_and_check as load_and_check
    from hlat.launch.supervision.incidents import RunOutcome as RunOutcome
    from hlat.launch.supervision.local_run import run_processes as run_processes
    from hlat.launch.supervision.local_run import supervise as supervise
    from hlat.launch.supervision.supervisor import Supervision as Supervision
    from hlat.launch.supervision.supervisor import Voice as Voice
    from hlat.launch.training_job import TrainingJob as TrainingJob
    from hlat.launch.training_job import join_slurm_job as join_slurm_job
    from hlat.launch.training_job import parse_nproc as parse_nproc
    from hlat.launch.training_job import refuse_half_environment as refuse_half_environment
    from hlat.launch.training_job import refuse_worker as refuse_worker
    from hlat.launch.training_job import supervise_job as supervise_job
    from hlat.launch.worker_process import worker_context as worker_context

__getattr__ = lazily(
    __name__,
    {
        "compile_job": "CompileJob ProcessesFailed is_worker",
        "evaluation_job": "EvaluationJob",
        "hosts_job": "HostOptions supervise_on_hosts",
        "kubernetes": "KubernetesOptions apply_manifests manifests manifests_yaml",
        "local_hosts": "LocalRequest examine_by_ssh run_local",
        "local_processes": "launch_forked launch_multiprocess",
        "preflight.examination": "run_preflight",
        "preflight.judgement": "PreflightReport",
        "preflight.request": "PreflightOptions make_request",
        "run_request": "RunRequest",
        "slurm": "SlurmOptions SlurmSubmission batch_script cancel_job job_log job_state submit_script",
        "start_checks": "Here",
        "start_examination": "load_and_check",
        "supervision.incidents": "RunOutcome",
        "supervision.local_run": "run_processes supervise",
        "supervision.supervisor": "Supervision Voice",
        "training_job": ("TrainingJob join_slurm_job parse_nproc refuse_half_environment refuse_worker supervise_job"),
        "worker_process": "worker_context",
    },
)
