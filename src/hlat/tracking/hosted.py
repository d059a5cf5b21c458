"""Hosted trackers: services that get a run's metrics from a helper process, so that they cannot disturb the run.

    field of the recipe's section ``tracking`` --HOSTED, the one place that lists them--> class of its client, package
    tracking.trackers: {package.module:Name: {options}} --load_part--> class of a client of the user's own
    HostedTracker.log --> bounded queue --without blocking--> helper process (serve) --> client --> service
                             | full, or the process has ended: the record is dropped and counted
    notes <---------------- replies: done (a record that is at the service), an error (once per kind of call), end

    helper process:  HostedRun, client --> open (a new run, or the one of an earlier attempt)
                     step, values -------> log
                     end ----------------> close

Clients (``hosted_clients.py``) run in the helper process, so they may block, raise, start threads or crash. Steps up to
the last one that was logged by an earlier attempt are left out: they are repeated with the same values.

At the end of a run that ended by itself, the records that are left may take ``flush_seconds``; then the helper process
is killed. After an error nothing is waited for: the helper process has the same time on its own.
"""

import fcntl
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from hlat.config import RecipeError, Section, TrackingConfig, own_parts
from hlat.runtime.errors import HlatError, LaunchError
from hlat.runtime.helper_process import Channel, PeerEnded, start_program
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.version import install_command
from hlat.tracking.records import Metrics, TrackerNote
from hlat.tracking.tensorboard import scalars


@dataclass(frozen=True)
class HostedRun:
    """Name, folder and settings of the run, as a client gets them."""

    name: str
    run_dir: Path  # its folder; offline clients write below it
    recipe: Mapping[str, Any]  # resolved recipe as JSON values, without credentials
    settings: Mapping[str, Any]  # section of the recipe for this client, such as ``tracking.wandb``, as JSON values

    @property
    def is_offline(self) -> bool:
        return bool(self.settings.get("mode") == "offline")

    def folder(self, name: str) -> Path:
        """Return a folder of the run for an offline client; it is created."""
        folder = self.run_dir / name
        folder.mkdir(exist_ok=True)
        return folder


class HostedClient(Protocol):
    """Client of a tracking service. Methods are called one after another; any exception is reported.

    A class of the user's own may have ``Options``, a pydantic model of what stands below its name in the recipe.
    """

    def open(self, run: HostedRun, saved_id: str | None) -> str:
        """Begin a run at the service, or continue the one with ``saved_id``; return its id."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step, by tag (``train/loss``, ...); steps ascend."""

    def close(self, failed: bool) -> None:
        """Send what is left, and end the run; ``failed`` if it did not end by itself."""


@dataclass(frozen=True)
class HostedEntry:
    """Client and package of a hosted tracker."""

    client: str  # "module:class" of its ``HostedClient``, imported in the helper process only
    package: str  # module that has to be installed; the extra of hlat has the name of the field


HOSTED: dict[str, HostedEntry] = {
    "wandb": HostedEntry("hlat.tracking.hosted_clients:WandbClient", "wandb"),
    "mlflow": HostedEntry("hlat.tracking.hosted_clients:MlflowClient", "mlflow"),
    "trackio": HostedEntry("hlat.tracking.hosted_clients:TrackioClient", "trackio"),
}
"""Hosted trackers by the name of their field in ``tracking``."""


def wanted(config: TrackingConfig) -> dict[str, Mapping[str, Any]]:
    """Return the sections of the hosted trackers that a recipe asks for, as JSON values, by name."""
    sections = {name: getattr(config, name) for name in HOSTED}
    asked = {name: section.model_dump(mode="json") for name, section in sections.items() if section is not None}
    return asked | config.trackers


