"""Checks of a start look at every stage of a run, before its first step, and name the stage of what they find."""

import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from hlat.config import RecipeError, odd_settings
from hlat.config.load import parse_recipe
from hlat.hardware import load_catalog, parse_cluster
from hlat.launch.preflight.recipe_needs import plan_needs
from hlat.launch.start_examination import StartReport, load_and_check
from hlat.launch.start_place import Here, StartPlace, sections_of
from hlat.runtime.errors import DataError
from hlat.training.stages import check_later_texts

WORDS = "the quick brown fox jumps over the lazy dog\n" * 400


class Usage(NamedTuple):
    """Usage of a disk in bytes, as shutil returns it."""

    total: int
    used: int
    free: float


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(WORDS + name, encoding="utf-8")
    return {
        "run": {"dir": str(tmp_path / "run"), "device": "cpu"},
        "model": {"preset": "tiny-1m"},
        "data": {"path": str(tmp_path / "first.txt"), "sequence_length": 64, "validation": {"by": "tail"}},
        "batch": {"global_batch": 8},
        "stages": [
            {"name": "short", "steps": 20},
            {"name": "anneal", "steps": 10, "data": {"path": str(tmp_path / "second.txt")}},
            {"name": "long", "steps": 5, "data": {"sequence_length": 256}},
        ],
    }


def check(content: dict[str, Any], here: Here | None = None, **options: Any) -> StartReport:
    return load_and_check(lambda: parse_recipe(content, world=1), here or Here(1, 1), **options)


@pytest.mark.parametrize("forked", [False, True])
def test_what_is_wrong_with_any_stage_is_found_at_once_and_named(content, forked):
    assert check(content, forked=forked).notes == (), "the tokenizer of the later stages is still to be made"
    content["data"]["path"], content["stages"][1]["data"]["path"] = "none", "nowhere"
    content["stages"][2]["evaluation"] = {"tasks": ["no.jsonl"]}
    with pytest.raises(RecipeError) as error:
        check(content, forked=forked)
    paths = [problem.path for problem in error.value.problems]
    assert paths == ["data.path", "stages.1.data.path", "stages.2.evaluation.tasks.0"]


def test_a_problem_of_all_stages_is_told_once(content, tmp_path):
    (tmp_path / "run").write_text("a file", encoding="utf-8")
    content["evaluation"] = {"tasks": ["no.jsonl"]}
    with pytest.raises(RecipeError) as error:
        check(content)
    paths = [problem.path for problem in error.value.problems]
    assert paths.count("run.dir") == paths.count("evaluation.tasks.0") == 1


def test_a_text_under_two_paths_and_one_that_is_too_short_for_its_stages_are_refused(content, tmp_path):
    """The second stage reads a part of what the third gets none of: known from the bytes of the text."""
    (tmp_path / "few.txt").write_text("the quick brown fox\n" * 60, encoding="utf-8")
    content["data"]["path"] = str(tmp_path / "first.*")
    content["stages"][1]["data"]["path"] = str(tmp_path / "few.txt")
    again = {"name": "again", "steps": 1, "data": {"path": str(tmp_path / "first.txt")}}
    content["stages"] += [again]
    with pytest.raises(RecipeError) as error:
        check(content)
    found = {problem.path: problem.reason for problem in error.value.problems}
    assert set(found) == {"stages.1", "stages.2", "stages.3.data"} and "none are left for it" in found["stages.2"]
    assert "first.txt" in found["stages.3.data"] and "Write the path alike" in found["stages.3.data"]


def test_a_run_that_no_command_has_checked_finds_the_same_before_its_first_text_is_prepared(content, tmp_path):
    first = parse_recipe(content, world=1).each_stage()[0]
    check_later_texts(first)
    content["stages"][1]["data"]["path"] = "nowhere"
    with pytest.raises(DataError, match=r"stage anneal: data\.path nowhere"):
        check_later_texts(parse_recipe(content, world=1).each_stage()[0])
    content["stages"][1]["data"]["path"] = str(tmp_path / "*.txt")
    with pytest.raises(DataError, match="Write the path alike"):
        check_later_texts(parse_recipe(content, world=1).each_stage()[0])


