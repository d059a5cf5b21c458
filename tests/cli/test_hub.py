"""Models, tokenizers and data of the Hugging Face Hub by id: its own client, and a stand-in on loopback."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors import safe_open

from hlat.data.tokenizers.training import train_bpe
from tests.support.hub_server import Hub, serve_hub

Command = Callable[..., CompletedProcess[str]]
MODEL, TEXTS = "Owner/Tiny", "hf://datasets/Owner/Text/*.txt"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Hub]:
    """A model that transformers saved, with a tokenizer, and a data set."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("hub")
    model, texts = folder / "models" / MODEL, folder / "datasets" / "Owner" / "Text"
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)).save_pretrained(model)
    texts.mkdir(parents=True)
    for file in corpus.iterdir():
        (texts / file.name).write_bytes(file.read_bytes())
    train_bpe([file.read_text() for file in sorted(corpus.iterdir())], 300).save(model)
    with serve_hub(folder) as server:
        yield server


@pytest.fixture
def recipe(tmp_path: Path, tiny_recipe: str) -> Path:
    """A recipe of a model, its tokenizer and texts of the Hub, for two steps that change nothing."""
    lines = [line for line in tiny_recipe.splitlines() if not line.startswith(("model:", "  tokenizer:"))]
    own = f"model: {{from: {MODEL}}}\n"
    (tmp_path / "recipe.yaml").write_text("\n".join(lines) + "\n" + own)
    return tmp_path / "recipe.yaml"


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> list[str]:
    steps = ["training.steps=2", "optimizer.lr=1e-30", "schedule.warmup_steps=1"]
    return [f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", *steps]


def resolved(cli: Command, hub: Hub, recipe: Path, cache: Path, *overrides: str, offline: bool = False) -> dict:
    done = cli(
        "check", recipe, "--json", "--no-files", "data.path=x", *overrides, env=hub.environment(cache, offline=offline)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(cli: Command, hub: Hub, recipe: Path, cache: Path, *overrides: str, offline: bool = False) -> str:
    done = cli("check", recipe, "--no-files", "data.path=x", *overrides, env=hub.environment(cache, offline=offline))
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_run_starts_from_a_model_of_the_hub(cli, hub: Hub, recipe: Path, run: list[str], tmp_path: Path) -> None:
    """A rate below any rounding leaves the weights of the model to the export; resuming needs no network."""
    env = hub.environment(tmp_path / "cache")
    done = cli("train", recipe, *run, env=env)
    assert done.returncode == 0, done.stderr
    done = cli("export", tmp_path / "run", "--to", tmp_path / "export", env=env)
    assert done.returncode == 0, done.stderr
    source, exported = stored(hub.folder / "models" / MODEL), stored(tmp_path / "export")
    assert source.keys() == exported.keys()
    assert all(torch.equal(source[name], exported[name]) for name in source)
    asked = len(hub.requested)
    longer = ["training.steps=3", "schedule.horizon_steps=2"]
    more = cli("train", recipe, *run, *longer, env=hub.environment(tmp_path / "cache", offline=True))
    assert more.returncode == 0, more.stderr
    assert "resumed at step 2" in more.stdout + more.stderr
    assert len(hub.requested) == asked


@pytest.mark.parametrize("offline", [True, False])
def test_prepared_texts_of_the_hub_need_no_network(
    cli, hub: Hub, recipe_file: Path, run: list[str], tmp_path: Path, offline: bool
) -> None:
    """Prepared as from local files where there is network; trained without: told so, or with a name of no host."""
    words = [recipe_file, *run, f"data.path={TEXTS}", f"data.prepared_dir={tmp_path / 'data'}"]
    done = cli("data", "prepare", *words, env=hub.environment(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    local = cli("data", "prepare", recipe_file, *run, f"data.prepared_dir={tmp_path / 'local'}")
    assert local.returncode == 0, local.stderr
    splits = [json.loads((tmp_path / name / "manifest.json").read_text())["splits"] for name in ("data", "local")]
    assert splits[0] == splits[1]
    asked = len(hub.requested)
    env = hub.environment(tmp_path / "cache", offline=offline)
    if not offline:
        env |= {"HF_ENDPOINT": "http://nowhere.invalid"}
    for verb in ("check", "train"):
        done = cli(verb, *words, env=env, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "finished at step 2" in done.stdout and "is used without it" in done.stdout
    assert len(hub.requested) == asked


def test_the_commit_is_pinned_and_cached(cli, hub: Hub, recipe: Path, tmp_path: Path) -> None:
    cache, pinned = tmp_path / "cache", f"{MODEL}@{hub.commit('models', MODEL)}"
    found = resolved(cli, hub, recipe, cache)
    assert found["model"]["layers"] == 2
    assert found["checkpoint"]["init_from"] == pinned
    assert found["data"]["tokenizer"]["path"] == pinned
    assert not list(cache.rglob("*.safetensors")), "a check has downloaded the weights"
    assert resolved(cli, hub, recipe, cache, offline=True) == found


def test_a_model_that_cannot_be_had_says_why_and_what_to_do(cli, hub: Hub, recipe: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    message = refused(cli, hub, recipe, cache, "model.from=Owner/None")
    assert "model.from = 'Owner/None'" in message
    assert "neither a file or folder here nor a model" in message
    assert "has no revision 'v9'" in refused(cli, hub, recipe, cache, f"model.from={MODEL}@v9")
    message = refused(cli, hub, recipe, cache, offline=True)
    assert "HF_HUB_OFFLINE is set" in message
    assert f"hf download {MODEL}" in message
    hub.gated.add(MODEL)
    try:
        message = refused(cli, hub, recipe, cache)
        assert "accept its terms" in message
        assert "HF_TOKEN" in message
    finally:
        hub.gated.clear()


def test_a_hub_that_does_not_answer_is_refused_at_once(cli, hub: Hub, recipe: Path, tmp_path: Path) -> None:
    env = {**hub.environment(tmp_path / "cache"), "HF_ENDPOINT": "http://nowhere.invalid"}
    done = cli("check", recipe, "--no-files", "data.path=x", env=env, timeout=1200)
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert "http://nowhere.invalid cannot be reached" in message
    assert f"hf download {MODEL}" in message