def check_installed(config: TrackingConfig) -> None:
    """Raise LaunchError, with the command that installs them, if packages of hosted trackers are missing."""
    # Found, not imported: only the helper process imports them.
    missing = [name for name in wanted(config) if name in HOSTED and find_spec(HOSTED[name].package) is None]
    if missing:
        fields = " and ".join(f"tracking.{name}" for name in missing)
        raise LaunchError(
            f"{fields}: not installed here: {', '.join(HOSTED[name].package for name in missing)}. "
            f"Install it with {install_command(*missing)}, or set {fields} to null."
        )


def own_trackers(config: TrackingConfig) -> dict[str, Mapping[str, Any]]:
    """Import the user's own trackers; return their options, with defaults. RecipeError lists all problems."""
    found: dict[str, Mapping[str, Any]] = {}

    def check(name: str, values: Mapping[str, Any]) -> None:
        path = f"tracking.trackers.{name}"
        part = own_parts.load_part(
            own_parts.TRACKERS, path, name, "a class with the methods open, log and close", _is_client
        )
        found[name] = own_parts.read_options(getattr(part, "Options", Section), values, path).model_dump(mode="json")

    checks = [partial(check, name, values) for name, values in config.trackers.items()]
    if problems := own_parts.gather_problems(checks):
        raise RecipeError(problems)
    return found


def _is_client(part: Any) -> bool:
    return isinstance(part, type) and all(callable(getattr(part, name, None)) for name in ("open", "log", "close"))


_MOST_RECORDS = 10_000  # in the queue: a line of metrics is about 1 KB


