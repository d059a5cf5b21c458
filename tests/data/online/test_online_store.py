"""A run that tokenizes text of a real S3-protocol server, which goes away in the middle."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.data.corpora import documents, write_jsonl
from tests.support.object_store import ObjectStore

_FILES, _DOCUMENTS, _SIZE = 12, 16, 1_200
_ONLINE = ["data.mode=online", "data.streams=2", "batch.global_batch=8", "tracking.console=plain"]
_THREE_FILES = 3.5 * _DOCUMENTS * _SIZE * 1.2 / 2**30  # of the cache: those that are read, and no more


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of some files."""
    folder = tmp_path_factory.mktemp("lines")
    for number in range(_FILES):
        write_jsonl(folder / f"{number:02d}.jsonl", documents(_DOCUMENTS, _SIZE, seed=number))
    return folder


@pytest.fixture
def store(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A server that holds it."""
    (tmp_path / "s3").mkdir()
    server = ObjectStore(tmp_path / "s3")
    server.put(files, "lines")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with server:
        yield server


class Run:
    """``hlat train`` on the corpus, in a process of its own whose lines can be waited for."""

    def __init__(self, recipe: Path, out: Path, *more: str) -> None:
        command = [sys.executable, "-u", "-m", "hlat", "train", str(recipe), f"run.dir={out}", *_ONLINE, *more]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def until(self, text: str) -> None:
        """Read lines up to one with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError("".join(self.lines))

    def end(self) -> str:
        """Everything it printed."""
        rest, _ = self.process.communicate(timeout=120)
        return "".join(self.lines) + rest


def _seen(run: Path) -> list[tuple[object, object]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["batch_crc32"]) for line in lines]


def test_the_run_waits_says_so_once_and_goes_on_with_the_same_samples(
    cli: Callable[..., "subprocess.CompletedProcess[str]"],
    recipe_file: Path,
    store: ObjectStore,
    files: Path,
    tmp_path: Path,
) -> None:
    """The cache holds the files that are being read only, so that the store is asked for others all the time."""
    steps = ["training.steps=150", "checkpoint.every_steps=null"]
    local = cli("train", recipe_file, f"data.path={files}", f"run.dir={tmp_path / 'local'}", *_ONLINE, *steps)
    assert local.returncode == 0, local.stderr
    run = Run(recipe_file, tmp_path / "run", "data.path=s3://corpus/lines", f"data.cache_gib={_THREE_FILES}", *steps)
    run.until("step 5/")
    store.kill()
    run.until("does not answer")
    threading.Timer(1.0, store.start).start()
    text = run.end()
    assert run.process.returncode == 0, text
    said = [line for line in text.splitlines() if "s3://corpus" in line and "answer" in line]
    assert len(said) == 2, text
    assert "data: s3://corpus does not answer: " in said[0] and "Trying again for up to 15 min." in said[0]
    assert "data: s3://corpus answers again, after" in said[1]
    assert _seen(tmp_path / "run") == _seen(tmp_path / "local")
