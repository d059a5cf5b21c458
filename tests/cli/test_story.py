"""From text to a Hugging Face folder and back with the real commands, checked with transformers on the other side."""

import json

import pytest
import torch

from hlat.checkpoint import load_model
from hlat.data.prepared.prepared_folder import open_prepared
from hlat.evaluation import evaluate_checkpoint

transformers = pytest.importorskip("transformers", reason="pip install '.[hf]'")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus, cli, tiny_recipe):
    folder = tmp_path_factory.mktemp("story")
    (folder / "recipe.yaml").write_text(tiny_recipe)
    done = cli("train", folder / "recipe.yaml", f"data.path={corpus}", f"run.dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    exported = cli("export", folder / "run", "--to", folder / "hf")
    assert exported.returncode == 0, exported.stderr
    return folder


def test_the_loss_falls_and_the_metrics_are_complete(trained):
    lines = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.75 * lines[0]["loss"]
    assert lines[-1]["val_loss"] < lines[3]["val_loss"], "step 40 against step 20"
    keys = {
        "step",
        "tokens",
        "loss",
        "grad_norm",
        "param_norm",
        "lr",
        "tokens_per_second",
        "mfu",
        "memory_bytes",
        "seconds",
    }
    assert all(keys <= line.keys() for line in lines)
    assert {"val_loss", "val_bits_per_byte"} <= lines[-1].keys()


def test_bits_per_byte_follow_from_the_loss_and_the_text(trained):
    """Over the whole split: total nats / ln 2 / bytes of the text that the predicted tokens stand for."""
    result = evaluate_checkpoint(trained / "run")
    prepared = open_prepared(trained / "run" / "data")
    tokens = prepared.tokens("validation").read(0, prepared.validation_tokens)
    text_bytes = int(prepared.token_bytes[tokens[1:]].sum())
    nats = result.loss * result.tokens
    assert result.tokens == len(tokens) - 1
    assert result.bits_per_byte == pytest.approx(nats / 0.6931471805599453 / text_bytes, rel=1e-12)


def test_transformers_loads_the_export_and_agrees(trained):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "hf")
    ours, _ = load_model(trained / "run", torch.device("cpu"))
    text = "the sailor remembers a wörd."
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        gap = (ours(ids) - theirs(ids).logits).abs().max()
    # two layers, contractions over at most 96 terms of size < 1: a few hundred roundings of 6e-8
    assert gap < 1e-4


def test_generate_is_transformers_greedy_text(trained, cli):
    done = cli("generate", trained / "run", "--prompt", "the cat", "--max-tokens", "24")
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "hf")
    ids = tokenizer("the cat", return_tensors="pt")
    theirs = model.generate(**ids, max_new_tokens=24, do_sample=False)
    assert done.stdout.rstrip("\n") == tokenizer.decode(theirs[0], skip_special_tokens=True)


def test_import_of_the_export_is_the_same_model_and_a_run_starts_from_it(trained, cli, corpus):
    imported = cli("import", trained / "hf", "--to", trained / "imported")
    assert imported.returncode == 0, imported.stderr
    back = cli("export", trained / "imported", "--to", trained / "hf2")
    assert back.returncode == 0, back.stderr
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (trained / "hf" / name).read_bytes() == (trained / "hf2" / name).read_bytes(), name
    done = cli(
        "train", trained / "recipe.yaml", f"data.path={corpus}", f"run.dir={trained / 'continued'}",
        f"data.tokenizer.path={trained / 'hf'}", f"checkpoint.init_from={trained / 'imported'}",
        "training.steps=2", "schedule.warmup_steps=1", "training.log_every=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = json.loads((trained / "continued" / "metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((trained / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert first["loss"] < last["loss"] + 0.5, "it goes on from the trained weights, not from chance (5.8)"


def test_a_second_export_into_the_same_folder_is_refused(trained, cli):
    before = (trained / "hf" / "model.safetensors").read_bytes()
    done = cli("export", trained / "run", "--to", trained / "hf")
    assert done.returncode == 2 and str(trained / "hf") in done.stderr
    assert (trained / "hf" / "model.safetensors").read_bytes() == before
