"""Jobs for schedulers: the batch script of a run for Slurm, and its manifests for Kubernetes.

RunRequest (recipe, nodes, processes, instance) --checked-->
batch_script --> script --submit_script--> job, recorded in the run's folder --job_state, job_log, cancel_job
manifests -----> YAML   --apply_manifests--> kubectl
"""
