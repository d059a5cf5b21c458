"""Server of a run's metrics for Prometheus, and of its health for probes: the program of a process of its own.

    supervisor, or a machine's first rank --metrics_process: binds the port, starts--> serve, in this process
    attempt-N/rank-00000, ...         --Watchdog--> hang or none           --+
    goodput.json, heartbeat of rank 0 --> goodput until now                  +--RunObserver--> RunObservation
    metrics.jsonl --JsonTail--> newest value of each metric                  |
    events.jsonl  --JsonTail--> number by kind, time of the newest save    --+
    RunObservation --metric_families--> MetricFamily --exposition--> /metrics
                   --> /healthz (alive and not hanging), /readyz (training)

The server only reads files, so nothing that it does can disturb training, and it answers while a rank hangs in a
library. It ends with the process that started it. Hangs are judged as the supervisor does, by the same class with the
same limits: saving, compiling and preparing text are none.

Quantities that a rollback or a restart takes back, such as steps and tokens, are gauges: Prometheus would take a
counter that falls for one that began anew at zero. The reference lists all metrics. Their text has version 0.0.4 of
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import json
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from hlat.resilience import GOODPUT_FILE, Goodput, HeartbeatReading, Watchdog, read_heartbeat
from hlat.runtime import version
from hlat.runtime.helper_process import Channel
from hlat.runtime.process import is_running, is_stopped
from hlat.tracking import decode_record, from_json_value

_REMEMBERED_BYTES = 1 << 12  # last bytes read, by which a copy of the file is recognized


class JsonTail:
    """Reader of the new lines of a file, which may not exist yet, or be replaced by another one.

    Of a copy of the file, with which a run replaces one that was removed, only the lines that are new are read. Reading
    begins ``most`` bytes before the end of the file; None for the complete file.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self._path, self._most = path, most
        self._inode, self._offset, self._last = -1, 0, b""

    def read(self) -> list[dict[str, Any]]:
        """Return the complete records since the last call; damaged lines and errors of the disk are skipped."""
        with suppress(OSError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            # Another file, or a shorter one. It is a copy if the last bytes that were read are in the same place.
            if found.st_ino != self._inode or found.st_size < self._offset:
                file.seek(max(0, self._offset - len(self._last)))
                if not self._last or file.read(len(self._last)) != self._last:
                    self._offset = 0 if self._most is None else max(0, found.st_size - self._most)
                self._inode = found.st_ino
            file.seek(self._offset)
            data = file.read()
            end = data.rfind(b"\n") + 1  # the last line may still be in the midst of being written
            self._offset += end
            self._last = data[max(0, end - _REMEMBERED_BYTES) : end] or self._last
            return [record for line in data[:end].splitlines() if (record := decode_record(line)) is not None]
        return []


_METRICS_TAIL = 1 << 20  # bytes of metrics.jsonl to begin with


@dataclass(frozen=True)
class ObservedRun:
    """A run to observe, as its parent describes it to the server."""

    name: str
    run_dir: Path
    beats: Path  # folder of the heartbeats: of each attempt in attempt-N, or of the only one
    total_steps: int  # optimizer steps of its recipe
    hang_seconds: float | None  # as in section recovery of its recipe
    parent: int  # process id of the supervisor, or of the machine's first rank if there is none
    started: float  # time when it began to be observed, in seconds of the heartbeats' clock


@dataclass(frozen=True)
class RunObservation:
    """State of a run at one time."""

    attempts: int  # attempts so far, the present one included
    beats: list[HeartbeatReading]
    heartbeat_ages: dict[int, float]  # seconds since each was alive, by rank
    trouble: str | None  # reason why the run is not alive; None if it is
    is_training: bool  # True if every process that runs has begun its first step, and one runs
    metrics: dict[str, Any]  # newest value of each metric
    events: dict[str, int]  # number of events of each kind in the run's history
    checkpoint_age: float | None  # seconds since the newest checkpoint; None before the first
    goodput: dict[str, float]  # seconds by part


class RunObserver:
    """Observer of a run; ``observe`` has to be called every few seconds, to learn how long phases take."""

    def __init__(
        self, run: ObservedRun, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._run, self._clock, self._wall_clock = run, clock, wall_clock  # clocks of heartbeats, and of events
        self._watchdog = Watchdog(run.hang_seconds)
        self._metrics_tail = JsonTail(run.run_dir / "metrics.jsonl", _METRICS_TAIL)
        self._events_tail = JsonTail(run.run_dir / "events.jsonl")
        self._metrics: dict[str, Any] = {}
        self._events: Counter[str] = Counter()
        self._saved_at: float | None = None

    def observe(self) -> RunObservation:
        """Read what is new, and return the state of the run now."""
        now = self._clock()
        attempts, beats = self._heartbeats()
        for record in self._metrics_tail.read():
            self._metrics.update({key: from_json_value(value) for key, value in record.items()})
        for event in self._events_tail.read():
            self._count(event)
        pids = {beat.rank: beat.pid for beat in beats}
        # A rank that has ended does not hang: its supervisor restarts it, perhaps after waiting for another host.
        live = [beat for beat in beats if is_running(beat.pid)]
        hang = self._watchdog.check(live, now, lambda rank: is_stopped(pids[rank]))
        trouble = None if hang is None else str(hang)
        if is_stopped(self._run.parent):
            trouble = f"process {self._run.parent} is stopped by a signal"
        return RunObservation(
            attempts=attempts,
            beats=beats,
            heartbeat_ages={beat.rank: max(0.0, now - beat.alive_at) for beat in beats},
            trouble=trouble,
            is_training=bool(live) and all(beat.start_step is not None for beat in live),
            metrics=dict(self._metrics),
            events=dict(self._events),
            checkpoint_age=None if self._saved_at is None else max(0.0, self._wall_clock() - self._saved_at),
            goodput=self._goodput(attempts, beats, now),
        )

    def _heartbeats(self) -> tuple[int, list[HeartbeatReading]]:
        numbers = [int(path.name.rpartition("-")[2]) for path in self._run.beats.glob("attempt-*")]
        folder = self._run.beats / f"attempt-{max(numbers)}" if numbers else self._run.beats
        ranks = sorted(int(path.name.removeprefix("rank-")) for path in folder.glob("rank-" + "[0-9]" * 5))
        found = (read_heartbeat(folder, rank) for rank in ranks)
        # no folders without a supervisor: one attempt
        return max(1, len(numbers)), [beat for beat in found if beat is not None]

    def _count(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if isinstance(kind, str):
            self._events[kind] += 1
        if kind == "checkpoint":
            with suppress(KeyError, ValueError):  # written by another program
                self._saved_at = datetime.fromisoformat(str(event["time"])).timestamp()

    def _goodput(self, attempts: int, beats: list[HeartbeatReading], now: float) -> dict[str, float]:
        """Return the seconds by part until the end of rank 0's last phase; later ones are not known yet."""
        account, ended = self._settled()
        first = next((beat for beat in beats if beat.rank == 0), None)
        if beats and first is None:
            return {}  # rank 0 is on another host, and so is the account
        # The last attempt has ended, and the next one has not begun.
        if ended == attempts:
            account.record_wait(now)
        elif first is None or first.start_step is None:
            account.record_attempt(now, None, failed=False)
        else:
            account.record_attempt(max(first.since, account.accounted_until), first, failed=False)
        return account.totals()

    def _settled(self) -> tuple[Goodput, int]:
        """Return the account of the attempts that have ended, and their number."""
        with suppress(OSError, ValueError):  # without a supervisor there is none
            state = json.loads((self._run.beats / GOODPUT_FILE).read_text(encoding="utf-8"))
            return Goodput.from_state(state), int(state["attempts"])
        return Goodput(self._run.started), 0


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class MetricFamily:
    """A metric in Prometheus' sense: name, help and all its labelled series."""

    name: str  # name with its unit; ends with _total for a counter
    kind: Literal["gauge", "counter"]
    help: str
    series: Sequence[tuple[Mapping[str, str], float]] = ()  # labels and value of each series; labels differ


def exposition(families: Iterable[MetricFamily]) -> str:
    """Return the text of families; those without series are left out."""
    lines: list[str] = []
    for family in families:
        if family.series:
            text = family.help.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
            lines += [
                f"{family.name}{_format_labels(labels)} {_format_number(value)}" for labels, value in family.series
            ]
    return "".join(f"{line}\n" for line in lines)


def _format_labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escape_label(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _format_number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


_GAUGES_FROM_METRICS = {
    "step": ("hlat_logged_step", "Optimizer steps done at the last line of metrics, which the values below belong to."),
    "tokens": ("hlat_tokens", "Tokens of the steps done, at the last line of metrics."),
    "loss": ("hlat_loss", "Training loss in nats per token."),
    "val_loss": ("hlat_validation_loss", "Validation loss in nats per token, of the last validation."),
    "val_bits_per_byte": ("hlat_validation_bits_per_byte", "Validation loss in bits per byte of text."),
    "grad_norm": ("hlat_gradient_norm", "Global L2 norm of the gradient before clipping."),
    "lr": ("hlat_learning_rate", "Learning rate."),
    "tokens_per_second": ("hlat_tokens_per_second", "Training rate since the line of metrics before."),
    "mfu": ("hlat_mfu_ratio", "Model FLOP/s utilization, attention counted as causal."),
    "memory_bytes": ("hlat_memory_peak_bytes", "Peak device memory of the process that used most."),
    "memory_reserved_bytes": ("hlat_memory_reserved_bytes", "Peak that torch's allocator has reserved of it."),
    "memory_retries": ("hlat_memory_retries", "Times that the allocator gave memory back to find room."),
}


def metric_families(run: ObservedRun, status: RunObservation) -> list[MetricFamily]:
    """Return the metrics of a run; those that are not known yet have no series."""
    return [
        _gauge("hlat_run_info", "The run, as labels; always 1.", 1.0, name=run.name, version=version.VERSION),
        _gauge("hlat_healthy", "1 if the run is alive, as /healthz says.", float(status.trouble is None)),
        _gauge("hlat_training", "1 if every process has begun to train.", float(status.is_training)),
        _gauge("hlat_target_steps", "Optimizer steps of the recipe.", run.total_steps),
        *_progress_families(status),
        *_recovery_families(status),
        *(
            _gauge(name, text, _as_number(status.metrics.get(key)))
            for key, (name, text) in _GAUGES_FROM_METRICS.items()
        ),
    ]


def _progress_families(status: RunObservation) -> list[MetricFamily]:
    steps = [beat.step for beat in status.beats]
    states = (beat.start_step if beat.durable_step is None else beat.durable_step for beat in status.beats)
    durable = [step for step in states if step is not None]  # a process starts from a durable state
    ages = [({"rank": str(rank)}, age) for rank, age in status.heartbeat_ages.items()]
    return [
        _gauge("hlat_step", "Optimizer steps done, now.", max(steps, default=_as_number(status.metrics.get("step")))),
        _gauge("hlat_durable_step", "Newest step that survives a failure.", max(durable, default=None)),
        _gauge("hlat_processes", "Processes of the run that have a heartbeat.", len(status.beats)),
        MetricFamily("hlat_heartbeat_age_seconds", "gauge", "Time since the last heartbeat of a rank.", ages),
        _gauge("hlat_checkpoint_age_seconds", "Time since the newest checkpoint.", status.checkpoint_age),
    ]


def _recovery_families(status: RunObservation) -> list[MetricFamily]:
    total = sum(status.goodput.values())
    parts = [({"part": part}, seconds) for part, seconds in status.goodput.items()]
    events = [({"event": kind}, float(count)) for kind, count in sorted(status.events.items())]
    share = status.goodput["productive"] / total if total > 0 else None
    return [
        MetricFamily("hlat_restarts_total", "counter", "Restarts by this command.", [({}, status.attempts - 1.0)]),
        MetricFamily("hlat_events_total", "counter", "Events in the history of the run.", events),
        MetricFamily("hlat_goodput_seconds", "gauge", "Time of this command by what it was spent on.", parts),
        _gauge("hlat_goodput_ratio", "Productive share of the time of this command.", share),
    ]


def _gauge(name: str, text: str, value: float | None, /, **labels: str) -> MetricFamily:
    return MetricFamily(name, "gauge", text, [] if value is None else [(labels, value)])


def _as_number(value: object) -> float | None:
    """Return a metric as a number; None if it is missing, or another program wrote something else."""
    return float(value) if isinstance(value, int | float) else None


_CLIENT_PATIENCE = 5.0  # seconds for a client to send its request


class StatusServer(ThreadingHTTPServer):
    """Server of the status of a run on a listening socket, which it closes; each request observes anew."""

    daemon_threads = True  # a client that is slow does not keep the process

    def __init__(self, listener: socket.socket, run: ObservedRun) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()  # the base class makes one; ours was bound before the run started
        self.socket, self.run = listener, run
        self._observer, self._lock = RunObserver(run), threading.Lock()

    def status(self) -> RunObservation:
        with self._lock:  # an observer remembers what it has read: requests take turns
            return self._observer.observe()


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = _CLIENT_PATIENCE
    server_version, sys_version = "hlat", ""  # tells no versions to clients

    def do_GET(self) -> None:
        status = self.server.status()
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE, exposition(metric_families(self.server.run, status)))
        elif path == "/healthz":
            self._send_health(status.trouble is None, status)
        elif path == "/readyz":
            self._send_health(status.trouble is None and status.is_training, status)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", "/metrics, /healthz or /readyz\n")

    do_HEAD = do_GET

    def _send_health(self, good: bool, status: RunObservation) -> None:
        first = status.beats[0] if status.beats else None
        content = {
            "ok": good,
            "reason": status.trouble or ("training" if status.is_training else "not training yet"),
            "step": None if first is None else first.step,
            "phase": None if first is None else first.phase,
            "processes": len(status.beats),
            "restarts": status.attempts - 1,
        }
        code = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
        self._send(code, "application/json", json.dumps(content) + "\n")

    def _send(self, code: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep requests off the streams of the run."""


_OBSERVE_EVERY = 1.0  # seconds between two observations, from which it learns how long phases take


def serve(channel: Channel, settings: dict[str, Any]) -> None:
    """Serve a run, fields of ``ObservedRun``, on the socket that is sent; the work of a helper process."""
    _, [listener] = channel.receive()
    server = StatusServer(socket.socket(fileno=listener), ObservedRun(**settings))
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    while True:
        server.status()
        time.sleep(_OBSERVE_EVERY)