def test_the_disk_needs_room_for_the_text_of_all_stages(content, monkeypatch):
    recipe = parse_recipe(content, world=1)
    short, anneal, long = (each.inputs for each in StartPlace(sections_of(recipe), recipe, Here(1, 1)).stages)
    assert short.training_tokens and anneal.training_tokens and anneal.training_tokens == long.training_tokens
    checkpoints = (recipe.checkpoint.keep_last + 1) * 12 * 1_053_824  # fp32 weights and two moments
    needed = checkpoints + 4 * (short.training_tokens + anneal.training_tokens)  # the last two share a folder
    usage = Usage(10**12, 0, needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert check(content).notes == ()
    usage = usage._replace(free=needed - 1)
    with pytest.raises(RecipeError) as error:
        check(content)
    assert [problem.path for problem in error.value.problems] == ["checkpoint.keep_last"]


def test_the_memory_of_each_stage_is_compared_with_the_devices(content):
    content["model"] = {"preset": "llama-3.2-1b", "max_sequence_length": 131072}
    content["batch"] = {"global_batch": 8, "micro_batch": 1}
    content["stages"][2]["data"]["sequence_length"] = 131072
    with pytest.raises(RecipeError) as error:
        check(content, Here(None, 1, parse_cluster("g5.xlarge:1", load_catalog()), files=False))
    problems = {problem.path: problem for problem in error.value.problems}
    assert "stages.2.batch.micro_batch" in problems


def test_needs_are_those_of_the_stage_that_needs_most(content):
    recipe = parse_recipe(content, world=1)
    needs = [plan_needs(one, 1, torch.device("cpu"))["host_bytes"] for one in [recipe, *recipe.each_stage()]]
    assert needs[0] == max(needs[1:]) == needs[3] > needs[1]


def test_notes_of_stages_are_told_once_and_name_later_stages(content):
    content["batch"]["micro_batch"] = 1
    content["stages"][1]["optimizer"] = {"weight_decay": 0.9}
    notes = {}
    for note in odd_settings(parse_recipe(content, world=1)):
        notes.setdefault(note.rule, []).append(note.text)
    assert len(notes["idle-device"]) == 2, "the last stage has other passes"
    assert [text.partition("=")[0] for text in notes["weight-decay"]] == ["stage anneal: optimizer.weight_decay"]


def test_the_summary_has_a_line_for_each_stage(cli, content, tmp_path):
    file = tmp_path / "recipe.yaml"
    content |= {"schedule": {"warmup_steps": 5}, "optimizer": {"lr": 1e-3}}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    lines = cli("check", file).stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("  stage")] == [
        "  stage  short", "  stage  anneal", "  stage  long",
    ]  # fmt: skip
    assert any(line.startswith("  data   anneal, long: 1 file") for line in lines)
    # A warm-up of 5 steps to 1e-3, then a cosine over 30 steps to a tenth of it, in three parts.
    rates = [line.rpartition("learning rate ")[2] for line in lines if line.startswith("  stage")]
    shares = [0.1 + 0.45 * (1 + math.cos(math.pi * (step - 5) / 30)) for step in (20, 21, 30, 31, 35)]
    texts = [f"{1e-3 * each:.3g}" for each in (0.2, *shares)]
    assert rates == [f"{texts[number]} to {texts[number + 1]}" for number in (0, 2, 4)]


def test_data_of_every_stage_is_prepared_with_the_tokenizer_of_the_first(cli, content, tmp_path):
    file, run = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    early = cli("data", "prepare", file, "--stage", "long")
    assert early.returncode != 0 and "--stage short" in early.stderr
    done = cli("data", "prepare", file)
    assert done.stdout.count("prepared in") == 2, "anneal and long read the same text"
    first, second = (next((run / name / "tokenizer").glob("tokenizer.json")) for name in ("data", "data-anneal"))
    assert first.read_bytes() == second.read_bytes()
    assert cli("data", "verify", file).stdout.count("is whole") == 2
