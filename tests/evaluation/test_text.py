"""Text generated from a checkpoint equals that of transformers from the same folder, including special tokens."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hlat.checkpoint import import_model
from hlat.config.sections.model import ModelConfig
from hlat.evaluation import generate_text
from hlat.model import build
from hlat.model.hf.folder import write_hf
from hlat.runtime.errors import CheckpointError
from tests.support.model.canonical import to_canonical

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

PROMPT = "w3 w9 w9 w20"
NEW = 20


def write_model(folder: Path, begin: bool) -> Path:
    """Write a Hugging Face folder; its tokenizer adds a BOS token if ``begin``."""
    words = {"<unk>": 0, "</s>": 1, "<s>": 2} | {f"w{index}": index for index in range(3, 40)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>", "<s>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    # init_std 0.4 instead of 0.02: far-apart logits, so that an additional first token changes the text
    config = ModelConfig(
        vocab_size=40, layers=2, hidden_size=32, intermediate_size=64, heads=4, init_std=0.4, max_sequence_length=64
    )
    weights = to_canonical(config, dict(build(config, device="cpu", seed=4).named_parameters()))
    return write_hf(folder / "hf", config, weights, tokenizer_dir=folder / "tokenizer", eos_id=1, bos_id=2)


def of_transformers(folder: Path) -> tuple[list[int], str]:
    """Generate with transformers; return the new tokens without special ones, and their text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0]
    new = out[prompt.input_ids.shape[1] :]
    return new.tolist(), tokenizer.decode(new, skip_special_tokens=True)


def test_the_prompt_begins_with_a_bos_token_if_the_tokenizer_adds_one(tmp_path: Path) -> None:
    texts = []
    for begin in (True, False):
        source = write_model(tmp_path / str(begin), begin)
        checkpoint = import_model(source, tmp_path / str(begin) / "imported")
        texts.append(generate_text(checkpoint, PROMPT, NEW))
        assert texts[-1] == of_transformers(source)[1]
    assert texts[0] != texts[1], "a BOS token makes a difference to this model"


def test_each_end_of_text_token_ends_the_text(tmp_path: Path) -> None:
    source = write_model(tmp_path, begin=True)
    ids, text = of_transformers(source)
    assert len(ids) == NEW
    end = {"bos_token_id": 2, "eos_token_id": [1, ids[6]]}
    (source / "generation_config.json").write_text(json.dumps(end))
    shorter, _ = of_transformers(source)
    first = ids.index(ids[6])
    assert shorter == ids[: first + 1], "transformers returns the token that ends the text"
    found = generate_text(import_model(source, tmp_path / "imported"), PROMPT, NEW)
    assert found.split() == text.split()[:first]


def test_a_checkpoint_without_a_tokenizer_is_an_error_that_says_what_would_work(tmp_path: Path) -> None:
    source = write_model(tmp_path, begin=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer.*run hlat import again"):
        generate_text(import_model(source, tmp_path / "imported"), PROMPT, NEW)
