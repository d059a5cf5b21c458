"""Reports of what each rank was doing when a run hung, in files of the folder that all hosts share.

    first rank that is late --raise_alarm--> logs/hang/alarm --> every rank: write --> logs/hang/rank-00003.json
                                                                              read --> reports of all ranks

A rank without a report gives no sign of life. Times in reports are ages, so that clocks of hosts do not matter. No
report is left from an earlier attempt: each rank removes its own before it joins the others, and a run can hang only
after all have joined. Those of an earlier alarm, after which the run went on, are told by their time.
"""

import json
import math
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hlat.data import write_atomic
from hlat.resilience import HeartbeatReading

_ALARM = "alarm"
_Identity = tuple[int, int] | None


@dataclass(frozen=True)
class HangReport:
    """Activity of a rank when a run hung.

    Attributes:
        beat: its heartbeat; times are in seconds before the report, negative.
        host: name of its host.
        late: True if its own phase had lasted too long.
    """

    beat: HeartbeatReading
    host: str
    late: bool

    @classmethod
    def of(cls, beat: HeartbeatReading, now: float, late: bool) -> "HangReport":
        """Return the report of a rank of this host.

        Args:
            beat: its heartbeat.
            now: seconds, on the clock of the heartbeat.
            late: see ``late``.
        """
        return cls(beat.aged(now), platform.node(), late)


class HangReports:
    """Files of the reports of one rank's run.

    Errors of the disk are ignored: a rank that cannot report ends without a verdict about the others.

    Args:
        run_dir: folder of the run.
        rank: this rank.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._folder, self._rank = run_dir / "logs" / "hang", rank
        with suppress(OSError):
            self._file(rank).unlink(missing_ok=True)
        self._known_alarm = self._alarm()

    def raise_alarm(self) -> None:
        """Ask every rank for its report."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._folder / _ALARM, str(self._rank).encode())

    def alarmed(self) -> bool:
        """Return True if a rank has raised an alarm since this was called last."""
        before, self._known_alarm = self._known_alarm, self._alarm()
        return self._known_alarm != before and self._known_alarm is not None

    def write(self, report: HangReport) -> None:
        """Write the report of this rank."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._file(self._rank), json.dumps(asdict(report)).encode())

    def read(self, world: int, margin: float = 0.0) -> list[HangReport]:
        """Return the reports of the last alarm, of those of the ``world`` ranks that have one.

        Args:
            world: number of ranks.
            margin: seconds before that alarm from which reports count too.
        """
        alarm = -math.inf
        with suppress(OSError):
            alarm = (self._folder / _ALARM).stat().st_mtime
        found = (self._read(rank, alarm - margin) for rank in range(world))
        return [report for report in found if report is not None]

    def _read(self, rank: int, oldest: float) -> HangReport | None:
        with suppress(OSError, ValueError, TypeError, KeyError):  # missing, or written by another version
            if self._file(rank).stat().st_mtime < oldest:  # by the clock of the shared folder, as the alarm
                return None
            content = json.loads(self._file(rank).read_text(encoding="utf-8"))
            return HangReport(HeartbeatReading(**content["beat"]), str(content["host"]), bool(content["late"]))
        return None

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.json"

    def _alarm(self) -> _Identity:
        with suppress(OSError):
            found = (self._folder / _ALARM).stat()
            return found.st_ino, found.st_mtime_ns
        return None
