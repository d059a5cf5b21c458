"""The processes of one attempt of a run, as those who supervise them see them: on this machine or on several hosts."""

from collections.abc import Callable, Sequence
from typing import Protocol

from hlat.launch.error_report import ErrorReport
from hlat.resilience import Hang, HeartbeatReading


class RunningRanks(Protocol):
    """The processes of one attempt, by rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of the attempt, in order."""

    def poll(self, rank: int) -> int | None:
        """Exit code of a rank, or minus the signal that ended it; None while it runs."""

    def report(self, rank: int) -> ErrorReport | None:
        """Error report of a rank that has ended; None if it left none."""

    def host(self, rank: int) -> str:
        """Name of the host of a rank."""

    def send(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks that are not known to have ended; their child processes do not get it."""

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks, including stopped ones, and wait until they have ended."""

    def end_leftovers(self, grace: float, hurries: Callable[[], bool]) -> None:
        """End processes that ranks left behind after they ended.

        Args:
            grace: seconds that a running save may be without progress.
            hurries: polled meanwhile; once it returns True, nothing is waited for.
        """

    def readings(self) -> list[HeartbeatReading]:
        """Heartbeats of the ranks that have one; times are on the monotonic clock of this process."""

    def is_stopped(self, rank: int) -> bool:
        """Return True if the process of a rank was stopped by a signal."""

    def stacks(self) -> dict[int, str]:
        """Stacks of all threads of every rank that writes them in time, else an empty text."""

    def run_id(self) -> str | None:
        """Id of the run in its folder, once a rank has reported it; else None."""

    def outage(self) -> Hang | None:
        """Return a failure of the network between the hosts of the ranks, if there is one."""

    def locate(self, hang: Hang) -> Hang:
        """Return a hang with what is known about hosts and their network."""
