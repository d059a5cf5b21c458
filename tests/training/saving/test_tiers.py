"""Invisible resume over all tiers: from a snapshot, or from an object store, a run equals the finished one."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from tests.support.launch.ports import free_port
from tests.support.object_store import ObjectStore
from tests.support.same_runs import assert_same_run

OFTEN = 1e-9  # seconds: a snapshot after every step


def events(run_dir: Path, *kinds: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in kinds]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Object-store server with an empty bucket."""
    with ObjectStore(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture
def s3(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """The server without faults, and the environment variables for it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.misbehave()


def local(tmp_path: Path) -> list[str]:
    return [f"checkpoint.local={{dir: {tmp_path}/memory, every_seconds: {OFTEN}}}", "checkpoint.background=false"]


KILL = ["faults=[{kind: kill, at_step: 18}]", "--allow-faults"]
ALONE = "--no-supervisor"


@pytest.mark.slow  # a run with everything on is killed and goes on from a snapshot in tests/training/test_resume.py
def test_snapshots_are_written_by_the_saver_process(cli, recipe_file, quick, finished, tmp_path):
    """A snapshot that comes due while the last one is being written waits for a later step."""
    where = local(tmp_path)[0]
    slow = "faults=[{kind: kill, at_step: 30}, {kind: slow, at_step: 1, seconds: 0.2, steps: 30}]"
    killed = cli("train", recipe_file, *quick, where, "checkpoint.every_steps=null", slow, "--allow-faults", ALONE)
    assert killed.returncode == -9
    written = [event["step"] for event in events(tmp_path / "run", "snapshot")]
    assert len(written) > 2 and written == sorted(written)
    again = cli("train", recipe_file, *quick, where)
    assert again.returncode == 0, again.stderr
    [promoted] = [event["step"] for event in events(tmp_path / "run", "promoted")]
    assert promoted >= written[-1] and f"resumed at step {promoted}" in again.stdout
    assert_same_run(finished, tmp_path / "run")


def test_a_damaged_snapshot_is_reported_and_not_used(cli, recipe_file, quick, finished, tmp_path):
    cli("train", recipe_file, *quick, *local(tmp_path), *KILL, ALONE)
    [file] = tmp_path.glob("memory/*/step-00000017.*/rank-00000/model__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    again = cli("train", recipe_file, *quick, *local(tmp_path))
    assert again.returncode == 0 and "resumed at step 16" in again.stdout, again.stderr
    [event] = events(tmp_path / "run", "checkpoint_damaged")
    assert "step-00000017" in str(event["path"]) and "model__0_0.distcp has" in str(event["problems"])
    assert_same_run(finished, tmp_path / "run")


def test_a_snapshot_that_fails_is_an_event(cli, recipe_file, quick, finished, tmp_path):
    (tmp_path / "memory").write_text("a file where the folder should be")
    refused = cli("train", recipe_file, *quick, *local(tmp_path))
    assert refused.returncode == 3 and "cannot store snapshots" in refused.stderr
    (tmp_path / "memory").unlink()
    fault = "faults=[{kind: enospc, at_step: 12, steps: 2}]"
    done = cli("train", recipe_file, *quick, *local(tmp_path), fault, "--allow-faults")
    assert done.returncode == 0, done.stderr
    failed = events(tmp_path / "run", "snapshot_failed")
    assert [event["step"] for event in failed] == [12, 13] and "No space left" in str(failed[0]["message"])
    assert done.stdout.count("snapshot of step") == 1, "one message, not one per minute"
    assert_same_run(finished, tmp_path / "run")


def test_a_run_resumes_in_an_empty_folder_from_the_object_store(
    cli,
    recipe_file,
    quick,
    finished,
    tmp_path,
    s3,
):
    remote = ["checkpoint.remote=s3://corpus/run", "checkpoint.keep_last=2"]
    first = cli("train", recipe_file, *quick, *remote, "training.stop_after=25")
    assert first.returncode == 0, first.stderr
    assert [event["step"] for event in events(tmp_path / "run", "remote")] == [10, 20, 25]
    shutil.rmtree(tmp_path / "run")
    second = cli("train", recipe_file, *quick, *remote)
    assert second.returncode == 0 and "resumed at step 25" in second.stdout, second.stderr
    assert [event["step"] for event in events(tmp_path / "run", "fetched")] == [25]
    straight = Path(shutil.copytree(finished, tmp_path / "straight"))
    lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    # of steps 30, 35, 40, and of 25, whose metrics are in the checkpoint; the other lines were lost
    (straight / "metrics.jsonl").write_text("".join(lines[-4:]))
    assert_same_run(straight, tmp_path / "run")
    kept = {path.parent.name for path in (s3.folder / "objects" / "corpus" / "run").rglob("COMMITTED")}
    assert kept == {"step-00000030", "step-00000040"}


def test_the_checkpoint_commands_read_the_object_store(cli, recipe_file, quick, tmp_path, s3):
    url = "s3://corpus/looked-at"
    done = cli("train", recipe_file, *quick, f"checkpoint.remote={url}", "checkpoint.keep_last=4")
    assert done.returncode == 0, done.stderr
    below = s3.folder / "objects" / "corpus" / "looked-at"
    whole = cli("checkpoint", "verify", url)
    assert whole.returncode == 0 and whole.stdout.count(" is whole: ") == 4, whole.stderr
    assert cli("checkpoint", "show", url).stdout.splitlines()[1:] == _shown(cli, tmp_path / "run")

    file = below / "step-00000020" / "model__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (below / "step-00000030" / "COMMITTED").unlink()
    (below / "step-00000040" / "meta.json").write_text("{}")
    s3.kill()
    s3.start()  # the server keeps its objects in this folder
    before = {path: path.read_bytes() for path in below.rglob("*") if path.is_file()}
    listed = json.loads(cli("checkpoint", "list", url, "--json").stdout)
    here = json.loads(cli("checkpoint", "list", tmp_path / "run", "--json").stdout)
    assert [entry["state"] for entry in listed] == ["committed", "committed", "unfinished", "damaged"]
    assert listed[0] == {**here[0], "path": f"{url}/step-00000010", "saved": None}
    assert listed[3]["problem"] == "meta.json does not match its checksum"
    damaged = cli("checkpoint", "verify", url)
    assert damaged.returncode == 2 and "2 of 3 checkpoints damaged" in damaged.stderr
    assert f"{url}/step-00000020 is damaged: model__0_0.distcp does not match its checksum" in damaged.stdout
    one = cli("checkpoint", "verify", f"{url}/step-00000010")
    assert one.returncode == 0 and one.stdout.count("whole") == 1
    assert cli("checkpoint", "show", url).stdout.startswith(f"{url}/step-00000020\n"), "the newest that can be read"
    assert before == {path: path.read_bytes() for path in below.rglob("*") if path.is_file()}

    for verb, problem in (("list", ""), ("verify", "no checkpoint there"), ("show", "no readable checkpoint there")):
        nothing = cli("checkpoint", verb, "s3://corpus/nothing")
        assert problem in nothing.stderr and nothing.returncode == (2 if problem else 0)
    refused = cli("checkpoint", "prune", url, "--keep-last", "1")
    assert refused.returncode == 2 and "a run prunes its object store itself" in refused.stderr


def _shown(cli, run: Path) -> list[str]:
    return cli("checkpoint", "show", run).stdout.splitlines()[1:]


def test_an_unavailable_object_store_does_not_stop_the_run(cli, recipe_file, quick, finished, tmp_path, s3):
    remote = ["checkpoint.remote=s3://corpus/away", "checkpoint.retries=0"]
    first = cli("train", recipe_file, *quick, *remote, "training.stop_after=5")
    assert first.returncode == 0, first.stderr
    s3.misbehave(*({"method": m, "path": "/corpus", "status": 503, "code": "SlowDown"} for m in ("GET", "PUT", "HEAD")))
    done = cli("train", recipe_file, *quick, *remote)
    assert done.returncode == 0 and "no copy of the checkpoint" in done.stdout, done.stderr
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint")] == [5, 10, 20, 30, 40]
    assert len(events(tmp_path / "run", "remote_failed")) >= 4
    assert_same_run(finished, tmp_path / "run")
    text = (tmp_path / "run" / "events.jsonl").read_text() + done.stdout + done.stderr
    assert s3.environment["AWS_SECRET_ACCESS_KEY"] not in text
    s3.misbehave()
    again = cli("train", recipe_file, *quick, *remote)
    assert again.returncode == 0, again.stderr


def on_two_machines(cli, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Run one process on each of two machines, as torchrun would start them."""
    port = free_port()

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        values = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        return cli("train", *arguments, env={**os.environ, **{name: str(value) for name, value in values.items()}})

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_the_run_is_the_same_after_the_loss_of_a_machine(cli, recipe_file, quick, tmp_path, lost):
    """Both processes are killed, and the snapshots on one machine are deleted."""
    straight = [*quick, f"run.dir={tmp_path / 'straight'}"]
    assert [done.returncode for done in on_two_machines(cli, str(recipe_file), *straight)] == [0, 0]
    where = f"checkpoint.local={{dir: '{tmp_path}/machine{{node}}', every_seconds: {OFTEN}}}"
    options = [str(recipe_file), *quick, where, "checkpoint.background=false"]
    ends = on_two_machines(cli, *options, *KILL)
    assert all(end.returncode != 0 for end in ends)
    assert len(list(tmp_path.glob("machine*/*/peer/step-00000017.*/rank-*"))) == 2
    shutil.rmtree(tmp_path / f"machine{lost}")
    again = on_two_machines(cli, *options)
    assert [done.returncode for done in again] == [0, 0], again[0].stderr
    assert [event["step"] for event in events(tmp_path / "run", "promoted")] == [17]
    assert_same_run(tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://key:secret@bucket/run", "holds a password"),
        ("s3://bucket/run?token=secret", "gives access"),
        ("/data/checkpoints", "not the URL of a store"),
        ("https://host/run", "https:// can be read only"),
        ("file:///data/run", "file:// is this machine itself"),
        ("s3://bucket", "whole bucket"),
        ("simplecache::s3://bucket/run", "not the URL of a store"),
        ("zip://x/run", "zip:// is a view of other files"),
        ("s4://bucket/run", "no installed package knows s4://"),
    ],
)
def test_an_unwritable_object_store_url_is_refused_before_the_start(url: str, why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"data": {"path": "corpus"}, "checkpoint": {"remote": url}})
    [problem] = [each for each in caught.value.problems if each.path == "checkpoint.remote"]
    assert why in problem.reason and "secret@" not in str(caught.value) and "token=secret" not in str(caught.value)
