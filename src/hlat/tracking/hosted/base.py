"""Client of a tracking service, as its helper process drives it.

    open (a new run, or the one of an earlier attempt) -> log, log, ... -> close

Clients run in a helper process (``worker.py``), so they may block, raise, start threads or crash.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class HostedRun:
    """The run that a client records.

    Attributes:
        name: name of the run.
        run_dir: its folder; offline clients write below it.
        recipe: resolved recipe as JSON values, without credentials.
        settings: section of the recipe for this client, such as ``tracking.wandb``, as JSON values.
    """

    name: str
    run_dir: Path
    recipe: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def is_offline(self) -> bool:
        """True if the client must not use the network."""
        return bool(self.settings["mode"] == "offline")

    def folder(self, name: str) -> Path:
        """Return a folder of the run for an offline client; it is created."""
        folder = self.run_dir / name
        folder.mkdir(exist_ok=True)
        return folder


class HostedClient(Protocol):
    """Client of a tracking service. Methods are called one after another; any exception is reported."""

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        """Begin a run at the service, or continue the one with ``saved_id``; return its id."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step, by tag (``train/loss``, ...); steps ascend."""

    def close(self, failed: bool) -> None:
        """Send what is left, and end the run; ``failed`` if it did not end by itself."""
