"""Snapshots on the machines of a run: whatever is lost or damaged, the newest valid snapshot is promoted, or none."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hlat.checkpoint.protocol import rank_parts as replication
from hlat.checkpoint.protocol.rank_parts import next_in_ring
from hlat.checkpoint.protocol.reader import verify_checkpoint
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import LaunchError, StorageError
from tests.support.checkpoint.failing_disks import CountingDisk, FailingDisk, Forgets, PowerLoss, PowerLossDisk
from tests.support.checkpoint.machines import Cluster, Machines, assert_is_state_of_step
from tests.support.checkpoint.saved_states import save

TWO_BY_TWO: Machines = (0, 0, 1, 1)


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync, which is slow: these tests check the order of operations, not the device."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def flip(path: Path, at: int = -20) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def only_item(paths: list[Path]) -> Path:
    [path] = paths
    return path


@pytest.mark.parametrize("after", [TWO_BY_TWO, (0,), (0, 0), (0, 1, 1), (0, 0, 1, 1, 2, 2)])
def test_a_snapshot_can_be_promoted_on_any_number_of_ranks_and_machines(cluster: Cluster, after: Machines) -> None:
    cluster.snapshot(TWO_BY_TWO, 3, 5)
    if len(set(after)) == 1:
        cluster.lose(1)
    step, newest = cluster.promote(after)
    assert step == 5 and cluster.damaged == []
    assert_is_state_of_step(newest, 5)
    assert verify_checkpoint(cluster.run_dir / "checkpoints" / "step-00000005") == []


def test_each_machine_keeps_two_snapshots_and_two_copies(cluster: Cluster) -> None:
    names = cluster.snapshot(TWO_BY_TWO, 3, 5, 7, 9)
    kept = {path.relative_to(cluster.folder).parts[0::2][0:1] + path.parts[-2:] for path in cluster.parts()}
    assert kept == {
        (f"machine{machine}", name, f"rank-{rank:05d}")
        for machine in (0, 1)
        for name in names[-2:]
        for rank in range(4)
    }
    assert len(cluster.parts("*/peer/*/*")) == 8


def test_only_snapshots_newer_than_the_checkpoint_are_promoted(cluster: Cluster) -> None:
    store = CheckpointStore(cluster.run_dir / "checkpoints", keep_last=2)
    save(store, 5)
    cluster.snapshot(TWO_BY_TWO, 3, 5)
    step, newest = cluster.promote(TWO_BY_TWO)
    assert step is None and newest is not None and newest.step == 5
    cluster.snapshot(TWO_BY_TWO, 6)
    assert cluster.promote(TWO_BY_TWO)[0] == 6


def test_the_loss_of_one_machine_loses_no_snapshot(cluster: Cluster) -> None:
    for lost in (0, 1):
        cluster.snapshot(TWO_BY_TWO, lost + 1)
        cluster.lose(lost)
        step, newest = cluster.promote(TWO_BY_TWO)
        assert step == lost + 1
        assert_is_state_of_step(newest, lost + 1)


def test_without_copies_the_loss_of_a_machine_loses_its_snapshots(cluster: Cluster) -> None:
    cluster.snapshot(TWO_BY_TWO, 3, copies=False)
    assert cluster.parts("*/peer/*/*") == []
    cluster.lose(1)
    assert cluster.promote(TWO_BY_TWO, copies=False) == (None, None)


def test_a_single_machine_warns_that_there_are_no_copies(cluster: Cluster) -> None:
    def warning(machines: Machines, copies: bool = True) -> str:
        return cluster.run(machines, lambda ranks: cluster.tier(ranks, machines, copies).warning)[0]

    assert "no other machine for copies" in warning((0, 0))
    assert warning((0, 0), copies=False) == warning((0, 1)) == ""


@pytest.mark.parametrize("victim", ["model__1_0.distcp", "part.json", "COMMITTED"])
@pytest.mark.parametrize("damage_kind", ["flip", "truncate", "delete", "append"])
def test_a_damaged_part_is_reported_and_its_copy_is_used(cluster: Cluster, victim: str, damage_kind: str) -> None:
    cluster.snapshot(TWO_BY_TWO, 3, 5)
    part = only_item([path for path in cluster.parts("*/step-00000005.*/*") if path.name == "rank-00001"])
    damage(part / victim, damage_kind)
    step, newest = cluster.promote(TWO_BY_TWO)
    assert step == 5
    assert_is_state_of_step(newest, 5)
    [(path, [problem])] = cluster.damaged
    assert path == f"{part}.bad" and victim in problem and not part.exists()


def damage(path: Path, damage_kind: str) -> None:
    data = path.read_bytes()
    match damage_kind:
        case "flip":
            flip(path)
        case "truncate":
            path.write_bytes(data[:-1])
        case "append":
            path.write_bytes(data + b"x")
        case "delete":
            path.unlink()


def test_with_part_and_copy_damaged_the_previous_snapshot_is_promoted(cluster: Cluster) -> None:
    cluster.snapshot(TWO_BY_TWO, 3, 5)
    for part in cluster.parts("**/step-00000005.*/*"):
        if part.name == "rank-00002":
            flip(part / "optimizer__2_0.distcp")
    step, newest = cluster.promote(TWO_BY_TWO)
    assert step == 3 and len(cluster.damaged) == 2
    assert_is_state_of_step(newest, 3)


def test_parts_of_two_attempts_at_a_step_are_never_combined(cluster: Cluster) -> None:
    """The first attempt ended before rank 1 wrote its part, the second before rank 0 did."""
    first, second = (cluster.snapshot((0, 0), 4)[0] for _ in range(2))
    home = only_item(list(cluster.machine(0).iterdir()))
    assert [path.name for path in home.iterdir() if path.name.startswith("step")] == [second]
    shutil.copytree(home / second, home / first)
    shutil.rmtree(home / first / "rank-00001")
    shutil.rmtree(home / second / "rank-00000")
    assert cluster.promote((0, 0)) == (None, None)


def test_snapshots_of_another_run_are_ignored(cluster: Cluster) -> None:
    """A copy of a run folder, and an emptied run folder, are other runs."""
    cluster.snapshot((0,), 4)
    shutil.copytree(cluster.run_dir, cluster.folder / "copy")
    original, cluster.run_dir = cluster.run_dir, cluster.folder / "copy"
    assert cluster.promote((0,)) == (None, None)
    cluster.run_dir = original
    shutil.rmtree(original)
    assert cluster.promote((0,)) == (None, None)


def test_a_folder_shared_by_two_machines_is_an_error(cluster: Cluster) -> None:
    class Shared(Cluster):
        @property
        def pattern(self) -> str:
            return str(self.folder / "all")

    shared = Shared(cluster.folder)

    def work(ranks: HostGroup) -> str:
        with pytest.raises(LaunchError) as caught:
            shared.tier(ranks, TWO_BY_TWO)
        return str(caught.value)

    assert all("machines 0, 1 share this folder" in message for message in shared.run(TWO_BY_TWO, work))
    assert cluster.run((0, 0, 0, 0), lambda ranks: shared.tier(ranks, (0, 0, 0, 0)).warning)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "part.json"])
def test_a_part_that_names_files_outside_its_folder_is_refused(cluster: Cluster, name: str) -> None:
    cluster.snapshot((0,), 4)
    part = only_item(cluster.parts())
    text = json.loads((part / "part.json").read_text())
    text["files"][name] = text["files"].pop("model__0_0.distcp")
    for chunk in text["blocks"]:
        chunk["file"] = name if chunk["file"] == "model__0_0.distcp" else chunk["file"]
    data = json.dumps(text).encode()
    (part / "part.json").write_bytes(data)
    (part / "COMMITTED").write_text(hashlib.sha256(data).hexdigest())
    assert cluster.promote((0,)) == (None, None)
    [(_, [problem])] = cluster.damaged
    assert "not a plain path" in problem


# --- failing disks and crashes -------------------------------------------------------------------------------------


def write_second_snapshot(cluster: Cluster, disk: CountingDisk) -> None:
    """Open the tier of one rank with a first snapshot, on a given disk, and write a second snapshot."""
    ranks = HostGroup()
    tier = cluster.tier(ranks, (0,), disk=disk)
    store = CheckpointStore(cluster.run_dir / "checkpoints", keep_last=2)
    tier.promote(store, 100)  # newer than all snapshots: nothing is promoted
    cluster.write(tier, ranks, 5)


@pytest.fixture
def make_cluster(tmp_path: Path) -> Callable[[str], Cluster]:
    """Function that makes a cluster with a first snapshot."""
    template = Cluster(tmp_path)
    template.snapshot((0,), 2, 3)

    def make(name: str) -> Cluster:
        folder = tmp_path / name
        for part in ("machine0", "run"):
            shutil.copytree(tmp_path / part, folder / part)
        (folder / "shelter").mkdir()
        made = Cluster(folder)
        old = only_item(list((folder / "machine0").iterdir()))
        made.run((0,), lambda ranks: made.tier(ranks, (0,)))  # rename the snapshot folder to the name for this run
        new = only_item([path for path in (folder / "machine0").iterdir() if path != old])
        new.rmdir()
        old.rename(new)
        return made

    return make


@pytest.mark.parametrize("forgets", ["everything", "all but removals", pytest.param("nothing", marks=pytest.mark.slow)])
def test_a_crash_before_any_operation_leaves_a_valid_snapshot(
    make_cluster: Callable[[str], Cluster], forgets: Forgets
) -> None:
    count = CountingDisk()
    write_second_snapshot(make_cluster("count"), count)
    found = []
    for at in range(1, len(count.operations) + 2):
        cluster = make_cluster(f"stop-{at}")
        disk = PowerLossDisk(at, cluster.folder / "shelter", forgets)
        with pytest.raises(PowerLoss):
            write_second_snapshot(cluster, disk)
            disk.sync_folder(cluster.folder)
        step, newest = cluster.promote((0,))
        assert step is not None and cluster.damaged == []
        assert_is_state_of_step(newest, step)
        found.append(step)
        shutil.rmtree(cluster.folder)
    assert sorted(found) == found and set(found) == {3, 5}


@pytest.mark.parametrize(
    ("code", "stays"), [(errno.EIO, False), pytest.param(errno.ENOSPC, True, marks=pytest.mark.slow)]
)
def test_a_failure_of_any_operation_leaves_a_valid_snapshot(
    make_cluster: Callable[[str], Cluster], code: int, stays: bool
) -> None:
    count = CountingDisk()
    write_second_snapshot(make_cluster("count"), count)
    refused = 0
    removal = next(n for n, what in enumerate(count.operations) if what.startswith("mkdir .staging"))
    for at in range(1, len(count.operations) + 1):
        cluster = make_cluster(f"refuse-{at}")
        disk = FailingDisk(at, code, stays)
        try:
            write_second_snapshot(cluster, disk)
        except StorageError as error:
            refused += 1
            assert "cannot store snapshots" in str(error) and "What would work" in str(error)
        else:
            assert at <= removal, "an old snapshot could not be removed; this is tried again later"
        step, newest = cluster.promote((0,))
        assert step in (3, 5) and cluster.damaged == []
        assert_is_state_of_step(newest, step)
        cluster.snapshot((0,), 8)
        assert cluster.promote((0,))[0] == 8, "the run continues"
        shutil.rmtree(cluster.folder)
    assert refused > 20


@pytest.mark.parametrize("failing", range(4))
def test_a_disk_that_fails_during_replication_does_not_block_other_ranks(
    cluster: Cluster, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks get the error; the previous snapshot and the next one are valid. Blocks are smaller than any file."""
    monkeypatch.setattr(replication, "_PIECE", 1000)

    class NoCopies(CountingDisk):
        full = True

        def before(self, number: int, what: str) -> None:
            if self.full and self.copying and what.startswith("write"):
                raise OSError(errno.ENOSPC, "no space")

        copying = False

        def create(self, path: Path):
            self.copying = "peer" in path.parts
            return super().create(path)

    disks: dict[int, NoCopies] = {}

    def work(ranks: HostGroup) -> str:
        disk = disks.setdefault(ranks.rank, NoCopies())
        disk.full = False
        tier = cluster.tier(ranks, TWO_BY_TWO, disk=disk)
        cluster.write(tier, ranks, 2)
        disk.full = ranks.rank == failing
        with pytest.raises(StorageError, match="no space" if disk.full else f"rank {failing}: .*no space"):
            cluster.write(tier, ranks, 3)
        disk.full = False
        return cluster.write(tier, ranks, 4)

    name = cluster.run(TWO_BY_TWO, work)[0]
    assert {path.parent.name.partition(".")[0] for path in cluster.parts()} == {"step-00000002", "step-00000004"}
    assert len(cluster.parts(f"**/{name}/*")) == 8
    cluster.lose(0)
    assert cluster.promote(TWO_BY_TWO)[0] == 4


@pytest.mark.parametrize(
    ("nodes", "keepers"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([0, 1], [1, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 0, 1, 1, 2, 2], [2, 3, 4, 5, 0, 1]),
        ([0, 0, 0, 4], [3, 3, 3, 0]),
        ([1, 0, 1, 0], [1, 0, 3, 2]),
    ],
)
def test_the_keeper_of_a_part_is_on_the_next_machine_of_the_ring(nodes: list[int], keepers: list[int]) -> None:
    assert next_in_ring(nodes) == keepers
