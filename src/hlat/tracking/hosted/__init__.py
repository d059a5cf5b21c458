"""Hosted trackers: services that get a run's metrics from a helper process, so that they cannot disturb the run."""

from hlat.tracking.hosted.base import HostedRun
from hlat.tracking.hosted.hosted_tracker import HostedTracker
from hlat.tracking.hosted.table import check_installed, wanted

__all__ = ["HostedRun", "HostedTracker", "check_installed", "wanted"]
