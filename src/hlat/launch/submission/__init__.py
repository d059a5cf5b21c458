"""Jobs for schedulers: the batch script of a run for Slurm, and its manifests for Kubernetes.

RunRequest (recipe, nodes, processes, instance) --checked-->
batch_script --> script --submit_script--> job, recorded in the run's folder --job_state, job_log, cancel_job
manifests -----> YAML   --apply_manifests--> kubectl
"""

from hlat.launch.submission.kubernetes import apply_manifests, manifests, manifests_yaml
from hlat.launch.submission.kubernetes_options import KubernetesOptions
from hlat.launch.submission.request import RunRequest
from hlat.launch.submission.slurm_jobs import SlurmSubmission, cancel_job, job_log, job_state, submit_script
from hlat.launch.submission.slurm_script import SlurmOptions, batch_script

__all__ = [
    "KubernetesOptions",
    "RunRequest",
    "SlurmOptions",
    "SlurmSubmission",
    "apply_manifests",
    "batch_script",
    "cancel_job",
    "job_log",
    "job_state",
    "manifests",
    "manifests_yaml",
    "submit_script",
]
