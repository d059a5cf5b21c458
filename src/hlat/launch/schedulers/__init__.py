"""Schedulers: a job script for Slurm, manifests for Kubernetes, and what they are told to submit, show and cancel."""
