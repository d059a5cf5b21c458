"""A run that tokenizes text from a real server of the S3 protocol, which stops and comes back."""

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
_THREE_FILES = 3.5 * _DOCUMENTS * _SIZE * 1.2 / 2**30  # size of a cache that holds only the files being read, GiB


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of several files."""
    folder = tmp_path_factory.mktemp("lines")
    for number in range(_FILES):
        write_jsonl(folder / f"{number:02d}.jsonl", documents(_DOCUMENTS, _SIZE, seed=number))
    return folder


@pytest.fixture
def store(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A server with the corpus."""
    (tmp_path / "s3").mkdir()
    server = ObjectStore(tmp_path / "s3")
    server.put(files, "lines")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with server:
        yield server


class Run:
    """``hlat train`` on the corpus as a separate process, whose output lines can be waited for."""

    def __init__(self, recipe: Path, out: Path, *more: str) -> None:
        command = [sys.executable, "-u", "-m", "hlat", "train", str(recipe), f"run.dir={out}", *_ONLINE, *more]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def until(self, text: str) -> None:
        """Read lines up to the first one that contains ``text``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError("".join(self.lines))

    def end(self) -> str:
        """Wait for the end; return everything printed."""
        rest, _ = self.process.communicate(timeout=1200)
        return "".join(self.lines) + rest


def _steps_and_checksums(run: Path) -> list[tuple[object, object]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["batch_crc32"]) for line in lines]


def test_a_run_waits_for_the_store_with_one_message_and_resumes_with_the_same_samples(
    cli: Callable[..., "subprocess.CompletedProcess[str]"],
    recipe_file: Path,
    store: ObjectStore,
    files: Path,
    tmp_path: Path,
) -> None:
    """The cache holds only the files being read, so other files are fetched from the store all the time."""
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
    messages = [line for line in text.splitlines() if "s3://corpus" in line and "answer" in line]
    assert len(messages) == 2, text
    assert "data: s3://corpus does not answer: " in messages[0] and "Trying again for up to 15 min." in messages[0]
    assert "data: s3://corpus answers again, after" in messages[1]
    assert _steps_and_checksums(tmp_path / "run") == _steps_and_checksums(tmp_path / "local")
