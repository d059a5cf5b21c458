"""Recipes written wrongly: the message names the line or the field, and what to write instead."""

import codecs

import pytest

from hlat.config import RecipeError, load_recipe

GOOD = """run: {name: mine}
model: {preset: tiny-1m}
data:
  path: texts.jsonl
  sequence_length: 64
batch: {global_batch: 8}
optimizer: {lr: 3.0e-3}
training: {steps: 10}
"""

TEXTS = {
    "a tab": ("  path:", "\tpath:", "line 4, column 1: a tab begins it; indent with spaces"),
    "too far to the right": ("  sequence", "   sequence", "line 5, column 19: a colon follows where no field"),
    "no space after a colon": ("path: t", "path:t", "line 4, column 1: a field needs a colon and a space after"),
    "a bracket too few": ("{steps: 10}", "{steps: 10", "a comma or the closing bracket is missing"),
    "a bracket too many": ("{steps: 10}", "{steps: 10}}", "line 8, column 22: a closing bracket too many"),
    "a quote not closed": ("path: texts", "path: 'texts", "a quote that was opened is not closed"),
    "a text that begins with @": (
        "path: texts",
        "path: @texts",
        "line 4, column 9: a text that begins so needs",
    ),
    "a star": ("path: texts.jsonl", "path: *.jsonl", "a text that begins with * needs quotes"),
    "two documents": ("batch: {", "---\nbatch: {", "line 6, column 1: a second document begins"),
    "a section twice": (
        "batch: {",
        "run: {}\nbatch: {",
        "line 6, column 1: key 'run' stands here twice, first in",
    ),
    "a merge key": ("{preset", "{<<: 1, preset", "write the keys out, or move them to a file for include"),
    "a conflict of git": ("batch: {", "<<<<<<< HEAD\nbatch: {", "line 6 is a conflict marker of git (<<<<<<<)"),
    "fields not indented": (
        "  path: texts.jsonl\n  sequence",
        "path: texts.jsonl\nsequence",
        "data = None: must be a section",
        "sequence_length: there is no such field. It is a field of data: write data.sequence_length, or indent it",
    ),
    "a preset for a section": ("{preset: tiny-1m}", "tiny-1m", "Write model: {preset: tiny-1m}."),
    "a number for a section": ("{steps: 10}", "10", "training = 10: must be a section", "Write training: {steps: 10}."),
    "a decimal comma": ("3.0e-3", '"0,003"', "optimizer.lr = '0,003'", "Write 0.003, with a dot."),
    "a decimal comma in braces": ("3.0e-3", "0,003", "optimizer.003", "Write a dot, as in 0.003."),
    "typographic quotes": ("name: mine", "name: \u201cmine\u201d", "Its quotes are typographic"),
    "a list without brackets": ("{lr", "{betas: 0.9;0.95, lr", "must be a list. Write [0.9;0.95]."),
    "a batch of another program": ("global_batch", "batch_size", "batch.batch_size", "Here it is batch.global_batch"),
    "a field of another section": ("{lr", "{steps: 3, lr", "optimizer.steps", "It is a field of training"),
    "data parallelism": ("batch: {", "parallel: {data: 2}\nbatch: {", "parallel.data", "Here it is --nproc"),
    "a device of another program": ("name: mine", "name: mine, device: GPU", "Here it is 'cuda'."),
    "half precision": (
        "batch: {",
        "precision: {mode: fp16}\nbatch: {",
        "precision.mode = 'fp16'",
        "Here it is 'mixed'.",
    ),
    "a value that does not fit": (": 8}", ": 4, micro_batch: 8}", "micro_batch = 8: global_batch 4", "Try 2 or 4."),
    "sets without names": ("batch: {", "evaluation: {sets: [a]}\nbatch: {", "Write {NAME: VALUE}"),
}


def message_of(path, *overrides, world=None):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, world=world)
    return str(caught.value)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text(name, tmp_path):
    old, new, *says = TEXTS[name]
    assert GOOD.count(old) == 1
    (tmp_path / "mine.yaml").write_text(GOOD.replace(old, new), encoding="utf-8")
    message = message_of(tmp_path / "mine.yaml")
    assert all(words in message for words in says), message
    assert all(words not in message for words in ("while ", "could not find", "mapping values", "names no text"))


def test_the_text_itself_is_good(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert load_recipe(tmp_path / "mine.yaml").total_steps == 10


def test_utf_16_is_named(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(codecs.BOM_UTF16_LE + GOOD.encode("utf-16-le"))
    assert "it is text in UTF-16, not in UTF-8" in message_of(tmp_path / "mine.yaml")


def test_a_missing_include_names_the_file_that_includes_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("include: base.yaml\n")
    message = message_of(tmp_path / "mine.yaml")
    assert "base.yaml: cannot be read" in message and f"included by {tmp_path.resolve() / 'mine.yaml'}" in message


def test_a_model_s_config_is_recognised_and_its_fields_are_not_listed(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "architectures": ["x"]}')
    message = message_of(tmp_path / "config.json")
    assert "1 problem" in message and "model: {hf_config: FILE}" in message


def test_settings_of_another_program_each_get_their_name_and_the_sections_are_listed_once(tmp_path):
    (tmp_path / "a.yaml").write_text("learning_rate: 1\noutput_dir: x\nfoo: 1\nbar: 2\n")
    message = message_of(tmp_path / "a.yaml")
    assert "holds no section of a recipe" in message and "hlat init" in message
    assert "Here it is optimizer.lr." in message and "Here it is run.dir." in message
    assert message.count("Fields here: run, model, data") == 1 and "is required" not in message


@pytest.mark.parametrize(
    ("given", "meant"),
    [("mine", "mine.yaml"), ("mime.yaml", "mine.yaml"), ("quickstrat", "quickstart"), ("mine.yml", "mine.yaml")],
)
def test_a_name_that_is_nearly_a_recipe(given, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert f"{given}: there is no such recipe file. Did you mean {meant}?" in message_of(given)


def test_spaces_around_the_sign_of_an_override(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    message = message_of(tmp_path / "mine.yaml", "training.steps", "=", "100")
    assert "training.steps = 100: is not an override. Write training.steps=100, without spaces." in message
    assert "as in training.steps=7." in message_of(tmp_path / "mine.yaml", "training.steps:7")


def test_too_few_processes_name_no_option_which_only_the_verb_knows(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert "Try 2 or 4 processes, or" in message_of(
        tmp_path / "mine.yaml", "parallel.tensor=2", "batch.micro_batch=2", world=1
    )
