"""A recipe whose source is tokens, from the command line: it trains in both modes, and what is wrong is a sentence."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from hlat.data.tokenizers.training import train_bpe


@pytest.fixture
def arguments(tmp_path: Path, tiny_recipe: str, corpus: Path) -> list[str]:
    """A recipe of text and of tokens, a dataset of uint16, whose .bin and .idx are beside it."""
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    tokenizer = train_bpe(texts, 300)
    tokenizer.save(tmp_path / "tokenizer")
    tokens = [tokenizer.encode(text) for text in texts]
    lengths = np.array([len(one) for one in tokens], "<i4")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(tokens), len(tokens) + 1)
    begins = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    firsts = np.arange(len(tokens) + 1, dtype="<i8")
    (tmp_path / "a.idx").write_bytes(head + lengths.tobytes() + begins.astype("<i8").tobytes() + firsts.tobytes())
    (tmp_path / "a.bin").write_bytes(np.concatenate(tokens).astype("<u2").tobytes())
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:30]))
    (tmp_path / "recipe.yaml").write_text(tiny_recipe)
    sources = f"data.sources=[{{path: {tmp_path / 'a.bin'}}}, {{path: {tmp_path / 'b.jsonl'}}}]"
    run = [f"run.dir={tmp_path / 'run'}", "training.steps=6"]
    return [str(tmp_path / "recipe.yaml"), sources, f"data.tokenizer.path={tmp_path / 'tokenizer'}", *run]


@pytest.mark.parametrize("mode", ["prepared", "online"])
def test_it_trains(cli, arguments: list[str], mode: str) -> None:
    done = cli("train", *arguments, f"data.mode={mode}", "data.streams=4")
    assert done.returncode == 0, done.stderr


def test_what_is_wrong_is_a_sentence(cli, arguments: list[str], tmp_path: Path) -> None:
    data = tmp_path / "a.bin"
    content = data.read_bytes()
    faults = [
        (lambda: data.write_bytes(content[:-2]), f"{data}: truncated: "),
        (lambda: data.write_bytes(content[:-2] + b"\xff\xff"), "has the id 65535, but the ids of data.tokenizer.path"),
        (data.with_suffix(".idx").unlink, f"{data.with_suffix('.idx')} is missing"),
    ]
    for damage, message in faults:
        damage()
        for command in (["data", "prepare"], ["train"]):
            done = cli(*command, *arguments)
            assert (done.returncode, "Traceback" in done.stderr) == (2, False)
            assert message in " ".join(done.stderr.split())
