"""Checks of a start: each finds its mistake, all of them at once, and none finds anything in a good recipe."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch

from hlat.config import RecipeError
from hlat.config.load import parse_recipe
from hlat.data import prepare_recipe_data
from hlat.data.input_check import check_inputs
from hlat.data.prepare.preparation import prepare
from hlat.data.tokenizers.training import train_bpe
from hlat.launch import start_checks as machine
from hlat.launch.preflight.recipe_needs import plan_needs
from hlat.launch.start_examination import load_and_check
from hlat.launch.start_place import Here, StartPlace
from hlat.runtime.backend import table, torch_private
from hlat.runtime.backend.table import absent_device, expects_accelerator
from hlat.runtime.errors import DataError, HlatError, StorageError
from hlat.runtime.storage.run_folder import RECIPE_HEAD, RECIPE_NAME
from hlat.training.start import record_attempt
from tests.support.data.tokenizer_kinds import word_pieces, write_tokenizer


def content(corpus: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    base = {
        "run": {"dir": str(run_dir), "device": "cpu"},
        "model": {"preset": "tiny-1m"},
        "data": {"path": str(corpus), "sequence_length": 64, "validation": {"by": "tail"}},
        "batch": {"global_batch": 8, "micro_batch": 8},
        "training": {"steps": 10},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}}


def place(sections: dict[str, Any], processes: int = 1) -> StartPlace:
    recipe = parse_recipe(sections, world=processes)
    return StartPlace(
        {name: getattr(recipe, name) for name in type(recipe).model_fields}, recipe, Here(processes, processes)
    )


def check(sections: dict[str, Any], processes: int = 1, forked: bool = False):
    return load_and_check(lambda: parse_recipe(sections, world=processes), Here(processes, processes), forked=forked)


def test_a_good_recipe_passes_and_writes_nothing(corpus, tmp_path):
    assert check(content(corpus, tmp_path / "run")).notes == ()
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_loses_text_is_told_once(tmp_path):
    (tmp_path / "text.txt").write_text("Ünïcode Ωmega Ждёт\n" * 3000)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", word_pieces())
    report = check(content(tmp_path / "text.txt", tmp_path / "run", data={"tokenizer": {"path": str(tokenizer)}}))
    [note] = [str(note) for note in report.notes if note.rule == "tokenizer"]
    assert "of the text is lost in its tokens" in note and "unknown text" in note and "Ünïcode" in note
    assert "tokenizer" not in {note.rule for note in report.before_training}, "the run says it with its data"


def test_every_mistake_of_recipe_and_files_is_reported_at_once(corpus, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    sections = content(
        corpus,
        tmp_path / "run",
        data={
            "path": None,
            "sources": [{"path": str(tmp_path / "rows.jsonl")}, {"path": str(tmp_path / "none.txt")}],
            "tokenizer": {"path": str(tmp_path / "none.json")},
            "validation": {"path": str(tmp_path / "none-either.txt")},
        },
        checkpoint={"init_from": str(tmp_path / "no-checkpoint"), "keep_last": -1},
        evaluation={"tasks": [str(tmp_path / "no-task.jsonl")], "sets": {"law": str(tmp_path / "no-set")}},
        optimizer={"lr": -1},
    )
    with pytest.raises(RecipeError) as caught:
        check(sections)
    paths = [problem.path for problem in caught.value.problems]
    assert paths == [
        *("optimizer.lr", "checkpoint.keep_last"),
        *("data.tokenizer.path", "data.sources.0.path", "data.sources.1.path", "data.validation.path"),
        *("evaluation.sets.law", "evaluation.tasks.0"),
    ]
    assert "no column 'text'; it has body" in str(caught.value)


def test_a_schedule_that_this_torch_computes_wrongly_is_refused(corpus, tmp_path, monkeypatch):
    problem = torch_private.split_backward_problem("2.11.0+cu130")
    monkeypatch.setattr(machine.torch_private, "split_backward_problem", lambda: problem)
    few = {"model": {"layers": 4}, "batch": {"global_batch": 4, "micro_batch": 1}}
    for name in ("1f1b", "zbv", "interleaved-zero-bubble"):
        sections = content(corpus, tmp_path / "run", parallel={"pipeline": 2, "schedule": name}, **few)
        if name == "1f1b":
            check(sections, processes=2)
        else:
            with pytest.raises(RecipeError, match=r"PyTorch 2\.11 cannot split .*\n?.*Use parallel\.schedule=interl"):
                check(sections, processes=2)


def test_a_forked_check_finds_the_same(corpus, tmp_path, monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "torch")  # a process with torch does not fork
    sections = content(corpus, tmp_path / "run", data={"tokenizer": {"path": "none.json"}}, batch={"micro_batch": 3})
    errors = []
    for forked in (False, True):
        with pytest.raises(RecipeError) as caught:
            check(sections, forked=forked)
        errors.append((str(caught.value), caught.value.problems))
    assert errors[0] == errors[1] and len(errors[0][1]) == 2


def test_finished_data_needs_neither_corpus_nor_tokenizer(corpus, tmp_path):
    """The preparation, which returns at once, is the witness."""
    texts, tokenizer = tmp_path / "texts", tmp_path / "tokenizer"
    shutil.copytree(corpus, texts)
    train_bpe((file.read_text() for file in corpus.iterdir()), 300, "auto").save(tokenizer)
    sections = content(texts, tmp_path / "run", data={"tokenizer": {"path": str(tokenizer)}})
    recipe = parse_recipe(sections, world=1)
    prepare(recipe.data, recipe.prepared_dir, workers=1)
    shutil.rmtree(texts)
    shutil.rmtree(tokenizer)
    assert check(sections).notes == ()
    assert "is used without it" in prepare(recipe.data, recipe.prepared_dir, workers=1).notes[-1]


def test_text_that_is_read_online_is_needed_when_it_is_prepared_too(corpus, tmp_path):
    """The preparation, which refuses the same link, is the witness."""
    shutil.copytree(corpus, tmp_path / "texts")
    online = {"mode": "online", "tokenizer": {"train": "char"}, "validation": {"by": "document", "fraction": 0.1}}
    sections = content(tmp_path / "texts", tmp_path / "run", data=online)
    recipe = parse_recipe(sections, world=1)
    prepare_recipe_data(recipe)
    check(sections)
    (tmp_path / "texts" / "gone.txt").symlink_to(tmp_path / "nowhere")
    for refuses in (lambda: prepare_recipe_data(recipe), lambda: check(sections)):
        with pytest.raises(HlatError, match=r"gone\.txt: .*nowhere"):
            refuses()


def test_finished_data_of_another_tokenizer_is_not_good(corpus, tmp_path):
    """The preparation, which refuses, is the witness."""
    recipe = parse_recipe(content(corpus, tmp_path / "run", data={"tokenizer": {"train": "char"}}), world=1)
    prepare(recipe.data, recipe.prepared_dir, workers=1)
    sections = content(corpus, tmp_path / "run", data={"tokenizer": {"path": "gpt2"}})
    with pytest.raises(DataError, match="gpt2: no such tokenizer"):
        prepare(parse_recipe(sections, world=1).data, recipe.prepared_dir, workers=1)
    with pytest.raises(RecipeError, match=r"'gpt2': no such tokenizer\. .* with a tokenizer trained on its corpus"):
        check(sections)


@pytest.mark.parametrize("present", [True, False])
def test_a_device_is_found_by_the_files_of_its_driver(tmp_path, monkeypatch, present):
    monkeypatch.setitem(table.DEVICE_FILES, "cuda", (str(tmp_path / "nvidia[0-9]*"),))
    monkeypatch.setitem(table.DEVICE_FILES, "neuron", (str(tmp_path / "neuron[0-9]*"),))
    if present:
        (tmp_path / "nvidia0").touch()
    assert (absent_device("cuda") == "") == present
    assert absent_device("cpu") == absent_device("auto") == absent_device("xpu") == ""
    assert expects_accelerator("auto") == present and not expects_accelerator("cpu") and expects_accelerator("cuda")


def test_more_processes_than_cores_is_a_warning(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    sections = content(corpus, tmp_path / "run", batch={"micro_batch": 2})
    assert [note.rule for note in check(sections, 4).notes] == ["cores"]
    assert check(sections, 2).notes == ()


def test_passes_over_the_text_are_counted_from_its_size_and_exactly_once_it_is_prepared(tmp_path):
    (tmp_path / "text.txt").write_text("abcd" * 1000)
    data = {"tokenizer": {"train": "char"}, "validation": {"fraction": 0.0}, "sequence_length": 40}
    batch = {"global_batch": 10, "micro_batch": 10}
    few, many = (
        check(content(tmp_path / "text.txt", tmp_path / "run", data=data, batch=batch, training={"steps": steps})).notes
        for steps in (160, 161)  # of 400 characters: 16 passes, and a little more
    )
    assert few == () and [note.rule for note in many] == ["passes"] and "about 4,000 training tokens" in str(many[0])


def test_a_text_that_is_shorter_than_a_batch_or_seems_shorter_than_a_sample_is_a_warning(tmp_path):
    (tmp_path / "text.txt").write_text("abcd" * 100)
    data = {"tokenizer": {"train": "char"}, "validation": {"fraction": 0.0}, "sequence_length": 40}
    path, batch = tmp_path / "text.txt", {"global_batch": 10, "micro_batch": 10}
    exactly, less = (
        check(content(path, tmp_path / "run", data=data | {"sequence_length": length}, batch=batch)).notes
        for length in (40, 41)
    )
    assert (
        exactly == () and [note.rule for note in less] == ["short-text"] and "a step takes 410 tokens" in str(less[0])
    )
    words = data | {"tokenizer": {"train": "bpe"}, "sequence_length": 200}
    sample = check(content(path, tmp_path / "run", data=words, batch={"global_batch": 1, "micro_batch": 1})).notes
    assert "short-text" in [note.rule for note in sample] and " training tokens" in str(sample[0])


@pytest.mark.parametrize("size", [300, 1000, 4000])
def test_tokens_of_a_trained_tokenizer_are_estimated_by_its_vocabulary(size, tmp_path):
    """The witness is the tokenizer, trained on the same text: the source of a module of Python."""
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text)
    data = {"tokenizer": {"vocab_size": size}, "validation": {"fraction": 0.0}, "sequence_length": 40}
    sections = content(tmp_path / "text.txt", tmp_path / "run", data=data)
    sections["model"] |= {"vocab_size": size}
    found = check_inputs(parse_recipe(sections, world=1).data, tmp_path / "none", None, {}, stores=False)
    assert found.training_tokens == pytest.approx(len(train_bpe([text], size).encode(text)), rel=0.35)


@pytest.mark.parametrize("trained", ["char", None])
def test_a_short_text_of_characters_of_several_bytes_is_counted_as_it_is_prepared(tmp_path, trained):
    """A byte-level tokenizer without merges takes 3 tokens per Chinese character; bytes / 4 are less than one."""
    (tmp_path / "text.txt").write_text("天地玄黃宇宙洪荒日月" * 10)
    train_bpe(["天地玄黃宇宙洪荒日月"], 257).save(tmp_path / "tokenizer")
    data = {
        "tokenizer": {"train": trained} if trained else {"path": str(tmp_path / "tokenizer")},
        "validation": {"fraction": 0.0},
        "sequence_length": 90,
    }
    sections = content(tmp_path / "text.txt", tmp_path / "run", data=data, training={"steps": 1},
                       batch={"global_batch": 1, "micro_batch": 1})  # fmt: skip
    config = parse_recipe(sections, world=1).data
    done = prepare(config, tmp_path / "done", workers=1).manifest.splits["train"].tokens
    assert done == (100 if trained else 301)
    assert check_inputs(config, tmp_path / "none", None, {}, stores=False).training_tokens == done
    assert "short-text" not in [note.rule for note in check(sections).notes]


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
@pytest.mark.parametrize("characters", [8, 9])
def test_the_training_text_of_a_tail_is_measured_as_it_is_prepared(tmp_path, packing, characters):
    """The tail begins at a character; those before it have several bytes, and are a token each."""
    (tmp_path / "text.txt").write_text("ö" * characters + "a" * characters)
    data = {
        "tokenizer": {"train": "char"},
        "validation": {"by": "tail", "fraction": 0.5},
        "sequence_length": characters + 1,
        "packing": packing,
    }
    sections = content(
        tmp_path / "text.txt", tmp_path / "run", data=data, batch={"global_batch": 1, "micro_batch": 1},
        training={"steps": 1},
    )  # fmt: skip
    if packing == "best-fit":  # which pads
        check(sections)
        return
    with pytest.raises(RecipeError, match=f"has at most {characters + 1} tokens without its validation text"):
        check(sections)


class Disk(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_needs_room_for_the_checkpoints_that_are_kept_and_one_more(corpus, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    sections = content(corpus, run_dir, checkpoint={"keep_last": 2}, data={"prepared_dir": str(tmp_path / "tokens")})
    needed = 3 * 12 * 1_053_824  # fp32 weights and two moments
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**12, 0, needed))
    check(sections)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**12, 0, needed - 1))
    with pytest.raises(RecipeError, match=r"2 checkpoints and the next one take 36 MiB"):
        check(sections)
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "old").write_bytes(b"x")  # a resumed run replaces what it has
    check(sections)


DEEP = {"vocab_size": 300, "layers": 48, "hidden_size": 64, "intermediate_size": 192, "heads": 4}  # mostly activations
MODELS: list[Any] = [
    (DEEP, {"mode": "fp32"}, {"global_batch": 32, "micro_batch": 32}),
    ("tiny-1m", {}, {}),
    ("tiny-10m", {"mode": "bf16"}, {"micro_batch": 2}),
    ("tiny-34m", {"mode": "mixed"}, {"micro_batch": 8}),
    ("tiny-125m", {"mode": "fp32"}, {"micro_batch": 4}),
    ("smollm2-135m", {"mode": "bf16-kahan"}, {"micro_batch": 1}),
    ("llama-3.2-1b", {"mode": "bf16-sr"}, {"micro_batch": 2}),
]


@pytest.mark.parametrize(("preset", "precision", "batch"), MODELS, ids=str)
@pytest.mark.parametrize("length", [64, 2048])
def test_the_quick_bound_is_above_the_exact_plan(corpus, tmp_path, preset, precision, batch, length):
    """A run is accepted without a plan only where the plan would do the same."""
    sections = content(corpus, tmp_path, precision=precision, batch=batch, data={"sequence_length": length})
    recipe = place({**sections, "model": preset if isinstance(preset, dict) else {"preset": preset}}).recipe
    assert recipe is not None
    exact = plan_needs(recipe, 1, torch.device("cpu"))["host_bytes"]
    assert exact <= machine._surely_less(recipe)


@pytest.mark.parametrize(
    ("total", "free", "found"),
    [(0.99, 0.99, "problem"), (1.01, 0.9, "free-memory"), (1.01, 1.01, None), (100, 100, None)],
)
def test_memory_is_compared_with_the_plan(corpus, tmp_path, monkeypatch, total, free, found):
    sections = content(corpus, tmp_path / "run")
    recipe = place(sections).recipe
    assert recipe is not None
    needed = plan_needs(recipe, 1, torch.device("cpu"))["host_bytes"]
    monkeypatch.setattr(machine, "memory_limit", lambda: int(total * needed))
    monkeypatch.setattr(machine, "available_memory", lambda: int(free * needed))
    if found == "problem":
        with pytest.raises(RecipeError, match=r"batch\.micro_batch = 8: the run needs .* of memory"):
            check(sections)
    else:
        assert [note.rule for note in check(sections).notes] == ([] if found is None else [found])


def without_access(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a user who may not enter folders of others; root gives up that right."""
    rights = "-dac_override,-dac_read_search"
    drop = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"] if os.geteuid() == 0 else []
    command = [*drop, sys.executable, "-m", "hlat", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder that this process may not enter."""
    folder = tmp_path / "closed"
    folder.mkdir()
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may enter every folder, and setpriv is not here")
        os.chown(folder, 65534, 65534)
    folder.chmod(0o000 if os.geteuid() else 0o700)
    return folder


def test_folders_that_may_not_be_entered_are_named_and_no_traceback(closed, recipe_file, tiny, tmp_path):
    fields = {
        "run.dir": "run/a",
        "data.path": "x.txt",
        "data.prepared_dir": "tokens",
        "data.tokenizer.path": "t.json",
        "checkpoint.init_from": "start",
        "evaluation.sets.a": "y.txt",
        "evaluation.tasks": "z.jsonl",
    }
    given = [f"{field}={closed / name}" for field, name in fields.items() if field != "evaluation.tasks"]
    given.append(f"evaluation.tasks=[{closed / 'z.jsonl'}]")
    for verb in ("check", "train"):
        done = without_access(verb, recipe_file, *tiny, *given, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        lines = done.stderr.splitlines()[1:]
        assert sorted(line.split(" = ")[0].strip() for line in lines) == sorted(
            [*list(fields)[:-1], "evaluation.tasks.0"]
        )
        assert all("ermission denied" in line for line in lines), done.stderr


def test_other_verbs_name_it_too(closed, tmp_path):
    done = without_access("generate", closed / "run", "--prompt", "x", cwd=tmp_path)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert f"{closed}/run: permission denied" in done.stderr


def test_weights_of_another_model_are_refused_before_anything_starts(corpus, tmp_path):
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"vocab_size": 512, "layers": 2, "hidden_size": 64, "intermediate_size": 176, "heads": 2, "kv_heads": 1}
    start = {"init_from": str(tmp_path)}

    def parsed(**changed):
        sections = content(corpus, tmp_path / "run", data={"tokenizer": {"vocab_size": 512}}, checkpoint=start)
        return {**sections, "model": {**model, **changed}}

    check(parsed())
    check(parsed(head_dim=32))  # as it follows from the others
    with pytest.raises(RecipeError) as caught:
        check(parsed(layers=4, kv_heads=None))
    message = str(caught.value)
    assert "weights of another model: layers 2 (here 4), kv_heads 1 (here 2)." in message
    assert f"model: {{from: {tmp_path}}}" in message
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    check(parsed(layers=4))  # this run has begun, and does not read them again


def test_a_recipe_of_the_user_s_in_the_folder_of_the_run_is_not_replaced(corpus, tmp_path):
    sections = content(corpus, tmp_path)
    own = tmp_path / RECIPE_NAME
    own.write_text("# my notes\nrun: {name: mine}\n")
    with pytest.raises(RecipeError, match=r"was not written by a run, .* Rename that file, or choose another run\.dir"):
        check(sections)
    with pytest.raises(StorageError, match="was not written by a run"):
        record_attempt(parse_recipe(sections), cast(Any, None), None)
    assert own.read_text().startswith("# my notes")
    own.write_text(f"{RECIPE_HEAD} The same run: hlat train x\n")
    check(sections)


def test_data_that_was_prepared_from_another_path_is_not_taken_for_a_path_that_is_missing(corpus, tmp_path):
    """The preparation refuses the same: it is the witness."""
    sections = content(corpus, tmp_path / "run", data={"tokenizer": {"train": "char"}, "validation": {"fraction": 0.0}})
    recipe = parse_recipe(sections, world=1)
    prepare(recipe.data, recipe.prepared_dir, workers=1)
    check(sections)
    none = tmp_path / "none.txt"
    moved = content(none, tmp_path / "run", data=sections["data"] | {"path": str(none)})
    with pytest.raises(DataError, match="prepared from another path"):
        prepare(parse_recipe(moved, world=1).data, recipe.prepared_dir, workers=1)
    with pytest.raises(RecipeError, match=f"(?s)none.txt.*holds data prepared from another path: .*{corpus}"):
        check(moved)
