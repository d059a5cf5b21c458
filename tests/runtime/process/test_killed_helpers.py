"""Whichever side of a helper process is killed, at any point: no process and no half file is left, for every user.

The side that lives is told in words how the other one ended. A parent is forked from the test; it kills itself or its
helpers at a point of the protocol, after it has reported the helpers' process ids through a pipe.
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from hlat.checkpoint.async_saver import SaverSettings, run_saver
from hlat.checkpoint.format.filesystem import Disk
from hlat.config import BatchSchedule
from hlat.config.sections.data import DataConfig
from hlat.data.online.loader import OnlineData
from hlat.data.online.prepare import prepare_online
from hlat.data.prepare import preparation
from hlat.data.prepare.preparation import prepare
from hlat.data.prepared.prepared_folder import PreparedData
from hlat.data.prepared.shards import ShardContent
from hlat.data.tokenizers.training import train_bpe_in_process
from hlat.launch import metrics_process
from hlat.runtime.helper_process import Channel, HelperProcess, start_helper
from hlat.runtime.process import RankInfo
from hlat.tracking.hosted import HOSTED, HostedEntry, HostedRun, HostedTracker
from tests.support.data.corpora import documents, write_jsonl
from tests.support.tracking import clients

BATCH = 8


class Material:
    """Data that is prepared once, and a folder of this case."""

    def __init__(self, shared: Path) -> None:
        texts = write_jsonl(shared / "a.jsonl", documents(120, 400))
        section = {"path": str(texts), "tokenizer": {"vocab_size": 300}, "sequence_length": 32}
        self.prepared = prepare(DataConfig.model_validate(section), shared / "prepared", workers=1)
        given = section | {"tokenizer": {"path": str(self.prepared.tokenizer_dir)}}
        self.config = DataConfig.model_validate(given)
        self.online = DataConfig.model_validate(given | {"mode": "online", "streams": 4})
        self.blocks: PreparedData = prepare_online(self.online, shared / "online", 100)
        self.texts = documents(120, 400)


def _prepare(material: Material, folder: Path) -> str:
    preparation._SMALLEST_UNIT = 2000
    prepare(material.config, folder / "out", workers=2)
    return ""


def _read_online(material: Material, folder: Path) -> str:
    data = OnlineData(material.blocks, material.online, 3, BatchSchedule(BATCH), 1)
    loader = data.loader(0, data.cursors(), 0, print)
    try:
        for first in range(0, 1 << 40, BATCH):
            loader.read(first)
    finally:
        loader.close()
    return ""


def _train_tokenizer(material: Material, folder: Path) -> str:
    train_bpe_in_process(material.texts, 300, [], lambda *_: None)
    return ""


def _compare_shards(material: Material, folder: Path) -> str:
    content = ShardContent(material.prepared.dir, material.prepared.manifest, [folder])
    content.compare_all(["train"])
    assert content._process is not None
    content._process.wait()
    return content.look_at_process()


def _track(material: Material, folder: Path) -> str:
    HOSTED["wandb"] = HostedEntry(f"{clients.__name__}:{clients.Recording.__name__}", "json")
    tracker = HostedTracker("wandb", HostedRun("tiny", folder, {}, {}), flush_seconds=0.0)
    tracker._flush_seconds = 60.0
    tracker.log({"step": 1, "loss": 1.0})
    tracker.close()
    return " ".join(note.text for note in tracker.notes())


def _serve_metrics(material: Material, folder: Path) -> str:
    told: list[str] = []
    recipe: Any = SimpleNamespace(
        run=SimpleNamespace(name="tiny"),
        run_dir=folder,
        total_steps=1,
        recovery=SimpleNamespace(hang_seconds=1.0),
    )
    listener = metrics_process.listen(IPv4Address("127.0.0.1"), 0)
    with metrics_process._serving(recipe, listener, told.append, folder / "beats"):
        pass
    return " ".join(told)


def _save(material: Material, folder: Path) -> str:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # accepts no connection, so the saver waits for the other one
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        saver = start_helper(partial(run_saver, rank_info=RankInfo(rank=1, world=2), make_disk=Disk))
        saver.send(SaverSettings("a-meeting", folder, 1, None, 0))
        saver.receive()
    return ""


KILLED = "killed by signal 9"
TOKENIZING = f"a tokenizing process was {KILLED}, perhaps because memory ran out"
USERS: dict[Callable[[Material, Path], str], tuple[tuple[str, ...], str]] = {
    # work of the parent: points that it comes to, and what it is told of a killed helper
    _prepare: (("started", "sent", "answered"), TOKENIZING),
    _read_online: (
        ("started", "sent", "answered"),
        f"a tokenizing process was {KILLED}, perhaps because memory ran out",
    ),
    _train_tokenizer: (("started", "sent"), f"the process that trains the tokenizer was {KILLED}"),
    _compare_shards: (("started", "sent"), "the process that compares them ended with code -9"),
    _track: (("started", "sent"), "its helper process has ended"),
    _serve_metrics: (("started", "sent", "served"), "the server of /metrics ended before the run, with exit code -9"),
    _save: (("started", "sent"), f"a helper process was {KILLED}"),
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("material"))


def test_a_comparison_of_shards_that_fails_by_itself_ends_no_training(material: Material, tmp_path: Path):
    content = ShardContent(material.prepared.dir, material.prepared.manifest, [tmp_path])
    failed = Mock(side_effect=RuntimeError("no memory"))
    content._process = SimpleNamespace(has_ended=lambda: True, receive=failed, close=lambda: None)
    assert content.look_at_process() == "the process that compares them ended with code 1"


def _kill_at(point: str, victim: str, report: Callable[[Any], None]) -> None:
    """Kill a side of every helper at a point of the protocol; in the forked parent."""

    def kill(pid: int) -> None:
        if victim == "parent":
            report([child.pid for child in psutil.Process().children(recursive=True)])
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(ProcessLookupError, ChildProcessError):  # another thread has killed it, and has waited for it
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not heard of it

    start, send, look, receive = HelperProcess.__init__, HelperProcess.send, HelperProcess.has_ended, Channel.receive

    def started(process: HelperProcess, *arguments: Any) -> None:
        start(process, *arguments)
        if point == "started":
            kill(process.pid)

    def sent(process: HelperProcess, *arguments: Any) -> None:
        send(process, *arguments)
        if point == "sent" and not look(process):
            kill(process.pid)

    def served(process: HelperProcess) -> bool:
        if point == "served" and not look(process):
            kill(process.pid)
        return look(process)

    def answered(channel: Channel) -> Any:
        found = receive(channel)
        if point == "answered":
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if child.status() != psutil.STATUS_ZOMBIE:
                        kill(child.pid)
        return found

    # For ever: the forked parent ends without returning to the test.
    HelperProcess.__init__, HelperProcess.send = started, sent  # type: ignore[method-assign]
    HelperProcess.has_ended = served  # type: ignore[method-assign]
    if point == "answered":
        Channel.receive = answered  # type: ignore[method-assign]


def _run(work: Callable[[Material, Path], str], point: str, victim: str, material: Material, folder: Path) -> Any:
    """Run a parent that is forked; return what it has reported: process ids, or what it was told."""
    reading, writing = os.pipe()
    if (parent := os.fork()) == 0:
        os.close(reading)
        told = ""
        try:
            _kill_at(point, victim, lambda found: os.write(writing, json.dumps(found).encode()))
            told = work(material, folder)
        except BaseException as error:
            told = repr(error)
        finally:
            left = [child.pid for child in psutil.Process().children(recursive=True)]
            os.write(writing, json.dumps([told, left]).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as report:
        found = report.read()  # to its end: neither the parent nor a helper has the pipe any more
    status = os.waitpid(parent, 0)[1]
    assert os.WIFSIGNALED(status) == (victim == "parent"), found
    return json.loads(found)


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _cases() -> Iterator[Any]:
    for work, (points, words) in USERS.items():
        for point in points:
            for victim in ("parent", "helper"):
                marks = () if point == points[-1] else pytest.mark.slow
                yield pytest.param(work, point, victim, words, marks=marks, id=f"{work.__name__}-{point}-{victim}")


@pytest.mark.parametrize(("work", "point", "victim", "words"), list(_cases()))
def test_a_killed_side_leaves_no_process_and_no_half_file_and_the_other_is_told(
    material: Material, tmp_path: Path, work: Callable[[Material, Path], str], point: str, victim: str, words: str
) -> None:
    found = _run(work, point, victim, material, tmp_path)
    if victim == "parent":
        assert found, "it had a helper"
        for pid in found:
            with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                psutil.Process(pid).wait(600)
        assert not [pid for pid in found if _runs(pid)]
    else:
        told, left = found
        assert words in told and not left
        assert not list(tmp_path.rglob("*.tmp"))
    for file in tmp_path.rglob("*.json"):
        json.loads(file.read_text())
