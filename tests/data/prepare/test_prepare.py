"""Prepared data: the same bytes for any number of workers, split by document, tokens in the smallest dtype."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers

from hlat.config.sections.data import DataConfig
from hlat.data.online.prepare import prepare_online
from hlat.data.prepare.preparation import prepare
from hlat.data.prepare.verification import verify_data
from tests.support.data.corpora import documents, prose, tree, write_jsonl
from tests.support.data.preparing import LARGE, data_config
from tests.support.data.tokenizer_kinds import byte_bpe, write_tokenizer

pytestmark = pytest.mark.usefixtures("small_units")


def test_tokens_are_the_documents_in_order(small: Path, tmp_path: Path) -> None:
    prepared = prepare(data_config(small), tmp_path / "out", workers=2)
    texts = [t for t in [*documents(40, 800), *documents(20, 800, seed=1)] if t]
    texts_of: dict[str, list[str]] = {}
    for split in ("train", "validation"):
        bounds = prepared.document_boundaries(split).tolist()
        tokens = prepared.tokens(split)
        assert bounds[0] == 0 and bounds[-1] == len(tokens) == prepared.manifest.splits[split].tokens
        parts = [tokens.read(a, b).tolist() for a, b in pairwise(bounds)]
        assert all(part[-1] == prepared.tokenizer.eos_id for part in parts)
        assert [part[:-1] for part in parts] == [prepared.tokenizer.encode(prepared.tokenizer.decode(p)) for p in parts]
        texts_of[split] = [prepared.tokenizer.decode(part) for part in parts]
        assert prepared.manifest.splits[split].text_bytes == sum(len(t.encode()) for t in texts_of[split])
    held_out = set(texts_of["validation"])
    assert texts_of["train"] == [t for t in texts if t not in held_out]
    assert texts_of["validation"] == [t for t in texts if t in held_out] != []
    assert (prepared.manifest.total("null_rows"), prepared.manifest.total("empty_documents")) == (2, 1)
    assert "2 rows hold no text" in prepared.notes[0]
    assert all(shard.tokens == 5000 for shard in prepared.manifest.splits["train"].shards[:-1])
    assert len(prepared.manifest.splits["train"].shards) > 1
    assert verify_data(tmp_path / "out").fingerprint == prepared.fingerprint


@pytest.mark.parametrize("workers", [1, 3])
def test_same_bytes_for_any_number_of_workers(
    large: Path, tmp_path: Path, reference: dict[str, bytes], workers: int
) -> None:
    prepare(data_config(large, **LARGE), tmp_path / "out", workers=workers)
    assert tree(tmp_path / "out") == reference


def test_the_split_of_a_document_does_not_depend_on_other_documents(small: Path, tmp_path: Path) -> None:
    def held_out(path: Path, out: str) -> set[str]:
        prepared = prepare(data_config(path), tmp_path / out, workers=1)
        bounds = prepared.document_boundaries("validation").tolist()
        tokens = prepared.tokens("validation")
        return {prepared.tokenizer.decode(tokens.read(a, b)) for a, b in pairwise(bounds)}

    both = held_out(small, "both")
    one = held_out(small / "a.jsonl", "one")
    assert one == both & set(documents(40, 800))


def test_a_tail_split_equals_nanogpts(shared: Path, tmp_path: Path) -> None:
    file = shared / "data" / "text" / "tinyshakespeare.txt"
    text = file.read_text()
    chars = sorted(set(text))
    section = {"tokenizer": {"train": "char"}, "validation": {"by": "tail", "fraction": 0.1}}
    prepared = prepare(DataConfig.model_validate({"path": str(file), **section}), tmp_path, workers=1)
    ids = [chars.index(char) for char in text]
    cut = int(len(text) * 0.9)
    assert prepared.manifest.vocab_size == 65 and prepared.manifest.eos_id is None
    assert prepared.tokens("train").read(0, prepared.train_tokens).tolist() == ids[:cut]
    assert prepared.tokens("validation").read(0, prepared.validation_tokens).tolist() == ids[cut:]


def test_every_source_has_its_own_validation_tail(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two.txt"
    one.mkdir()
    texts = [prose(n, 700) for n in range(3)]
    for number, text in enumerate(texts[:2]):
        (one / f"{number}.txt").write_text(text)
    two.write_text(texts[2])
    section = {"tokenizer": {"train": "char"}, "validation": {"by": "tail", "fraction": 0.25}}
    sources = [{"path": str(one)}, {"path": str(two)}]
    prepared = prepare(DataConfig.model_validate({"sources": sources, **section}), tmp_path / "out", workers=2)
    first = texts[0] + texts[1]
    cuts = int(len(first) * 0.75), int(len(texts[2]) * 0.75)
    train = prepared.tokenizer.decode(prepared.tokens("train").read(0, prepared.train_tokens))
    held_out = prepared.tokenizer.decode(prepared.tokens("validation").read(0, prepared.validation_tokens))
    assert train == first[: cuts[0]] + texts[2][: cuts[1]]
    assert held_out == first[cuts[0] :] + texts[2][cuts[1] :]


def test_a_separate_validation_file_is_the_validation_split(small: Path, tmp_path: Path) -> None:
    validation = {"path": str(small / "b.jsonl")}
    prepared = prepare(data_config(small / "a.jsonl", validation=validation), tmp_path / "out", workers=1)
    train, held_out = prepared.manifest.splits["train"], prepared.manifest.splits["validation"]
    assert (train.documents, held_out.documents) == (40, 20)


def test_dtype_follows_the_vocabulary(small: Path, tmp_path: Path) -> None:
    description = json.loads(prepare(data_config(small), tmp_path / "a", workers=1).tokenizer.files["tokenizer.json"])
    # the same tokenizer with one token at id 65536, which does not fit into two bytes
    description["added_tokens"].append({**description["added_tokens"][0], "id": 65536, "content": "<|last|>"})
    filler = {f"<filler {i}>": i for i in range(400, 65536)}
    description["model"]["vocab"].update(filler)
    big = tmp_path / "tokenizer.json"
    big.write_text(json.dumps(description))
    assert tokenizers.Tokenizer.from_file(str(big)).token_to_id("<|last|>") == 65536
    section = {"tokenizer": {"path": str(big), "eos_token": "<|last|>"}}
    prepared = prepare(data_config(small, **section), tmp_path / "b", workers=1)
    assert prepared.manifest.dtype == "uint32"
    assert prepared.tokens("train").read(0, prepared.train_tokens).max() == 65536
    verify_data(tmp_path / "b")


def test_a_corpus_too_small_for_the_vocabulary_is_noted(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", ["tiny corpus"] * 3)
    config = data_config(file, tokenizer={"vocab_size": 5000}, validation={"fraction": 0})
    prepared = prepare(config, tmp_path / "out", workers=1)
    assert "too small for data.tokenizer.vocab_size = 5000" in prepared.notes[0]


@pytest.mark.parametrize("mode", ["prepared", "online"])
def test_lost_text_is_told_and_dropout_left_out(tmp_path: Path, mode: str) -> None:
    """A vocabulary without all bytes and with dropout: one note, and two preparations are the same data."""
    file = write_jsonl(tmp_path / "a.jsonl", [f"a\r\nb, some text here 中文 {i}" for i in range(40)])
    tokenizer = write_tokenizer(tmp_path / "tokenizer", byte_bpe(alphabet=False, vocab=300, dropout=0.5))
    config = data_config(file, tokenizer={"path": str(tokenizer)}, mode=mode)
    both = [
        prepare(config, tmp_path / name, workers=1)
        if mode == "prepared"
        else prepare_online(config, tmp_path / name, 99)
        for name in ("one", "two")
    ]
    [note] = [note for note in both[0].notes if "data.tokenizer.path" in note]
    assert "its BPE dropout is not used; " in note and "is lost in its tokens, as in" in note
    assert "'a\\r\\nb" in note and "'a\\nb" in note
    assert both[0].fingerprint == both[1].fingerprint


def test_progress_counts_up_to_all_bytes(large: Path, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    prepare(
        data_config(large, **LARGE),
        tmp_path / "out",
        workers=2,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    size = sum(file.stat().st_size for file in large.iterdir())
    words = seen.pop("count words", [])  # characters, if somebody looked while they were counted
    assert list(seen) == ["hash", "sample", "train tokenizer", "tokenize"]
    merges = seen.pop("train tokenizer")
    assert all(counts == sorted(counts) for counts in ([done for done, _ in steps] for steps in (words, merges)))
    assert merges[-1][0] == merges[-1][1]
    for steps in seen.values():
        assert {total for _, total in steps} == {size}
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1] == (size, size)
    assert len(seen["tokenize"]) > 5
