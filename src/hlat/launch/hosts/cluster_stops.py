"""Signals that ask a run on several hosts to stop, whichever of its supervisors has received them."""

from collections.abc import Callable, Mapping

from hlat.launch.hosts.records import HostStatus


class ClusterStops:
    """Signals received by the supervisors of all hosts.

    A scheduler sends the same signal to every host; it counts once. A second signal, which ends a run without saving,
    counts as soon as one host has received two.

    Args:
        living: returns the statuses of the hosts that are alive, by index.
    """

    def __init__(self, living: Callable[[], Mapping[int, HostStatus]]) -> None:
        self._living = living
        self._received: list[int] = []

    @property
    def received(self) -> list[int]:
        """Signal numbers in the order of arrival."""
        longest = max((list(status.signals) for status in self._living().values()), key=len, default=[])
        self._received += longest[len(self._received) :]
        return self._received
