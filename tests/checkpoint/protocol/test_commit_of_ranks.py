"""Law 4 with several ranks: if any rank fails, at any operation, there is no new checkpoint, and all ranks know it."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.format.tensor_files import TensorChunk, replicated_chunks
from hlat.checkpoint.protocol.reader import Checkpoint, open_on_all_ranks, verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError, LaunchError, StorageError
from tests.support.checkpoint.failing_disks import CountingDisk, FailingDisk, PowerLoss
from tests.support.checkpoint.saved_states import assert_equal, state
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks

WORLD = 3


def chunks_of(step: int, rank: int) -> list[TensorChunk]:
    """Chunks of a rank: its rows of the matrices, and the replicated tensors."""
    shared = [chunk for chunk in replicated_chunks(state(step)) if not chunk.name.startswith("model.")]
    rows = []
    for name, tensor in state(step).items():
        count = tensor.shape[0] if tensor.ndim else 0
        first, stop = rank * count // WORLD, (rank + 1) * count // WORLD
        if name.startswith("model.") and (stop > first or (count == 0 and rank == 0)):
            offsets = (first, *(0 for _ in tensor.shape[1:]))
            rows.append(TensorChunk(name, tuple(tensor.shape), offsets, (tensor[first:stop],)))
    return [*rows, *shared]


def save(store: CheckpointStore, ranks: HostGroup, step: int) -> Path:
    return store.save(step, chunks_of(step, ranks.rank), {"step": step})


def assert_is_step(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None and checkpoint.step == step
    assert_equal(checkpoint.load(""), state(step))


def no_damage(folder: Path, problems: list[str]) -> None:
    raise AssertionError(f"{folder}: {problems}")


def reopen(root: Path) -> CheckpointStore:
    """Open the store as a single process, which removes leftovers; checkpoints do not depend on the number of ranks."""
    return CheckpointStore(root, 9, on_damage=no_damage)


def operations_per_rank(tmp_path: Path) -> list[list[str]]:
    """List the disk operations of each rank in a save."""

    def work(ranks: HostGroup) -> list[str]:
        disk = CountingDisk()
        store = CheckpointStore(tmp_path / "count", 9, disk=disk, ranks=ranks)
        begun = len(disk.operations)
        save(store, ranks, 1)
        return disk.operations[begun:]

    return results_of(run_on_ranks(WORLD, work))


def test_a_save_by_all_ranks_makes_a_checkpoint(tmp_path: Path) -> None:
    done = operations_per_rank(tmp_path)
    assert verify_checkpoint(tmp_path / "count" / "step-00000001") == []
    assert_is_step(reopen(tmp_path / "count").newest(), 1)
    written = [{what.split()[1] for what in rank if what.startswith("create")} for rank in done]
    assert len({rank[-1] for rank in done[1:]}) == 1, "each rank fsyncs the shared folder"
    assert done[1][-1].startswith("fsync folder .staging-step-00000001-")
    assert written[1] == {"model__1_0.distcp"}
    assert written[2] == {"model__2_0.distcp"}, "replicated tensors are written by rank 0"


@pytest.mark.parametrize(
    ("code", "stays"), [pytest.param(errno.EIO, False, marks=pytest.mark.slow), (errno.ENOSPC, True)]
)
@pytest.mark.parametrize("failing", range(WORLD))
def test_a_failure_of_any_operation_on_any_rank_fails_the_save_on_all(
    tmp_path: Path, failing: int, code: int, stays: bool
) -> None:
    count = operations_per_rank(tmp_path)[failing]
    for at in range(1, len(count) + 1):
        root = tmp_path / str(at)

        def work(ranks: HostGroup, root: Path = root, at: int = at) -> str:
            disk = FailingDisk(10**9, code, stays)
            store = CheckpointStore(root, 9, disk=disk, ranks=ranks)
            save(store, ranks, 1)
            if ranks.rank == failing:
                disk.at = len(disk.operations) + at
            with pytest.raises(StorageError) as caught:
                save(store, ranks, 2)
            ranks.barrier()
            appeared = {path.name for path in root.iterdir()}
            ranks.barrier()
            disk.at = 10**9
            save(store, ranks, 3)
            assert_is_step(store.newest(), 3)
            staging = {name for name in appeared if name.startswith(".staging-step-00000002-")}
            assert appeared - staging <= {"step-00000001", "step-00000002"}
            # The rename is the commit point: a later failure is reported, but the checkpoint is complete.
            renamed = any(what.startswith("rename") for what in count[: at - 1])
            assert ("step-00000002" in appeared) == renamed
            assert len(staging) <= (stays or "rm" in count[at - 1])
            return str(caught.value)

        for message in results_of(run_on_ranks(WORLD, work)):
            assert message.startswith(f"rank {failing}: ") and str(root) in message and "What would work" in message
        store = reopen(root)
        assert_is_step(store.newest(), 3)
        assert {path.name for path in root.iterdir()} == {f"step-{step:08d}" for step in store.steps()}


class DyingDisk(CountingDisk):
    """Disk whose process dies before operation number ``at``."""

    at = 10**9

    def before(self, number: int, what: str) -> None:
        if number >= self.at:
            raise PowerLoss


@pytest.mark.parametrize("dying", range(WORLD))
def test_a_rank_that_dies_before_any_operation_leaves_no_incomplete_checkpoint(tmp_path: Path, dying: int) -> None:
    """The others do not wait for it. The earlier checkpoint is left, and the new one is complete or absent."""
    count = operations_per_rank(tmp_path)[dying]
    found = []
    for at in range(1, len(count) + 1):
        root = tmp_path / str(at)

        def work(ranks: HostGroup, root: Path = root, at: int = at) -> None:
            disk = DyingDisk()
            store = CheckpointStore(root, 9, disk=disk, ranks=ranks)
            save(store, ranks, 1)
            if ranks.rank == dying:
                disk.at = len(disk.operations) + at
            save(store, ranks, 2)

        outcomes = run_on_ranks(WORLD, work)
        assert isinstance(outcomes[dying], PowerLoss)
        assert all(isinstance(outcome, BaseException) for outcome in outcomes)
        store = reopen(root)
        found.append(store.newest().step)
        assert_is_step(store.newest(), found[-1])
        assert {path.name for path in root.iterdir()} == {f"step-{step:08d}" for step in store.steps()}
    assert found == sorted(found)
    assert set(found) == ({1, 2} if dying == 0 else {1})


def test_free_space_is_checked_for_all_ranks_together(tmp_path: Path) -> None:
    """The chunks of each rank would fit, but not those of all ranks; nothing is written."""
    total = sum(chunk.nbytes for rank in range(WORLD) for chunk in chunks_of(1, rank) if not chunk.replicated)

    class SmallDisk(CountingDisk):
        def free_bytes(self, path: Path) -> int:
            return (1 << 20) + total

    def work(ranks: HostGroup) -> tuple[str, list[str]]:
        disk = SmallDisk()
        store = CheckpointStore(tmp_path, 9, disk=disk, ranks=ranks)
        begun = len(disk.operations)
        with pytest.raises(StorageError) as caught:
            save(store, ranks, 1)
        return str(caught.value), disk.operations[begun:]

    for message, done in results_of(run_on_ranks(WORLD, work)):
        assert message.startswith("rank 0: ") and "are free" in message
        assert not any(what.startswith("create") for what in done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("defect", ["a hole", "an overlap", "another dtype"])
def test_chunks_that_do_not_cover_the_tensors_are_not_saved(tmp_path: Path, defect: str) -> None:
    def damaged_chunks(chunks: list[TensorChunk], rank: int) -> list[TensorChunk]:
        if rank != 1:
            return chunks
        first, *others = chunks
        if defect == "a hole":
            return others
        if defect == "an overlap":
            return [replace(first, offsets=(first.offsets[0] - 1, *first.offsets[1:])), *others]
        return [replace(first, rows=tuple(part.double() for part in first.rows)), *others]

    def work(ranks: HostGroup) -> type[BaseException]:
        store = CheckpointStore(tmp_path, 9, ranks=ranks)
        with pytest.raises((AssertionError, LaunchError)) as caught:
            store.save(1, damaged_chunks(chunks_of(1, ranks.rank), ranks.rank), {})
        return caught.type

    assert results_of(run_on_ranks(WORLD, work)) == [AssertionError, LaunchError, LaunchError]
    assert list(tmp_path.iterdir()) == []


def test_ranks_without_a_shared_file_system_are_an_error(tmp_path: Path) -> None:
    """Each rank has a local folder of the same name."""

    def work(ranks: HostGroup) -> str:
        with pytest.raises(StorageError) as caught:
            CheckpointStore(tmp_path / f"machine-{ranks.rank}", 9, ranks=ranks)
        return str(caught.value)

    for rank in range(WORLD):
        (tmp_path / f"machine-{rank}").mkdir()
    for message in results_of(run_on_ranks(WORLD, work)):
        assert "does not see what rank 0 writes there" in message and "all machines of the run share" in message
    assert list((tmp_path / "machine-0").iterdir()) == []


@pytest.mark.parametrize("elsewhere", ["another", "none"])
def test_a_checkpoint_that_some_rank_does_not_see_is_an_error(tmp_path: Path, elsewhere: str) -> None:
    """A different checkpoint of the same name is an error too."""
    for name, value in (("one", 1.0), ("another", 2.0)):
        CheckpointStore(tmp_path / name, 9).save(1, replicated_chunks({"model.w": torch.full((2,), value)}), {})

    def work(ranks: HostGroup) -> str:
        machine = tmp_path / ("one" if ranks.rank < 2 else elsewhere)
        with pytest.raises(CheckpointError) as caught:
            open_on_all_ranks(machine / "step-00000001", ranks)
        return str(caught.value)

    messages = results_of(run_on_ranks(WORLD, work))
    assert all("does not see the checkpoint that rank 0 sees there" in message for message in messages)
    assert messages[0].startswith("rank 2: ")


def test_all_ranks_get_the_same_newest_checkpoint_and_pruned_steps(tmp_path: Path) -> None:
    """Damaged checkpoints are renamed once, all ranks resume from the same one, and all get the pruned steps."""
    first = CheckpointStore(tmp_path, 9)
    for step in (1, 2, 3, 4):
        first.save(step, replicated_chunks(state(step)), {"step": step})
    damaged = tmp_path / "step-00000004" / "model__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    reports: list[Path] = []

    def work(ranks: HostGroup) -> list[int]:
        store = CheckpointStore(tmp_path, 1, on_damage=lambda folder, _: reports.append(folder), ranks=ranks)
        assert_is_step(store.newest(), 3)
        return store.prune()

    assert results_of(run_on_ranks(WORLD, work)) == [[1, 2]] * WORLD
    assert reports == [tmp_path / "step-00000004.bad"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "step-00000004.bad"}


def test_an_unreadable_store_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")

    def work(ranks: HostGroup) -> str:
        with pytest.raises(StorageError) as caught:
            CheckpointStore(tmp_path / "run" / "checkpoints", 1, disk=Disk(), ranks=ranks)
        return str(caught.value)

    assert len(set(results_of(run_on_ranks(WORLD, work)))) == 1
