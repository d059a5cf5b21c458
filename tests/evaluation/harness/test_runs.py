"""Runs of a suite: the same answers in any number of processes, and after a kill, with nothing computed twice."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

import hlat as program
from hlat.evaluation.responses import ResponseCache
from hlat.runtime.errors import LaunchError
from tests.support.commands import hlat
from tests.support.evaluation.text_model import write_text_model

pytest.importorskip("lm_eval", reason="the extra [eval] is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))


def words(folder: Path, suite_file: Path, data_files: Path, out: Path, *more: str) -> list[str]:
    options = ["--suite", str(suite_file), "--files", str(data_files), "--to", str(out), "--max-tokens", "12"]
    return ["evaluate", str(folder), *options, "--allow-code-execution", *more]


def samples(out: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted((out / "samples").iterdir())}


def report(out: Path) -> dict[str, object]:
    return {name: value for name, value in json.loads((out / "results.json").read_text()).items() if name != "run"}


def stored(out: Path) -> list[str]:
    """Keys of all responses on disk, with repetitions."""
    lines = [line for file in (out / "responses").rglob("*.jsonl") for line in file.read_text().splitlines(True)]
    return [re.split(r'"', line)[1] for line in lines if line.endswith("\n")]


@pytest.fixture(scope="module")
def whole(folder: Path, suite_file: Path, data_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    done = hlat(*words(folder, suite_file, data_files, out, "--batch-rows", "2", "--batch-tokens", "32"))
    assert done.returncode == 0, done.stderr
    assert "Sums: " in done.stdout and "average: " in done.stdout
    return out


def test_results_say_what_ran(whole: Path) -> None:
    found = json.loads((whole / "results.json").read_text())
    assert found["tasks"]["gsm8k"]["version"] == 3.0 and found["tasks"]["gsm8k"]["shots"] == 2
    assert found["tasks"]["gsm8k"]["samples"] == 9 and found["tasks"]["hlat_bbh_navigate"]["samples"] == 11
    assert found["harness"] == {"name": "lm-eval", "version": "0.4.13", "seed": 1234}
    assert len(found["model"]["sha256"]) == 64 and found["model"]["dtype"] == "float32"
    assert found["average"] == pytest.approx((found["columns"]["Sums"] + found["columns"]["Choices | <b>"]) / 2)
    assert found["columns"]["Programs"] == 0.0


def test_tables_have_published_rows_and_show_names_as_text(whole: Path) -> None:
    markdown, page = (whole / "results.md").read_text(), (whole / "results.html").read_text()
    assert "Choices \\| \\<b\\>" in markdown and "| other | 50.0 | - | - |" in markdown
    assert "Choices | &lt;b&gt;" in page and "<b>" not in page
    assert page.count("<script") == 1, "that of every page"


@pytest.mark.parametrize("layout", [["--nproc", "2"], ["--nproc", "2", "--tensor", "2"]], ids=["DP 2", "TP 2"])
def test_two_processes_answer_as_one(
    folder: Path, suite_file: Path, data_files: Path, tmp_path: Path, whole: Path, layout: list[str]
) -> None:
    more = ["--batch-rows", "2", "--batch-tokens", "32", *layout]
    done = hlat(*words(folder, suite_file, data_files, tmp_path, *more))
    assert done.returncode == 0, done.stderr
    if "--tensor" not in layout:  # the same batches: the same bits
        assert samples(tmp_path) == samples(whole)
    for name, lines in samples(whole).items():
        for one, two in zip(lines.splitlines(), samples(tmp_path)[name].splitlines(), strict=True):
            for a, b in zip(json.loads(one)["resps"], json.loads(two)["resps"], strict=True):
                # 1e-4: log-probabilities of about 10 in fp32, whose sums have another order with two shards
                assert a == b or float(a[0][0]) == pytest.approx(float(b[0][0]), abs=1e-4)


def _end_after_a_response() -> None:
    add = ResponseCache.add

    def add_and_end(cache: ResponseCache, responses: dict[str, object]) -> None:
        add(cache, responses)
        os.kill(os.getpid(), signal.SIGKILL)

    ResponseCache.add = add_and_end  # type: ignore[method-assign, assignment]


def test_a_killed_evaluation_goes_on_with_the_same_results_and_computes_nothing_twice(
    folder: Path, suite_file: Path, data_files: Path, tmp_path: Path, whole: Path
) -> None:
    command = words(folder, suite_file, data_files, tmp_path, "--batch-rows", "2", "--batch-tokens", "32")
    assert hlat(*command, prepare=_end_after_a_response).returncode == -signal.SIGKILL
    before = stored(tmp_path)
    assert 0 < len(before) < len(stored(whole)), "killed halfway"
    assert not (tmp_path / "results.json").exists()
    assert hlat(*command).returncode == 0
    assert samples(tmp_path) == samples(whole) and report(tmp_path) == report(whole)
    assert sorted(stored(tmp_path)) == sorted(stored(whole)), "every response was computed once"
    run = json.loads((tmp_path / "results.json").read_text())["run"]
    assert run["looked_up"] >= len(before) and run["computed"] + run["looked_up"] == len(stored(whole))


def test_a_damaged_line_of_responses_is_computed_again(
    folder: Path, suite_file: Path, data_files: Path, tmp_path: Path, whole: Path
) -> None:
    with ResponseCache(tmp_path, "model") as cache:
        cache.add({"a": [1.5, True], "b": "text"})
    (file,) = (tmp_path / "model").iterdir()
    file.write_text(file.read_text().replace("1.5", "2.5") + '12345678 ["c", 1')
    with ResponseCache(tmp_path, "model") as cache:
        assert "a" not in cache and "c" not in cache and cache["b"] == "text"


def test_contradicting_options_are_refused(folder: Path, suite_file: Path) -> None:
    for arguments, message in (
        ({"tasks": ["gsm8k"], "suite": "hlat"}, "name tasks or a suite"),
        ({"suite": "hlat", "shots": 3}, "--shots"),
        ({"suite": "hlat", "dtype": "int4"}, "auto, float32"),
    ):
        with pytest.raises(LaunchError, match=message):
            program.evaluate_tasks(folder, **arguments)  # type: ignore[arg-type]
