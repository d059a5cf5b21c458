"""Saved checkpoints of a run, and a check that none of them is lost before the run continues from an older one.

newest state found -> check_nothing_lost -> continue; StateLostError if a newer state is known to have been durable

Continuing from an older state is right if the newer one was found damaged: that is reported, and the damaged checkpoint
is set aside. If there is no trace of the newer one, somebody removed it, or another folder is in place of the run's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint import BAD_SUFFIX, step_of_path
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import StateLostError
from hlat.runtime.storage.run_folder import EarlierAttempt


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of this run."""

    step: int
    path: Path


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint, or a rank's file of a snapshot, that failed verification: its present path and its problems."""

    path: Path | str
    problems: list[str]

    @property
    def step(self) -> int:
        """Step of the checkpoint; -1 if its name has none."""
        step = step_of_path(Path(self.path))
        return -1 if step is None else step


def check_nothing_lost(
    ranks: HostGroup,
    run_dir: Path,
    found: int | None,
    earlier: EarlierAttempt | None,
    damaged: Sequence[DamagedCheckpoint],
) -> None:
    """Check that the newest state found is as new as the durable one, or that the newer one is damaged. Collective.

    Args:
        ranks: the processes of the run.
        run_dir: the folder of the run.
        found: step of the newest valid state; None if there is none.
        earlier: the step known to be durable; None if unknown.
        damaged: checkpoints just found damaged and set aside; only rank 0's list is used.

    Raises:
        StateLostError: a durable state is missing.
    """
    if earlier is None or (found or 0) >= earlier.saved:
        return

    def check() -> None:
        # set aside by an earlier attempt
        set_aside = [step_of_path(path) for path in run_dir.glob(f"checkpoints/*{BAD_SUFFIX}*")]
        if any(step is not None and step >= earlier.saved for step in [*set_aside, *(each.step for each in damaged)]):
            return
        newest = "there is none now" if found is None else f"the newest one now is of step {found}"
        raise StateLostError(
            f"run.dir {run_dir}: the state of step {earlier.saved} was durable, but {newest}, although none was found "
            "damaged. It was removed, or another folder is in its place. Restore it. To continue from what is there, "
            "give the same command again."
        )

    ranks.run_on_rank0(check)
