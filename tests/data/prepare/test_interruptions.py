"""A preparation killed at any moment and run again produces the same bytes and repeats no finished unit."""

import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hlat.data.prepare import worker as pool
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.work_units import WorkUnit
from hlat.data.prepared.prepared_folder import open_prepared
from hlat.runtime.errors import DataError
from hlat.runtime.helper_process import HelperProcess
from tests.support.data.corpora import documents, tree, write_jsonl
from tests.support.data.preparing import (
    LARGE,
    STUCK,
    Watched,
    data_config,
    finished_units,
    start,
    wait,
    watch_units,
    workers,
)

pytestmark = pytest.mark.usefixtures("small_units")


def _have_ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=600)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("signal_number", "when"),
    [
        (signal.SIGKILL, "key.json"),
        (signal.SIGKILL, 1),
        (signal.SIGKILL, 4),
        (signal.SIGINT, 2),
        (signal.SIGTERM, 2),
    ],
)
def test_a_killed_preparation_resumes_to_the_same_bytes(
    large: Path,
    tmp_path: Path,
    undisturbed: Watched,
    monkeypatch: pytest.MonkeyPatch,
    signal_number: signal.Signals,
    when: str | int,
) -> None:
    out, config = tmp_path / "out", data_config(large, **LARGE)
    process = start(config, out, STUCK)
    if isinstance(when, int):
        wait(lambda: len(finished_units(out)) >= when, process)
    else:
        wait((out / "partial" / when).exists, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal_number)
    process.wait(timeout=1200)
    process.communicate()
    assert process.returncode != 0
    assert _have_ended(workers), "a worker outlives its parent"
    assert not (out / "manifest.json").exists()
    with pytest.raises(DataError):
        open_prepared(out)

    done = {int(file.stem) for file in finished_units(out)}
    redone = watch_units(monkeypatch)
    prepare(config, out, workers=2)
    assert tree(out) == undisturbed.files
    assert redone.isdisjoint(done) and redone | done == undisturbed.units


def test_a_preparation_killed_before_any_rename_resumes_to_the_same_bytes(small: Path, tmp_path: Path) -> None:
    """The parent commits by renaming; killed before each rename in turn, the next run completes the same data."""
    config = data_config(small)
    prepare(config, tmp_path / "reference", workers=1)
    reference = tree(tmp_path / "reference")
    number = 0
    while True:
        out = tmp_path / f"out-{number}"
        child = os.fork()
        if child == 0:
            _die_at_rename(number)
            prepare(config, out, workers=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        complete = (out / "manifest.json").exists()
        prepare(config, out, workers=1)
        assert tree(out) == reference, f"killed at rename {number}, manifest in place: {complete}"
        number += 1
    assert os.waitstatus_to_exitcode(status) == 0
    assert (
        number > 15
    )  # renames of the key, tokenizer, shards with checksums, boundaries and manifest, and of all of these once more


def _die_at_rename(number: int) -> None:
    count = 0

    def hook(event: str, _: object) -> None:
        nonlocal count
        if event == "os.rename":
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)


def test_finished_units_of_another_preparation_are_never_deleted(
    large: Path, small: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    process = start(data_config(large, **LARGE), out, STUCK)
    wait(lambda: finished_units(out), process)
    process.kill()
    process.wait()
    process.communicate()
    done = finished_units(out)
    for other, named in (
        (data_config(small), "the corpus"),
        (data_config(large, **{**LARGE, "shard_tokens": 6000}), "data.shard_tokens"),
    ):
        with pytest.raises(DataError, match=named) as caught:
            prepare(other, out, workers=1)
        assert "partial" in str(caught.value) and finished_units(out) == done
    changed = Path(shutil.copytree(large, tmp_path / "changed"))
    write_jsonl(changed / "1.jsonl", documents(60, 4_500, seed=9))
    corpus = large.rename(large.with_name("aside"))
    changed.rename(large)  # the same path, with one changed file
    try:
        with pytest.raises(DataError, match=r"the corpus: \S*1\.jsonl changed since\n"):
            prepare(data_config(large, **LARGE), out, workers=1)
    finally:
        shutil.rmtree(large)
        corpus.rename(large)
    key = out / "partial" / "key.json"
    content = key.read_bytes()
    for unknown, named in ((b"{}", "damaged"), (content.replace(b'"format": ', b'"format": 9'), "data format: 9")):
        key.write_bytes(unknown)
        with pytest.raises(DataError, match=named):
            prepare(data_config(large, **LARGE), out, workers=1)
    assert finished_units(out) == done
    key.write_bytes(content)
    prepare(data_config(large, **LARGE), out, workers=2)
    assert tree(out) == reference


def test_a_stopped_process_is_told_with_its_file_and_waited_for(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped when its unit is sent, and goes on when it has been told."""
    told: list[str] = []

    send = HelperProcess.send

    def stop_and_send(process: HelperProcess, unit: object) -> None:
        if isinstance(unit, WorkUnit) and not told:
            workers()[0].suspend()
        send(process, unit)

    def hear(message: str, where: str, pid: int, *rest: object) -> None:
        told.append(message % (where, pid, *rest))
        psutil.Process(pid).resume()

    monkeypatch.setattr(pool, "_PATIENCE", 0.2)
    monkeypatch.setattr(HelperProcess, "send", stop_and_send)
    monkeypatch.setattr(pool._LOG, "warning", hear)
    assert prepare(data_config(small), tmp_path / "out", workers=1).train_tokens
    assert any(f"{small / 'a.jsonl'}, from row 0: tokenizing process" in line for line in told)
    assert any("it is stopped, and `kill -CONT" in line for line in told)
