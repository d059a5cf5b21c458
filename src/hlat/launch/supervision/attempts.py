"""The attempts of a run: where its processes are started, and how many."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hlat.launch.supervision.running_ranks import RunningRanks
from hlat.resilience import Failure


class Attempts(Protocol):
    """Starts attempts, one after the other."""

    @property
    def world(self) -> int:
        """Number of processes of the present attempt, or of the next one."""

    def prepare(self, is_stopped: Callable[[], bool]) -> None:
        """Settle who takes part in the next attempt; wait for hosts if need be.

        Args:
            is_stopped: polled meanwhile; once it returns True, nothing is waited for.

        Raises:
            LaunchError: too few hosts have come.
        """

    def start(self, environment: Mapping[str, str]) -> AbstractContextManager[RunningRanks]:
        """Start the processes of the next attempt; those that still run at the end of the block are killed.

        Args:
            environment: variables to set in each process.
        """

    def adapt(self, failure: Failure) -> str | None:
        """Change who takes part after a failure; return what has changed, for the user, or None."""

    def goes_on(self) -> bool:
        """Return True if the last attempt was asked to save and stop only to go on with more processes."""

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keep the state of the supervision for whoever takes it over."""


class Stops(Protocol):
    """Signals that ask a run to stop."""

    @property
    def received(self) -> list[int]:
        """Signal numbers in the order of arrival."""
