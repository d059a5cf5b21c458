"""Corruption check: compares replicated tensors during training, so that no corrupted state is saved.

    after a step, before a save -> ReplicaCheck.compare --equal---> continue; if the step failed before, name the rank
                                           |
                                           differ -> event, <run.dir>/integrity.json, CorruptionError on every rank

On CorruptionError the supervisor restarts the run from the newest checkpoint, whose replicas were compared. If the same
ranks differ again before the run has passed that step, PersistentCorruptionError ends the run without a restart.
"""

import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hlat.checkpoint import software_versions
from hlat.resilience import CorruptionIncident, Mismatch, ReplicaCheck
from hlat.runtime.errors import CorruptionError, PersistentCorruptionError, StorageError
from hlat.runtime.progress import enter_phase
from hlat.runtime.storage.local_files import write_atomic
from hlat.runtime.terminal import listed, plural
from hlat.tracking import OtherRankTracker, Tracker
from hlat.training.components import StepEnd, TrainingComponent
from hlat.training.run_state import RunState

_LISTED = 20  # tensors in an event, at most; integrity.json has all


class CorruptionCheck(TrainingComponent):
    """Compares the replicas of weights and optimizer state. The constructor and all methods are collective."""

    def __init__(self, state: RunState, tracker: Tracker | OtherRankTracker) -> None:
        self._state, self._tracker, self._config = state, tracker, state.recipe.integrity
        self._file = state.recipe.run_dir / "integrity.json"
        self._compared = False  # True if compared since the last step
        enabled = self._config.every_steps is not None or self._config.before_saves
        ranks = state.runtime.ranks
        self._replicas: ReplicaCheck | None = None
        if enabled and ranks.world > 1:
            kept = {each.name: each.by_parameter for each in state.components.state() if each.by_parameter}
            self._replicas = ReplicaCheck(state.model.local_parameters, state.optimizer, ranks, kept)
        if self._replicas is not None and not self._replicas.has_replicas:
            self._replicas = None
            if self._config.every_steps is not None:  # asked for; by default it compares where it can
                tracker.warn("integrity: this layout replicates no tensor, so silent corruption cannot be detected")
        self._earlier = ranks.run_on_rank0(self._read) if self._replicas is not None else None
        # Nothing can be concluded from another layout, and a step that is over is not repeated.
        if self._earlier is not None and (self._earlier.layout != self._layout or self._earlier.step <= state.step):
            self._forget(explained=False)

    @property
    def compares(self) -> bool:
        """True if the recipe asks for it, and this layout has replicas."""
        return self._replicas is not None

    def after_step(self, end: StepEnd) -> None:
        """Compare replicas if this step is due or differed before; raises CorruptionError. Collective."""
        self._compared = False
        step, every = end.step, self._config.every_steps
        is_repeated = self._earlier is not None and self._earlier.step == step
        if is_repeated or (every is not None and step % every == 0):
            enter_phase("checkpoint")
            self._compare()
            enter_phase("between")

    def before_save(self) -> None:
        """Compare, unless done since the last step; raises CorruptionError."""
        if self._config.before_saves and not self._compared:
            self._compare()

    def _compare(self) -> None:
        if self._replicas is None:
            return
        mismatches = self._replicas.compare()
        self._compared = True
        if mismatches:
            self._raise(mismatches)
        elif self._earlier is not None and self._earlier.step <= self._state.step:
            self._explain(self._earlier, self._replicas)

    def _raise(self, mismatches: list[Mismatch]) -> NoReturn:
        ranks, step = self._state.runtime.ranks, self._state.step
        incident = CorruptionIncident.from_mismatches(
            step, self._layout, mismatches, ranks.all_gather(socket.gethostname()), self._earlier
        )
        self._tracker.event(
            "corruption",
            step=step,
            tensors=len(mismatches),
            copies={each.name: dict(each.digests) for each in mismatches[:_LISTED]},
            ranks=incident.suspects,
            hosts=incident.suspect_hosts,
            decided=bool(incident.outvoted),
            repeated=incident.repeated,
        )
        if ranks.is_first:
            with suppress(StorageError):  # a failing disk must not hide the corruption
                _write(self._file, incident.state())
        # A second mismatch of the same ranks means a broken device: another restart would fail in the same way.
        kind = CorruptionError if incident.repeated == 1 else PersistentCorruptionError
        raise kind(_message(incident, self._state))

    def _explain(self, earlier: CorruptionIncident, replicas: ReplicaCheck) -> None:
        """Name the rank that was wrong: the step was repeated, and now its replicas are equal."""
        # The repeated step has the right digests, so they tell which rank had others. Without them the majority
        # decides.
        wrong = (
            earlier.wrong_ranks(replicas.replica_digests(each.name for each in earlier.mismatches)) or earlier.outvoted
        )
        self._tracker.event(
            "corruption_explained", step=earlier.step, ranks=wrong, hosts=[earlier.hosts[rank] for rank in wrong]
        )
        who = listed(f"rank {rank} on {earlier.hosts[rank]}" for rank in wrong)
        self._tracker.warn(
            f"step {earlier.step} was repeated, and its replicas are equal: "
            + (f"{who} was wrong before" if wrong else "which rank was wrong before is unknown")
        )
        self._forget(explained=True)

    def _forget(self, explained: bool) -> None:
        if self._earlier is not None and not explained:
            step = self._earlier.step
            self._tracker.warn(
                f"the mismatch of step {step} stays unexplained: the run has another layout, or is past that step"
            )
        self._earlier = None
        if self._state.runtime.ranks.is_first:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def _read(self) -> CorruptionIncident | None:
        try:
            return CorruptionIncident.from_state(json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            self._tracker.warn(f"{self._file} cannot be read and is ignored: {error!r}")
            return None

    @property
    def _layout(self) -> str:
        # A repeated step has the same bits only in the same layout and with the same libraries.
        parallel = self._state.recipe.parallel.model_dump_json()
        return f"{plural(self._state.runtime.world, 'process')}, {parallel}, {json.dumps(software_versions())}"


def _message(incident: CorruptionIncident, state: RunState) -> str:
    first = incident.mismatches[0]
    more = f" and {len(incident.mismatches) - 1} more" if len(incident.mismatches) > 1 else ""
    whose = listed(
        f"rank {rank} on {host}" for rank, host in zip(incident.suspects, incident.suspect_hosts, strict=True)
    )
    good = f"the last good state is {state.saved.path}" if state.saved is not None else "no state had been saved before"
    head = f"step {incident.step}: replicas that must be equal differ: {first.name}{more}. "
    if incident.outvoted:
        head += f"By majority {whose} is wrong. "
    else:
        head += f"There is no majority among {whose}. "
    if incident.repeated > 1:
        return (
            f"{head}This happened {plural(incident.repeated, 'time')} in a row: the corruption is persistent. "
            f"Nothing was saved, {good}. Exclude that machine, then start the same command again."
        )
    return f"{head}Nothing was saved, {good}. The same command resumes from there, and names the rank that was wrong."


def _write(path: Path, state: dict[str, Any]) -> None:
    try:
        write_atomic(path, json.dumps(state, indent=1).encode(), sync_folder=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