class HostedTracker:
    """Output of metrics to a tracking service; ``flush_seconds`` limits ``close``."""

    def __init__(
        self,
        name: str,
        run: HostedRun,
        flush_seconds: float,
        most_records: int = _MOST_RECORDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._flush_seconds, self._most, self._clock = name, flush_seconds, most_records, clock
        self._notes: list[TrackerNote] = []
        self._records = self._done = 0  # lines of metrics given to this tracker, and those that the service has
        self._has_told = self._is_closed = self._has_ended = self._ended_in_order = False
        self._process = start_program(
            f"{__name__}:serve",
            *(name, HOSTED[name].client if name in HOSTED else name, run),
            linger=flush_seconds,
            niceness=_NICENESS,
            output=subprocess.DEVNULL,  # a library may print what no log should have; errors are reported
        )

    def log(self, metrics: Metrics) -> None:
        self._records += 1
        if self._has_ended:
            self._tell(_ENDED)
        elif self._process.channel.post() >= self._most:  # the run must never wait for a service
            self._tell(f"it does not keep up: {self._most} lines of metrics are waiting")
        else:
            self._process.channel.post((metrics["step"], scalars(metrics)))
        self._take_replies(0.0)

    def rewind(self, step: int) -> None:
        """Do nothing: a service does not forget. Steps that it has are not logged again."""

    def notes(self) -> list[TrackerNote]:
        notes, self._notes = self._notes, []
        return notes

    def close(self, failed: bool = False) -> None:
        """End the helper process; wait for it, for a limited time, unless the run has failed."""
        if self._is_closed:
            return
        self._is_closed = True
        if failed:
            self._process.channel.post()
            self._process.close()
            return
        self._flush()
        if not self._has_ended:
            self._tell(f"it had not ended {self._flush_seconds:g} s after the run")
        self._process.kill()
        if lost := self._records - self._done:
            text = f"{self._name}: {lost} of {self._records} lines of metrics were not logged there"
            fields = {"tracker": self._name, "lost": lost, "lines": self._records}
            self._notes.append(TrackerNote("tracker_lost", text, fields))

    def _flush(self) -> None:
        waiting = self._process.channel.post(_END)
        deadline = self._clock() + self._flush_seconds
        while not self._has_ended and (left := deadline - self._clock()) > 0:
            self._take_replies(min(left, _SEND_AGAIN) if waiting else left)
            waiting = self._process.channel.post()

    def _take_replies(self, seconds: float) -> None:
        """Handle the replies of the helper process; wait some seconds for the first."""
        try:
            while not self._has_ended and (reply := self._process.receive(seconds)) is not None:
                seconds = 0.0
                if reply == _DONE:
                    self._done += 1
                elif reply == _END:
                    self._ended_in_order = True
                else:
                    self._tell(reply)
        except (PeerEnded, HlatError, RuntimeError):  # whatever its error is, it does not concern the run
            self._has_ended = True
            if not self._ended_in_order:
                self._tell(_ENDED)

    def _tell(self, why: str) -> None:
        # Once: later failures would say the same.
        if not self._has_told:
            self._has_told = True
            text = f"{self._name}: {why}; the run continues, and metrics.jsonl has all values"
            self._notes.append(TrackerNote("tracker_failed", text, {"tracker": self._name, "message": why}))


_ENDED = "its helper process has ended"
_DONE, _END = "done", "end"  # a record is at the service; nothing more will come
_NICENESS = 10  # training comes first
_LONGEST = 2000  # characters of an error
_SEND_AGAIN = 0.05  # seconds


def serve(channel: Channel, tracker: str, client: str, run: HostedRun) -> None:
    """Serve one tracker until its records end; the work of a helper process."""
    _Service(tracker, client, run, channel).serve(_records(channel))


def _records(channel: Channel) -> Iterator[Any]:
    with suppress(PeerEnded):
        while True:
            yield channel.receive()[0]


class _Service:
    def __init__(self, tracker: str, client: str, run: HostedRun, channel: Channel) -> None:
        self._client_name, self._run, self._channel = client, run, channel
        self._folder = run.run_dir / "trackers"
        self._file = self._folder / f"{tracker.replace(':', '-')}.json"
        self._state: dict[str, Any] = {}
        self._failed_calls: set[str] = set()

    def serve(self, records: Iterator[Any]) -> None:
        try:
            with self._only_process():
                client, has_ended = self._open(), False
                for record in records:
                    if record == _END:
                        has_ended = True
                        break
                    if self._log(client, *record):
                        self._reply(_DONE)
                self._call("close", lambda: client.close(failed=not has_ended))
        except Exception as error:
            self._report("open", error)
        self._reply(_END)

    @contextmanager
    def _only_process(self) -> Iterator[None]:
        self._folder.mkdir(exist_ok=True)
        with (self._folder / f"{self._file.stem}.lock").open("w") as lock:
            # The process of an earlier attempt may still be sending what it had.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _open(self) -> HostedClient:
        with suppress(FileNotFoundError, ValueError):
            self._state = dict(json.loads(self._file.read_bytes()))
        client: HostedClient = own_parts.load_part(
            own_parts.TRACKERS, "tracking", self._client_name, "a client", _is_client
        )()
        self._state["id"] = client.open(self._run, self._state.get("id"))
        self._save()
        return client

    def _log(self, client: HostedClient, step: int, values: dict[str, float]) -> bool:
        """Log a record, unless an earlier attempt has; return True if the service has it."""
        if step <= self._state.get("step", 0):
            return True
        if not self._call("log", lambda: client.log(step, values)):
            return False
        self._state["step"] = step
        self._call("save", self._save)
        return True

    def _save(self) -> None:
        # Atomic: a killed process must not leave a file without the run's id. After a power failure the service itself
        # may have lost more, so no record waits for the disk.
        write_atomic(self._file, json.dumps(self._state).encode(), sync=False)

    def _call(self, name: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:
            # The first failure of each kind of call is enough for the user.
            if name not in self._failed_calls:
                self._failed_calls.add(name)
                self._report(name, error)
            return False
        return True

    def _report(self, call: str, error: Exception) -> None:
        self._reply(f"{call}: {type(error).__name__}: {error}"[:_LONGEST])

    def _reply(self, message: str) -> None:
        with suppress(PeerEnded):  # the run has ended
            self._channel.send(message)
