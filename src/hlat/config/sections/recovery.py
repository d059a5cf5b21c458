"""The sections of a recipe about what goes wrong. One sentence per field: this file is the manual."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from hlat.config.errors import Problem, RecipeError
from hlat.config.sections.base import Section

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class LocalSnapshotsConfig(Section):
    """Frequent copies of the state on each machine, besides the checkpoints of the run."""

    dir: str
    """Folder on each machine, on its own disk or in its memory (/dev/shm/...); {node} in it is the machine's number."""
    every_seconds: Seconds = 60.0
    """Seconds between two snapshots, by the clock of rank 0."""
    replicate: bool = True
    """Whether each machine keeps the snapshot of another one too, so that losing one machine loses nothing."""


class CheckpointConfig(Section):
    """When the state of the run is saved and what is kept."""

    every_steps: Positive | None = 500
    """Steps between two checkpoints; null saves only at the end."""
    keep_last: Positive = 3
    """How many of the newest checkpoints are kept."""
    keep_every_steps: Positive | None = None
    """Checkpoints at multiples of this are kept for ever."""
    init_from: str | None = None
    """Checkpoint whose weights the run starts from (see hlat import); null starts from random weights."""
    background: bool = True
    """Whether a process beside each rank writes checkpoints; costs a second copy of the state in host memory."""
    retries: Count = 3
    """How often a save that failed is tried again, after 1, 2, 4, ... seconds."""
    failures: Positive = 5
    """How many saves in a row may fail, each with its retries, before the run ends."""
    remote: str | None = None
    """URL (s3://bucket/prefix) of an object store where every checkpoint is kept too; null for none."""
    local: LocalSnapshotsConfig | None = None
    """Snapshots on each machine, more frequent than checkpoints; null for none."""


class RecoveryConfig(Section):
    """Who restarts the run, when, and what counts as hanging."""

    restarts: Count = 3
    """Restarts in a row that may bring no new checkpoint before the run is given up; 0 never restarts."""
    backoff_seconds: Annotated[float, Field(ge=0)] = 1.0
    """Pause before a restart; doubled with every one in a row that brought nothing, up to a minute."""
    hang_seconds: Seconds | None = 120.0
    """A phase of a step that takes longer, and ten times its longest so far, is a hang; null never ends one."""
    slow_factor: Annotated[float, Field(gt=1)] = 2.0
    """A rank that works so many times as long as the others do is reported as slow."""
    deadline_seconds: Seconds | None = None
    """Save and stop, to be queued again, so many seconds after the command began; null for no deadline."""


class AnomalyConfig(Section):
    """What is done about numbers that are not finite, and about spikes of the loss or the gradient norm."""

    non_finite: Literal["skip", "stop"] = "skip"
    """skip leaves weights and moments as they are and goes on with the next batch; stop ends the run."""
    spike: Literal["ignore", "warn", "skip", "rollback"] = "warn"
    """skip does not apply the update; rollback returns to the checkpoint before it and leaves those samples out."""
    threshold: Annotated[float, Field(gt=0)] = 20.0
    """A spike lies so many robust standard deviations above the median of the window."""
    window: Annotated[int, Field(ge=8)] = 128
    """Steps that the statistics look back on; nothing is a spike before a quarter of them is there."""
    budget: Positive = 10
    """How many steps within one window may be skipped or rolled back before the run stops."""


class IntegrityConfig(Section):
    """Comparing the copies of weights and optimizer state that must be equal, to find silent corruption."""

    every_steps: Positive | None = None
    """Steps between two comparisons; null compares before every checkpoint only."""
    before_saves: bool = True
    """Whether nothing is saved before its copies were compared."""


ProcessFault = Literal[
    "kill", "stop", "hang", "deadlock", "exception", "oom", "slow", "nan", "spike", "bitflip", "sigterm", "sigusr1"
]
StorageFault = Literal["enospc", "eio", "torn_write", "corrupt", "slow_disk", "unavailable"]


class FaultConfig(Section):
    """A fault that is injected on purpose; the command needs --allow-faults."""

    kind: ProcessFault | StorageFault
    """What happens; docs/recovery.md describes each."""
    at_step: Positive
    """The optimizer step, counted from 1, in which it happens; of storage, the first step whose saves it hits."""
    rank: Count = 0
    """The rank that it happens to."""
    phase: Literal["data", "forward", "backward", "reduce", "optimizer", "evaluation", "checkpoint"] = "forward"
    """Where in the step it happens; spike and storage faults do not ask."""
    seconds: Seconds = 3600.0
    """How long a hang lasts, or by how much slow delays the rank in each step."""
    steps: Positive = 1
    """For how many steps slow lasts; of storage, for how many saves the fault does."""


def refuse_faults(faults: Sequence[FaultConfig], allowed: bool) -> None:
    """See that nobody's run is made to fail by a recipe that came from elsewhere.

    Raises:
        RecipeError: there are faults, and they were not allowed.
    """
    if faults and not allowed:
        kinds = ", ".join(f"{fault.kind} at step {fault.at_step}" for fault in faults)
        remedy = "Give --allow-faults if the run is to fail in these ways, or remove them."
        raise RecipeError([Problem("faults", f"the recipe asks for faults: {kinds}.", remedy)])
