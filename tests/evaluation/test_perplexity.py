"""Evaluation finds the data of a run, also after a move, and refuses data of another tokenizer."""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import normalizers

from hlat.checkpoint import collect, export_hf, import_model
from hlat.checkpoint.protocol.reader import resolve
from hlat.checkpoint.protocol.store import CheckpointStore
from hlat.config import Recipe
from hlat.config.load import parse_recipe
from hlat.config.sections.data import DataConfig
from hlat.data.prepare.preparation import prepare
from hlat.evaluation import Perplexity, evaluate_checkpoint
from hlat.model import build, collect_local_parameters
from hlat.runtime.errors import CheckpointError, DataError
from tests.support.data.corpora import write_jsonl
from tests.support.data.tokenizer_kinds import byte_bpe, write_tokenizer

TINY = {"layers": 1, "hidden_size": 32, "intermediate_size": 64, "heads": 2}

NUMBERS = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}


def save_run(folder: Path, recipe: Recipe) -> Path:
    """Write a run with its data and a checkpoint, as training does; return its folder."""
    prepared = prepare(recipe.data, recipe.prepared_dir, workers=1)
    meta = {"recipe": recipe.model_dump(mode="json"), "data_fingerprint": prepared.fingerprint}
    files = {f"tokenizer/{file.name}": file for file in (prepared.dir / "tokenizer").iterdir()}
    model = build(recipe.model, device="cpu", seed=1)
    CheckpointStore(folder / "checkpoints", 1).save(
        1, collect(recipe.model, collect_local_parameters(model)), meta, files
    )
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run, and next to it the config.json from which its recipe took the model."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "config.json").write_text(json.dumps(NUMBERS))
    recipe = parse_recipe(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"hf_config": str(folder / "config.json")},
            "data": {"path": str(corpus), "sequence_length": 32, "validation": {"fraction": 0.2}},
            "training": {"steps": 1},
            "precision": {"mode": "fp32"},
        }
    )
    save_run(folder / "run", recipe)
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of that run in another folder, which a test may change."""
    shutil.copytree(original / "run", tmp_path / "moved")
    return tmp_path / "moved"


@pytest.fixture(scope="module")
def expected(original: Path) -> Perplexity:
    return evaluate_checkpoint(original / "run")


def test_a_run_is_evaluated_on_its_own_data_also_after_it_was_moved(
    original: Path, run: Path, expected: Perplexity, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = (original / "run").rename(original / "gone")
    try:
        monkeypatch.chdir(run.parent)
        assert evaluate_checkpoint(run) == evaluate_checkpoint("moved") == expected
        monkeypatch.chdir(run / "checkpoints")
        assert evaluate_checkpoint("step-00000001") == expected
        assert evaluate_checkpoint(run, data=run / "data") == expected
    finally:
        hidden.rename(original / "run")
    (run / "data" / "manifest.json").unlink()
    with pytest.raises(DataError, match=str(run / "data")):
        evaluate_checkpoint(run)


def test_a_checkpoint_outside_its_run_folder_needs_the_data_option(
    run: Path, expected: Perplexity, tmp_path: Path
) -> None:
    alone = resolve(run).rename(tmp_path / "best")
    with pytest.raises(DataError, match="--data"):
        evaluate_checkpoint(alone)
    assert evaluate_checkpoint(alone, data=run / "data") == expected


@pytest.mark.parametrize("now", [None, NUMBERS | {"initializer_range": 0.5, "rms_norm_eps": 1.0}])
def test_the_hugging_face_config_of_the_recipe_is_not_read_again(
    original: Path, run: Path, expected: Perplexity, now: dict[str, object] | None
) -> None:
    file = original / "config.json"
    content = file.read_text()
    try:
        file.unlink()
        if now is not None:
            file.write_text(json.dumps(now))
        assert evaluate_checkpoint(run) == expected
    finally:
        file.write_text(content)


def test_a_recipe_of_another_version_is_refused(tmp_path: Path, run: Path) -> None:
    meta = {"model": {"vocab_size": 8, "layers": 1, "hidden_size": 8, "intermediate_size": 8, "heads": 1}}
    config = Recipe.model_fields["model"].annotation.model_validate(meta["model"])
    state = collect(config, collect_local_parameters(build(config, device="cpu", seed=0)))
    CheckpointStore(tmp_path / "other" / "checkpoints", 1).save(1, state, meta | {"recipe": {"model": {"experts": 8}}})
    with pytest.raises(CheckpointError, match="this version cannot read its recipe"):
        evaluate_checkpoint(tmp_path / "other", data=run / "data")


def other_data(folder: Path, vocab_size: int) -> Path:
    """Prepared data of other text, with a tokenizer trained on it."""
    rng = random.Random(0)
    (folder / "other.txt").write_text(" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(5000)))
    section = {"path": str(folder / "other.txt"), "validation": {"fraction": 0.2, "by": "tail"}}
    config = DataConfig.model_validate(section | {"tokenizer": {"vocab_size": vocab_size}})
    prepared = prepare(config, folder / "other", workers=1)
    assert prepared.manifest.vocab_size == vocab_size
    return prepared.dir


@pytest.mark.parametrize("vocab_size", [290, 320, 400], ids=["smaller", "as large", "larger"])
def test_data_of_another_tokenizer_is_refused(run: Path, tmp_path: Path, vocab_size: int) -> None:
    """With an equal vocabulary size the loss would be meaningless; with a larger one, ids exceed the embedding."""
    other = other_data(tmp_path, vocab_size)
    with pytest.raises(DataError, match=r"another tokenizer.*data\.tokenizer\.path"):
        evaluate_checkpoint(run, data=other)


def test_imported_weights_are_evaluated_on_the_given_data(run: Path, expected: Perplexity, tmp_path: Path) -> None:
    imported = import_model(export_hf(run, tmp_path / "hf"), tmp_path / "imported")
    with pytest.raises(DataError, match="--data"):
        evaluate_checkpoint(imported)
    found = evaluate_checkpoint(imported, data=run / "data")
    assert found.tokens == expected.tokens
    # the same windows of 32 tokens in batches of another size: fp32 logits differ by a few roundings of 2^-24
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)


def test_an_imported_model_with_a_long_context_is_evaluated_in_shorter_windows(run: Path, tmp_path: Path) -> None:
    """One window of a million tokens would need terabytes of attention scores and logits."""
    hf = export_hf(run, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text()) | {"max_position_embeddings": 1 << 20}
    (hf / "config.json").write_text(json.dumps(config))
    found = evaluate_checkpoint(import_model(hf, tmp_path / "imported"), data=run / "data")
    assert math.isfinite(found.loss)


def test_an_imported_model_without_a_tokenizer_needs_embedding_rows_for_all_ids(run: Path, tmp_path: Path) -> None:
    hf = export_hf(run, tmp_path / "hf")
    for file in hf.glob("*token*"):
        file.unlink()
    imported = import_model(hf, tmp_path / "imported")
    assert math.isfinite(evaluate_checkpoint(imported, data=run / "data").loss)
    with pytest.raises(DataError, match="400 tokens, the model only 320"):
        evaluate_checkpoint(imported, data=other_data(tmp_path, 400))


def test_a_perplexity_that_overflows_a_float_is_infinite() -> None:
    assert Perplexity(800.0, 1.0, 1).perplexity == math.inf
    assert Perplexity(math.log(7), 1.0, 1).perplexity == pytest.approx(7)


def test_bits_per_byte_divide_by_the_text_also_if_the_tokenizer_normalizes(tmp_path: Path) -> None:
    """Witness: the bytes of the validation documents; the tokens spell a third of those of the wide source."""
    wide, plain = "ＷＩＤＥ１２３４" * 5, "plain text " * 4
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [text] * 40) for name, text in (("w", wide), ("p", plain))]
    tokenizer = write_tokenizer(tmp_path / "tokenizer", byte_bpe(vocab=320, normalizer=normalizers.NFKC()))
    sources = [{"path": str(path), "name": path.stem} for path in paths]
    recipe = parse_recipe(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {**TINY, "vocab_size": 320},
            "data": {
                "sources": sources,
                "sequence_length": 32,
                "tokenizer": {"path": str(tokenizer)},
                "validation": {"fraction": 0.5, "by": "tail"},
            },
            "training": {"steps": 1},
            "precision": {"mode": "fp32"},
        }
    )
    found = evaluate_checkpoint(save_run(tmp_path / "run", recipe))
    total = 0
    for name, text in (("w", wide), ("p", plain)):
        each, size = found.sources[name], 20 * len(text.encode())  # the tail of 40 equal documents is 20 of them
        total += size
        counted = each.loss * each.tokens / math.log(2) / each.bits_per_byte
        # only the first token of the split has no prediction; a token spells at most a document
        assert size - len(text.encode()) < counted <= size + 1e-6 * size, name
    counted = found.loss * found.tokens / math.log(2) / found.bits_per_byte
    assert total - len(wide.encode()) < counted <= total * (1 + 1e-6)
