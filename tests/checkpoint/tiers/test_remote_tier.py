"""Checkpoints in a real S3-protocol server: complete and verified, or absent, whatever fails on either side."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hlat.checkpoint import object_store as objects
from hlat.checkpoint.format.filesystem import Disk
from hlat.checkpoint.inventory import verify_remote
from hlat.checkpoint.object_store import ObjectStoreClient
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.checkpoint.remote_tier import RemoteTier
from hlat.checkpoint.run_id import RunId
from hlat.checkpoint.tiers import Tiers
from hlat.config.sections.operation import CheckpointConfig
from hlat.runtime.distributed.host_collectives import HostGroup
from hlat.runtime.errors import CheckpointError, HlatError, StorageError
from hlat.runtime.storage.object_stores import open_filesystem
from tests.checkpoint.background.test_killed import child
from tests.checkpoint.format.test_hostile import seal
from tests.support.checkpoint.machines import chunks_of, meta_of
from tests.support.checkpoint.saved_states import assert_equal, assert_is_step, save, state
from tests.support.checkpoint.thread_ranks import results_of, run_on_ranks
from tests.support.launch.launching import wait_until
from tests.support.object_store import ObjectStore

T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """S3 server with an empty bucket."""
    with ObjectStore(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture(autouse=True)
def s3(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server without injected faults, and environment variables that point to it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    backend = open_filesystem("s3://corpus", CheckpointError)[
        0
    ]  # one connection per test: connecting takes longer than most tests

    def connected(url: str, wrong: type[HlatError]) -> tuple[Any, str]:
        return backend, url.removeprefix("s3://")

    monkeypatch.setattr(objects, "open_filesystem", connected)
    yield server
    server.misbehave()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """URL of a prefix that no other test uses."""
    return f"s3://corpus/{abs(hash(request.node.nodeid))}"


def no_pause(seconds: float) -> None:
    """Do not wait between attempts."""


class Run:
    """A run folder and its prefix in the store."""

    def __init__(self, folder: Path, url: str, keep_last: int = 3, name: str = "tiny") -> None:
        self.folder, self.url, self.keep_last, self.name = folder, url, keep_last, name
        self.damaged: list[tuple[str, list[str]]] = []
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def root(self) -> Path:
        return self.folder / "checkpoints"

    def store(self, ranks: HostGroup | None = None) -> CheckpointStore:
        return CheckpointStore(self.root, self.keep_last, ranks=ranks)

    def remote(
        self, client: ObjectStoreClient | None = None, ranks: HostGroup | None = None, disk: Disk | None = None
    ) -> RemoteTier:
        def report(path: Path | str, problems: list[str]) -> None:
            self.damaged.append((str(path), problems))

        client = client or ObjectStoreClient(self.url, 0, no_pause)
        run_id = RunId(self.folder, self.name)
        return RemoteTier(client, ranks or HostGroup(), run_id, self.keep_last, on_damage=report, disk=disk)

    def save_and_upload(self, *steps: int) -> list[Path]:
        store, remote = self.store(), self.remote()
        folders = [save(store, step) for step in steps]
        for folder in folders:
            remote.upload(folder)
        return folders

    def on_new_machine(self, name: str = "elsewhere") -> "Run":
        """The same run on a machine without its files."""
        return Run(self.folder.with_name(name), self.url, self.keep_last)

    def fetch_on_new_machine(self, newer_than: int | None = None) -> int | None:
        """Fetch the newest checkpoint to a machine without files; check it and return its step."""
        other = self.on_new_machine("found")
        shutil.rmtree(other.folder, ignore_errors=True)
        store = other.store()
        step = other.remote().fetch_newest(store.root, newer_than)
        if step is not None:
            assert_is_step(store.newest(), step)
        return step


@pytest.fixture
def run(tmp_path: Path, url: str) -> Run:
    return Run(tmp_path / "run", url)


def objects_of(server: ObjectStore, url: str) -> Path:
    """Folder in which the server stores the objects of a prefix."""
    return server.folder / "objects" / url.removeprefix("s3://")


def test_a_checkpoint_is_uploaded_and_downloaded_unchanged(run: Run, s3: ObjectStore) -> None:
    [first, second] = run.save_and_upload(4, 5)
    there = objects_of(s3, run.url) / second.name
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    other = run.on_new_machine()
    store = other.store()
    assert other.remote().fetch_newest(store.root, 5) is None
    assert other.remote().fetch_newest(store.root, 4) == 5
    assert_is_step(store.newest(), 5)
    requests = len(s3.requests())
    run.remote().upload(second)
    assert not [line for line in s3.requests()[requests:] if line.startswith("PUT")], "the store already has it"
    assert run.remote().missing(run.root) == []
    assert first.name in [path.name for path in objects_of(s3, run.url).iterdir()]


def test_each_rank_uploads_the_files_it_wrote(run: Run, s3: ObjectStore) -> None:
    class RecordingClient(ObjectStoreClient):
        def upload(self, source: Path, *rest: Any) -> None:
            sent.append((self.rank, source.name))
            super().upload(source, *rest)

        rank = -1

    sent: list[tuple[int, str]] = []

    def work(ranks: HostGroup) -> str:
        store = run.store(ranks)
        folder = store.save(7, chunks_of(7, ranks.rank, ranks.world), meta_of(7))
        client = RecordingClient(run.url, 0, no_pause)
        client.rank = ranks.rank
        return run.remote(client, ranks).upload(folder)

    assert set(results_of(run_on_ranks(3, work))) == {f"{run.url}/step-00000007"}
    tensors = [(rank, name) for rank, name in sent if name.endswith(".distcp")]
    assert {rank for rank, _ in tensors} == {0, 1, 2}
    assert all(f"__{rank}_" in name for rank, name in tensors)
    assert {rank for rank, name in sent if not name.endswith(".distcp")} == {0}

    def fetch(ranks: HostGroup) -> int | None:
        return other.remote(ranks=ranks).fetch_newest(other.store(ranks).root, None)

    other = run.on_new_machine()
    assert results_of(run_on_ranks(2, fetch)) == [7, 7]
    newest = other.store().newest()
    assert newest is not None
    assert newest.meta == meta_of(7)
    assert_equal(newest.load(""), state(7))


# --- crashes and outages -------------------------------------------------------------------------------------------


class ClientKilled(BaseException):
    """Crash of the client. Not an Exception, so that no code under test handles it."""


class CountingClient(ObjectStoreClient):
    """Client that crashes before request number ``at``, counting the requests that change something."""

    count = 0
    at = 1 << 30

    def change(self) -> None:
        self.count += 1
        if self.count >= self.at:
            raise ClientKilled

    def put(self, name: str, data: bytes) -> None:
        self.change()
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bytes:
        self.change()
        return super().create(name, data)

    def remove(self, name: str) -> None:
        self.change()
        super().remove(name)

    def upload(self, source: Path, *rest: Any) -> None:
        self.change()
        super().upload(source, *rest)


def upload_and_prune(run: Run, client: ObjectStoreClient) -> None:
    remote = run.remote(client)
    remote.upload(run.root / "step-00000003")
    remote.prune()


def test_a_crash_before_any_request_leaves_valid_checkpoints_only(tmp_path: Path, url: str) -> None:
    def prepare_run(name: str) -> Run:
        made = Run(tmp_path / name / "run", f"{url}/{name}", keep_last=1)
        made.save_and_upload(2)
        save(made.store(), 3)
        return made

    count = CountingClient(f"{url}/count", 0, no_pause)
    upload_and_prune(prepare_run("count"), count)
    assert count.count > 8
    found = []
    for at in range(1, count.count + 1):
        run = prepare_run(f"stop-{at}")
        counted = CountingClient(run.url, 0, no_pause)
        counted.at = at
        with pytest.raises(ClientKilled):
            upload_and_prune(run, counted)
        step = run.fetch_on_new_machine()
        assert step in (2, 3)
        found.append(step)
        upload_and_prune(run, ObjectStoreClient(run.url, 0, no_pause))
        assert run.fetch_on_new_machine() == 3
        assert ObjectStoreClient(run.url).list_names() == ["run.json", "step-00000003"]
    assert sorted(found) == found and set(found) == {2, 3}


def upload_once(pipe: Connection, run: Run, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    pipe.send("begun")
    run.remote().upload(run.root / "step-00000002")
    pipe.send("done")


def wait_for_request(s3: ObjectStore, part: str) -> None:
    deadline = time.monotonic() + 60
    while not any(part in line for line in s3.requests()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_upload_killed_halfway_leaves_no_checkpoint(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1)
    save(run.store(), 2)
    target = f"{run.url.removeprefix('s3:/')}/step-00000002/optimizer"
    s3.misbehave({"method": "PUT", "path": target, "wait": 30})
    folder = objects_of(s3, run.url) / "step-00000002"
    with child(upload_once, run, s3.environment) as (process, _):
        wait_for_request(s3, f"PUT {target}")
        wait_until(lambda: folder.is_dir() and any(folder.iterdir()))  # another file, which is uploaded beside it
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    s3.misbehave()
    there = [path.name for path in folder.iterdir()]
    assert there and "COMMITTED" not in there, "some of its files were uploaded"
    assert run.fetch_on_new_machine() == 1
    assert run.remote().missing(run.root) == [run.root / "step-00000002"]
    run.remote().upload(run.root / "step-00000002")
    assert run.fetch_on_new_machine() == 2


def test_an_upload_survives_a_restart_of_the_server(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1)
    save(run.store(), 2)
    target = f"{run.url.removeprefix('s3:/')}/step-00000002/optimizer"
    s3.misbehave({"method": "PUT", "path": target, "wait": 30})
    pauses: list[float] = []
    lock = threading.Lock()

    def kill() -> None:
        wait_for_request(s3, f"PUT {target}")
        s3.kill()

    def back(seconds: float) -> None:
        with lock:  # several files are uploaded concurrently
            pauses.append(seconds)
            if len(pauses) == 1:
                s3.misbehave()
                s3.start()

    killer = threading.Thread(target=kill)
    killer.start()
    run.remote(ObjectStoreClient(run.url, 2, back)).upload(run.root / "step-00000002")
    killer.join()
    assert pauses and set(pauses) <= {1.0, 2.0}
    assert run.fetch_on_new_machine() == 2
    assert verify_remote(ObjectStoreClient(run.url), 2) == []


def test_failed_uploads_are_reported_and_repeated_later(run: Run, s3: ObjectStore) -> None:
    """Uploads fail for two checkpoints; with the third, all missing ones are uploaded, the oldest first."""
    config = CheckpointConfig(remote=run.url, retries=0, keep_last=3)

    def tiers(store: CheckpointStore) -> Tiers:
        return Tiers(
            config,
            store,
            RunId(run.folder, run.name),
            0,
            HostGroup(),
            make_client=lambda url, n: ObjectStoreClient(url, n, no_pause),
        )

    store = run.store()
    kept = tiers(store)
    save(store, 1)
    assert [(event.kind, event.step) for event in kept.upload()] == [("remote", 1)]
    s3.misbehave({"method": "PUT", "path": "/corpus", "status": 503, "code": "SlowDown"})
    for step in (2, 3):
        save(store, step)
        [event] = kept.upload()
        assert (event.kind, event.step) == ("remote_failed", 2) and "HTTP 503 SlowDown" in event.message
        assert_is_step(store.newest(), step)
    s3.misbehave()
    save(store, 4)
    store.prune()
    assert [(event.kind, event.step) for event in kept.upload()] == [("remote", step) for step in (2, 3, 4)]
    assert ObjectStoreClient(run.url).list_names() == ["run.json", *(f"step-{step:08d}" for step in (2, 3, 4))]

    s3.misbehave(
        *({"method": method, "path": "/corpus", "status": 503, "code": "SlowDown"} for method in ("GET", "HEAD"))
    )
    again = tiers(run.store())
    assert_is_step(again.newest(), 4)
    assert [event.kind for event in again.events] == ["remote_failed", "remote_failed"]
    with pytest.raises(StorageError, match="HTTP 503"):  # without the store, the id of this run is unknown
        Tiers(config, run.on_new_machine().store(), RunId(run.on_new_machine().folder, run.name), 0, HostGroup())


# --- one run per prefix --------------------------------------------------------------------------------------------


def test_the_marker_is_never_overwritten(run: Run, s3: ObjectStore) -> None:
    """If two runs commit the same step at the same time, the first one wins and the second gets an error."""

    class RacingClient(ObjectStoreClient):
        def create(self, name: str, data: bytes) -> bytes:
            if name.endswith("COMMITTED"):
                super().create(name, b"another")
            return super().create(name, data)

    folder = save(run.store(), 1)
    with pytest.raises(CheckpointError, match=f"{run.url}/step-00000001: is a different checkpoint of that step"):
        run.remote(RacingClient(run.url, 0, no_pause)).upload(folder)
    marker = objects_of(s3, run.url) / "step-00000001" / "COMMITTED"
    assert marker.read_bytes() == b"another"
    kept = Tiers(CheckpointConfig(remote=run.url), run.store(), RunId(run.folder, run.name), 0, HostGroup())
    [event] = kept.upload()
    assert event.kind == "remote_failed" and event.step == 1 and "two runs" in event.message.lower()
    assert marker.read_bytes() == b"another"


def test_a_prefix_belongs_to_one_run(run: Run, tmp_path: Path) -> None:
    run.save_and_upload(1)
    with pytest.raises(CheckpointError, match=f"{run.url}: contains the checkpoints of the run tiny"):
        Run(tmp_path / "b", run.url, name="other").remote().claim()
    known = Run(tmp_path / "c", run.url)
    RunId(known.folder, known.name).ensure()
    with pytest.raises(CheckpointError, match="of another run with the same name, tiny"):
        known.remote().fetch_newest(known.root, None)
    moved = run.on_new_machine()
    moved.remote().claim()
    assert RunId(moved.folder, "tiny").stored() == RunId(run.folder, "tiny").stored() is not None


def test_a_damaged_local_checkpoint_is_not_uploaded(run: Run) -> None:
    folder = save(run.store(), 1)
    file = folder / "model__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model__0_0\.distcp: does not match its checksum"):
        run.remote().upload(folder)
    assert run.fetch_on_new_machine() is None


# --- damage --------------------------------------------------------------------------------------------------------


def flip(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "flip": flip,
    "truncate": lambda data: data[:-1],
    "append": lambda data: data + b"x",
    "delete": lambda data: None,
}


@pytest.mark.parametrize(("victim", "content"), [("meta.json", b'{"step": "many"}'), (".metadata", b"no pickle")])
def test_files_edited_in_the_store_with_valid_checksums_are_reported(
    run: Run, s3: ObjectStore, victim: str, content: bytes
) -> None:
    """Metadata and index are checked, even if all checksums match."""
    [folder] = run.save_and_upload(1)
    assert verify_remote(ObjectStoreClient(run.url), 1) == []
    (folder / victim).write_bytes(content)
    seal(folder)
    prefix = f"{run.url.removeprefix('s3://corpus/')}/step-00000001"
    for name in (victim, "manifest.json", "COMMITTED"):
        s3.replace(f"{prefix}/{name}", (folder / name).read_bytes())
    [problem] = verify_remote(ObjectStoreClient(run.url), 1)
    assert ("step: input should be a valid integer" if victim == "meta.json" else "not a readable index") in problem


@pytest.mark.parametrize(
    ("victim", "harm"),
    [
        *(("model__0_0.distcp", harm) for harm in HARMS),
        (".metadata", "flip"),
        ("meta.json", "delete"),
        ("manifest.json", "truncate"),
    ],
)
def test_damage_in_the_store_is_reported_and_the_previous_checkpoint_is_used(
    run: Run, s3: ObjectStore, victim: str, harm: str
) -> None:
    [_, folder] = run.save_and_upload(1, 2)
    key = f"{run.url.removeprefix('s3://corpus/')}/step-00000002/{victim}"
    changed = HARMS[harm]((folder / victim).read_bytes())
    if changed is None:
        ObjectStoreClient(run.url).remove(f"step-00000002/{victim}")
    else:
        s3.replace(key, changed)
    [problem] = verify_remote(ObjectStoreClient(run.url), 2)
    assert victim in problem
    other = run.on_new_machine()
    store = other.store()
    assert other.remote().fetch_newest(store.root, None) == 1
    assert_is_step(store.newest(), 1)
    [(path, [problem])] = other.damaged
    assert path == f"{run.url}/step-00000002" and victim in problem
    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000001"], "no file of it is left"
    assert "COMMITTED.bad" in ObjectStoreClient(run.url).list_names("step-00000002")
    assert other.remote().fetch_newest(store.root, 1) is None, "the damaged checkpoint is skipped from now on"
    other.remote().upload(save(store, 2))
    assert run.fetch_on_new_machine() == 2, "the run can save that step again"


def test_a_failed_download_leaves_nothing(run: Run, tmp_path: Path) -> None:
    class FullDisk(Disk):
        def free_bytes(self, path: Path) -> int:
            return 1000

    run.save_and_upload(1)
    other = run.on_new_machine()
    root = other.store().root
    with pytest.raises(StorageError, match=rf"cannot download {run.url}/step-00000001 in .* are free"):
        other.remote(disk=FullDisk()).fetch_newest(root, None)
    assert list(root.iterdir()) == []


# --- retention -----------------------------------------------------------------------------------------------------


def test_pruning_removes_the_marker_first(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1, 2, 3, 4)
    requests = len(s3.requests())
    assert run.remote().prune() == [1]
    gone = [line for line in s3.requests()[requests:] if line.startswith(("DELETE", "POST"))]
    assert len(gone) >= 2
    assert ObjectStoreClient(run.url).list_names() == ["run.json", "step-00000002", "step-00000003", "step-00000004"]


def test_the_last_valid_checkpoint_is_never_removed(run: Run, s3: ObjectStore, tmp_path: Path) -> None:
    run.keep_last = 1
    run.save_and_upload(1, 2)
    s3.replace(f"{run.url.removeprefix('s3://corpus/')}/step-00000002/model__0_0.distcp", b"nothing")
    assert run.remote().prune() == [], "this process has not verified step 2, and now finds it damaged"
    assert run.fetch_on_new_machine() == 1


def test_no_credentials_are_stored(run: Run, s3: ObjectStore) -> None:
    run.save_and_upload(1)
    secret = s3.environment["AWS_SECRET_ACCESS_KEY"]
    for path in [*run.folder.rglob("*"), *objects_of(s3, run.url).rglob("*")]:
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert secret not in json.dumps(ObjectStoreClient(run.url).list_names())
