"""Responses of a model to requests: stored on disk, computed by replicas of the model in any number of processes."""
