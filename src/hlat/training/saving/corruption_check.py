"""Comparing the copies of a run while it trains: nothing is saved of a state whose copies differ.

    step, save --is it time?--> Copies.compare --equal--> on; who was wrong before is told once that step is done again
                                        |
                                        differ -> event, <run.dir>/integrity.json, CorruptionError on every rank

Whoever started the run starts it again on that error, from the newest checkpoint, whose copies were compared. Where the
same ranks differ again before the step is behind them, the error is one that is not started again on.
"""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlat.checkpoint import software_versions
from hlat.resilience import Copies, Incident, Mismatch
from hlat.runtime import CorruptionError, PersistentCorruptionError, StorageError
from hlat.runtime.process import enter_phase
from hlat.runtime.storage import sync_to_disk
from hlat.tracking import OtherRank, Tracker
from hlat.training.run_state import Job

_LISTED = 20  # at most so many tensors are in an event; integrity.json has all


class Integrity:
    """Compares copies when it is time. Making it, and its methods, are collective.

    Args:
        job: whose weights and optimizer state.
        tracker: is told of what differs.
    """

    def __init__(self, job: Job, tracker: Tracker | OtherRank) -> None:
        self._job, self._tracker, self._config = job, tracker, job.recipe.integrity
        self._file = job.recipe.run_dir / "integrity.json"
        self._compared = False  # since the last step
        asked = self._config.every_steps is not None or self._config.before_saves
        ranks = job.runtime.ranks
        self._copies = Copies(job.model.held, job.optimizer, ranks) if asked and ranks.world > 1 else None
        if self._copies is not None and not self._copies.exist:
            self._copies = None
            tracker.message("integrity: this layout holds nothing twice, so silent corruption cannot be seen by copies")
        self._before = ranks.run_on_rank0(self._read) if self._copies is not None else None
        if self._before is not None and (self._before.layout != self._layout or self._before.step <= job.step):
            self._forget(explained=False)

    def after_step(self) -> None:
        """Compare, where the recipe asks for it after this step, or an earlier mismatch is to be explained.

        Raises:
            CorruptionError: copies differ.
        """
        self._compared = False
        step, every = self._job.step, self._config.every_steps
        repeats = self._before is not None and self._before.step == step
        if repeats or (every is not None and step % every == 0):
            enter_phase("checkpoint")
            self._compare()
            enter_phase("between")

    def before_save(self) -> None:
        """Compare, unless that was done since the last step.

        Raises:
            CorruptionError: copies differ; nothing may be saved.
        """
        if self._config.before_saves and not self._compared:
            self._compare()

    def _compare(self) -> None:
        if self._copies is None:
            return
        mismatches = self._copies.compare()
        self._compared = True
        if mismatches:
            self._tell(mismatches)
        elif self._before is not None and self._before.step <= self._job.step:
            self._explain(self._before, self._copies)

    def _tell(self, mismatches: list[Mismatch]) -> None:
        ranks, step = self._job.runtime.ranks, self._job.step
        found = Incident.of(step, self._layout, mismatches, ranks.all_gather(socket.gethostname()), self._before)
        self._tracker.event(
            "corruption",
            step=step,
            tensors=len(mismatches),
            copies={one.name: dict(one.copies) for one in mismatches[:_LISTED]},
            ranks=found.named,
            hosts=found.machines,
            decided=bool(found.outvoted),
            repeated=found.repeated,
        )
        if ranks.is_first:
            with suppress(StorageError):  # a disk that refuses must not hide what was found
                _write(self._file, found.state())
        kind = CorruptionError if found.repeated == 1 else PersistentCorruptionError
        raise kind(_message(found, self._job))

    def _explain(self, before: Incident, copies: Copies) -> None:
        """The step that had gone wrong is done again, and did not: say who it was that was wrong."""
        wrong = before.wrong(copies.digests(one.name for one in before.mismatches)) or before.outvoted
        self._tracker.event(
            "corruption_explained", step=before.step, ranks=wrong, hosts=[before.hosts[rank] for rank in wrong]
        )
        who = " and ".join(f"rank {rank} on {before.hosts[rank]}" for rank in wrong)
        self._tracker.message(
            f"step {before.step} done again, its copies are equal: "
            + (f"{who} was wrong, and is not any more" if wrong else "it cannot be said which rank had been wrong")
        )
        self._forget(explained=True)

    def _forget(self, explained: bool) -> None:
        if self._before is not None and not explained:
            step = self._before.step
            self._tracker.message(f"the mismatch of step {step} cannot be explained: its layout or its step is gone")
        self._before = None
        if self._job.runtime.ranks.is_first:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _read(self) -> Incident | None:
        try:
            return Incident.restored(json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._tracker.message(f"{self._file} cannot be read and is left aside: {error!r}")
            return None

    @property
    def _layout(self) -> str:
        """In what a step that is done again has the same bits."""
        parallel = self._job.recipe.parallel.model_dump_json()
        return f"{self._job.runtime.world} processes, {parallel}, {json.dumps(software_versions())}"


def _message(found: Incident, job: Job) -> str:
    first = found.mismatches[0]
    more = f" and {len(found.mismatches) - 1} more" if len(found.mismatches) > 1 else ""
    whose = " and ".join(f"rank {rank} on {host}" for rank, host in zip(found.named, found.machines, strict=True))
    good = f"the last good state is {job.saved.path}" if job.saved is not None else "no state had been saved before"
    head = f"step {found.step}: copies that have to be equal differ: {first.name}{more}. "
    if found.outvoted:
        head += f"The others agree that {whose} is wrong. "
    else:
        head += f"Nobody has a majority among {whose}. "
    if found.repeated > 1:
        return (
            f"{head}That is {found.repeated} times in a row: the fault is persistent. Nothing was saved, {good}. Leave "
            "that machine out, then start the same command again."
        )
    return f"{head}Nothing was saved, {good}. The same command goes on from there, and says who it was."


def _write(path: Path, state: dict[str, Any]) -> None:
    new = path.with_name(path.name + ".tmp")
    try:
        new.write_text(json.dumps(state, indent=1))
        sync_to_disk(new)
        os.replace(new, path)  # noqa: PTH105  (one call for what happens at one instant)
        sync_to_disk(path.parent)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
