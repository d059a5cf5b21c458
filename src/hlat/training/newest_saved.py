"""What a run has saved, and seeing that it is still there before the run goes on from less.

newest state that is found --refuse_lost--> on, or LostError where a newer one is known to have been durable

Going back is right where the newer state was found damaged: that is told, and what is damaged lies aside. Where there
is no trace of it somebody removed it, or another folder lies in place of the run's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hlat.checkpoint.protocol import BAD_SUFFIX, step_of_path
from hlat.runtime import StateLostError
from hlat.runtime.distributed import HostGroup
from hlat.runtime.storage import EarlierAttempt


@dataclass(frozen=True)
class Saved:
    """A checkpoint of this run."""

    step: int
    path: Path


@dataclass(frozen=True)
class Damage:
    """A checkpoint, or a part of a snapshot, that did not verify: where it lies now, and what is wrong with it."""

    path: Path | str
    problems: list[str]

    @property
    def step(self) -> int:
        """The step that it was of; -1 where its name does not say."""
        step = step_of_path(Path(self.path))
        return -1 if step is None else step


def refuse_lost(
    ranks: HostGroup, run_dir: Path, found: int | None, earlier: EarlierAttempt | None, damaged: Sequence[Damage]
) -> None:
    """See that the newest state is as new as what was durable, or that what is newer was found damaged. Collective.

    Args:
        ranks: the processes of the run.
        run_dir: its folder.
        found: step of the newest state that is whole; None if there is none.
        earlier: what was durable; None where nobody knows.
        damaged: what was found damaged and set aside just now, as rank 0 was told.

    Raises:
        LostError: a state has gone.
    """
    if earlier is None or (found or 0) >= earlier.saved:
        return

    def refuse() -> None:
        aside = [step_of_path(path) for path in run_dir.glob(f"checkpoints/*{BAD_SUFFIX}*")]  # by an earlier attempt
        if any(step is not None and step >= earlier.saved for step in [*aside, *(one.step for one in damaged)]):
            return
        there = "there is none now" if found is None else f"the newest one now is of step {found}"
        raise StateLostError(
            f"run.dir {run_dir}: the state of step {earlier.saved} was durable, and {there}, although none was found "
            "damaged: it was removed, or another folder lies in its place. Bring it back. To go on from what there is, "
            "give the same command again."
        )

    ranks.run_on_rank0(refuse)
