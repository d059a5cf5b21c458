"""Hosted trackers: services that get a run's metrics from a helper process, so that they cannot disturb the run."""
